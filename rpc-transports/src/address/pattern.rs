//! Patterns of addresses, by which operators allow forwarding and advertising.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::address::{Address, AddressError};

/// Returns true if `pattern` stands for `address`, which is in its canonical spelling: see
/// [`Transports::matches`](crate::Transports::matches).
pub(crate) fn is_covered(pattern: &str, address: &Address, starts_programs: bool) -> bool {
    let Some(host) = address.host() else {
        let (word, text) = (format!("{}:", address.scheme()), address.clone().without_key().to_string());
        // A `..` leads from an allowed folder to any other, so its pattern must be the same text.
        let climbs = text.split(['/', ':']).any(|part| part == "..");
        return pattern.starts_with(&word) && if climbs { pattern == text } else { glob(pattern, &text) };
    };
    if starts_programs && !pattern.starts_with(&format!("{}:", address.scheme())) {
        return false;
    }
    let (pattern, parameters) = pattern.split_once('?').unwrap_or((pattern, ""));
    if !glob(parameters, &address.query()) {
        return false;
    }
    let Some((scheme, authority)) = pattern.split_once("://") else {
        return pattern == "*" && address.user().is_none();
    };
    let (user, authority) =
        authority.rsplit_once('@').map_or((None, authority), |(user, authority)| (Some(user), authority));
    let (host_pattern, port_pattern) = split(authority);
    let is_user = match (user, address.user()) {
        (None, None) => true,
        (Some(pattern), Some(user)) => glob(pattern, user),
        _ => false,
    };
    let port = address.port().map(|port| port.to_string()).unwrap_or_default();
    is_user
        && glob(scheme, address.scheme())
        && glob(port_pattern.unwrap_or("*"), &port)
        && glob(host_pattern, host)
        && same_family(host_pattern, host)
}

/// Returns the scheme of a pattern, which may contain `*`; `None` for `*` alone, which stands for
/// every address with a host.
///
/// # Errors
///
/// [`AddressError::Pattern`]: no address can match the pattern.
pub(crate) fn scheme_of_pattern(pattern: &str) -> Result<Option<&str>, AddressError> {
    let wrong = |problem| AddressError::Pattern { text: pattern.to_owned(), problem };
    if pattern == "*" {
        return Ok(None);
    }
    let Some((scheme, rest)) = pattern.split_once(':') else { return Err(wrong("it has no scheme")) };
    let Some(authority) = rest.strip_prefix("//") else {
        // Paths and commands match only a pattern with their own scheme.
        return if scheme.contains('*') { Err(wrong("a scheme with * needs a host")) } else { Ok(Some(scheme)) };
    };
    let authority = authority.split_once('?').map_or(authority, |(authority, _)| authority);
    let (host, port) = split(authority.rsplit_once('@').map_or(authority, |(_, authority)| authority));
    if host.is_empty() {
        return Err(wrong("it has no host"));
    }
    if host.contains('/') || port.is_some_and(|port| port.contains('/')) {
        return Err(wrong("a pattern has no key"));
    }
    match port {
        Some(port) if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit() || byte == b'*') => {
            Err(wrong("the port is neither a number nor *"))
        }
        _ => Ok(Some(scheme)),
    }
}

/// Splits a pattern into host and port. The host may be in brackets.
fn split(authority: &str) -> (&str, Option<&str>) {
    if let Some((host, rest)) = authority.strip_prefix('[').and_then(|authority| authority.split_once(']')) {
        return (host, rest.strip_prefix(':'));
    }
    match authority.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (authority, None),
    }
}

/// Returns true unless the pattern is for IP addresses and the host is not one.
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

/// Returns true if `text` matches `pattern`, in which `*` stands for any text.
#[must_use]
pub fn glob(pattern: &str, text: &str) -> bool {
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
    use super::glob;
    use crate::address::AddressError;
    use crate::transport::Transports;

    /// A regression: a misspelt pattern allowed nothing, and nobody was told.
    #[test]
    fn a_pattern_that_stands_for_nothing_is_an_error() {
        let transports = Transports::default();
        for right in [
            "*",
            "tcp://10.0.0.*:9090",
            "tcp://10.0.0.*",
            "*://*.lab:*",
            "tcp://[fe80::*]:90*",
            "unix:/run/*",
            "exec:*",
            "ssh://me@board?program=/bin/sh",
            "local:",
            "tracker+tls://pool.lan:9190",
        ] {
            assert_eq!(transports.check_pattern(right), Ok(()), "{right}");
        }
        for wrong in ["", "10.0.0.5", "board", "*:/run/x", "tcp://", "tcp://:1", "tcp://h:port", "tcp://h:1/key"] {
            let error = transports.check_pattern(wrong).unwrap_err();
            assert!(matches!(error, AddressError::Pattern { .. }), "{wrong}: {error}");
        }
        for unknown in ["tpc://10.0.0.5:9090", "10.0.0.5:9090", "x*://h:1"] {
            let error = transports.check_pattern(unknown).unwrap_err();
            assert!(matches!(error, AddressError::UnknownScheme { .. }), "{unknown}: {error}");
        }
    }

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
            ("*", "exec://sh", false),
            ("*", "local:", false),
            ("*", "tracker://pool:9190", false),
            ("*", "pigeon://roof", false),
            ("*", "ssh://board", false),
            ("*://*:*", "ssh://board:22", false),
            ("ssh://board", "ssh://board/key", true),
            ("ssh://board", "ssh://me@board", false),
            ("ssh://me@board", "ssh://me@board", true),
            ("ssh://board", "ssh://board?program=/bin/sh", false),
            ("ssh://board?program=/opt/rpc-server", "ssh://board?program=/opt/rpc-server", true),
            ("exec:rpc-server *", "exec:rpc-server serve", true),
            ("exec:rpc-server *", "exec:  'rpc-server'  serve", true),
            ("tcp://*", "tcp://h", false),
            ("tcp://*", "tcp://me@h:1", false),
            ("*", "unix:/run/rpc.sock", false),
            ("local:", "local:", true),
            ("unix:/run/*", "unix:/run/rpc.sock", true),
            ("unix:/run/*", "unix:/run/../home/x/private.sock", false),
            ("unix:/run/*", "unix:/run/%2e%2e/home/x/private.sock", false),
            ("unix:/run/../tmp/s", "unix:/run/../tmp/s", true),
            ("exec:rpc-server*", "exec:sh", false),
        ] {
            let matches = Transports::default().matches(pattern, &address.parse().unwrap());
            assert_eq!(matches, expected, "{pattern} {address}");
        }
    }
}
