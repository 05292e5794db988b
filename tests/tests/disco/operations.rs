//! One suite for Disco sessions over every kind of launch: results of operations, compared with
//! those of a sequential program, failures, and ends.

mod ends;
mod many_workers;
mod meshes;
mod nodes;
mod programs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disco::{
    Argument, Content, DRef, DiscoError, DiscoSession, NodeListener, Operand, Options, ParameterType, ReduceOp, Scope,
    SocketSession, WorkerId,
};
use rpc_core::{DataType, Device, Devices, Element, ErrorKind, LocalSession, Pack, Registry, Session, Tensor, Value};
use rpc_tests::accelerator::Accelerator;
use rpc_tests::spmd::{Data, Launch, Node, everywhere, runtime, serve};
use rpc_tests::tvm_ffi::{Environment, environment};

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

fn value(session: &DiscoSession, register: &DRef, worker: u32) -> Value {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Value(value) => value,
        other => panic!("expected a value, got {other:?}"),
    }
}

fn tensor(session: &DiscoSession, register: &DRef, worker: u32) -> (Vec<i64>, Vec<f32>) {
    match session.debug_get_from_remote(register, WorkerId(worker)).wait().unwrap() {
        Content::Tensor(tensor) => (tensor.shape().to_vec(), elements(&tensor)),
        other => panic!("expected a tensor, got {other:?}"),
    }
}

fn elements<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.read().unwrap().as_slice::<T>().unwrap().to_vec()
}

fn f32s(shape: &[i64], elements: impl IntoIterator<Item = f32>) -> Tensor {
    Tensor::from_slice(shape, &elements.into_iter().collect::<Vec<_>>()).unwrap()
}

#[test]
fn empty_takes_a_device_that_satisfies_the_constraint() {
    everywhere(NODE, &[(2, 1)], |session| {
        for wanted in ["*", "cpu", "cpu:0,scope=global", "*,target=llvm"] {
            let x = session.empty(&[2], DataType::F32, wanted.parse().ok()).unwrap();
            assert_eq!(tensor(session, &x, 1), (vec![2], vec![0.0; 2]), "{wanted}");
        }
        for (wanted, there_is) in [("cuda:1,scope=host", "llvm -mtriple="), ("cpu,target=c", "cpu:0 'llvm")] {
            session.empty(&[2], DataType::F32, wanted.parse().ok()).unwrap();
            let error = session.sync_worker(WorkerId(1)).wait().unwrap_err().to_string();
            assert!(
                error.contains(&format!("no device is {wanted}; there are")) && error.contains(there_is),
                "{error}"
            );
            session.sync_all().wait().unwrap_err();
        }
    });
}

/// Makes a tensor of `len` elements on each worker: element `i` of worker `w` is `100 w + i`.
fn by_worker(session: &DiscoSession, shape: &[i64]) -> DRef {
    let len: i64 = shape.iter().product();
    let x = session.empty(shape, DataType::F32, None).unwrap();
    for worker in 0..session.num_workers() {
        let own = f32s(shape, (0..len).map(|i| (100 * worker) as f32 + i as f32));
        session.debug_set_register(&x, WorkerId(worker), &own).unwrap();
    }
    x
}

fn own(worker: u32, len: u32) -> Vec<f32> {
    (0..len).map(|i| (100 * worker + i) as f32).collect()
}

/// Returns the workers that run a collective with `worker`.
fn peers(session: &DiscoSession, scope: Scope, worker: u32) -> Vec<u32> {
    match scope {
        Scope::World => (0..session.num_workers()).collect(),
        Scope::Group => {
            let size = session.num_workers() / session.num_groups();
            let first = worker / size * size;
            (first..first + size).collect()
        }
        Scope::Groups(grouping) => {
            // Those in the same block of `size` times `stride` workers, in the same column of it.
            let (block, stride) = (grouping.size() * grouping.stride(), grouping.stride());
            let is_peer = |peer: &u32| peer / block == worker / block && peer % stride == worker % stride;
            (0..session.num_workers()).filter(is_peer).collect()
        }
    }
}

#[test]
fn calls_values_and_registers() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
        let place = session.get_global_func("where").unwrap().call(()).unwrap();
        let add = session.get_global_func("add").unwrap();
        let sum = add.call((&id, 0.5)).unwrap();
        let sum = session.call_packed(&add, (&sum, 1)).unwrap();
        let later = session.get_global_func("later").unwrap().call((41,)).unwrap();
        for worker in 0..n {
            assert_eq!(value(session, &id, worker), Value::from(worker));
            assert_eq!(value(session, &sum, worker), Value::Float(f64::from(worker) + 1.5));
            assert_eq!(value(session, &later, worker), Value::Int(42));
            let size = n / session.num_groups();
            let expected = [n, session.num_groups(), worker / size, worker % size];
            assert_eq!(value(session, &place, worker), Value::List(expected.map(Value::from).to_vec()));
        }
        // Each kind of argument comes back unchanged.
        let echo = session.get_global_func("echo").unwrap();
        let packed = Value::from(rpc_core::Packed::encode(&("text", 7)).unwrap());
        let values = [
            Value::Null,
            Value::Bool(true),
            Value::Int(-1 << 40),
            Value::Float(0.1),
            Value::Str("ä\0".to_owned()),
            Value::Bytes(vec![0, 255].into()),
            Value::Shape(vec![1, -1]),
            Value::DataType(DataType::BF16),
            Value::Device(Device::cuda(3)),
            Value::List(vec![Value::Int(1), Value::List(vec![])]),
            Value::Map(vec![("a".into(), Value::Map(vec![(Value::Int(1), Value::Null)]))]),
            packed,
        ];
        for expected in values {
            let dynamic: Argument = expected.clone().try_map(&mut |_| Err::<Operand, ()>(())).unwrap();
            let back = echo.call(vec![dynamic]).unwrap();
            assert_eq!(value(session, &back, n - 1), expected);
        }
        let back = echo.call((Pack((1, "x")),)).unwrap();
        let Value::Packed(packed) = value(session, &back, 0) else { panic!() };
        assert_eq!(packed.decode::<(i32, String)>().unwrap(), (1, "x".to_owned()));
        let named = echo.call((BTreeMap::from([("id", &id)]),)).unwrap();
        assert_eq!(value(session, &named, n - 1), Value::Map(vec![("id".into(), Value::from(n - 1))]));
        // A small tensor is an argument. A large one is refused, and the error names the operation
        // to use.
        let small = echo.call((&f32s(&[2], [1.0, 2.0]),)).unwrap();
        assert_eq!(tensor(session, &small, n - 1), (vec![2], vec![1.0, 2.0]));
        let large = Tensor::zeros([20_000], DataType::F32).unwrap();
        let error = echo.call((&large,)).unwrap_err();
        assert!(error.to_string().contains("broadcast"), "{error}");
        // A register may hold a function, which cannot be fetched.
        let error = session.debug_get_from_remote(echo.reference(), WorkerId(0)).wait().unwrap_err();
        assert!(error.to_string().contains("function"), "{error}");
        session.debug_set_register(&back, WorkerId(n - 1), "new").unwrap();
        assert_eq!(value(session, &back, n - 1), Value::from("new"));
    });
}

/// Checks what the controller sends to the first worker of each group of a scope.
fn check_copies(session: &DiscoSession, scope: Scope) {
    let n = session.num_workers();
    let size = peers(session, scope, 0).len() as i64;
    let host = f32s(&[size, 3], (0..3 * size).map(|i| i as f32));
    let parts = session.scatter(&host, None, scope).unwrap();
    let to = session.empty(&[3], DataType::F32, None).unwrap();
    session.scatter(&host, Some(&to), scope).unwrap();
    for worker in 0..n {
        let rank = peers(session, scope, worker).iter().position(|peer| *peer == worker).unwrap();
        let expected: Vec<f32> = (3 * rank..3 * rank + 3).map(|i| i as f32).collect();
        assert_eq!(tensor(session, &parts, worker), (vec![3], expected.clone()));
        assert_eq!(tensor(session, &to, worker).1, expected);
    }
    let error = session.scatter(&f32s(&[size + 1], vec![0.0; size as usize + 1]), None, scope).unwrap_err();
    assert!(error.to_string().contains(&format!("must be {size}")), "{error}");
    let first = session.empty_on_worker0(&[1], DataType::F32, None, scope).unwrap();
    for worker in 0..n {
        let has = matches!(session.debug_get_from_remote(&first, WorkerId(worker)).wait().unwrap(), Content::Tensor(_));
        assert_eq!(has, peers(session, scope, worker)[0] == worker);
    }
    let host = f32s(&[5], (0..5).map(|i| i as f32));
    let all = session.broadcast(&host, None, scope).unwrap();
    for worker in 0..n {
        assert_eq!(tensor(session, &all, worker), (vec![5], elements(&host)));
    }
}

#[test]
fn copies_broadcast_and_scatter() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        // Tensors of several chunks, and without elements.
        for len in [0_i64, 5, 700_000] {
            let host = f32s(&[len], (0..len).map(|i| i as f32));
            let remote = session.copy_to_worker_0(&host, None).unwrap();
            let back = session.copy_from_worker_0(&remote).wait().unwrap();
            assert_eq!((back.shape(), elements::<f32>(&back)), (&[len][..], elements(&host)));
            if n > 1 {
                assert_eq!(value(session, &remote, n - 1), Value::Null);
            }
            // Copies into an existing tensor of another shape.
            let to = session.empty(&[1, len], DataType::F32, None).unwrap();
            session.copy_to_worker_0(&host, Some(&to)).unwrap();
            assert_eq!(session.copy_from_worker_0(&to).wait().unwrap().shape(), [1, len]);
            for scope in [Scope::World, Scope::Group] {
                let all = session.broadcast(&host, None, scope).unwrap();
                let to = session.empty(&[len, 1], DataType::F32, None).unwrap();
                session.broadcast(&host, Some(&to), scope).unwrap();
                for worker in 0..n {
                    assert_eq!(tensor(session, &all, worker), (vec![len], elements(&host)));
                    assert_eq!(tensor(session, &to, worker), (vec![len, 1], elements(&host)));
                }
            }
        }
        for scope in [Scope::World, Scope::Group] {
            check_copies(session, scope);
        }
    });
}

/// Checks every collective in a scope against values that are computed here.
fn check_collectives(session: &DiscoSession, scope: Scope) {
    let n = session.num_workers();
    let size = peers(session, scope, 0).len() as u32;
    let x = by_worker(session, &[size.into(), 2]);
    let len = 2 * size;
    let sums = session.allreduce(&x, None, ReduceOp::Sum, scope).unwrap();
    let max = session.allreduce(&x, Some(&by_worker(session, &[len.into()])), ReduceOp::Max, scope).unwrap();
    let avg = by_worker(session, &[len.into()]);
    session.allreduce(&avg, Some(&avg), ReduceOp::Avg, scope).unwrap();
    let gathered = session.allgather(&x, None, scope).unwrap();
    let part = session.reduce_scatter(&x, None, ReduceOp::Sum, scope).unwrap();
    let exchanged = session.all_to_all(&x, None, scope).unwrap();
    let at_first = session.gather_to_worker0(&x, None, scope).unwrap();
    let from_first = session.broadcast_from_worker0(&x, None, scope).unwrap();
    let shares = session.scatter_from_worker0(&x, None, scope).unwrap();
    session.barrier(scope).unwrap();
    session.sync_all().wait().unwrap();
    for worker in 0..n {
        let peers = peers(session, scope, worker);
        let rank = peers.iter().position(|peer| *peer == worker).unwrap();
        let all: Vec<Vec<f32>> = peers.iter().map(|peer| own(*peer, len)).collect();
        let summed: Vec<f32> = (0..len as usize).map(|i| all.iter().map(|one| one[i]).sum()).collect();
        let shape = vec![i64::from(size), 2];
        assert_eq!(tensor(session, &sums, worker), (shape.clone(), summed.clone()));
        assert_eq!(tensor(session, &max, worker), (vec![len.into()], all[all.len() - 1].clone()));
        let average: Vec<f32> = summed.iter().map(|sum| sum / size as f32).collect();
        assert_eq!(tensor(session, &avg, worker).1, average);
        assert_eq!(tensor(session, &gathered, worker), (vec![size.into(), size.into(), 2], all.concat()));
        assert_eq!(tensor(session, &part, worker), (vec![2], summed[2 * rank..2 * rank + 2].to_vec()));
        let mine: Vec<f32> = all.iter().flat_map(|one| one[2 * rank..2 * rank + 2].to_vec()).collect();
        assert_eq!(tensor(session, &exchanged, worker), (shape.clone(), mine));
        if rank == 0 {
            assert_eq!(tensor(session, &at_first, worker).1, all.concat());
        } else {
            assert_eq!(value(session, &at_first, worker), Value::Null);
        }
        assert_eq!(tensor(session, &from_first, worker), (shape, all[0].clone()));
        assert_eq!(tensor(session, &shares, worker), (vec![2], all[0][2 * rank..2 * rank + 2].to_vec()));
    }
}

#[test]
fn collectives() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 1), (4, 2)], |session| {
        let n = session.num_workers();
        for scope in [Scope::World, Scope::Group] {
            check_collectives(session, scope);
        }
        // Functions of workers can call collectives.
        let sum = session.get_global_func("sum_of_ids").unwrap().call((10,)).unwrap();
        let passed = session.get_global_func("pass_to_next_group").unwrap().call(()).unwrap();
        let size = n / session.num_groups();
        for worker in 0..n {
            assert_eq!(value(session, &sum, worker), Value::Float((0..n).sum::<u32>().into()));
            let from = if worker >= size { worker - size } else { worker };
            assert_eq!(value(session, &passed, worker), Value::Float(from.into()));
        }
        // Tensors go around a ring, which would deadlock if each worker waited for its own send.
        if n > 1 {
            let (x, y) = (by_worker(session, &[3]), by_worker(session, &[3]));
            let ring: Vec<_> = (0..n).map(|worker| (WorkerId(worker), WorkerId((worker + 1) % n))).collect();
            session.send_recv(&x, &y, &ring).unwrap();
            for worker in 0..n {
                assert_eq!(tensor(session, &y, worker).1, own((worker + n - 1) % n, 3));
            }
        }
        session.reinit_ccl().wait().unwrap();
        let sum = session.get_global_func("sum_of_ids").unwrap().call((1,)).unwrap();
        assert_eq!(value(session, &sum, n - 1), Value::Float((0..n).sum::<u32>().into()));
    });
}

/// Regression: the collectives were gone, and tensors were made on devices that there were not.
/// Memory of devices that the processor cannot reach is mapped for the collectives of the host.
#[test]
fn collectives_of_the_host_take_memory_of_devices_without_addresses() {
    let nodes = [0, 1, 2].map(|_| {
        let registry = Registry::new();
        disco::register(&registry);
        let devices = Devices::new().with(Arc::new(Accelerator::default()));
        Session::new(LocalSession::builder(registry).devices(devices).build())
    });
    let session = DiscoSession::over(nodes, 1, 1, Options::default()).wait().unwrap();
    let on_device = |shape: &[i64]| session.empty(shape, DataType::F32, "ext_dev:1".parse().ok()).unwrap();
    let (x, sum, all) = (on_device(&[4]), on_device(&[4]), on_device(&[3, 4]));
    let rows = f32s(&[3, 4], (0..12).map(|at| at as f32));
    session.scatter(&rows, Some(&x), Scope::World).unwrap();
    session.allreduce(&x, Some(&sum), ReduceOp::Sum, Scope::World).unwrap();
    session.allgather(&x, Some(&all), Scope::World).unwrap();
    // In place, and then from a tensor of the host.
    session.allreduce(&x, Some(&x), ReduceOp::Max, Scope::World).unwrap();
    let copied = on_device(&[3, 4]);
    session.broadcast(&rows, Some(&copied), Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    for worker in 0..3 {
        assert_eq!(tensor(&session, &sum, worker).1, [12.0, 15.0, 18.0, 21.0]);
        assert_eq!(tensor(&session, &x, worker).1, [8.0, 9.0, 10.0, 11.0]);
        for gathered in [&all, &copied] {
            assert_eq!(tensor(&session, gathered, worker).1, elements::<f32>(&rows));
        }
    }
    session.shutdown().wait().unwrap();
}

#[test]
fn a_backend_that_is_not_there_changes_nothing() {
    for launch in [Launch::Threads, Launch::Processes(NODE), Launch::Tcp { per_node: 2, data: Data::Tcp }] {
        let fixture = launch.start(4, 2);
        let session = &fixture.session;
        let n = session.num_workers();
        let error = session.init_ccl("nccl", &[]).wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize, "{error}");
        assert_eq!(session.ccl_state(), disco::CclState::Running);
        let sum = session.get_global_func("sum_of_ids").unwrap().call((1,)).unwrap();
        assert_eq!(value(session, &sum, n - 1), Value::Float((0..n).sum::<u32>().into()));
        let device = session.get_global_func("device").unwrap().call(()).unwrap();
        assert_eq!(value(session, &device, 0), Value::Device(Device::cpu()));
        // The backend, too, is still the one that it was.
        session.reinit_ccl().wait().unwrap();
        session.barrier(Scope::World).unwrap();
        session.sync_all().wait().unwrap();
    }
}

#[test]
fn backends_take_a_device_for_each_worker_or_for_each_of_a_node() {
    everywhere(NODE, &[(2, 1), (4, 2)], |session| {
        let n = session.num_workers() as usize;
        session.init_ccl("host", &[]).wait().unwrap();
        session.init_ccl("host", &vec![0; n]).wait().unwrap();
        let sum = session.get_global_func("sum_of_ids").unwrap().call((1,)).unwrap();
        assert_eq!(value(session, &sum, 0), Value::Float((0..n as u32).sum::<u32>().into()));
        // All ids mean the same host memory.
        session.init_ccl("host", &(0..n as i32).collect::<Vec<_>>()).wait().unwrap();
        let device = session.get_global_func("device").unwrap().call(()).unwrap();
        assert_eq!(value(session, &device, n as u32 - 1), Value::Device(Device::cpu()));
        let error = session.init_ccl("host", &vec![0; n + 1]).wait().unwrap_err();
        assert!(error.to_string().contains(&format!("{} device ids for {n} workers", n + 1)), "{error}");
        let error = session.init_ccl("nothing", &[]).wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::Unsupported);
    });
    // By local id, at nodes with two workers each.
    let fixture = Launch::Tcp { per_node: 2, data: Data::Shared }.start(4, 1);
    fixture.session.init_ccl("host", &[0, 0]).wait().unwrap();
    let error = fixture.session.init_ccl("host", &[0]).wait().unwrap_err();
    assert!(error.to_string().contains("one for each of the 2 of a node"), "{error}");
    fixture.session.barrier(Scope::World).unwrap();
    fixture.session.sync_all().wait().unwrap();
}

#[test]
fn native_modules_run_on_every_worker() {
    let Some(environment) = environment() else { return };
    let kernels = environment.compile("kernels.c");
    everywhere(NODE, &[(2, 1), (4, 2)], |session| {
        let module = session.load_module(kernels.to_str().unwrap(), None).unwrap();
        let x = by_worker(session, &[3]);
        let scale = module.function("scale").unwrap();
        scale.call((&x, &x, 2.0)).unwrap();
        for worker in 0..session.num_workers() {
            let of_worker = 100.0 * worker as f32;
            let expected = [0.0, 1.0, 2.0].map(|i| 2.0 * (of_worker + i));
            assert_eq!(tensor(session, &x, worker), (vec![3], expected.to_vec()));
        }
        session.sync_all().wait().unwrap();
        scale.call((&x, 1)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), session.num_workers() as usize, "{error}");
        assert!(error.to_string().contains("scale takes x, y and a factor"), "{error}");
    });
}

#[test]
fn a_compiled_model_is_set_up_for_each_worker() {
    let Some(model) = environment().and_then(Environment::model) else { return };
    let read = |name: &str| rpc_core::dlpack::from_bytes::<f32>(&std::fs::read(model.join(name)).unwrap());
    everywhere(NODE, &[(2, 1)], |session| {
        let path = model.join("model.so");
        let main = session.load_module(path.to_str().unwrap(), Some(Device::cpu())).unwrap().function("main").unwrap();
        let input =
            |name: &str, shape: &[i64]| session.broadcast(&f32s(shape, read(name)), None, Scope::World).unwrap();
        let (x, hidden, output) =
            (input("x.f32", &[4, 64]), input("hidden.f32", &[64, 32]), input("output.f32", &[32, 10]));
        let classes = main.call((&x, &hidden, &output)).unwrap();
        for worker in 0..session.num_workers() {
            assert_eq!(tensor(session, &classes, worker), (vec![4, 10], read("classes.f32")));
        }
        session.sync_all().wait().unwrap();
    });
}

#[test]
fn modules_are_loaded_on_every_worker() {
    everywhere(NODE, &[(1, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let module = session.load_module("arithmetic", None).unwrap();
        let ninth = module.function("square").unwrap().call((3.0,)).unwrap();
        let product = module.function("id_times").unwrap().call((&ninth,)).unwrap();
        let negative = module.function("negate").unwrap().call((&product,)).unwrap();
        // The module is loaded again, with a device. Functions outlive the first reference to it.
        let square = module.function("square").unwrap();
        drop(module);
        let again = session.load_module("arithmetic", Some(Device::cpu())).unwrap();
        let sixteen = square.call((4.0,)).unwrap();
        for worker in 0..n {
            assert_eq!(value(session, &negative, worker), Value::Float(-9.0 * f64::from(worker)));
            assert_eq!(value(session, &sixteen, worker), Value::Float(16.0));
        }
        session.sync_all().wait().unwrap();

        // A missing function fails on each worker, once, and values that are made of it are
        // poisoned.
        let cube = again.function("cube").unwrap();
        let nothing = cube.call((2.0,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize, "{error}");
        assert_eq!(
            (error.cause().kind(), error.failures()[0].command.as_str()),
            (ErrorKind::NotFound, "module_function")
        );
        assert!(error.to_string().contains("it has: id_times, negate, square"), "{error}");
        let poison = session.debug_get_from_remote(&nothing, WorkerId(n - 1)).wait().unwrap_err();
        assert_eq!(poison.failures()[0].command, "module_function");
        let missing = session.load_module("geometry", None).unwrap();
        missing.function("area").unwrap().call(()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize, "{error}");
        assert_eq!((error.cause().kind(), error.failures()[0].command.as_str()), (ErrorKind::NotFound, "load_module"));
        assert!(error.to_string().contains("no module is called 'geometry'"), "{error}");
        // A value is no module.
        let function = disco::DPackedFunc::from(ninth);
        function.call(()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert!(error.to_string().contains("expected a function"), "{error}");
    });
}

#[test]
fn the_controller_sets_registers_to_tensors_of_any_size_and_fills_its_own() {
    everywhere(NODE, &[(3, 1)], |session| {
        // Below and above what is sent within a command, and of several pieces of a copy.
        for len in [3, 16 << 10, (16 << 10) + 1, 700_000] {
            let first = f32s(&[len], (0..len).map(|at| at as f32));
            let other = f32s(&[len], (0..len).map(|at| 1.0 - at as f32));
            let same = session.get_global_func("echo").unwrap();
            let x = session.empty(&[len], DataType::F32, None).unwrap();
            let alias = same.call((&x,)).unwrap();
            session.debug_set_register(&x, WorkerId(1), &first).unwrap();
            assert_eq!(tensor(session, &x, 1).1, elements::<f32>(&first), "{len}");
            // It was copied into the tensor that was there, and other workers keep what they have.
            assert_eq!(tensor(session, &alias, 1).1, elements::<f32>(&first), "{len}");
            for worker in [0, 2] {
                assert_eq!(tensor(session, &x, worker).1, vec![0.0; len as usize], "{len}");
            }
            // What is of another shape, or no tensor, is replaced.
            let flat = session.empty(&[1], DataType::F32, None).unwrap();
            session.debug_set_register(&flat, WorkerId(0), &other).unwrap();
            assert_eq!(tensor(session, &flat, 0), (vec![len], elements::<f32>(&other)), "{len}");
            assert_eq!(tensor(session, &flat, 1).0, [1], "{len}");
            // The controller's own tensor is filled, whatever its shape.
            let to = f32s(&[1, len], vec![7.0; len as usize]);
            session.copy_from_worker_0_into(&flat, &to).wait().unwrap();
            assert_eq!(elements::<f32>(&to), elements::<f32>(&other), "{len}");
        }
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let kept = f32s(&[3], [1.0, 2.0, 3.0]);
        for wrong in [kept.clone(), Tensor::from_slice(vec![2], &[1_i32, 2]).unwrap()] {
            let error = session.copy_from_worker_0_into(&x, &wrong).wait().unwrap_err();
            assert!(error.to_string().contains("must be the same"), "{error}");
        }
        assert_eq!(elements::<f32>(&kept), [1.0, 2.0, 3.0]);
        let reader = kept.read().unwrap();
        session.copy_from_worker_0_into(&x, &kept).wait().unwrap_err();
        drop(reader);
        let nobody = session.debug_set_register(&x, WorkerId(3), &kept).unwrap_err();
        assert!(nobody.to_string().contains("no worker 3"), "{nobody}");
    });
}

#[test]
fn a_call_has_up_to_sixteen_arguments_in_a_tuple() {
    everywhere(NODE, &[(2, 1)], |session| {
        let list = session.get_global_func("list").unwrap();
        let all = list.call((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)).unwrap();
        let expected = Value::List((1_i64..=16).map(Value::Int).collect());
        assert_eq!(value(session, &all, 1), expected);
    });
}

#[test]
fn threads_have_a_device_each() {
    let registry = rpc_core::Registry::new();
    registry.add("device", |worker: disco::WorkerContext| worker.device());
    registry.add("place", |x: Tensor| x.device());
    let devices = rpc_core::Devices::new().with(std::sync::Arc::new(rpc_tests::accelerator::Accelerator::default()));
    let own: Vec<Device> = ["ext_dev:0", "ext_dev:1"].iter().map(|device| device.parse().unwrap()).collect();
    let launch = |workers, own: &[Device]| {
        let session = disco::ThreadedSession::new(workers, 1).registry(registry.clone()).devices(devices.clone());
        session.default_devices(own.iter().copied()).start().wait()
    };
    let session = launch(2, &own).unwrap();
    let device = session.get_global_func("device").unwrap().call(()).unwrap();
    for (worker, own) in own.iter().enumerate() {
        assert_eq!(value(&session, &device, worker as u32), Value::Device(*own));
    }
    // Tensors are where their workers are, and copies find them there.
    let given = f32s(&[3], [1.0, 2.0, 3.0]);
    let x = session.empty(&[3], DataType::F32, None).unwrap();
    session.copy_to_worker_0(&given, Some(&x)).unwrap();
    session.debug_set_register(&x, WorkerId(1), &given).unwrap();
    let filled = f32s(&[3], [0.0; 3]);
    session.copy_from_worker_0_into(&x, &filled).wait().unwrap();
    assert_eq!(elements::<f32>(&filled), [1.0, 2.0, 3.0]);
    assert_eq!(tensor(&session, &x, 1), (vec![3], vec![1.0, 2.0, 3.0]));
    let place = session.get_global_func("place").unwrap().call((&x,)).unwrap();
    for (worker, own) in own.iter().enumerate() {
        assert_eq!(value(&session, &place, worker as u32), Value::Device(*own));
    }
    // Collectives on host memory are those of workers of every kind.
    let host = session.empty(&[1], DataType::F32, Some(Device::cpu().into())).unwrap();
    session.allreduce(&host, Some(&host), ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    // They stay when collectives are made anew, until a backend chooses others.
    session.reinit_ccl().wait().unwrap();
    let device = session.get_global_func("device").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &device, 1), Value::Device(own[1]));
    session.init_ccl("host", &[]).wait().unwrap();
    let device = session.get_global_func("device").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &device, 1), Value::Device(Device::cpu()));
    session.shutdown().wait().unwrap();

    let too_few = launch(3, &own).unwrap_err();
    assert!(too_few.to_string().contains("2 default devices for 3 workers"), "{too_few}");
    let not_there = launch(1, &["ext_dev:2".parse().unwrap()]).unwrap_err();
    assert!(not_there.to_string().contains("ext_dev:2"), "{not_there}");
}

/// A module that is code alone: each worker sets an instance up on the device that it is loaded on.
#[test]
fn a_module_without_a_device_is_set_up_on_the_default_device_of_each_worker() {
    use rpc_core::{Context, Function, Module, Signature};
    struct Code;
    struct OnDevice(Device);
    impl Module for Code {
        fn name(&self) -> &'static str {
            "code"
        }

        fn instance(&self, _: &Context, device: Device) -> rpc_core::Result<Option<std::sync::Arc<dyn Module>>> {
            Ok(Some(std::sync::Arc::new(OnDevice(device))))
        }

        fn function(&self, _: &str) -> rpc_core::Result<Function> {
            Err(rpc_core::RpcError::internal("code that was not set up was run"))
        }

        fn functions(&self) -> Vec<(String, Signature)> {
            Vec::new()
        }
    }
    impl Module for OnDevice {
        fn name(&self) -> &'static str {
            "code"
        }

        fn function(&self, _: &str) -> rpc_core::Result<Function> {
            let device = self.0;
            Ok(Function::blocking(move || device))
        }

        fn functions(&self) -> Vec<(String, Signature)> {
            Vec::new()
        }
    }

    let registry = rpc_core::Registry::new();
    registry.add_module(std::sync::Arc::new(Code));
    let devices = rpc_core::Devices::new().with(std::sync::Arc::new(rpc_tests::accelerator::Accelerator::default()));
    let own: Vec<Device> = ["ext_dev:1", "ext_dev:0"].iter().map(|device| device.parse().unwrap()).collect();
    let session = disco::ThreadedSession::new(2, 1).registry(registry).devices(devices).default_devices(own.clone());
    let session = session.start().wait().unwrap();
    let placed = |device| session.load_module("code", device).unwrap().function("where").unwrap().call(()).unwrap();
    let (by_default, on_cpu) = (placed(None), placed(Some(Device::cpu())));
    for (worker, own) in own.iter().enumerate() {
        assert_eq!(value(&session, &by_default, worker as u32), Value::Device(*own));
        assert_eq!(value(&session, &on_cpu, worker as u32), Value::Device(Device::cpu()));
    }
    session.shutdown().wait().unwrap();
}
