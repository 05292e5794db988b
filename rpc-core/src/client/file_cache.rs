//! The server's cache of files, from the client's side: a file, or the content of a tensor, that
//! the client has sent before is copied at the server, and not sent again.
//!
//! A server with a cache registers the functions `rpc.file.from_cache`, `rpc.file.to_cache` and
//! `rpc.file.cache_limit`; this module calls them. It keeps files by the SHA-256 that it has
//! computed itself, for each identity of its clients apart. This crate has no cryptography: the
//! caller brings the digests of its own files, as `sha256sum` prints them and
//! `rpc_server::modules::hash` computes them.

use std::fmt;
use std::io::Read;

use bytes::Bytes;

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::files::{Reading, functions, parse_digest, send};
use crate::client::module_upload::Digest;
use crate::client::references::{RemoteFunction, RemoteTensor};
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::Lane;

/// The cache of a session's server, in which the client's files stay after the session; opened by
/// [`Files::cache`](super::Files::cache).
///
/// Every operation does nothing until it is awaited or [waited for](ScopedAction::wait).
#[derive(Clone)]
pub struct FileCache {
    session: Session,
    lane: Lane,
    limit: u64,
    from_cache: RemoteFunction,
    to_cache: RemoteFunction,
}

impl FileCache {
    /// Opens the cache; `None` if the server has none, or not for this client, or cannot tell.
    pub(crate) async fn open(session: &Session, lane: Lane, options: &Options<'_>) -> Result<Option<Self>> {
        let names = ["rpc.file.cache_limit", "rpc.file.from_cache", "rpc.file.to_cache"];
        let [cache_limit, from_cache, to_cache] = match functions(session, options, names).await {
            // A server that is too old, or whose operator does not let the client use it.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Refused) => return Ok(None),
            functions => functions?,
        };
        let limit = match options.apply(cache_limit.call::<u64>(())).await {
            Err(error) if is_of_caller_or_session(&error) => return Err(error),
            limit => limit.unwrap_or(0),
        };
        Ok((limit > 0).then(|| Self { session: session.clone(), lane, limit, from_cache, to_cache }))
    }

    /// Returns the bytes that the cache may hold. A file that is longer is not kept.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Copies the file of `len` bytes with this digest from the cache to `path` in the workspace.
    /// The result is false if the cache does not have it. The server verifies the digest while it
    /// copies.
    ///
    /// # Errors
    ///
    /// As [`Files::put_sized`](super::Files::put_sized).
    pub fn copy_to(&self, path: &str, digest: Digest, len: u64, executable: bool) -> Action<bool> {
        self.from_cache.call((digest.to_string(), len, path, executable)).lane(self.lane)
    }

    /// Copies the file `path` of the workspace to the cache. The result is the digest that the
    /// server has computed; `None` if the file is too long, or the cache has no room for it now.
    ///
    /// # Errors
    ///
    /// As [`Files::get`](super::Files::get).
    pub fn add(&self, path: &str) -> Action<Option<Digest>> {
        let (this, path) = (self.clone(), path.to_owned());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let digest = options.apply(this.to_cache.call::<Option<String>>((path,))).await?;
            digest.as_deref().map(parse_digest).transpose()
        });
        action.lane(self.lane)
    }

    /// Brings the `len` bytes of `source`, whose SHA-256 is `digest`, to the file `path` of the
    /// workspace: from the cache, or else by sending them, after which the cache has them. The
    /// result is true if they were sent.
    ///
    /// Whatever keeps the server from using its cache, the file is sent. `source` is read on the
    /// thread that polls. If it may block for long, call [`wait`](ScopedAction::wait) on a separate
    /// thread.
    ///
    /// # Errors
    ///
    /// As [`Files::put_sized`](super::Files::put_sized).
    pub fn put<'a>(
        &self,
        path: &str,
        digest: Digest,
        len: u64,
        executable: bool,
        source: impl Read + Send + 'a,
    ) -> ScopedAction<'a, bool> {
        let (this, path) = (self.clone(), path.to_owned());
        let action = ScopedAction::steps(async move |mut options: Options<'a>| {
            let copy = this.from_cache.call::<bool>((digest.to_string(), len, path.as_str(), executable));
            // An error that is not of the cache alone is met by the sending, too.
            if options.apply(copy).await.unwrap_or(false) {
                options.report(len);
                return Ok(false);
            }
            send(&this.session, &path, Some(len), Reading { source }, &mut options).await?;
            if executable {
                let [set] = functions(&this.session, &options, ["rpc.file.set_executable"]).await?;
                options.apply(set.call::<()>((path.as_str(), true))).await?;
            }
            // The file is where it should be. Without the cache it is sent again the next time.
            let _ = options.apply(this.to_cache.call::<Option<String>>((path.as_str(),))).await;
            Ok(true)
        });
        action.lane(self.lane)
    }

    /// Copies the content with this SHA-256 from the cache into a densely packed tensor, on any
    /// device. The result is false if the cache does not have it, in which case the content of the
    /// tensor is unspecified. The server verifies the digest while it copies.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if the server keeps files only, and those of a call.
    pub fn fill(&self, tensor: &RemoteTensor, digest: Digest) -> Action<bool> {
        let (session, tensor) = (self.session.clone(), tensor.clone());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let [fill] = functions(&session, &options, ["rpc.file.tensor_from_cache"]).await?;
            options.apply(fill.call::<bool>((digest.to_string(), &tensor))).await
        });
        action.lane(self.lane)
    }

    /// Copies the content of a densely packed tensor to the cache. The result is the digest that
    /// the server has computed; `None` if the content is too long, or the cache has no room for it
    /// now.
    ///
    /// # Errors
    ///
    /// As [`fill`](Self::fill).
    pub fn add_tensor(&self, tensor: &RemoteTensor) -> Action<Option<Digest>> {
        let (session, tensor) = (self.session.clone(), tensor.clone());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let [keep] = functions(&session, &options, ["rpc.file.tensor_to_cache"]).await?;
            let digest = options.apply(keep.call::<Option<String>>((&tensor,))).await?;
            digest.as_deref().map(parse_digest).transpose()
        });
        action.lane(self.lane)
    }

    /// Brings `data`, whose SHA-256 is `digest`, into a densely packed tensor of the same size:
    /// from the cache, or else by sending it, after which the cache has it. The result is true if
    /// it was sent.
    ///
    /// Whatever keeps the server from using its cache, the data is sent.
    ///
    /// # Errors
    ///
    /// As [`Session::copy_to_remote`].
    pub fn upload<'a>(&self, tensor: &RemoteTensor, digest: Digest, data: impl Into<Bytes>) -> ScopedAction<'a, bool> {
        let (this, tensor, data) = (self.clone(), tensor.clone(), data.into());
        let lane = self.lane;
        let action = ScopedAction::steps(async move |mut options: Options<'a>| {
            let size = tensor.size_bytes();
            if size != data.len() as u64 {
                let len = data.len();
                return Err(RpcError::invalid_argument(format!("{len} bytes for a tensor of {size}")));
            }
            // An error that is not of the cache alone is met by the sending, too.
            if options.apply(this.fill(&tensor, digest)).await.unwrap_or(false) {
                options.report(size);
                return Ok(false);
            }
            options.apply(this.session.copy_to_remote(&tensor, data)).await?;
            options.report(size);
            // The data is where it should be. Without the cache it is sent again the next time.
            let _ = options.apply(this.add_tensor(&tensor)).await;
            Ok(true)
        });
        action.lane(lane)
    }
}

/// Returns true for an error that calls beside those of the cache have, too.
fn is_of_caller_or_session(error: &RpcError) -> bool {
    let is_refused = error.kind() == ErrorKind::Refused;
    let is_ended = matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::DeadlineExceeded | ErrorKind::Draining);
    is_ended || error.ends_session() && !is_refused
}

impl fmt::Debug for FileCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileCache").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::client::Files;
    use crate::{Context, LocalSession, Registry, Shared, TensorView, TensorViewMut};

    const DIGEST: Digest = Digest::from_bytes([7; Digest::LEN]);

    fn session(registry: Registry) -> Session {
        Session::new(LocalSession::new(registry))
    }

    #[test]
    fn a_server_without_the_functions_or_the_room_has_no_cache() {
        assert!(Files::new(&session(Registry::new())).cache().wait().unwrap().is_none());
        let registry = Registry::new();
        registry
            .add("rpc.file.cache_limit", || 0_u64)
            .add("rpc.file.from_cache", || true)
            .add("rpc.file.to_cache", || ());
        assert!(Files::new(&session(registry)).cache().wait().unwrap().is_none());
    }

    #[test]
    fn a_server_that_cannot_tell_has_no_cache_and_a_session_that_has_ended_is_told() {
        for (kind, is_told) in [
            (ErrorKind::LimitExceeded, false),
            (ErrorKind::Application, false),
            (ErrorKind::Refused, false),
            (ErrorKind::PeerLost, true),
            (ErrorKind::DeadlineExceeded, true),
        ] {
            let registry = Registry::new();
            registry
                .add("rpc.file.cache_limit", move || -> Result<u64> { Err(RpcError::new(kind, "of a test")) })
                .add("rpc.file.from_cache", || true)
                .add("rpc.file.to_cache", || ());
            match Files::new(&session(registry)).cache().wait() {
                Err(error) => assert!(is_told && error.kind() == kind, "{error}"),
                Ok(cache) => assert!(!is_told && cache.is_none(), "{kind:?}"),
            }
        }
    }

    #[test]
    fn a_tensor_is_filled_by_a_server_that_keeps_no_tensors_or_fails_to() {
        for has_functions in [false, true] {
            let registry = Registry::new();
            registry
                .add("rpc.file.cache_limit", || 10_u64)
                .add("rpc.file.from_cache", || true)
                .add("rpc.file.to_cache", || ());
            if has_functions {
                let failed = || RpcError::new(ErrorKind::Io, "the disk is full");
                let fill = move |_: String, mut to: TensorViewMut| -> Result<bool> {
                    to.bytes_mut()?.fill(9);
                    Err(failed())
                };
                let keep = move |_: TensorView| -> Result<Option<String>> { Err(failed()) };
                registry.add("rpc.file.tensor_from_cache", fill).add("rpc.file.tensor_to_cache", keep);
            }
            let session = session(registry);
            let cache = Files::new(&session).cache().wait().unwrap().unwrap();
            let tensor = session.upload(&[4], &[0_u8; 4]).wait().unwrap();
            assert!(cache.upload(&tensor, DIGEST, vec![1, 2, 3, 4]).wait().unwrap());
            assert_eq!(session.download::<u8>(&tensor).wait().unwrap(), [1, 2, 3, 4]);
            let kind = if has_functions { ErrorKind::Io } else { ErrorKind::NotFound };
            assert_eq!(cache.fill(&tensor, DIGEST).wait().unwrap_err().kind(), kind);
            assert_eq!(cache.add_tensor(&tensor).wait().unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn a_file_is_sent_whatever_is_wrong_with_the_cache() {
        struct Writer;

        for takes in [true, false] {
            let registry = Registry::new();
            let failed = || RpcError::new(ErrorKind::Io, "the disk is full");
            registry
                .add("rpc.file.cache_limit", || 10_u64)
                .add("rpc.file.from_cache", move |_: String, _: u64, _: String, _: bool| -> Result<bool> {
                    if takes { Ok(true) } else { Err(failed()) }
                })
                .add("rpc.file.to_cache", move |_: String| -> Result<Option<String>> { Err(failed()) })
                .add("rpc.file.begin_write", |_: Context, _: String, _: u64| Shared(Arc::new(Writer)))
                .add("rpc.file.write", |_: Shared<Writer>, _: u64, _: bytes::Bytes| ())
                .add("rpc.file.commit", |_: Shared<Writer>| ())
                .add("rpc.file.set_executable", |_: String, _: bool| ());
            let cache = Files::new(&session(registry)).cache().wait().unwrap().unwrap();
            assert_eq!(cache.limit(), 10);
            let mut done = 0;
            let put = cache.put("path", DIGEST, 4, true, &b"data"[..]).progress(|bytes| done = bytes);
            assert_eq!(put.wait().unwrap(), !takes);
            assert_eq!(done, 4);
            assert_eq!(cache.add("path").wait().unwrap_err().kind(), ErrorKind::Io);
        }
    }
}
