//! Modules of native code, where there is TVM-FFI.

use std::fs;

use rpc_core::{DataType, Device, ErrorKind, RemoteFunction, RemoteModule, RemoteTensor, Shape, Value, dlpack};

use crate::scene::{Kit, Scene};
use crate::tvm_ffi::{Environment, environment};

async fn module(kit: &Kit<'_>, environment: &Environment, source: &str) -> RemoteModule {
    kit.get(kit.session.load_module(environment.compile(source).to_str().unwrap())).await
}

async fn tensor(kit: &Kit<'_>, shape: &[i64], bytes: Vec<u8>) -> RemoteTensor {
    let tensor = kit.get(kit.session.alloc(Device::cpu(), DataType::F32, shape)).await;
    kit.get(kit.session.copy_to_remote(&tensor, bytes)).await;
    tensor
}

/// Values, tensors, functions and errors of a module of C++ cross as those of the origin's own functions do.
pub async fn functions_of_native_modules_are_functions(scene: &Scene) {
    let Some(environment) = environment() else { return };
    let kit = scene.kit().await;
    let baseline = kit.usage().await;
    let module = module(&kit, environment, "kernels.cc").await;
    let function = async |name: &str| kit.get(module.function(name)).await;
    assert_eq!(kit.get(function("add").await.call::<i64>((1, 2))).await, 3);
    let identity = function("identity").await;
    let value = Value::List(vec![
        "text\0".into(),
        Value::Bytes(vec![7; 3 << 20].into()),
        Value::Map(vec![("key".into(), 1.5.into())]),
    ]);
    assert_eq!(kit.get(identity.call::<Value>((value.clone(),))).await, value);
    assert_eq!(kit.get(identity.call::<Shape>((Shape(vec![2, 3]),))).await, Shape(vec![2, 3]));

    let x = tensor(&kit, &[3], dlpack::to_bytes(&[1.0_f32, 2.0, 3.0]).to_vec()).await;
    let squares: RemoteTensor = kit.get(function("squares").await.call((&x,))).await;
    let bytes = kit.get(kit.session.copy_from_remote(&squares)).await;
    assert_eq!(dlpack::from_bytes::<f32>(&bytes), [1.0, 4.0, 9.0]);
    let adder: RemoteFunction = kit.get(function("adder").await.call((5,))).await;
    assert_eq!(kit.get(function("apply").await.call::<i64>((&adder, 10))).await, 15);

    let error = scene.get(function("raise").await.call::<()>(("ValueError", "on purpose"))).await.unwrap_err();
    assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Application, Some("ValueError")));
    assert_eq!((error.message(), error.hop()), ("on purpose", scene.hops()));
    drop((x, squares, adder, identity, module));
    kit.settles_at(baseline).await;
}

/// A model that TVM has compiled gives the numbers that it has given under TVM.
pub async fn a_compiled_model_gives_the_numbers_that_it_gives_at_home(scene: &Scene) {
    let Some(model) = environment().and_then(Environment::model) else { return };
    let kit = scene.kit().await;
    let library = kit.get(kit.session.load_module(model.join("model.so").to_str().unwrap())).await;
    let load = kit.get(library.function("vm_load_executable")).await;
    let machine: RemoteModule = kit.get(load.call(())).await;
    // For each device its kind, its index, and how to allocate: 2 is from a pool.
    let initialise = kit.get(machine.function("vm_initialization")).await;
    kit.get(initialise.call::<()>((1, 0, 2))).await;
    let main = kit.get(machine.function("main")).await;

    let read = |name: &str| fs::read(model.join(name)).unwrap();
    let x = tensor(&kit, &[4, 64], read("x.f32")).await;
    let hidden = tensor(&kit, &[64, 32], read("hidden.f32")).await;
    let output = tensor(&kit, &[32, 10], read("output.f32")).await;
    for _ in 0..3 {
        let classes: RemoteTensor = kit.get(main.call((&x, &hidden, &output))).await;
        assert_eq!(classes.shape(), [4, 10]);
        let bytes = kit.get(kit.session.copy_from_remote(&classes)).await;
        assert!(bytes == read("classes.f32")[..], "the numbers differ");
    }
}

/// Native code calls closures of the client: with values and tensors, again from within, and errors come through it.
pub async fn native_code_calls_closures_of_the_client(scene: &Scene) {
    let Some(environment) = environment() else { return };
    let kit = scene.kit().await;
    let baseline = kit.usage().await;
    let module = module(&kit, environment, "kernels.cc").await;
    let function = async |name: &str| kit.get(module.function(name)).await;
    let apply = function("apply").await;

    let add_ten = kit.get(kit.session.callback(|x: i64| x + 10)).await;
    assert_eq!(kit.get(apply.call::<i64>((&add_ten, 1))).await, 11);

    // From within: the native function again, with the other closure.
    let (again, inner) = (apply.clone(), add_ten.clone());
    let nested = kit.session.callback(move |x: i64| again.call::<i64>((&inner, 2 * x)).concurrent().wait());
    let nested = kit.get(nested).await;
    assert_eq!(kit.get(apply.call::<i64>((&nested, 5))).await, 20);

    // The tensor is the closure's to read and to write while the native function waits for it.
    let x = tensor(&kit, &[2], dlpack::to_bytes(&[1.0_f32, 2.0]).to_vec()).await;
    let session = kit.session.clone();
    let triple = kit.session.callback(move |tensor: RemoteTensor| -> rpc_core::Result<()> {
        let bytes = session.copy_from_remote(&tensor).lane(rpc_core::Lane(7)).wait()?;
        let tripled: Vec<_> = dlpack::from_bytes::<f32>(&bytes).iter().map(|x| 3.0 * x).collect();
        session.copy_to_remote(&tensor, dlpack::to_bytes(&tripled)).lane(rpc_core::Lane(7)).wait()
    });
    let triple = kit.get(triple).await;
    assert_eq!(kit.get(function("apply_to_tensor").await.call::<f64>((&triple, &x))).await, 3.0);

    let refuse = |_: i64| -> rpc_core::Result<()> { Err(rpc_core::RpcError::new(ErrorKind::Busy, "not now")) };
    let refuse = kit.get(kit.session.callback(refuse)).await;
    let error = scene.get(apply.call::<()>((&refuse, 1))).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Busy, "not now"));

    drop((add_ten, nested, triple, refuse, apply, x, module));
    kit.settles_at(baseline).await;
}
