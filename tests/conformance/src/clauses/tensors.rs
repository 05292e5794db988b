//! Tensors, devices and streams.

use rpc_core::tensor::MAX_DIMENSIONS;
use rpc_core::{
    DataType, Device, DeviceAttribute, ErrorKind, Lane, RemoteObject, RemoteTensor, Result, Shape, Target, Value,
    VirtualDevice,
};

use crate::harness::{Harness, TestClient};

async fn floats(client: &TestClient<'_>, values: &[f32]) -> RemoteTensor {
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[values.len() as i64])).await;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    client.get(client.session.copy_to_remote(&tensor, bytes)).await;
    tensor
}

async fn sum(client: &TestClient<'_>, tensor: &RemoteTensor) -> f64 {
    client.run("tensor.sum", (tensor,)).await
}

fn is<T: std::fmt::Debug>(kind: ErrorKind, outcome: Result<T>) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
}

/// A fresh tensor is zero, dense, and of the shape and type that was asked for.
pub async fn a_fresh_tensor_is_zero(harness: &Harness) {
    let client = harness.client().await;
    for shape in [&[][..], &[0], &[1], &[2, 3, 4], &[1 << 20], &[3, 0, 5], &[1; MAX_DIMENSIONS]] {
        let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, shape)).await;
        assert_eq!((tensor.shape(), tensor.dtype(), tensor.device()), (shape, DataType::F32, Device::cpu()));
        assert_eq!((tensor.strides(), tensor.byte_offset()), (None, 0));
        assert_eq!(tensor.size_bytes(), 4 * shape.iter().product::<i64>() as u64);
        let zeros = vec![0; tensor.size_bytes() as usize];
        assert!(client.get(client.session.copy_from_remote(&tensor)).await == zeros);
        assert_eq!(client.run::<Shape>("tensor.shape", (&tensor,)).await, Shape(shape.to_vec()));
        assert_eq!(sum(&client, &tensor).await, 0.0);
        // Memory that was used before is zero again.
        client.get(client.session.copy_to_remote(&tensor, vec![0x55; tensor.size_bytes() as usize])).await;
    }
    let global = client.get(client.session.alloc_in_scope(Device::cpu(), DataType::U8, &[4], Some("global"))).await;
    assert_eq!(global.size_bytes(), 4);
}

/// Memory is counted from the allocation until the last reference is gone.
pub async fn memory_is_counted_until_the_last_reference_goes(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F64, &[1000])).await;
    let other: RemoteTensor = client.run("tensor.same", (&tensor,)).await;
    let made: RemoteTensor = client.run("tensor.new", (500,)).await;
    let view = tensor.view(8, DataType::U8, &[10], None);
    let usage = client.usage().await;
    assert_eq!(usage.memory_bytes - baseline.memory_bytes, 8000 + 2000);
    assert_eq!(usage.handles - baseline.handles, 3);
    drop((tensor, made));
    client
        .settles_at(rpc_core::Usage { handles: baseline.handles + 2, memory_bytes: baseline.memory_bytes + 8000 })
        .await;
    drop(view);
    assert_eq!(client.get(client.session.copy_from_remote(&other)).await.len(), 8000);
    drop(other);
    client.settles_at(baseline).await;
}

/// Views share the storage of what they look into.
pub async fn views_share_storage(harness: &Harness) {
    let client = harness.client().await;
    let tensor = floats(&client, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).await;
    let middle = tensor.view(8, DataType::F32, &[2], None);
    client.run::<()>("tensor.fill", (&middle, 10.0)).await;
    assert_eq!(sum(&client, &tensor).await, 1.0 + 2.0 + 10.0 + 10.0 + 5.0 + 6.0);
    let returned: RemoteTensor = client.run("tensor.same", (&middle,)).await;
    assert_eq!((returned.shape(), returned.byte_offset()), (&[2_i64][..], 8));
    drop((tensor, middle));
    assert_eq!(sum(&client, &returned).await, 20.0);
    let beyond = returned.view(0, DataType::F32, &[4], None);
    assert_eq!(sum(&client, &beyond).await, 10.0 + 10.0 + 5.0 + 6.0);
}

/// Layouts that do not fit are refused at the origin, and the tensor stays usable.
pub async fn bad_layouts_are_refused(harness: &Harness) {
    let client = harness.client().await;
    let tensor = floats(&client, &[1.0; 8]).await;
    let view = |offset, shape: &[i64], strides: Option<&[i64]>| tensor.view(offset, DataType::F32, shape, strides);
    let bad = [
        view(0, &[9], None),
        view(4, &[8], None),
        view(32, &[1], None),
        view(u64::MAX, &[1], None),
        view(u64::MAX - 31, &[8], None),
        view(0, &[-1], None),
        view(0, &[i64::MAX, i64::MAX], None),
        view(0, &[i64::MAX], Some(&[i64::MAX])),
        view(0, &[2], Some(&[8])),
        view(0, &[2], Some(&[-1])),
        view(0, &[2], Some(&[1, 1])),
        view(0, &[2, 2], Some(&[1])),
        view(0, &[1; MAX_DIMENSIONS + 1], None),
        tensor.view(0, DataType { bits: 0, ..DataType::F32 }, &[1], None),
    ];
    for view in bad {
        is(ErrorKind::InvalidArgument, client.try_run::<f64>("tensor.sum", (&view,)).await);
        is(ErrorKind::InvalidArgument, client.try_run::<Value>("echo", (&view,)).await);
        is(ErrorKind::InvalidArgument, harness.get(client.session.copy_among_remote(&view, &view)).await);
    }
    // These fit, but not the function.
    let odd = [view(2, &[2], None), view(0, &[2, 2], Some(&[4, 1])), tensor.view(0, DataType::I32, &[8], None)];
    for view in odd {
        is(ErrorKind::InvalidArgument, client.try_run::<f64>("tensor.sum", (&view,)).await);
        client.run::<Shape>("tensor.shape", (&view,)).await;
    }
    assert_eq!(sum(&client, &tensor).await, 8.0);
}

/// Impossible allocations are refused, each with its reason, and hold nothing.
pub async fn impossible_allocations_are_refused(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let alloc = |device: Device, shape: &[i64]| client.session.alloc(device, DataType::F32, shape);
    let (cpu, second, cuda): (Device, Device, Device) =
        (Device::cpu(), "cpu:1".parse().unwrap(), "cuda:0".parse().unwrap());
    for device in [second, cuda, "cpu:-1".parse().unwrap_or(second)] {
        is(ErrorKind::DeviceUnavailable, harness.get(alloc(device, &[1])).await);
    }
    is(ErrorKind::InvalidArgument, harness.get(alloc(cpu, &[-1])).await);
    is(ErrorKind::InvalidArgument, harness.get(alloc(cpu, &[i64::MAX, 2])).await);
    is(ErrorKind::InvalidArgument, harness.get(alloc(cpu, &[1; MAX_DIMENSIONS + 1])).await);
    is(ErrorKind::OutOfMemory, harness.get(alloc(cpu, &[1 << 58])).await);
    let texture = client.session.alloc_in_scope(cpu, DataType::F32, &[1], Some("texture"));
    is(ErrorKind::Unsupported, harness.get(texture).await);
    client.settles_at(baseline).await;
    client.works().await;
}

/// Memory begins at a multiple of the alignment that was asked for, which counts against the
/// session's memory. What is no alignment is refused.
pub async fn memory_is_aligned_as_requested(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let alloc = |shape: &[i64], alignment| client.session.alloc_aligned(Device::cpu(), DataType::U8, shape, alignment);
    let mut tensors = Vec::new();
    for alignment in [1, 64, 256, 4096, 1 << 16, 1 << 20] {
        for _ in 0..3 {
            let tensor = client.get(alloc(&[100], alignment)).await;
            assert_eq!(client.run::<i64>("tensor.misalignment", (&tensor, alignment as i64)).await, 0, "{alignment}");
            assert_eq!(client.get(client.session.copy_from_remote(&tensor)).await, [0; 100][..]);
            tensors.push(tensor);
        }
    }
    let counted: u64 = [256, 4096, 1 << 16, 1 << 20].iter().sum();
    assert_eq!(client.usage().await.memory_bytes - baseline.memory_bytes, 18 * 100 + 3 * counted);
    for bad in [3, 100, 1 << 16 | 1, u64::MAX] {
        is(ErrorKind::InvalidArgument, harness.get(alloc(&[1], bad)).await);
    }
    assert!(harness.get(alloc(&[1], 1 << 63)).await.is_err());
    is(ErrorKind::OutOfMemory, harness.get(alloc(&[1 << 58], 64)).await);
    drop(tensors);
    client.settles_at(baseline).await;
}

/// A virtual device names device and memory of a tensor; what it leaves open the session's devices
/// decide.
pub async fn a_virtual_device_says_where_a_tensor_is(harness: &Harness) {
    let client = harness.client().await;
    let alloc = |on: &str| client.session.alloc(on.parse::<VirtualDevice>().unwrap(), DataType::U8, &[4]);
    for on in ["cpu:0", "cpu", "*", "*:0", "cpu:0,scope=global", "*,scope=host", "cpu,target=llvm"] {
        let tensor = client.get(alloc(on)).await;
        assert_eq!((tensor.device(), tensor.size_bytes()), (Device::cpu(), 4), "{on}");
    }
    for on in ["cpu:1", "cuda", "*:1000", "cpu,target=llvm -mcpu=none", "cpu,scope=texture", "cuda:0,target=cuda"] {
        is(ErrorKind::DeviceUnavailable, harness.get(alloc(on)).await);
    }
    let aligned: VirtualDevice = "cpu:0,scope=host".parse().unwrap();
    let aligned = client.get(client.session.alloc_aligned(&aligned, DataType::U8, &[4], 1 << 16)).await;
    assert_eq!(client.run::<i64>("tensor.misalignment", (&aligned, 1_i64 << 16)).await, 0);
}

/// The session's limit on memory is an error that names it, and there is room again after a free.
pub async fn the_limit_on_memory_is_an_error(harness: &Harness) {
    let limits = rpc_core::SessionLimits { max_memory: 10_000, ..rpc_core::SessionLimits::default() };
    let client = harness.client_with(limits).await;
    let baseline = client.usage().await;
    let alloc = |bytes| client.session.alloc(Device::cpu(), DataType::U8, &[bytes]);
    let first = client.get(alloc(6_000)).await;
    let error = harness.get(alloc(5_000)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("max_memory"), "{error}");
    is(ErrorKind::LimitExceeded, client.try_run::<RemoteTensor>("tensor.new", (2_000,)).await);
    let second = client.get(alloc(4_000)).await;
    drop(first);
    client.settles_at(rpc_core::Usage { handles: baseline.handles + 1, memory_bytes: 4_000 }).await;
    client.get(alloc(6_000)).await;
    drop(second);
    client.settles_at(baseline).await;
}

/// Tensors of the session are copied among each other; whatever does not fit or overlaps is
/// refused.
pub async fn tensors_are_copied_among_each_other(harness: &Harness) {
    let client = harness.client().await;
    let (from, to) = (floats(&client, &[1.0, 2.0, 3.0, 4.0]).await, floats(&client, &[0.0; 4]).await);
    let among = |from: &RemoteTensor, to: &RemoteTensor| client.session.copy_among_remote(from, to);
    client.get(among(&from, &to)).await;
    assert_eq!(sum(&client, &to).await, 10.0);
    client.get(among(&from.view(0, DataType::F32, &[2], None), &to.view(8, DataType::F32, &[2], None))).await;
    assert_eq!(sum(&client, &to).await, 1.0 + 2.0 + 1.0 + 2.0);
    // Another shape with as many elements.
    client.get(among(&from, &to.view(0, DataType::F32, &[2, 2], None))).await;
    // Within one storage: the halves, and onto itself.
    client.get(among(&to.view(0, DataType::F32, &[2], None), &to.view(8, DataType::F32, &[2], None))).await;
    assert_eq!(sum(&client, &to).await, 6.0);
    client.get(among(&to, &to)).await;
    let part = |offset| to.view(offset, DataType::F32, &[3], None);
    is(ErrorKind::InvalidArgument, harness.get(among(&part(0), &part(4))).await);
    is(ErrorKind::InvalidArgument, harness.get(among(&part(4), &part(0))).await);
    is(ErrorKind::InvalidArgument, harness.get(among(&from, &part(0))).await);
    is(ErrorKind::InvalidArgument, harness.get(among(&from, &to.view(0, DataType::I32, &[4], None))).await);
    is(
        ErrorKind::InvalidArgument,
        harness.get(among(&to.view(0, DataType::F32, &[2, 1], Some(&[2, 1])), &part(0))).await,
    );
    assert_eq!(sum(&client, &to).await, 6.0);
    let (none, nothing) = (floats(&client, &[]).await, floats(&client, &[]).await);
    client.get(among(&none, &nothing)).await;
    // A large one does not run where requests are read.
    let large = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[12 << 20])).await;
    let copy = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[12 << 20])).await;
    client.get(client.session.copy_to_remote(&large, vec![3; 12 << 20])).await;
    client.get(among(&large, &copy)).await;
    assert!(client.get(client.session.copy_from_remote(&copy)).await == vec![3; 12 << 20]);
}

/// Two readers hold a tensor at once.
pub async fn two_readers_hold_a_tensor_at_once(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let tensor = floats(&client, &[1.0, 2.0]).await;
    let read =
        |lane| client.call::<f64>("tensor.read_gated", (&tensor, &gate.object, &journal.object)).lane(lane).start();
    let readers = [read(Lane(1)), read(Lane(2)), read(Lane::CONCURRENT)];
    gate.reach(3).await;
    assert_eq!(sum(&client, &tensor).await, 3.0);
    assert_eq!(client.get(client.session.copy_from_remote(&tensor)).await.len(), 8);
    gate.open().await;
    for reader in readers {
        assert_eq!(client.get(reader).await, 3.0);
    }
}

/// A writer on another lane waits until the readers are done; nobody is told that the tensor is
/// busy.
pub async fn a_writer_waits_for_readers_on_other_lanes(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let tensor = floats(&client, &[1.0, 2.0]).await;
    let read =
        |lane| client.call::<f64>("tensor.read_gated", (&tensor, &gate.object, &journal.object)).lane(lane).start();
    let readers = [read(Lane(1)), read(Lane(2))];
    gate.reach(2).await;
    let writer = client.call::<()>("tensor.fill_noted", (&tensor, 5.0, &journal.object)).lane(Lane(3)).start();
    let behind = client.call::<f64>("tensor.sum", (&tensor,)).lane(Lane(3)).start();
    client.works().await;
    assert!(journal.entries().await.is_empty());
    gate.open().await;
    for reader in readers {
        assert_eq!(client.get(reader).await, 3.0);
    }
    client.get(writer).await;
    assert_eq!(client.get(behind).await, 10.0);
    assert_eq!(journal.entries().await, [1, 1, 2]);
}

/// Readers and copies on other lanes wait until the writer is done.
pub async fn readers_and_copies_wait_for_a_writer_on_another_lane(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let tensor = floats(&client, &[1.0, 2.0]).await;
    let args = (&tensor, 5.0, &gate.object, &journal.object);
    let writer = client.call::<()>("tensor.fill_gated", args).lane(Lane(1)).start();
    gate.reach(1).await;
    let reader = client.call::<f64>("tensor.sum_noted", (&tensor, &journal.object)).lane(Lane(2)).start();
    let session = client.session.clone();
    let copied = tensor.clone();
    let copy = tokio::spawn(async move { session.copy_from_remote(&copied).lane(Lane(3)).await });
    let among = floats(&client, &[0.0, 0.0]).await;
    let among_copy = client.session.copy_among_remote(&tensor, &among).lane(Lane(4)).start();
    client.works().await;
    assert!(journal.entries().await.is_empty());
    gate.open().await;
    client.get(writer).await;
    assert_eq!(client.get(reader).await, 10.0);
    client.get(among_copy).await;
    assert_eq!(sum(&client, &among).await, 10.0);
    let bytes = copy.await.unwrap().unwrap();
    // The copy may have read before the writer began, on its way through hops; never in the middle
    // of it.
    let old: Vec<u8> = [1.0_f32, 2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let new: Vec<u8> = [5.0_f32, 5.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    assert!(bytes == old || bytes == new);
    assert_eq!(journal.entries().await, [1, 2]);
}

/// Calls that want the same tensors in another order do not wait for each other for ever.
pub async fn calls_with_the_same_tensors_in_another_order_do_not_deadlock(harness: &Harness) {
    let client = harness.client().await;
    let (a, b, c) =
        (floats(&client, &[1.0; 64]).await, floats(&client, &[1.0; 64]).await, floats(&client, &[1.0; 64]).await);
    let mut calls = Vec::new();
    for round in 0..100_u32 {
        let args = [(&a, &b, &c), (&b, &c, &a), (&c, &a, &b), (&b, &a, &c)][round as usize % 4];
        calls.push(client.call::<()>("tensor.add", args).lane(Lane(round % 6)).start());
    }
    for call in calls {
        call.await.unwrap();
    }
    assert!(sum(&client, &a).await.is_finite() || sum(&client, &a).await == f64::INFINITY);
}

/// One call that would both read and write a storage is refused: no waiting would help.
pub async fn a_conflict_within_one_call_is_busy(harness: &Harness) {
    let client = harness.client().await;
    let (a, b) = (floats(&client, &[1.0; 4]).await, floats(&client, &[2.0; 4]).await);
    let half = |offset| a.view(offset, DataType::F32, &[2], None);
    is(ErrorKind::Busy, client.try_run::<()>("tensor.add", (&a, &b, &a)).await);
    is(ErrorKind::Busy, client.try_run::<()>("tensor.add", (&b, &a, &a)).await);
    is(ErrorKind::Busy, client.try_run::<()>("tensor.add", (&half(0), &half(0), &half(8))).await);
    is(ErrorKind::Busy, client.try_run::<()>("tensor.conflict", (&a,)).await);
    // Reading twice is no conflict, nor is reading in a nested call.
    client.run::<()>("tensor.add", (&a, &a, &b)).await;
    assert_eq!(sum(&client, &b).await, 8.0);
    assert_eq!(client.run::<f64>("tensor.nested_sum", (&b,)).await, 8.0);
    client.run::<()>("tensor.fill", (&a, 0.0)).await;
}

/// A tensor that was freed while a call uses it is gone for others, and its memory stays until the
/// call is done.
pub async fn a_tensor_freed_during_a_call_stays_until_the_call_is_done(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let baseline = client.usage().await;
    let tensor = floats(&client, &[2.0; 1000]).await;
    let reader =
        client.call::<f64>("tensor.read_gated", (&tensor, &gate.object, &journal.object)).lane(Lane(1)).start();
    gate.reach(1).await;
    client.get(tensor.free()).await;
    let usage = client.usage().await;
    assert_eq!((usage.handles, usage.memory_bytes - baseline.memory_bytes), (baseline.handles, 4000));
    gate.open().await;
    assert_eq!(client.get(reader).await, 2000.0);
    client.settles_at(baseline).await;
}

/// Attributes have the types that they document; what a device has not is null, and only an index
/// out of range fails.
pub async fn devices_tell_their_attributes(harness: &Harness) {
    let client = harness.client().await;
    let cpu = Device::cpu();
    let none: Device = "cpu:7".parse().unwrap();
    let ask = |device, attribute| harness.get(client.session.attribute(device, attribute));
    for attribute in DeviceAttribute::ALL {
        let value = ask(cpu, *attribute).await.unwrap();
        match (attribute, &value) {
            (DeviceAttribute::MemoryScopes, Value::List(scopes)) => {
                assert!(scopes.iter().all(|scope| matches!(scope, Value::Str(_))), "{attribute} is {value:?}");
            }
            (DeviceAttribute::Target, Value::Str(text)) => {
                assert_eq!(text.parse::<Target>().unwrap().device_type(), cpu.kind);
            }
            (DeviceAttribute::MemoryScopes | DeviceAttribute::Target, _) => panic!("{attribute} is {value:?}"),
            _ => assert!(!value.may_hold_objects(), "{attribute} is {value:?}"),
        }
        match attribute {
            DeviceAttribute::Exists => assert_eq!(ask(none, *attribute).await.unwrap(), Value::Bool(false)),
            _ => is(ErrorKind::DeviceUnavailable, ask(none, *attribute).await),
        }
    }
    assert_eq!(ask(cpu, DeviceAttribute::Exists).await.unwrap(), Value::Bool(true));
    assert_eq!(ask(cpu, DeviceAttribute::WarpSize).await.unwrap(), Value::Null);
    assert!(matches!(ask(cpu, DeviceAttribute::ComputeUnits).await.unwrap(), Value::Int(1..)));
    assert_eq!(ask("cuda:0".parse().unwrap(), DeviceAttribute::Exists).await.unwrap(), Value::Bool(false));
}

/// Streams are created, set, waited for and freed; what is no stream is refused.
pub async fn streams_are_created_set_waited_for_and_freed(harness: &Harness) {
    let client = harness.client().await;
    let (session, cpu) = (&client.session, Device::cpu());
    let baseline = client.usage().await;
    client.get(session.stream_wait(cpu, None)).await;
    let stream = client.get(session.create_stream(cpu)).await;
    for lane in [Lane::DEFAULT, Lane(4), Lane::CONCURRENT] {
        client.get(session.set_stream(cpu, Some(&stream)).lane(lane)).await;
        client.get(session.stream_wait(cpu, None).lane(lane)).await;
        client.get(session.stream_wait(cpu, Some(&stream)).lane(lane)).await;
    }
    let second: Device = "cpu:1".parse().unwrap();
    is(ErrorKind::DeviceUnavailable, harness.get(session.create_stream(second)).await);
    is(ErrorKind::DeviceUnavailable, harness.get(session.stream_wait(second, None)).await);
    is(ErrorKind::DeviceUnavailable, harness.get(session.set_stream(second, None)).await);
    is(ErrorKind::InvalidArgument, harness.get(session.set_stream(second, Some(&stream))).await);
    let object: RemoteObject = client.run("counter.new", ()).await;
    is(ErrorKind::InvalidHandle, harness.get(session.set_stream(cpu, Some(&object))).await);
    is(ErrorKind::InvalidHandle, harness.get(session.stream_wait(cpu, Some(&object))).await);
    drop(object);
    let stale = stream.clone();
    client.get(session.free_stream(stream)).await;
    is(ErrorKind::InvalidHandle, harness.get(session.stream_wait(cpu, Some(&stale))).await);
    is(ErrorKind::InvalidHandle, harness.get(session.set_stream(cpu, Some(&stale))).await);
    // Lanes that it is still set on go on.
    client.get(session.stream_wait(cpu, None)).await;
    client.get(session.set_stream(cpu, None)).await;
    client.get(session.stream_wait(cpu, None)).await;
    client.settles_at(baseline).await;
}

/// A stream waits for another one, and for the current one of a lane; what is no stream is refused
/// on either side.
pub async fn one_stream_waits_for_another(harness: &Harness) {
    let client = harness.client().await;
    let (session, cpu) = (&client.session, Device::cpu());
    let baseline = client.usage().await;
    let (one, other) = (client.get(session.create_stream(cpu)).await, client.get(session.create_stream(cpu)).await);
    for lane in [Lane::DEFAULT, Lane(4), Lane::CONCURRENT] {
        for (from, to) in [(Some(&one), Some(&other)), (None, Some(&one)), (Some(&one), None), (None, None)] {
            client.get(session.sync_stream_from_to((cpu, from), (cpu, to)).lane(lane)).await;
        }
    }
    let second: Device = "cpu:1".parse().unwrap();
    let sync = |from, to| harness.get(session.sync_stream_from_to(from, to));
    is(ErrorKind::DeviceUnavailable, sync((second, None), (cpu, Some(&one))).await);
    is(ErrorKind::DeviceUnavailable, sync((cpu, Some(&one)), (second, None)).await);
    is(ErrorKind::InvalidArgument, sync((second, Some(&one)), (cpu, None)).await);
    is(ErrorKind::InvalidArgument, sync((cpu, None), (second, Some(&one))).await);
    let object: RemoteObject = client.run("counter.new", ()).await;
    is(ErrorKind::InvalidHandle, sync((cpu, Some(&object)), (cpu, Some(&one))).await);
    is(ErrorKind::InvalidHandle, sync((cpu, Some(&one)), (cpu, Some(&object))).await);
    let stale = other.clone();
    client.get(session.free_stream(other)).await;
    is(ErrorKind::InvalidHandle, sync((cpu, Some(&stale)), (cpu, Some(&one))).await);
    is(ErrorKind::InvalidHandle, sync((cpu, Some(&one)), (cpu, Some(&stale))).await);
    client.get(session.free_stream(one)).await;
    drop((object, stale));
    client.settles_at(baseline).await;
}

/// Vectors go up and come down in one step, and their types are checked.
pub async fn vectors_go_up_and_come_down(harness: &Harness) {
    let client = harness.client().await;
    let session = &client.session;
    let up = session.upload(&[2, 2], &[1_i64, -2, i64::MAX, i64::MIN]).await.unwrap();
    assert_eq!(session.download::<i64>(&up).await.unwrap(), [1, -2, i64::MAX, i64::MIN]);
    is(ErrorKind::InvalidArgument, session.download::<f64>(&up).await);
    is(ErrorKind::InvalidArgument, session.upload(&[3], &[1_u8, 2]).await);
    let empty = session.upload::<f32>(&[0], &[]).await.unwrap();
    assert!(session.download::<f32>(&empty).await.unwrap().is_empty());
}
