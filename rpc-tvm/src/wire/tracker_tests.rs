//! Bytes that were captured between TVM 0.27's tracker and its peers, and bytes that no peer sends.

use super::tests::put;
use super::*;

/// Gives bytes to the state machine, at most `step` at a time, and returns its events.
fn feed(wire: &mut TrackerWire, mut bytes: &[u8], step: usize) -> Result<Vec<TrackerEvent>, WireError> {
    let mut events = Vec::new();
    loop {
        while let Some(event) = wire.poll_event()? {
            events.push(event);
        }
        if bytes.is_empty() {
            return Ok(events);
        }
        put(wire.input(), &mut bytes, step);
    }
}

fn framed(text: &str) -> Vec<u8> {
    [&(text.len() as i32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Returns the state of a connection whose magic has arrived.
fn begun() -> TrackerWire {
    let mut wire = TrackerWire::new();
    assert_eq!(feed(&mut wire, &[0x71, 0xf2, 2, 0], 1).unwrap(), [TrackerEvent::Hello]);
    wire
}

fn decode(text: &str) -> Result<Vec<TrackerEvent>, WireError> {
    feed(&mut begun(), &framed(text), usize::MAX)
}

#[test]
fn captured_messages_are_decoded_however_they_are_cut() {
    let put = |host| TrackerMessage::Put {
        key: "dev".to_owned(),
        port: 23000,
        match_key: "dev:0.7341305860648655".to_owned(),
        host,
    };
    let info = |address| TrackerMessage::UpdateInfo(PeerInfo { key: Some("server:dev".to_owned()), address });
    let cases = [
        ("[1]", TrackerMessage::Ping),
        (r#"[2, "0.12"]"#, TrackerMessage::Stop { stop_key: "0.12".to_owned() }),
        (r#"[3, "dev", [23000, "dev:0.7341305860648655"], null]"#, put(None)),
        (r#"[3, "dev", [23000, "dev:0.7341305860648655"]]"#, put(None)),
        (r#"[3, "dev", [23000, "dev:0.7341305860648655"], "pc"]"#, put(Some("pc".to_owned()))),
        (r#"[4, "dev", "", 1]"#, TrackerMessage::Request { key: "dev".to_owned(), user: String::new(), priority: 1 }),
        (r#"[5, {"key": "server:dev", "addr": [null, 23000]}]"#, info(Some((None, InfoPort::Number(23000))))),
        (
            r#"[5, {"key": "server:dev", "addr": ["pc", "23000"], "more": [{}]}]"#,
            info(Some((Some("pc".to_owned()), InfoPort::Text("23000".to_owned())))),
        ),
        ("[6]", TrackerMessage::Summary),
        ("[7]", TrackerMessage::PendingMatchKeys),
    ];
    for step in [1, 3, usize::MAX] {
        let mut wire = begun();
        for (text, expected) in &cases {
            let events = feed(&mut wire, &framed(text), step).unwrap();
            assert_eq!(events, [TrackerEvent::Message(expected.clone())], "{text}");
            let encoded = feed(&mut wire, &expected.encode(), step).unwrap();
            assert_eq!(encoded, events, "{text}");
            assert!(!wire.is_inside_message());
        }
    }
    // Messages that were sent without waiting for replies.
    let together: Vec<u8> = cases.iter().flat_map(|(text, _)| framed(text)).collect();
    assert_eq!(feed(&mut begun(), &together, usize::MAX).unwrap().len(), cases.len());
}

#[test]
fn replies_are_spelled_as_captured() {
    let check = |reply: TrackerReply<'_>, text: &str| assert_eq!(reply.encode(), framed(text));
    check(TrackerReply::Success, "0");
    check(TrackerReply::Failure, "-1");
    check(TrackerReply::RequestFailed("a \"limit\""), r#"[-1, "a \"limit\""]"#);
    check(TrackerReply::MatchKeys(&[]), "[]");
    check(TrackerReply::MatchKeys(&["dev:0.7341305860648655"]), r#"["dev:0.7341305860648655"]"#);
    check(TrackerReply::MatchKeys(&["a:0.1", "b:0.2"]), r#"["a:0.1", "b:0.2"]"#);
    let granted = TrackerReply::Granted { host: "127.0.0.1", port: 23000, match_key: "dev:0.7341305860648655" };
    check(granted, r#"[0, ["127.0.0.1", 23000, "dev:0.7341305860648655"]]"#);
    assert_eq!(granted.encode()[..4], [0x33, 0, 0, 0], "as in the capture");

    let mut summary = TrackerSummary::new();
    assert_eq!(summary.encode(), framed(r#"[0, {"queue_info": {}, "server_info": []}]"#));
    summary.add_queue("dev", 2, 0);
    summary.add_server("server:dev", "test_addr", &InfoPort::Number(23001));
    summary.add_server("server:dev", "pc", &InfoPort::Text("23002".to_owned()));
    let text = concat!(
        r#"[0, {"queue_info": {"dev": {"free": 2, "pending": 0}}, "server_info": "#,
        r#"[{"key": "server:dev", "addr": ["test_addr", 23001]}, {"key": "server:dev", "addr": ["pc", "23002"]}]}]"#
    );
    assert_eq!(summary.encode(), framed(text));
}

#[test]
fn replies_to_servers_are_decoded() {
    assert_eq!(TrackerAnswer::decode(b"0"), Ok(TrackerAnswer::Code(0)));
    assert_eq!(TrackerAnswer::decode(b"-1"), Ok(TrackerAnswer::Code(-1)));
    assert_eq!(TrackerAnswer::decode(b"[]"), Ok(TrackerAnswer::MatchKeys(Vec::new())));
    let keys = vec!["a:0.1".to_owned(), "b:0.2".to_owned()];
    assert_eq!(TrackerAnswer::decode(br#"["a:0.1", "b:0.2"]"#), Ok(TrackerAnswer::MatchKeys(keys)));
    for text in ["", "x", "{}", "null", "[1]", "\"a\"", "0 0"] {
        assert!(TrackerAnswer::decode(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn grants_are_decoded() {
    let grant = TrackerGrant::Granted { host: "board".to_owned(), port: 9090, match_key: "k:0.5".to_owned() };
    assert_eq!(TrackerGrant::decode(br#"[0, ["board", 9090, "k:0.5"]]"#), Ok(grant));
    for (text, reason) in [("-1", ""), ("[-1]", ""), (r#"[-1, "full"]"#, "full")] {
        assert_eq!(TrackerGrant::decode(text.as_bytes()), Ok(TrackerGrant::Refused(reason.to_owned())), "{text}");
    }
    for text in ["", "0", "[]", "[0]", "[0, []]", r#"[0, ["h", -1, "k"]]"#, r#"[0, ["h", 1, "k"], 2]"#, "[-1, 2]", "{}"]
    {
        assert!(TrackerGrant::decode(text.as_bytes()).is_err(), "{text}");
    }
}

#[test]
fn a_summary_is_never_longer_than_its_client_reads() {
    let mut summary = TrackerSummary::new();
    let long = "\u{1}".repeat(1000);
    for number in 0..1000 {
        summary.add_queue(&format!("{long}{number}"), 1, 1);
        summary.add_server(&long, &long, &InfoPort::Number(1));
    }
    let encoded = summary.encode();
    assert!(encoded.len() <= MAX_TRACKER_MESSAGE + 4 && encoded.len() > MAX_TRACKER_MESSAGE / 2);
    let text: serde_json::Value = serde_json::from_slice(&encoded[4..]).unwrap();
    assert_eq!(text[0], 0);
}

#[test]
fn a_large_message_is_announced_before_it_is_kept() {
    let text = format!(r#"[2, "{}"]"#, "x".repeat(100_000));
    let message = framed(&text);
    let mut wire = begun();
    let len = text.len();
    assert_eq!(feed(&mut wire, &message[..4], usize::MAX).unwrap(), [TrackerEvent::Announced { len }]);
    let events = feed(&mut wire, &message[4..], 1000).unwrap();
    assert!(
        matches!(&events[..], [TrackerEvent::Message(TrackerMessage::Stop { stop_key })] if stop_key.len() == 100_000)
    );
}

#[test]
fn what_no_peer_sends_is_an_error_and_reserves_nothing() {
    for magic in [[0x71, 0xf2, 0x0f, 0], [0, 0, 0, 0], [0xff; 4]] {
        assert!(feed(&mut TrackerWire::new(), &magic, 1).is_err());
    }
    for len in [0, -1, i32::MIN, MAX_TRACKER_MESSAGE as i32 + 1, i32::MAX] {
        let mut wire = begun();
        assert!(feed(&mut wire, &len.to_le_bytes(), 1).is_err(), "{len}");
        assert!(wire.input.capacity() < 64 << 10, "{len}");
    }
    let deep = format!("[5, {{\"x\": {}", "[".repeat(100_000));
    let malformed = [
        "",
        "x",
        "1",
        "{}",
        "[]",
        "[0]",
        "[-1]",
        "[8]",
        "[1, 2]",
        "[1.5]",
        r#"["1"]"#,
        "[2]",
        r#"[3, "k"]"#,
        r#"[3, "k", [1]]"#,
        r#"[3, "k", [-1, "m"]]"#,
        r#"[3, "k", [65536, "m"]]"#,
        r#"[3, "k", ["1", "m"]]"#,
        r#"[3, "k", [1, "m", 2]]"#,
        r#"[3, "k", [1, "m"], 7]"#,
        r#"[3, "k", [1, "m"], null, null]"#,
        r#"[3, null, [1, "m"]]"#,
        r#"[4, "k"]"#,
        r#"[4, "k", "", "1"]"#,
        r#"[4, "k", "", 99999999999999999999]"#,
        "[5]",
        "[5, []]",
        r#"[5, {"key": 1}]"#,
        r#"[5, {"addr": [1, 2]}]"#,
        r#"[5, {"addr": ["a"]}]"#,
        r#"[5, {"addr": ["a", -1]}]"#,
        "[6] [6]",
        &deep,
    ];
    for text in malformed {
        assert!(decode(text).is_err(), "{text:.40}");
    }
    assert!(feed(&mut begun(), &[2, 0, 0, 0, 0xff, 0xfe], 1).is_err());
}

#[test]
fn later_fields_replace_earlier_ones() {
    let address = |port| Some((None, InfoPort::Number(port)));
    let mut info = PeerInfo { key: Some("server:a".to_owned()), address: address(1) };
    info.merge(PeerInfo { key: None, address: address(2) });
    assert_eq!(info, PeerInfo { key: Some("server:a".to_owned()), address: address(2) });
    info.merge(PeerInfo { key: Some("server:b".to_owned()), address: None });
    assert_eq!(info, PeerInfo { key: Some("server:b".to_owned()), address: address(2) });
}
