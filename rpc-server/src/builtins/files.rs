//! `rpc.file.*`: files of the session's workspace, in pieces.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use rpc_core::client::FileEntry;
use rpc_core::limits::OpenFileLease;
use rpc_core::{Context, ErrorKind, Packed, Registry, Result, RpcError, Shared};

use super::cancelled;
use crate::modules::hash;
use crate::server::session_workspace::SessionWorkspace;
use crate::workspace::{Entry, FileReader, FileWriter, Workspace, WorkspaceError};

/// Maximum length of one `rpc.file.read` in bytes: several of the pieces that
/// [`rpc_core::client::Files`] asks for, and not enough to make the server reserve much.
pub const MAX_READ_BYTES: u64 = 4 << 20;

/// A file that counts against the open files of its session.
pub(super) struct OpenFile<T> {
    pub(super) file: T,
    pub(super) _open: OpenFileLease,
}

/// Object of a writer; empty after a commit or an abort.
struct Writer(Mutex<Option<OpenFile<FileWriter>>>);

impl Writer {
    /// Locks the writer. A write that panicked leaves an incomplete file, which is consistent.
    fn lock(&self) -> MutexGuard<'_, Option<OpenFile<FileWriter>>> {
        self.0.lock()
    }

    fn take(&self) -> Result<OpenFile<FileWriter>> {
        self.lock().take().ok_or_else(over)
    }
}

pub(super) fn register(registry: &Registry) {
    registry
        .add("rpc.file.begin_write", |context: Context, path: String, len: Option<u64>| -> Result<_> {
            let _open = context.reserve_open_files(1)?;
            let file = workspace(&context)?.begin_write(&path, len)?;
            Ok(Shared(Arc::new(Writer(Mutex::new(Some(OpenFile { file, _open }))))))
        })
        .add("rpc.file.resume_write", |context: Context, path: String, len: u64| -> Result<_> {
            let _open = context.reserve_open_files(1)?;
            let file = workspace(&context)?.resume_write(&path, len)?;
            let part_len = file.len();
            let digest = digest(&context, file.as_file(), part_len, &path)?;
            let writer = Writer(Mutex::new(Some(OpenFile { file, _open })));
            Ok((Shared(Arc::new(writer)), part_len, digest))
        })
        .add("rpc.file.write", |Shared(writer): Shared<Writer>, offset: u64, data: Bytes| -> Result<()> {
            Ok(writer.lock().as_mut().ok_or_else(over)?.file.write_at(offset, &data)?)
        })
        .add("rpc.file.commit", |Shared(writer): Shared<Writer>| -> Result<()> { Ok(writer.take()?.file.commit()?) })
        .add("rpc.file.abort", |Shared(writer): Shared<Writer>| -> Result<()> {
            writer.take()?.file.abort();
            Ok(())
        })
        .add("rpc.file.open", |context: Context, path: String| -> Result<_> {
            let _open = context.reserve_open_files(1)?;
            let file = workspace(&context)?.open_read(&path)?;
            let len = file.len();
            Ok((Shared(Arc::new(OpenFile { file, _open })), len))
        })
        .add("rpc.file.read", read)
        .add("rpc.file.ls", |context: Context, folder: String| list(&context, &folder))
        .add("rpc.file.rm", |context: Context, path: String| -> Result<()> { Ok(workspace(&context)?.remove(&path)?) })
        .add("rpc.file.set_executable", |context: Context, path: String, executable: bool| -> Result<()> {
            Ok(workspace(&context)?.set_executable(&path, executable)?)
        })
        .add("rpc.file.folders", |context: Context| list_folders(&context))
        .add("rpc.file.create_folder", |context: Context, path: String| -> Result<()> {
            Ok(workspace(&context)?.create_folder(&path)?)
        })
        .add("rpc.file.path", |context: Context, path: String| -> Result<String> {
            let path = workspace(&context)?.absolute(&path)?;
            path.into_os_string().into_string().map_err(|_| RpcError::unsupported("the path is not UTF-8"))
        })
        .add("rpc.file.digest", |context: Context, path: String| -> Result<String> {
            let _open = context.reserve_open_files(1)?;
            let file = workspace(&context)?.open_read(&path)?;
            digest(&context, file.as_file(), u64::MAX, &path)
        })
        .add("rpc.file.prefix_digest", |context: Context, Shared(reader): Shared<OpenFile<FileReader>>, len: u64| {
            if len > reader.file.len() {
                let has = reader.file.len();
                return Err(RpcError::invalid_argument(format!("the file has {has} bytes, and not {len}")));
            }
            digest(&context, reader.file.as_file(), len, "an open file")
        });
}

/// Returns the SHA-256 of the first `len` bytes of a file, or of all if it has fewer.
fn digest(context: &Context, file: &File, len: u64, path: &str) -> Result<String> {
    match hash(CancellableRead::new(context, file).take(len)) {
        Ok((digest, _)) => Ok(digest.to_string()),
        Err(_) if context.is_cancelled() => Err(cancelled()),
        Err(source) => Err(WorkspaceError::Io { path: path.to_owned(), source }.into()),
    }
}

/// Reader of a file from its beginning. Fails once no caller waits any more.
pub(super) struct CancellableRead<'a> {
    file: &'a File,
    offset: u64,
    context: &'a Context,
}

impl<'a> CancellableRead<'a> {
    pub(super) fn new(context: &'a Context, file: &'a File) -> Self {
        Self { file, offset: 0, context }
    }
}

impl io::Read for CancellableRead<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.context.is_cancelled() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

fn read(context: Context, Shared(reader): Shared<OpenFile<FileReader>>, offset: u64, len: u64) -> Result<Bytes> {
    if len > MAX_READ_BYTES {
        return Err(RpcError::invalid_argument(format!(
            "{len} bytes are more than one read gives, at most {MAX_READ_BYTES}"
        )));
    }
    // No memory is reserved for bytes beyond the end.
    let len = len.min(reader.file.len().saturating_sub(offset));
    let _staged = context.stage(len)?;
    let mut buffer = BytesMut::zeroed(len as usize);
    let filled = reader.file.read_at(offset, &mut buffer)?;
    buffer.truncate(filled);
    Ok(buffer.freeze())
}

/// Bytes of a listing that are counted together.
const LIST_STEP: u64 = 64 << 10;

fn list(context: &Context, folder: &str) -> Result<Packed> {
    let mut count = listing_memory(context)?;
    let entries = workspace(context)?.list_counted(folder, &mut count)?;
    Packed::encode(&entries.into_iter().map(listed).collect::<Vec<_>>())
}

fn list_folders(context: &Context) -> Result<Packed> {
    let mut count = listing_memory(context)?;
    Packed::encode(&workspace(context)?.list_folders_counted(&mut count)?)
}

/// Returns a counter of the memory of a listing, by the lengths of its names in bytes. The memory
/// is counted until it is dropped.
fn listing_memory(context: &Context) -> Result<impl FnMut(usize) -> Result<()>> {
    let mut staged = context.stage(0)?;
    let (mut counted, mut held) = (0, 0);
    Ok(move |name_bytes| {
        // The names are there as entries, and then as what is packed.
        held += 2 * (name_bytes + size_of::<Entry>()) as u64;
        if held > counted {
            staged.grow(LIST_STEP)?;
            counted += LIST_STEP;
        }
        Ok(())
    })
}

/// Returns the workspace of the session.
pub(crate) fn workspace(context: &Context) -> Result<Workspace> {
    let files = context.workspace().ok_or_else(|| RpcError::unsupported("this session has no workspace for files"))?;
    let files = files.as_any();
    if let Some(workspace) = files.downcast_ref::<Workspace>() {
        Ok(workspace.clone())
    } else if let Some(workspace) = files.downcast_ref::<SessionWorkspace>() {
        workspace.open()
    } else {
        Err(RpcError::unsupported("the workspace of this session is of another kind, and exchanges no files"))
    }
}

fn listed(entry: Entry) -> FileEntry {
    let Entry { name, size, modified, executable } = entry;
    FileEntry { name, size, modified, executable }
}

fn over() -> RpcError {
    RpcError::invalid_argument("this file was committed or aborted already")
}

impl From<WorkspaceError> for RpcError {
    fn from(error: WorkspaceError) -> Self {
        use WorkspaceError as E;

        let kind = match &error {
            E::NotFound { .. } => ErrorKind::NotFound,
            E::QuotaExceeded { .. } | E::TooManyEntries { .. } | E::TooManyWorkspaces { .. } => {
                ErrorKind::LimitExceeded
            }
            E::WriteFailed { .. } | E::Io { .. } => ErrorKind::Io,
            _ => ErrorKind::InvalidArgument,
        };
        // The type of the cause stays here; a client can use its text only.
        match &error {
            E::Io { path, source } => Self::new(kind, format!("the file system failed at {path:?}: {source}")),
            _ => Self::new(kind, error.to_string()),
        }
    }
}
