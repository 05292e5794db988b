//! Transfers of files that continue where an earlier one has stopped: an open file of which a
//! client reads the rest, and an upload that leaves its part at the server.
//!
//! A part is continued only after its SHA-256 was compared with that of the same bytes at the other
//! side. This crate has no cryptography: the caller computes the digests of its own bytes.

use std::fmt;
use std::io::{Read, Write};

use bytes::Bytes;

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::copies::CHUNK;
use crate::client::files::{Reading, SentPieces, call_by_name, functions, local_io, parse_digest, send_pieces};
use crate::client::module_upload::Digest;
use crate::client::piece_window::PieceWindow;
use crate::client::references::RemoteObject;
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::Lane;

/// A file of the workspace, open for reading. Its content is that of the time when it was opened,
/// even if another file replaces it meanwhile. It counts as an open file of the session until it is
/// dropped.
pub struct RemoteFile {
    session: Session,
    lane: Lane,
    path: String,
    reader: RemoteObject,
    len: u64,
}

impl RemoteFile {
    pub(crate) async fn open(session: &Session, path: &str, lane: Lane, options: &Options<'_>) -> Result<Self> {
        let (reader, len) = call_by_name(session, options, "rpc.file.open", (path,)).await?;
        Ok(Self { session: session.clone(), lane, path: path.to_owned(), reader, len })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the SHA-256 of the first `len` bytes, which the server computes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the file is shorter, [`ErrorKind::NotFound`] if the server
    /// is too old for this.
    pub fn prefix_digest(&self, len: u64) -> ScopedAction<'_, Digest> {
        let action = ScopedAction::steps(async move |options: Options<'_>| {
            let args = (&self.reader, len);
            let text: String = call_by_name(&self.session, &options, "rpc.file.prefix_digest", args).await?;
            parse_digest(&text)
        });
        action.lane(self.lane)
    }

    /// Reads the bytes from `start` to the end into `sink`, in order, on the thread that polls. The
    /// result is the length of the file, and progress is reported as the offset that is reached.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if `sink` cannot be written to, or the file became shorter while it was
    /// read.
    pub fn read_from<'a>(&'a self, start: u64, mut sink: impl Write + Send + 'a) -> ScopedAction<'a, u64> {
        let action = ScopedAction::steps(async move |options| self.download(start, &mut sink, options).await);
        action.lane(self.lane)
    }

    pub(crate) async fn download(
        &self,
        start: u64,
        sink: &mut (impl Write + Send),
        mut options: Options<'_>,
    ) -> Result<u64> {
        let [read] = functions(&self.session, &options, ["rpc.file.read"]).await?;
        let mut window = PieceWindow::of_reads();
        let (mut asked, mut done) = (start, start);
        while done < self.len {
            if asked < self.len && !window.is_full() {
                let len = (self.len - asked).min(CHUNK as u64);
                let began = window.now();
                let mut pending = options.apply(read.call::<Bytes>((&self.reader, asked, len))).start();
                pending.admitted().await?;
                window.push((asked, len), began, pending);
                asked += len;
                continue;
            }
            let again = |(offset, len): &(u64, u64)| options.apply(read.call((&self.reader, *offset, *len))).start();
            let Some(((_, expected), outcome)) = window.finish(again).await else { break };
            let piece = outcome?;
            if piece.len() as u64 != expected {
                let (path, len, got) = (&self.path, self.len, done + piece.len() as u64);
                let message =
                    format!("'{path}' changed while it was read: it had {len} bytes, and now ends after {got}");
                return Err(RpcError::new(ErrorKind::Io, message));
            }
            sink.write_all(&piece).map_err(|error| local_io("cannot store what was received", &error))?;
            done += expected;
            options.report(done);
        }
        sink.flush().map_err(|error| local_io("cannot store what was received", &error))?;
        Ok(done)
    }
}

impl fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteFile").field("path", &self.path).field("len", &self.len).finish_non_exhaustive()
    }
}

/// An upload whose part stays in the workspace if it does not complete, and which has taken over
/// the part of an earlier one.
pub struct ResumableUpload {
    session: Session,
    lane: Lane,
    path: String,
    writer: RemoteObject,
    part_len: u64,
    part_digest: Digest,
}

impl ResumableUpload {
    pub(crate) async fn begin(
        session: &Session,
        path: String,
        len: u64,
        lane: Lane,
        options: &Options<'_>,
    ) -> Result<Self> {
        let args = (path.as_str(), len);
        let (writer, part_len, digest): (_, _, String) =
            call_by_name(session, options, "rpc.file.resume_write", args).await?;
        let part_digest = parse_digest(&digest)?;
        Ok(Self { session: session.clone(), lane, path, writer, part_len, part_digest })
    }

    /// Returns the length of the part that was taken over, in bytes; 0 if there is none.
    pub fn part_len(&self) -> u64 {
        self.part_len
    }

    /// Returns the SHA-256 of the part, which the server has computed.
    pub fn part_digest(&self) -> Digest {
        self.part_digest
    }

    /// Appends all bytes of `rest` to the part, after which the file appears in one step under its
    /// path. The result is its length, and progress is reported as the offset that is reached.
    ///
    /// # Errors
    ///
    /// As [`Files::put_sized`](super::Files::put_sized).
    pub fn finish<'a>(self, rest: impl Read + Send + 'a) -> ScopedAction<'a, u64> {
        let lane = self.lane;
        let action = ScopedAction::steps(async move |mut options: Options<'a>| {
            let [write, commit] = functions(&self.session, &options, ["rpc.file.write", "rpc.file.commit"]).await?;
            let source = Reading { source: rest };
            let len =
                send_pieces(SentPieces::of_writes(), &write, &self.writer, self.part_len, source, &mut options).await?;
            options.apply(commit.call::<()>((&self.writer,))).await?;
            Ok(len)
        });
        action.lane(lane)
    }

    /// Ends the upload, and removes the part: it is not the beginning of the file.
    ///
    /// # Errors
    ///
    /// Errors of the session.
    pub fn discard(self) -> Action<()> {
        let lane = self.lane;
        let call = async move |options: Options<'static>| {
            call_by_name(&self.session, &options, "rpc.file.abort", (&self.writer,)).await
        };
        ScopedAction::steps(call).lane(lane)
    }
}

impl fmt::Debug for ResumableUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResumableUpload")
            .field("path", &self.path)
            .field("part_len", &self.part_len)
            .finish_non_exhaustive()
    }
}
