//! The task of one session.

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::BytesMut;
use rpc_core::proto::{LinkConfig, Negotiated, ServerEndpoint, ServerEvent};
use rpc_core::reply::{Canceller, Outcome, ReplySink};
use rpc_core::{ErrorKind, MemoryQuota, Operation, Request, RpcError, RpcSession, SharedSession, Value};

use super::ServeOptions;
use super::mailbox::{EndOfSession, GO_AWAY, Mailbox, STOP};
use super::server::Registered;
use super::timeouts::Patience;
use crate::channel::{Channel, ChannelGuard, ChannelIo};
use crate::channel_io::{Alarm, Flush, ReadAhead, SLICES, poll_write};

/// How many replies may come together for which memory is kept: an idle session should be small.
const KEPT_REPLIES: usize = 8;

/// One session's task: moves bytes between channel and endpoint, and requests between endpoint and session.
pub(super) struct Connection {
    endpoint: ServerEndpoint,
    session: Option<SharedSession>,
    mailbox: Arc<Mailbox>,
    pub(super) io: Box<dyn ChannelIo>,
    read: ReadAhead,
    alarm: Alarm,
    flush: Flush,
    /// The requests that the session is working on.
    working: HashMap<u64, Canceller>,
    /// Replies on their way from the mailbox; empty, and kept for its memory.
    taken: Vec<(u64, Outcome)>,
    /// Has the mailbox hear of it when the session ends on its own.
    watch: Option<Canceller>,
    /// For what the client can draw out.
    patience_alarm: Alarm,
    going_away: bool,
    /// The session is over as soon as this has been written.
    closing: Option<RpcError>,
    /// The client was sent a last word, which it may not have received yet.
    pub(super) said_all: bool,
    patience: Patience,
    registered: Option<Arc<Registered>>,
    _guard: Option<ChannelGuard>,
}

/// What a connection serves.
pub(super) struct Parts {
    pub(super) session: SharedSession,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) queued: Arc<MemoryQuota>,
    pub(super) registered: Arc<Registered>,
}

impl Connection {
    pub(super) fn new(
        channel: Channel,
        negotiated: &Negotiated,
        input: BytesMut,
        parts: Parts,
        options: &ServeOptions,
    ) -> Self {
        let Parts { session, mailbox, queued, registered } = parts;
        let now = Instant::now();
        let (io, _, guard) = channel.into_parts();
        let config = LinkConfig { keep_alive: options.keep_alive };
        let watch = session.ended().reply().deliver_to(Arc::new(EndOfSession(mailbox.clone())), 0);
        Self {
            endpoint: ServerEndpoint::new(negotiated, config, now).with_quota(queued),
            taken: Vec::new(),
            watch: Some(watch),
            session: Some(session),
            mailbox,
            io,
            read: ReadAhead::new(input),
            alarm: Alarm::new(),
            flush: Flush::default(),
            patience_alarm: Alarm::new(),
            working: HashMap::new(),
            going_away: false,
            closing: None,
            said_all: false,
            patience: Patience::new(options, now),
            registered: Some(registered),
            _guard: guard,
        }
    }

    /// Ends the session, and tells the client why.
    fn close(&mut self, error: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(Some(&error));
            self.closing = Some(error);
        }
    }

    /// Ends the session in good order, as was agreed with the client.
    fn close_in_order(&mut self, reason: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(None);
            self.closing = Some(reason);
        }
    }

    /// What others have left for this task.
    fn take_mail(&mut self) {
        // Taken first: whatever was answered before the end is there by then, and goes out before it.
        let end = self.mailbox.take_end();
        let mut taken = std::mem::take(&mut self.taken);
        self.mailbox.take_replies(&mut taken);
        for (id, outcome) in taken.drain(..) {
            self.working.remove(&id);
            self.reply(id, outcome);
        }
        if taken.capacity() <= KEPT_REPLIES {
            self.taken = taken;
        }
        if let Some(error) = end {
            self.close(error);
        }
        match self.mailbox.commanded() {
            STOP => self.close(RpcError::new(ErrorKind::Closed, "the server was stopped").may_have_run(true)),
            GO_AWAY if !self.going_away => {
                self.going_away = true;
                let reason = RpcError::new(ErrorKind::Draining, "the server is going away and takes no new requests");
                self.endpoint.go_away(&reason);
            }
            _ => {}
        }
    }

    fn reply(&mut self, id: u64, outcome: Outcome) {
        if let Some(rejected) = self.endpoint.reply(id, outcome)
            && let Some(session) = &self.session
        {
            rpc_core::session::release(session, &rejected);
        }
    }

    fn act(&mut self, event: ServerEvent) {
        let Some(session) = &self.session else { return };
        self.patience.idle_since = None;
        match event {
            ServerEvent::Request { id, request } => match session.submit(request).try_ready() {
                Ok(outcome) => self.reply(id, outcome),
                Err(submission) => {
                    let sink: Arc<dyn ReplySink> = self.mailbox.clone();
                    let canceller = submission.reply().deliver_to(sink, id);
                    self.working.insert(id, canceller);
                }
            },
            ServerEvent::Written { id, write } => {
                // Lets the lane go on.
                drop(write);
                self.reply(id, Ok(Value::Null));
            }
            ServerEvent::Cancel { id } => {
                if let Some(canceller) = self.working.get(&id) {
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
            if count == 0 {
                self.flush.poll(&mut *self.io, cx)?;
                self.patience.waits_to_write(!self.flush.is_done());
                return Ok(());
            }
            match poll_write(&mut *self.io, &slices[..count], cx) {
                Poll::Pending => {
                    self.patience.waits_to_write(true);
                    return Ok(());
                }
                Poll::Ready(Ok(written)) => {
                    self.patience.written(written);
                    self.flush.want();
                    self.endpoint.advance(written, Instant::now());
                }
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
    }

    /// Reads once, and acts on what is complete. `Err` is the end.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        let read = match self.endpoint.bulk_target() {
            Some(target) => match self.read.poll_into(&mut *self.io, target, cx) {
                Poll::Ready(Ok(count)) if count > 0 => {
                    self.patience.idle_since = None;
                    self.patience.read(count);
                    if let Err(error) = self.endpoint.bulk_filled(count, Instant::now()) {
                        return Poll::Ready(Err(error));
                    }
                    self.act_on_events();
                    return Poll::Ready(Ok(()));
                }
                other => other,
            },
            None => self.read.poll_more(&mut *self.io, cx),
        };
        match read {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(0)) => Poll::Ready(Err(self.endpoint.end_of_stream(self.read.buffer.len()))),
            Poll::Ready(Ok(count)) => {
                self.patience.read(count);
                Poll::Ready(self.handle_input())
            }
            Poll::Ready(Err(error)) => {
                Poll::Ready(Err(RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))))
            }
        }
    }

    fn handle_input(&mut self) -> Result<(), RpcError> {
        let now = Instant::now();
        loop {
            let session = &self.session;
            let mut place = |lane, to: &rpc_core::TensorRef, offset, len| {
                session.as_ref().and_then(|session| session.write_in_place(lane, to, offset, len))
            };
            // Each message is acted on before the next one is looked at: a write in place needs to know what is before it.
            let more = self.endpoint.handle_input(&mut self.read.buffer, now, &mut place)?;
            self.act_on_events();
            if !more {
                return Ok(());
            }
        }
    }

    /// Whether there was anything to do.
    fn act_on_events(&mut self) -> bool {
        let mut acted = false;
        while let Some(event) = self.endpoint.poll_event() {
            self.act(event);
            acted = true;
        }
        acted
    }

    /// Ends the session if it has lasted or idled for too long. `Err` if nothing can be said to the client.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Result<(), RpcError> {
        if self.patience.idle_timeout.is_some() {
            match self.endpoint.is_idle() {
                true => _ = self.patience.idle_since.get_or_insert_with(Instant::now),
                false => self.patience.idle_since = None,
            }
        }
        self.patience.waits_to_read(self.endpoint.is_receiving() || !self.read.buffer.is_empty());
        self.patience.held_back = self.endpoint.held_back().map(|id| match self.patience.held_back {
            Some((before, since)) if before == id => (id, since),
            _ => (id, Instant::now()),
        });
        while let Some(now) = self.patience_alarm.poll(self.patience.ends(), cx) {
            if let Some(error) = self.patience.is_stuck(now) {
                return Err(error);
            }
            if let Some(error) = self.patience.is_over(now) {
                // Said once. From here on only the client's reading may take time.
                (self.patience.expires, self.patience.idle_timeout) = (None, None);
                self.close(error);
            }
        }
        Ok(())
    }

    /// Gives everything up. What still runs goes on without anybody waiting for it.
    fn end(&mut self) {
        for (_, canceller) in self.working.drain() {
            canceller.abandon();
        }
        if let Some(watch) = self.watch.take() {
            watch.abandon();
        }
        if let Some(session) = self.session.take() {
            // Freeing may take long: memory is unmapped, folders are removed.
            let remains = (session, self.registered.take());
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || drop(remains))),
                Err(_) => drop(remains),
            }
        }
    }
}

impl Future for Connection {
    type Output = RpcError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RpcError> {
        let this = &mut *self;
        loop {
            this.mailbox.register(cx.waker());
            this.take_mail();
            // Until the alarm is set to the next time: nothing else may wake this task.
            while let Some(now) = this.alarm.poll(Some(this.endpoint.poll_timeout()), cx) {
                if let Err(error) = this.endpoint.handle_timeout(now) {
                    this.end();
                    return Poll::Ready(error);
                }
            }
            if let Err(error) = this.poll_output(cx) {
                this.end();
                let reason = this.closing.take();
                return Poll::Ready(
                    reason.unwrap_or_else(|| {
                        RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))
                    }),
                );
            }
            // Requests that waited for replies to leave.
            if this.act_on_events() {
                continue;
            }
            if this.going_away && this.closing.is_none() && this.endpoint.is_drained() {
                this.close_in_order(RpcError::new(ErrorKind::Closed, "the server has gone away"));
                continue;
            }
            if this.closing.is_some() && this.endpoint.is_flushed() && this.flush.is_done() {
                this.end();
                this.said_all = true;
                let reason = this.closing.take();
                return Poll::Ready(reason.unwrap_or_else(|| RpcError::internal("closed without a reason")));
            }
            let was_open = this.closing.is_none();
            if let Err(error) = this.poll_patience(cx) {
                this.end();
                return Poll::Ready(this.closing.take().unwrap_or(error));
            }
            if was_open && this.closing.is_some() {
                continue;
            }
            match this.poll_input(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) if error.kind() == ErrorKind::Protocol => {
                    // Nothing more is understood of this peer, but it is told why.
                    this.close(error.clone());
                    let _ = this.poll_output(cx);
                    this.end();
                    this.said_all = true;
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

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
    }
}
