//! Modules.

use rpc_core::ErrorKind;

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
