//! Unit tests of placing call graphs on sessions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::device::{DeviceApi, DeviceAttribute, Devices};
use crate::function::Rest;
use crate::tensor::{TensorView, TensorViewMut};
use crate::{
    DataType, Device, DeviceDescription, DeviceType, ErrorKind, LocalSession, LocalValue, Operation, Registry, Request,
    Result, RpcError, RpcSession, Session, Submission, Value, VirtualDevice, dlpack,
};

const F32: DataType = DataType::F32;

fn device(text: &str, target: &str, scopes: &[&str]) -> DeviceDescription {
    DeviceDescription {
        device: text.parse().unwrap(),
        target: target.parse().unwrap(),
        memory_scopes: scopes.iter().map(|scope| (*scope).to_owned()).collect(),
    }
}

/// A board with a processor, and a machine with two GPUs.
fn sites() -> Vec<Site> {
    vec![
        Site::new("board", vec![device("cpu:0", "llvm -mtriple=aarch64", &[])]),
        Site::new(
            "gpus",
            vec![
                device("cuda:0", "cuda -arch=sm_90", &["host"]),
                device("cuda:1", "cuda -arch=sm_90", &["host"]),
                device("cpu:0", "llvm -mtriple=x86_64", &[]),
            ],
        ),
    ]
}

fn on(text: &str) -> VirtualDevice {
    text.parse().unwrap()
}

fn call(graph: &mut CallGraph, name: &str, arguments: &[ValueId]) -> CallId {
    graph.call(name, arguments.iter().map(|value| (*value).into()).collect(), &[(F32, &[2])])
}

fn location(plan: &Plan, edge: impl Into<Edge>) -> String {
    plan.location(edge).unwrap().to_string()
}

#[test]
fn unconstrained_tensors_are_placed_where_they_are_used() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let a = call(&mut graph, "a", &[x.into()]);
    let b = call(&mut graph, "b", &[a.result(0), x.into()]);
    let y = graph.output("y", b.result(0));
    graph.constrain(b, on("cuda:1"), "");
    let plan = graph.plan(&sites()).unwrap();
    assert_eq!(plan.copies(), 0);
    for edge in [x.into(), a.into(), b.into(), y.into(), b.argument(1)] {
        assert_eq!(location(&plan, edge), "gpus cuda:1 global");
    }
    assert_eq!(plan.location(b).unwrap().virtual_device(), on("cuda:1,scope=global,target=cuda -arch=sm_90"));
    assert!(plan.location(b.argument(2)).is_none());
}

#[test]
fn there_is_one_copy_for_each_value_and_location() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    graph.constrain(x, Constraint::session("board"), "camera");
    let calls: Vec<_> = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
        .into_iter()
        .map(|location| {
            let made = call(&mut graph, "f", &[x.into(), x.into()]);
            graph.constrain(made, on(location), "");
            made
        })
        .collect();
    let sum = call(&mut graph, "sum", &calls.iter().map(|call| call.result(0)).collect::<Vec<_>>());
    graph.constrain(sum, Constraint::session("board"), "");
    graph.output("sum", sum.result(0));
    let plan = graph.plan(&sites()).unwrap();
    let copies: Vec<_> =
        plan.steps().filter(|step| matches!(step, Step::Copy { .. })).map(|step| step.to_string()).collect();
    assert_eq!(
        copies,
        [
            "copy input 'x' from board cpu:0 global to gpus cuda:0 global",
            "copy input 'x' from board cpu:0 global to gpus cuda:1 global",
            "copy result #0 of call #0 'f' from gpus cuda:0 global to board cpu:0 global",
            "copy result #0 of call #1 'f' from gpus cuda:1 global to board cpu:0 global",
            "copy result #0 of call #2 'f' from gpus cuda:0 global to board cpu:0 global",
            "copy result #0 of call #3 'f' from gpus cuda:1 global to board cpu:0 global",
        ]
    );
    assert!(plan.to_string().ends_with("call #4 'sum' on board cpu:0 global\noutput 'sum' on board cpu:0 global\n"));
}

#[test]
fn an_argument_can_lie_elsewhere_than_its_call() {
    let mut graph = CallGraph::new();
    let (x, shape) = (graph.input("x", F32, &[2]), graph.input("shape", DataType::I64, &[1]));
    let f = call(&mut graph, "f", &[x.into(), shape.into()]);
    graph.constrain(f, on("cuda:1"), "");
    graph.constrain(f.argument(1), on("cpu"), "shapes are read by the host");
    let g = call(&mut graph, "g", &[f.result(0)]);
    graph.constrain(g.argument(0), on("*,scope=host"), "it streams");
    graph.constrain(g, on("cuda:1"), "");
    graph.constrain(f, on("*,scope=global"), "");
    let plan = graph.plan(&sites()).unwrap();
    // The input lies where it is used, so that only the result is copied.
    assert_eq!(location(&plan, shape), "gpus cpu:0 global");
    assert_eq!(location(&plan, g.argument(0)), "gpus cuda:1 host");
    assert_eq!(plan.copies(), 1, "{plan}");

    // Only one session has both devices.
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    graph.constrain(f.argument(0), on("cuda"), "it computes");
    graph.constrain(f, on("cpu"), "it starts kernels");
    let plan = graph.plan(&sites()).unwrap();
    assert_eq!(
        (location(&plan, f), location(&plan, f.argument(0))),
        ("gpus cpu:0 global".into(), "gpus cuda:0 global".into())
    );
    let error = graph.plan(&sites()[..1]).unwrap_err().to_string();
    let expected = "no device is cpu beside cuda, as required by cuda of argument #0 of call #0 'f' (it computes) \
                    and cpu of call #0 'f' (it starts kernels)";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_constrained_argument_places_the_call_that_makes_it() {
    // A constraint that repeats the call's own changes nothing.
    for (own, of_call, expected) in [
        ("cuda:1", "cuda:1", "gpus cuda:1 global"),
        ("*", "cuda:1", "gpus cuda:1 global"),
        ("*,scope=host", "cuda:1,scope=global", "gpus cuda:0 host"),
        ("cpu", "cuda:1", "gpus cpu:0 global"),
    ] {
        let mut graph = CallGraph::new();
        let x = graph.input("x", F32, &[2]);
        let a = call(&mut graph, "a", &[x.into()]);
        let f = call(&mut graph, "f", &[a.result(0)]);
        graph.constrain(f.argument(0), on(own), "");
        graph.constrain(f, Constraint::from(on(of_call)).in_session("gpus"), "");
        let plan = graph.plan(&sites()).unwrap();
        assert_eq!(location(&plan, a), expected, "{own}");
        assert_eq!(location(&plan, x), expected, "{own}");
    }
}

#[test]
fn an_argument_lies_in_the_session_of_its_call() {
    let mut graph = CallGraph::new();
    let (x, shape) = (graph.input("x", F32, &[2]), graph.input("shape", DataType::I64, &[1]));
    let f = call(&mut graph, "f", &[x.into(), shape.into()]);
    graph.constrain(f.argument(1), Constraint::session("board"), "it is made there");
    graph.constrain(f, Constraint::session("gpus"), "they are fast");
    let error = graph.plan(&sites()).unwrap_err().to_string();
    assert_eq!(
        error,
        "argument #1 of call #0 'f' cannot be placed: session 'gpus' of call #0 'f' \
         (they are fast) and session 'board' of argument #1 of call #0 'f' \
         (it is made there) disagree on the session"
    );
}

#[test]
fn a_conflict_names_both_constraints_and_where_they_come_from() {
    let fields = [
        ("cuda:0", "cpu:0", "device type"),
        ("cuda:0", "cuda:1", "device number"),
        ("cuda,target=cuda -arch=sm_90", "*,target=cuda -arch=sm_80", "target"),
        ("*,scope=host", "*,scope=global", "memory scope"),
    ];
    for (first, second, field) in fields {
        let mut graph = CallGraph::new();
        let x = graph.input("x", F32, &[2]);
        let f = call(&mut graph, "f", &[x.into()]);
        graph.constrain(f, on(first), "one");
        graph.constrain(f.result(0), on(second), "two");
        let error = graph.plan(&sites()).unwrap_err();
        let PlacementError::Conflict { field: found, origins, edge } = &error else { panic!("{error}") };
        assert_eq!((*found, &**edge), (field, "call #0 'f'"));
        assert_eq!((&*origins.0.constraint, &*origins.0.reason), (&*on(first).to_string(), "one"));
        assert_eq!((&*origins.1.constraint, &*origins.1.reason), (&*on(second).to_string(), "two"));
        assert_eq!(RpcError::from(error).kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn an_unsatisfiable_constraint_is_reported_with_its_origins_and_the_devices() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    graph.constrain(x, on("vulkan"), "shaders");
    graph.constrain(x, Constraint::session("board"), "");
    let error = graph.plan(&sites()[..1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "input 'x' cannot be placed: no device is vulkan in session 'board', as required by \
         vulkan of input 'x' (shaders) and session 'board' of input 'x'; \
         there are cpu:0 'llvm -mtriple=aarch64' with memory global in session 'board'"
    );
    assert_eq!(RpcError::from(error).kind(), ErrorKind::DeviceUnavailable);
    let error = graph.plan(&[]).unwrap_err().to_string();
    assert!(error.ends_with("there are none"), "{error}");
}

/// Two constraints that agree, but that no device satisfies together, are a copy and no error.
#[test]
fn constraints_that_no_single_device_satisfies_cause_a_copy() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    graph.constrain(x, Constraint::session("board"), "");
    graph.constrain(f, on("cuda"), "");
    assert_eq!(graph.plan(&sites()).unwrap().copies(), 1);
}

#[test]
fn the_default_applies_to_unconstrained_edges_and_gives_way() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    let y = graph.input("y", F32, &[2]);
    let g = call(&mut graph, "g", &[y.into()]);
    graph.constrain(g, on("cpu"), "");
    assert_eq!(location(&graph.plan(&sites()).unwrap(), f), "board cpu:0 global");
    graph.default_location(Constraint::from(on("cuda:1,scope=host")).in_session("gpus"));
    let plan = graph.plan(&sites()).unwrap();
    assert_eq!(location(&plan, f), "gpus cuda:1 host");
    // There is no cpu:1, nor a cpu with such memory.
    assert_eq!(location(&plan, g), "gpus cpu:0 global");
    graph.default_location(Constraint::session("nowhere"));
    assert_eq!(location(&graph.plan(&sites()).unwrap(), f), "board cpu:0 global");
}

#[test]
fn an_output_is_delivered_where_it_is_constrained_to() {
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    let [here, there] = ["here", "there"].map(|name| graph.output(name, f.result(0)));
    graph.constrain(f, on("cuda:0"), "");
    graph.constrain(there, Constraint::session("board"), "people look at it");
    let plan = graph.plan(&sites()).unwrap();
    assert_eq!(
        (location(&plan, here), location(&plan, there)),
        ("gpus cuda:0 global".into(), "board cpu:0 global".into())
    );
    assert_eq!(plan.copies(), 1);

    // A location that it is copied to anyway is used.
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    let out = graph.output("x", x);
    graph.constrain(x, Constraint::session("board"), "");
    graph.constrain(f, on("cuda:1"), "");
    graph.constrain(out, Constraint::session("gpus"), "");
    let plan = graph.plan(&sites()).unwrap();
    assert_eq!((location(&plan, out), plan.copies()), ("gpus cuda:1 global".into(), 1));
}

#[test]
fn invalid_graphs_are_refused() {
    let wrong = |graph: &CallGraph, part: &str| {
        let error = graph.plan(&sites()).unwrap_err();
        assert!(matches!(error, PlacementError::Graph(_)), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    let mut other = CallGraph::new();
    let strangers = (0..3).map(|number| other.input(&number.to_string(), F32, &[2])).last().unwrap();

    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let f = call(&mut graph, "f", &[x.into()]);
    let sound = graph.clone();
    graph.input("x", F32, &[2]);
    wrong(&graph, "two inputs called 'x'");
    graph = sound.clone();
    call(&mut graph, "g", &[strangers.into()]);
    wrong(&graph, "call #1 'g' takes a tensor that no earlier call makes");
    graph = sound.clone();
    call(&mut graph, "g", &[f.result(1)]);
    wrong(&graph, "no earlier call makes");
    graph = sound.clone();
    graph.output("y", strangers);
    wrong(&graph, "output 'y' is of a tensor that the graph does not have");
    graph = sound.clone();
    graph.constrain(f.argument(1), on("cpu"), "");
    wrong(&graph, "cpu is required of Argument(CallId(0), 1), which is not a tensor of the graph");
    graph = sound.clone();
    graph.input("huge", F32, &[i64::MAX, i64::MAX]);
    wrong(&graph, "is impossible");
    let twice = [sites(), sites()].concat();
    assert!(sound.plan(&twice).unwrap_err().to_string().contains("two sites called 'board'"));
}

/// Random graphs with random constraints: the plan satisfies every constraint, or names two that
/// conflict.
fn graphs() -> impl Strategy<Value = (CallGraph, Vec<(Edge, Constraint)>)> {
    let locations = ["cpu", "cuda", "cuda:1", "*:0", "*,scope=host", "*,target=cuda -arch=sm_90", "*"];
    let sessions = [None, None, Some("board"), Some("gpus")];
    let calls = prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 1..4), 1..8);
    let constraint = (
        any::<prop::sample::Index>(),
        prop::sample::select(locations.to_vec()),
        prop::sample::select(sessions.to_vec()),
    );
    (calls, prop::collection::vec(constraint, 0..8)).prop_map(|(calls, constraints)| {
        let mut graph = CallGraph::new();
        let mut values: Vec<ValueId> = ["x", "y"].map(|name| graph.input(name, F32, &[2]).into()).into();
        let mut edges: Vec<Edge> = values.iter().map(|value| (*value).into()).collect();
        for arguments in calls {
            let arguments: Vec<_> = arguments.iter().map(|at| *at.get(&values)).collect();
            let made = call(&mut graph, &format!("f{}", arguments.len()), &arguments);
            edges.extend((0..arguments.len()).map(|index| made.argument(index)).chain([made.into()]));
            values.push(made.result(0));
        }
        edges.push(graph.output("out", *values.last().unwrap()).into());
        let constraints: Vec<(Edge, Constraint)> = constraints
            .into_iter()
            .map(|(at, device, session)| {
                let constraint = Constraint { session: session.map(str::to_owned), ..on(device).into() };
                (*at.get(&edges), constraint)
            })
            .collect();
        for (edge, constraint) in &constraints {
            graph.constrain(*edge, constraint.clone(), "");
        }
        (graph, constraints)
    })
}

/// Returns true if the constraints on every single edge can be satisfied; copies join the edges.
fn has_plan(graph: &CallGraph, constraints: &[(Edge, Constraint)], sites: &[Site]) -> bool {
    let devices =
        |edge: Edge| constraints.iter().filter(move |(of, _)| *of == edge).map(|(_, constraint)| &constraint.device);
    let joined = |edge: Edge| devices(edge).try_fold(VirtualDevice::default(), |all, one| all.join(one));
    let is_at = |edge: Edge, site: &Site| {
        let sessions =
            constraints.iter().filter(|(of, _)| *of == edge).filter_map(|(_, constraint)| constraint.session.as_ref());
        joined(edge).is_some_and(|wanted| site.devices.iter().any(|device| device.satisfies(&wanted)))
            && sessions.into_iter().all(|session| *session == site.name)
    };
    let alone =
        (0..graph.inputs.len()).map(|input| InputId(input).into()).chain([OutputId(0).into()]).map(|edge| vec![edge]);
    let calls = graph.calls.iter().enumerate().map(|(number, call)| {
        let arguments = (0..call.arguments.len()).map(|index| CallId(number).argument(index));
        arguments.filter(|edge| devices(*edge).next().is_some()).chain([CallId(number).into()]).collect::<Vec<Edge>>()
    });
    alone.chain(calls).all(|together| sites.iter().any(|site| together.iter().all(|edge| is_at(*edge, site))))
}

proptest! {
    #[test]
    fn plans_keep_every_constraint((graph, constraints) in graphs()) {
        let sites = sites();
        let plan = match (graph.plan(&sites), has_plan(&graph, &constraints, &sites)) {
            (Ok(plan), true) => plan,
            (Err(_), false) => return Ok(()),
            (outcome, has_plan) => return Err(TestCaseError::fail(format!("{outcome:?}, and a plan: {has_plan}"))),
        };
        for (edge, constraint) in &constraints {
            let location = plan.location(*edge).unwrap();
            prop_assert!(constraint.session.as_ref().is_none_or(|session| *session == location.session));
            prop_assert!(constraint.device.memory_scope().is_none_or(|scope| scope == location.memory_scope));
            let site = sites.iter().find(|site| site.name == location.session).unwrap();
            let device = site.devices.iter().find(|device| device.device == location.device).unwrap();
            prop_assert!(device.satisfies(&constraint.device));
        }
        // The tensors of a step are made before it, where they are needed, and none is made twice
        // in one location.
        let mut made: Vec<(ValueId, &Location)> = Vec::new();
        for step in &plan.planned {
            let (needs, makes) = match step {
                plan::PlannedStep::Input { to, .. } => (&[][..], std::slice::from_ref(to)),
                plan::PlannedStep::Copy { from, to } => (std::slice::from_ref(from), std::slice::from_ref(to)),
                plan::PlannedStep::Call { tensors, results, .. } => (&tensors[..], &results[..]),
            };
            let tensor = |slot: &usize| (plan.tensors[*slot].value, &plan.tensors[*slot].location);
            prop_assert!(needs.iter().map(tensor).all(|need| made.contains(&need)));
            if let plan::PlannedStep::Call { call, tensors, .. } = step {
                for (index, slot) in tensors.iter().enumerate() {
                    let taken = plan.location(call.argument(index)).unwrap();
                    prop_assert!(plan.tensors[*slot].location.is_memory_of(taken));
                }
            }
            for make in makes.iter().map(tensor) {
                prop_assert!(!made.iter().any(|(value, location)| *value == make.0 && location.is_memory_of(make.1)));
                made.push(make);
            }
        }
        prop_assert_eq!(plan.to_string(), graph.plan(&sites).unwrap().to_string());
    }
}

/// `cpu` under another name: another device with memory of its own, as far as sessions can tell.
struct Fake(DeviceType, &'static str);

impl DeviceApi for Fake {
    fn kind(&self) -> DeviceType {
        self.0
    }

    fn count(&self) -> Result<i32> {
        Ok(2)
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        Ok(match attribute {
            DeviceAttribute::Exists => Value::Bool((0..2).contains(&index)),
            DeviceAttribute::MemoryScopes => Value::List(vec!["host".into()]),
            DeviceAttribute::Target if !self.1.is_empty() => self.1.into(),
            _ => Value::Null,
        })
    }

    fn allocate(&self, _: i32, request: &crate::device::AllocRequest<'_>) -> Result<Box<dyn crate::device::Memory>> {
        assert!(["global", "host"].contains(&request.scope.unwrap()));
        let request = crate::device::AllocRequest { scope: None, ..*request };
        crate::device::CpuDevice::default().allocate(0, &request)
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn crate::device::Stream>> {
        Err(RpcError::unsupported("no streams"))
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn crate::device::Stream>> {
        crate::device::CpuDevice::default().default_stream(0)
    }
}

/// Adds the function by which a session lets steps follow each other, as `rpc-server` has it.
fn add_echo(registry: &Registry) {
    registry.add_inline("rpc.echo", |value: LocalValue, _: Rest| value);
}

/// A session like that of `plain_session`, which lets steps follow each other.
fn session(registry: Registry) -> (Session, Arc<AtomicUsize>) {
    add_echo(&registry);
    plain_session(registry)
}

/// A session with the functions of the tests, one device of another kind, and a count of the calls.
fn plain_session(registry: Registry) -> (Session, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    registry.add("add", move |a: TensorView, b: TensorView, by: f32, mut y: TensorViewMut| -> Result<()> {
        count.fetch_add(1, Ordering::Relaxed);
        let (a, b) = (a.as_slice::<f32>()?, b.as_slice::<f32>()?);
        let y = y.as_mut_slice::<f32>()?;
        y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a + b + by);
        Ok(())
    });
    registry.add("fail", |_: TensorView, _: TensorViewMut| -> Result<()> {
        Err(RpcError::new(ErrorKind::Application, "not today"))
    });
    let devices = Devices::new().with(Arc::new(Fake(DeviceType::EXT_DEV, "")));
    (Session::new(LocalSession::builder(registry).devices(devices).build()), calls)
}

fn both_sites(sessions: &[(&str, Session)]) -> Vec<Site> {
    let of = |(name, session): &(&str, Session)| crate::blocking::block_on(Site::of(name, session)).unwrap().unwrap();
    sessions.iter().map(of).collect()
}

fn add(graph: &mut CallGraph, a: ValueId, b: ValueId, by: f64, len: i64) -> CallId {
    graph.call("add", vec![a.into(), b.into(), Value::Float(by).into()], &[(F32, &[len])])
}

#[test]
fn a_plan_runs_over_sessions_and_devices() {
    let sessions = [("one", session(Registry::new()).0), ("two", session(Registry::new()).0)];
    let sites = both_sites(&sessions);
    let found: Vec<_> = sites[0].devices.iter().map(|device| device.device.to_string()).collect();
    assert_eq!(found, ["cpu:0", "ext_dev:0", "ext_dev:1"]);
    assert_eq!(sites[0].devices[1].target.to_string(), "ext_dev");

    // More than one piece of a copy between sessions, and not a whole number of them.
    let len = 2 * (4 << 20) / 4 + 3;
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[len]);
    let a = add(&mut graph, x.into(), x.into(), 1.0, len);
    let b = add(&mut graph, a.result(0), x.into(), 10.0, len);
    let c = add(&mut graph, b.result(0), a.result(0), 100.0, len);
    graph.output("c", c.result(0));
    graph.output("a", a.result(0));
    graph.constrain(a, Constraint::from(on("ext_dev:1")).in_session("one"), "");
    graph.constrain(b, Constraint::from(on("cpu")).in_session("two"), "");
    graph.constrain(c, Constraint::from(on("ext_dev,scope=host")).in_session("two"), "");
    let plan = graph.plan(&sites).unwrap();
    let input: Vec<f32> = (0..len).map(|at| (at % 1000) as f32).collect();
    let outputs = plan.run(&sessions, vec![("x", dlpack::to_bytes(&input).into())]).wait().unwrap();
    let read = |name: &str| {
        let tensor = &outputs[name];
        tensor.session().download::<f32>(tensor).wait().unwrap()
    };
    assert!(read("a").iter().zip(&input).all(|(a, x)| *a == x + x + 1.0));
    assert!(read("c").iter().zip(&input).all(|(c, x)| *c == (x + x + 1.0) + x + 10.0 + (x + x + 1.0) + 100.0));
    assert_eq!(outputs["c"].device(), Device::new(DeviceType::EXT_DEV, 0));
}

/// Two calls that only return together, on two sessions and on one.
#[test]
fn independent_steps_run_at_the_same_time() {
    let both = Arc::new(Barrier::new(2));
    let meeting = |both: &Arc<Barrier>| {
        let (registry, both) = (Registry::new(), both.clone());
        registry.add("meet", move |_: TensorView, _: TensorViewMut| {
            both.wait();
        });
        session(registry).0
    };
    let sessions = [("one", meeting(&both)), ("two", meeting(&both))];
    for second in ["one", "two"] {
        let mut graph = CallGraph::new();
        let x = graph.input("x", F32, &[2]);
        for name in ["one", second] {
            let met = call(&mut graph, "meet", &[x.into()]);
            graph.constrain(met, Constraint::session(name), "");
        }
        let plan = graph.plan(&both_sites(&sessions)).unwrap();
        plan.run(&sessions, vec![("x", vec![0; 8].into())]).wait().unwrap();
    }
}

/// Adds its arguments and one.
fn summing_session(with_cuda: bool) -> Session {
    fn sum(arguments: &[TensorView], mut y: TensorViewMut) -> Result<()> {
        let y = y.as_mut_slice::<f32>()?;
        y.fill(1.0);
        for argument in arguments {
            y.iter_mut().zip(argument.as_slice::<f32>()?).for_each(|(y, x)| *y += x);
        }
        Ok(())
    }
    let registry = Registry::new();
    registry.add("f1", |a: TensorView, y: TensorViewMut| sum(&[a], y));
    registry.add("f2", |a: TensorView, b: TensorView, y: TensorViewMut| sum(&[a, b], y));
    registry.add("f3", |a: TensorView, b: TensorView, c: TensorView, y: TensorViewMut| sum(&[a, b, c], y));
    let mut devices = Devices::new();
    if with_cuda {
        add_echo(&registry);
        devices = devices.with(Arc::new(Fake(DeviceType::CUDA, "cuda -arch=sm_90")));
    }
    Session::new(LocalSession::builder(registry).devices(devices).build())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn runs_give_what_the_graph_says((graph, _) in graphs()) {
        let sessions = [("board", summing_session(false)), ("gpus", summing_session(true))];
        let Ok(plan) = graph.plan(&both_sites(&sessions)) else { return Ok(()) };
        let mut expected: Vec<Vec<f32>> = Vec::new();
        for call in &graph.calls {
            let sum = |at: usize| {
                let argument = |argument: &Argument| match argument {
                    Argument::Tensor(ValueId::Input(InputId(input))) => [[1.0, 2.0], [10.0, 20.0]][*input][at],
                    Argument::Tensor(ValueId::Result(CallId(call), _)) => expected[*call][at],
                    Argument::Value(_) => unreachable!(),
                };
                1.0 + call.arguments.iter().map(argument).sum::<f32>()
            };
            let sums = vec![sum(0), sum(1)];
            expected.push(sums);
        }
        let (x, y) = (dlpack::to_bytes(&[1.0_f32, 2.0]), dlpack::to_bytes(&[10.0_f32, 20.0]));
        let inputs = vec![("x", x.into()), ("y", y.into())];
        let outputs = plan.run(&sessions, inputs).wait().unwrap();
        prop_assert_eq!(&downloaded(&outputs["out"]), expected.last().unwrap());
    }
}

fn downloaded(tensor: &crate::RemoteTensor) -> Vec<f32> {
    tensor.session().download::<f32>(tensor).wait().unwrap()
}

/// Each of the two runs stops in the middle until the other one is there too; and the session's
/// default lane is busy meanwhile.
#[test]
fn runs_wait_neither_for_each_other_nor_for_the_default_lane() {
    let all = Arc::new(Barrier::new(3));
    let (registry, meeting, holding) = (Registry::new(), all.clone(), all.clone());
    registry.add("meet", move |_: TensorView, _: TensorViewMut| {
        meeting.wait();
    });
    registry.add("hold", move || {
        holding.wait();
    });
    let sessions = [("only", session(registry).0)];
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let first = add(&mut graph, x.into(), x.into(), 0.0, 2);
    let met = call(&mut graph, "meet", &[first.result(0)]);
    graph.output("y", met.result(0));
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let hold = sessions[0].1.get_function("hold").wait().unwrap();
    let held = hold.call::<()>(()).start();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| plan.run(&sessions, vec![("x", vec![0; 8].into())]).wait().unwrap());
        }
    });
    held.wait().unwrap();
}

#[test]
fn tensors_are_freed_after_their_last_use() {
    let (registry, most) = (Registry::new(), Arc::new(AtomicUsize::new(0)));
    let peak = most.clone();
    registry.add("step", move |context: crate::Context, _: TensorView, _: TensorViewMut| {
        peak.fetch_max(context.usage().memory_bytes as usize, Ordering::Relaxed);
    });
    registry.add("used", |context: crate::Context| context.usage().memory_bytes as i64);
    let sessions = [("only", session(registry).0)];
    const LEN: i64 = 1 << 16;
    let mut graph = CallGraph::new();
    let mut last: ValueId = graph.input("x", F32, &[LEN]).into();
    for _ in 0..20 {
        last = graph.call("step", vec![last.into()], &[(F32, &[LEN])]).result(0);
    }
    graph.output("y", last);
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let input = || vec![("x", vec![0; 4 * LEN as usize].into())];
    let used = || sessions[0].1.function::<(), i64>("used").wait().unwrap().call(()).wait().unwrap();
    let outputs = plan.run(&sessions, input()).wait().unwrap();
    assert!(most.load(Ordering::Relaxed) <= 3 * 4 * LEN as usize, "{most:?}");
    assert_eq!(used(), 4 * LEN);
    drop(outputs);
    assert_eq!(used(), 0);

    // A failed run frees them, too.
    let failed = graph.call("fail", vec![last.into()], &[(F32, &[LEN])]);
    graph.output("z", failed.result(0));
    graph.plan(&both_sites(&sessions)).unwrap().run(&sessions, input()).wait().unwrap_err();
    assert_eq!(used(), 0);
}

#[test]
fn a_failed_call_is_named_and_ends_the_run() {
    for (only, calls) in [session(Registry::new()), plain_session(Registry::new())] {
        a_failed_call_ends_a_run_on(only, &calls);
    }
}

fn a_failed_call_ends_a_run_on(only: Session, calls: &AtomicUsize) {
    let sessions = [("only", only)];
    let mut graph = CallGraph::new();
    let x = graph.input("x", F32, &[2]);
    let failed = call(&mut graph, "fail", &[x.into()]);
    let behind = add(&mut graph, failed.result(0), x.into(), 0.0, 2);
    graph.output("y", behind.result(0));
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let error = plan.run(&sessions, vec![("x", vec![0; 8].into())]).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Application);
    assert!(
        error.to_string().contains("call #0 'fail' on only cpu:0 global") && error.to_string().contains("not today"),
        "{error}"
    );
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// Session that counts the calls that have come to it.
struct Counted {
    inner: LocalSession,
    arrived: Arc<Arrivals>,
}

#[derive(Default)]
struct Arrivals(Mutex<usize>, Condvar);

impl RpcSession for Counted {
    fn submit(&self, request: Request) -> Submission {
        let is_call = matches!(request.operation, Operation::Call { .. });
        let submission = self.inner.submit(request);
        *self.arrived.0.lock().unwrap() += usize::from(is_call);
        self.arrived.1.notify_all();
        submission
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }
}

#[test]
fn a_chain_on_one_session_is_on_its_way_before_its_first_step_has_ended() {
    const STEPS: usize = 6;
    let (registry, arrived) = (Registry::new(), Arc::<Arrivals>::default());
    add_echo(&registry);
    let all = arrived.clone();
    // The steps, and as many confirmations: of the input, and of all steps but the last.
    registry.add("step", move |x: TensorView, mut y: TensorViewMut| -> Result<()> {
        let Arrivals(count, changed) = &*all;
        let wait = changed.wait_timeout_while(count.lock().unwrap(), Duration::from_secs(20), |n| *n < 2 * STEPS);
        if wait.unwrap().1.timed_out() {
            return Err(RpcError::new(ErrorKind::Application, "later steps wait for this one"));
        }
        y.as_mut_slice::<f32>()?.iter_mut().zip(x.as_slice::<f32>()?).for_each(|(y, x)| *y = 2.0 * x);
        Ok(())
    });
    let counted = Counted { inner: LocalSession::new(registry), arrived: arrived.clone() };
    let sessions = [("only", Session::new(counted))];
    let mut graph = CallGraph::new();
    let mut last: ValueId = graph.input("x", F32, &[2]).into();
    for _ in 0..STEPS {
        last = call(&mut graph, "step", &[last]).result(0);
    }
    graph.output("y", last);
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let outputs = plan.run(&sessions, vec![("x", dlpack::to_bytes(&[1.0_f32, 3.0]).into())]).wait().unwrap();
    assert_eq!(downloaded(&outputs["y"]), [64.0, 192.0]);
    assert_eq!(*arrived.0.lock().unwrap(), 2 * STEPS);
}

#[test]
fn a_session_keeps_a_limited_number_of_tensors_for_steps_to_come() {
    const INPUTS: usize = 2 * super::pipeline::MAX_KEPT;
    let limits = crate::SessionLimits { max_handles: 4 * super::pipeline::MAX_KEPT, ..Default::default() };
    let registry = Registry::new();
    add_echo(&registry);
    registry.add("sum", |a: TensorView, b: TensorView, mut y: TensorViewMut| -> Result<()> {
        y.as_mut_slice::<f32>()?[0] = a.as_slice::<f32>()?[0] + b.as_slice::<f32>()?[0];
        Ok(())
    });
    let local = LocalSession::builder(registry).limits(limits).build();
    let sessions = [("only", Session::new(local))];
    let mut graph = CallGraph::new();
    let names: Vec<_> = (0..INPUTS).map(|at| at.to_string()).collect();
    let inputs: Vec<_> = names.iter().map(|name| graph.input(name, F32, &[1])).collect();
    let mut sum: ValueId = inputs[0].into();
    for input in &inputs[1..] {
        sum = graph.call("sum", vec![sum.into(), (*input).into()], &[(F32, &[1])]).result(0);
    }
    graph.output("sum", sum);
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let given = names.iter().map(|name| (&**name, dlpack::to_bytes(&[1.0_f32]).into())).collect();
    let outputs = plan.run(&sessions, given).wait().unwrap();
    assert_eq!(downloaded(&outputs["sum"]), [INPUTS as f32]);
}

#[test]
fn inputs_are_checked_and_may_be_tensors() {
    let sessions = [("one", session(Registry::new()).0), ("two", session(Registry::new()).0)];
    let mut graph = CallGraph::new();
    let (x, y) = (graph.input("x", F32, &[2]), graph.input("y", F32, &[2]));
    let sum = add(&mut graph, x.into(), y.into(), 0.5, 2);
    graph.output("sum", sum.result(0));
    graph.constrain(x, Constraint::from(on("cpu:0")).in_session("one"), "it is there");
    let plan = graph.plan(&both_sites(&sessions)).unwrap();
    let upload = |session: &Session| session.upload(&[2], &[1.0_f32, 2.0]).wait().unwrap();
    let there = upload(&sessions[0].1);
    let y_bytes = || dlpack::to_bytes(&[10.0_f32, 20.0]);
    let outputs = plan.run(&sessions, vec![("x", there.clone().into()), ("y", y_bytes().into())]).wait().unwrap();
    let sum = sessions[0].1.download::<f32>(&outputs["sum"]).wait().unwrap();
    assert_eq!(sum, [11.5, 22.5]);
    // The caller's tensor is still there.
    assert_eq!(sessions[0].1.download::<f32>(&there).wait().unwrap(), [1.0, 2.0]);

    let fails = |sessions: &[(&str, Session)], inputs: Vec<(&str, InputData)>, part: &str| {
        let error = plan.run(sessions, inputs).wait().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    fails(&sessions, vec![("x", there.clone().into())], "input 'y' is missing");
    let three = vec![("x", there.clone().into()), ("y", y_bytes().into()), ("z", y_bytes().into())];
    fails(&sessions, three, "no input 'z'");
    fails(&sessions, vec![("y", y_bytes().into()), ("y", y_bytes().into())], "given twice");
    let twice = [sessions[0].clone(), sessions[1].clone(), sessions[0].clone()];
    fails(&twice, vec![("x", there.clone().into()), ("y", y_bytes().into())], "session 'one' is given twice");
    fails(
        &sessions,
        vec![("x", there.clone().into()), ("y", vec![0; 7].into())],
        "8 bytes are needed, but 7 were given",
    );
    let elsewhere = upload(&sessions[1].1);
    fails(&sessions, vec![("x", elsewhere.into()), ("y", y_bytes().into())], "another session");
    let shaped = there.view(0, F32, &[1, 2], None);
    fails(&sessions, vec![("x", shaped.into()), ("y", y_bytes().into())], "float32 [2] on cpu:0 is needed");
    fails(&sessions[1..], vec![("x", there.into()), ("y", y_bytes().into())], "session 'one', which it was not given");
}

#[test]
fn the_memory_scope_of_a_given_tensor_is_checked() {
    let sessions = [("one", session(Registry::new()).0)];
    let run = |planned: &str, given: Option<&str>| {
        let mut graph = CallGraph::new();
        let x = graph.input("x", F32, &[2]);
        graph.output("x", x);
        graph.constrain(x, Constraint::from(on(&format!("cpu:0,scope={planned}"))), "");
        let tensor = sessions[0].1.alloc_in_scope(Device::cpu(), F32, &[2], given).wait().unwrap();
        let given = match given {
            Some(scope) => InputData::TensorInScope { tensor, memory_scope: scope.to_owned() },
            None => tensor.into(),
        };
        let plan = graph.plan(&both_sites(&sessions)).unwrap();
        plan.run(&sessions, vec![("x", given)]).wait().map(drop)
    };
    run("global", None).unwrap();
    run("global", Some("global")).unwrap();
    run("host", Some("host")).unwrap();
    for (planned, given) in [("host", None), ("global", Some("host"))] {
        let error = run(planned, given).unwrap_err();
        assert!(error.to_string().contains(&format!("memory scope '{planned}' is needed")), "{error}");
    }
}
