//! Rights of one client: the rules of the policy that are for it.

use std::any::Any;
use std::sync::Arc;

use rpc_core::{AccessControl, Context, ErrorKind, Permission, Result, RpcError, SessionLimits};
use rpc_transports::{OpenRequest, Transports};
use serde::{Deserialize, Serialize};

use super::rule::{Rule, RuleLimits, right_behind};

/// Maximum number of patterns that an error names.
const MAX_NAMED: usize = 8;

/// Maximum number of characters of a name that an error repeats. Names come from clients.
const MAX_NAME_CHARS: usize = 120;

/// Maximum length of rights that are an argument of another process, in bytes: a quarter of what
/// the system takes, since quoting may double it.
const MAX_TEXT_BYTES: usize = 32 << 10;

/// Rights of one client, as its session has them from its begin to its end.
#[derive(Clone, Debug)]
pub(crate) struct Rights {
    /// Identity of the client, as text.
    identity: String,
    /// Rules that are for the client, shared by all its sessions.
    rules: Vec<Arc<Rule>>,
    /// Transports of the server, by which patterns of addresses are read.
    transports: Transports,
}

/// Identity of the client of a session, as text with the kind of its proof, for functions.
#[derive(Clone, Debug)]
pub(crate) struct ClientIdentity(pub(crate) String);

/// Rights as other processes get them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PassedRights {
    /// Identity of the client, as text.
    identity: String,
    rules: Vec<Rule>,
}

impl Rights {
    pub(super) fn new(identity: String, rules: Vec<Arc<Rule>>, transports: Transports) -> Self {
        Self { identity, rules, transports }
    }

    /// Returns the identity of the client, as text.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns the names of the rules that are for the client.
    pub(crate) fn rule_names(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.name.as_str())
    }

    /// Returns the patterns of the addresses of other servers that the rules let the client have
    /// tensors sent to. The settings of the server have to allow an address, too.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().flat_map(|rule| rule.peer.iter().map(String::as_str))
    }

    /// Returns the rights as other processes get them.
    pub(crate) fn passed(&self) -> PassedRights {
        let rules = self.rules.iter().map(|rule| Rule::clone(rule)).collect();
        PassedRights { identity: self.identity.clone(), rules }
    }

    /// Returns the limits of the client's session at a server with the limits `ceiling`: of each
    /// limit the greatest that a rule names, and never more than the server's.
    fn limits(&self, ceiling: SessionLimits) -> SessionLimits {
        self.rule_limits().within(ceiling)
    }

    /// Returns the number of sessions that the client may have.
    pub(super) fn max_sessions(&self) -> Option<usize> {
        self.rule_limits().sessions
    }

    fn rule_limits(&self) -> RuleLimits {
        self.rules.iter().map(|rule| rule.limits()).fold(RuleLimits::default(), RuleLimits::or_greater)
    }

    /// Returns the name of the first rule that gives a permission.
    pub(super) fn allowing_rule(&self, permission: &Permission<'_>) -> Option<&str> {
        let allowing = self.rules.iter().find(|rule| rule.allows(permission, &self.transports));
        allowing.map(|rule| rule.name.as_str())
    }

    /// Returns the error for a permission that no rule gives, with the rules that are for the
    /// client.
    pub(super) fn refusal(&self, permission: &Permission<'_>) -> RpcError {
        if let Some(error) = self.no_rule() {
            return error;
        }
        let given = self.rules.iter().flat_map(|rule| {
            let given = rule.given_like(permission).into_iter();
            given.map(|given| format!("{given} (rule '{}')", rule.name))
        });
        let mut given: Vec<_> = given.take(MAX_NAMED + 1).collect();
        if given.len() > MAX_NAMED {
            given[MAX_NAMED] = "others".to_owned();
        }
        let (identity, (verb, object)) = (self.identity(), action(permission));
        let needed = match permission {
            Permission::Function(name) => right_behind(name),
            _ => None,
        };
        let text = match needed {
            Some(right) => {
                let (key, rules) = (right.key(), self.quoted_names());
                format!("the policy does not let '{identity}' {verb} {object}: it is given by '{key}', not in {rules}")
            }
            None if given.is_empty() => {
                format!("the policy does not let '{identity}' {verb} {object}: it is not in {}", self.quoted_names())
            }
            None => format!("the policy lets '{identity}' {verb} {} and not {object}", given.join(", ")),
        };
        RpcError::new(ErrorKind::Refused, text)
    }

    /// Returns the error of a client that no rule is for.
    fn no_rule(&self) -> Option<RpcError> {
        let text = || format!("no rule of the server's policy is for '{}'", self.identity());
        self.rules.is_empty().then(|| RpcError::new(ErrorKind::Refused, text()))
    }

    fn quoted_names(&self) -> String {
        let names: Vec<_> = self.rule_names().take(MAX_NAMED).map(|name| format!("'{name}'")).collect();
        let (rules, names) = (if names.len() == 1 { "the rule" } else { "the rules" }, names.join(", "));
        let others = if self.rules.len() > MAX_NAMED { " and others" } else { "" };
        format!("{rules} {names}{others}")
    }
}

impl AccessControl for Rights {
    fn check(&self, permission: &Permission<'_>) -> Result<()> {
        match self.allowing_rule(permission) {
            Some(_) => Ok(()),
            None => Err(self.refusal(permission)),
        }
    }

    fn to_text(&self) -> Option<String> {
        serde_json::to_string(&self.passed()).ok().filter(|text| text.len() <= MAX_TEXT_BYTES)
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl PassedRights {
    /// Returns the rights in this process.
    pub(crate) fn restore(self, transports: Transports) -> Rights {
        Rights::new(self.identity, self.rules.into_iter().map(Arc::new).collect(), transports)
    }
}

/// Returns the rights that [`AccessControl::to_text`] has passed on to this process, for
/// [`disco::serve_if_worker_with_access`].
///
/// # Errors
///
/// The text is malformed.
pub fn restore(text: &str) -> Result<Arc<dyn AccessControl>> {
    let passed: PassedRights = serde_json::from_str(text)
        .map_err(|error| RpcError::invalid_argument(format!("malformed rights of a session: {error}")))?;
    Ok(Arc::new(passed.restore(crate::transports())))
}

/// Returns the rights of a client that asks for a session; `None` if the server has no policy.
///
/// # Errors
///
/// [`ErrorKind::Refused`]: no rule of the policy is for the client.
pub(crate) fn rights_of(request: &OpenRequest) -> Result<Option<Arc<Rights>>> {
    let Some(access) = &request.access else { return Ok(None) };
    let rights = access.clone().into_any().downcast::<Rights>();
    let rights = rights.map_err(|_| RpcError::internal("the rights of a client are not those of a policy"))?;
    match rights.no_rule() {
        Some(error) => Err(error),
        None => Ok(Some(rights)),
    }
}

/// Returns the limits of a session at a server with the limits `ceiling`, for a client with these
/// rights.
pub(crate) fn session_limits_within(rights: Option<&Rights>, ceiling: SessionLimits) -> SessionLimits {
    match rights {
        Some(rights) => rights.limits(ceiling),
        None => ceiling,
    }
}

/// Returns the rights of the client of a session; `None` if the server has no policy.
pub(crate) fn rights_in(context: &Context) -> Option<Arc<Rights>> {
    context.access_control()?.clone().into_any().downcast().ok()
}

/// Returns the verb and the object of what a permission is for.
fn action(permission: &Permission<'_>) -> (&'static str, String) {
    let quoted = |name: &str| match name.char_indices().nth(MAX_NAME_CHARS) {
        Some((end, _)) => format!("'{}…'", &name[..end]),
        None => format!("'{name}'"),
    };
    match permission {
        Permission::Function(name) => ("call", quoted(name)),
        Permission::Device(device) => ("use", device.to_string()),
        Permission::Modules => ("load", "modules".to_owned()),
        Permission::Program(program) => ("run", quoted(program)),
        Permission::Forward(address) => ("be forwarded to", quoted(address)),
        Permission::Port(address) => ("reach the port", quoted(address)),
        Permission::Listen(address) => ("listen at", quoted(address)),
        Permission::Peer(address) => ("have tensors sent to", quoted(address)),
        Permission::Disco => ("have", "workers of Disco".to_owned()),
        Permission::Logs => ("read", "the log of the server".to_owned()),
        Permission::LeasePriority(priority) => ("ask for leases with the priority", priority.to_string()),
        other => ("have", other.to_string()),
    }
}
