//! Tests of the keep-alive: pings, and peers that are silent for too long.

use std::time::Duration;

use crate::pair::{Pair, Setup, call, frame};
use rpc_core::ErrorKind;
use rpc_core::proto::Kind;

#[test]
fn idle_sides_ping_each_other_and_stay_connected() {
    let mut pair = Pair::new(Setup::default());
    pair.advance(Duration::from_secs(4));
    assert!(pair.client_frames().is_empty());
    pair.advance(Duration::from_secs(3600));
    assert!(pair.ended.is_none() && pair.server_error.is_none());
    let pings = pair.client_frames().iter().filter(|frame| frame.kind() == Kind::Ping).count();
    assert!((1..=721).contains(&pings), "{pings}");
}

#[test]
fn a_silent_peer_is_given_up_after_three_intervals() {
    let mut pair = Pair::new(Setup::default());
    pair.submit(1, call(0, 1));
    pair.submit(2, call(0, 1));
    pair.run();
    pair.server_reads = false;
    pair.client_reads = false;
    pair.advance(Duration::from_millis(14_999));
    assert!(pair.ended.is_none());
    assert_eq!(pair.client_frames().iter().filter(|frame| frame.kind() == Kind::Ping).count(), 2);
    pair.advance(Duration::from_millis(1));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
    assert_eq!(pair.server_error.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
    assert!([1, 2].iter().all(|id| pair.error(*id).kind() == ErrorKind::PeerSilent));
    assert!(pair.error(1).is_timeout() && pair.error(1).request_may_have_run());
}

#[test]
fn any_received_byte_counts_as_a_sign_of_life() {
    let mut pair = Pair::new(Setup::default());
    pair.submit(1, call(0, 1));
    pair.run();
    pair.server_asleep = true;
    // A reply that arrives very slowly.
    let reply = frame(Kind::Reply, 1, 0, false, &[0xc0], &[]);
    for byte in &reply[..20] {
        pair.advance(Duration::from_secs(14));
        assert!(pair.ended.is_none());
        pair.inject_to_client(&[*byte]);
        pair.run();
    }
    pair.advance(Duration::from_secs(15));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
}

#[test]
fn outgoing_data_counts_as_a_sign_of_life_and_pings_do_not() {
    let mut pair = Setup { capacity: 64, ..Setup::default() }.limits(4 << 20, 16 << 20, 16 << 10, 64).build();
    pair.server_asleep = true;
    pair.submit(1, call(1, 1 << 20));
    // The server reads a little at a time, and sends nothing.
    for _ in 0..20 {
        pair.run();
        pair.advance(Duration::from_secs(10));
        assert!(pair.ended.is_none());
        pair.swallow(64);
    }
    pair.run();
    pair.advance(Duration::from_secs(15));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
    // Without data, only pings move.
    let mut pair = Pair::new(Setup::default());
    pair.server_asleep = true;
    pair.advance(Duration::from_secs(15));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
}

/// Regression: a process that was stopped for a while found its time limit exceeded before it had
/// read the bytes that had arrived meanwhile, and gave up a healthy peer.
#[test]
fn a_side_that_slept_does_not_blame_its_peer() {
    let mut pair = Pair::new(Setup::default());
    pair.now += Duration::from_secs(100);
    pair.client.handle_timeout(pair.now).unwrap();
    pair.server.handle_timeout(pair.now).unwrap();
    assert!(pair.client.poll_timeout().unwrap() > pair.now && pair.server.poll_timeout() > pair.now);
    pair.run();
    pair.advance(Duration::from_secs(60));
    assert!(pair.ended.is_none() && pair.server_error.is_none());
    // A side that slept beside a dead peer finds out after the same time as an awake one.
    pair.server_reads = false;
    pair.client_reads = false;
    pair.now += Duration::from_secs(100);
    pair.client.handle_timeout(pair.now).unwrap();
    pair.advance(Duration::from_secs(15));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::PeerSilent);
}
