//! Tests of joining over sockets: with strangers at a rank's listener, without descriptors, and
//! with relays that have no room at first.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::AtomicU32;

use rpc_core::OpenFileQuota;

use super::super::handshake::{HELLO, NONCE};
use super::*;
use crate::held_memory::tests::context_of;
use crate::open_files::OpenFiles;

const KEY: SessionKey = SessionKey([7; 32]);

/// Descriptors of a rank that has joined another one: the connection, and two for waking it.
const JOINED: u64 = 3;

fn listener() -> (Listener, SocketAddr) {
    let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
    let Address::Tcp(address) = *listener.address() else { panic!("a TCP address") };
    (listener, address)
}

fn options(join_timeout: Duration) -> Options {
    Options { join_timeout, ..Options::default() }
}

/// Returns options of a session that may have so many descriptors open.
fn limited(limit: u64, join_timeout: Duration) -> (Options, OpenFileQuota) {
    let quota = OpenFileQuota::new("max_open_files", limit, None);
    let context = context_of(|session| session.open_files(quota.clone()));
    (Options { open_files: OpenFiles::of(&context), ..options(join_timeout) }, quota)
}

/// Regression: silent connections took as many of the session's descriptors, for five seconds, and
/// where there were none left a rank waited for that long behind each.
#[test]
fn strangers_take_no_descriptors_of_the_session() {
    let needed = JOINED + EXTRA_HANDSHAKES as u64;
    let (limits, quota) = limited(needed, Duration::from_secs(4));
    let ((ours, address), (theirs, their_address)) = (listener(), listener());
    let addresses = [Address::Tcp(address), Address::Tcp(their_address)];
    let _silent: Vec<_> = (0..6).map(|_| TcpStream::connect(address).unwrap()).collect();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| ours.join(Rank(0), &addresses, &KEY, &limits).map(drop));
        // It is refused once those before it have been accepted.
        let mut refused = TcpStream::connect(address).unwrap();
        refused.write_all(&[0; HELLO]).unwrap();
        refused.read_exact(&mut [0; 1 + NONCE]).unwrap();
        assert_eq!(quota.used(), needed);
        let joined = theirs.join(Rank(1), &addresses, &KEY, &options(Duration::from_secs(60))).map(drop);
        joining.join().unwrap().unwrap();
        joined.unwrap();
    });
    assert_eq!(quota.used(), 0);
}

/// More silent strangers than there are extra handshakes, each of which could stay for five
/// seconds.
#[test]
fn strangers_who_say_nothing_give_way_to_a_rank() {
    let ((ours, address), (theirs, their_address)) = (listener(), listener());
    let addresses = [Address::Tcp(address), Address::Tcp(their_address)];
    let silent: Vec<_> = (0..EXTRA_HANDSHAKES + 4).map(|_| TcpStream::connect(address).unwrap()).collect();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| ours.join(Rank(0), &addresses, &KEY, &options(Duration::from_secs(4))).map(drop));
        let joined = theirs.join(Rank(1), &addresses, &KEY, &options(Duration::from_secs(60))).map(drop);
        joining.join().unwrap().unwrap();
        joined.unwrap();
    });
    drop(silent);
}

/// Regression: the last descriptors were asked for when the others had joined.
#[test]
fn all_descriptors_are_charged_before_a_rank_dials() {
    for limit in 0..JOINED {
        let (limits, _) = limited(limit, Duration::from_secs(60));
        let (theirs, _) = listener();
        let (ours, _) = listener();
        let addresses = [theirs.address().clone(), ours.address().clone()];
        let error = ours.join(Rank(1), &addresses, &KEY, &limits).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        assert!(theirs.accept().unwrap().is_none(), "it was dialled");
    }
}

/// Regression: a relay that had no room at the first request was given up.
#[test]
fn a_relay_without_room_is_asked_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("0");
    let ours = Listener::bind(&Address::Unix(path.clone())).unwrap();
    let (theirs, _) = listener();
    let asked = AtomicU32::new(0);
    let relay = |_: Rank, _: Instant| {
        if asked.fetch_add(1, Ordering::Relaxed) < 2 {
            return Err(RpcError::new(ErrorKind::LimitExceeded, "no room"));
        }
        Ok(UnixStream::connect(&path)?)
    };
    let limits = options(Duration::from_secs(60));
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| ours.join_by(Rank(0), &[None, None], &KEY, &limits, None).map(drop));
        let fallback = (&relay as &FallbackDial<'_>, &UnprovenHosts::default());
        theirs.join_by(Rank(1), &[None, None], &KEY, &limits, Some(fallback)).map(drop).unwrap();
        joining.join().unwrap().unwrap();
    });
    assert_eq!(asked.into_inner(), 3);
}

/// Regression: connecting and the handshake had a time limit each, together more than what made up
/// for the difference between open and closed ports.
#[test]
fn no_attempt_to_dial_lasts_until_the_end_of_the_padding() {
    let now = Instant::now();
    let ms = Duration::from_millis;
    let end_after = |until| attempt_end(now + ms(1000), now + ms(until)) - now;
    assert_eq!(end_after(1000), ms(1100));
    // However late it begins.
    assert_eq!([end_after(990), end_after(900), end_after(0)], [ms(1090), ms(1000), ms(100)]);
    assert_eq!([end_after(1050), end_after(2000)], [ms(1100), ms(2000)]);
    assert_eq!(end_after(60_000), ms(1000) + HANDSHAKE_TIMEOUT);
}
