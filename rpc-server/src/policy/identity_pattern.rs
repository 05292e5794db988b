//! Patterns of identities: the clients that a rule is for.

use std::fs;

use rpc_core::proto::ANONYMOUS;
use rpc_transports::{PeerIdentity, glob};
use serde::Deserialize;

/// Pattern of identities, in which `*` is any text within the name. A pattern of one kind of proof
/// stands for identities of that kind alone.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) enum IdentityPattern {
    /// `*`: every client, with or without proof.
    Any,
    /// `anonymous`: clients that have proven nothing, and are not known by their Unix user.
    Anonymous,
    /// `unix:*`: clients at a Unix socket that have proven nothing.
    AnyUnixUser,
    /// `unix:1000` or `unix:alice`: those that run as this user.
    UnixUser(u32),
    /// `token:NAME`: holders of tokens.
    Token(String),
    /// `cert:NAME`: holders of certificates.
    Certificate(String),
    /// `via:PROXY/NAME`: clients that a trusted proxy names so. The name of the proxy is no
    /// pattern, and clients without proof are `via:PROXY/anonymous` alone.
    Asserted { proxy: String, name: String },
}

impl IdentityPattern {
    /// Returns true if the pattern stands for `identity`.
    pub(super) fn matches(&self, identity: &PeerIdentity) -> bool {
        match (self, identity) {
            (Self::Any, _)
            | (Self::Anonymous, PeerIdentity::Anonymous)
            | (Self::AnyUnixUser, PeerIdentity::UnixUser(_)) => true,
            (Self::UnixUser(wanted), PeerIdentity::UnixUser(user)) => wanted == user,
            (Self::Token(pattern), PeerIdentity::Token(name))
            | (Self::Certificate(pattern), PeerIdentity::Certificate(name)) => glob(pattern, name),
            (Self::Asserted { proxy, name: pattern }, PeerIdentity::Asserted { proxy: by, name }) => {
                // Clients without proof are meant by that word alone.
                proxy == by && if name == ANONYMOUS { pattern == ANONYMOUS } else { glob(pattern, name) }
            }
            _ => false,
        }
    }
}

impl TryFrom<String> for IdentityPattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let malformed = || {
            format!(
                "'{text}' is no identity: write token:NAME, cert:NAME, unix:USER, via:PROXY/NAME, anonymous, or * for \
                 every client"
            )
        };
        match text.split_once(':') {
            None if text == "*" => Ok(Self::Any),
            None if text == "anonymous" => Ok(Self::Anonymous),
            Some((_, "")) | None => Err(malformed()),
            Some(("token", name)) => Ok(Self::Token(name.to_owned())),
            Some(("cert", name)) => Ok(Self::Certificate(name.to_owned())),
            Some(("unix", "*")) => Ok(Self::AnyUnixUser),
            Some(("unix", user)) => {
                user.parse().ok().or_else(|| id_of_user(user)).map(Self::UnixUser).ok_or_else(|| {
                    format!("there is no user '{user}' in {PASSWD}: write the number of the user, such as unix:1000")
                })
            }
            Some(("via", rest)) => match rest.split_once('/') {
                Some((proxy, name)) if !proxy.is_empty() && !proxy.contains('*') && !name.is_empty() => {
                    Ok(Self::Asserted { proxy: proxy.to_owned(), name: name.to_owned() })
                }
                _ => Err(malformed()),
            },
            Some(_) => Err(malformed()),
        }
    }
}

/// File of the users of this machine.
const PASSWD: &str = "/etc/passwd";

/// Returns the number of a user of this machine.
fn id_of_user(name: &str) -> Option<u32> {
    let users = fs::read_to_string(PASSWD).ok()?;
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> IdentityPattern {
        IdentityPattern::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn identities_that_look_alike_are_told_apart() {
        let identities = [
            "anonymous",
            "unix:1000",
            "unix:0",
            "token:alice",
            "cert:alice",
            "cert:gateway/alice",
            "via:gateway/alice",
            "via:token/alice",
            "via:gateway/anonymous",
            "token:root",
        ];
        for (text, expected) in [
            ("*", &identities[..]),
            ("anonymous", &["anonymous"]),
            ("unix:*", &["unix:1000", "unix:0"]),
            ("unix:root", &["unix:0"]),
            ("unix:1000", &["unix:1000"]),
            ("token:alice", &["token:alice"]),
            ("token:*", &["token:alice", "token:root"]),
            ("cert:al*", &["cert:alice"]),
            ("cert:*", &["cert:alice", "cert:gateway/alice"]),
            ("via:gateway/alice", &["via:gateway/alice"]),
            ("via:token/*", &["via:token/alice"]),
            ("via:gateway/*", &["via:gateway/alice"]),
            ("via:gateway/a*", &["via:gateway/alice"]),
            ("via:gateway/anonymous", &["via:gateway/anonymous"]),
            ("via:token/anonymous", &[]),
            ("token:anonymous", &[]),
            ("cert:via:gateway/alice", &[]),
        ] {
            let pattern = pattern(text);
            let matched = identities.iter().filter(|identity| pattern.matches(&identity.parse().unwrap()));
            assert_eq!(matched.copied().collect::<Vec<_>>(), expected, "{text}");
        }
        for text in ["", "alice", "token:", "unix:", "unix:nobody-has-this-name", "via:gateway", "via:*/x", "uid:1"] {
            assert!(IdentityPattern::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
