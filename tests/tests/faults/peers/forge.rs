//! A client that forges handles, and knows those of another client.

use bytes::Bytes;
use rpc_core::{DataType, Device, ErrorKind, Handle, Operation, RemoteObject, Request};
use rpc_tests::forwarder::Random;
use rpc_transports::Connector;

use super::site::{TIME_LIMIT, soon, works};
use super::within;

/// Checks the worst case: the attacker knows the victim's handles, and can make any number of
/// attempts.
pub async fn handles_of_others(connector: Connector, address: &str, count: usize) {
    let connect = async || soon("connect", connector.connect(address)).await.unwrap();
    let (victim, attacker) = (connect().await, connect().await);
    let tag = format!("forged at {address}");
    let alive = async || {
        let alive = soon("get", victim.function::<(String,), i64>("tagged.alive")).await.unwrap();
        soon("call", alive.call((tag.clone(),))).await.unwrap()
    };
    let new = soon("get", victim.get_function("tagged.new")).await.unwrap();
    let mut objects = Vec::new();
    for _ in 0..100 {
        objects.push(soon("call", new.call::<RemoteObject>((tag.clone(),))).await.unwrap());
    }
    let tensor = soon("alloc", victim.alloc(Device::cpu(), DataType::U8, &[8])).await.unwrap();
    soon("copy", victim.copy_to_remote(&tensor, vec![7; 8])).await.unwrap();
    let known: Vec<u64> =
        objects.iter().map(|object| object.handle().to_bits()).chain([tensor.handle().to_bits()]).collect();
    let raw =
        async |operation: Operation| soon("a request", attacker.shared().submit(Request::new(operation)).reply()).await;
    // The victim's handles, in each operation that takes a handle.
    for bits in &known {
        let handle = Handle::from_bits(*bits);
        let to = rpc_core::TensorRef { storage: handle, ..reference(&tensor) };
        for operation in [
            Operation::Free { handle },
            Operation::Call { function: handle, args: Vec::new() },
            Operation::Read { from: to.clone().into(), offset: 0, len: 8, into: None },
            Operation::Write { to: to.clone().into(), offset: 0, data: Bytes::from_static(&[1; 8]) },
            Operation::Copy { from: to.clone().into(), to: to.clone().into() },
        ] {
            let what = format!("{operation:?}");
            let error = raw(operation).await.expect_err(&what);
            assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{what}: {error}");
        }
    }
    // Each possible tag, with the slots and generations in use; then random handles.
    let mut random = Random::new(31);
    let mut forged: Vec<u64> = Vec::with_capacity(count);
    for slot in 0..count as u64 >> 17 {
        forged.extend((0..1_u64 << 16).map(|tag| tag << 48 | slot));
    }
    forged.extend((0..count / 3).map(|number| known[number % known.len()] ^ random.number() << 48));
    while forged.len() < count {
        forged.push(random.number());
    }
    forged.extend(&known);
    let released = forged.len();
    // The attacker may lose its own objects. It has only those that it gets below.
    for handles in forged.chunks(8000) {
        let handles = handles.iter().copied().map(Handle::from_bits).collect();
        soon("release", attacker.shared().submit(Request::new(Operation::Release { handles })).reply()).await.unwrap();
    }
    let mut pending = Vec::new();
    for bits in forged.iter().step_by(forged.len() / 20_000) {
        let free = Operation::Free { handle: Handle::from_bits(*bits) };
        pending.push(attacker.shared().submit(Request::new(free)).reply());
    }
    for reply in pending {
        assert_eq!(soon("a request", reply).await.unwrap_err().kind(), ErrorKind::InvalidHandle);
    }
    println!("{released} handles forged");
    works(&attacker).await;
    assert_eq!(alive().await, 100);
    assert_eq!(soon("copy", victim.copy_from_remote(&tensor)).await.unwrap(), [7; 8][..]);
    works(&victim).await;
    drop(objects);
    within(TIME_LIMIT, "the victim frees its own", async || alive().await == 0).await;
}

fn reference(tensor: &rpc_core::RemoteTensor) -> rpc_core::TensorRef {
    rpc_core::TensorRef {
        storage: tensor.handle(),
        byte_offset: tensor.byte_offset(),
        shape: tensor.shape().to_vec(),
        strides: None,
        dtype: tensor.dtype(),
        device: tensor.device(),
    }
}
