//! Bytes of a client of TVM, behind its hello, and of a peer of TVM at a tracker and at a proxy.

use bytes::BufMut;
use rpc_tvm::wire::{
    Hello, MAX_KEY, ProxyHello, ProxyWire, Request, ServerEvent, ServerWire, TRACKER_MAGIC, TrackerEvent,
    TrackerMessage, TrackerWire, WIRE_MAGIC, WireLimits,
};

/// Largest body of a frame.
const MAX_BODY: u64 = 1 << 16;

/// The bytes of a client of TVM. However they are cut, they are the same requests, and what was
/// decoded is the same once it was encoded.
pub fn tvm_wire(input: &[u8]) {
    let whole = events(input, usize::MAX);
    assert_eq!(events(input, 7), whole, "requests depend on how the bytes were cut");
    let encoded: Vec<u8> = whole.concat();
    let again = events(&encoded, usize::MAX);
    assert_eq!(again, whole, "a request is another one once it was encoded");
    tracker(input);
    proxy(input);
}

/// The bytes of a server or client of TVM at a proxy, behind the magic number. However they are
/// cut, they are the same hello or none, and little of them is held.
fn proxy(input: &[u8]) {
    let whole = hello(input, usize::MAX);
    assert_eq!(hello(input, 7), whole, "a hello depends on how the bytes were cut");
    if let Some(hello) = whole
        && let Ok(parsed) = ProxyHello::parse(&hello.key)
    {
        assert!(parsed.text == hello.key && hello.key["server:".len()..].starts_with(parsed.match_key()));
        assert!(!parsed.match_key().contains(' '));
    }
}

/// Returns the hello to a proxy, if the bytes are one and nothing else.
fn hello(mut input: &[u8], step: usize) -> Option<Hello> {
    let mut wire = ProxyWire::new();
    let mut held = 4;
    wire.input().put_slice(&WIRE_MAGIC.to_le_bytes());
    loop {
        match wire.poll_hello() {
            Err(_) => return None,
            Ok(hello) if input.is_empty() => return hello,
            Ok(_) => {
                let mut room = wire.input();
                let count = input.len().min(step).min(room.remaining_mut());
                room.put_slice(&input[..count]);
                input = &input[count..];
                held += count;
                assert!(held <= MAX_KEY + 9, "{held} bytes are held");
            }
        }
    }
}

/// The bytes of a server or client of TVM at a tracker, behind the magic number, as above.
fn tracker(input: &[u8]) {
    let whole = messages(input, usize::MAX);
    assert_eq!(messages(input, 7), whole, "messages depend on how the bytes were cut");
    let encoded: Vec<u8> = whole.iter().flat_map(TrackerMessage::encode).collect();
    assert_eq!(messages(&encoded, usize::MAX), whole, "a message is another one once it was encoded");
}

/// Returns the messages to a tracker, up to the first bytes that are none.
fn messages(mut input: &[u8], step: usize) -> Vec<TrackerMessage> {
    let mut wire = TrackerWire::new();
    wire.input().put_slice(&TRACKER_MAGIC.to_le_bytes());
    let mut messages = Vec::new();
    loop {
        match wire.poll_event() {
            Err(_) => return messages,
            Ok(Some(TrackerEvent::Message(message))) => messages.push(message),
            Ok(Some(_)) => {}
            Ok(None) if input.is_empty() => return messages,
            Ok(None) => {
                let mut room = wire.input();
                let count = input.len().min(step).min(room.remaining_mut());
                room.put_slice(&input[..count]);
                input = &input[count..];
            }
        }
    }
}

/// Returns the requests, encoded, up to the first bytes that are none.
fn events(mut input: &[u8], step: usize) -> Vec<Vec<u8>> {
    let mut wire = ServerWire::new(WireLimits::new(MAX_BODY));
    let hello = Hello { key: "client:".to_owned() }.encode();
    wire.input().put_slice(&hello);
    assert!(matches!(wire.poll_event(), Ok(Some(ServerEvent::Hello(_)))));
    wire.begin();
    let mut requests = Vec::new();
    let mut copy: Option<Vec<u8>> = None;
    loop {
        if let Some(data) = &mut copy {
            let ahead = wire.payload();
            data.extend_from_slice(ahead);
            let count = ahead.len();
            wire.advance_payload(count);
            if wire.payload_left() == 0 {
                requests.extend(copy.take());
            }
        }
        match wire.poll_event() {
            Err(_) => return requests,
            Ok(Some(ServerEvent::CopyTo { to, len })) if len <= MAX_BODY => {
                let mut head = Request::encode_copy_to(&to, &[]);
                let whole = (head.len() as u64 - 8 + len).to_le_bytes();
                head[..8].copy_from_slice(&whole);
                let at = head.len() - 8;
                head[at..].copy_from_slice(&len.to_le_bytes());
                copy = Some(head);
            }
            Ok(Some(ServerEvent::CopyTo { .. })) => wire.refuse("too much for a test"),
            Ok(Some(ServerEvent::Request(request))) => requests.push(request.encode()),
            Ok(Some(_)) => {}
            Ok(None) if input.is_empty() => return requests,
            Ok(None) => {
                let mut room = wire.input();
                let count = input.len().min(step).min(room.remaining_mut());
                room.put_slice(&input[..count]);
                input = &input[count..];
            }
        }
    }
}
