//! The client's session over a socket whose bytes are moved by the threads that wait for replies.
//!
//! Waking another thread costs several times as much as a call, so no other thread is woken: a
//! thread that waits for a reply writes the request and reads the reply itself. If several threads
//! wait, one of them (the *leader*) reads for all, and the others (the *followers*) wait for it.
//! While no thread waits, one thread of the process, the [`IdlePoller`], polls all such sessions:
//! it answers pings, sends the frees of dropped references, and notices a peer's end. It also moves
//! the bytes of sessions whose replies are awaited as futures.

use std::io::{self, IoSlice, Read};
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use parking_lot::{Condvar, MutexGuard};
use rpc_core::proto::{ClientEndpoint, ClientEvent, Negotiated};
use rpc_core::{Request, Responder, RpcSession, SharedSession, Submission};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::SessionConfig;
use super::idle_poller::{IdlePoller, Interest, PolledSession, timespec};
use super::protocol::{Bulk, ClientProtocol};
use super::state::{Change, ClientState, Locked, Pump, SessionRef};
use crate::channel::{BlockingChannel, BlockingIo, ChannelGuard, ExplainEnd};
use crate::channel_io::{READ_MAX, SLICES};
use crate::shared_memory;
use crate::spin::Spinner;

/// Time for which a session counts as in use after a call, so that calls in a row do not wake the
/// idle poller each time.
const IN_USE: Duration = Duration::from_millis(50);

/// Pause of a thread that cannot write, before the next attempt, while another thread reads.
const WRITE_RETRY: Duration = Duration::from_millis(1);

/// Time after which the idle poller writes requests that a caller has announced to write together
/// with others.
const ANNOUNCED: Duration = Duration::from_millis(1);

/// Longest blocking read. After it a thread asks whether it should go on waiting, as after a signal
/// that came just before the read and so has not interrupted it.
const READ_LIMIT: Duration = Duration::from_millis(200);

/// Largest number of reads of the idle poller from one session before it looks at the others.
const READS_AT_A_TIME: usize = 16;

/// Size of the first read after bulk. It is small, so that little of the next bulk passes through
/// the buffer.
const READ_BEHIND_BULK: usize = 4 << 10;

/// A session at the far end of a channel, without a runtime. Cheap to clone; clones are the same
/// session.
///
/// Made by [`Connector::connect_blocking`](crate::Connector::connect_blocking). Callers may wait
/// for operations or await them. Waiting needs no switch to another thread.
pub type BlockingClientSession = BlockingSession<ClientEndpoint<Responder>>;

/// A session like [`BlockingClientSession`], of any protocol.
pub struct BlockingSession<E: ClientProtocol>(SessionRef<SocketPump<E>>);

/// Pump that is run by the threads that wait.
struct SocketPump<E> {
    io: BlockingIo,
    /// Signal that the leader has stepped down, or has done work for others.
    leader_changed: Condvar,
    /// True if a call was made since the idle poller last looked.
    in_use: AtomicBool,
    /// True while a reply is awaited as a future, for which the idle poller has to move the bytes.
    in_background: AtomicBool,
    /// True if a caller has announced requests since the idle poller last looked.
    is_announced: AtomicBool,
    /// True while the idle poller looks every millisecond for requests that were announced.
    looks_often: AtomicBool,
    /// Time after which a blocking read ends by itself: the socket's own limit.
    read_limit: Duration,
    end: Option<Arc<dyn ExplainEnd>>,
    /// Guard of the channel's resources, such as a child process.
    _guard: Option<ChannelGuard>,
    protocol: PhantomData<fn() -> E>,
}

/// Part of the pump that the session's lock guards.
struct SocketState {
    input: BytesMut,
    /// Buffer for small messages. The leader holds it while it reads.
    scratch: Vec<u8>,
    /// True while some thread does the reading.
    has_leader: bool,
    /// True while the leader reads without the lock: no other thread may read then.
    is_reading: bool,
    /// True once nothing can be written any more. The leader then reads the remaining input up to
    /// its end.
    is_unwritable: bool,
    /// True once this side of the channel is closed for writing, and the peer may still send.
    is_half_closed: bool,
    /// Number of threads that wait for the leader.
    followers: usize,
    /// True while the socket's buffer is full and there is more to write.
    is_blocked: bool,
    /// True if the last read was of bulk.
    behind_bulk: bool,
    /// Time at which the idle poller comes by itself; `None` if it does not, or has not been here.
    next_poll: Option<Instant>,
    /// Time until which the idle poller looks often for requests that were announced.
    looks_often_until: Option<Instant>,
    /// Spinning, if it is switched on. The leader holds it while it reads.
    spinner: Option<Spinner>,
}

type Guard<'a, E> = MutexGuard<'a, Locked<SocketPump<E>>>;

impl BlockingClientSession {
    /// Starts the session after a handshake. `input` holds the bytes that were read beyond it.
    ///
    /// # Errors
    ///
    /// The idle poller cannot be started.
    pub(crate) fn start(
        channel: BlockingChannel,
        negotiated: &Negotiated,
        mut input: BytesMut,
        config: SessionConfig,
    ) -> io::Result<Self> {
        let keep_alive = config.endpoint.keep_alive;
        let endpoint = ClientEndpoint::new(negotiated, config.endpoint, Instant::now());
        let mut endpoint = shared_memory::offered_by(endpoint, negotiated);
        if let Err(error) = endpoint.handle_input(&mut input, Instant::now()) {
            endpoint.fail(error);
        }
        Self::drive(channel, endpoint, input, keep_alive, config.spin)
    }
}

impl<E: ClientProtocol> BlockingSession<E> {
    /// Starts a session over a channel. `input` holds bytes that the endpoint has not used.
    ///
    /// # Errors
    ///
    /// The idle poller cannot be started.
    pub(crate) fn drive(
        channel: BlockingChannel,
        endpoint: E,
        input: BytesMut,
        keep_alive: Duration,
        spin: Duration,
    ) -> io::Result<Self> {
        let end = channel.end().cloned();
        let (io, peer, guard) = channel.into_parts();
        let read_limit = keep_alive.clamp(Duration::from_millis(1), READ_LIMIT);
        io.set_read_timeout(Some(read_limit))?;
        let state = SocketState {
            input,
            scratch: vec![0; READ_MAX],
            has_leader: false,
            is_reading: false,
            is_unwritable: false,
            is_half_closed: false,
            followers: 0,
            is_blocked: false,
            behind_bulk: false,
            next_poll: None,
            looks_often_until: None,
            spinner: Spinner::new(spin),
        };
        let pump = SocketPump {
            io,
            leader_changed: Condvar::new(),
            in_use: AtomicBool::new(false),
            in_background: AtomicBool::new(false),
            is_announced: AtomicBool::new(false),
            looks_often: AtomicBool::new(false),
            read_limit,
            end,
            _guard: guard,
            protocol: PhantomData,
        };
        let session = ClientState::new(endpoint, (pump, state), peer, false);
        IdlePoller::get()?.add(session.clone());
        Ok(Self(SessionRef::new(session)))
    }
}

impl<E: ClientProtocol> Clone for BlockingSession<E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<E: ClientProtocol> std::fmt::Debug for BlockingSession<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BlockingSession").field(&self.0.peer()).finish()
    }
}

impl<E: ClientProtocol> RpcSession for BlockingSession<E> {
    fn submit(&self, request: Request) -> Submission {
        self.0.as_session().submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(self.0.as_session())
    }

    fn into_shared(self) -> SharedSession {
        self.0.into_shared()
    }
}

impl<E: ClientProtocol> Pump for SocketPump<E> {
    type Endpoint = E;
    type Locked = SocketState;

    fn endpoint_changed(session: &ClientState<Self>, mut locked: Guard<'_, E>, change: Change) {
        match change {
            // The leader is reading, and would not write the new request. Without a leader, the
            // thread that waits becomes the leader.
            Change::Request if !locked.pump.has_leader => {}
            Change::Request => session.flush_and_deliver(locked),
            Change::Release => {
                if locked.pump.has_leader {
                    session.flush(&mut locked);
                }
                drop(locked);
                if !session.pump.in_use.load(Ordering::Acquire) {
                    wake_idle_poller();
                }
            }
            Change::Cancel => {
                let is_late = locked.is_polled_late();
                session.flush_and_deliver(locked);
                if is_late {
                    wake_idle_poller();
                }
            }
            Change::Close => {
                session.flush(&mut locked);
                drop(locked);
                // The poller waits for the peer's answer, and then closes the socket.
                wake_idle_poller();
            }
        }
    }

    fn attend(session: &ClientState<Self>) {
        if !session.pump.in_background.swap(true, Ordering::AcqRel) {
            wake_idle_poller();
        }
        let mut locked = session.lock();
        session.flush(&mut locked);
        let is_due = locked.pump.is_blocked || locked.has_ended() || locked.is_polled_late();
        session.deliver_rest_of(locked);
        if is_due {
            wake_idle_poller();
        }
    }

    fn attend_soon(session: &ClientState<Self>) {
        let pump = &session.pump;
        pump.is_announced.store(true, Ordering::SeqCst);
        // Whichever of this thread and the poller comes second sees what the other has written.
        if !pump.in_background.swap(true, Ordering::AcqRel) || !pump.looks_often.load(Ordering::SeqCst) {
            wake_idle_poller();
        }
    }

    fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    const DRIVEN_BY_CALLERS: bool = true;

    fn drive(session: &ClientState<Self>, done: &dyn Fn() -> bool) {
        if !session.pump.in_use.swap(true, Ordering::AcqRel) {
            // From now on the idle poller leaves the socket to the callers, until no call is made
            // for a while.
            wake_idle_poller();
        }
        let mut locked = session.lock();
        while !done() {
            if !locked.pump.has_leader {
                locked = session.lead(locked, Some(done));
                continue;
            }
            session.flush(&mut locked);
            let mut events = Vec::new();
            locked.take_events(&mut events);
            if !events.is_empty() {
                drop(locked);
                session.deliver_explained(events);
                locked = session.lock();
                continue;
            }
            let wait = if locked.pump.is_blocked { WRITE_RETRY } else { IN_USE };
            locked.pump.followers += 1;
            session.pump.leader_changed.wait_for(&mut locked, wait);
            locked.pump.followers -= 1;
        }
    }
}

fn wake_idle_poller() {
    // The poller runs: it was started before the session.
    if let Ok(poller) = IdlePoller::get() {
        poller.wake();
    }
}

impl<E: ClientProtocol> Locked<SocketPump<E>> {
    /// Returns true if no caller reads, and the endpoint has a timeout before the idle poller comes
    /// by itself.
    fn is_polled_late(&self) -> bool {
        let next_poll = self.pump.next_poll;
        let is_earlier = |timeout| next_poll.is_none_or(|next_poll| timeout < next_poll);
        !self.pump.has_leader && self.endpoint.poll_timeout().is_some_and(is_earlier)
    }
}

impl<E: ClientProtocol> ClientState<SocketPump<E>> {
    /// Writes as much as is possible without waiting.
    fn flush(&self, locked: &mut Locked<SocketPump<E>>) {
        let io = &self.pump.io;
        while !locked.pump.is_unwritable {
            locked.endpoint.stage();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = locked.endpoint.slices(&mut slices);
            locked.pump.is_blocked = false;
            if count == 0 {
                if locked.endpoint.has_finished_output() && !locked.pump.is_half_closed {
                    locked.pump.is_half_closed = true;
                    let _ = io.shutdown(std::net::Shutdown::Write);
                }
                return;
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // One slice, which is the usual case, costs the kernel less this way.
            let sent = match &slices[..count] {
                [one] => send(io, one, flags),
                several => sendmsg(io, several, &mut SendAncillaryBuffer::default(), flags),
            };
            match sent {
                Ok(written) => locked.endpoint.advance(written, Instant::now()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    locked.pump.is_blocked = true;
                    return;
                }
                Err(error) => {
                    locked.pump.is_unwritable = true;
                    locked.pump.is_blocked = false;
                    // Bytes that the peer wrote before it closed can still be read.
                    if locked.pump.is_reading {
                        // The leader reads it, perhaps in the middle of a payload, and then finds
                        // the end.
                        let _ = io.shutdown(std::net::Shutdown::Read);
                    } else {
                        self.read_to_end(locked);
                        locked.channel_broke(&io::Error::from(error));
                    }
                    return;
                }
            }
        }
    }

    /// Writes as much as is possible without waiting, and delivers the events of that.
    fn flush_and_deliver(&self, mut locked: Guard<'_, E>) {
        self.flush(&mut locked);
        self.deliver_rest_of(locked);
    }

    /// Delivers the events that there are.
    fn deliver_rest_of(&self, mut locked: Guard<'_, E>) {
        let mut events = Vec::new();
        locked.take_events(&mut events);
        drop(locked);
        self.deliver_explained(events);
    }

    /// Delivers events, the session's end with its explanation, for which this blocks shortly.
    fn deliver_explained(&self, events: Vec<ClientEvent<Responder>>) {
        if let Some(end) = self.unexplained_end(&events) {
            self.explain(end.explain_blocking());
        }
        self.deliver(events);
    }

    /// Reads the input that has arrived, without waiting.
    fn read_to_end(&self, locked: &mut Locked<SocketPump<E>>) {
        let mut buffer = vec![0; READ_MAX];
        loop {
            // What was read before may not have been handled whole.
            loop {
                if locked.endpoint.handle_input(&mut locked.pump.input, Instant::now()).is_err() {
                    return;
                }
                if !locked.endpoint.is_paused() {
                    break;
                }
            }
            let Ok(count @ 1..) = receive(&self.pump.io, &mut buffer, RecvFlags::DONTWAIT) else { return };
            locked.pump.input.extend_from_slice(&buffer[..count]);
        }
    }

    /// Reads and writes for all callers until `done` returns true. Without `done`, stops when it
    /// would have to wait.
    fn lead<'a>(&'a self, mut locked: Guard<'a, E>, done: Option<&dyn Fn() -> bool>) -> Guard<'a, E> {
        let is_done = || done.is_some_and(|done| done());
        // The poller goes on after the end, for as long as the protocol needs the channel.
        let is_over = |locked: &Locked<_>| if done.is_some() { locked.has_ended() } else { locked.is_over() };
        locked.pump.has_leader = true;
        let mut reads = 0;
        loop {
            let now = Instant::now();
            if locked.endpoint.poll_timeout().is_some_and(|timeout| timeout <= now) {
                locked.handle_timeout(now);
            }
            self.flush(&mut locked);
            let mut events = Vec::new();
            locked.take_events(&mut events);
            if !events.is_empty() {
                drop(locked);
                self.deliver_explained(events);
                locked = self.lock();
                if locked.pump.followers > 0 {
                    self.pump.leader_changed.notify_all();
                }
                // A completed request may have led to new ones.
                if !is_done() && !is_over(&locked) {
                    continue;
                }
            }
            if is_done() || is_over(&locked) {
                break;
            }
            if done.is_none() && reads == READS_AT_A_TIME {
                // The poller comes back: the socket still has input.
                break;
            }
            let timeout = locked.endpoint.poll_timeout();
            // Not longer than a read that blocks: a request of another thread may be due earlier.
            let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_duration_since(now));
            let has_read;
            (locked, has_read) = self.read(locked, left.min(self.pump.read_limit), done.is_some());
            if !has_read && done.is_none() {
                break;
            }
            reads += 1;
        }
        locked.pump.has_leader = false;
        if locked.is_over() {
            // The peer waits for the shutdown, and references to the session may live long.
            let _ = self.pump.io.shutdown(std::net::Shutdown::Both);
        } else if locked.has_ended() && done.is_some() {
            wake_idle_poller();
        }
        if locked.pump.followers > 0 {
            self.pump.leader_changed.notify_all();
        }
        if locked.endpoint.is_quiet() {
            self.pump.in_background.store(false, Ordering::Release);
        } else if (locked.endpoint.is_paused() || locked.endpoint.is_due())
            && self.pump.in_background.load(Ordering::Acquire)
        {
            // The rest of the input, or what waits to be sent, may be of callers that await it.
            wake_idle_poller();
        }
        locked
    }

    /// Returns the events that the idle poller is to wait for.
    fn interest_in(&self, locked: &mut Locked<SocketPump<E>>, now: Instant) -> Interest {
        let was_in_use = self.pump.in_use.swap(false, Ordering::AcqRel);
        let limit = self.pump.longest_wait(&mut locked.pump, now);
        let SocketState { has_leader, is_blocked, .. } = locked.pump;
        if has_leader || (was_in_use && !self.pump.in_background.load(Ordering::Acquire)) {
            // A caller moves the bytes, or did until a moment ago, so the session is polled again
            // soon.
            self.pump.in_use.store(has_leader, Ordering::Release);
            let timeout = if is_blocked { WRITE_RETRY } else { IN_USE };
            return Interest { readiness: None, timeout: timeout.min(limit) };
        }
        if locked.endpoint.is_paused() {
            // There is input that has been read.
            return Interest { readiness: None, timeout: Duration::ZERO };
        }
        let timeout = locked.endpoint.poll_timeout();
        Interest {
            readiness: Some(if is_blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }),
            timeout: timeout.map_or(Duration::MAX, |timeout| timeout.saturating_duration_since(now)).min(limit),
        }
    }

    /// Reads once, and waits up to `wait` for it if `may_wait`. Returns true if anything was read,
    /// the end included.
    fn read<'a>(&'a self, mut locked: Guard<'a, E>, wait: Duration, may_wait: bool) -> (Guard<'a, E>, bool) {
        if locked.endpoint.is_paused() {
            let Locked { endpoint, pump, .. } = &mut *locked;
            if let Err(error) = endpoint.handle_input(&mut pump.input, Instant::now()) {
                endpoint.fail(error);
            }
            return (locked, true);
        }
        let mut bulk = locked.endpoint.take_bulk();
        let mut scratch = std::mem::take(&mut locked.pump.scratch);
        let limit = if std::mem::take(&mut locked.pump.behind_bulk) { READ_BEHIND_BULK } else { READ_MAX };
        let is_blocked = locked.pump.is_blocked;
        let mut spinner = locked.pump.spinner.take();
        locked.pump.is_reading = true;
        drop(locked);
        let target = match &mut bulk {
            Some(bulk) => bulk.unfilled(),
            None => &mut scratch[..limit],
        };
        let found = match &mut spinner {
            Some(spinner) if may_wait && !is_blocked => self.pump.spin(spinner, target),
            _ => None,
        };
        let outcome = found.unwrap_or_else(|| self.pump.read_into(target, wait, may_wait, is_blocked));
        let mut locked = self.lock();
        let Locked { endpoint, pump, .. } = &mut *locked;
        pump.is_reading = false;
        pump.spinner = spinner;
        let (count, is_bulk) = (outcome.unwrap_or(0), bulk.is_some());
        if let Some(bulk) = &mut bulk {
            bulk.advance(count);
        } else if count > 0 {
            pump.input.extend_from_slice(&scratch[..count]);
        }
        pump.scratch = scratch;
        pump.behind_bulk = is_bulk;
        let now = Instant::now();
        // The bulk goes back in any case: a payload of which nothing was read is still to come.
        let mut handled = match bulk {
            Some(bulk) if count > 0 => endpoint.put_bulk(bulk, now),
            Some(bulk) => {
                endpoint.put_idle_bulk(bulk);
                Ok(())
            }
            None => Ok(()),
        };
        if count > 0 && handled.is_ok() {
            handled = endpoint.handle_input(&mut pump.input, now);
        }
        match (handled, outcome) {
            (Err(error), _) => endpoint.fail(error),
            (Ok(()), Ok(0)) => endpoint.handle_end_of_stream(pump.input.len()),
            (Ok(()), Ok(_)) => {}
            (Ok(()), Err(Errno::AGAIN | Errno::INTR)) => return (locked, false),
            (Ok(()), Err(error)) => locked.channel_broke(&io::Error::from(error)),
        }
        (locked, true)
    }
}

impl<E> SocketPump<E> {
    /// Returns the longest time for which the idle poller may wait, because of requests that were
    /// announced now or a short time ago.
    fn longest_wait(&self, state: &mut SocketState, now: Instant) -> Duration {
        if state.looks_often_until.is_none_or(|until| until <= now) {
            state.looks_often_until = None;
            self.looks_often.store(false, Ordering::SeqCst);
        }
        if self.is_announced.swap(false, Ordering::SeqCst) {
            // Programs that announce requests do it again and again, and a wake-up each time costs
            // more than to look.
            state.looks_often_until = Some(now + IN_USE);
            self.looks_often.store(true, Ordering::SeqCst);
        }
        if state.looks_often_until.is_some() { ANNOUNCED } else { Duration::MAX }
    }

    /// Looks for input, and reads it. Returns `None` if there was none.
    fn spin(&self, spinner: &mut Spinner, target: &mut [u8]) -> Option<Result<usize, Errno>> {
        let mut found = None;
        spinner.wait(|| match receive(&self.io, target, RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN | Errno::INTR) => false,
            outcome => {
                found = Some(outcome);
                true
            }
        });
        found
    }

    fn read_into(&self, target: &mut [u8], wait: Duration, may_wait: bool, is_blocked: bool) -> Result<usize, Errno> {
        if !may_wait {
            return receive(&self.io, target, RecvFlags::DONTWAIT);
        }
        // A read that blocks is one system call less than a poll and a read, but ends only after
        // its own limit, and a deadline may not be late.
        if is_blocked || wait < self.read_limit {
            let mut events = PollFlags::IN;
            if is_blocked {
                events |= PollFlags::OUT;
            }
            let mut fds = [PollFd::new(&self.io, events)];
            poll(&mut fds, Some(&timespec(wait)))?;
            if !fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                return Err(Errno::AGAIN);
            }
            return receive(&self.io, target, RecvFlags::DONTWAIT);
        }
        match (&self.io).read(target) {
            Ok(count) => Ok(count),
            Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }
}

fn receive(io: &BlockingIo, target: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
    recv(io, target, flags).map(|(count, _)| count)
}

impl<E: ClientProtocol> PolledSession for ClientState<SocketPump<E>> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.pump.io.as_fd()
    }

    fn interest(&self, now: Instant) -> Interest {
        let mut locked = self.lock();
        let interest = self.interest_in(&mut locked, now);
        locked.pump.next_poll = now.checked_add(interest.timeout);
        interest
    }

    fn poll(&self) {
        let Some(mut locked) = self.try_lock() else { return };
        if locked.pump.has_leader {
            self.flush(&mut locked);
        } else {
            drop(self.lead(locked, None));
        }
    }

    fn has_finished(&self) -> bool {
        let locked = self.lock();
        locked.is_over() && !locked.pump.has_leader
    }

    fn deliver_rest(&self) {
        self.deliver_rest_of(self.lock());
    }
}
