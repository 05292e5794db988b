//! `rpc.file.from_cache`, `rpc.file.to_cache`, the same for tensors, and `rpc.file.cache_limit`:
//! files and contents of tensors that stay at the server, so that they are sent once.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use rpc_core::client::Digest;
use rpc_core::limits::OpenFileLease;
use rpc_core::{Context, ErrorKind, Registry, Result, RpcError, TensorView, TensorViewMut};

use super::cancelled;
use super::files::{CancellableRead, workspace};
use crate::file_cache::FileCache;
use crate::handed_down;
use crate::modules::{FILE_PIECE, Hasher};
use crate::policy::ClientIdentity;
use crate::workspace::WorkspaceError;

/// Descriptors of a copy: a file of the workspace, one of the cache, and the cache's lock with its
/// count; or the workspace's file, the lock, and two folders in which a search looks for room.
const FILES_OF_COPY: u64 = 4;

pub(super) fn register(registry: &Registry) {
    registry
        .add("rpc.file.cache_limit", cache_limit)
        .add("rpc.file.from_cache", from_cache)
        .add("rpc.file.to_cache", to_cache)
        .add("rpc.file.tensor_from_cache", tensor_from_cache)
        .add("rpc.file.tensor_to_cache", tensor_to_cache);
}

/// Returns the cache of the session's server, and the identity of the client; `None` if there is no
/// cache.
fn cache(context: &Context) -> Option<(Arc<FileCache>, Arc<ClientIdentity>)> {
    // The session of a worker process has the cache of the server that has started it.
    context.extension::<FileCache>().zip(context.extension::<ClientIdentity>()).or_else(handed_down::file_cache)
}

fn cache_limit(context: Context) -> u64 {
    let limit = cache(&context).map_or(0, |(cache, _)| cache.limit_bytes());
    // Numbers on the way have a sign.
    limit.min(i64::MAX as u64)
}

fn from_cache(context: Context, digest: String, len: u64, path: String, executable: bool) -> Result<bool> {
    let Some(source) = CachedFile::find(&context, &digest, len)? else { return Ok(false) };
    let mut writer = workspace(&context)?.begin_write(&path, Some(len))?;
    if !source.copy(|offset, piece| Ok(writer.write_at(offset, piece)?))? {
        return Ok(false);
    }
    writer.set_executable(executable)?;
    writer.commit()?;
    Ok(true)
}

fn tensor_from_cache(context: Context, digest: String, to: TensorViewMut) -> Result<bool> {
    let (tensor, mut borrow) = to.into_parts();
    let len = tensor.size_bytes();
    let start = tensor.byte_range(0, len)?.start;
    let Some(source) = CachedFile::find(&context, &digest, len)? else { return Ok(false) };
    source.copy(|offset, piece| borrow.copy_in(start + offset, piece))
}

/// A file of the cache, to be copied.
struct CachedFile<'a> {
    context: &'a Context,
    cache: Arc<FileCache>,
    identity: Arc<ClientIdentity>,
    digest: Digest,
    file: File,
    len: u64,
    _open: OpenFileLease,
}

impl<'a> CachedFile<'a> {
    /// Opens the client's file of `len` bytes with this digest. `None` if the cache does not have
    /// it, or there is none.
    fn find(context: &'a Context, digest: &str, len: u64) -> Result<Option<Self>> {
        let Some((cache, identity)) = cache(context) else { return Ok(None) };
        let no_digest = |error| RpcError::invalid_argument(format!("the digest of a file: {error}"));
        let digest = digest.parse::<Digest>().map_err(no_digest)?;
        let open = context.reserve_open_files(FILES_OF_COPY)?;
        let found = cache.find(&identity.0, &digest, len).map_err(failed)?;
        Ok(found.map(|file| Self { context, cache, identity, digest, file, len, _open: open }))
    }

    /// Calls `write` with the content, piece by piece. Returns true if the content has the digest.
    /// A file that is damaged is removed from the cache.
    fn copy(&self, mut write: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<bool> {
        let (mut hasher, mut offset) = (Hasher::new(), 0);
        let write = |piece: &[u8]| {
            hasher.update(piece);
            write(offset, piece)?;
            offset += piece.len() as u64;
            Ok(())
        };
        copy(self.context, &self.file, self.len, write, failed)?;
        let is_whole = hasher.finish() == self.digest;
        if !is_whole {
            rpc_core::log_limited!(WARN, digest = %self.digest, "found a damaged file in the cache of files");
            let is_cancelled = || self.context.is_cancelled();
            self.cache.discard(&self.identity.0, &self.digest, &is_cancelled).map_err(failed)?;
        }
        Ok(is_whole)
    }
}

fn to_cache(context: Context, path: String) -> Result<Option<String>> {
    let Some((cache, identity)) = cache(&context) else { return Ok(None) };
    let _open = context.reserve_open_files(FILES_OF_COPY)?;
    let is_cancelled = || context.is_cancelled();
    let file = workspace(&context)?.open_read(&path)?;
    let Some(mut writer) = cache.begin(&identity.0, file.len(), &is_cancelled).map_err(failed)? else {
        return Ok(None);
    };
    let mut copied = 0;
    let write = |piece: &[u8]| {
        copied += piece.len() as u64;
        writer.write(piece).map_err(failed)
    };
    copy(&context, file.as_file(), file.len(), write, |source| {
        WorkspaceError::Io { path: path.clone(), source }.into()
    })?;
    if copied != file.len() {
        return Err(RpcError::new(ErrorKind::Io, format!("'{path}' changed while it was copied")));
    }
    Ok(writer.commit(&is_cancelled).map_err(failed)?.map(|digest| digest.to_string()))
}

fn tensor_to_cache(context: Context, from: TensorView) -> Result<Option<String>> {
    let range = from.tensor().byte_range(0, from.tensor().size_bytes())?;
    let Some((cache, identity)) = cache(&context) else { return Ok(None) };
    let _open = context.reserve_open_files(FILES_OF_COPY)?;
    let is_cancelled = || context.is_cancelled();
    let len = range.end - range.start;
    let Some(mut writer) = cache.begin(&identity.0, len, &is_cancelled).map_err(failed)? else { return Ok(None) };
    let piece_len = FILE_PIECE.min(usize::try_from(len).unwrap_or(FILE_PIECE));
    let _staged = context.stage(piece_len as u64)?;
    let mut piece = vec![0; piece_len];
    for at in range.clone().step_by(piece_len.max(1)) {
        if is_cancelled() {
            return Err(cancelled());
        }
        let count = usize::try_from(range.end - at).map_or(piece_len, |left| left.min(piece_len));
        from.guard().copy_out(at, &mut piece[..count])?;
        writer.write(&piece[..count]).map_err(failed)?;
    }
    Ok(writer.commit(&is_cancelled).map_err(failed)?.map(|digest| digest.to_string()))
}

/// Calls `write` with the first `len` bytes of a file, or with all if it has fewer, piece by piece.
/// `unreadable` gives an error of the file its meaning.
fn copy(
    context: &Context,
    file: &File,
    len: u64,
    mut write: impl FnMut(&[u8]) -> Result<()>,
    unreadable: impl Fn(io::Error) -> RpcError,
) -> Result<()> {
    let piece_len = FILE_PIECE.min(usize::try_from(len).unwrap_or(FILE_PIECE));
    let _staged = context.stage(piece_len as u64)?;
    let mut piece = vec![0; piece_len];
    let mut source = CancellableRead::new(context, file).take(len);
    loop {
        match source.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => write(&piece[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if context.is_cancelled() => return Err(cancelled()),
            Err(error) => return Err(unreadable(error)),
        }
    }
}

/// Returns the error of a cache whose file system failed, and logs it: the operator has to know of
/// a full disk.
fn failed(error: io::Error) -> RpcError {
    rpc_core::log_limited!(WARN, %error, "the file system of the cache of files failed");
    RpcError::new(ErrorKind::Io, format!("the server's cache of files failed: {error}"))
}
