//! Tests of windows of shared memory: what goes through them, what does not, and peers that break
//! their rules. The memory here is a list of slots.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rpc_core::proto::{FrameHeader, Kind, MIN_SHARED, OfferedWindow, Window, WindowOpener};
use rpc_core::session::{Operation, ReadBuffer, Request};
use rpc_core::{DataType, Device, ErrorKind, Handle, Lane, MemoryQuota, Result, RpcError, TensorRef, Value};

use crate::hostile::feed;
use crate::pair::{Cut, Frame, Pair, Rng, Setup, frame};

const SLOTS: usize = 2;
const WINDOW_BYTES: u64 = 5 << 20;
const OFFER: &[u8] = b"the offer";
const PROOF: &[u8] = b"the proof";

/// Slots of the client, and those of the server.
type Slots = Arc<Mutex<[[Option<Vec<u8>>; SLOTS]; 2]>>;

#[derive(Debug)]
struct TestWindow {
    slots: Slots,
    side: usize,
}

impl Window for TestWindow {
    fn put(&mut self, pieces: &VecDeque<Bytes>, len: usize) -> Option<u16> {
        let mut slots = self.slots.lock().unwrap();
        let slot = slots[self.side].iter().position(Option::is_none)?;
        let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        assert_eq!(bytes.len(), len);
        slots[self.side][slot] = Some(bytes);
        Some(slot as u16)
    }

    fn has_room(&mut self) -> bool {
        self.slots.lock().unwrap()[self.side].iter().any(Option::is_none)
    }

    fn take(&mut self, slot: u16, into: &mut [u8]) -> Option<bool> {
        let mut slots = self.slots.lock().unwrap();
        let is_awaited = slots[1 - self.side].iter().all(Option::is_some);
        let slot = slots[1 - self.side].get_mut(usize::from(slot))?;
        let bytes = slot.take().unwrap_or_else(|| vec![0; into.len()]);
        into.copy_from_slice(&bytes[..into.len()]);
        Some(is_awaited)
    }
}

/// Lets the client of a pair offer a window, and its server open what `open` does not refuse.
fn with_window(mut pair: Pair, slots: &Slots, open: impl FnOnce() -> Result<()> + Send + 'static) -> Pair {
    let window = |side| Box::new(TestWindow { slots: slots.clone(), side }) as Box<dyn Window>;
    let (ours, theirs) = (window(0), window(1));
    pair.client = pair.client.with_window(Box::new(move || {
        let confirm = move |proof: &[u8]| (proof == PROOF).then_some(ours);
        Some(OfferedWindow { offer: OFFER.to_vec(), confirm: Box::new(confirm) })
    }));
    pair.server = pair.server.with_window(WindowOpener {
        window_bytes: WINDOW_BYTES,
        open: Box::new(move |offer| {
            assert_eq!(offer, OFFER);
            open()?;
            Ok((theirs, PROOF.to_vec()))
        }),
    });
    pair
}

fn tensor(len: usize) -> TensorRef {
    TensorRef {
        storage: Handle::from_bits(1),
        byte_offset: 0,
        shape: vec![len as i64],
        strides: None,
        dtype: DataType::U8,
        device: Device::cpu(),
    }
}

fn write(data: &[u8]) -> Request {
    Request::new(Operation::Write { to: tensor(data.len()).into(), offset: 0, data: data.to_vec().into() })
}

/// Returns a pair whose window is open, after one write and its reply.
fn open_pair(slots: &Slots) -> Pair {
    let mut pair = with_window(Setup::default().build(), slots, || Ok(()));
    pair.submit(1, write(&[1; MIN_SHARED]));
    pair.run();
    pair.reply(1, Ok(Value::Null));
    pair.run();
    pair
}

/// Returns the slots of the data frames that a side has sent; `None` for a payload behind its body.
fn slots_of(frames: &[Frame]) -> Vec<Option<u16>> {
    let is_large = |header: &FrameHeader| header.payload_len as usize >= MIN_SHARED;
    frames.iter().map(|frame| frame.header).filter(is_large).map(|header| header.slot).collect()
}

fn data_of(request: &Request) -> &[u8] {
    match &request.operation {
        Operation::Write { data, .. } => data,
        other => panic!("{other:?} is no write"),
    }
}

#[test]
fn large_payloads_of_both_sides_go_through_the_window() {
    for cut in [Cut::Whole, Cut::Every(5), Cut::Random(Rng(7))] {
        let slots = Slots::default();
        let mut pair = with_window(Setup::default().cut(cut).build(), &slots, || Ok(()));
        let data = Rng(1).bytes(MIN_SHARED);
        // The first one is sent before the server has answered the offer.
        for id in 1..=6 {
            pair.submit(id, write(&data));
            pair.run();
            assert_eq!(data_of(&pair.requests[&id]), data);
            pair.reply(id, Ok(Value::Null));
            pair.run();
        }
        let buffer = ReadBuffer::new(BytesMut::zeroed(MIN_SHARED));
        let into = Some(buffer.clone());
        let read = Operation::Read { from: tensor(MIN_SHARED).into(), offset: 0, len: MIN_SHARED as u64, into };
        pair.submit(7, Request::new(read));
        pair.run();
        pair.reply(7, Ok(Value::Bytes(data.clone().into())));
        pair.run();
        assert_eq!(pair.outcomes[&7], Ok(Value::Null));
        assert_eq!(&buffer.take().unwrap()[..], data);
        assert_eq!(slots_of(&pair.client_frames()), [None, Some(0), Some(0), Some(0), Some(0), Some(0)]);
        assert_eq!(slots_of(&pair.server_frames()), [Some(0)]);
        assert!(slots.lock().unwrap().iter().flatten().all(Option::is_none), "a slot is still in use");
    }
}

#[test]
fn small_payloads_keep_out_of_the_window() {
    let mut pair = open_pair(&Slots::default());
    pair.submit(2, write(&[2; MIN_SHARED - 1]));
    pair.run();
    assert_eq!(data_of(&pair.requests[&2]), [2; MIN_SHARED - 1]);
    assert!(pair.client_frames().iter().all(|frame| frame.header.slot.is_none()));
}

/// The server does not read at first, so that the third request finds no slot.
#[test]
fn payloads_wait_while_all_slots_are_in_use_and_others_do_not() {
    let mut pair = open_pair(&Slots::default());
    pair.server_reads = false;
    for id in 2..=5 {
        pair.submit(id, write(&vec![id as u8; MIN_SHARED]));
        pair.run();
    }
    assert_eq!(slots_of(&pair.client_frames()), [None, Some(0), Some(1)]);
    let sent = pair.client_frames().len();
    pair.submit(6, write(&[6; 10]).on(Lane(6)));
    pair.run();
    assert_eq!(pair.client_frames().len(), sent + 1, "a small message waits as well");
    pair.server_reads = true;
    pair.run();
    for id in 2..=5 {
        assert_eq!(data_of(&pair.requests[&id]), vec![id as u8; MIN_SHARED]);
    }
    assert_eq!(slots_of(&pair.client_frames()).len(), 5);
    assert!(slots_of(&pair.client_frames())[1..].iter().all(Option::is_some));
    assert_eq!(pair.requests.len(), 5);
}

/// Data that waits for a slot does not move, and so is no sign that the server lives.
#[test]
fn a_server_that_frees_no_slot_and_says_nothing_is_given_up() {
    let mut pair = open_pair(&Slots::default());
    pair.server_asleep = true;
    for id in 2..=4 {
        pair.submit(id, write(&[1; MIN_SHARED]));
    }
    pair.advance(Duration::from_secs(30));
    assert_eq!(pair.ended.unwrap().kind(), ErrorKind::PeerSilent);
}

#[test]
fn several_messages_that_came_at_once_are_all_received() {
    let mut pair = open_pair(&Slots::default());
    pair.client_reads = false;
    for id in 2..=4 {
        pair.submit(id, write(&[1; 10]));
    }
    pair.run();
    for id in 2..=4 {
        pair.reply(id, Ok(Value::Bytes(vec![id as u8; MIN_SHARED].into())));
        pair.run();
    }
    pair.client_reads = true;
    pair.run();
    assert_eq!(slots_of(&pair.server_frames())[..2], [Some(0), Some(1)]);
    assert!(slots_of(&pair.server_frames())[2].is_some());
    for id in 2..=4 {
        assert_eq!(pair.outcomes[&id], Ok(Value::Bytes(vec![id as u8; MIN_SHARED].into())));
    }
}

#[test]
fn a_window_that_is_refused_is_done_without() {
    // Half of it stays for requests.
    let quota = MemoryQuota::new("max_total_queued", 2 * WINDOW_BYTES - 1, None);
    let refuse = || Err(RpcError::new(ErrorKind::Refused, "another user's"));
    let no_room = with_window(Setup::default().build(), &Slots::default(), || Ok(())).within(&quota);
    let refused = with_window(Setup::default().build(), &Slots::default(), refuse);
    for mut pair in [no_room, refused] {
        for id in 1..=3 {
            pair.submit(id, write(&[1; MIN_SHARED]));
            pair.run();
            pair.reply(id, Ok(Value::Bytes(vec![2; MIN_SHARED].into())));
            pair.run();
            assert!(pair.outcomes[&id].is_ok());
        }
        assert_eq!(slots_of(&pair.client_frames()), [None; 3]);
        assert_eq!(slots_of(&pair.server_frames()), [None; 3]);
        let offers = pair.client_frames().iter().filter(|frame| frame.header.kind == Kind::Window).count();
        assert_eq!(offers, 1);
    }
    assert_eq!(quota.used(), 0);
}

#[test]
fn the_whole_window_counts_against_the_limit_of_all_sessions() {
    let quota = MemoryQuota::new("max_total_queued", 2 * WINDOW_BYTES, None);
    let mut pair = with_window(Setup::default().build(), &Slots::default(), || Ok(())).within(&quota);
    assert_eq!(quota.used(), 0);
    pair.submit(1, write(&[1; MIN_SHARED]));
    pair.run();
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert_eq!(quota.used(), WINDOW_BYTES);
    drop(pair);
    assert_eq!(quota.used(), 0);
}

/// Returns a frame whose payload is said to be in a slot.
fn shared(kind: Kind, id: u64, slot: u16, body: &[u8]) -> Vec<u8> {
    let (body_len, payload_len) = (body.len() as u32, MIN_SHARED as u32);
    let header = FrameHeader { body_len, payload_len, id, slot: Some(slot), ..FrameHeader::control(kind, 0) };
    [&header.encode()[..], body].concat()
}

#[test]
fn a_client_that_breaks_the_rules_of_windows_breaks_the_protocol() {
    let offer = frame(Kind::Window, 0, 0, false, OFFER, &[]);
    let refusal = |pair: &mut Pair, bytes: &[u8]| {
        let error = feed(pair, bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        error.to_string()
    };
    let mut plain = Setup::default().build();
    assert!(refusal(&mut plain, &offer).contains("Window"));
    let mut plain = Setup::default().build();
    assert!(refusal(&mut plain, &shared(Kind::Request, 9, 0, b"")).contains("shared"));
    // Neither before its offer, nor in front of an offer that is refused.
    let mut pair = with_window(Setup::default().build(), &Slots::default(), || Ok(()));
    assert!(refusal(&mut pair, &shared(Kind::Request, 9, 0, b"")).contains("shared"));
    let mut pair = open_pair(&Slots::default());
    assert!(refusal(&mut pair, &offer).contains("Window"), "a second offer");
    for slot in [SLOTS as u16, u16::MAX] {
        let mut pair = open_pair(&Slots::default());
        let error = refusal(&mut pair, &shared(Kind::Request, 9, slot, b""));
        assert!(error.contains(&format!("no slot {slot}")), "{error}");
    }
}

#[test]
fn a_server_that_breaks_the_rules_of_windows_breaks_the_protocol() {
    let broken = |mut pair: Pair, bytes: &[u8]| {
        let mut input = BytesMut::from(bytes);
        let error = pair.client.handle_input(&mut input, pair.now).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    };
    let answer = |proof: &[u8]| frame(Kind::Window, 0, 0, false, proof, &[]);
    broken(Setup::default().build(), &answer(PROOF));
    let possible = || with_window(Setup::default().build(), &Slots::default(), || Ok(()));
    broken(possible(), &answer(PROOF));
    broken(possible(), &answer(&[]));
    let offered = || {
        let mut pair = possible();
        pair.server_asleep = true;
        pair.submit(1, write(&[1; MIN_SHARED]));
        pair.run();
        pair
    };
    broken(offered(), &answer(b"another proof"));
    broken(offered(), &[answer(&[]), answer(PROOF)].concat());
    broken(offered(), &[answer(PROOF), answer(PROOF)].concat());
    broken(offered(), &shared(Kind::Reply, 1, 0, &[0xc0]));
    broken(offered(), &[answer(&[]), shared(Kind::Reply, 1, 0, &[0xc0])].concat());
    broken(offered(), &[answer(PROOF), shared(Kind::Reply, 1, SLOTS as u16, &[0xc0])].concat());
}
