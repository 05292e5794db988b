//! Modules.

use rpc_core::ErrorKind;

use crate::scene::Scene;

/// A module that the origin registered is loaded by its name, and its functions of all kinds are found and called.
pub async fn a_registered_module_is_loaded_and_its_functions_called(scene: &Scene) {
    let kit = scene.kit().await;
    let module = kit.get(kit.session.load_module("arithmetic")).await;
    assert_eq!(kit.get(kit.get(module.function("square")).await.call::<i64>((12,))).await, 144);
    assert_eq!(kit.get(kit.get(module.function("negate")).await.call::<i64>((12,))).await, -12);
    assert_eq!(kit.get(kit.get(module.function("half")).await.call::<f64>((5.0,))).await, 2.5);
}

/// A function of a module stays when the module's reference goes.
pub async fn a_function_outlives_the_reference_to_its_module(scene: &Scene) {
    let kit = scene.kit().await;
    let baseline = kit.usage().await;
    let module = kit.get(kit.session.load_module("arithmetic")).await;
    let square = kit.get(module.function("square")).await;
    drop(module);
    assert_eq!(kit.get(square.call::<i64>((9,))).await, 81);
    drop(square);
    kit.settles_at(baseline).await;
}

/// What there is not is not found, and the error says what there is.
pub async fn what_there_is_not_is_not_found(scene: &Scene) {
    let kit = scene.kit().await;
    let module = kit.get(kit.session.load_module_with("named", "arithmetic")).await;
    let errors = [
        scene.get(module.function("cube")).await.unwrap_err(),
        scene.get(kit.session.load_module("geometry")).await.unwrap_err(),
        scene.get(kit.session.load_module_with("named", "geometry")).await.unwrap_err(),
        scene.get(kit.session.load_module_with("unheard-of", "arithmetic")).await.unwrap_err(),
    ];
    for error in &errors {
        assert_eq!((error.kind(), error.hop()), (ErrorKind::NotFound, scene.hops()), "{error}");
    }
    assert!(errors[0].message().contains("square"), "{}", errors[0]);
    assert!(errors[3].message().contains("named"), "{}", errors[3]);
}
