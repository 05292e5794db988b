//! Patterns for addresses: those that clients may be forwarded to, and those that servers may tell a tracker.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::address::Address;

/// Whether `address` is one of those that `pattern` stands for.
///
/// A pattern is an address in which `*` stands for any text within one part: the scheme, the host or the port. Without a
/// port it is for all of them. `*` alone is any address with a host. Nothing but a pattern that says so stands for a
/// program to be started (`exec:…`), for this process (`local:`) or for a path (`unix:…`). A pattern for IP addresses, such
/// as `tcp://10.0.0.*`, stands for no host name: `10.0.0.example.org` is wherever its owner wants it to be.
pub fn matches_pattern(pattern: &str, address: &Address) -> bool {
    let Some((host, port)) = address.host_and_port() else {
        let (word, text) = (format!("{}:", address.scheme()), address.clone().without_key().to_string());
        // From a folder that is allowed there is a way to any other.
        let climbs = text.split(['/', ':']).any(|part| part == "..");
        return pattern.starts_with(&word) && if climbs { pattern == text } else { glob(pattern, &text) };
    };
    let Some((scheme, place)) = pattern.split_once("://") else { return pattern == "*" };
    let (host_pattern, port_pattern) = split(place);
    glob(scheme, address.scheme())
        && glob(port_pattern.unwrap_or("*"), &port.to_string())
        && glob(host_pattern, host)
        && same_family(host_pattern, host)
}

/// Host and port of a pattern; the host may be in brackets.
fn split(place: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = place.strip_prefix('[').and_then(|place| place.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    match place.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (place, None),
    }
}

/// Whether a pattern that is for IP addresses is given one.
fn same_family(pattern: &str, host: &str) -> bool {
    let wild_only = pattern.bytes().all(|byte| byte == b'*');
    if wild_only {
        true
    } else if pattern.bytes().all(|byte| byte.is_ascii_digit() || b".*".contains(&byte)) {
        host.parse::<Ipv4Addr>().is_ok()
    } else if pattern.contains(':') {
        host.split('%').next().is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok())
    } else {
        true
    }
}

/// Whether `text` matches `pattern`, in which `*` stands for any text.
pub(crate) fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    let Some(mut rest) = rest.strip_suffix(last) else { return false };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::{glob, matches_pattern};

    #[test]
    fn a_star_stands_for_anything_and_the_rest_for_itself() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("", "x", false),
            ("ab*ba", "aba", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_pattern_reaches_no_further_than_it_says() {
        for (pattern, address, expected) in [
            ("tcp://10.0.0.*:*", "tcp://10.0.0.5:9090", true),
            ("tcp://10.0.0.*", "tcp://10.0.0.5:9090/board", true),
            ("tcp://10.0.0.*:*", "tcp://10.0.1.5:9090", false),
            ("tcp://10.0.0.*", "tcp://10.0.0.evil.example:1", false),
            ("tcp://10.0.0.*", "tls://10.0.0.5:9090", false),
            ("*://10.0.0.*", "quic://10.0.0.5:9090", true),
            ("tcp://a:1", "tcp://a:1", true),
            ("tcp://a:1", "tcp://a:12", false),
            ("tcp://*.lab:90*", "tcp://rack.lab:9090", true),
            ("tcp://*.lab:90*", "tcp://rack.lab.example:9090", false),
            ("tcp://[fe80::*]:*", "tcp://[fe80::1]:9090", true),
            ("tcp://[fe80::*]", "tcp://[fe81::1]:9090", false),
            ("*", "tls://anywhere.example:1", true),
            ("*://*:*", "tls://anywhere.example:1", true),
            ("*", "exec:sh", false),
            ("*:*", "exec:sh", false),
            ("*", "local:", false),
            ("*", "unix:/run/rpc.sock", false),
            ("local:", "local:", true),
            ("unix:/run/*", "unix:/run/rpc.sock", true),
            ("unix:/run/*", "unix:/run/../home/x/private.sock", false),
            ("unix:/run/*", "unix:/run/%2e%2e/home/x/private.sock", false),
            ("unix:/run/../tmp/s", "unix:/run/../tmp/s", true),
            ("exec:rpc-server*", "exec:sh", false),
        ] {
            assert_eq!(matches_pattern(pattern, &address.parse().unwrap()), expected, "{pattern} {address}");
        }
    }
}
