//! Tests of addresses: texts, parts, errors.

use std::net::SocketAddr;

use super::*;

fn parsed(text: &str) -> Address {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refused(text: &str) -> AddressError {
    match text.parse::<Address>() {
        Ok(address) => panic!("{text} was taken as {address:?}"),
        Err(error) => error,
    }
}

#[test]
fn texts_come_back_byte_for_byte() {
    for text in [
        "tcp://localhost:9090",
        "tcp://board-7.lan:0",
        "tcp://10.0.0.5:65535/rack:1",
        "TCP://LocalHost:09090/",
        "tcp://[0:0:0:0:0:0:0:1]:1",
        "tcp://[::1]:9090/board-7",
        "tcp://[fe80::1%eth0]:9090",
        "tls://board-7.lan:9090/board-7",
        "quic://[::1]:0/k",
        "ws://gateway.example/board?proxy=none&path=%2Frpc",
        "ssh://me@board:2222/k?program=/opt/rpc%20server",
        "unix:/run/rpc.sock",
        "unix:relative.sock",
        "unix:///run/a.sock",
        "unix:/run/with%20space%3F%25.sock?key=a@b",
        "unix:/run/%FF",
        "unix:/%2Fhost",
        "exec:cat",
        "exec:  cat 'a?b=c' // ",
        "exec:ssh board 'rpc-server serve --stdio' ''",
        "memory:test-1",
        "local:",
        "tracker://pool.lan:9190/h100",
        "tracker+tls://pool.lan:9190/h100",
        "tracker+unix:/run/pool.sock?key=h100",
    ] {
        let address = parsed(text);
        assert_eq!(address.to_string(), text);
        assert_eq!(parsed(&address.to_string()), address);
        assert_eq!(Address::from_parts(address.clone().into_parts()), address, "rebuilt {text}");
    }
}

#[test]
fn spellings_of_the_same_parts_are_equal_and_spaces_around_them_do_not_count() {
    for (text, same) in [
        (" TCP://LocalHost:09090/ ", "tcp://localhost:9090"),
        ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
        ("local: ", "local:"),
    ] {
        assert_eq!(parsed(text), parsed(same));
        assert_eq!(parsed(text).to_string(), text.trim());
    }
}

#[test]
fn parts_and_parameters_are_told_apart() {
    let address = parsed("ssh://me@board/k?program=a%20b&x=%");
    assert_eq!((address.user(), address.host(), address.port()), (Some("me"), Some("board"), None));
    assert_eq!(address.key(), Some("k"));
    assert_eq!(address.parameter("program").as_deref(), Some("a b"));
    assert_eq!(address.parameter("x").as_deref(), Some("%"));
    assert_eq!(address.parameters().collect::<Vec<_>>(), ["program", "x"]);
    let address = parsed("unix:/a?key=k&mode=x");
    assert_eq!((address.rest(), address.key()), (Some("/a"), Some("k")));
    assert_eq!(address.without_key().to_string(), "unix:/a?mode=x");
    let address = parsed("exec:a?key=k");
    assert_eq!((address.rest(), address.key()), (Some("a?key=k"), None));
}

#[test]
fn the_error_names_the_part_that_is_wrong() {
    use AddressError as E;
    for text in ["", "host", "host:9090", "[::1]:9090", ":"] {
        assert!(matches!(refused(text), E::NoScheme { .. }), "{text}");
    }
    for text in ["1x:a", "a_b:c", "-a:b"] {
        assert!(matches!(refused(text), E::Scheme { .. }), "{text}");
    }
    for text in [
        "tcp://:1",
        "tcp://::1:1",
        "tcp://[::1",
        "tcp://[host]:1",
        "tcp://[::g]:1",
        "tcp://[::1]x",
        "tcp://[::1%]:1",
        "tcp://a..b:1",
        "tcp://us er@host:1",
        "tcp://@host:1",
        "tcp://*:1",
        "tcp://a b:1",
    ] {
        assert!(matches!(refused(text), E::Host { .. }), "{text}");
    }
    for text in ["tcp://h:", "tcp://h:x", "tcp://h:65536", "tcp://h:+1", "tcp://h:-1"] {
        assert!(matches!(refused(text), E::Port { .. }), "{text}");
    }
    for text in ["tcp://h:1/a/b", "tcp://h:1/a b", "tcp://h:1?key=a", "unix:/a?key=", "unix:/a?key=a b"] {
        assert!(matches!(refused(text), E::Key { .. } | E::Parameters { .. }), "{text}");
    }
    for text in ["tcp://h:1/?", "unix:/a?b", "unix:/a?=b", "unix:/a?b=c&b=d", "unix:/a?key=a&key=b"] {
        assert!(matches!(refused(text), E::Parameters { .. }), "{text}");
    }
}

#[test]
fn loopback_is_what_other_machines_cannot_reach() {
    for text in ["tcp://localhost:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://[::ffff:127.0.0.1]:1"] {
        assert!(parsed(text).has_loopback_host(), "{text}");
    }
    for text in
        ["tcp://0.0.0.0:1", "quic://10.0.0.1:1", "tcp://[::]:1", "tcp://localhost.lan:1", "tcp://127.1:1", "unix:/a"]
    {
        assert!(!parsed(text).has_loopback_host(), "{text}");
    }
}

#[test]
fn keys_belong_to_addresses_that_can_show_them() {
    let address = parsed("tcp://h:1").with_key("a").unwrap();
    assert_eq!((address.key(), address.to_string()), (Some("a"), "tcp://h:1/a".to_owned()));
    assert_eq!(address.without_key(), parsed("tcp://h:1"));
    assert_eq!(parsed("unix:/a").with_key("a").unwrap().to_string(), "unix:/a?key=a");
    assert!(parsed("exec:a").with_key("a").is_err());
    assert!(parsed("tcp://h:1").with_key("a b").is_err());
}

#[test]
fn socket_addresses_convert() {
    for text in ["127.0.0.1:80", "[::1]:80", "[fe80::1%3]:80"] {
        let socket: SocketAddr = text.parse().unwrap();
        assert_eq!(Address::from(socket), parsed(&format!("tcp://{text}")));
    }
}
