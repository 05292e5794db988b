//! Clauses of conformance about modules of native code, which need TVM-FFI, and their registry.

use std::fs;
use std::sync::Arc;

use rpc_conformance::functions;
use rpc_conformance::harness::{Harness, TestClient};
use rpc_core::{
    DataType, Device, ErrorKind, Registry, RemoteFunction, RemoteModule, RemoteTensor, Shape, Value, dlpack,
};

use crate::tvm_ffi::{self, Environment, environment};

/// Returns the functions of the suite, with a loader of native modules if TVM-FFI is installed.
pub fn registry() -> Registry {
    let registry = functions::registry();
    if let Some(environment) = tvm_ffi::find() {
        registry.add_loader(Arc::new(environment.tvm_ffi()));
    }
    registry
}

async fn module(client: &TestClient<'_>, environment: &Environment, source: &str) -> RemoteModule {
    client.get(client.session.load_module(environment.compile(source).to_str().unwrap())).await
}

async fn tensor(client: &TestClient<'_>, shape: &[i64], bytes: Vec<u8>) -> RemoteTensor {
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, shape)).await;
    client.get(client.session.copy_to_remote(&tensor, bytes)).await;
    tensor
}

/// Checks that values, tensors, functions and errors of a C++ module cross like those of the
/// origin's own functions.
pub async fn functions_of_native_modules_are_functions(harness: &Harness) {
    let Some(environment) = environment() else { return };
    let client = harness.client().await;
    let baseline = client.usage().await;
    let module = module(&client, environment, "kernels.cc").await;
    let function = async |name: &str| client.get(module.function(name)).await;
    assert_eq!(client.get(function("add").await.call::<i64>((1, 2))).await, 3);
    let identity = function("identity").await;
    let value = Value::List(vec![
        "text\0".into(),
        Value::Bytes(vec![7; 3 << 20].into()),
        Value::Map(vec![("key".into(), 1.5.into())]),
    ]);
    assert_eq!(client.get(identity.call::<Value>((value.clone(),))).await, value);
    assert_eq!(client.get(identity.call::<Shape>((Shape(vec![2, 3]),))).await, Shape(vec![2, 3]));

    let x = tensor(&client, &[3], dlpack::to_bytes(&[1.0_f32, 2.0, 3.0]).to_vec()).await;
    let squares: RemoteTensor = client.get(function("squares").await.call((&x,))).await;
    let bytes = client.get(client.session.copy_from_remote(&squares)).await;
    assert_eq!(dlpack::from_bytes::<f32>(&bytes), [1.0, 4.0, 9.0]);
    let adder: RemoteFunction = client.get(function("adder").await.call((5,))).await;
    assert_eq!(client.get(function("apply").await.call::<i64>((&adder, 10))).await, 15);

    let error = harness.get(function("raise").await.call::<()>(("ValueError", "on purpose"))).await.unwrap_err();
    assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Application, Some("ValueError")));
    assert_eq!((error.message(), error.hop()), ("on purpose", harness.hops()));
    drop((x, squares, adder, identity, module));
    client.settles_at(baseline).await;
}

/// Checks that a model that TVM has compiled returns the same numbers as under TVM.
pub async fn a_compiled_model_gives_the_numbers_that_it_gives_at_home(harness: &Harness) {
    let Some(model) = environment().and_then(Environment::model) else { return };
    let client = harness.client().await;
    let library = client.get(client.session.load_module(model.join("model.so").to_str().unwrap())).await;
    let load = client.get(library.function("vm_load_executable")).await;
    let machine: RemoteModule = client.get(load.call(())).await;
    // Three numbers for each device: its kind, its index, and its kind of allocator; 2 is a pool.
    let initialise = client.get(machine.function("vm_initialization")).await;
    client.get(initialise.call::<()>((1, 0, 2))).await;
    let main = client.get(machine.function("main")).await;

    let read = |name: &str| fs::read(model.join(name)).unwrap();
    let x = tensor(&client, &[4, 64], read("x.f32")).await;
    let hidden = tensor(&client, &[64, 32], read("hidden.f32")).await;
    let output = tensor(&client, &[32, 10], read("output.f32")).await;
    for _ in 0..3 {
        let classes: RemoteTensor = client.get(main.call((&x, &hidden, &output))).await;
        assert_eq!(classes.shape(), [4, 10]);
        let bytes = client.get(client.session.copy_from_remote(&classes)).await;
        assert!(bytes == read("classes.f32")[..], "the numbers differ");
    }
}

/// Checks that native code can call closures of the client with values and tensors, also nested,
/// and that errors pass through it.
pub async fn native_code_calls_closures_of_the_client(harness: &Harness) {
    let Some(environment) = environment() else { return };
    let client = harness.client().await;
    let baseline = client.usage().await;
    let module = module(&client, environment, "kernels.cc").await;
    let function = async |name: &str| client.get(module.function(name)).await;
    let apply = function("apply").await;

    let add_ten = client.get(client.session.callback(|x: i64| x + 10)).await;
    assert_eq!(client.get(apply.call::<i64>((&add_ten, 1))).await, 11);

    // A nested call: the closure calls the native function with the other closure.
    let (again, inner) = (apply.clone(), add_ten.clone());
    let nested = client.session.callback(move |x: i64| again.call::<i64>((&inner, 2 * x)).concurrent().wait());
    let nested = client.get(nested).await;
    assert_eq!(client.get(apply.call::<i64>((&nested, 5))).await, 20);

    // The closure may read and write the tensor while the native function waits for it.
    let x = tensor(&client, &[2], dlpack::to_bytes(&[1.0_f32, 2.0]).to_vec()).await;
    let session = client.session.clone();
    let triple = client.session.callback(move |tensor: RemoteTensor| -> rpc_core::Result<()> {
        let bytes = session.copy_from_remote(&tensor).lane(rpc_core::Lane(7)).wait()?;
        let tripled: Vec<_> = dlpack::from_bytes::<f32>(&bytes).iter().map(|x| 3.0 * x).collect();
        session.copy_to_remote(&tensor, dlpack::to_bytes(&tripled)).lane(rpc_core::Lane(7)).wait()
    });
    let triple = client.get(triple).await;
    assert_eq!(client.get(function("apply_to_tensor").await.call::<f64>((&triple, &x))).await, 3.0);

    let refuse = |_: i64| -> rpc_core::Result<()> { Err(rpc_core::RpcError::new(ErrorKind::Busy, "not now")) };
    let refuse = client.get(client.session.callback(refuse)).await;
    let error = harness.get(apply.call::<()>((&refuse, 1))).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Busy, "not now"));

    drop((add_ten, nested, triple, refuse, apply, x, module));
    client.settles_at(baseline).await;
}

#[cfg(test)]
mod tests {
    /// Checks that each clause is in a list, because a clause that is in none is never run.
    #[test]
    fn every_clause_is_listed() {
        let list = include_str!("../tests/sessions/conformance.rs");
        for line in include_str!("native.rs").lines() {
            if let Some(clause) = line.strip_prefix("pub async fn ").and_then(|line| line.split('(').next()) {
                let mut words = list.split(|c: char| !c.is_alphanumeric() && c != '_');
                assert!(words.any(|word| word == clause), "{clause} is in no list");
            }
        }
    }
}
