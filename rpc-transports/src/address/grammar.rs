//! Grammar of addresses: parsing a text into its parts, and printing them.

use std::fmt::Write as _;
use std::net::Ipv6Addr;

use super::error::AddressError;

/// Parts of an address. Two addresses with equal parts are equal.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Parts {
    /// Scheme in lower case.
    pub(super) scheme: String,
    pub(super) location: Location,
    pub(super) key: Option<String>,
    /// Names and values as they stand in the text, without `key`.
    pub(super) parameters: Vec<(String, String)>,
}

/// Location of the peer, in one of the two forms of addresses.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Location {
    /// Authority of a hierarchical address.
    Host {
        user: Option<String>,
        /// Lower-case host name, or an IP address; IPv6 without brackets, with its zone if it has
        /// one.
        host: String,
        port: Option<u16>,
    },
    /// Text behind the scheme of an opaque address, without its parameters.
    Opaque(String),
}

/// The parameter that holds the key of an opaque address.
pub(super) const KEY: &str = "key";

/// Schemes whose opaque part is taken as it stands: a command line has question marks of its own.
pub(super) const VERBATIM: [&str; 1] = ["exec"];

/// Parses an address. Returns its text without the spaces around it, and its parts.
pub(super) fn parse(text: &str) -> Result<(&str, Parts), AddressError> {
    let text = text.trim_start();
    let no_scheme = || AddressError::NoScheme { text: text.trim_end().into() };
    let (scheme, rest) = text.split_once(':').ok_or_else(no_scheme)?;
    // `host:9090` and `[::1]:9090` seem to begin with a scheme, but their scheme is missing.
    if scheme.is_empty() || is_port(rest.trim_end()) || scheme.starts_with('[') {
        return Err(no_scheme());
    }
    let scheme = checked_scheme(scheme)?;
    let is_verbatim = VERBATIM.contains(&scheme.as_str());
    // Spaces have a meaning of their own in a command line. In other addresses, spaces at the
    // end are a slip.
    let (text, rest) = if is_verbatim { (text, rest) } else { (text.trim_end(), rest.trim_end()) };
    let parts = match rest.strip_prefix("//") {
        // An empty host means that a path follows, written as in a URL.
        Some(body) if !body.starts_with('/') && !is_verbatim => hierarchical(scheme, rest, body)?,
        _ if is_verbatim => {
            Parts { scheme, location: Location::Opaque(rest.to_owned()), key: None, parameters: Vec::new() }
        }
        _ => {
            let (rest, query) = split_query(rest);
            let (key, parameters) = parsed_query(query)?;
            if let Some(key) = &key {
                check_key(key)?;
            }
            Parts { scheme, location: Location::Opaque(rest.to_owned()), key, parameters }
        }
    };
    Ok((text, parts))
}

impl Parts {
    /// Returns the text of an address with these parts.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}:", self.scheme);
        let mut parameters: Vec<(&str, &str)> = Vec::new();
        // Writing to a string cannot fail.
        let _ = match &self.location {
            Location::Host { user, host, port } => {
                let (user, at) = user.as_ref().map_or(("", ""), |user| (user, "@"));
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                let key = self.key.as_ref().map(|key| format!("/{key}")).unwrap_or_default();
                write!(text, "//{user}{at}{open}{host}{close}{port}{key}")
            }
            Location::Opaque(rest) => {
                parameters.extend(self.key.as_deref().map(|key| (KEY, key)));
                write!(text, "{rest}")
            }
        };
        parameters.extend(self.parameters.iter().map(|(name, value)| (name.as_str(), value.as_str())));
        if !parameters.is_empty() {
            text.push('?');
            text.push_str(&joined(parameters.into_iter()));
        }
        text
    }
}

/// Returns the text of parameters, without the question mark.
pub(super) fn joined<'a>(parameters: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    parameters.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
}

/// Problem of a key with other characters.
pub(super) const KEY_CHARACTERS: &str = "it must consist of letters, digits and -._~:@+=";

/// Parses the part behind the scheme; `rest` has the two slashes, and `body` does not.
fn hierarchical(scheme: String, rest: &str, body: &str) -> Result<Parts, AddressError> {
    let host_error = |problem| AddressError::Host { text: rest.into(), problem };
    let (body, query) = split_query(body);
    let (in_query, parameters) = parsed_query(query)?;
    if let Some(key) = in_query {
        return Err(AddressError::Key { text: key, problem: "behind a host it follows a slash" });
    }
    let (authority, key) = body.split_once('/').unwrap_or((body, ""));
    let (user, authority) = match authority.rsplit_once('@') {
        Some((user, authority)) if is_user(user) => (Some(user.to_owned()), authority),
        Some(_) => return Err(host_error("a user name has letters, digits and -._")),
        None => (None, authority),
    };
    let (host, port) = if let Some(bracketed) = authority.strip_prefix('[') {
        let Some((host, after)) = bracketed.split_once(']') else {
            return Err(host_error("its bracket is not closed"));
        };
        if !host.contains(':') {
            return Err(host_error("only IPv6 addresses stand in brackets"));
        }
        match after.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if after.is_empty() => (host, None),
            None => return Err(host_error("only a port may follow it")),
        }
    } else {
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        if host.contains(':') {
            return Err(host_error("an IPv6 address needs brackets"));
        }
        (host, port)
    };
    let host = checked_host(host, rest)?;
    let port_of = |port: &str| {
        // `parse` alone would also take a leading plus sign.
        let number = is_port(port).then(|| port.parse().ok()).flatten();
        number.ok_or_else(|| AddressError::Port { text: port.into() })
    };
    let port = port.map(port_of).transpose()?;
    let key = (!key.is_empty()).then(|| key.to_owned());
    if let Some(key) = &key {
        check_key(key)?;
    }
    Ok(Parts { scheme, location: Location::Host { user, host, port }, key, parameters })
}

fn split_query(text: &str) -> (&str, Option<&str>) {
    text.split_once('?').map_or((text, None), |(text, query)| (text, Some(query)))
}

/// Key and other parameters of a query.
type Query = (Option<String>, Vec<(String, String)>);

fn parsed_query(query: Option<&str>) -> Result<Query, AddressError> {
    let Some(query) = query else { return Ok((None, Vec::new())) };
    let error = |problem| AddressError::Parameters { text: query.into(), problem };
    let (mut key, mut parameters) = (None, Vec::new());
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').ok_or_else(|| error("each is a name and a value"))?;
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
            return Err(error("a name consists of letters, digits, - and _"));
        }
        if value.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '?' | '#')) {
            return Err(error("white space, ? and # are escaped by %XX"));
        }
        let is_known = parameters.iter().any(|(known, _)| known == name) || (name == KEY && key.is_some());
        match name {
            _ if is_known => return Err(error("each name may be given once")),
            KEY => key = Some(value.to_owned()),
            _ => parameters.push((name.to_owned(), value.to_owned())),
        }
    }
    Ok((key, parameters))
}

fn check_key(key: &str) -> Result<(), AddressError> {
    if is_name(key) { Ok(()) } else { Err(AddressError::Key { text: key.into(), problem: KEY_CHARACTERS }) }
}

/// Returns the scheme in lower case.
pub(super) fn checked_scheme(scheme: &str) -> Result<String, AddressError> {
    let mut bytes = scheme.bytes();
    let starts = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    if starts && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)) {
        Ok(scheme.to_ascii_lowercase())
    } else {
        Err(AddressError::Scheme { text: scheme.into() })
    }
}

/// Returns the host in canonical form. An error quotes `text`.
pub(super) fn checked_host(host: &str, text: &str) -> Result<String, AddressError> {
    let host_error = |problem| AddressError::Host { text: text.into(), problem };
    if host.is_empty() {
        return Err(host_error("it is empty (to listen everywhere, write [::])"));
    }
    if host.contains(':') {
        let (ip, zone) = match host.split_once('%') {
            Some((ip, zone)) => (ip, Some(zone)),
            None => (host, None),
        };
        let Ok(ip) = ip.parse::<Ipv6Addr>() else {
            return Err(host_error("it is not an IPv6 address"));
        };
        return match zone {
            None => Ok(ip.to_string()),
            Some(zone) if is_host_name(zone) => Ok(format!("{ip}%{zone}")),
            Some(_) => Err(host_error("its zone is not an interface")),
        };
    }
    if !is_host_name(host) {
        return Err(host_error("a host name has letters, digits, hyphens and single dots"));
    }
    Ok(host.to_ascii_lowercase())
}

fn is_host_name(text: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty() && (label.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let without_root = text.strip_suffix('.').unwrap_or(text);
    text.len() <= 253 && without_root.split('.').all(label)
}

fn is_user(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns true if the text has only characters that need no escaping anywhere in an address. Keys
/// and names consist of them.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && (text.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"-._~:@+=".contains(&byte))
}

/// Decodes `%XX`. Returns `None` where a `%` is not followed by two hexadecimal digits.
pub(crate) fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let (digits, after) = rest.split_at_checked(2)?;
            let digit = |byte: u8| char::from(byte).to_digit(16);
            let value = digit(digits[0])? * 16 + digit(digits[1])?;
            bytes.push(u8::try_from(value).ok()?);
            rest = after;
        } else {
            bytes.push(byte);
        }
    }
    Some(bytes)
}
