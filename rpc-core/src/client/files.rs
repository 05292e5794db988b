//! Files of a session's workspace, from the client's side: put, get, list, remove.
//!
//! A server that has a workspace registers the functions `rpc.file.*`; this module calls them.
//! Files travel in pieces of [`CHUNK`] bytes that follow each other closely, so a chain of hops
//! streams them and memory stays bounded at both ends. A file that is being written has no name
//! until it is complete, and belongs to the session until then: if either side stops midway,
//! nothing of it remains, unless it is written by [`Files::put_resumable`].
//!
//! ```no_run
//! # fn example(session: &rpc_core::Session) -> rpc_core::Result<()> {
//! use rpc_core::client::Files;
//!
//! let files = Files::new(session);
//! files.put_bytes("models/a.txt", "hello").wait()?;
//! let mut copy = Vec::new();
//! files.get("models/a.txt", &mut copy).wait()?;
//! assert_eq!(copy, b"hello");
//! # Ok(())
//! # }
//! ```

use std::io::{self, Read, Write};
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::client::action::{Action, Options, Pending, ScopedAction};
use crate::client::copies::CHUNK;
use crate::client::file_cache::FileCache;
use crate::client::module_upload::Digest;
use crate::client::partial_files::{RemoteFile, ResumableUpload};
use crate::client::piece_window::PieceWindow;
use crate::client::references::{RemoteFunction, RemoteObject};
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::{FromReply, IntoArgs, Pack};
use crate::session::Lane;

/// A file in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path from the root of the workspace, with `/` between the names.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// Time when the file was last written to.
    pub modified: SystemTime,
    /// True if its owner may execute the file.
    #[serde(default)]
    pub executable: bool,
}

/// The files of a session's workspace.
///
/// Paths are relative, with `/` between names, and cannot lead out of the workspace. Every
/// operation does nothing until it is awaited or [waited for](ScopedAction::wait). Dropping its
/// future stops the transfer: an upload leaves no file then.
#[derive(Clone, Debug)]
pub struct Files {
    session: Session,
    lane: Lane,
}

impl Files {
    /// Returns the files of `session`'s workspace.
    pub fn new(session: &Session) -> Self {
        Self { session: session.clone(), lane: Lane::DEFAULT }
    }

    /// Moves all operations to `lane`. The default is [`Lane::DEFAULT`].
    #[must_use]
    pub fn lane(mut self, lane: Lane) -> Self {
        self.lane = lane;
        self
    }

    /// Writes all bytes of `source` to the file `path`, which appears in one step when it is
    /// complete. The result is the length in bytes.
    ///
    /// `source` is read on the thread that polls. If it may block for long, call
    /// [`wait`](ScopedAction::wait) on a separate thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] for a path that leaves the workspace, or if the length is not
    /// the announced one; [`ErrorKind::LimitExceeded`] if the quota is reached; [`ErrorKind::Io`]
    /// if `source` cannot be read; [`ErrorKind::NotFound`] if the server exchanges no files. What
    /// was at `path` before is then still there.
    pub fn put<'a>(&self, path: &str, source: impl Read + Send + 'a) -> ScopedAction<'a, u64> {
        self.put_pieces(path, None, Reading { source })
    }

    /// Writes like [`put`](Self::put), for a source whose length is known: the quota is claimed at
    /// once, and a source of any other length is an error.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn put_sized<'a>(&self, path: &str, len: u64, source: impl Read + Send + 'a) -> ScopedAction<'a, u64> {
        self.put_pieces(path, Some(len), Reading { source })
    }

    /// Writes like [`put`](Self::put), from memory, without copying it.
    pub fn put_bytes(&self, path: &str, data: impl Into<Bytes>) -> Action<u64> {
        let data = data.into();
        self.put_pieces(path, Some(data.len() as u64), data)
    }

    /// Reads the file `path` into `sink`. The result is the length in bytes.
    ///
    /// The file is read as it was when it was opened, even if another replaces it meanwhile. `sink`
    /// is written to on the thread that polls, in order; after an error it holds the beginning of
    /// the file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if there is no such file, [`ErrorKind::InvalidArgument`] for a path
    /// that leaves the workspace, [`ErrorKind::Io`] if `sink` cannot be written to or the file
    /// became shorter while it was read.
    pub fn get<'a>(&self, path: &str, mut sink: impl Write + Send + 'a) -> ScopedAction<'a, u64> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let lane = self.lane;
        let action = ScopedAction::steps(async move |options: Options<'a>| {
            let file = RemoteFile::open(&session, &path, lane, &options).await?;
            file.download(0, &mut sink, options).await
        });
        action.lane(lane)
    }

    /// Opens the file `path` for reading. For a client that wants to know the length first, or has
    /// a part of the file already.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if there is no such file, [`ErrorKind::InvalidArgument`] for a path
    /// that leaves the workspace.
    pub fn open(&self, path: &str) -> Action<RemoteFile> {
        let (session, path, lane) = (self.session.clone(), path.to_owned(), self.lane);
        let call = async move |options: Options<'static>| RemoteFile::open(&session, &path, lane, &options).await;
        ScopedAction::steps(call).lane(lane)
    }

    /// Begins an upload of `len` bytes to the file `path` which, if it does not complete, leaves
    /// its part in the workspace, as the file `path` with `.rpc-part` at its
    /// end. The next such upload
    /// takes the part over, and its client decides by the digest if it goes on behind it.
    ///
    /// # Errors
    ///
    /// As [`put`](Self::put).
    pub fn put_resumable(&self, path: &str, len: u64) -> Action<ResumableUpload> {
        let (session, path, lane) = (self.session.clone(), path.to_owned(), self.lane);
        let call =
            async move |options: Options<'static>| ResumableUpload::begin(&session, path, len, lane, &options).await;
        ScopedAction::steps(call).lane(lane)
    }

    /// Lists the files in the folder `dir` and in all folders below it, sorted by name; all files
    /// if `dir` is empty. For the path of a file, lists that file alone.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if nothing is there, [`ErrorKind::InvalidArgument`] for a path that
    /// leaves the workspace.
    pub fn ls(&self, dir: &str) -> Action<Vec<FileEntry>> {
        let (session, dir) = (self.session.clone(), dir.to_owned());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let Pack(entries) = call_by_name(&session, &options, "rpc.file.ls", (dir,)).await?;
            Ok(entries)
        });
        action.lane(self.lane)
    }

    /// Removes a file, or a folder with its content.
    ///
    /// # Errors
    ///
    /// As [`ls`](Self::ls).
    pub fn rm(&self, path: &str) -> Action<()> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let call =
            async move |options: Options<'static>| call_by_name(&session, &options, "rpc.file.rm", (path,)).await;
        ScopedAction::steps(call).lane(self.lane)
    }

    /// Sets or clears the permission to execute a file. A file that was put has none.
    ///
    /// # Errors
    ///
    /// As [`ls`](Self::ls), and [`ErrorKind::InvalidArgument`] for a folder.
    pub fn set_executable(&self, path: &str, executable: bool) -> Action<()> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let call = async move |options: Options<'static>| {
            call_by_name(&session, &options, "rpc.file.set_executable", (path, executable)).await
        };
        ScopedAction::steps(call).lane(self.lane)
    }

    /// Lists all folders, sorted by name.
    ///
    /// # Errors
    ///
    /// Errors of the session.
    pub fn folders(&self) -> Action<Vec<String>> {
        let session = self.session.clone();
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let Pack(folders) = call_by_name(&session, &options, "rpc.file.folders", ()).await?;
            Ok(folders)
        });
        action.lane(self.lane)
    }

    /// Creates a folder, with those that it is in, unless it is there. Files need none: their
    /// folders come with them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] for a path that leaves the workspace or leads through a file,
    /// and [`ErrorKind::LimitExceeded`] if the workspace has too many entries.
    pub fn create_folder(&self, path: &str) -> Action<()> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let call = async move |options: Options<'static>| {
            call_by_name(&session, &options, "rpc.file.create_folder", (path,)).await
        };
        ScopedAction::steps(call).lane(self.lane)
    }

    /// Returns the SHA-256 of a file, which the server computes. For a client that sends a file
    /// only if the server has another one.
    ///
    /// # Errors
    ///
    /// As [`get`](Self::get).
    pub fn digest(&self, path: &str) -> Action<Digest> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let call = async move |options: Options<'static>| {
            let text: String = call_by_name(&session, &options, "rpc.file.digest", (path,)).await?;
            parse_digest(&text)
        };
        ScopedAction::steps(call).lane(self.lane)
    }

    /// Opens the server's cache of files, by which a file that this client has sent before is not
    /// sent again. The result is `None` if the server has no cache, or not for this client.
    ///
    /// # Errors
    ///
    /// Errors of the session.
    pub fn cache(&self) -> Action<Option<FileCache>> {
        let (session, lane) = (self.session.clone(), self.lane);
        let open = async move |options: Options<'static>| FileCache::open(&session, lane, &options).await;
        ScopedAction::steps(open).lane(lane)
    }

    fn put_pieces<'a>(&self, path: &str, len: Option<u64>, source: impl Pieces + 'a) -> ScopedAction<'a, u64> {
        let (session, path) = (self.session.clone(), path.to_owned());
        let action =
            ScopedAction::steps(async move |mut options| send(&session, &path, len, source, &mut options).await);
        action.lane(self.lane)
    }
}

/// Window of pieces that are sent, by their offsets.
pub(crate) type SentPieces = PieceWindow<(u64, Bytes), Pending<()>, ()>;

/// Sends all of `source` to the file `path`, which appears when it is complete.
pub(crate) async fn send(
    session: &Session,
    path: &str,
    len: Option<u64>,
    source: impl Pieces,
    options: &mut Options<'_>,
) -> Result<u64> {
    let names = ["rpc.file.begin_write", "rpc.file.write", "rpc.file.commit"];
    let [begin, write, commit] = functions(session, options, names).await?;
    // Dropped on every error below, which frees the writer and the bytes that it has written.
    let writer: RemoteObject = options.apply(begin.call((path, len))).await?;
    let sent = send_pieces(SentPieces::of_writes(), &write, &writer, 0, source, options).await?;
    options.apply(commit.call::<()>((&writer,))).await?;
    Ok(sent)
}

/// Parses a digest that the server has sent.
pub(crate) fn parse_digest(text: &str) -> Result<Digest> {
    text.parse().map_err(|error| RpcError::new(ErrorKind::Protocol, format!("the server's digest of a file: {error}")))
}

/// Fetches several functions in one round trip.
pub(crate) async fn functions<const N: usize>(
    session: &Session,
    options: &Options<'_>,
    names: [&str; N],
) -> Result<[RemoteFunction; N]> {
    let pending = names.map(|name| options.apply(session.get_function(name)).start());
    let mut functions = Vec::with_capacity(N);
    for function in pending {
        functions.push(function.await?);
    }
    functions.try_into().map_err(|_| RpcError::internal("as many functions as names"))
}

/// Fetches a function and calls it.
pub(crate) async fn call_by_name<R: FromReply>(
    session: &Session,
    options: &Options<'_>,
    name: &str,
    args: impl IntoArgs,
) -> Result<R> {
    let function = options.apply(session.get_function(name)).await?;
    options.apply(function.call(args)).await
}

/// Sends all of `source` to `writer`, to the bytes from `start` on, by calls of `write` with the
/// writer, the offset and a piece, several of which are in flight in `window`. Returns the offset
/// behind the last byte, as which progress is reported too.
pub(crate) async fn send_pieces(
    mut window: SentPieces,
    write: &RemoteFunction,
    writer: &RemoteObject,
    start: u64,
    mut source: impl Pieces,
    options: &mut Options<'_>,
) -> Result<u64> {
    let (mut sent, mut done) = (start, start);
    let mut piece = next_piece(&mut source)?;
    while !piece.is_empty() || !window.is_empty() {
        if !piece.is_empty() && !window.is_full() {
            let (offset, data) = (sent, std::mem::take(&mut piece));
            sent += data.len() as u64;
            let began = window.now();
            let mut pending = options.apply(write.call::<()>((writer, offset, data.clone()))).start();
            pending.admitted().await?;
            window.push((offset, data), began, pending);
            piece = next_piece(&mut source)?;
            continue;
        }
        let again = |(offset, data): &(u64, Bytes)| options.apply(write.call((writer, *offset, data.clone()))).start();
        let Some(((offset, data), outcome)) = window.finish(again).await else { break };
        outcome?;
        done = offset + data.len() as u64;
        options.report(done);
    }
    Ok(done)
}

fn next_piece(source: &mut impl Pieces) -> Result<Bytes> {
    source.next_piece().map_err(|error| local_io("cannot read what is to be sent", &error))
}

/// Source of an upload.
pub(crate) trait Pieces: Send {
    /// Returns the next piece, of at most [`CHUNK`] bytes; empty at the end.
    fn next_piece(&mut self) -> io::Result<Bytes>;
}

impl Pieces for Bytes {
    fn next_piece(&mut self) -> io::Result<Bytes> {
        Ok(self.split_to(self.len().min(CHUNK)))
    }
}

pub(crate) struct Reading<R> {
    pub(crate) source: R,
}

impl<R: Read + Send> Pieces for Reading<R> {
    fn next_piece(&mut self) -> io::Result<Bytes> {
        let mut piece = Vec::with_capacity(CHUNK);
        // `take` retries interrupted reads, and stops at the end of the piece or of the source.
        self.source.by_ref().take(CHUNK as u64).read_to_end(&mut piece)?;
        Ok(piece.into())
    }
}

/// Returns the error of a file or stream of the client.
pub(crate) fn local_io(what: &str, error: &io::Error) -> RpcError {
    RpcError::new(ErrorKind::Io, format!("{what}: {error}"))
}
