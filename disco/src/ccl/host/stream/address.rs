//! Addresses at which ranks listen for the data of others, and the key under which they connect.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

#[cfg(feature = "mpi")]
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::RpcError;
use serde::{Deserialize, Serialize};

/// Address at which a rank listens for the data of others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Address {
    /// A TCP address.
    Tcp(SocketAddr),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Secret of the ranks of one session: their data connections are made under it. `Debug` does not
/// show it.
#[derive(Clone, Serialize, Deserialize)]
pub struct SessionKey(pub(super) [u8; 32]);

impl SessionKey {
    /// Makes a key of 256 random bits.
    ///
    /// # Errors
    ///
    /// The system has no random numbers.
    pub fn generate() -> Result<Self, RpcError> {
        random().map(Self)
    }

    /// Returns the bits.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

#[cfg(feature = "mpi")]
impl SessionKey {
    /// Returns a number that follows from the key and the epoch, and tells nothing of the key.
    pub(in super::super) fn digest(&self, epoch: u64) -> u64 {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        let tag = hmac::sign(&key, &[b"disco data 1: epoch".as_slice(), &epoch.to_le_bytes()].concat());
        tag.as_ref().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// Returns 256 random bits.
pub(super) fn random() -> Result<[u8; 32], RpcError> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| RpcError::internal("the system gives no random numbers"))?;
    Ok(bytes)
}
