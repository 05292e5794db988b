//! One suite for Disco sessions over every kind of launch: results of operations, compared with
//! those of a sequential program, failures, and ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use disco::{
    Argument, Content, DRef, DiscoError, DiscoSession, NodeListener, Operand, ParameterType, ReduceOp, Scope,
    SocketSession, WorkerId,
};
use rpc_core::{DataType, Device, Element, ErrorKind, Pack, Tensor, Value};
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
                let has = matches!(
                    session.debug_get_from_remote(&first, WorkerId(worker)).wait().unwrap(),
                    Content::Tensor(_)
                );
                assert_eq!(has, peers(session, scope, worker)[0] == worker);
            }
        }
    });
}

#[test]
fn collectives() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 1), (4, 2)], |session| {
        let n = session.num_workers();
        for scope in [Scope::World, Scope::Group] {
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
fn recorded_programs_do_what_their_steps_would() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let (add_to, add, copy) = (
            session.get_global_func("add_to").unwrap(),
            session.get_global_func("add").unwrap(),
            session.get_global_func("copy").unwrap(),
        );
        let weights = by_worker(session, &[3]);
        let program = session
            .record(|program| {
                let (x, step, scale) = (program.parameter(), program.parameter(), program.parameter());
                let weights = program.capture(&weights)?;
                let own = program.call(&copy, (&x,))?;
                program.call(&add_to, (&own, &step))?;
                let sum = program.allreduce(&own, None, ReduceOp::Sum, Scope::World)?;
                let all = program.allgather(&weights, None, Scope::Group)?;
                let number = program.call(&add, (0.5, &scale))?;
                program.call(&add_to, (&weights, 1.0))?;
                program.barrier(Scope::World);
                Ok(vec![sum, all, number])
            })
            .unwrap();
        // The program keeps its captured tensors, and does not change its arguments.
        let (kept, register) = (weights.clone(), weights.register());
        drop(weights);
        let x = by_worker(session, &[3]);
        for round in 0..3 {
            let [sum, all, number] = &program.run((&x, round, 1.5)).unwrap()[..] else { panic!("three outputs") };
            assert!(sum.register() != register);
            for worker in 0..n {
                let summed = (0..3).map(|i| (0..n).map(|peer| (100 * peer + i) as f32 + round as f32).sum());
                assert_eq!(tensor(session, sum, worker), (vec![3], summed.collect::<Vec<f32>>()));
                let peers = peers(session, Scope::Group, worker);
                let gathered = peers.iter().flat_map(|peer| own(*peer, 3)).map(|x| x + round as f32);
                assert_eq!(tensor(session, all, worker).1, gathered.collect::<Vec<f32>>());
                assert_eq!(value(session, number, worker), Value::Float(2.0));
                assert_eq!(tensor(session, &x, worker).1, own(worker, 3));
            }
        }
        session.sync_all().wait().unwrap();

        // Each failed step is reported with its number, and the others run.
        let fails = session.get_global_func("fail_on").unwrap();
        let unless = session.get_global_func("tensor_unless").unwrap();
        let faulty = session
            .record(|program| {
                let worker = program.parameter();
                let bad = program.call(&fails, (&worker,))?;
                let worse = program.call(&add, (&bad, 1.0))?;
                let missing = program.call(&unless, (&worker,))?;
                let sum = program.allreduce(&missing, None, ReduceOp::Sum, Scope::World)?;
                let fine = program.call(&add, (1.0, 2.0))?;
                Ok(vec![worse, sum, fine])
            })
            .unwrap();
        let outputs = faulty.run((0,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        let told: Vec<_> = error.failures().iter().map(|one| (one.worker.0, one.command.clone())).collect();
        let of = |text: &str| (0, format!("{text} of program {}", faulty.number()));
        assert_eq!(told, [of("fail_on, step 1"), of("tensor_unless, step 3")]);
        for (output, poisoned_on) in [(&outputs[0], 0), (&outputs[1], n - 1)] {
            session.debug_get_from_remote(output, WorkerId(poisoned_on)).wait().unwrap_err();
        }
        assert_eq!(value(session, &outputs[2], 0), Value::Float(3.0));
        // A later run is not affected, and a poisoned argument poisons the results.
        let outputs = faulty.run((n,)).unwrap();
        session.sync_all().wait().unwrap();
        assert_eq!(tensor(session, &outputs[1], n - 1).1, [n as f32, 2.0 * n as f32]);
        let poison = fails.call((0,)).unwrap();
        session.sync_all().wait().unwrap_err();
        let outputs = program.run((&x, 0, &poison)).unwrap();
        session.sync_all().wait().unwrap();
        let error = session.debug_get_from_remote(&outputs[2], WorkerId(0)).wait().unwrap_err();
        assert_eq!(error.failures()[0].command, "fail_on");
        // Dropping the program frees its tensors.
        drop((program, faulty, kept, outputs, x));
        let echo = session.get_global_func("echo").unwrap().call((1,)).unwrap();
        assert_eq!(value(session, &echo, 0), Value::Int(1));
    });
}

#[test]
fn parameters_take_what_they_say() {
    everywhere(NODE, &[(2, 1)], |session| {
        let copy = session.get_global_func("copy").unwrap();
        let program = session
            .record(|program| {
                let x = program.parameter_of(ParameterType::tensor(DataType::F32, &[-1]));
                program.parameter_of(ParameterType::Int);
                Ok(vec![program.call(&copy, (&x,))?])
            })
            .unwrap();
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let made = program.run((&x, 1)).unwrap();
        assert_eq!(tensor(session, &made[0], 1), (vec![2], vec![0.0; 2]));
        let made = program.run((&f32s(&[1], [7.0]), 1)).unwrap();
        assert_eq!(tensor(session, &made[0], 1), (vec![1], vec![7.0]));
        // Arguments that the controller can check are refused before any command is issued.
        let error = program.run((&x, 1.5)).unwrap_err();
        assert!(error.to_string().contains("parameter 2 takes int, and was given float"), "{error}");
        let error = program.run((&f32s(&[1, 1], [7.0]), 1)).unwrap_err();
        assert!(error.to_string().contains("parameter 1 takes tensor of float32 [-1], and was given"), "{error}");
        session.sync_all().wait().unwrap();
        // Each worker checks the contents of registers, and a mismatch is reported once.
        session.debug_set_register(&x, WorkerId(1), 5).unwrap();
        let made = program.run((&x, 1)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        let [failure] = error.failures() else { panic!("{error}") };
        assert_eq!((failure.worker, &*failure.command), (WorkerId(1), "run"));
        assert!(
            failure.cause.message().contains("parameter 1 takes tensor of float32 [-1], and was given int"),
            "{error}"
        );
        assert_eq!(tensor(session, &made[0], 0), (vec![2], vec![0.0; 2]));
        session.debug_get_from_remote(&made[0], WorkerId(1)).wait().unwrap_err();
    });
}

#[test]
fn programs_that_cannot_be_are_refused() {
    let (one, two) = (Launch::Threads.start(1, 1).session, Launch::Threads.start(1, 1).session);
    let refused = |result: disco::Result<disco::Program>, why: &str| match result {
        Ok(program) => panic!("{program:?}"),
        Err(error) => assert!(error.to_string().contains(why), "{error}"),
    };
    let x = one.empty(&[1], DataType::F32, None).unwrap();
    let echo = one.get_global_func("echo").unwrap();
    refused(one.record(|program| Ok(vec![program.parameter()])), "its steps make");
    refused(one.record(|program| Ok(vec![program.capture(&x)?])), "its steps make");
    refused(
        one.record(|program| {
            let made = program.call(&echo, (1,))?;
            Ok(vec![made, made])
        }),
        "each of them once",
    );
    refused(two.record(|program| Ok(vec![program.capture(&x)?])), "belongs to another session");
    let mut stolen = None;
    let program = one
        .record(|program| {
            stolen = Some(program.parameter());
            Ok(vec![])
        })
        .unwrap();
    let stolen = stolen.unwrap();
    refused(one.record(|program| Ok(vec![program.call(&echo, (&stolen,))?])), "another program");
    let error = echo.call((&stolen,)).unwrap_err();
    assert!(error.to_string().contains("belongs to the recording"), "{error}");
    let error = program.run(()).unwrap_err();
    assert!(error.to_string().contains("0 arguments for a program with 1 parameters"), "{error}");
    program.run((&x,)).unwrap();
    let error = program.run((&two.empty(&[1], DataType::F32, None).unwrap(),)).unwrap_err();
    assert!(error.to_string().contains("belongs to another session"), "{error}");
    one.sync_all().wait().unwrap();
    one.shutdown().wait().unwrap();
    assert!(program.run((&x,)).is_err());
    refused(one.record(|_| Ok(vec![])), "shut down");
}

#[test]
fn failures_poison_and_are_told_once() {
    everywhere(NODE, &[(2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let fails = session.get_global_func("fail_on").unwrap();
        let bad = fails.call((1,)).unwrap();
        let add = session.get_global_func("add").unwrap();
        let worse = add.call((&bad, 1.0)).unwrap();
        let fine = add.call((1.0, 1.0)).unwrap();
        session.sync_worker(WorkerId(0)).wait().unwrap();
        let error = session.sync_worker(WorkerId(1)).wait().unwrap_err();
        let [failure] = error.failures() else { panic!("{error}") };
        assert_eq!((failure.worker, failure.command.as_str()), (WorkerId(1), "fail_on"));
        assert_eq!((failure.cause.kind(), failure.cause.message()), (ErrorKind::Application, "told to fail"));
        session.sync_all().wait().unwrap();
        // Poisoned registers keep their cause, and the other workers have their results.
        for register in [&bad, &worse] {
            let poison = session.debug_get_from_remote(register, WorkerId(1)).wait().unwrap_err();
            assert_eq!(poison.failures(), error.failures());
        }
        assert_eq!(value(session, &worse, 0), Value::Float(2.0));
        assert_eq!(value(session, &fine, 1), Value::Float(2.0));

        // One worker has no input: no worker has an output, and the group goes on.
        let x = session.get_global_func("tensor_unless").unwrap().call((1,)).unwrap();
        let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), 1, "{error}");
        for worker in 0..n {
            let poison = session.debug_get_from_remote(&sum, WorkerId(worker)).wait().unwrap_err();
            assert!(poison.to_string().contains("no tensor here"), "{poison}");
        }
        let healthy = by_worker(session, &[2]);
        session.allreduce(&healthy, None, ReduceOp::Sum, Scope::World).unwrap();
        session.sync_all().wait().unwrap();

        // Failures by a panic on one worker, by an unknown name, and by tensors that do not fit.
        session.get_global_func("panic_on").unwrap().call((0,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::Panic);
        let unknown = session.get_global_func("no such function").unwrap();
        unknown.call(()).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize, "{error}");
        let small = session.empty(&[1], DataType::F32, None).unwrap();
        session.allreduce(&healthy, Some(&small), ReduceOp::Sum, Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        assert_eq!(error.failures().len(), n as usize);
        assert!(error.to_string().contains("the source is float32 [2], the destination float32 [1]"), "{error}");
        assert_eq!(error.failures()[1].worker, WorkerId(1));
        // Misuse is an error at once.
        let error = session.sync_worker(WorkerId(n)).wait().unwrap_err();
        assert!(error.to_string().contains("there is no worker"), "{error}");
    });
}

#[test]
fn registers_come_back_in_order_under_random_drops() {
    everywhere(NODE, &[(2, 1)], |session| {
        let echo = session.get_global_func("echo").unwrap();
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut live: Vec<(DRef, i64)> = Vec::new();
        let mut highest = 0;
        for step in 0..3000_i64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            if live.len() > 20 || (random.is_multiple_of(3) && !live.is_empty()) {
                let at = random as usize / 3 % live.len();
                live.swap_remove(at);
            } else {
                let made = echo.call((step,)).unwrap();
                highest = highest.max(made.register());
                live.push((made, step));
            }
            if step % 500 == 0 {
                for (register, expected) in &live {
                    assert_eq!(value(session, register, 1), Value::Int(*expected));
                }
            }
        }
        assert!(highest < 64, "registers are used again, and {highest} was reached");
    });
}

#[test]
fn a_small_window_holds_the_controller_back_and_nothing_is_lost() {
    let mut options = disco::Options::default();
    options.window = 4096;
    let session = disco::ThreadedSession::new(2, 1).registry(rpc_tests::spmd::registry()).options(options);
    let session = session.start().wait().unwrap();
    let x = session.empty(&[1], DataType::F32, None).unwrap();
    let add = session.get_global_func("add_to").unwrap();
    for _ in 0..2000 {
        add.call((&x, 1.0)).unwrap();
    }
    assert_eq!(tensor(&session, &x, 1).1, [2000.0]);
    session.shutdown().wait().unwrap();
    // Operations of an ended session fail, and a second shutdown succeeds.
    let error = add.call((&x, 1.0)).unwrap_err();
    assert!(matches!(&error, DiscoError::Session(error) if error.kind() == ErrorKind::Closed), "{error}");
    session.shutdown().wait().unwrap();
}

#[test]
fn async_programs_await() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let session = disco::ThreadedSession::new(2, 1).registry(rpc_tests::spmd::registry()).start().await.unwrap();
        session.room().await.unwrap();
        let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
        assert!(matches!(
            session.debug_get_from_remote(&id, WorkerId(1)).await.unwrap(),
            Content::Value(Value::Int(1))
        ));
        session.sync_all().await.unwrap();
        session.shutdown().await.unwrap();
    });
}

/// Returns true once the process has ended and been reaped, which may take a while; false if it
/// takes too long.
fn has_gone(pid: i64) -> bool {
    let began = Instant::now();
    while std::path::Path::new(&format!("/proc/{pid}/stat")).exists() {
        if began.elapsed() > Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

fn pids(session: &DiscoSession) -> Vec<i64> {
    let pid = session.get_global_func("pid").unwrap().call(()).unwrap();
    (0..session.num_workers())
        .map(|worker| match value(session, &pid, worker) {
            Value::Int(pid) => pid,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn no_process_is_left_after_a_shutdown_or_without_one() {
    for shut_down in [true, false] {
        let fixture = Launch::Processes(NODE).start(2, 1);
        let pids = pids(&fixture.session);
        if shut_down {
            fixture.session.shutdown().wait().unwrap();
        }
        drop(fixture);
        assert!(pids.iter().all(|pid| has_gone(*pid)));
    }
}

#[test]
fn a_dead_worker_ends_the_session_for_everybody() {
    for in_collective in [false, true] {
        let fixture = Launch::Processes(NODE).start(3, 1);
        let session = &fixture.session;
        let pids = pids(session);
        let x = by_worker(session, &[4]);
        session.get_global_func("die_on").unwrap().call((1,)).unwrap();
        if in_collective {
            session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
        }
        let error = session.sync_all().wait().unwrap_err();
        let lost =
            |error: &DiscoError| matches!(error, DiscoError::Session(error) if error.kind() == ErrorKind::PeerLost);
        assert!(lost(&error), "{error}");
        assert!(error.to_string().contains("worker 1 at "), "{error}");
        // Later operations fail with the same error.
        assert_eq!(session.copy_from_worker_0(&x).wait().unwrap_err(), error);
        assert_eq!(session.empty(&[1], DataType::F32, None).unwrap_err(), error);
        session.shutdown().wait().unwrap();
        assert!(pids.iter().all(|pid| has_gone(*pid)));
    }
}

#[test]
fn servers_are_free_again_after_a_session() {
    for (shut_down, data) in
        [(true, Data::Shared), (false, Data::Shared), (true, Data::Relayed), (false, Data::Relayed)]
    {
        let mut fixture = Launch::Tcp { per_node: 1, data }.start(2, 1);
        fixture.session.barrier(Scope::World).unwrap();
        fixture.session.sync_all().wait().unwrap();
        assert_eq!(fixture.sessions(), 2);
        let other = Launch::Threads.start(1, 1).session;
        let session = std::mem::replace(&mut fixture.session, other);
        if shut_down {
            session.shutdown().wait().unwrap();
        }
        drop(session);
        let began = Instant::now();
        while fixture.sessions() > 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "the servers still have sessions");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn references_of_one_session_are_refused_by_another() {
    let (one, two) = (Launch::Threads.start(1, 1).session, Launch::Threads.start(1, 1).session);
    let x = one.empty(&[1], DataType::F32, None).unwrap();
    let echo = two.get_global_func("echo").unwrap();
    let errors = [
        echo.call((&x,)).unwrap_err(),
        one.call_packed(&echo, ()).unwrap_err(),
        two.barrier(Scope::World).and(two.allreduce(&x, None, ReduceOp::Sum, Scope::World)).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().contains("belongs to another session"), "{error}");
    }
}

#[test]
fn shutdown_returns_though_a_worker_is_busy() {
    let fixture = Launch::Threads.start(2, 1);
    let session = &fixture.session;
    session.get_global_func("sleep_on").unwrap().call((1, 20_000)).unwrap();
    let error = session.shutdown().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded);
    let error = session.sync_all().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Closed);
}

#[test]
fn workers_without_a_way_to_each_other_do_all_else() {
    let mut options = disco::Options::default();
    // One address for two nodes.
    options.data_addresses = vec![std::net::Ipv4Addr::LOCALHOST.into()];
    let sessions = (0..2).map(|_| rpc_core::Session::new(rpc_core::LocalSession::new(rpc_tests::spmd::registry())));
    let session = DiscoSession::over(sessions, 1, 1, options).wait().unwrap();
    let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &id, 1), Value::Int(1));
    session.sync_all().wait().unwrap();
    session.barrier(Scope::World).unwrap();
    let error = session.sync_all().wait().unwrap_err();
    assert!(error.to_string().contains("the data addresses of 1 of 2 nodes are known"), "{error}");
    session.shutdown().wait().unwrap();
}

/// Unless the controller may relay, the error names the pairs of workers without a path to each
/// other. If it may, their data goes through it.
#[test]
fn pairs_without_a_way_are_named_unless_their_data_may_be_relayed() {
    let network = runtime();
    let start = |may_relay: bool| {
        let (addresses, servers) = serve(&network, 3);
        let mut options = disco::Options::default();
        Data::Relayed.set(3, &mut options);
        options.allow_controller_relay = may_relay;
        options.init_timeout = std::time::Duration::from_secs(1);
        (SocketSession::new(addresses, 1, 1).options(options).start().wait().unwrap(), servers)
    };
    let (session, _servers) = start(false);
    let told = session.sync_all().wait().unwrap_err().to_string();
    for (from, to) in [(1, 0), (2, 0), (2, 1)] {
        assert!(told.contains(&format!("rank {from} cannot reach rank {to} at tcp://127.7.7.7:1")), "{told}");
    }
    assert!(told.contains("Options::allow_controller_relay"), "{told}");
    // All other operations work.
    let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &id, 2), Value::Int(2));
    session.shutdown().wait().unwrap();

    let (session, _servers) = start(true);
    let x = session.empty(&[1 << 20], DataType::F32, None).unwrap();
    session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    session.shutdown().wait().unwrap();
}

/// Without data addresses in the options, nodes of several machines name their own, or the
/// controller relays, or there are no collectives.
#[test]
fn nodes_of_several_machines_meet_where_they_say_or_by_way_of_the_controller() {
    let start = |data: Option<&str>, may_relay: bool| {
        let nodes: Option<Vec<Node>> = (0..2).map(|_| Node::apart(NODE, data)).collect();
        let nodes = nodes?;
        let mut options = disco::Options::default();
        options.allow_controller_relay = may_relay;
        let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_owned()).collect();
        let session = SocketSession::new(addresses, 2, 2).options(options).start().wait().unwrap();
        session.sync_all().wait().unwrap();
        for scope in [Scope::World, Scope::Group] {
            session.barrier(scope).unwrap();
        }
        Some((session.sync_all().wait(), session, nodes))
    };
    let Some((outcome, _session, _nodes)) = start(None, false) else {
        assert!(std::env::var_os("RPC_TESTS_REQUIRE_NETNS").is_none(), "namespaces are demanded");
        println!("SKIPPED: namespaces of processes cannot be made here");
        return;
    };
    let told = outcome.unwrap_err().to_string();
    assert!(told.contains("the data addresses of 0 of 2 nodes are known"), "{told}");
    for (data, may_relay) in [(Some("127.0.0.1"), false), (None, true)] {
        let (outcome, session, _nodes) = start(data, may_relay).unwrap();
        outcome.unwrap();
        session.shutdown().wait().unwrap();
    }
}

#[test]
fn launches_that_cannot_be_are_refused() {
    let refused = |launch: Launch, workers, groups| match launch.try_start(workers, groups) {
        Ok(_) => panic!("a session"),
        Err(error) => error.to_string(),
    };
    assert!(refused(Launch::Threads, 3, 2).contains("3 workers cannot be in 2 groups"));
    assert!(refused(Launch::Threads, 0, 1).contains("0 workers"));
    assert!(refused(Launch::Processes("/nowhere/at/all"), 2, 1).contains("/nowhere/at/all"));
    let session = rpc_core::Session::new(rpc_core::LocalSession::new(rpc_core::Registry::new()));
    let error = DiscoSession::over([session], 1, 1, disco::Options::default()).wait().unwrap_err();
    assert!(error.to_string().contains("it is no node"), "{error}");
    let mut options = disco::Options::default();
    options.keep_alive = std::time::Duration::ZERO;
    let error = Launch::Processes(NODE).try_start_with(2, 1, options).map(drop).unwrap_err();
    assert!(error.to_string().contains("a keep_alive below 1 ms"), "{error}");
}

/// Nodes open each other only if the operator of each allows it, and only at addresses.
#[test]
fn a_tree_of_nodes_needs_leave_and_addresses() {
    let runtime = runtime();
    let (addresses, _servers) = serve(&runtime, 3);
    let error = SocketSession::new(&addresses, 1, 1).fan_out(1).start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("--allow-forward"), "{error}");
    // With a fan-out as large as the number of nodes, no node opens another one.
    let session = SocketSession::new(&addresses, 1, 1).fan_out(3).start().wait().unwrap();
    session.shutdown().wait().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let error = SocketSession::dialled_by(2, &listener, 1, 1).fan_out(1).start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::InvalidArgument, "{error}");
}
