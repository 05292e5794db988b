//! The task of one served session.

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::BytesMut;
use rpc_core::proto::{EndpointConfig, Negotiated, ServerEndpoint, ServerEvent};
use rpc_core::reply::{Canceller, Outcome, ReplySink};
use rpc_core::{ErrorKind, MemoryQuota, Operation, Request, RpcError, RpcSession, SharedSession, Value};
use tokio::runtime::Handle;

use super::access_record::{Traffic, log_refused_request};
use super::mailbox::{Command, EndOfSession, Mailbox};
use super::options::ServeOptions;
use super::output_mark::OutputMark;
use super::stall_timeouts::StallTimeouts;
use super::state::ConnectionEntry;
use crate::channel::{Channel, ChannelGuard};
use crate::channel_io::{Alarm, Flush, ReadAhead, SLICES, poll_write, without_reference};
use crate::clock;
use crate::session_io::SessionIo;
use crate::shared_memory;

/// Number of replies for which memory is kept between two batches: an idle session should be small.
const KEPT_REPLIES: usize = 8;

/// Task that moves bytes between channel and endpoint, and requests and replies between endpoint
/// and session. Resolves to the reason why the session has ended.
pub(super) struct SessionTask {
    endpoint: ServerEndpoint,
    session: Option<SharedSession>,
    mailbox: Arc<Mailbox>,
    pub(super) io: SessionIo,
    read: ReadAhead,
    alarm: Alarm,
    flush: Flush,
    /// Requests that the session is working on.
    in_progress: HashMap<u64, Canceller>,
    /// Replies on their way from the mailbox. Empty between two batches, and kept for its memory.
    replies: Vec<(u64, Outcome)>,
    /// Subscription to the end of the session, which is delivered to the mailbox.
    end_watch: Option<Canceller>,
    timeouts: StallTimeouts,
    /// Alarm for `timeouts`.
    timeouts_alarm: Alarm,
    is_going_away: bool,
    /// Reason for which the session will end once all output has been written.
    closing: Option<RpcError>,
    /// True once the client was sent a last message, which it may not have received yet.
    pub(super) last_message_sent: bool,
    traffic: Traffic,
    /// Bytes sent through shared memory that the timeouts know of.
    shared_sent: u64,
    /// The same of bytes received.
    shared_received: u64,
    peer: Arc<str>,
    entry: Option<Arc<ConnectionEntry>>,
    /// True if the runtime has one thread, on which this task runs, too.
    has_one_thread: bool,
    /// Mark at which the output stands, for a process that has passed the socket.
    mark: Option<OutputMark>,
    /// Guard of the channel's resources, such as a child process.
    _guard: Option<ChannelGuard>,
}

/// Session that the task serves, and its share in the server.
pub(super) struct SessionParts {
    pub(super) session: SharedSession,
    pub(super) mailbox: Arc<Mailbox>,
    /// Bytes that all sessions of the server may have queued.
    pub(super) queued: Arc<MemoryQuota>,
    pub(super) entry: Arc<ConnectionEntry>,
    /// Address of the client, for the log.
    pub(super) peer: Arc<str>,
}

impl SessionTask {
    pub(super) fn new(
        channel: Channel,
        negotiated: &Negotiated,
        input: BytesMut,
        parts: SessionParts,
        options: &ServeOptions,
    ) -> Self {
        let SessionParts { session, mailbox, queued, entry, peer } = parts;
        let now = clock::now();
        mailbox.note_heard(now);
        let process = channel.process();
        let (io, _, guard) = channel.into_session_parts(options.spin);
        let config = EndpointConfig { keep_alive: options.keep_alive };
        let end_watch = session.ended().reply().deliver_to(Arc::new(EndOfSession(mailbox.clone())), 0);
        let endpoint = ServerEndpoint::new(negotiated, config, now).with_quota(queued);
        mailbox.limit_replies(endpoint.max_unsent_bytes());
        Self {
            endpoint: shared_memory::opened_by(endpoint, negotiated, process),
            replies: Vec::new(),
            end_watch: Some(end_watch),
            session: Some(session),
            mailbox,
            io,
            read: ReadAhead::new(input),
            alarm: Alarm::new(),
            flush: Flush::default(),
            timeouts: StallTimeouts::new(&options.stall_limits(), now),
            timeouts_alarm: Alarm::new(),
            in_progress: HashMap::new(),
            is_going_away: false,
            closing: None,
            last_message_sent: false,
            traffic: Traffic::default(),
            shared_sent: 0,
            shared_received: 0,
            peer,
            entry: Some(entry),
            has_one_thread: Handle::current().metrics().num_workers() == 1,
            mark: None,
            _guard: guard,
        }
    }

    /// Notes in `mark` where the output stands, whenever it changes.
    pub(super) fn mark_output_in(&mut self, mark: OutputMark) {
        self.mark = Some(mark);
        // In such a process functions have threads of their own.
        self.has_one_thread = false;
    }

    /// Returns what has passed between the session and its client.
    pub(super) fn traffic(&self) -> Traffic {
        let (received, sent) = self.endpoint.shared_bytes();
        let Traffic { requests, received: read, sent: written } = self.traffic;
        Traffic { requests, received: read + received, sent: written + sent }
    }

    /// Ends the session because of `error`, and tells the client.
    fn close(&mut self, error: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(Some(&error));
            self.begin_close(error);
        }
    }

    /// Ends the session in good order, as agreed with the client.
    fn close_in_order(&mut self, reason: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(None);
            self.begin_close(reason);
        }
    }

    /// Ends the session. The connection is closed once the client has taken what there is for it.
    fn begin_close(&mut self, reason: RpcError) {
        self.closing = Some(reason);
        // A client that takes its replies slowly would keep what the session holds.
        self.end_session();
    }

    /// Handles the contents of the mailbox.
    fn take_mail(&mut self) {
        // Taken first: replies that came before the end are in the mailbox by then, and are sent
        // before it.
        let end = self.mailbox.take_end();
        let mut replies = std::mem::take(&mut self.replies);
        let refused = self.mailbox.take_replies(&mut replies);
        if let Some(session) = self.session.as_ref().filter(|_| !refused.is_empty()) {
            session.submit(Request::new(Operation::Release { handles: refused })).reply().detach();
        }
        for (id, outcome) in replies.drain(..) {
            self.in_progress.remove(&id);
            self.reply(id, outcome);
        }
        if replies.capacity() <= KEPT_REPLIES {
            self.replies = replies;
        }
        if let Some(error) = end {
            self.close(error);
        }
        match self.mailbox.commanded() {
            Some(Command::Stop) => {
                self.close(stopped());
            }
            Some(Command::GoAway) if !self.is_going_away => {
                self.is_going_away = true;
                let reason = RpcError::new(ErrorKind::Draining, "the server is going away and takes no new requests");
                self.endpoint.go_away(&reason);
            }
            _ => {}
        }
    }

    fn reply(&mut self, id: u64, outcome: Outcome) {
        if let Err(error) = &outcome {
            log_refused_request(&self.peer, error);
        }
        if let Some(rejected) = self.endpoint.reply(id, outcome)
            && let Some(session) = &self.session
        {
            rpc_core::session::release(session, &rejected);
        }
    }

    fn act(&mut self, event: ServerEvent) {
        let Some(session) = &self.session else { return };
        self.timeouts.idle_since = None;
        self.traffic.requests += u64::from(matches!(event, ServerEvent::Request { .. } | ServerEvent::Written { .. }));
        match event {
            ServerEvent::Request { id, request } => match session.submit(request).try_ready() {
                Ok(outcome) => self.reply(id, outcome),
                Err(submission) => {
                    let sink: Arc<dyn ReplySink> = self.mailbox.clone();
                    let canceller = submission.reply().deliver_to(sink, id);
                    self.in_progress.insert(id, canceller);
                }
            },
            ServerEvent::Written { id, write } => {
                // The lane continues with its next request.
                drop(write);
                self.reply(id, Ok(Value::Null));
            }
            ServerEvent::Cancel { id } => {
                if let Some(canceller) = self.in_progress.get(&id) {
                    canceller.cancel();
                }
            }
            ServerEvent::Release { handles } => {
                session.submit(Request::new(Operation::Release { handles })).reply().detach();
            }
            ServerEvent::Close => {
                self.close_in_order(RpcError::new(ErrorKind::Closed, "the client closed the session"));
            }
        }
    }

    fn poll_output(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        loop {
            self.endpoint.stage();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.endpoint.slices(&mut slices);
            let staged: usize = slices[..count].iter().map(|slice| slice.len()).sum();
            if let Some(mark) = &mut self.mark {
                mark.before_write(staged);
            }
            if count == 0 {
                self.flush.poll(&mut self.io, cx)?;
                // A client that frees no slot of the shared memory takes nothing, either.
                self.timeouts.set_writing(!self.flush.is_done() || self.endpoint.awaits_slot());
                return Ok(());
            }
            match poll_write(&mut self.io, &slices[..count], cx) {
                Poll::Pending => {
                    self.timeouts.set_writing(true);
                    return Ok(());
                }
                Poll::Ready(Ok(written)) => {
                    if let Some(mark) = &mut self.mark {
                        mark.after_write(written, staged);
                    }
                    let (_, shared) = self.endpoint.shared_bytes();
                    let taken = shared - std::mem::replace(&mut self.shared_sent, shared);
                    self.timeouts.wrote(written + taken as usize);
                    self.traffic.sent += written as u64;
                    self.flush.want();
                    self.endpoint.advance(written, clock::now());
                }
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
    }

    /// Reads once, and handles complete messages. `Err` is the end of the session.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        let read = match self.endpoint.bulk_target() {
            Some(target) => match self.read.poll_into(&mut self.io, target, cx) {
                Poll::Ready(Ok(count)) if count > 0 => {
                    self.timeouts.idle_since = None;
                    self.timeouts.received(count);
                    self.traffic.received += count as u64;
                    let now = clock::now();
                    self.mailbox.note_heard(now);
                    if let Err(error) = self.endpoint.bulk_filled(count, now) {
                        return Poll::Ready(Err(error));
                    }
                    self.act_on_events();
                    return Poll::Ready(Ok(()));
                }
                other => other,
            },
            None => self.read.poll_more(&mut self.io, cx),
        };
        match read {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(0)) => Poll::Ready(Err(self.endpoint.end_of_stream(self.read.buffer.len()))),
            Poll::Ready(Ok(count)) => {
                self.timeouts.received(count);
                self.traffic.received += count as u64;
                let now = clock::now();
                self.mailbox.note_heard(now);
                Poll::Ready(self.handle_input(now, cx))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(RpcError::new(
                ErrorKind::PeerLost,
                format!("the connection broke: {}", without_reference(&error)),
            ))),
        }
    }

    fn handle_input(&mut self, now: Instant, cx: &mut Context<'_>) -> Result<(), RpcError> {
        loop {
            let session = &self.session;
            let mut place = |lane, to: &rpc_core::TensorRef, offset, len| {
                session.as_ref().and_then(|session| session.write_in_place(lane, to, offset, len))
            };
            // Each message is handled before the next one is parsed: a write in place depends on
            // those before it.
            let more = self.endpoint.handle_input(&mut self.read.buffer, now, &mut place)?;
            self.act_on_events();
            let (received, _) = self.endpoint.shared_bytes();
            let shared = received - std::mem::replace(&mut self.shared_received, received);
            self.timeouts.received(shared as usize);
            if !more {
                return Ok(());
            }
            if self.endpoint.is_paused() {
                // The client fills further slots while this side copies out of the next one. The
                // caller writes again, and finds an error then.
                let _ = self.poll_output(cx);
            }
        }
    }

    /// Handles the endpoint's events. Returns true if there were any.
    fn act_on_events(&mut self) -> bool {
        let mut acted = false;
        while let Some(event) = self.endpoint.poll_event() {
            self.act(event);
            acted = true;
        }
        acted
    }

    /// Ends the session if one of its timeouts is over. Returns `Err` if no message can reach the
    /// client.
    fn poll_timeouts(&mut self, cx: &mut Context<'_>) -> Result<(), RpcError> {
        if self.timeouts.idle_timeout.is_some() {
            match self.endpoint.is_idle() {
                true => _ = self.timeouts.idle_since.get_or_insert_with(clock::now),
                false => self.timeouts.idle_since = None,
            }
        }
        self.timeouts.set_receiving(self.endpoint.is_receiving() || !self.read.buffer.is_empty());
        self.timeouts.held_back = self.endpoint.held_back().map(|id| match self.timeouts.held_back {
            Some((before, since)) if before == id => (id, since),
            _ => (id, clock::now()),
        });
        while let Some(now) = self.timeouts_alarm.poll(self.timeouts.next(), cx) {
            if let Some(error) = self.timeouts.check_stall(now) {
                return Err(error);
            }
            if let Some(error) = self.timeouts.check_session(now) {
                // These timeouts have expired. From here on only the client's reading may take
                // time.
                (self.timeouts.expires, self.timeouts.idle_timeout) = (None, None);
                self.close(error);
            }
        }
        Ok(())
    }

    /// Ends the session, all its requests and the connection.
    fn end(&mut self) {
        self.end_session();
        self.entry = None;
    }

    /// Ends the session and all its requests. Functions that still run go on, and their results are
    /// discarded.
    fn end_session(&mut self) {
        for (_, canceller) in self.in_progress.drain() {
            canceller.abandon();
        }
        if let Some(watch) = self.end_watch.take() {
            watch.abandon();
        }
        if let Some(session) = self.session.take() {
            // The server has ended once the session is freed, and its connection closed.
            crate::runtime::free((session, self.entry.clone()));
        }
    }
}

impl Future for SessionTask {
    type Output = RpcError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RpcError> {
        let this = &mut *self;
        let mut spins = this.io.spins();
        let in_progress_before = this.in_progress.len();
        loop {
            this.mailbox.register(cx.waker());
            this.take_mail();
            // Repeats until the alarm is set to the next timeout, for which nothing else would wake
            // this task.
            while let Some(now) = this.alarm.poll(Some(this.endpoint.poll_timeout()), cx) {
                if let Err(error) = this.endpoint.handle_timeout(now) {
                    this.end();
                    return Poll::Ready(error);
                }
            }
            if let Err(error) = this.poll_output(cx) {
                this.end();
                let reason = this.closing.take();
                return Poll::Ready(reason.unwrap_or_else(|| {
                    RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {}", without_reference(&error)))
                }));
            }
            // Requests may have waited for replies to be written.
            if this.act_on_events() {
                continue;
            }
            if this.is_going_away && this.closing.is_none() && this.endpoint.is_drained() {
                this.close_in_order(RpcError::new(ErrorKind::Closed, "the server has gone away"));
                continue;
            }
            if this.closing.is_some() && this.endpoint.is_flushed() && this.flush.is_done() {
                this.end();
                this.last_message_sent = true;
                let reason = this.closing.take();
                return Poll::Ready(reason.unwrap_or_else(|| RpcError::internal("closed without a reason")));
            }
            let was_open = this.closing.is_none();
            if let Err(error) = this.poll_timeouts(cx) {
                this.end();
                return Poll::Ready(this.closing.take().unwrap_or(error));
            }
            if was_open && this.closing.is_some() {
                continue;
            }
            match this.poll_input(cx) {
                Poll::Pending => {
                    let needs_thread = this.has_one_thread && !this.in_progress.is_empty();
                    if spins == 0 || needs_thread {
                        return Poll::Pending;
                    }
                    if this.in_progress.len() > in_progress_before {
                        // What this task has handed to others may run on this thread only: it has
                        // its turn first.
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    let mailbox = &this.mailbox;
                    if !this.io.spin(|| mailbox.has_items()) {
                        return Poll::Pending;
                    }
                    spins -= 1;
                    if spins == 0 {
                        // Another task of this thread has its turn first.
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) if matches!(error.kind(), ErrorKind::Protocol | ErrorKind::LimitExceeded) => {
                    // Further input of this peer cannot be understood, or would take more memory
                    // than it may have, but the peer is sent the reason.
                    this.close(error.clone());
                    let _ = this.poll_output(cx);
                    this.end();
                    this.last_message_sent = true;
                    return Poll::Ready(error);
                }
                Poll::Ready(Err(error)) => {
                    this.end();
                    return Poll::Ready(this.closing.take().unwrap_or(error));
                }
            }
        }
    }
}

/// Returns the error for a session that ends because its server was stopped.
pub(super) fn stopped() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the server was stopped").may_have_run(true)
}

impl Drop for SessionTask {
    fn drop(&mut self) {
        self.end();
    }
}
