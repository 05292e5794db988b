//! Unit tests of virtual devices: joining, defaults, text forms.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> VirtualDevice {
    text.parse().unwrap()
}

/// Devices from few values, so that many pairs agree.
fn devices() -> impl Strategy<Value = VirtualDevice> {
    let types = prop::sample::select(vec![None, Some(DeviceType::CPU), Some(DeviceType::CUDA)]);
    let targets =
        prop::sample::select(vec![None, None, Some("llvm"), Some("c"), Some("cuda"), Some("cuda -arch=sm_90")]);
    let scopes = prop::sample::select(vec![None, Some("global"), Some("host")]);
    (types, prop::option::of(0..2), targets, scopes).prop_filter_map(
        "of one type",
        |(device_type, id, target, scope)| {
            let fields = Fields {
                device_type,
                virtual_device_id: id,
                target: target.map(|text: &str| text.parse().unwrap()),
                memory_scope: scope.map(str::to_owned),
            };
            VirtualDevice::try_from(fields).ok()
        },
    )
}

fn join(a: Option<&VirtualDevice>, b: Option<&VirtualDevice>) -> Option<VirtualDevice> {
    a?.join(b?)
}

/// Returns true if `b` has all constraints of `a`.
fn is_kept(a: &VirtualDevice, b: &VirtualDevice) -> bool {
    a.join(b).as_ref() == Some(b)
}

proptest! {
    #[test]
    fn the_constrained_fields_build_the_same_device(device in devices()) {
        let mut builder = VirtualDevice::builder();
        for (field, value) in device.constrained_fields() {
            builder = builder.field(field.name, &value).unwrap();
        }
        prop_assert_eq!(builder.build().unwrap(), device);
    }

    #[test]
    fn join_is_commutative_associative_and_idempotent(a in devices(), b in devices(), c in devices()) {
        prop_assert_eq!(a.join(&b), b.join(&a));
        prop_assert_eq!(join(a.join(&b).as_ref(), Some(&c)), join(Some(&a), b.join(&c).as_ref()));
        prop_assert_eq!(a.join(&a), Some(a.clone()));
        prop_assert_eq!(a.join(&VirtualDevice::unconstrained()), Some(a));
    }

    #[test]
    fn a_join_has_the_constraints_of_both_and_no_others(a in devices(), b in devices()) {
        if let Some(joined) = a.join(&b) {
            prop_assert!(is_kept(&a, &joined) && is_kept(&b, &joined));
            let either = [None, a.device_type, b.device_type];
            prop_assert!(either.contains(&joined.device_type));
            prop_assert_eq!(joined.virtual_device_id, a.virtual_device_id.or(b.virtual_device_id));
            prop_assert_eq!(joined.target.clone(), a.target.clone().or(b.target.clone()));
            prop_assert_eq!(joined.memory_scope, a.memory_scope.or(b.memory_scope));
        }
    }

    #[test]
    fn default_never_overrides(a in devices(), b in devices()) {
        let both = a.default_to(&b);
        prop_assert!(is_kept(&a, &both));
        prop_assert_eq!(a.default_to(&a), a.clone());
        prop_assert_eq!(a.default_to(&VirtualDevice::unconstrained()), a.clone());
        prop_assert_eq!(VirtualDevice::unconstrained().default_to(&b), b.clone());
        // Applying defaults twice changes nothing.
        prop_assert_eq!(both.default_to(&b), both.clone());
        if let Some(joined) = a.join(&b) {
            prop_assert_eq!(both, joined);
        }
    }

    #[test]
    fn a_target_always_agrees_with_the_type(a in devices(), b in devices()) {
        for device in [a.default_to(&b)].into_iter().chain(a.join(&b)) {
            if let Some(target) = &device.target {
                prop_assert_eq!(Some(target.device_type()), device.device_type);
            }
            prop_assert!(VirtualDevice::try_from(Fields::from(device.clone())).as_ref() == Ok(&device));
        }
    }

    #[test]
    fn a_joins_devices_satisfy_both(a in devices(), b in devices(), index in 0..2_i32, more in any::<bool>()) {
        let offer = DeviceDescription {
            device: Device::cuda(index),
            target: if more { "cuda -arch=sm_90 -x=1".parse().unwrap() } else { Target::new("cuda").unwrap() },
            memory_scopes: if more { vec!["host".to_owned()] } else { Vec::new() },
        };
        prop_assert!(offer.satisfies(&VirtualDevice::unconstrained()));
        if let Some(joined) = a.join(&b) {
            prop_assert_eq!(offer.satisfies(&joined), offer.satisfies(&a) && offer.satisfies(&b));
        }
    }

    #[test]
    fn text_bytes_and_hash_are_those_of_equal_values(a in devices(), b in devices()) {
        prop_assert_eq!(&a.to_string().parse::<VirtualDevice>().unwrap(), &a);
        let bytes = rmp_serde::to_vec_named(&a).unwrap();
        prop_assert_eq!(&rmp_serde::from_slice::<VirtualDevice>(&bytes).unwrap(), &a);
        let hash = |device: &VirtualDevice| {
            let mut hasher = DefaultHasher::new();
            device.hash(&mut hasher);
            hasher.finish()
        };
        prop_assert_eq!(a == b, a.to_string() == b.to_string());
        prop_assert!(a != b || hash(&a) == hash(&b));
    }
}

/// The examples of TVM's documentation.
#[test]
fn join_and_default_match_the_examples_of_tvm() {
    let llvm =
        |scope: Option<&str>| VirtualDevice { memory_scope: scope.map(str::to_owned), ..parse("cpu,target=llvm") };
    assert_eq!(llvm(None).join(&parse("*:3,scope=global")), Some(parse("cpu:3,scope=global,target=llvm")));
    assert_eq!(llvm(Some("local")).join(&parse("*:3,scope=global")), None);
    assert_eq!(llvm(Some("local")).default_to(&parse("cpu:3,scope=global")), parse("cpu:3,scope=local,target=llvm"));
}

#[test]
fn default_drops_a_target_for_another_type() {
    assert_eq!(parse("cuda").default_to(&parse("cpu:1,target=llvm")), parse("cuda:1"));
    assert_eq!(parse("cpu").default_to(&parse("cpu:1,target=llvm")), parse("cpu:1,target=llvm"));
    assert_eq!(parse("*:0").default_to(&parse("cpu:1,target=llvm")), parse("cpu:0,target=llvm"));
}

#[test]
fn predicates_and_the_resulting_device() {
    let full = parse("cuda:1,scope=global,target=cuda");
    assert!(full.is_fully_constrained() && !full.is_fully_unconstrained());
    assert_eq!(full.to_device(), Some(Device::cuda(1)));
    for partial in ["*", "cuda", "*:1", "*:1,scope=global,target=llvm", "cuda:1,scope=global", "cuda:1,target=cuda"] {
        let partial = parse(partial);
        assert_eq!(partial.is_fully_unconstrained(), partial == VirtualDevice::default());
        assert_eq!(partial.is_fully_constrained(), partial.memory_scope.is_some() && partial.target.is_some());
        assert_eq!(partial.to_device().is_some(), partial.device_type.is_some() && partial.virtual_device_id.is_some());
    }
    assert_eq!(VirtualDevice::from(Target::new("llvm").unwrap()).device_type(), Some(DeviceType::CPU));
    assert_eq!(VirtualDevice::from(None::<Device>), VirtualDevice::unconstrained());
    assert_eq!(VirtualDevice::from(DeviceType::CUDA), parse("cuda"));
    // TVM uses -1 for no constraint.
    assert_eq!(VirtualDevice::from(Device::cuda(-1)), parse("cuda"));
}

#[test]
fn the_builder_takes_known_fields_once() {
    let device =
        VirtualDevice::builder().device_type(DeviceType::CUDA).virtual_device_id(2).memory_scope("host").build();
    assert_eq!(device.unwrap(), parse("cuda:2,scope=host"));
    let built = VirtualDeviceBuilder::FIELDS.into_iter().zip(["cuda", "0", "cuda -arch=sm_90", "global"]);
    let built = built.fold(VirtualDevice::builder(), |builder, (name, value)| builder.field(name, value).unwrap());
    assert_eq!(built.build().unwrap(), parse("cuda:0,scope=global,target=cuda -arch=sm_90"));

    let error = |name: &str, value: &str| VirtualDevice::builder().field(name, value).unwrap_err().to_string();
    assert!(error("device_id", "0").contains("no field 'device_id'; there are device_type, virtual_device_id"));
    assert!(error("device_type", "cudda").contains("unknown device kind 'cudda'"));
    assert!(error("virtual_device_id", "one").contains("'one' is not a device number"));
    let twice = VirtualDevice::builder().field("memory_scope", "a").unwrap().field("memory_scope", "a");
    assert!(twice.unwrap_err().to_string().contains("given twice"));
}

#[test]
fn invalid_fields_are_refused_from_every_source() {
    for (text, part) in [
        ("cuda,target=llvm", "target 'llvm' is for cpu, but the device type is cuda"),
        ("cuda:-1", "-1 is not a device number"),
        ("cuda:99999999999", "is not a device number"),
        ("cuda,scope=", "cannot be a memory scope"),
        ("cuda,scope=a b", "cannot be a memory scope"),
        ("cuda,scope=a,scope=b", "given twice"),
        ("cuda,memory=a", "'memory=a' in"),
        ("", "unknown device kind"),
        ("cuda,", "'' in"),
    ] {
        let error = text.parse::<VirtualDevice>().unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    #[derive(Serialize)]
    struct More {
        device_type: i32,
        device_id: i32,
    }
    let bytes = rmp_serde::to_vec_named(&More { device_type: 1, device_id: 0 }).unwrap();
    let error = rmp_serde::from_slice::<VirtualDevice>(&bytes).unwrap_err().to_string();
    assert!(error.contains("unknown field `device_id`"), "{error}");
    let wrong = Fields { device_type: Some(DeviceType::CUDA), target: Target::new("c").ok(), ..Fields::default() };
    let error = rmp_serde::from_slice::<VirtualDevice>(&rmp_serde::to_vec_named(&wrong).unwrap()).unwrap_err();
    assert!(error.to_string().contains("is for cpu"), "{error}");
}

#[test]
fn each_field_is_described() {
    assert_eq!(VirtualDevice::FIELD_INFOS.map(|field| field.name), VirtualDeviceBuilder::FIELDS);
    for field in VirtualDevice::FIELD_INFOS {
        assert!(!field.type_name.is_empty() && field.description.ends_with('.'), "{field:?}");
        assert!(!field.description.contains("  "), "{field:?}");
    }
}
