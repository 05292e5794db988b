//! Bytes that were captured between TVM 0.27's proxy and its peers, and bytes that no peer sends.

use bytes::BufMut;

use super::tests::{hex, put};
use super::*;

/// Gives bytes to the state machine, at most `step` at a time, and returns the hello.
fn feed(mut bytes: &[u8], step: usize) -> Result<Option<Hello>, WireError> {
    let mut wire = ProxyWire::new();
    loop {
        let hello = wire.poll_hello()?;
        if bytes.is_empty() {
            return Ok(hello);
        }
        put(wire.input(), &mut bytes, step);
    }
}

#[test]
fn captured_hellos_are_those_of_a_server_and_a_client_with_one_match_key() {
    let server = hex("71 f2 0f 00  09 00 00 00  73 65 72 76 65 72 3a 6b 6b");
    let client = hex("71 f2 0f 00  14 00 00 00  63 6c 69 65 6e 74 3a 6b 6b 20 2d 74 69 6d 65 6f 75 74 3d 31");
    for (bytes, role, text) in
        [(&server, ProxyRole::Server, "server:kk"), (&client, ProxyRole::Client, "client:kk -timeout=1")]
    {
        for step in [1, 3, usize::MAX] {
            let Hello { key } = feed(bytes, step).unwrap().unwrap();
            let hello = ProxyHello::parse(&key).unwrap();
            assert_eq!((hello.role, hello.text.as_str(), hello.match_key()), (role, text, "kk"));
        }
        for len in 0..bytes.len() {
            assert_eq!(feed(&bytes[..len], usize::MAX), Ok(None), "{len} bytes");
        }
        assert!(feed(&[bytes, &[0][..]].concat(), usize::MAX).is_err(), "a byte before the answer");
    }
    // Each gets the whole key of the other.
    assert_eq!(HelloAnswer::Accepted("client:kk -timeout=1").encode(), client);
    assert_eq!(HelloAnswer::Accepted("server:kk").encode(), server);
    assert_eq!(HelloAnswer::Duplicate.encode(), hex("72 f2 0f 00"));
    assert_eq!(HelloAnswer::Mismatch.encode(), hex("73 f2 0f 00"));
}

#[test]
fn a_server_gets_the_key_of_its_client_and_what_follows_it() {
    let answer = HelloAnswer::Accepted("client:kk -timeout=1").encode();
    let mut wire = ParkedServerWire::new();
    let (first, last) = answer.split_at(answer.len() - 1);
    wire.input().put_slice(first);
    assert_eq!(wire.poll_answer(), Ok(None));
    wire.input().put_slice(&[last, b"frames"].concat());
    let key = "client:kk -timeout=1".to_owned();
    assert_eq!(wire.poll_answer(), Ok(Some(ServerAnswer::Accepted { key })));
    assert_eq!(wire.rest(), b"frames");

    for (answer, expected) in
        [(HelloAnswer::Duplicate, ServerAnswer::Duplicate), (HelloAnswer::Mismatch, ServerAnswer::Mismatch)]
    {
        let mut wire = ParkedServerWire::new();
        wire.input().put_slice(&answer.encode());
        assert_eq!(wire.poll_answer(), Ok(Some(expected)));
    }
    let mut wire = ParkedServerWire::new();
    wire.input().put_slice(b"HTTP/1.1");
    assert!(wire.poll_answer().is_err());
}

#[test]
fn a_hello_of_no_peer_is_an_error_before_more_is_held() {
    for bytes in ["71 f2 02 00", "71 f2 0f 00 ff ff ff ff", "71 f2 0f 00 01 10 00 00", "47 45 54 20"] {
        assert!(feed(&hex(bytes), usize::MAX).is_err(), "{bytes}");
    }
    let full = [&hex("71 f2 0f 00 00 10 00 00")[..], b"server:", &[b'k'; MAX_KEY - 7]].concat();
    assert!(feed(&full, 1000).unwrap().is_some());
}

#[test]
fn keys_have_a_role_and_a_time_out_that_is_a_number() {
    for (text, key) in [
        ("server:", ""),
        ("client:", ""),
        ("server:a:b x", "a:b"),
        ("client:dev:0.5 -timeout=0.01", "dev:0.5"),
        ("client:k -some=abc", "k"),
    ] {
        assert_eq!(ProxyHello::parse(text).unwrap().match_key(), key, "{text}");
    }
    for text in ["", "client", "clients:k", "k", " server:k", " client:k", "client:k -timeout=abc"] {
        assert!(ProxyHello::parse(text).is_err(), "{text:?}");
    }
}

#[test]
fn servers_and_clients_meet_by_their_keys_in_the_order_of_their_arrival() {
    let mut pool = ProxyPool::new(2);
    let server = |pool: &mut ProxyPool<u32>, key, peer| pool.arrive(ProxyRole::Server, key, peer);
    let client = |pool: &mut ProxyPool<u32>, key, peer| pool.arrive(ProxyRole::Client, key, peer);
    let ProxyArrival::Waits(first) = server(&mut pool, "a", 1) else { panic!("it does not wait") };
    assert!(matches!(server(&mut pool, "a", 2), ProxyArrival::Waits(_)));
    assert_eq!(server(&mut pool, "a", 3), ProxyArrival::Duplicate);
    assert!(matches!(client(&mut pool, "b", 4), ProxyArrival::Waits(_)));
    assert_eq!(pool.waiting(), 3);
    assert_eq!(client(&mut pool, "a", 5), ProxyArrival::Paired(1));
    assert_eq!(pool.leave("a", first), None, "it was paired");
    assert_eq!(client(&mut pool, "a", 6), ProxyArrival::Paired(2));
    assert_eq!(server(&mut pool, "b", 7), ProxyArrival::Paired(4));
    assert_eq!(pool.waiting(), 0);

    let ProxyArrival::Waits(gone) = client(&mut pool, "a", 8) else { panic!("it does not wait") };
    assert_eq!(pool.leave("a", gone), Some(8));
    assert_eq!(pool.leave("a", gone), None);
    assert!(pool.by_key_is_empty(), "keys of peers that are gone are forgotten");
}

#[test]
fn a_server_is_taken_by_more_than_its_key() {
    let mut pool = ProxyPool::new(usize::MAX);
    for peer in [1, 2] {
        assert!(matches!(pool.arrive(ProxyRole::Server, "a", peer), ProxyArrival::Waits(_)));
    }
    assert_eq!(pool.take_server("a", |peer| *peer == 3), None);
    assert_eq!(pool.take_server("b", |_| true), None);
    assert_eq!(pool.take_server("a", |peer| *peer == 2), Some(2));
    assert_eq!(pool.take_server("a", |_| true), Some(1));
    assert!(pool.by_key_is_empty());
    assert!(matches!(pool.arrive(ProxyRole::Client, "a", 4), ProxyArrival::Waits(_)));
    assert_eq!(pool.take_server("a", |_| true), None, "it is a client");
}
