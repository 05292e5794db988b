//! `rpc.file.from_cache`, `rpc.file.to_cache`, `rpc.file.cache_limit`: files that stay at the
//! server, so that they are sent once.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use rpc_core::client::Digest;
use rpc_core::{Context, ErrorKind, Registry, Result, RpcError};

use super::cancelled;
use super::files::{CancellableRead, workspace};
use crate::file_cache::FileCache;
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
        .add("rpc.file.to_cache", to_cache);
}

/// Returns the cache of the session's server, and the identity of the client; `None` if there is no
/// cache.
fn cache(context: &Context) -> Option<(Arc<FileCache>, Arc<ClientIdentity>)> {
    context.extension::<FileCache>().zip(context.extension::<ClientIdentity>())
}

fn cache_limit(context: Context) -> u64 {
    let limit = cache(&context).map_or(0, |(cache, _)| cache.limit_bytes());
    // Numbers on the way have a sign.
    limit.min(i64::MAX as u64)
}

fn from_cache(context: Context, digest: String, len: u64, path: String, executable: bool) -> Result<bool> {
    let Some((cache, identity)) = cache(&context) else { return Ok(false) };
    let ClientIdentity(identity) = &*identity;
    let no_digest = |error| RpcError::invalid_argument(format!("the digest of a file: {error}"));
    let digest = digest.parse::<Digest>().map_err(no_digest)?;
    let _open = context.reserve_open_files(FILES_OF_COPY)?;
    let Some(file) = cache.find(identity, &digest, len).map_err(failed)? else { return Ok(false) };
    let mut writer = workspace(&context)?.begin_write(&path, Some(len))?;
    let (mut hasher, mut offset) = (Hasher::new(), 0);
    let write = |piece: &[u8]| {
        hasher.update(piece);
        writer.write_at(offset, piece)?;
        offset += piece.len() as u64;
        Ok(())
    };
    copy(&context, &file, len, write, failed)?;
    if hasher.finish() != digest {
        rpc_core::log_limited!(WARN, %digest, "found a damaged file in the cache of files");
        cache.discard(identity, &digest, &|| context.is_cancelled()).map_err(failed)?;
        return Ok(false);
    }
    writer.set_executable(executable)?;
    writer.commit()?;
    Ok(true)
}

fn to_cache(context: Context, path: String) -> Result<Option<String>> {
    let Some((cache, identity)) = cache(&context) else { return Ok(None) };
    let ClientIdentity(identity) = &*identity;
    let _open = context.reserve_open_files(FILES_OF_COPY)?;
    let is_cancelled = || context.is_cancelled();
    let file = workspace(&context)?.open_read(&path)?;
    let Some(mut writer) = cache.begin(identity, file.len(), &is_cancelled).map_err(failed)? else { return Ok(None) };
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
