//! The trait of client protocols: what a pump drives. This module performs no input or output.

use std::io::{self, IoSlice};
use std::time::Instant;

use bytes::BytesMut;
use rpc_core::proto::{Admission, BulkRead, ClientEndpoint, ClientEvent};
use rpc_core::{ErrorKind, Handle, Request, Responder, RpcError};

use crate::channel_io::without_reference;

/// The client's half of a protocol, over one channel and without input or output: requests and
/// bytes go in, bytes and events come out. [`ClientEndpoint`] is the native one. Another protocol
/// whose sessions are to be driven by the threads that wait for replies implements it, and is
/// started by [`Connector::start_blocking`](crate::Connector::start_blocking).
///
/// All methods are called with the session's lock held, and must not block, nor complete requests:
/// that is what [events](Self::poll_event) are for.
pub trait ClientProtocol: Send + Sized + 'static {
    /// Large payload that is received straight into its place.
    type Bulk: Bulk;

    /// Submits a request, which is neither a release nor a shutdown. `id` has not been used before.
    fn submit(&mut self, id: u64, request: Request, responder: Responder, now: Instant) -> Admission<Responder>;

    /// Cancels a request whose caller still waits for the reply.
    fn cancel(&mut self, id: u64);

    /// Cancels a request whose caller is gone.
    fn abandon(&mut self, id: u64);

    /// Frees objects behind all requests that were submitted before.
    fn release(&mut self, handles: Vec<Handle>);

    /// Ends the session once all requests have ended; completes `responder` then. A protocol whose
    /// requests cannot be cancelled may give up waiting at `deadline`. Without a responder, the
    /// last reference to the session is gone.
    fn shutdown(&mut self, responder: Option<Responder>, deadline: Option<Instant>);

    /// Ends the session at once.
    fn fail(&mut self, error: RpcError);

    /// Returns the error with which the session has ended, if it has.
    fn ended(&self) -> Option<&RpcError>;

    /// Returns the next event. The end is the last one.
    fn poll_event(&mut self) -> Option<ClientEvent<Responder>>;

    /// Handles received bytes. The next ones are appended to what stays in `input`.
    ///
    /// # Errors
    ///
    /// The peer broke the protocol: [`fail`](Self::fail) is called with the error.
    fn handle_input(&mut self, input: &mut BytesMut, now: Instant) -> Result<(), RpcError>;

    /// Handles the peer's end of stream, with `left` bytes that stayed in the input.
    fn handle_end_of_stream(&mut self, left: usize);

    /// Handles the passage of time.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    fn handle_timeout(&mut self, now: Instant) -> Result<(), RpcError>;

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) must be called next.
    fn poll_timeout(&self) -> Option<Instant>;

    /// Moves output to where [`slices`](Self::slices) shows it.
    fn stage(&mut self);

    /// Fills `slices` with the bytes to write. Returns the number of slices filled.
    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize;

    /// Records that the first `count` bytes of the slices were written.
    fn advance(&mut self, count: usize, now: Instant);

    /// Returns true if no request waits for its reply.
    fn is_quiet(&self) -> bool;

    /// Returns true if there is input that has been read, and that
    /// [`handle_input`](Self::handle_input) has left for later.
    fn is_paused(&self) -> bool {
        false
    }

    /// Returns true if [`stage`](Self::stage) would do more, for requests that wait, than move
    /// output.
    fn is_due(&self) -> bool {
        false
    }

    /// Takes out the large payload that is being received, so that it is filled without the lock.
    fn take_bulk(&mut self) -> Option<Self::Bulk> {
        None
    }

    /// Puts back what [`take_bulk`](Self::take_bulk) returned, of which bytes were read.
    ///
    /// # Errors
    ///
    /// As [`handle_input`](Self::handle_input).
    fn put_bulk(&mut self, bulk: Self::Bulk, now: Instant) -> Result<(), RpcError>;

    /// Puts back what [`take_bulk`](Self::take_bulk) returned, of which nothing was read.
    fn put_idle_bulk(&mut self, bulk: Self::Bulk);

    /// Returns true if the peer keeps results for later requests
    /// ([`Request::pipe`](rpc_core::Request::pipe)); others refuse such requests.
    fn keeps_results(&self) -> bool {
        false
    }

    /// Returns true once the channel can be closed. A protocol may go on with it after the end of
    /// the session, of which callers have been told.
    fn is_over(&self) -> bool {
        self.ended().is_some()
    }

    /// Returns true once there will be no further output, though the peer may still send: the
    /// channel then is closed in one direction.
    fn has_finished_output(&self) -> bool {
        false
    }

    /// Returns the error for a channel that broke.
    fn broken(&self, error: &io::Error) -> RpcError {
        RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {}", without_reference(error)))
    }
}

/// Memory that a large payload is read into.
pub trait Bulk: Send {
    /// Returns the part that has not been filled yet. It is not empty.
    fn unfilled(&mut self) -> &mut [u8];

    /// Records that the first `count` bytes of the rest have been filled.
    fn advance(&mut self, count: usize);
}

impl Bulk for BulkRead {
    fn unfilled(&mut self) -> &mut [u8] {
        Self::unfilled(self)
    }

    fn advance(&mut self, count: usize) {
        Self::advance(self, count);
    }
}

impl ClientProtocol for ClientEndpoint<Responder> {
    type Bulk = BulkRead;

    fn submit(&mut self, id: u64, request: Request, responder: Responder, now: Instant) -> Admission<Responder> {
        Self::submit(self, id, request, responder, now)
    }

    fn cancel(&mut self, id: u64) {
        Self::cancel(self, id);
    }

    fn abandon(&mut self, id: u64) {
        Self::abandon(self, id);
    }

    fn release(&mut self, handles: Vec<Handle>) {
        Self::release(self, handles);
    }

    fn shutdown(&mut self, responder: Option<Responder>, _: Option<Instant>) {
        Self::shutdown(self, responder);
    }

    fn fail(&mut self, error: RpcError) {
        Self::fail(self, error);
    }

    fn ended(&self) -> Option<&RpcError> {
        Self::ended(self)
    }

    fn poll_event(&mut self) -> Option<ClientEvent<Responder>> {
        Self::poll_event(self)
    }

    fn handle_input(&mut self, input: &mut BytesMut, now: Instant) -> Result<(), RpcError> {
        Self::handle_input(self, input, now)
    }

    fn handle_end_of_stream(&mut self, left: usize) {
        Self::handle_end_of_stream(self, left);
    }

    fn handle_timeout(&mut self, now: Instant) -> Result<(), RpcError> {
        Self::handle_timeout(self, now)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        Self::poll_timeout(self)
    }

    fn stage(&mut self) {
        Self::stage(self);
    }

    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        Self::slices(self, slices)
    }

    fn advance(&mut self, count: usize, now: Instant) {
        Self::advance(self, count, now);
    }

    fn is_quiet(&self) -> bool {
        Self::is_quiet(self)
    }

    fn is_paused(&self) -> bool {
        Self::is_paused(self)
    }

    fn keeps_results(&self) -> bool {
        Self::keeps_results(self)
    }

    fn take_bulk(&mut self) -> Option<BulkRead> {
        Self::take_bulk(self)
    }

    fn put_bulk(&mut self, bulk: BulkRead, now: Instant) -> Result<(), RpcError> {
        Self::put_bulk(self, bulk, now)
    }

    fn put_idle_bulk(&mut self, bulk: BulkRead) {
        Self::put_idle_bulk(self, bulk);
    }
}
