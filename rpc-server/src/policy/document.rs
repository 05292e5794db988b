//! The policy file: its rules, and its errors.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::Permission;
use rpc_transports::{AddressError, PeerIdentity, Transports};
use serde::Deserialize;

use super::identity_pattern::IdentityPattern;
use super::rights::Rights;
use super::rule::Rule;
use crate::config::is_ambiguous_program;
use crate::suggestion::likely_key;

/// Maximum length of a policy file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Policy of a server: rules that say what the holders of identities may do.
///
/// ```
/// use rpc_core::Permission;
/// use rpc_server::policy::Policy;
///
/// let policy: Policy = r#"
///     [[rule]]
///     name = "ci"
///     identities = ["token:ci"]
///     functions = ["model.*"]
/// "#
/// .parse()?;
/// let ci = "token:ci".parse()?;
/// assert_eq!(policy.check(&ci, &Permission::Function("model.run")).unwrap(), "ci");
/// assert!(policy.check(&ci, &Permission::Program("make")).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    rules: Vec<PolicyRule>,
}

/// A rule of a policy, with the clients that it is for.
#[derive(Clone, Debug, PartialEq)]
struct PolicyRule {
    identities: Vec<IdentityPattern>,
    rule: Arc<Rule>,
}

/// Content of a policy file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default, rename = "rule")]
    rules: Vec<Rule>,
}

impl Policy {
    /// Reads a policy file. Blocks shortly.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is no policy.
    pub fn read(file: &Path, transports: &Transports) -> Result<Self, PolicyError> {
        Self::read_if(file, transports, |_| Ok(()))
    }

    /// Reads the policy file of a server that runs as this user. Blocks shortly.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); or other users may change the file.
    pub(super) fn read_trusted(file: &Path, transports: &Transports) -> Result<Self, PolicyError> {
        let user = rustix::process::geteuid().as_raw();
        Self::read_if(file, transports, |metadata| check_owner(file, metadata.uid(), metadata.mode(), user))
    }

    fn read_if(
        file: &Path,
        transports: &Transports,
        check: impl FnOnce(&Metadata) -> Result<(), PolicyError>,
    ) -> Result<Self, PolicyError> {
        let read_error = |source| PolicyError::Read { file: file.to_owned(), source };
        // Of the file that is read, which another one may replace meanwhile.
        let opened = File::open(file).map_err(read_error)?;
        check(&opened.metadata().map_err(read_error)?)?;
        let read = || {
            let mut text = String::new();
            opened.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
            if text.len() as u64 > MAX_FILE_BYTES {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB"));
            }
            Ok(text)
        };
        let text = read().map_err(read_error)?;
        let parsed = Self::parse(&text, transports);
        parsed.map_err(|source| PolicyError::Content { file: file.to_owned(), source: Box::new(source) })
    }

    /// Parses the text of a policy, for a server with these transports.
    ///
    /// # Errors
    ///
    /// The text is not TOML, has an unknown key or a malformed value; a rule has no identity, or
    /// the name of another; a pattern of addresses stands for none; a program is a pattern.
    pub fn parse(text: &str, transports: &Transports) -> Result<Self, PolicyError> {
        let Document { rules } = toml::from_str(text)?;
        let (mut names, mut parsed) = (BTreeSet::new(), Vec::with_capacity(rules.len()));
        for mut rule in rules {
            let name = rule.name.clone();
            if name.is_empty() || !names.insert(name.clone()) {
                return Err(PolicyError::Name { name });
            }
            let identities = mem::take(&mut rule.identities);
            if identities.is_empty() {
                return Err(PolicyError::NoIdentity { rule: name });
            }
            for pattern in rule.forward.iter().chain(&rule.port).chain(&rule.listen) {
                let checked = transports.check_pattern(pattern);
                checked.map_err(|source| PolicyError::Pattern { rule: name.clone(), source })?;
            }
            if let Some(program) = rule.run.iter().find(|program| is_ambiguous_program(program)) {
                return Err(PolicyError::Program { rule: name, program: program.clone() });
            }
            parsed.push(PolicyRule { identities, rule: Arc::new(rule) });
        }
        Ok(Self { rules: parsed })
    }

    /// Returns the number of rules.
    #[must_use]
    pub fn rule_count(&self) -> usize {
        self.rules.len()
    }

    /// Returns the name of a rule that gives a permission to a client, for a server with the
    /// default transports. The settings of a server, which limit every rule, are not considered.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`](rpc_core::ErrorKind::Refused), with the rules for that client.
    pub fn check(&self, identity: &PeerIdentity, permission: &Permission<'_>) -> rpc_core::Result<String> {
        let rights = self.rights(identity, &crate::transports());
        rights.allowing_rule(permission).map(str::to_owned).ok_or_else(|| rights.refusal(permission))
    }

    /// Returns the rights of a client with this identity.
    pub(super) fn rights(&self, identity: &PeerIdentity, transports: &Transports) -> Rights {
        let rules = self.rules.iter().filter(|entry| entry.identities.iter().any(|pattern| pattern.matches(identity)));
        let rules = rules.map(|entry| entry.rule.clone()).collect();
        Rights::new(identity.to_string(), rules, transports.clone())
    }
}

/// Permission bits with which the group or others may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Checks that only root and `user`, which the server runs as, may change a file.
fn check_owner(file: &Path, owner: u32, mode: u32, user: u32) -> Result<(), PolicyError> {
    if owner != 0 && owner != user {
        return Err(PolicyError::Owner { file: file.to_owned(), owner, user });
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(PolicyError::Writable { file: file.to_owned() });
    }
    Ok(())
}

impl std::str::FromStr for Policy {
    type Err = PolicyError;

    /// Parses a policy for a server with the default transports.
    fn from_str(text: &str) -> Result<Self, PolicyError> {
        Self::parse(text, &crate::transports())
    }
}

/// Error of a policy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("cannot read the policy {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file belongs to another user than root and the server's own.
    #[error(
        "the policy {} belongs to the user {owner}, who could give anybody any right: it must belong to root or to \
         the server's own user, {user}",
        file.display()
    )]
    Owner {
        /// The file.
        file: PathBuf,
        /// User that the file belongs to.
        owner: u32,
        /// User that the server runs as.
        user: u32,
    },
    /// The group of the file, or all users, may write to it.
    #[error(
        "the policy {0} may be changed by other users: take that from them by chmod go-w {0}",
        file.display()
    )]
    Writable {
        /// The file.
        file: PathBuf,
    },
    /// The content of the file cannot be used.
    #[error("the policy {} cannot be used{}", file.display(), source.suggestion())]
    Content {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: Box<Self>,
    },
    /// The text is not TOML, has an unknown key, or a malformed value.
    #[error(transparent)]
    Syntax(#[from] toml::de::Error),
    /// A rule has no name, or that of another.
    #[error("each rule has a name of its own, and '{name}' is none")]
    Name {
        /// The name.
        name: String,
    },
    /// A rule is for no identity.
    #[error("the rule '{rule}' is for no client: give identities, such as [\"token:alice\"]")]
    NoIdentity {
        /// Name of the rule.
        rule: String,
    },
    /// A pattern of addresses stands for no address.
    #[error("the rule '{rule}' has a pattern that allows nothing")]
    Pattern {
        /// Name of the rule.
        rule: String,
        /// The reason.
        source: AddressError,
    },
    /// A program is given by a pattern, or with spaces around it.
    #[error(
        "the rule '{rule}' lets clients run '{program}', which names no program: patterns and spaces stand for \
         themselves, so give each name or path letter by letter, or \"any\" for all programs"
    )]
    Program {
        /// Name of the rule.
        rule: String,
        /// The program, as it was given.
        program: String,
    },
}

impl PolicyError {
    /// Returns a hint at the key that was probably meant by an unknown one; else nothing.
    fn suggestion(&self) -> String {
        let Self::Syntax(error) = self else { return String::new() };
        likely_key(error).map(|key| format!("; did you mean '{key}'?")).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_user_of_the_server_may_be_able_to_change_the_file() {
        let check = |owner, mode, user| check_owner(Path::new("p.toml"), owner, mode, user).map_err(|e| e.to_string());
        for (owner, mode, user) in [(0, 0o100_644, 0), (0, 0o100_444, 7), (7, 0o100_600, 7)] {
            assert_eq!(check(owner, mode, user), Ok(()));
        }
        let foreign = check(8, 0o100_600, 7).unwrap_err();
        assert!(foreign.contains("belongs to the user 8") && foreign.contains("own user, 7"), "{foreign}");
        // Root trusts no other user.
        assert!(check(8, 0o100_600, 0).is_err());
        for mode in [0o100_664, 0o100_646, 0o100_622] {
            let writable = check(7, mode, 7).unwrap_err();
            assert!(writable.contains("chmod go-w p.toml"), "{writable}");
        }
    }
}
