//! Modules.

use std::time::Duration;

use rpc_core::{DataType, Device, ErrorKind, RemoteFunction, RemoteModule, RemoteObject, Shape};

use crate::harness::Harness;

/// A module that the origin registered is loaded by its name, and its functions of all kinds are
/// found and called.
pub async fn a_registered_module_is_loaded_and_its_functions_called(harness: &Harness) {
    let client = harness.client().await;
    let module = client.get(client.session.load_module("arithmetic")).await;
    assert_eq!(client.get(client.get(module.function("square")).await.call::<i64>((12,))).await, 144);
    assert_eq!(client.get(client.get(module.function("negate")).await.call::<i64>((12,))).await, -12);
    assert_eq!(client.get(client.get(module.function("half")).await.call::<f64>((5.0,))).await, 2.5);
}

/// A function of a module stays when the module's reference goes.
pub async fn a_function_outlives_the_reference_to_its_module(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let module = client.get(client.session.load_module("arithmetic")).await;
    let square = client.get(module.function("square")).await;
    drop(module);
    assert_eq!(client.get(square.call::<i64>((9,))).await, 81);
    drop(square);
    client.settles_at(baseline).await;
}

/// A module that does not exist is not found, and the error lists those that do.
pub async fn what_there_is_not_is_not_found(harness: &Harness) {
    let client = harness.client().await;
    let module = client.get(client.session.load_module_with("named", "arithmetic")).await;
    let errors = [
        harness.get(module.function("cube")).await.unwrap_err(),
        harness.get(client.session.load_module("geometry")).await.unwrap_err(),
        harness.get(client.session.load_module_with("named", "geometry")).await.unwrap_err(),
        harness.get(client.session.load_module_with("unheard-of", "arithmetic")).await.unwrap_err(),
    ];
    for error in &errors {
        assert_eq!((error.kind(), error.hop()), (ErrorKind::NotFound, harness.hops()), "{error}");
    }
    assert!(errors[0].message().contains("square"), "{}", errors[0]);
    assert!(errors[3].message().contains("named"), "{}", errors[3]);
}

/// A session that a function returns is a module: its functions are called through it, its objects
/// pass back to it, and functions take it as the session that it is.
pub async fn a_session_is_a_module_that_is_passed_and_returned(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let module: RemoteModule = client.run("session.new", ()).await;
    let find = async |name| client.get(module.function(name)).await;
    let add = find("add").await;
    assert_eq!(client.get(add.call::<i64>((40, 2))).await, 42);
    assert_eq!(client.run::<i64>("session.add", (&module, 20, 22)).await, 42);
    // Objects of the session inside, of each kind, are arguments of its functions.
    let counter: RemoteObject = client.get(find("counter.new").await.call(())).await;
    assert_eq!(client.get(find("counter.add").await.call::<i64>((&counter, 5))).await, 5);
    let tensor: RemoteObject = client.get(find("tensor").await.call(())).await;
    assert_eq!(client.get(find("tensor.shape").await.call::<Shape>((&tensor,))).await, Shape(vec![3]));
    let adder: RemoteFunction = client.get(find("adder").await.call((40,))).await;
    assert_eq!(client.get(adder.call::<i64>((2,))).await, 42);
    assert_eq!(client.get(find("apply").await.call::<i64>((&adder, 3))).await, 43);
    let inner: RemoteModule = client.get(find("load").await.call(())).await;
    let square = client.get(inner.function("square")).await;
    assert_eq!(client.get(square.call::<i64>((12,))).await, 144);
    // Objects of this session are none of the session inside, nor is the module of another kind.
    let own: RemoteObject = client.run("counter.new", ()).await;
    let memory = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[3])).await;
    let arithmetic = client.get(client.session.load_module("arithmetic")).await;
    let refused = [
        harness.get(find("counter.add").await.call::<i64>((&own, 5))).await.unwrap_err(),
        harness.get(find("tensor.shape").await.call::<Shape>((&memory,))).await.unwrap_err(),
        client.try_run::<i64>("session.add", (&arithmetic, 1, 2)).await.unwrap_err(),
        client.try_run::<i64>("session.add", (&inner, 1, 2)).await.unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    assert_eq!(harness.get(module.function("unheard-of")).await.unwrap_err().kind(), ErrorKind::NotFound);
    let limit = Duration::from_millis(100);
    let late = harness.get(find("never").await.call::<()>(()).timeout(limit)).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");
    // Functions keep the session, whatever becomes of its module.
    drop(module);
    assert_eq!(client.get(add.call::<i64>((1, 2))).await, 3);
    drop((add, counter, tensor, adder, inner, square, own, memory, arithmetic));
    client.settles_at(baseline).await;
}
