//! The policy of a running server, which is read again at SIGHUP.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;
use rpc_transports::{Authorization, Authorizer, PeerIdentity, Transports};

use super::document::{Policy, PolicyError};

/// Policy file of a server, and the policy for new sessions.
#[derive(Debug)]
pub(crate) struct PolicySource {
    file: PathBuf,
    transports: Transports,
    current: RwLock<Arc<Policy>>,
}

impl PolicySource {
    /// Reads the policy. Blocks shortly.
    ///
    /// # Errors
    ///
    /// As [`Policy::read_trusted`].
    pub(crate) fn open(file: PathBuf, transports: Transports) -> Result<Arc<Self>, PolicyError> {
        let current = RwLock::new(Arc::new(Policy::read_trusted(&file, &transports)?));
        Ok(Arc::new(Self { file, transports, current }))
    }

    /// Reads the file again, and changes nothing yet. Blocks shortly.
    ///
    /// # Errors
    ///
    /// As [`Policy::read_trusted`].
    pub(crate) fn read(&self) -> Result<Policy, PolicyError> {
        Policy::read_trusted(&self.file, &self.transports)
    }

    /// Sets the policy for later sessions. Open sessions keep the rights that they began with.
    pub(crate) fn set(&self, policy: Policy) {
        *self.current.write() = Arc::new(policy);
    }
}

impl Authorizer for PolicySource {
    fn authorize(&self, identity: &PeerIdentity) -> Authorization {
        let policy = self.current.read().clone();
        let rights = policy.rights(identity, &self.transports);
        Authorization { max_sessions: rights.max_sessions(), access: Arc::new(rights) }
    }
}
