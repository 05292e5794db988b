//! Copies between the client's memory and a tensor: loops of chunk-sized requests that follow each other closely.
//!
//! The loop runs at the client, so that a chain of hops streams instead of storing, other lanes interleave, memory stays
//! bounded, and progress can be shown.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::blocking;
use crate::client::held_lane;
use crate::error::{Result, RpcError};
use crate::reply::PendingReply;
use crate::session::{Lane, Operation, ReadBuffer, Request, SharedSession};
use crate::trace;
use crate::value::{TensorRef, Value};

/// The largest piece of a copy, in bytes: large enough that the cost of a request does not show, small enough that other
/// lanes get their turn and that a hop holds little.
pub const CHUNK: usize = 1 << 20;

/// How many chunks are under way at once: enough to fill two hops.
const IN_FLIGHT: usize = 8;

/// Told the bytes copied so far.
type Progress = Arc<dyn Fn(u64) + Send + Sync>;

#[derive(Clone)]
struct Options {
    lane: Lane,
    deadline: Option<Instant>,
    progress: Option<Progress>,
}

impl Options {
    fn new() -> Self {
        Self { lane: Lane::DEFAULT, deadline: None, progress: None }
    }

    fn request(&self, operation: Operation) -> Request {
        Request { lane: self.lane, deadline: self.deadline, trace: trace::current(), operation }
    }

    fn report(&self, done: usize) {
        if let Some(progress) = &self.progress {
            progress(done as u64);
        }
    }
}

macro_rules! options {
    ($name:ident) => {
        impl $name {
            /// Moves the copy to `lane`; [`Lane::DEFAULT`] without this.
            pub fn lane(mut self, lane: Lane) -> Self {
                self.options.lane = lane;
                self
            }

            /// Fails the copy at `deadline`.
            pub fn deadline(mut self, deadline: Instant) -> Self {
                self.options.deadline = Some(deadline);
                self
            }

            /// Calls `progress` with the bytes copied so far, after each chunk.
            pub fn progress(mut self, progress: impl Fn(u64) + Send + Sync + 'static) -> Self {
                self.options.progress = Some(Arc::new(progress));
                self
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.tensor).finish()
            }
        }
    };
}

/// A copy into a tensor that has not been started: await it, or [`wait`](Self::wait) for it.
#[must_use = "a copy does nothing until it is awaited or waited for"]
pub struct CopyTo {
    session: SharedSession,
    tensor: Result<TensorRef>,
    pin: Arc<dyn Any + Send + Sync>,
    offset: u64,
    data: Bytes,
    options: Options,
}

options!(CopyTo);

impl CopyTo {
    pub(crate) fn new(
        session: SharedSession,
        tensor: Result<TensorRef>,
        pin: Arc<dyn Any + Send + Sync>,
        data: Bytes,
    ) -> Self {
        Self { session, tensor, pin, offset: 0, data, options: Options::new() }
    }

    /// Starts at this byte of the tensor.
    pub fn offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// Performs the copy on the calling thread.
    ///
    /// # Errors
    ///
    /// The copy's own; and [`ApiMisuse`](crate::ErrorKind::ApiMisuse) inside an async runtime.
    pub fn wait(self) -> Result<()> {
        blocking::block_on(self.run())?
    }

    async fn run(self) -> Result<()> {
        let Self { session, tensor, pin, offset, data, options } = self;
        let tensor = tensor?;
        held_lane::check(&session, options.lane)?;
        check_range(&tensor, offset, data.len())?;
        let mut window = VecDeque::with_capacity(IN_FLIGHT);
        let mut done = 0;
        // A copy of nothing is still one request, so that it has a place in the order and finds a dead session.
        for start in (0..data.len().max(1)).step_by(CHUNK) {
            if window.len() == IN_FLIGHT {
                finish_write(&mut window, &mut done, &options).await?;
            }
            let data = data.slice(start..data.len().min(start + CHUNK));
            let len = data.len();
            let write = Operation::Write { to: tensor.clone(), offset: offset + start as u64, data };
            let submitted = session.submit(options.request(write)).await;
            // A piece that was refused is one of many: those before it may have been written.
            let submitted = submitted.map_err(|error| {
                let may_have_run = start > 0 || error.request_may_have_run();
                error.may_have_run(may_have_run)
            });
            window.push_back((len, submitted?));
        }
        while !window.is_empty() {
            finish_write(&mut window, &mut done, &options).await?;
        }
        drop(pin);
        Ok(())
    }
}

async fn finish_write(window: &mut VecDeque<(usize, PendingReply)>, done: &mut usize, options: &Options) -> Result<()> {
    if let Some((len, pending)) = window.pop_front() {
        pending.await.map_err(|error| {
            let may_have_run = *done > 0 || error.request_may_have_run();
            error.may_have_run(may_have_run)
        })?;
        *done += len;
        options.report(*done);
    }
    Ok(())
}

impl IntoFuture for CopyTo {
    type Output = Result<()>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// A copy out of a tensor that has not been started: await it, or [`wait`](Self::wait) for it. It yields the bytes.
#[must_use = "a copy does nothing until it is awaited or waited for"]
pub struct CopyFrom {
    session: SharedSession,
    tensor: Result<TensorRef>,
    pin: Arc<dyn Any + Send + Sync>,
    range: Option<Range<u64>>,
    buffer: BytesMut,
    options: Options,
}

options!(CopyFrom);

impl CopyFrom {
    pub(crate) fn new(session: SharedSession, tensor: Result<TensorRef>, pin: Arc<dyn Any + Send + Sync>) -> Self {
        Self { session, tensor, pin, range: None, buffer: BytesMut::new(), options: Options::new() }
    }

    /// Reads only these bytes of the tensor.
    pub fn range(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Reads into `buffer`, which becomes the result. Memory that has been used before is several times faster than fresh
    /// memory. Its content and length do not matter; it grows if it is too small.
    pub fn into_buffer(mut self, buffer: BytesMut) -> Self {
        self.buffer = buffer;
        self
    }

    /// Performs the copy on the calling thread.
    ///
    /// # Errors
    ///
    /// The copy's own; and [`ApiMisuse`](crate::ErrorKind::ApiMisuse) inside an async runtime.
    pub fn wait(self) -> Result<BytesMut> {
        blocking::block_on(self.run())?
    }

    /// As [`wait`](Self::wait), into a slice, which sets the length of the range. It costs one copy more.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_into(mut self, out: &mut [u8]) -> Result<()> {
        let start = self.range.as_ref().map_or(0, |range| range.start);
        self.range = Some(start..start.saturating_add(out.len() as u64));
        out.copy_from_slice(&self.wait()?);
        Ok(())
    }

    async fn run(self) -> Result<BytesMut> {
        let Self { session, tensor, pin, range, buffer, options } = self;
        let tensor = tensor?;
        held_lane::check(&session, options.lane)?;
        let range = match range {
            Some(range) => range,
            None => 0..tensor.size_bytes()?,
        };
        let len = range.end.checked_sub(range.start).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| RpcError::invalid_argument(format!("{range:?} is no range of bytes")))?;
        check_range(&tensor, range.start, len)?;
        let mut rest = buffer;
        if rest.len() < len {
            // Not `resize`, which would write the zeros itself: fresh memory is zero already.
            if rest.capacity() < len { rest = BytesMut::zeroed(len) } else { rest.resize(len, 0) }
        }
        rest.truncate(len);
        let mut filled = BytesMut::new();
        let mut window = VecDeque::with_capacity(IN_FLIGHT);
        let mut offset = range.start;
        loop {
            if window.len() == IN_FLIGHT {
                finish_read(&mut window, &mut filled, &options).await?;
            }
            let piece = rest.split_to(rest.len().min(CHUNK));
            let len = piece.len() as u64;
            let buffer = ReadBuffer::new(piece);
            let read = Operation::Read { from: tensor.clone(), offset, len, into: Some(buffer.clone()) };
            window.push_back((buffer, session.submit(options.request(read)).await?));
            offset += len;
            if rest.is_empty() {
                break;
            }
        }
        while !window.is_empty() {
            finish_read(&mut window, &mut filled, &options).await?;
        }
        drop(pin);
        Ok(filled)
    }
}

async fn finish_read(
    window: &mut VecDeque<(ReadBuffer, PendingReply)>,
    filled: &mut BytesMut,
    options: &Options,
) -> Result<()> {
    let Some((buffer, pending)) = window.pop_front() else { return Ok(()) };
    let reply = pending.await?;
    let mut piece = buffer.take().ok_or_else(|| RpcError::internal("the session kept a read buffer"))?;
    match reply {
        Value::Null => {}
        Value::Bytes(bytes) if bytes.len() == piece.len() => piece.copy_from_slice(&bytes),
        other => {
            let error = format!("a read of {} bytes was answered with {}", piece.len(), other.type_name());
            return Err(RpcError::new(crate::ErrorKind::Protocol, error));
        }
    }
    // The pieces lie one behind the other in one allocation, so this moves nothing.
    filled.unsplit(piece);
    options.report(filled.len());
    Ok(())
}

impl IntoFuture for CopyFrom {
    type Output = Result<BytesMut>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<BytesMut>> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

fn check_range(tensor: &TensorRef, offset: u64, len: usize) -> Result<()> {
    let size = tensor.size_bytes()?;
    match offset.checked_add(len as u64) {
        Some(end) if end <= size => Ok(()),
        _ => Err(RpcError::invalid_argument(format!(
            "{len} bytes at offset {offset} do not fit a tensor of {size} bytes ({} {:?})",
            tensor.dtype, tensor.shape
        ))),
    }
}
