//! Bytes of a client of TVM, behind its hello, of a server of TVM, and of a peer of TVM at a
//! tracker and at a proxy.

use bytes::BufMut;
use rpc_tvm::wire::{
    ClientEvent, ClientWire, Expected, Hello, HelloAnswer, MAX_KEY, ProxyHello, ProxyWire, Request, ServerEvent,
    ServerWire, TRACKER_MAGIC, TrackerAnswer, TrackerEvent, TrackerGrant, TrackerMessage, TrackerReply, TrackerWire,
    WIRE_MAGIC, WireLimits,
};

/// Length of the data that requests ask for: more than what is read ahead.
const LARGE: u64 = 17_000;

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
    replies_of_a_tracker(input);
    proxy(input);
    let whole = replies(input, usize::MAX, false);
    assert_eq!(replies(input, 7, false), whole, "replies depend on how the bytes were cut");
    assert_eq!(replies(input, 5000, true), whole, "replies depend on where the bytes were read");
}

/// Returns what the bytes of a server of TVM mean to a client, up to the first bytes that mean
/// nothing. The requests take each kind of reply in turn. With `large`, large bodies are read
/// apart.
fn replies(mut input: &[u8], step: usize, large: bool) -> Vec<ClientEvent> {
    const EXPECTED: [Expected; 3] = [Expected::Value, Expected::Call, Expected::Data { len: LARGE }];
    let mut wire = ClientWire::new(WireLimits::new(MAX_BODY));
    wire.input().put_slice(&HelloAnswer::Accepted("server:").encode());
    assert!(matches!(wire.poll_event(None), Ok(Some(ClientEvent::Answer(_)))));
    let (mut events, mut answered) = (Vec::new(), 0);
    loop {
        match wire.poll_event(Some(EXPECTED[answered % EXPECTED.len()])) {
            Err(_) => return events,
            Ok(Some(event)) => {
                answered += usize::from(matches!(event, ClientEvent::Reply(_)));
                events.push(event);
            }
            Ok(None) if input.is_empty() => return events,
            Ok(None) => {
                let body = if large { wire.take_large() } else { None };
                let count = if let Some(mut body) = body {
                    let count = input.len().min(step).min(body.unfilled().len());
                    body.unfilled()[..count].copy_from_slice(&input[..count]);
                    body.advance(count);
                    wire.put_large(body);
                    count
                } else {
                    let mut room = wire.input();
                    let count = input.len().min(step).min(room.remaining_mut());
                    room.put_slice(&input[..count]);
                    count
                };
                input = &input[count..];
            }
        }
    }
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

/// The text of a tracker's reply. A grant is the same once it was encoded.
fn replies_of_a_tracker(input: &[u8]) {
    // Replies are decoded, or refused; none of them stops the peer.
    let _ = TrackerAnswer::decode(input);
    if let Ok(TrackerGrant::Granted { host, port, match_key }) = TrackerGrant::decode(input) {
        let encoded = TrackerReply::Granted { host: &host, port, match_key: &match_key }.encode();
        let again = TrackerGrant::decode(&encoded[4..]);
        assert_eq!(again, Ok(TrackerGrant::Granted { host, port, match_key }));
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
