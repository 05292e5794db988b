//! Tests of a client and a server together: order, credit, cancellation, deadlines and ends, on a
//! channel in memory and under virtual time.

use std::time::Duration;

use crate::pair::{Arrived, Cut, Frame, Pair, Rng, Setup, call, call_with, frame, object};
use bytes::Bytes;
use rpc_core::proto::{Admission, Kind, PIPES};
use rpc_core::session::{Operation, Request};
use rpc_core::{ErrorKind, Handle, Lane, LocalSession, PipeId, Reference, Registry, RpcError, Value};

const KIB: usize = 1 << 10;

fn bytes(len: usize) -> Value {
    Value::Bytes(Bytes::from(vec![3; len]))
}

fn free(bits: u64) -> Handle {
    Handle::from_bits(bits)
}

fn small() -> Setup {
    Setup::default().limits(256 * KIB as u64, 256 * KIB as u64, 16 << 10, 64)
}

fn kinds(frames: &[Frame]) -> Vec<(Kind, u64)> {
    frames.iter().map(|frame| (frame.kind(), frame.id())).collect()
}

#[test]
fn replies_match_by_number_in_any_order() {
    let mut pair = Pair::new(Setup::default());
    for id in 1..=5 {
        assert!(matches!(pair.submit(id, call(id as u32, 10)), Admission::Now));
    }
    pair.run();
    for id in [3, 1, 5, 2, 4] {
        pair.reply(id, if id == 2 { Err(RpcError::not_found("two")) } else { Ok(Value::Int(id as i64)) });
        pair.run();
    }
    assert_eq!(pair.answered, [3, 1, 5, 2, 4]);
    assert_eq!(pair.outcomes[&5], Ok(Value::Int(5)));
    let error = pair.error(2);
    assert_eq!((error.kind(), error.hop()), (ErrorKind::NotFound, 1));
    assert!(pair.client.is_quiet() && pair.client.is_flushed() && pair.server.is_flushed());
}

#[test]
fn requests_beyond_the_credit_wait_and_are_admitted_in_order() {
    let mut pair = Pair::new(Setup::default().limits(1 << 20, 1 << 20, 1 << 16, 2));
    for id in 1..=6 {
        let admission = pair.submit(id, call(id as u32 % 2, 1));
        assert_eq!(matches!(admission, Admission::Now), id <= 2, "{id}");
    }
    pair.run();
    assert_eq!(pair.requests_in_order(), [1, 2]);
    for id in 1..=6 {
        assert!(pair.requests.contains_key(&id));
        pair.reply(id, Ok(Value::Null));
        pair.run();
        assert!(pair.server.in_flight() <= 2);
    }
    assert_eq!(pair.admitted, [1, 2, 3, 4, 5, 6]);
    assert_eq!(pair.requests_in_order(), [1, 2, 3, 4, 5, 6]);
    assert_eq!(pair.answered.len(), 6);
}

#[test]
fn requests_that_need_no_credit_in_bytes_pass_one_that_lacks_it() {
    let mut pair = small().build();
    assert!(matches!(pair.submit(1, call(1, 200 * KIB)), Admission::Now));
    assert!(matches!(pair.submit(2, call(2, 100 * KIB)), Admission::Later));
    // Behind the blocked request in its lane, although it needs no credit.
    assert!(matches!(pair.submit(3, call(2, 1)), Admission::Later));
    assert!(matches!(pair.submit(4, call(3, 1)), Admission::Now));
    // There is enough for it, and the older request has to wait for less.
    assert!(matches!(pair.submit(5, call(4, 40 * KIB)), Admission::Later));
    assert!(matches!(pair.submit(6, call(5, 100 * KIB).on(Lane::CONCURRENT)), Admission::Later));
    assert!(matches!(pair.submit(7, call(5, 1).on(Lane::CONCURRENT)), Admission::Now));
    pair.run();
    assert_eq!(pair.requests.len(), 3);
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert_eq!(pair.admitted, [1, 4, 7, 2, 3, 5, 6]);
    let order = pair.requests_in_order();
    let at = |id| order.iter().position(|other| *other == id).unwrap();
    assert!(at(2) < at(3));
}

/// Regression: credit went to the first request that it was enough for, and so never added up to a
/// large one while small ones kept coming.
#[test]
fn a_large_request_does_not_starve_behind_a_stream_of_smaller_ones() {
    const IN_FLIGHT: u64 = 8;
    let mut pair = Setup::default().limits(480 * KIB as u64, 512 * KIB as u64, 16 << 10, 64).build();
    for id in 1..=IN_FLIGHT {
        pair.submit(id, call(1, 8 * KIB));
    }
    let large = 1000;
    assert!(matches!(pair.submit(large, call(2, 479 * KIB)), Admission::Later));
    for id in 1..=IN_FLIGHT {
        // The copy goes on, as each of its pieces is answered.
        pair.submit(IN_FLIGHT + id, call(1, 8 * KIB));
        pair.run();
        pair.reply(id, Ok(Value::Null));
        pair.run();
    }
    assert!(pair.requests.contains_key(&large), "{:?}", pair.admitted);
    pair.reply(large, Ok(Value::Null));
    pair.run();
    assert_eq!(pair.admitted.last(), Some(&(2 * IN_FLIGHT)));
}

/// Regression: to submit, cancel or admit a request took a look at all that waited.
#[test]
fn many_requests_can_wait_for_credit_and_be_cancelled() {
    const COUNT: u64 = 50_000;
    let mut pair = Setup::default().limits(480 * KIB as u64, 512 * KIB as u64, 16 << 10, 1).build();
    for id in 1..=COUNT {
        pair.client.submit(id, call(id as u32, 1), id, pair.now);
    }
    for id in (2..=COUNT).rev() {
        pair.client.cancel(id);
    }
    pair.run();
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert_eq!((pair.answered.len() as u64, pair.requests_in_order()), (COUNT, vec![1]));
}

#[test]
fn cancelling_the_request_that_blocks_a_lane_unblocks_it() {
    for expire in [false, true] {
        let mut pair = small().build();
        pair.submit(1, call(1, 200 * KIB));
        let mut blocked = call(2, 100 * KIB);
        blocked.deadline = expire.then(|| pair.now + Duration::from_secs(1));
        pair.submit(2, blocked);
        pair.submit(3, call(2, 1));
        if expire {
            pair.advance(Duration::from_secs(1));
        } else {
            pair.client.cancel(2);
            pair.run();
        }
        // Although request 1 is still running.
        assert_eq!(pair.admitted, [1, 3]);
        let kind = if expire { ErrorKind::DeadlineExceeded } else { ErrorKind::Cancelled };
        assert_eq!(pair.error(2).kind(), kind);
        assert!(!pair.error(2).request_may_have_run());
    }
}

#[test]
fn large_replies_wait_until_the_client_has_taken_the_earlier_ones() {
    let mut pair = small().build();
    for id in 1..=8 {
        pair.submit(id, call(id as u32, 1));
    }
    pair.run();
    pair.client_reads = false;
    for id in 1..=7 {
        pair.reply(id, Ok(bytes(100 * KIB)));
    }
    pair.reply(8, Ok(Value::Int(8)));
    pair.run();
    let sent = |pair: &Pair| pair.server_frames().iter().map(|frame| frame.payload.len()).sum::<usize>();
    assert_eq!(sent(&pair), 200 * KIB);
    // Small replies need no credit.
    assert!(kinds(&pair.server_frames()).contains(&(Kind::Reply, 8)));
    pair.client_reads = true;
    pair.run();
    assert_eq!(sent(&pair), 700 * KIB);
    assert_eq!(pair.answered.len(), 8);
}

/// Regression: the client returned credit only when a quarter of the window was used up. With that
/// much held back, the rest of the window was too small for the largest reply, and both sides
/// waited for ever.
#[test]
fn the_largest_reply_fits_after_any_earlier_replies() {
    for (max_message, window) in [(256, 256), (256, 300), (256, 1000), (64, 256)] {
        let mut pair = Setup::default().limits(max_message << 10, window << 10, 16 << 10, 64).build();
        for (id, len) in [(1, 10), (2, max_message as usize - 1), (3, 20), (4, 33), (5, max_message as usize - 1)] {
            pair.submit(id, call(0, 1));
            pair.run();
            pair.reply(id, Ok(bytes(len * KIB)));
            pair.run();
            assert!(pair.outcomes.contains_key(&id), "{id} of {max_message} in {window}");
        }
    }
}

#[test]
fn a_reader_that_stops_does_not_stop_the_other_direction() {
    let mut pair = Setup { capacity: 8 << 10, ..small() }.build();
    pair.submit(1, call(1, 1));
    pair.run();
    pair.client_reads = false;
    pair.reply(1, Ok(bytes(200 * KIB)));
    pair.run();
    // The client's requests, cancellations and frees still arrive.
    pair.submit(2, call(2, 100 * KIB));
    pair.client.release([free(7)]);
    pair.client.cancel(1);
    pair.run();
    assert_eq!(pair.arrived[1..], [Arrived::Cancel(1), Arrived::Request(2), Arrived::Release(vec![7])]);
    assert!(!pair.server.is_flushed());
    pair.client_reads = true;
    pair.run();
    assert_eq!(pair.outcomes[&1], Ok(bytes(200 * KIB)));
}

#[test]
fn long_messages_span_frames_take_turns_and_keep_their_order() {
    let mut rng = Rng(7);
    let mut pair = small().limits(1 << 20, 4 << 20, 16 << 10, 64).build();
    let mut sent = Vec::new();
    for id in 1..=6 {
        let text = String::from_utf8(vec![b'a' + id as u8; 60_000 * (id as usize % 3 + 1)]).unwrap();
        let args =
            vec![Value::Str(text), Value::Bytes(rng.bytes(50_000).into()), Value::Bytes(rng.bytes(5_000).into())];
        sent.push(args.clone());
        pair.submit(id, call_with(id as u32 % 2, args));
    }
    pair.run();
    for (id, args) in (1..).zip(&sent) {
        let Operation::Call { args: received, .. } = &pair.requests[&id].operation else { panic!() };
        assert_eq!(received, args);
    }
    let frames = pair.client_frames();
    assert!(frames.iter().all(|frame| frame.body.len() <= 65_536 && frame.payload.len() <= 16 << 10));
    for lane in [0, 1] {
        let order: Vec<_> = frames.iter().filter(|frame| frame.header.lane == lane).map(Frame::id).collect();
        assert!(order.is_sorted(), "{order:?}");
    }
    // Neither lane waited for the other.
    assert_ne!(frames[0].header.lane, frames[1].header.lane);
    assert_ne!(frames[1].header.lane, frames[2].header.lane);
    // The same for replies.
    for (id, args) in (1..).zip(&sent) {
        pair.reply(id, Ok(Value::List(args.clone())));
    }
    pair.run();
    for (id, args) in (1..).zip(&sent) {
        assert_eq!(pair.outcomes[&id], Ok(Value::List(args.clone())));
    }
}

#[test]
fn a_channel_that_moves_one_byte_at_a_time_works() {
    for cut in [Cut::Every(1), Cut::Every(7), Cut::Random(Rng(5))] {
        let mut pair = small().cut(cut).build();
        for id in 1..=4 {
            pair.submit(id, call(id as u32 % 2, 30 * KIB * (id as usize % 2)));
        }
        pair.client.release([free(1), free(2)]);
        pair.run();
        for id in 1..=4 {
            pair.reply(id, Ok(bytes(30 * KIB * (id as usize % 2))));
        }
        pair.run();
        assert_eq!(pair.answered.len(), 4);
        assert_eq!(pair.released(), [1, 2]);
        assert!(pair.client.is_flushed() && pair.server.is_flushed());
    }
}

#[test]
fn control_frames_overtake_queued_data() {
    let mut pair = Setup { capacity: 4 << 10, ..small() }.limits(8 << 20, 8 << 20, 16 << 10, 64).build();
    pair.server_reads = false;
    pair.submit(1, call(1, 6 << 20));
    pair.run();
    pair.submit(2, call(2, 1));
    pair.advance(Duration::from_secs(5));
    pair.server_reads = true;
    pair.run();
    let frames = pair.client_frames();
    let ping = frames.iter().position(|frame| frame.kind() == Kind::Ping).unwrap();
    let before: usize = frames[..ping].iter().map(|frame| frame.payload.len()).sum();
    assert!(before < 1 << 20, "{before} bytes before the ping");
    let after = frames.iter().position(|frame| frame.id() == 2).unwrap();
    assert!(frames[after..].iter().any(|frame| frame.id() == 1), "the small lane waited for the large one");
}

#[test]
fn frees_do_not_overtake_requests_that_use_the_handle() {
    // Several lanes, with messages that have been sent in part.
    let mut pair = Setup { capacity: 4 << 10, ..small() }.limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.server_reads = false;
    for id in 1..=4 {
        pair.submit(id, call(id as u32 % 2, 1 << 20));
    }
    pair.run();
    pair.client.release([free(1)]);
    pair.submit(5, call(2, 1));
    pair.client.release([free(2)]);
    pair.run();
    pair.server_reads = true;
    pair.run();
    let at = |what: &Arrived| pair.arrived.iter().position(|arrived| arrived == what).unwrap();
    let release = pair.arrived.iter().position(|arrived| matches!(arrived, Arrived::Release(_))).unwrap();
    assert!((1..=4).all(|id| at(&Arrived::Request(id)) < release), "{:?}", pair.arrived);
    assert_eq!(pair.released(), [1, 2]);
}

/// Regression: a request that waited for credit did not hold back frees. An object whose last
/// reference was dropped meanwhile was gone when the request was served.
#[test]
fn frees_do_not_overtake_requests_that_wait_for_credit() {
    let mut pair = Setup::default().limits(1 << 20, 1 << 20, 1 << 16, 1).build();
    pair.submit(1, call(0, 1));
    pair.submit(2, call(0, 1));
    pair.client.release([free(9)]);
    pair.submit(3, call(0, 1));
    pair.run();
    assert_eq!(pair.arrived, [Arrived::Request(1)]);
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert_eq!(pair.arrived[1..], [Arrived::Request(2), Arrived::Release(vec![9])]);
    // A cancelled request holds nothing back.
    pair.client.release([free(10)]);
    pair.run();
    assert_eq!(pair.released(), [9]);
    pair.client.cancel(3);
    pair.run();
    assert_eq!(pair.released(), [9, 10]);
}

#[test]
fn requests_admitted_out_of_order_are_not_overtaken_either() {
    let mut pair = small().build();
    pair.submit(1, call(1, 200 * KIB));
    pair.submit(2, call(2, 100 * KIB)); // Waits.
    pair.client.release([free(5)]);
    pair.submit(3, call(3, 1)); // Passes it.
    pair.run();
    assert_eq!(pair.requests.keys().copied().collect::<Vec<_>>(), [1, 3]);
    assert!(pair.released().is_empty());
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert_eq!(pair.arrived[2..], [Arrived::Request(2), Arrived::Release(vec![5])]);
}

#[test]
fn many_frees_share_few_frames() {
    let mut pair = Pair::new(Setup::default());
    pair.client.release((0..20_000).map(Handle::from_bits));
    assert!(!pair.client.is_flushed());
    pair.run();
    assert_eq!(pair.released(), (0..20_000).collect::<Vec<_>>());
    assert_eq!(pair.client_frames().len(), 3);
}

#[test]
fn a_request_without_credit_is_cancelled_without_a_frame() {
    let mut pair = Setup::default().limits(1 << 20, 1 << 20, 1 << 16, 1).build();
    pair.submit(1, call(0, 1));
    pair.submit(2, call(0, 1));
    pair.client.cancel(2);
    pair.run();
    assert_eq!(pair.error(2).kind(), ErrorKind::Cancelled);
    assert!(!pair.error(2).request_may_have_run());
    assert_eq!(pair.arrived, [Arrived::Request(1)]);
}

#[test]
fn cancelling_what_is_queued_partly_sent_and_sent() {
    let mut pair = Setup { capacity: 4 << 10, ..small() }.limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.server_reads = false;
    pair.submit(1, call(1, 2 << 20));
    pair.run();
    pair.submit(2, call(1, 1));
    // Request 1 has been sent in part and must be sent whole; request 2 has not begun, and never
    // will.
    pair.client.cancel(1);
    pair.client.cancel(1);
    pair.client.cancel(2);
    pair.run();
    assert_eq!(pair.error(2).kind(), ErrorKind::Cancelled);
    assert!(!pair.outcomes.contains_key(&1));
    pair.server_reads = true;
    pair.run();
    assert_eq!(pair.arrived, [Arrived::Request(1), Arrived::Cancel(1)]);
    pair.reply(1, Err(RpcError::new(ErrorKind::Cancelled, "stopped")));
    pair.submit(3, call(1, 1));
    pair.run();
    pair.client.cancel(3);
    pair.client.cancel(3);
    pair.run();
    assert_eq!(pair.arrived[2..], [Arrived::Request(3), Arrived::Cancel(3)]);
    // It has run nevertheless.
    pair.reply(3, Ok(object(8)));
    pair.run();
    assert_eq!(pair.outcomes[&3], Ok(object(8)));
    // Afterwards there is nothing to cancel.
    pair.client.cancel(3);
    pair.client.cancel(99);
    pair.run();
    assert_eq!(pair.arrived.len(), 4);
}

#[test]
fn a_deadline_is_reported_at_once_and_a_late_reply_is_freed() {
    let mut pair = Pair::new(Setup { delay: Duration::from_millis(10), ..Setup::default() });
    let mut request = call(0, 1);
    request.deadline = Some(pair.now + Duration::from_millis(100));
    pair.submit(1, request);
    pair.advance(Duration::from_millis(99));
    // It crossed as the time that was left when it was sent.
    assert_eq!(pair.requests[&1].deadline, Some(pair.start + Duration::from_millis(110)));
    assert!(pair.outcomes.is_empty());
    assert_eq!(pair.client.poll_timeout(), Some(pair.start + Duration::from_millis(100)));
    pair.advance(Duration::from_millis(1));
    assert_eq!(pair.error(1).kind(), ErrorKind::DeadlineExceeded);
    assert!(pair.error(1).request_may_have_run());
    pair.advance(Duration::from_millis(20));
    assert_eq!(pair.arrived, [Arrived::Request(1), Arrived::Cancel(1)]);
    pair.reply(1, Ok(Value::List(vec![object(5), Value::Null, object(6)])));
    pair.run();
    assert_eq!(pair.released(), [5, 6]);
    assert_eq!(pair.answered, [1]);
    assert!(pair.client.is_quiet());
}

#[test]
fn a_request_whose_deadline_has_passed_is_refused_and_not_sent() {
    let mut pair = Pair::new(Setup::default());
    pair.advance(Duration::from_millis(1));
    let mut request = call(0, 1);
    request.deadline = Some(pair.start);
    pair.submit(1, request);
    assert_eq!(pair.error(1).kind(), ErrorKind::DeadlineExceeded);
    assert!(!pair.error(1).request_may_have_run());
    pair.advance(Duration::from_millis(1));
    assert!(pair.arrived.is_empty());
    assert!(pair.client.is_quiet());
}

#[test]
fn a_reply_that_is_too_large_fails_only_its_call() {
    let mut pair = small().build();
    pair.submit(1, call(0, 1));
    pair.submit(2, call(1, 1));
    pair.run();
    pair.reply(1, Ok(Value::List(vec![object(4), bytes(300 * KIB)])));
    pair.reply(2, Ok(bytes(250 * KIB)));
    pair.run();
    assert_eq!(pair.error(1).kind(), ErrorKind::LimitExceeded);
    assert!(pair.error(1).request_may_have_run() && pair.error(1).message().contains("max_message"));
    assert_eq!(pair.outcomes[&2], Ok(bytes(250 * KIB)));
    // The server must free the objects in it.
    assert_eq!(pair.rejected[0].handles(), [free(4)]);
    assert!(pair.ended.is_none());
}

#[test]
fn a_request_that_is_too_large_is_refused_before_it_is_sent() {
    let mut pair = small().build();
    assert!(matches!(pair.submit(1, call(0, 257 * KIB)), Admission::Refused(..)));
    assert_eq!(pair.error(1).kind(), ErrorKind::LimitExceeded);
    assert!(!pair.error(1).request_may_have_run());
    let deep = (0..100).fold(Value::Null, |inner, _| Value::List(vec![inner]));
    assert!(matches!(pair.submit(2, call_with(0, vec![deep.clone()])), Admission::Refused(..)));
    assert_eq!(pair.error(2).kind(), ErrorKind::InvalidArgument);
    pair.submit(3, call(0, 1));
    pair.run();
    assert_eq!(pair.arrived, [Arrived::Request(3)]);
    // A reply that no client would accept becomes an error at the server, and its value is
    // returned.
    pair.reply(3, Ok(Value::List(vec![deep, object(1)])));
    pair.run();
    assert_eq!(pair.error(3).kind(), ErrorKind::InvalidArgument);
    assert_eq!(pair.rejected[0].handles(), [free(1)]);
}

#[test]
fn going_away_serves_earlier_requests_and_refuses_later_ones() {
    let mut setup = Setup { delay: Duration::from_millis(10), ..Setup::default() };
    setup.server.max_requests = 2;
    let mut pair = Pair::new(setup);
    pair.submit(1, call(0, 1));
    pair.run();
    pair.server.go_away(&RpcError::new(ErrorKind::Draining, "maintenance"));
    // Two requests cross the `GoAway`; the third waits for credit and is never sent.
    pair.submit(2, call(0, 1));
    pair.submit(3, call(0, 1));
    pair.run();
    assert_eq!(pair.going_away.as_ref().unwrap().kind(), ErrorKind::Draining);
    assert_eq!(pair.error(3).kind(), ErrorKind::Draining);
    assert!(pair.error(3).is_retryable());
    assert!(matches!(pair.submit(4, call(0, 1)), Admission::Refused(..)));
    assert!(!pair.server.is_drained());
    pair.reply(1, Ok(Value::Null));
    pair.run();
    assert!(!pair.server.is_drained());
    pair.reply(2, Ok(Value::Null));
    pair.run();
    assert!(pair.server.is_drained());
    pair.close_server(None);
    pair.run();
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(pair.answered, [3, 4, 1, 2]);
}

/// Regression: the pong behind `GoAway` overtook requests that had been admitted and were still
/// being sent. The server considered itself drained and closed before they arrived.
#[test]
fn a_server_is_not_drained_while_requests_are_on_their_way() {
    let mut pair = Setup { capacity: 4 << 10, ..small() }.limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.server_reads = false;
    for id in 1..=3 {
        pair.submit(id, call(id as u32, 1 << 20));
    }
    pair.run();
    pair.server.go_away(&RpcError::new(ErrorKind::Draining, "maintenance"));
    pair.run();
    assert!(pair.going_away.is_some());
    pair.server_reads = true;
    for _ in 0..3_000 {
        pair.submit(100, call(0, 1));
        pair.outcomes.remove(&100);
        assert!(!pair.server.is_drained() || pair.requests_in_order().len() == 3);
        pair.advance(Duration::ZERO);
    }
    assert_eq!(pair.requests_in_order().len(), 3);
    for id in 1..=3 {
        assert!(!pair.server.is_drained());
        pair.reply(id, Ok(Value::Null));
        pair.run();
    }
    assert!(pair.server.is_drained());
    let frames = pair.client_frames();
    assert_eq!(frames.last().unwrap().kind(), Kind::Pong);
}

#[test]
fn a_shutdown_waits_for_what_is_in_flight() {
    let mut pair = Setup::default().limits(1 << 20, 1 << 20, 1 << 16, 1).build();
    pair.submit(1, call(0, 1));
    pair.submit(2, call(0, 1));
    pair.client.release([free(3)]);
    pair.client.shutdown(Some(50));
    assert!(matches!(pair.submit(3, call(0, 1)), Admission::Refused(..)));
    assert_eq!(pair.error(3).kind(), ErrorKind::Closed);
    pair.run();
    pair.reply(1, Ok(Value::Int(1)));
    pair.run();
    pair.client.shutdown(Some(51));
    pair.reply(2, Ok(Value::Int(2)));
    pair.run();
    assert_eq!(pair.answered, [3, 1, 2, 50, 51]);
    assert_eq!(pair.outcomes[&50], Ok(Value::Null));
    assert_eq!(pair.arrived.last(), Some(&Arrived::Close));
    assert_eq!(pair.released(), [3]);
    let ended = pair.ended.as_ref().unwrap();
    assert_eq!((ended.kind(), ended.hop()), (ErrorKind::Closed, 0));
    assert_eq!(pair.client.poll_timeout(), None);
    // Afterwards every submission has the same outcome.
    pair.client.release([free(4)]);
    pair.client.shutdown(Some(52));
    pair.submit(4, call(0, 1));
    assert!(pair.client.poll_event().is_some());
    assert!(pair.client.is_flushed());
}

/// Regression: objects released after `Close` were freed behind it, where no frame may follow.
#[test]
fn nothing_follows_the_close() {
    let mut pair = Pair::new(Setup { delay: Duration::from_millis(10), ..Setup::default() });
    pair.client.shutdown(None);
    pair.client.release([free(4)]);
    pair.run();
    assert_eq!(kinds(&pair.client_frames()), [(Kind::Close, 0)]);
    // Frames behind the server's `Close` are ignored, too.
    let mut pair = Pair::new(Setup::default());
    pair.submit(1, call(0, 1));
    pair.run();
    let close = frame(Kind::Close, 0, 0, false, &[], &[]);
    let go_away = frame(Kind::GoAway, 0, 0, false, &[], &[]);
    pair.inject_to_client(&[&close[..], &go_away, &close, b"garbage garbage garbage garbage"].concat());
    pair.run();
    assert_eq!(pair.error(1).kind(), ErrorKind::Closed);
    assert!(pair.going_away.is_none());
}

/// Regression: the server's `Close` overtook queued replies.
#[test]
fn earlier_replies_are_sent_before_the_close() {
    let mut pair = small().limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.submit(1, call(0, 1));
    pair.submit(2, call(1, 1));
    pair.run();
    pair.reply(1, Ok(bytes(2 << 20)));
    pair.close_server(Some(&RpcError::new(ErrorKind::Closed, "the server was stopped").may_have_run(true)));
    // Too late: the value is returned.
    pair.reply(2, Ok(object(3)));
    pair.run();
    assert_eq!(pair.outcomes[&1], Ok(bytes(2 << 20)));
    assert_eq!(pair.error(2).kind(), ErrorKind::Closed);
    assert!(pair.error(2).request_may_have_run());
    assert_eq!(pair.rejected, [object(3)]);
    assert!(pair.server.is_flushed());
}

#[test]
fn the_end_of_the_stream_has_three_meanings() {
    let lost = |prepare: fn(&mut Pair)| {
        let mut pair = Setup::default().limits(1 << 20, 1 << 20, 1 << 20, 2).build();
        for id in 1..=3 {
            pair.submit(id, call(id as u32, 1));
        }
        pair.run();
        prepare(&mut pair);
        pair.cut_off();
        pair.run();
        pair
    };
    let between = lost(|_| ());
    assert!(between.ended.as_ref().unwrap().message().contains("without closing the session"));
    assert!(between.server_error.as_ref().unwrap().message().contains("without closing the session"));
    // Requests that were sent may have run; the one that waited has not.
    assert!((1..=2).all(|id| between.error(id).request_may_have_run()));
    assert!(between.error(3).is_retryable());

    let inside: [fn(&mut Pair); 4] = [
        |pair| pair.inject_to_client(&frame(Kind::Reply, 1, 0, false, &[0xc0], &[])[..10]),
        |pair| pair.inject_to_client(&frame(Kind::Reply, 1, 0, false, &[0xc0], &[])[..24]),
        |pair| pair.inject_to_client(&frame(Kind::Reply, 1, 0, false, &[0xc0], &[0; 20_000])[..9_000]),
        |pair| pair.inject_to_client(&frame(Kind::Reply, 1, 0, true, &[0xc0], &[])),
    ];
    for prepare in inside {
        let pair = lost(prepare);
        let error = pair.ended.as_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("middle of a message"), "{error}");
        assert_eq!(pair.answered.len(), 3);
    }

    let mut pair = Pair::new(Setup::default());
    pair.server_reads = false;
    pair.client.shutdown(Some(9));
    pair.run();
    pair.cut_off();
    pair.run();
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(pair.outcomes[&9], Ok(Value::Null));
}

#[test]
fn a_request_that_was_not_sent_whole_has_not_run() {
    let mut pair = Setup { capacity: 4 << 10, ..small() }.limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.server_reads = false;
    pair.submit(1, call(1, 2 << 20));
    pair.run();
    pair.cut_off();
    pair.run();
    assert_eq!(pair.error(1).kind(), ErrorKind::PeerLost);
    assert!(pair.error(1).is_retryable());
}

#[test]
fn only_a_server_with_the_feature_is_asked_to_keep_results() {
    let pipe = PipeId::new(1);
    let requests = || {
        let result = Value::Object(Reference::Pipe(pipe.handle()));
        [
            Request { pipe: Some(pipe), ..call(1, 1) },
            call_with(1, vec![Value::List(vec![1.into(), result])]),
            Request::new(Operation::Fetch { handle: pipe.handle() }).on(Lane(1)),
        ]
    };
    let features = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    for (client, server, keeps) in
        [(&[PIPES][..], &[PIPES][..], true), (&[PIPES], &[], false), (&[], &[PIPES], false), (&[], &[], false)]
    {
        let mut setup = Setup::default();
        (setup.client.features, setup.server.features) = (features(client), features(server));
        let mut pair = Pair::new(setup);
        assert_eq!(pair.client.keeps_results(), keeps);
        for (id, request) in (1..).zip(requests()) {
            let admission = pair.submit(id, request);
            assert_eq!(matches!(admission, Admission::Now), keeps, "{id}");
        }
        pair.run();
        if keeps {
            assert_eq!(pair.requests_in_order(), [1, 2, 3]);
            assert_eq!((pair.requests[&1].pipe, pair.requests[&2].pipe), (Some(pipe), None));
        } else {
            assert!(pair.arrived.is_empty());
            for id in 1..=3 {
                let error = pair.error(id);
                assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Unsupported, false), "{error}");
            }
        }
        // Handles in the range of pipes are no more than handles of a server without the feature.
        assert!(matches!(pair.submit(9, call_with(1, vec![object(pipe.handle().to_bits())])), Admission::Now));
    }
}

/// Eight calls, each of which takes the result of the one before, take as long as one.
#[test]
fn a_chain_of_calls_takes_one_round_trip() {
    let registry = Registry::new();
    registry.add_inline("add", |a: i64, b: i64| a + b);
    let mut setup = Setup::default();
    (setup.client.features, setup.server.features) = (vec![PIPES.into()], vec![PIPES.into()]);
    setup.delay = Duration::from_millis(25);
    let mut pair = Pair::new(setup).served_by(LocalSession::new(registry));
    pair.submit(1, Request::new(Operation::GetFunction { name: "add".into() }));
    pair.run();
    let Ok(Value::Object(Reference::Function(add))) = pair.outcomes[&1] else { panic!("{:?}", pair.outcomes) };
    let (begun, mut result) = (pair.now, Value::Int(0));
    for id in 2..=9 {
        let pipe = (id < 9).then(|| PipeId::new(id));
        let call = Operation::Call { function: add, args: vec![result, 1.into()] };
        pair.submit(id, Request { pipe, ..Request::new(call) });
        result = Value::Object(Reference::Pipe(PipeId::new(id).handle()));
    }
    pair.run();
    assert_eq!(pair.outcomes[&9], Ok(Value::Int(8)));
    // There and back once, on a link of 25 ms each way. The clock is made up.
    assert_eq!(pair.now - begun, Duration::from_millis(50));
    assert_eq!(pair.answered, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
}
