//! Tests of payloads that are received straight into a caller's buffer or a tensor.

use std::time::Duration;

use crate::pair::{Arrived, Cut, Pair, Rng, Setup, frame};
use bytes::{Bytes, BytesMut};
use rpc_core::proto::Kind;
use rpc_core::session::{Operation, ReadBuffer, Request};
use rpc_core::{DataType, Device, ErrorKind, Handle, LocalSession, Reference, Registry, TensorRef, Value};

fn tensor(storage: u64, len: usize) -> TensorRef {
    TensorRef {
        storage: Handle::from_bits(storage),
        byte_offset: 0,
        shape: vec![len as i64],
        strides: None,
        dtype: DataType::U8,
        device: Device::cpu(),
    }
}

#[test]
fn a_read_is_received_into_the_buffer_of_the_caller() {
    for cut in [Cut::Whole, Cut::Every(1), Cut::Random(Rng(3))] {
        let len = 40_000;
        let data = Rng(1).bytes(len);
        let mut pair = Setup::default().cut(cut).build();
        let memory = BytesMut::zeroed(len);
        let address = memory.as_ptr();
        let buffer = ReadBuffer::new(memory);
        let read =
            Operation::Read { from: tensor(1, len).into(), offset: 0, len: len as u64, into: Some(buffer.clone()) };
        pair.submit(1, Request::new(read));
        pair.run();
        pair.reply(1, Ok(Value::Bytes(data.clone().into())));
        pair.run();
        assert_eq!(pair.outcomes[&1], Ok(Value::Null));
        let filled = buffer.take().unwrap();
        assert_eq!((&filled[..], filled.as_ptr()), (&data[..], address));
    }
}

#[test]
fn a_reply_that_does_not_fit_the_buffer_arrives_as_bytes() {
    for (given, sent) in [(40_000, 30_000), (30_000, 40_000), (1_000, 1_000)] {
        let mut pair = Pair::new(Setup::default());
        let buffer = ReadBuffer::new(BytesMut::zeroed(given));
        let read =
            Operation::Read { from: tensor(1, given).into(), offset: 0, len: given as u64, into: Some(buffer.clone()) };
        pair.submit(1, Request::new(read));
        pair.run();
        pair.reply(1, Ok(Value::Bytes(vec![3; sent].into())));
        pair.run();
        assert_eq!(pair.outcomes[&1], Ok(Value::Bytes(vec![3; sent].into())));
        assert_eq!(buffer.take().unwrap().len(), given);
    }
}

#[test]
fn a_bulk_read_can_be_filled_outside_of_the_endpoint() {
    let len = 40_000;
    let mut pair = Pair::new(Setup::default());
    let buffer = ReadBuffer::new(BytesMut::zeroed(len));
    let read = Operation::Read { from: tensor(1, len).into(), offset: 0, len: len as u64, into: Some(buffer.clone()) };
    pair.submit(1, Request::new(read));
    pair.run();
    let (body, payload, _) = rpc_core::proto::encode_reply(&Ok(Value::Bytes(vec![3; len].into())));
    let reply = frame(Kind::Reply, 1, 0, false, &body, &payload.concat());
    let mut head = BytesMut::from(&reply[..reply.len() - len]);
    pair.client.handle_input(&mut head, pair.now).unwrap();
    let bulk = pair.client.take_bulk().unwrap();
    assert!(pair.client.bulk_target().is_none());
    pair.client.put_idle_bulk(bulk);
    let mut bulk = pair.client.take_bulk().unwrap();
    while !bulk.unfilled().is_empty() {
        let count = bulk.unfilled().len().min(7_000);
        bulk.unfilled()[..count].fill(3);
        bulk.advance(count);
    }
    pair.client.put_bulk(bulk, pair.now).unwrap();
    pair.client_events();
    assert_eq!(pair.outcomes[&1], Ok(Value::Null));
    assert_eq!(&buffer.take().unwrap()[..], &[3; 40_000]);
}

#[test]
fn a_write_is_received_into_the_tensor() {
    for cut in [Cut::Whole, Cut::Every(1), Cut::Random(Rng(3))] {
        let len = 40_000;
        let data = Rng(1).bytes(len);
        let mut pair = Setup::default().cut(cut).build().served_by(LocalSession::new(Registry::new()));
        pair.submit(
            1,
            Request::new(Operation::Alloc {
                device: Device::cpu(),
                dtype: DataType::U8,
                shape: vec![len as i64],
                scope: None,
                alignment: 0,
            }),
        );
        settle(&mut pair, 1);
        let Ok(Value::Object(Reference::Tensor(tensor))) = pair.outcomes[&1].clone() else { panic!() };
        let half = len / 2;
        for (id, at) in [(2, 0), (3, half)] {
            let data = Bytes::copy_from_slice(&data[at..at + half]);
            pair.submit(id, Request::new(Operation::Write { to: tensor.clone(), offset: at as u64, data }));
        }
        let read = Operation::Read { from: tensor.clone(), offset: 0, len: len as u64, into: None };
        pair.submit(4, Request::new(read));
        settle(&mut pair, 4);
        assert_eq!(pair.arrived[1..3], [Arrived::Written(2), Arrived::Written(3)]);
        assert_eq!(pair.outcomes[&4], Ok(Value::Bytes(data.into())));
        // A write that was cut short releases the lane.
        pair.outcomes.remove(&4);
        let write = Operation::Write { to: tensor.clone(), offset: half as u64 + 1, data: vec![0; half].into() };
        pair.submit(5, Request::new(write));
        settle(&mut pair, 5);
        assert_eq!(pair.error(5).kind(), ErrorKind::InvalidArgument);
    }
}

/// Runs until `id` is answered. The local session may use threads of its own.
fn settle(pair: &mut Pair, id: u64) {
    for _ in 0..10_000 {
        pair.run();
        if pair.outcomes.contains_key(&id) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no reply to {id}");
}

#[test]
fn a_write_in_place_that_is_cut_off_releases_its_lane() {
    let local = LocalSession::new(Registry::new());
    let mut pair = Pair::new(Setup::default()).served_by(local);
    pair.submit(
        1,
        Request::new(Operation::Alloc {
            device: Device::cpu(),
            dtype: DataType::U8,
            shape: vec![40_000],
            scope: None,
            alignment: 0,
        }),
    );
    settle(&mut pair, 1);
    let Ok(Value::Object(Reference::Tensor(tensor))) = pair.outcomes[&1].clone() else { panic!() };
    pair.setup.cut = Cut::Every(10_000);
    pair.setup.capacity = 20_000;
    let write = Operation::Write { to: tensor.clone(), offset: 0, data: vec![1; 40_000].into() };
    pair.server_reads = false;
    pair.submit(2, Request::new(write));
    pair.run();
    pair.cut_off();
    pair.server_reads = true;
    pair.run();
    assert!(pair.server_error.as_ref().unwrap().message().contains("middle of a message"));
    let local = pair.local.take().unwrap();
    drop(pair);
    let read = Operation::Read { from: tensor, offset: 0, len: 1, into: None };
    let read = rpc_core::RpcSession::submit(&local, Request::new(read)).reply().wait();
    assert!(read.is_ok(), "{read:?}");
}
