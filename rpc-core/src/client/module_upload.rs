//! The client's side of native modules: uploads one that the server lacks, and loads it by its
//! digest.
//!
//! A server that accepts modules keeps them by their SHA-256 and registers the functions
//! `rpc.module.*`; this module calls them. Modules that the server has already are not sent again,
//! and the loaded code is the code that was hashed here, no matter which client has sent it.
//!
//! ```no_run
//! # use bytes::Bytes;
//! # use rpc_core::client::Digest;
//! # use rpc_core::{Result, Session};
//! # fn example(session: &Session, code: Bytes, digest: Digest) -> Result<()> {
//! use rpc_core::client::Modules;
//!
//! let modules = Modules::new(session);
//! modules.upload_bytes(digest, code).wait()?;
//! let scale = modules.load(digest).wait()?.function("scale").wait()?;
//! assert_eq!(scale.call::<f64>((2.0, 0.5)).wait()?, 1.0);
//! # Ok(())
//! # }
//! ```
//!
//! This crate has no cryptography: the caller brings the digest, which `sha256sum` prints and
//! `rpc_server::modules::hash` computes.

use std::fmt;
use std::io::Read;
use std::str::FromStr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::files::{Pieces, Reading, SentPieces, call_by_name, functions, send_pieces};
use crate::client::references::{RemoteModule, RemoteObject};
use crate::client::session::Session;
use crate::error::Result;
use crate::session::Lane;

/// SHA-256 of a module's file, by which servers keep it. Written as 64 hexadecimal digits.
///
/// ```
/// use rpc_core::client::Digest;
///
/// let upper = "E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855";
/// let digest: Digest = upper.parse()?;
/// assert!(digest.to_string().starts_with("e3b0c442"));
/// assert_eq!(Digest::from_module_path(&digest.module_path()), Some(Ok(digest)));
/// # Ok::<(), rpc_core::client::DigestError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

/// Error for a text that is no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a SHA-256 has 64 hexadecimal digits, as sha256sum prints it")]
#[non_exhaustive]
pub struct DigestError;

impl Digest {
    /// Length of a digest in bytes.
    pub const LEN: usize = 32;

    /// Prefix of a digest in the path of a module.
    const SCHEME: &str = "sha256:";

    /// Wraps bytes that are a SHA-256 already.
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    /// Returns the path by which [`Session::load_module`] loads the module from the server's store:
    /// `sha256:` and the digits.
    pub fn module_path(&self) -> String {
        format!("{}{self}", Self::SCHEME)
    }

    /// Returns the digest in a path of that form; `None` for any other path.
    pub fn from_module_path(path: &str) -> Option<std::result::Result<Self, DigestError>> {
        path.strip_prefix(Self::SCHEME).map(str::parse)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> std::result::Result<Self, DigestError> {
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(DigestError);
        let mut bytes = [0; Self::LEN];
        if text.len() != 2 * Self::LEN {
            return Err(DigestError);
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            // Two digits of four bits each.
            *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> std::result::Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// Modules in the store of a session's server.
///
/// All operations fail with [`ErrorKind::Refused`](crate::ErrorKind::Refused) if the server accepts
/// no modules, or not this one; and with [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if it
/// does not support modules. Every operation does nothing until it is awaited or waited for.
#[derive(Clone, Debug)]
pub struct Modules {
    session: Session,
    lane: Lane,
}

impl Modules {
    /// Returns the modules of `session`'s server.
    pub fn new(session: &Session) -> Self {
        Self { session: session.clone(), lane: Lane::DEFAULT }
    }

    /// Moves all operations to `lane`. The default is [`Lane::DEFAULT`].
    #[must_use]
    pub fn lane(mut self, lane: Lane) -> Self {
        self.lane = lane;
        self
    }

    /// Returns true if the server has the module.
    pub fn has(&self, digest: Digest) -> Action<bool> {
        let session = self.session.clone();
        let find = async move |options: Options<'static>| find(&session, digest, &options).await;
        ScopedAction::steps(find).lane(self.lane)
    }

    /// Sends the `len` bytes of `source`, whose SHA-256 is `digest`, unless the server has them.
    /// The result is true if they were sent. The server keeps nothing until all bytes have arrived
    /// and match the length and digest.
    ///
    /// `source` is read on the thread that polls. If it may block for long, call
    /// [`wait`](ScopedAction::wait) on a separate thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded) if the module is too large or
    /// the server has no room; [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if
    /// `source` has another length or digest; [`ErrorKind::Io`](crate::ErrorKind::Io) if it cannot
    /// be read.
    pub fn upload<'a>(&self, digest: Digest, len: u64, source: impl Read + Send + 'a) -> ScopedAction<'a, bool> {
        self.upload_pieces(digest, len, Reading { source })
    }

    /// Uploads like [`upload`](Self::upload), from memory, without copying it.
    pub fn upload_bytes(&self, digest: Digest, data: impl Into<Bytes>) -> Action<bool> {
        let data = data.into();
        self.upload_pieces(digest, data.len() as u64, data)
    }

    /// Makes the server store a file of its own as a module: one in the session's workspace, or at
    /// an absolute path.
    ///
    /// # Errors
    ///
    /// Errors in the file, and the limits of [`upload`](Self::upload).
    pub fn import(&self, path: &str) -> Action<Digest> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let digest: String = call_by_name(&session, &options, "rpc.module.import", (path,)).await?;
            digest.parse().map_err(|error: DigestError| {
                crate::RpcError::new(crate::ErrorKind::Protocol, format!("rpc.module.import: {error}"))
            })
        });
        action.lane(self.lane)
    }

    /// Loads a module that the server has.
    pub fn load(&self, digest: Digest) -> Action<RemoteModule> {
        self.session.load_module(&digest.module_path()).lane(self.lane)
    }

    /// Returns the functions of a module of any kind, with their signatures.
    pub fn functions(&self, module: &RemoteModule) -> Action<Vec<(String, String)>> {
        let (session, module) = (self.session.clone(), module.clone());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            call_by_name(&session, &options, "rpc.module.functions", (&module,)).await
        });
        action.lane(self.lane)
    }

    fn upload_pieces<'a>(&self, digest: Digest, len: u64, source: impl Pieces + 'a) -> ScopedAction<'a, bool> {
        let session = self.session.clone();
        let action = ScopedAction::steps(async move |options| send(&session, digest, len, source, options).await);
        action.lane(self.lane)
    }
}

/// Returns true if the module was sent, and false if the server has it already.
async fn send(
    session: &Session,
    digest: Digest,
    len: u64,
    source: impl Pieces,
    mut options: Options<'_>,
) -> Result<bool> {
    if find(session, digest, &options).await? {
        return Ok(false);
    }
    let names = ["rpc.module.begin_upload", "rpc.module.write", "rpc.module.commit"];
    let [begin, write, commit] = functions(session, &options, names).await?;
    // Dropped on every error below, so that nothing of it remains at the server.
    let upload: RemoteObject = options.apply(begin.call((digest.to_string(), len))).await?;
    // The server takes the bytes of a module in their order.
    send_pieces(SentPieces::of_writes_in_order(), &write, &upload, 0, source, &mut options).await?;
    options.apply(commit.call::<()>((&upload,))).await?;
    Ok(true)
}

/// Returns true if the server has the module.
async fn find(session: &Session, digest: Digest, options: &Options<'_>) -> Result<bool> {
    call_by_name(session, options, "rpc.module.find", (digest.to_string(),)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_64_hexadecimal_digits_and_nothing_else() {
        let text = "0123456789abcdef".repeat(4);
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest.to_string(), text);
        assert_eq!(digest.as_bytes()[..3], [0x01, 0x23, 0x45]);
        let wrong =
            [&text[1..], &format!("{text}0"), "", &"g".repeat(64), &"ä".repeat(32), &format!(" {}", &text[1..])];
        for wrong in wrong {
            assert_eq!(wrong.parse::<Digest>(), Err(DigestError), "{wrong:?}");
        }
    }

    #[test]
    fn only_paths_with_the_scheme_name_digests() {
        assert_eq!(Digest::from_module_path("kernels.so"), None);
        assert_eq!(Digest::from_module_path("sha256:kernels.so"), Some(Err(DigestError)));
    }
}
