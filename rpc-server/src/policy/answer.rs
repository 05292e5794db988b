//! Answers to clients that ask what they may do: `rpc.can`.

use std::fmt;

use rpc_core::{Context, ErrorKind, Permission, Result, RpcError};
use rpc_transports::PeerIdentity;
use serde::{Deserialize, Serialize};

use super::ceiling::Ceiling;
use super::document::Policy;
use super::rights::rights_in;

/// Maximum length of a question in bytes; the answer may repeat it.
const MAX_TEXT_BYTES: usize = 4096;

/// Answer to the question if a client may do something: the result of `rpc.can`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Answer {
    /// True if the client may do it.
    pub allowed: bool,
    /// The reason, in words.
    pub reason: String,
    /// Name of the rule that allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

impl Answer {
    /// Returns the answer of a policy alone, without the settings of a server.
    #[must_use]
    pub fn of_policy(policy: &Policy, identity: &PeerIdentity, permission: &Permission<'_>) -> Self {
        match policy.check(identity, permission) {
            Ok(rule) => Self { allowed: true, reason: allowed_by(&rule), rule: Some(rule) },
            Err(refusal) => Self { allowed: false, reason: refusal.message().to_owned(), rule: None },
        }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", if self.allowed { "yes" } else { "no" }, self.reason)
    }
}

/// Answers if the client of this session may do what the text of a [`Permission`] says.
///
/// # Errors
///
/// The text is malformed.
pub(crate) fn answer(context: &Context, text: &str) -> Result<Answer> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(RpcError::invalid_argument(format!("a permission has at most {MAX_TEXT_BYTES} bytes")));
    }
    let permission = Permission::parse(text)?;
    let ceiling = context.extension::<Ceiling>();
    let answer = judge(context, ceiling.as_deref(), &permission);
    match permission {
        // A right to sessions with a server is one to tunnels, too.
        Permission::Port(address)
            if !answer.allowed && ceiling.as_ref().is_some_and(|found| found.forwards_tunnels()) =>
        {
            let forwarded = judge(context, ceiling.as_deref(), &Permission::Forward(address));
            Ok(if forwarded.allowed { forwarded } else { answer })
        }
        _ => Ok(answer),
    }
}

/// Checks that the client of this session has a permission, and that the settings of the server
/// allow it, too. For permissions that no other place enforces; [`answer`] asks the same.
///
/// # Errors
///
/// [`ErrorKind::Refused`], with the reason.
pub(crate) fn check(context: &Context, permission: &Permission<'_>) -> Result<()> {
    let ceiling = context.extension::<Ceiling>();
    let ceiling = ceiling.ok_or_else(|| RpcError::new(ErrorKind::Refused, "this session belongs to no server"))?;
    within(context, Some(&ceiling), permission)
}

fn within(context: &Context, ceiling: Option<&Ceiling>, permission: &Permission<'_>) -> Result<()> {
    context.authorize(permission)?;
    match ceiling.and_then(|ceiling| ceiling.missing(permission)) {
        Some(setting) => {
            let text = format!("the server's settings do not allow it ({setting})");
            Err(RpcError::new(ErrorKind::Refused, text))
        }
        None => Ok(()),
    }
}

fn judge(context: &Context, ceiling: Option<&Ceiling>, permission: &Permission<'_>) -> Answer {
    let no = |reason: String| Answer { allowed: false, reason, rule: None };
    if let Err(refusal) = within(context, ceiling, permission) {
        return no(refusal.message().to_owned());
    }
    let there_is = match permission {
        Permission::Function(name) => context.function(name).map(drop),
        Permission::Device(device) => context.devices().get(*device).map(drop),
        _ => Ok(()),
    };
    if let Err(absent) = there_is {
        return no(absent.message().to_owned());
    }
    let rights = rights_in(context);
    let rule = rights.as_ref().and_then(|rights| rights.allowing_rule(permission)).map(str::to_owned);
    let reason = match &rule {
        Some(rule) => allowed_by(rule),
        None => "the server has no policy, and lets its clients do what its settings allow".to_owned(),
    };
    Answer { allowed: true, reason, rule }
}

/// Returns the reason of an answer that a rule gives.
fn allowed_by(rule: &str) -> String {
    format!("the rule '{rule}' of the policy allows it")
}
