//! Modules of TVM-FFI in a session of this process: values, tensors, functions and errors in both
//! directions.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::{
    DataType, Device, DeviceType, ErrorKind, Lane, LocalSession, LocalValue, Registry, RemoteFunction, RemoteModule,
    RemoteObject, RemoteTensor, RpcError, Session, Shape, Value,
};
use rpc_tests::accelerator::{Accelerator, DEFAULT_STREAMS, SHARED_MEMORY, take_waits};
use rpc_tests::tvm_ffi::{Environment, environment};

struct Fixture {
    session: Session,
    c: RemoteModule,
    cpp: RemoteModule,
}

/// Opens a session with both modules. Returns `None` without TVM-FFI.
fn fixture() -> Option<Fixture> {
    let environment = environment()?;
    let registry = Registry::new();
    registry.add("twice", |x: i64| 2 * x);
    registry.add("fail", || -> Result<(), RpcError> {
        Err(RpcError::new(ErrorKind::OutOfMemory, "on purpose").with_application_kind("tests.Purpose"))
    });
    registry.add("panic", || -> () { panic!("on purpose") });
    Some(in_session(environment, &registry))
}

fn in_session(environment: &Environment, registry: &Registry) -> Fixture {
    registry.add_loader(Arc::new(environment.tvm_ffi()));
    let session = Session::new(LocalSession::new(registry.clone()));
    let load = |source| session.load_module(environment.compile(source).to_str().unwrap()).wait().unwrap();
    Fixture { c: load("kernels.c"), cpp: load("kernels.cc"), session }
}

impl Fixture {
    fn c(&self, name: &str) -> RemoteFunction {
        self.c.function(name).wait().unwrap()
    }

    fn cpp(&self, name: &str) -> RemoteFunction {
        self.cpp.function(name).wait().unwrap()
    }

    fn tensor(&self, shape: &[i64], elements: &[f32]) -> RemoteTensor {
        let tensor = self.session.alloc(Device::cpu(), DataType::F32, shape).wait().unwrap();
        self.session.copy_to_remote(&tensor, rpc_core::dlpack::to_bytes(elements)).wait().unwrap();
        tensor
    }

    fn elements(&self, tensor: &RemoteTensor) -> Vec<f32> {
        rpc_core::dlpack::from_bytes(&self.session.copy_from_remote(tensor).wait().unwrap())
    }
}

fn failure<T: std::fmt::Debug>(outcome: rpc_core::Result<T>) -> RpcError {
    outcome.unwrap_err()
}

#[test]
fn every_value_that_has_a_counterpart_comes_back_as_it_was() {
    let Some(fixture) = fixture() else { return };
    let identity = fixture.cpp("identity");
    let long = "no small string, with a NUL \0 in it, and ümläuts".repeat(100);
    let values = [
        Value::Null,
        true.into(),
        false.into(),
        i64::MIN.into(),
        i64::MAX.into(),
        (-0.0_f64).into(),
        f64::INFINITY.into(),
        "".into(),
        "small".into(),
        "a\0b".into(),
        "exactly".into(),
        "just over".into(),
        long.into(),
        Value::Bytes(Bytes::new()),
        Value::Bytes(Bytes::from_static(b"\0\xff\0")),
        Value::Bytes(Bytes::from(vec![7; 1 << 20])),
        Value::Shape(vec![]),
        Value::Shape(vec![1, 0, i64::MAX]),
        DataType::F32.into(),
        Value::DataType("float16x4".parse().unwrap()),
        Value::DataType("bool".parse().unwrap()),
        Device::cpu().into(),
        Device::cuda(3).into(),
        Value::List(vec![]),
        Value::List(vec![1.into(), "two".into(), Value::List(vec![Value::Null, 3.5.into()])]),
        Value::Map(vec![]),
        Value::Map(vec![("key".into(), Value::List(vec![1.into()]))]),
    ];
    for value in values {
        let back: Value = identity.call((value.clone(),)).wait().unwrap();
        assert_eq!(back, value);
    }
    // The order of the entries of a map is unspecified.
    let pairs: Vec<(Value, Value)> = (0..100).map(|i| (Value::from(i), Value::from(i * i))).collect();
    let Value::Map(mut back) = identity.call((Value::Map(pairs.clone()),)).wait().unwrap() else { panic!("no map") };
    back.sort_by_key(|(key, _)| if let Value::Int(key) = key { *key } else { i64::MAX });
    assert_eq!(back, pairs);
    let list: Value = fixture.cpp("list_of").call((1, "x")).wait().unwrap();
    assert_eq!(list, Value::List(vec![1.into(), "x".into()]));
    let described: Value =
        fixture.cpp("describe").call((Value::Map(vec![("a".into(), Value::List(vec![]))]),)).wait().unwrap();
    assert_eq!(described, Value::Map(vec![("a".into(), "ffi.Array".into())]));
    let bytes: Value = fixture.cpp("not_text").call(()).wait().unwrap();
    assert_eq!(bytes, Value::Bytes(Bytes::from_static(b"\xff\xfe plainly not UTF-8")));
    let packed = failure(identity.call::<Value>((rpc_core::Pack(7),)).wait());
    assert_eq!(packed.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn values_arrive_in_the_form_that_is_documented() {
    let Some(fixture) = fixture() else { return };
    let index = fixture.c("type_index");
    let of = |value: Value| index.call::<i64>((value,)).wait().unwrap();
    assert_eq!(of(Value::Null), 0);
    assert_eq!((of(1.into()), of(true.into()), of(1.0.into())), (1, 2, 3));
    assert_eq!((of("small".into()), of("not small".into())), (11, 65));
    assert_eq!(of(Value::Bytes(Bytes::from_static(b"any"))), 9);
    assert_eq!((of(Value::Shape(vec![1])), of(Value::List(vec![])), of(Value::Map(vec![]))), (69, 71, 72));
    let tensor = fixture.tensor(&[1], &[1.0]);
    assert_eq!(index.call::<i64>((&tensor,)).wait().unwrap(), 7);
    // A string of C, because the metadata declare one.
    assert_eq!(fixture.cpp("length").call::<i64>(("four",)).wait().unwrap(), 4);
    let error = failure(fixture.cpp("length").call::<i64>(("fo\0ur",)).wait());
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("NUL"), "{error}");
}

#[test]
fn tensors_are_used_without_a_copy() {
    let Some(fixture) = fixture() else { return };
    let (x, y) = (fixture.tensor(&[4], &[1.0, 2.0, 3.0, 4.0]), fixture.tensor(&[4], &[0.0; 4]));
    fixture.c("scale").call::<()>((&x, &y, 2.0)).wait().unwrap();
    assert_eq!(fixture.elements(&y), [2.0, 4.0, 6.0, 8.0]);
    // One storage is borrowed once, and changed in place.
    fixture.c("scale").call::<()>((&x, &x, 10.0)).wait().unwrap();
    assert_eq!(fixture.elements(&x), [10.0, 20.0, 30.0, 40.0]);
    // The data of a view begin at its first element.
    let address = fixture.c("address");
    let whole: i64 = address.call((&x,)).wait().unwrap();
    let part = x.view(8, DataType::F32, &[2], None);
    assert_eq!(address.call::<i64>((&part,)).wait().unwrap(), whole + 8);
    fixture.c("scale").call::<()>((&part, &part, 0.5)).wait().unwrap();
    assert_eq!(fixture.elements(&x), [10.0, 20.0, 15.0, 20.0]);
    // Strides: the transpose of one matrix, and every second column of another.
    let matrix = fixture.tensor(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let transposed = matrix.view(0, DataType::F32, &[2, 2], Some(&[1, 2]));
    let wide = fixture.tensor(&[2, 4], &[10.0, 0.0, 20.0, 0.0, 30.0, 0.0, 40.0, 0.0]);
    let columns = wide.view(0, DataType::F32, &[2, 2], Some(&[4, 2]));
    let sum = fixture.tensor(&[2, 2], &[0.0; 4]);
    fixture.cpp("add_tensors").call::<()>((&transposed, &columns, &sum)).wait().unwrap();
    assert_eq!(fixture.elements(&sum), [11.0, 23.0, 32.0, 44.0]);
    // A tensor without elements.
    let empty = fixture.tensor(&[0], &[]);
    fixture.c("scale").call::<()>((&empty, &empty, 2.0)).wait().unwrap();
}

#[test]
fn a_tensor_that_comes_back_is_the_one_that_went_in() {
    let Some(fixture) = fixture() else { return };
    let x = fixture.tensor(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let address: i64 = fixture.c("address").call((&x,)).wait().unwrap();
    // The tensor comes back as an object, as a view, and within lists and maps.
    let back: RemoteTensor = fixture.cpp("identity_tensor").call((&x,)).wait().unwrap();
    assert_eq!((back.shape(), back.dtype()), (&[2, 3][..], DataType::F32));
    assert_eq!(fixture.c("address").call::<i64>((&back,)).wait().unwrap(), address);
    let part = x.view(12, DataType::F32, &[3], None);
    let back_part: RemoteTensor = fixture.cpp("identity_tensor").call((&part,)).wait().unwrap();
    assert_eq!(back_part.byte_offset(), 12);
    assert_eq!(fixture.elements(&back_part), [4.0, 5.0, 6.0]);
    let list: Vec<RemoteTensor> = fixture.cpp("identity").call((vec![&x, &back],)).wait().unwrap();
    assert_eq!(fixture.elements(&list[1]), fixture.elements(&x));
    assert_eq!(fixture.cpp("sum_of_all").call::<f64>((vec![&x, &part],)).wait().unwrap(), 36.0);
    // Two references are left, the argument and the parameter: earlier ones have been released.
    assert_eq!(fixture.cpp("references_of").call::<i64>((&x,)).wait().unwrap(), 2);
}

#[test]
fn tensors_of_modules_become_the_sessions() {
    let Some(fixture) = fixture() else { return };
    // Memory is allocated by the environment, which is the session, and by the module itself.
    let x = fixture.tensor(&[3], &[1.0, 2.0, 3.0]);
    let squares: RemoteTensor = fixture.cpp("squares").call((&x,)).wait().unwrap();
    assert_eq!(fixture.elements(&squares), [1.0, 4.0, 9.0]);
    let count: RemoteTensor = fixture.cpp("count").call((5,)).wait().unwrap();
    assert_eq!((fixture.elements(&count), count.device()), (vec![0.0, 1.0, 2.0, 3.0, 4.0], Device::cpu()));
    fixture.c("scale").call::<()>((&count, &count, 3.0)).wait().unwrap();
    assert_eq!(fixture.elements(&count), [0.0, 3.0, 6.0, 9.0, 12.0]);
    fixture.session.copy_to_remote(&count, rpc_core::dlpack::to_bytes(&[7.0_f32; 5])).wait().unwrap();
    assert_eq!(fixture.elements(&count), [7.0; 5]);
    let empty: RemoteTensor = fixture.cpp("count").call((0,)).wait().unwrap();
    assert!(fixture.elements(&empty).is_empty());
    // A tensor that the module holds beyond the call stays, even if this side frees it.
    let address: i64 = fixture.c("address").call((&count,)).wait().unwrap();
    fixture.cpp("hold").call::<()>((vec![&count],)).wait().unwrap();
    drop(count);
    let held: Vec<RemoteTensor> = fixture.cpp("held").call(()).wait().unwrap();
    assert_eq!(fixture.elements(&held[0]), [7.0; 5]);
    assert_eq!(fixture.c("address").call::<i64>((&held[0],)).wait().unwrap(), address);
    fixture.cpp("let_go").call::<()>(()).wait().unwrap();
    assert_eq!(fixture.elements(&held[0]), [7.0; 5]);
}

#[test]
fn memory_of_modules_counts_against_the_sessions() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add("memory", |context: rpc_core::Context| context.usage().memory_bytes);
    let fixture = in_session(environment, &registry);
    let memory = || fixture.session.get_function("memory").wait().unwrap().call::<u64>(()).wait().unwrap();
    assert_eq!(memory(), 0);
    let x = fixture.tensor(&[4], &[0.0; 4]);
    let squares: RemoteTensor = fixture.cpp("squares").call((&x,)).wait().unwrap();
    let count: RemoteTensor = fixture.cpp("count").call((1000,)).wait().unwrap();
    assert_eq!(memory(), 16 + 16 + 4000);
    drop((squares, count));
    let begun = Instant::now();
    while memory() != 16 {
        assert!(begun.elapsed() < Duration::from_secs(30), "memory that nobody has is still counted");
    }
    // Both kinds of allocation fail above the session's limit.
    let limits = rpc_core::SessionLimits { max_memory: 1000, ..Default::default() };
    registry.add_loader(Arc::new(environment.tvm_ffi()));
    let session = Session::new(LocalSession::builder(registry).limits(limits).build());
    let module = session.load_module(environment.compile("kernels.cc").to_str().unwrap()).wait().unwrap();
    let count = module.function("count").wait().unwrap();
    assert_eq!(failure(count.call::<RemoteTensor>((1000,)).wait()).kind(), ErrorKind::LimitExceeded);
    let x = session.alloc(Device::cpu(), DataType::F32, &[200]).wait().unwrap();
    let error = failure(module.function("squares").wait().unwrap().call::<RemoteTensor>((&x,)).wait());
    assert!(error.message().contains("max_memory"), "{error}");
}

#[test]
fn functions_modules_and_objects_are_handles() {
    let Some(fixture) = fixture() else { return };
    let adder: RemoteFunction = fixture.cpp("adder").call((5,)).wait().unwrap();
    assert_eq!(adder.call::<i64>((1,)).wait().unwrap(), 6);
    // An object that goes back to native code is the original.
    assert_eq!(fixture.cpp("apply").call::<i64>((&adder, 10)).wait().unwrap(), 15);
    let again: RemoteFunction = fixture.cpp("identity").call((&adder,)).wait().unwrap();
    assert_eq!(again.call::<i64>((1,)).wait().unwrap(), 6);
    let module: RemoteModule = fixture.cpp("identity").call((&fixture.c,)).wait().unwrap();
    let empty = module.function("empty").wait().unwrap();
    empty.call::<()>(()).wait().unwrap();
    // Native objects of an unknown type.
    let counter: RemoteObject = fixture.cpp("counter").call(()).wait().unwrap();
    let increment = fixture.cpp("increment");
    assert_eq!(increment.call::<i64>((&counter,)).wait().unwrap(), 1);
    assert_eq!(increment.call::<i64>((&counter,)).wait().unwrap(), 2);
    let error = failure(increment.call::<i64>((&adder,)).wait());
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("expected a counter"), "{error}");
    let pointer: RemoteObject = fixture.c("pointer").call(()).wait().unwrap();
    assert!(fixture.c("same_pointer").call::<bool>((&pointer,)).wait().unwrap());
    // Objects of Rust are opaque to native code.
    let stream = fixture.session.create_stream(Device::cpu()).wait().unwrap();
    let error = failure(fixture.cpp("identity").call::<Value>((&stream,)).wait());
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("TVM-FFI"), "{error}");
}

#[test]
fn foreign_code_calls_functions_of_the_session() {
    let Some(fixture) = fixture() else { return };
    let twice = fixture.session.get_function("twice").wait().unwrap();
    let apply = fixture.cpp("apply");
    assert_eq!(apply.call::<i64>((&twice, 21)).wait().unwrap(), 42);
    assert_eq!(fixture.cpp("call_on_thread").call::<Value>((&fixture.c("empty"),)).wait().unwrap(), Value::Null);
    // The closure is held beyond the call, and called in a later one.
    fixture.c("keep").call::<()>((&twice,)).wait().unwrap();
    drop(twice);
    assert_eq!(fixture.c("call_kept").call::<i64>((4,)).wait().unwrap(), 8);
    fixture.c("forget_kept").call::<()>(()).wait().unwrap();
    assert!(failure(fixture.c("call_kept").call::<i64>((4,)).wait()).message().contains("nothing is kept"));
    // Errors pass unchanged through native code that does not handle them.
    let fail = fixture.session.get_function("fail").wait().unwrap();
    let call = fixture.session.get_function("panic").wait().unwrap();
    for _ in 0..2 {
        let error = failure(
            fixture.c("keep").call::<()>((&fail,)).wait().and_then(|()| fixture.c("call_kept").call::<()>(()).wait()),
        );
        assert_eq!((error.kind(), error.message()), (ErrorKind::OutOfMemory, "on purpose"));
        assert_eq!(error.application_kind(), Some("tests.Purpose"));
    }
    let error = failure(
        fixture.c("keep").call::<()>((&call,)).wait().and_then(|()| fixture.c("call_kept").call::<()>(()).wait()),
    );
    assert_eq!((error.kind(), error.message()), (ErrorKind::Panic, "on purpose"));
    fixture.c("forget_kept").call::<()>(()).wait().unwrap();
    // Native code catches the error and raises its own.
    let error = failure(fixture.cpp("call_on_thread").call::<()>((&fail,)).wait());
    assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Application, Some("RuntimeError")));
    assert!(error.message().contains("on purpose"), "{error}");
}

#[test]
fn tensors_are_free_while_foreign_code_calls_back() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add("fill", |tensor: rpc_core::Tensor, value: f32| -> rpc_core::Result<()> {
        tensor.write()?.as_mut_slice::<f32>()?.fill(value);
        Ok(())
    });
    registry.add("fill_with_seven", |tensor: rpc_core::Tensor| -> rpc_core::Result<()> {
        tensor.write()?.as_mut_slice::<f32>()?.fill(7.0);
        Ok(())
    });
    registry.add("describe", |tensor: rpc_core::Tensor| -> rpc_core::Result<Vec<f32>> {
        assert_eq!(tensor.shape(), [2, 2]);
        Ok(tensor.read()?.as_slice::<f32>()?.to_vec())
    });
    let fixture = in_session(environment, &registry);
    let x = fixture.tensor(&[2], &[1.0, 2.0]);
    let fill = fixture.session.get_function("fill_with_seven").wait().unwrap();
    assert_eq!(fixture.cpp("apply_to_tensor").call::<f64>((&fill, &x)).wait().unwrap(), 7.0);
    assert_eq!(fixture.elements(&x), [7.0, 7.0]);
    // A view of the module's own memory is copied, because nothing keeps it alive.
    let describe = fixture.session.get_function("describe").wait().unwrap();
    let seen: Vec<f64> = fixture.cpp("apply_to_own_view").call((&describe,)).wait().unwrap();
    assert_eq!(seen, [1.0, 3.0, 5.0, 7.0]);
}

#[test]
fn a_tensor_that_another_lane_has_borrowed_is_waited_for() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    let (held, when_held) = mpsc::channel::<()>();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (when_held, may_go_on) = (std::sync::Mutex::new(when_held), std::sync::Mutex::new(may_go_on));
    let (running, when_running) = mpsc::channel::<()>();
    let running = std::sync::Mutex::new(running);
    // The closure waits until another lane has borrowed the tensor for writing.
    registry.add("wait", move |_: LocalValue| {
        running.lock().unwrap().send(()).unwrap();
        when_held.lock().unwrap().recv().unwrap();
    });
    let held = std::sync::Mutex::new(held);
    registry.add("take", move |mut tensor: rpc_core::TensorViewMut| -> rpc_core::Result<()> {
        held.lock().unwrap().send(()).unwrap();
        may_go_on.lock().unwrap().recv().unwrap();
        tensor.as_mut_slice::<f32>()?.fill(9.0);
        Ok(())
    });
    let fixture = in_session(environment, &registry);
    let x = fixture.tensor(&[1], &[1.0]);
    let [wait, take] = ["wait", "take"].map(|name| fixture.session.get_function(name).wait().unwrap());
    let outer = fixture.cpp("apply_to_tensor").call::<f64>((&wait, &x)).concurrent().start();
    when_running.recv().unwrap();
    let inner = take.call::<()>((&x,)).concurrent().start();
    go_on.send(()).unwrap();
    inner.wait().unwrap();
    // The native function has read the tensor after the other lane had written it.
    assert_eq!(outer.wait().unwrap(), 9.0);
}

#[test]
fn functions_borrow_tensors_of_their_callers() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add("add_one", |mut tensor: rpc_core::TensorViewMut| -> rpc_core::Result<()> {
        tensor.as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += 1.0);
        Ok(())
    });
    registry.add("read", |tensor: rpc_core::TensorView| -> rpc_core::Result<()> {
        assert!(tensor.as_slice::<f32>()?[0] >= 0.0);
        Ok(())
    });
    let fixture = in_session(environment, &registry);
    let [add_one, read] = ["add_one", "read"].map(|name| fixture.session.get_function(name).wait().unwrap());
    let (apply, x) = (fixture.cpp("apply_to_tensor"), fixture.tensor(&[1], &[0.0]));
    // Other lanes wait for the tensor all the time, and do not get it in between.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    apply.call::<f64>((&add_one, &x)).concurrent().wait().unwrap();
                    apply.call::<f64>((&read, &x)).concurrent().wait().unwrap();
                }
            });
        }
    });
    assert_eq!(fixture.elements(&x), [200.0]);
}

#[test]
fn a_tensor_of_a_module_keeps_its_identity() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add("memory", |context: rpc_core::Context| context.usage().memory_bytes);
    registry.add("both", |_: rpc_core::TensorViewMut, _: rpc_core::TensorView| ());
    let fixture = in_session(environment, &registry);
    let [memory, both] = ["memory", "both"].map(|name| fixture.session.get_function(name).wait().unwrap());
    let parts = fixture.cpp("parts");
    let first: Vec<RemoteTensor> = parts.call(("whole,left,right,whole",)).wait().unwrap();
    let second: Vec<RemoteTensor> = parts.call(("right",)).wait().unwrap();
    assert_eq!(memory.call::<u64>(()).wait().unwrap(), 16);
    assert_eq!((first[1].byte_offset(), first[2].byte_offset(), second[0].byte_offset()), (0, 8, 8));
    for (a, b) in [(&first[0], &first[3]), (&first[1], &first[2]), (&first[0], &second[0])] {
        let error = failure(both.call::<()>((a, b)).wait());
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }
    drop((first, second));
    // In the opposite order the larger view would alias the bytes of the smaller one.
    for order in ["left,whole", "right,whole"] {
        let error = failure(parts.call::<Vec<RemoteTensor>>((order,)).wait());
        assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("overlaps"), "{error}");
    }
    // All its memory is free.
    let again: Vec<RemoteTensor> = parts.call(("whole",)).wait().unwrap();
    assert_eq!(fixture.elements(&again[0]), [0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn an_inline_function_keeps_its_tensors_while_it_calls() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add_inline("take", |_: rpc_core::TensorViewMut| ());
    registry.add_inline("look", |tensor: rpc_core::Tensor| tensor.shape().to_vec());
    let fixture = in_session(environment, &registry);
    let [take, look] = ["take", "look"].map(|name| fixture.session.get_function(name).wait().unwrap());
    let x = fixture.tensor(&[1], &[0.0]);
    let calls = fixture.c("calls_inline");
    assert_eq!(calls.call::<Vec<i64>>((&look, &x)).wait().unwrap(), [1]);
    // An inline function could not wait for the tensors afterwards, on the thread that reads.
    assert_eq!(failure(calls.call::<()>((&take, &x)).wait()).kind(), ErrorKind::Busy);
}

#[test]
fn errors_carry_kind_message_and_backtrace() {
    let Some(fixture) = fixture() else { return };
    let error = failure(fixture.cpp("raise").call::<()>(("ValueError", "what \"happened\" – exactly")).wait());
    assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Application, Some("ValueError")));
    assert_eq!(error.message(), "what \"happened\" – exactly");
    assert!(error.request_may_have_run());
    let error = failure(
        fixture
            .cpp("add_tensors")
            .call::<()>((&fixture.tensor(&[1], &[1.0]), &fixture.tensor(&[1], &[1.0]), &fixture.tensor(&[1], &[1.0])))
            .wait(),
    );
    assert!(error.message().contains("expected matrices"), "{error}");
    assert!(error.backtrace().is_some_and(|backtrace| !backtrace.is_empty()), "{error:?}");
    let error = failure(fixture.c("fails_of_memory").call::<()>(()).wait());
    assert_eq!((error.kind(), error.message()), (ErrorKind::OutOfMemory, "there is none"));
    let error = failure(fixture.c("fails_silently").call::<()>(()).wait());
    assert_eq!(error.kind(), ErrorKind::Internal);
    // An overlong message is cut.
    let error = failure(fixture.cpp("raise").call::<()>(("ValueError", "ö".repeat(1 << 20))).wait());
    assert!(error.message().len() < 20_000);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let Some(fixture) = fixture() else { return };
    let add = fixture.cpp("add");
    assert_eq!(add.call::<i64>((1, 2)).wait().unwrap(), 3);
    for error in [failure(add.call::<i64>((1,)).wait()), failure(add.call::<i64>((1, 2, 3)).wait())] {
        assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("takes 2 arguments"), "{error}");
        assert!(!error.request_may_have_run());
    }
    let error = failure(add.call::<i64>((1, "two")).wait());
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    // A C function without metadata checks its arguments itself.
    let error = failure(fixture.c("scale").call::<()>((1, 2)).wait());
    assert_eq!((error.kind(), error.message()), (ErrorKind::InvalidArgument, "scale takes x, y and a factor"));
    let deep = failure(fixture.cpp("nested").call::<Value>((100,)).wait());
    assert!(deep.message().contains("nested too deeply"), "{deep}");
    let deepest: Value = fixture.cpp("nested").call((60,)).wait().unwrap();
    let depth = std::iter::successors(Some(&deepest), |value| match value {
        Value::List(values) => values.first(),
        _ => None,
    });
    assert_eq!(depth.count(), 61);
}

#[test]
fn unknown_functions_are_errors_that_list_the_known_ones() {
    let Some(fixture) = fixture() else { return };
    let error = failure(fixture.cpp.function("no such function").wait());
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("'no such function'") && error.message().contains("adder"), "{error}");
    assert!(!error.message().contains("__metadata"), "{error}");
}

#[test]
fn inline_functions_of_modules_run_on_the_reading_thread() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add("kind", |function: rpc_core::Function| format!("{:?}", function.kind()));
    registry.add("signature", |function: rpc_core::Function| function.signature().to_string());
    registry.add_inline("inline", || 7_i64);
    registry.add("blocking", || 7_i64);
    let fixture = in_session(environment, &registry);
    let call = |name: &str, function: &RemoteFunction| {
        fixture.session.get_function(name).wait().unwrap().call::<String>((function,)).wait().unwrap()
    };
    let [inline, blocking] = ["inline", "blocking"].map(|name| fixture.session.get_function(name).wait().unwrap());
    assert_eq!(call("kind", &fixture.c("empty")), "Inline");
    assert_eq!(call("kind", &fixture.c("empty_blocking")), "Blocking");
    assert_eq!(call("signature", &fixture.c("empty")), "(...) -> any");
    assert_eq!(call("signature", &fixture.cpp("apply_to_tensor")), "(function, tensor) -> float");
    assert_eq!(call("signature", &fixture.cpp("sum_of_all")), "([tensor]) -> float");
    // An inline function must not call a function that blocks.
    assert_eq!(fixture.c("calls_inline").call::<i64>((&inline,)).wait().unwrap(), 7);
    let error = failure(fixture.c("calls_inline").call::<i64>((&blocking,)).wait());
    assert_eq!(error.kind(), ErrorKind::ApiMisuse);
}

#[test]
fn functions_see_the_streams_of_their_lane() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add_loader(Arc::new(environment.tvm_ffi()));
    registry.add("called_back", |_: Device| 7);
    let devices = rpc_core::Devices::new().with(Arc::new(Accelerator::default()));
    let session = Session::new(LocalSession::builder(registry).devices(devices).build());
    let module = session.load_module(environment.compile("kernels.cc").to_str().unwrap()).wait().unwrap();
    let stream = module.function("stream").wait().unwrap();
    let [first, second] = [0, 1].map(|index| Device::new(DeviceType::EXT_DEV, index));
    let seen = |device: Device, lane: Lane| stream.call::<usize>((device,)).lane(lane).wait().unwrap();
    assert_eq!([seen(first, Lane(0)), seen(second, Lane(0))], DEFAULT_STREAMS);
    let own = session.create_stream(first).wait().unwrap();
    session.set_stream(first, Some(&own)).lane(Lane(3)).wait().unwrap();
    let handle = seen(first, Lane(3));
    assert!(!DEFAULT_STREAMS.contains(&handle) && handle != 0);
    // A copy that the function submits is ordered behind earlier and in front of later work of the
    // session.
    assert_eq!(take_waits(handle), [(handle, DEFAULT_STREAMS[0]), (DEFAULT_STREAMS[0], handle)]);
    // A function that is called back is ordered behind earlier and in front of later work.
    let apply = module.function("apply").wait().unwrap();
    let called_back = session.get_function("called_back").wait().unwrap();
    assert_eq!(apply.call::<i64>((&called_back, first)).lane(Lane(3)).wait().unwrap(), 7);
    let (into, back) = ((handle, DEFAULT_STREAMS[0]), (DEFAULT_STREAMS[0], handle));
    assert_eq!(take_waits(handle), [into, back, into, back]);
    assert_eq!([seen(second, Lane(3)), seen(first, Lane(0))], [DEFAULT_STREAMS[1], DEFAULT_STREAMS[0]]);
    assert_eq!(seen(first, Lane(3)), handle);
    assert_eq!(seen(first, Lane::CONCURRENT), DEFAULT_STREAMS[0]);
    session.set_stream(first, None).lane(Lane(3)).wait().unwrap();
    assert_eq!(seen(first, Lane(3)), DEFAULT_STREAMS[0]);
    // The host has no streams, and the function itself refuses a device that is not offered.
    assert_eq!([seen(Device::cpu(), Lane(0)), seen(Device::cuda(0), Lane(0))], [0, 0]);
    // Memory without a host address is not lent.
    let tensor = session.alloc(first, DataType::F32, &[4]).wait().unwrap();
    for argument in ["identity", "identity_tensor"] {
        let error = failure(module.function(argument).wait().unwrap().call::<Value>((&tensor,)).wait());
        assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("ext_dev:0"), "{error}");
    }
}

/// Regression: the thread that reads the connection waited for the device.
#[test]
fn an_inline_function_takes_no_memory_for_which_it_would_have_to_wait() {
    let Some(environment) = environment() else { return };
    let registry = Registry::new();
    registry.add_loader(Arc::new(environment.tvm_ffi()));
    let devices = rpc_core::Devices::new().with(Arc::new(Accelerator::default()));
    let session = Session::new(LocalSession::builder(registry).devices(devices).build());
    let module = session.load_module(environment.compile("kernels.c").to_str().unwrap()).wait().unwrap();
    let [inline, blocking] = ["empty", "empty_blocking"].map(|name| module.function(name).wait().unwrap());
    let device = Device::new(DeviceType::EXT_DEV, 0);
    let shared = session.alloc_in_scope(device, DataType::F32, &[4], Some(SHARED_MEMORY)).wait().unwrap();
    blocking.call::<()>((&shared,)).wait().unwrap();
    let error = failure(inline.call::<()>((&shared,)).wait());
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("'rpc_inline'"), "{error}");
    inline.call::<()>(()).wait().unwrap();
}

#[test]
fn many_threads_call_at_once() {
    let Some(fixture) = fixture() else { return };
    let (add, apply) = (fixture.cpp("add"), fixture.cpp("apply"));
    let twice = fixture.session.get_function("twice").wait().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (add, apply, twice) = (&add, &apply, &twice);
            scope.spawn(move || {
                for i in 0..200 {
                    assert_eq!(add.call::<i64>((thread, i)).concurrent().wait().unwrap(), thread + i);
                    assert_eq!(apply.call::<i64>((twice, i)).concurrent().wait().unwrap(), 2 * i);
                }
            });
        }
    });
}

#[test]
fn shapes_of_any_value_are_kept() {
    let Some(fixture) = fixture() else { return };
    let back: Shape = fixture.cpp("identity").call((Shape(vec![2, 3]),)).wait().unwrap();
    assert_eq!(back, Shape(vec![2, 3]));
}
