//! Encrypted data connections, with a man in the middle who reads, changes and cuts.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use disco::ccl::{BreakCause, Buffers, CclError, Rank, host};
use rpc_core::{DataType, ErrorKind, RpcError};

use crate::launch::long_limits;

const TEXT: &[u8] = b"what nobody in between is to read";

/// Length of the messages of the handshake that the dialler sends.
const HANDSHAKE: usize = 60 + 32;

/// Passes the bytes of one connection on to `to`, those of the dialler through `change`, with how
/// many came before.
fn in_between(
    to: &host::Address,
    change: impl Fn(usize, &mut [u8]) + Send + 'static,
) -> (host::Address, Arc<Mutex<Vec<u8>>>) {
    let host::Address::Tcp(to) = *to else { panic!("a TCP address") };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = host::Address::Tcp(listener.local_addr().unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sees = Arc::clone(&seen);
    std::thread::spawn(move || {
        let (dialler, _) = listener.accept().unwrap();
        let acceptor = TcpStream::connect(to).unwrap();
        let (mut back, mut there) = (acceptor.try_clone().unwrap(), dialler.try_clone().unwrap());
        let backwards = std::thread::spawn(move || {
            _ = std::io::copy(&mut back, &mut there);
            _ = there.shutdown(Shutdown::Both);
        });
        let (mut from, mut to) = (dialler, acceptor);
        let mut buffer = [0; 4096];
        let mut passed = 0;
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            sees.lock().unwrap().extend_from_slice(&buffer[..len]);
            change(passed, &mut buffer[..len]);
            passed += len;
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        _ = to.shutdown(Shutdown::Both);
        backwards.join().unwrap();
    });
    (address, seen)
}

/// Sends [`TEXT`] from rank 1 to rank 0 through a man in the middle. What came of it at both, and
/// what was seen.
#[allow(clippy::type_complexity)]
fn send_through(
    encrypt: bool,
    change: impl Fn(usize, &mut [u8]) + Send + 'static,
) -> ([Result<Vec<u8>, CclError>; 2], Vec<u8>) {
    let mut options = long_limits();
    options.encrypt = encrypt;
    let any = host::Address::Tcp(([127, 0, 0, 1], 0).into());
    let listeners = [host::Listener::bind(&any).unwrap(), host::Listener::bind(&any).unwrap()];
    let (relay, seen) = in_between(listeners[0].address(), change);
    let addresses = [relay, listeners[1].address().clone()];
    let key = host::SessionKey::generate().unwrap();
    let results = std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (listener, addresses, key, options) = (&listeners[rank], &addresses, &key, &options);
            scope.spawn(move || {
                let mut ccl = listener.join(Rank(rank as u32), addresses, key, options).unwrap();
                let mut buffer = TEXT.to_vec();
                let sent = if rank == 1 {
                    ccl.send(Rank(0), DataType::U8, TEXT.len(), Buffers::input(&buffer).into())
                } else {
                    buffer.fill(0);
                    ccl.recv(Rank(1), DataType::U8, TEXT.len(), Buffers::output(&mut buffer).into())
                };
                // A rank must not leave before the other has all.
                sent.and_then(|()| ccl.barrier()).map(|()| buffer)
            })
        };
        let ranks = [rank(0), rank(1)];
        ranks.map(|rank| rank.join().unwrap())
    });
    let seen = seen.lock().unwrap().clone();
    (results, seen)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn an_eavesdropper_reads_nothing() {
    for encrypt in [false, true] {
        let (results, seen) = send_through(encrypt, |_, _| {});
        for result in results {
            assert_eq!(result.unwrap(), TEXT);
        }
        assert!(seen.len() > HANDSHAKE + TEXT.len());
        assert_eq!(contains(&seen, TEXT), !encrypt);
    }
}

#[test]
fn a_changed_byte_ends_the_group_and_says_why() {
    // In the length of a record, in its text, and in the text or tag of a later one.
    for at in [HANDSHAKE, HANDSHAKE + 10, HANDSHAKE + 90] {
        let (results, _) = send_through(true, move |passed, bytes| {
            if let Some(byte) = at.checked_sub(passed).and_then(|at| bytes.get_mut(at)) {
                *byte ^= 0x40;
            }
        });
        let [at_receiver, _] = results.map(|result| match result {
            Err(CclError::Broken(breakdown)) => breakdown,
            other => panic!("a changed byte at {at} went unnoticed: {other:?}"),
        });
        assert!(
            matches!(&at_receiver.cause, BreakCause::Link(text) if text.contains("changed on the way")),
            "{at_receiver}"
        );
        assert_eq!((at_receiver.rank, at_receiver.noticed_by), (Rank(1), Rank(0)));
    }
}

#[test]
fn a_rank_that_does_not_encrypt_is_refused() {
    let any = host::Address::Tcp(([127, 0, 0, 1], 0).into());
    let listeners = [host::Listener::bind(&any).unwrap(), host::Listener::bind(&any).unwrap()];
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().clone()).collect();
    let key = host::SessionKey::generate().unwrap();
    let (mut plain, mut encrypting) = (long_limits(), long_limits());
    (plain.encrypt, encrypting.encrypt) = (false, true);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| listeners[0].join(Rank(0), &addresses, &key, &encrypting).unwrap());
        let error = listeners[1].join(Rank(1), &addresses, &key, &plain).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unauthenticated);
        assert!(error.message().contains("one of the two encrypts"), "{error}");
        // Its place is still free for one that does.
        let mut second = listeners[1].join(Rank(1), &addresses, &key, &encrypting).unwrap();
        let other = scope.spawn(move || first.join().unwrap().barrier());
        second.barrier().unwrap();
        other.join().unwrap().unwrap();
    });
}

/// A man in the middle who clears the flag, so that one side would go on in the clear, is detected.
#[test]
fn encryption_cannot_be_negotiated_away() {
    let limits = [300, 3000, 30_000].map(Duration::from_millis);
    let mut outcomes = limits.into_iter().map(join_without_the_flag);
    // Rank 1 finds nobody if the machine stood still until rank 0 had given up.
    let error = outcomes.find(|error| error.kind() != ErrorKind::DeadlineExceeded).unwrap();
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
}

/// Joins a rank 0 that does not encrypt, and waits for `limit`, with a rank 1 that does, and whose
/// flag is cleared on the way. Neither may get in. Returns the error of rank 1.
fn join_without_the_flag(limit: Duration) -> RpcError {
    let mut options = long_limits();
    options.encrypt = true;
    options.join_timeout = 4 * limit;
    let mut other = long_limits();
    other.encrypt = false;
    other.join_timeout = limit;
    let any = host::Address::Tcp(([127, 0, 0, 1], 0).into());
    let listeners = [host::Listener::bind(&any).unwrap(), host::Listener::bind(&any).unwrap()];
    let clear = |passed: usize, bytes: &mut [u8]| {
        if passed == 0 {
            bytes[6] = 0;
        }
    };
    let (relay, _) = in_between(listeners[0].address(), clear);
    let addresses = [relay, listeners[1].address().clone()];
    let key = host::SessionKey::generate().unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| listeners[0].join(Rank(0), &addresses, &key, &other).err());
        let error = listeners[1].join(Rank(1), &addresses, &key, &options).err().unwrap();
        assert!(first.join().unwrap().is_some());
        error
    })
}
