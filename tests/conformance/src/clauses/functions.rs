//! Functions and values.

use std::collections::BTreeMap;

use bytes::Bytes;
use rpc_core::client::CHUNK;
use rpc_core::session::release;
use rpc_core::value::MAX_DEPTH;
use rpc_core::{
    DataType, Device, ErrorKind, Lane, Pack, Packed, Reference, RemoteFunction, RemoteObject, RemoteTensor, Shape,
    TypedFunction, Value,
};

use super::copies::pattern;
use crate::functions::Point;
use crate::harness::Harness;

/// The three kinds of the same function.
const ECHOES: [&str; 3] = ["echo", "echo.blocking", "echo.async"];

/// A function is found by its name, and again, and called.
pub async fn a_function_is_found_by_its_name_and_called(harness: &Harness) {
    let session = harness.session().await;
    let add = harness.get(session.get_function("add")).await.unwrap();
    let again = harness.get(session.get_function("add")).await.unwrap();
    assert_eq!(harness.get(add.call::<i64>((1, 2))).await.unwrap(), 3);
    drop(add);
    assert_eq!(harness.get(session.call_func::<i64>(&again, (-5, 2))).await.unwrap(), -3);
    assert_eq!(session.is_local(), harness.hops() == 0);
}

/// An unknown function is an error of the origin that says what was looked for.
pub async fn an_unknown_function_is_not_found_at_the_origin(harness: &Harness) {
    let session = harness.session().await;
    let error = harness.get(session.get_function("addd")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.hop(), harness.hops());
    assert!(error.message().contains("'addd'") && error.message().contains("did you mean 'add'"), "{error}");
    assert!(!error.request_may_have_run());
    for name in ["", "\0", &"ä".repeat(10_000)] {
        let error = harness.get(session.get_function(name)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
}

/// A value of every type but objects.
pub(super) fn samples() -> Vec<Value> {
    let mut values = vec![
        Value::Null,
        Value::Bool(false),
        Value::Bool(true),
        Value::Str(String::new()),
        Value::Str("NUL \0 inside, ä, 🦀, \u{fffd}, line\r\nbreak".to_owned()),
        Value::Str("long ".repeat(100_000)),
        Value::Bytes(Bytes::new()),
        Value::Bytes(Bytes::from_static(&[0, 255, 0, 10, 13])),
        Value::Shape(vec![]),
        Value::Shape(vec![0, 1, -1, i64::MAX, i64::MIN]),
        Value::Shape(vec![7; 64]),
        Value::DataType(DataType::F32),
        Value::DataType("bfloat16x4".parse().unwrap()),
        Value::Device(Device::cpu()),
        Value::Device("cuda:3".parse().unwrap()),
        Value::List(vec![]),
        Value::List(vec![Value::Null, Value::Int(1), Value::List(vec![Value::Str("deep".to_owned())])]),
        Value::Map(vec![]),
        Value::Map(vec![
            ("text".into(), Value::Int(1)),
            (Value::Null, Value::List(vec![Value::Map(vec![(Value::Bool(true), "deep".into())])])),
            // Neither the order nor a key that is there twice is anybody's business.
            (Value::Bytes(Bytes::from_static(b"first")), Value::Bytes(Bytes::from_static(b"second"))),
            (Value::Null, Value::Null),
        ]),
        Value::Map((0..1000).map(|n| (Value::Int(n), n.to_string().into())).collect()),
        Value::Packed(Packed::encode(&("tuple", 1, [1.5_f32, -0.0])).unwrap()),
    ];
    let integers =
        [0, 1, -1, 127, 128, 255, 256, -128, -129, 65_535, 65_536, 1 << 31, -(1 << 31), 1 << 32, i64::MAX, i64::MIN];
    values.extend(integers.map(Value::Int));
    let floats =
        [0.0, 1.5, f64::MIN_POSITIVE, 5e-324, f64::MAX, f64::MIN, f64::INFINITY, f64::NEG_INFINITY, f64::EPSILON];
    values.extend(floats.map(Value::Float));
    values
}

/// Every value comes back as it went, through functions of every kind, alone and in a list.
pub async fn every_value_comes_back_as_it_went(harness: &Harness) {
    let client = harness.client().await;
    for echo in ECHOES {
        for value in samples() {
            assert_eq!(client.run::<Value>(echo, (value.clone(),)).await, value);
        }
        let all = Value::List(samples());
        assert_eq!(client.run::<Value>(echo, (all.clone(),)).await, all);
    }
}

/// Floating-point numbers keep their bits: NaN with its payload, and the sign of zero.
pub async fn floats_keep_their_bits(harness: &Harness) {
    let client = harness.client().await;
    for bits in [f64::NAN.to_bits(), 0x7ff8_dead_beef_0001, 0xfff8_0000_0000_0001, (-0.0_f64).to_bits()] {
        let back: f64 = client.run("echo", (f64::from_bits(bits),)).await;
        assert_eq!(back.to_bits(), bits, "{back}");
    }
}

/// Bytes may be larger than a chunk, alone and beside others.
pub async fn bytes_larger_than_a_chunk_come_back(harness: &Harness) {
    let client = harness.client().await;
    for len in [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5] {
        let bytes = pattern(len, 0);
        let back: Bytes = client.run("echo", (bytes.clone(),)).await;
        assert!(back == bytes, "{len} bytes came back as {} others", back.len());
        let list = Value::List(vec![Value::Int(1), Value::Bytes(bytes.clone()), Value::Null, Value::Bytes(bytes)]);
        let back: Value = client.run("echo.blocking", (list.clone(),)).await;
        assert!(back == list, "a list with {len} bytes came back as another");
    }
}

/// Lists and maps may nest to the limit.
pub async fn lists_and_maps_nest_to_the_limit(harness: &Harness) {
    let client = harness.client().await;
    let mut value = Value::Int(7);
    for depth in 0..MAX_DEPTH - 1 {
        value = match depth % 3 {
            0 => Value::List(vec![value, Value::Null]),
            1 => Value::Map(vec![(value, Value::Null)]),
            _ => Value::Map(vec![(Value::Null, value)]),
        };
    }
    assert_eq!(client.run::<Value>("echo", (value.clone(),)).await, value);
}

/// Objects pass in maps, as keys and as values, tensors and functions among them; each that comes
/// back is freed by whoever holds it, or with a map that does not fit.
pub async fn maps_hold_objects(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[3])).await;
    let plus_two: RemoteFunction = client.run("make_adder", (2,)).await;
    for echo in ECHOES {
        let tensors: BTreeMap<String, RemoteTensor> =
            client.run(echo, (BTreeMap::from([("a", &tensor), ("b", &tensor)]),)).await;
        assert_eq!(tensors.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert!(tensors.values().all(|tensor| tensor.shape() == [3]));
        let functions: BTreeMap<i64, RemoteFunction> = client.run(echo, (BTreeMap::from([(1, &plus_two)]),)).await;
        assert_eq!(client.get(functions[&1].call::<i64>((40,))).await, 42);
        let error = client.try_run::<BTreeMap<i64, i64>>(echo, (BTreeMap::from([(1, &plus_two)]),)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        // As a key, which only a raw value can be.
        let key = Value::Object(Reference::Function(plus_two.handle()));
        let raw: Value = client.run(echo, (Value::Map(vec![(key, Value::Null)]),)).await;
        assert_eq!(raw.handles().len(), 1);
        release(client.session.shared(), &raw);
    }
    drop((tensor, plus_two));
    client.settles_at(baseline).await;
}

/// Maps are converted to types of maps, in which a key is there once.
pub async fn typed_maps_have_each_key_once(harness: &Harness) {
    let client = harness.client().await;
    let ages = BTreeMap::from([("a".to_owned(), 1_i64), ("b".to_owned(), 2)]);
    assert_eq!(client.run::<BTreeMap<String, i64>>("swap_keys", (BTreeMap::from([(1, "a"), (2, "b")]),)).await, ages);
    for (pairs, place) in [
        (vec![(1.into(), "a".into()), (1.into(), "b".into())], "argument 0 of `swap_keys`: the key of pair 1"),
        (vec![(1.into(), Value::Null)], "argument 0 of `swap_keys`: value of pair 0"),
        (vec![(1.into(), "a".into()), ("b".into(), "b".into())], "argument 0 of `swap_keys`: key of pair 1"),
    ] {
        let error = client.try_run::<Value>("swap_keys", (Value::Map(pairs),)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(place), "{error} should name {place}");
    }
    let twice = Value::Map(vec![(1.into(), 1.into()), (1.into(), 2.into())]);
    let error = client.try_run::<BTreeMap<i64, i64>>("echo", (twice,)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

/// Arguments and returns are converted to the types that the function and the caller name.
pub async fn typed_calls_convert_arguments_and_returns(harness: &Harness) {
    let client = harness.client().await;
    let add: TypedFunction<(i64, i64), i64> = client.get(client.session.function("add")).await;
    assert_eq!(client.get(add.call((40, 2))).await, 42);
    assert_eq!(client.run::<String>("narrow", (255, "text", true)).await, "255 text true");
    assert_eq!(client.run::<f64>("half", (3_i64,)).await, 1.5);
    assert_eq!(client.run::<i64>("optional", (5,)).await, 5);
    assert_eq!(client.run::<i64>("optional", (None::<i64>,)).await, -1);
    assert_eq!(client.run::<i64>("optional", ()).await, -1);
    assert_eq!(client.run::<f64>("mean", (vec![1.0, 2.0, 6.0],)).await, 3.0);
    assert_eq!(client.run::<Vec<i64>>("eight", (1, 2, 3, 4, 5, 6, 7, 8)).await, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(client.run::<Shape>("echo", (Shape(vec![2, 3]),)).await, Shape(vec![2, 3]));
    assert_eq!(client.run::<Option<String>>("echo", (Value::Null,)).await, None);
    assert_eq!(
        client.run::<(i64, String)>("echo", (Value::List(vec![1_i64.into(), "a".into()]),)).await,
        (1, "a".to_owned())
    );
    client.run::<()>("nothing", ()).await;
    let many: Vec<Value> = (0..1000).map(Value::Int).collect();
    assert_eq!(client.run::<i64>("count", many).await, 1000);
}

/// Arguments that do not fit are refused with their place, and the function does not run.
pub async fn arguments_that_do_not_fit_are_refused_with_their_place(harness: &Harness) {
    let client = harness.client().await;
    let wrong: [(&str, Vec<Value>, &str); 9] = [
        ("add", vec!["one".into(), 2_i64.into()], "argument 0"),
        ("add", vec![1_i64.into(), Value::Float(2.0)], "argument 1"),
        ("add", vec![1_i64.into()], "argument 1"),
        ("add", vec![1_i64.into(), 2_i64.into(), 3_i64.into()], "3 arguments"),
        ("narrow", vec![256_i64.into(), "".into(), true.into()], "argument 0"),
        ("narrow", vec![(-1_i64).into(), "".into(), true.into()], "argument 0"),
        ("narrow", vec![1_i64.into(), Value::Bytes(Bytes::new()), true.into()], "argument 1"),
        ("mean", vec![Value::List(vec![1.0_f64.into(), Value::Null])], "element 1"),
        ("nothing", vec![Value::Null], "1 arguments"),
    ];
    for (name, args, place) in wrong {
        let error = client.try_run::<Value>(name, args).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(place), "{error} should name {place}");
        assert_eq!(error.hop(), harness.hops());
        assert!(!error.request_may_have_run());
    }
    client.works().await;
}

/// A return of another type than the caller named is an error, and objects in it are freed.
pub async fn returns_that_do_not_fit_are_refused_and_freed(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let invalid = |error: rpc_core::RpcError| assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    invalid(client.try_run::<String>("add", (1, 2)).await.unwrap_err());
    invalid(client.try_run::<u8>("add", (200, 100)).await.unwrap_err());
    invalid(client.try_run::<i64>("probe.new", (&dropped.object, 0)).await.unwrap_err());
    invalid(client.try_run::<RemoteFunction>("probe.new", (&dropped.object, 0)).await.unwrap_err());
    invalid(client.try_run::<Vec<i64>>("probe.many", (&dropped.object, 3)).await.unwrap_err());
    invalid(client.try_run::<(RemoteObject, RemoteObject)>("probe.many", (&dropped.object, 3)).await.unwrap_err());
    invalid(client.try_run::<(RemoteObject, i64, RemoteObject)>("probe.many", (&dropped.object, 3)).await.unwrap_err());
    dropped.reach(1 + 1 + 3 + 3 + 3).await;
    client.settles_at(baseline).await;
}

/// Ordinary structs travel packed.
pub async fn structs_travel_packed(harness: &Harness) {
    let client = harness.client().await;
    let point = Point { at: (1.0, f64::MIN), label: "ü\0".to_owned(), tags: vec![None, Some(255)] };
    let Pack(moved) = client.run::<Pack<Point>>("move_point", (Pack(point.clone()), 2.5)).await;
    assert_eq!(moved, Point { at: (3.5, f64::MIN), ..point });
    for wrong in
        [Packed::encode(&5).unwrap(), Packed::from_bytes(Bytes::from_static(&[0xc1])), Packed::from_bytes(Bytes::new())]
    {
        let error = client.try_run::<Value>("move_point", (wrong, 1.0)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    // Bytes that are no MessagePack at all still pass every hop, since hops do not look inside.
    let opaque = Packed::from_bytes(Bytes::from_static(&[0xc1, 0, 1]));
    assert_eq!(client.run::<Packed>("echo", (opaque.clone(),)).await, opaque);
}

/// Functions are values: returned, passed, composed, and kept beyond what made them.
pub async fn functions_are_returned_and_passed(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let plus_two: RemoteFunction = client.run("make_adder", (2,)).await;
    assert_eq!(client.get(plus_two.call::<i64>((40,))).await, 42);
    assert_eq!(client.run::<i64>("apply", (&plus_two, 1)).await, 3);
    let plus_ten: RemoteFunction = client.run("make_adder", (10,)).await;
    let both: RemoteFunction = client.run("compose", (&plus_two, &plus_ten)).await;
    drop((plus_two, plus_ten));
    assert_eq!(client.get(both.call::<i64>((30,)).lane(Lane(5))).await, 42);
    let same: RemoteFunction = client.run("echo", (&both,)).await;
    assert_ne!(same.handle(), both.handle(), "each reference owns a handle of its own");
    drop(both);
    assert_eq!(client.get(same.call::<i64>((0,))).await, 12);
    drop(same);
    client.settles_at(baseline).await;
}

/// A function that was found goes on working while others are found and freed.
pub async fn each_reference_owns_a_handle_of_its_own(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let mut functions = Vec::new();
    for _ in 0..50 {
        functions.push(client.get(client.session.get_function("add")).await);
    }
    assert_eq!(client.usage().await.handles, baseline.handles + 50);
    let kept = functions.pop().unwrap();
    drop(functions);
    assert_eq!(client.get(kept.call::<i64>((1, 1))).await, 2);
    drop(kept);
    client.settles_at(baseline).await;
}
