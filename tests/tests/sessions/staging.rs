//! Reads from a device whose memory the host cannot reach, while other sessions hold all memory.

use std::sync::Arc;

use rpc_core::limits::MemoryQuota;
use rpc_core::{
    DataType, Device, DeviceApi, Devices, ErrorKind, Lane, LocalSession, Operation, Reference, Registry, Request,
    Result, RpcSession, SessionLimits, TensorRef, Value,
};
use rpc_tests::accelerator::Accelerator;

const MIB: u64 = 1 << 20;

fn ask(session: &LocalSession, operation: Operation) -> Result<Value> {
    session.submit(Request::new(operation)).reply().wait()
}

fn alloc(session: &LocalSession, device: Device, len: u64) -> TensorRef {
    let alloc = Operation::Alloc { device, dtype: DataType::U8, shape: vec![len as i64], scope: None, alignment: 0 };
    match ask(session, alloc).unwrap() {
        Value::Object(Reference::Tensor(tensor)) => *tensor,
        other => panic!("{other:?}"),
    }
}

fn read(from: &TensorRef, len: u64) -> Operation {
    Operation::Read { from: from.clone().into(), offset: 0, len, into: None }
}

/// Regression: such a read is staged in host memory, and failed as soon as others had used up the
/// memory of all sessions.
#[test]
fn what_others_hold_makes_no_tensor_unreadable() {
    let accelerator = Accelerator::default();
    let device = Device::new(accelerator.kind(), 0);
    let devices = Devices::new().with(Arc::new(accelerator));
    let total = MemoryQuota::new("max_total_memory", 8 * MIB, None);
    let session = || {
        let limits = SessionLimits { max_queued_bytes: 2 * MIB as usize, ..SessionLimits::default() };
        let session = LocalSession::builder(Registry::new()).devices(devices.clone()).limits(limits);
        session.total_memory(total.clone()).build()
    };
    let (greedy, own) = (session(), session());
    let (tensor, larger) = (alloc(&own, device, MIB), alloc(&own, device, 3 * MIB));
    let data: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8).collect();
    ask(&own, Operation::Write { to: tensor.clone().into(), offset: 0, data: data.clone().into() }).unwrap();
    alloc(&greedy, Device::cpu(), 4 * MIB);
    assert_eq!(total.used(), 8 * MIB);

    // Each on a lane of its own, so that they are there at the same time.
    let on_lane = |lane| own.submit(Request::new(read(&tensor, MIB)).on(Lane(lane))).reply();
    let reads: Vec<_> = (1..=16).map(on_lane).collect();
    for read in reads {
        assert!(read.wait().unwrap() == Value::Bytes(data.clone().into()));
    }
    assert_eq!(total.used(), 8 * MIB);
    // The session's own limit is still one.
    let error = ask(&own, read(&larger, 3 * MIB)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("max_queued"), "{error}");
}

/// A copy between two memories that the host cannot access may need a buffer of the host's.
#[test]
fn the_buffer_of_a_copy_between_devices_is_counted() {
    let accelerator = Accelerator::default();
    let device = Device::new(accelerator.kind(), 0);
    let devices = Devices::new().with(Arc::new(accelerator));
    let copied = |max_queued_bytes: u64| {
        let limits = SessionLimits { max_queued_bytes: max_queued_bytes as usize, ..SessionLimits::default() };
        let session = LocalSession::builder(Registry::new()).devices(devices.clone()).limits(limits).build();
        let [from, to] = [(); 2].map(|()| alloc(&session, device, 2 * MIB));
        ask(&session, Operation::Copy { from: from.into(), to: to.into() })
    };
    copied(MIB).unwrap();
    let error = copied(MIB / 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("max_queued"), "{error}");
}
