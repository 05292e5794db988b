//! The client's session over a channel, driven by the threads that wait for it.
//!
//! Waking another thread costs several times what a call costs, so there is none to wake: whoever waits for a reply
//! writes the request and reads the reply on its own thread. If several wait, one of them (the *leader*) reads for all.
//! While nobody waits, one thread for the whole process, the *attendant*, looks after all such sessions: it answers pings,
//! sends the frees of dropped references, and notices a peer's end. It also drives sessions whose futures are awaited
//! instead of waited for.

use std::io::{self, IoSlice, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Admission, ClientEndpoint, Handshake, HandshakeConfig, LinkConfig, Negotiated};
use rpc_core::reply::ReplyControl;
use rpc_core::{ErrorKind, Operation, Request, Responder, RpcError, RpcSession, Submission, Value};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::task::report;
use crate::channel::{BlockingChannel, BlockingIo, ChannelGuard};
use crate::channel_io::SLICES;

/// How long a session counts as in use after a call, so that calls in a row do not disturb the attendant each time.
const TICK: Duration = Duration::from_millis(50);

/// How long a thread that cannot write waits before it tries again, while another one reads.
const WRITE_RETRY: Duration = Duration::from_millis(1);

/// The most that one read takes of small messages.
const READ_MAX: usize = 64 << 10;

/// A first read behind bulk: little of the next bulk should pass through the buffer.
const READ_BEHIND_BULK: usize = 4 << 10;

/// A session at the far end of a channel, without a runtime. Cheap to clone; clones are the same session.
///
/// Made by [`Connector::connect_blocking`](crate::Connector::connect_blocking). Operations may be waited for or awaited;
/// the former cost no switch to another thread.
#[derive(Clone)]
pub struct BlockingClientSession(Arc<Owner>);

/// Closes the session when the last reference is gone.
struct Owner(Arc<Shared>);

struct Shared {
    io: BlockingIo,
    peer: String,
    state: Mutex<State>,
    /// Told when the leader steps down or has done something for others.
    turn: Condvar,
    next_id: AtomicU64,
    /// Any time at all, for those who do not look at it.
    begun: Instant,
    /// Whether a call was made since the attendant last looked.
    active: AtomicBool,
    /// Whether somebody awaits a reply, whom the attendant has to drive.
    attended: AtomicBool,
    this: Weak<Self>,
    /// A blocking read ends by itself after this long.
    read_limit: Duration,
    _guard: Option<ChannelGuard>,
}

struct State {
    endpoint: ClientEndpoint<Responder>,
    input: BytesMut,
    /// Where small messages are read to; with the leader while it reads.
    scratch: Vec<u8>,
    /// Whether some thread does the reading.
    leader: bool,
    /// The leader reads right now, and has let go of the lock: nobody else may read.
    reading: bool,
    /// Nothing can be written any more; the leader reads what is left, and finds the end.
    unwritable: bool,
    /// Threads that wait for the leader.
    followers: usize,
    watchers: Vec<Responder>,
    /// The socket's buffer is full, and there is more to write.
    blocked: bool,
    behind_bulk: bool,
}

/// How long a blocking read may block: the socket's own time limit.
fn read_limit(config: LinkConfig) -> Duration {
    config.keep_alive.max(Duration::from_millis(1))
}

impl BlockingClientSession {
    /// The session behind a handshake. `input` is what was read beyond it.
    ///
    /// # Errors
    ///
    /// If the attendant cannot be started.
    pub(crate) fn start(
        channel: BlockingChannel,
        negotiated: &Negotiated,
        input: BytesMut,
        config: LinkConfig,
    ) -> io::Result<Self> {
        let (io, peer, guard) = channel.into_parts();
        set_read_timeout(&io, Some(read_limit(config)))?;
        let mut endpoint = ClientEndpoint::new(negotiated, config, Instant::now());
        let mut input = input;
        if let Err(error) = endpoint.handle_input(&mut input, Instant::now()) {
            endpoint.fail(error);
        }
        let state = State {
            endpoint,
            input,
            scratch: vec![0; READ_MAX],
            leader: false,
            reading: false,
            unwritable: false,
            followers: 0,
            watchers: Vec::new(),
            blocked: false,
            behind_bulk: false,
        };
        let shared = Arc::new_cyclic(|this| Shared {
            io,
            peer,
            state: Mutex::new(state),
            turn: Condvar::new(),
            next_id: AtomicU64::new(1),
            begun: Instant::now(),
            active: AtomicBool::new(false),
            attended: AtomicBool::new(false),
            this: this.clone(),
            read_limit: read_limit(config),
            _guard: guard,
        });
        Attendant::get()?.adopt(shared.clone());
        Ok(Self(Arc::new(Owner(shared))))
    }
}

impl std::fmt::Debug for BlockingClientSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BlockingClientSession").field(&self.0.0.peer).finish()
    }
}

impl RpcSession for BlockingClientSession {
    fn submit(&self, request: Request) -> Submission {
        let shared = &self.0.0;
        match request.operation {
            Operation::Release { handles } => {
                shared.command(|state| state.endpoint.release(handles));
                shared.notice();
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => {
                let (submission, responder) = shared.pending();
                responder.admit();
                let over = shared.command(|state| {
                    let over = state.endpoint.ended().is_some();
                    if !over {
                        state.endpoint.shutdown(Some(responder.clone()));
                    }
                    over
                });
                if over {
                    // Nobody drives the session any more, and there is nothing left to do.
                    responder.complete(Ok(Value::Null));
                }
                submission
            }
            _ => {
                let (submission, responder) = shared.pending();
                let token = responder.clone();
                // Only a deadline needs the time.
                let now = if request.deadline.is_some() { Instant::now() } else { shared.begun };
                let admission = shared.command(|state| state.endpoint.submit(responder.id(), request, token, now));
                match admission {
                    Admission::Now => responder.admit(),
                    Admission::Later => {}
                    Admission::Refused(_, error) => {
                        responder.complete(Err(error.with_peer(&*shared.peer)));
                    }
                }
                submission
            }
        }
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.0.0.pending();
        responder.admit();
        let mut state = self.0.0.state();
        match state.endpoint.ended().cloned() {
            Some(error) => {
                drop(state);
                responder.complete(Err(error.with_peer(&*self.0.0.peer)));
            }
            None => state.watchers.push(responder),
        }
        submission
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.endpoint.shutdown(None);
        self.0.flush(&mut state);
        drop(state);
        // The attendant waits for the peer's answer, and then lets the socket go.
        self.0.wake_attendant();
    }
}

impl Shared {
    /// Takes a request back.
    fn stop(&self, change: impl FnOnce(&mut ClientEndpoint<Responder>)) {
        self.command(|state| change(&mut state.endpoint));
        let mut state = self.state();
        let events = std::iter::from_fn(|| state.endpoint.poll_event()).collect();
        self.flush(&mut state);
        drop(state);
        self.report(events);
    }
}

impl ReplyControl for Shared {
    fn cancel(&self, id: u64) {
        self.stop(|endpoint| endpoint.cancel(id));
    }

    fn abandon(&self, id: u64) {
        self.stop(|endpoint| endpoint.abandon(id));
    }

    fn discard(&self, reply: Value) {
        self.command(|state| state.endpoint.release(reply.handles()));
        self.notice();
    }

    fn attend(&self) {
        if !self.attended.swap(true, Ordering::AcqRel) {
            self.wake_attendant();
        }
        let mut state = self.state();
        self.flush(&mut state);
        if state.blocked || state.endpoint.ended().is_some() {
            drop(state);
            self.wake_attendant();
        }
    }

    fn must_be_driven(&self) -> bool {
        true
    }

    fn drive(&self, done: &dyn Fn() -> bool) {
        if !self.active.swap(true, Ordering::AcqRel) {
            // From now on the attendant leaves the socket to the callers, until no call is made for a while.
            self.wake_attendant();
        }
        let mut state = self.state();
        while !done() {
            if !state.leader {
                state = self.lead(state, Some(done));
                continue;
            }
            self.flush(&mut state);
            let wait = if state.blocked { WRITE_RETRY } else { TICK };
            state.followers += 1;
            state = self.turn.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
            state.followers -= 1;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The endpoint does not run foreign code, so a panic inside of the lock would be a bug of its own, reported there.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> (Submission, Responder) {
        let control: Arc<dyn ReplyControl> = match self.this.upgrade() {
            Some(shared) => shared,
            None => return Submission::pending(Arc::new(Gone), 0),
        };
        Submission::pending(control, self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Changes the state. Somebody else may be reading, and would not write what this adds.
    fn command<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state);
        if state.leader {
            self.flush(&mut state);
        }
        result
    }

    /// There is something to write that can wait for the next call, or for the attendant's next look.
    fn notice(&self) {
        if !self.active.load(Ordering::Acquire) {
            self.wake_attendant();
        }
    }

    fn wake_attendant(&self) {
        if let Ok(attendant) = Attendant::get() {
            attendant.wake();
        }
    }

    fn report(&self, events: Vec<rpc_core::proto::ClientEvent<Responder>>) {
        if let Some(error) = report(events, &self.peer) {
            let watchers = std::mem::take(&mut self.state().watchers);
            for watcher in watchers {
                watcher.complete(Err(error.clone()));
            }
        }
    }

    /// Writes what can be written without waiting.
    fn flush(&self, state: &mut State) {
        while !state.unwritable {
            state.endpoint.stage();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = state.endpoint.slices(&mut slices);
            state.blocked = false;
            if count == 0 {
                return;
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // One slice, as nearly always, is cheaper for the kernel to take as such.
            let sent = match &slices[..count] {
                [one] => send(&self.io, one, flags),
                several => sendmsg(&self.io, several, &mut SendAncillaryBuffer::default(), flags),
            };
            match sent {
                Ok(written) => state.endpoint.advance(written, Instant::now()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    state.blocked = true;
                    return;
                }
                Err(error) => {
                    state.unwritable = true;
                    state.blocked = false;
                    // What a peer said before it closed is still there to be read.
                    if state.reading {
                        // By the leader, who may be in the middle of a payload: it gets that, and then the end.
                        let _ = self.io.shutdown(std::net::Shutdown::Read);
                    } else {
                        self.read_rest(state);
                        state.endpoint.fail(lost(error));
                    }
                    return;
                }
            }
        }
    }

    fn read_rest(&self, state: &mut State) {
        let mut buffer = vec![0; READ_MAX];
        while let Ok(count @ 1..) = receive(&self.io, &mut buffer, RecvFlags::DONTWAIT) {
            state.input.extend_from_slice(&buffer[..count]);
            if state.endpoint.handle_input(&mut state.input, Instant::now()).is_err() {
                return;
            }
        }
    }

    /// Reads and writes for everyone: until `done`, or without it for as long as nothing has to be waited for.
    fn lead<'a>(&'a self, mut state: MutexGuard<'a, State>, done: Option<&dyn Fn() -> bool>) -> MutexGuard<'a, State> {
        state.leader = true;
        loop {
            let now = Instant::now();
            let timeout = state.endpoint.poll_timeout();
            if timeout.is_some_and(|timeout| timeout <= now)
                && let Err(error) = state.endpoint.handle_timeout(now)
            {
                state.endpoint.fail(error);
            }
            self.flush(&mut state);
            let events: Vec<_> = std::iter::from_fn(|| state.endpoint.poll_event()).collect();
            if !events.is_empty() {
                drop(state);
                self.report(events);
                state = self.state();
                if state.followers > 0 {
                    self.turn.notify_all();
                }
                // Completing a request may have made new ones.
                if !done.is_some_and(|done| done()) && state.endpoint.ended().is_none() {
                    continue;
                }
            }
            if done.is_some_and(|done| done()) || state.endpoint.ended().is_some() {
                break;
            }
            let wait = timeout.map_or(TICK, |timeout| timeout.saturating_duration_since(now));
            match self.read(state, wait, done.is_some()) {
                (next, true) => state = next,
                (next, false) => {
                    state = next;
                    if done.is_none() {
                        break;
                    }
                }
            }
        }
        state.leader = false;
        if state.endpoint.ended().is_some() {
            // The peer waits for this, and references to the session may live long.
            let _ = self.io.shutdown(std::net::Shutdown::Both);
        }
        if state.followers > 0 {
            self.turn.notify_all();
        }
        if state.endpoint.is_quiet() {
            self.attended.store(false, Ordering::Release);
        }
        state
    }

    /// Reads once, and waits up to `wait` for it if `may_wait`. Whether anything was read.
    fn read<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        wait: Duration,
        may_wait: bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let mut bulk = state.endpoint.take_bulk();
        let mut scratch = std::mem::take(&mut state.scratch);
        let limit = if std::mem::take(&mut state.behind_bulk) { READ_BEHIND_BULK } else { READ_MAX };
        let blocked = state.blocked;
        state.reading = true;
        drop(state);
        let target = match &mut bulk {
            Some(bulk) => bulk.unfilled(),
            None => &mut scratch[..limit],
        };
        let outcome = self.read_into(target, wait, may_wait, blocked);
        let mut state = self.state();
        state.reading = false;
        state.scratch = scratch;
        let (count, is_bulk) = (outcome.unwrap_or(0), bulk.is_some());
        if let Some(bulk) = &mut bulk {
            bulk.advance(count);
        } else if count > 0 {
            let State { input, scratch, .. } = &mut *state;
            input.extend_from_slice(&scratch[..count]);
        }
        let now = Instant::now();
        state.behind_bulk = is_bulk;
        // It goes back in any case: a payload that was not filled any further is still under way.
        let mut handled = match bulk {
            Some(bulk) if count > 0 => state.endpoint.put_bulk(bulk, now),
            Some(bulk) => {
                state.endpoint.put_idle_bulk(bulk);
                Ok(())
            }
            None => Ok(()),
        };
        if count > 0 && handled.is_ok() {
            let State { endpoint, input, .. } = &mut *state;
            handled = endpoint.handle_input(input, now);
        }
        match (handled, outcome) {
            (Err(error), _) => state.endpoint.fail(error),
            (Ok(()), Ok(0)) => {
                let left = state.input.len();
                state.endpoint.handle_end_of_stream(left);
            }
            (Ok(()), Ok(_)) => {}
            (Ok(()), Err(Errno::AGAIN | Errno::INTR)) => return (state, false),
            (Ok(()), Err(error)) => state.endpoint.fail(lost(error)),
        }
        (state, true)
    }

    fn read_into(&self, target: &mut [u8], wait: Duration, may_wait: bool, blocked: bool) -> Result<usize, Errno> {
        if !may_wait {
            return receive(&self.io, target, RecvFlags::DONTWAIT);
        }
        // A read that blocks is one system call less than a poll and a read, but ends only after its own limit. That the
        // keep-alive may be late by half an interval does no harm; a deadline would be.
        if blocked || wait < self.read_limit / 2 {
            let mut events = PollFlags::IN;
            if blocked {
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

fn lost(error: Errno) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {}", io::Error::from(error)))
}

fn receive(io: &BlockingIo, target: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
    recv(io, target, flags).map(|(count, _)| count)
}

fn timespec(duration: Duration) -> Timespec {
    // Rounded up, so that a timeout is due when the wait is over.
    let duration = duration.saturating_add(Duration::from_micros(50)).min(Duration::from_secs(3600));
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

fn set_read_timeout(io: &BlockingIo, timeout: Option<Duration>) -> io::Result<()> {
    match io {
        BlockingIo::Tcp(stream) => stream.set_read_timeout(timeout),
        BlockingIo::Unix(stream) => stream.set_read_timeout(timeout),
    }
}

/// The control of a session that is being torn down.
struct Gone;

impl ReplyControl for Gone {
    fn cancel(&self, _: u64) {}
    fn discard(&self, _: Value) {}
}

/// The thread that looks after sessions nobody waits for.
struct Attendant {
    sessions: Mutex<Vec<Arc<Shared>>>,
    /// Written to, to end the thread's sleep.
    bell: UnixStream,
    rung: AtomicBool,
}

impl Attendant {
    fn get() -> io::Result<&'static Self> {
        static ATTENDANT: OnceLock<&'static Attendant> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(attendant) = ATTENDANT.get() {
            return Ok(attendant);
        }
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attendant) = ATTENDANT.get() {
            return Ok(attendant);
        }
        let (bell, ear) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ear.set_nonblocking(true)?;
        let attendant: &'static Self =
            Box::leak(Box::new(Self { sessions: Mutex::default(), bell, rung: AtomicBool::new(false) }));
        std::thread::Builder::new().name("rpc-attendant".into()).spawn(move || attendant.run(&ear))?;
        Ok(ATTENDANT.get_or_init(|| attendant))
    }

    fn adopt(&self, session: Arc<Shared>) {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        self.wake();
    }

    fn wake(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // A full pipe is as good as a written one.
            let _ = io::Write::write(&mut &self.bell, &[1]);
        }
    }

    fn run(&self, ear: &UnixStream) {
        let mut idle = Vec::new();
        let mut waiting: Vec<Arc<Shared>> = Vec::new();
        let mut over: Vec<Arc<Shared>> = Vec::new();
        loop {
            waiting.clear();
            idle.clear();
            let mut wait: Option<Duration> = None;
            let mut sooner = |limit: Duration| wait = Some(wait.map_or(limit, |wait| wait.min(limit)));
            {
                let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
                over.extend(sessions.extract_if(.., |session| session.is_over()));
                waiting.extend(sessions.iter().cloned());
            }
            for session in over.drain(..) {
                // Whoever found the end may have been on its way elsewhere.
                let events = std::iter::from_fn(|| session.state().endpoint.poll_event()).collect();
                session.report(events);
            }
            let now = Instant::now();
            for session in &waiting {
                let active = session.active.swap(false, Ordering::AcqRel);
                let (led, timeout, blocked) = session.outlook(now);
                if led || (active && !session.attended.load(Ordering::Acquire)) {
                    idle.push(None);
                    // Somebody is there; look again soon.
                    session.active.store(led, Ordering::Release);
                    sooner(if blocked { WRITE_RETRY } else { TICK });
                } else {
                    idle.push(Some(if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }));
                    sooner(timeout);
                }
            }
            let mut fds = vec![PollFd::new(ear, PollFlags::IN)];
            let watched = waiting.iter().zip(&idle).filter_map(|(session, events)| Some((session, (*events)?)));
            fds.extend(watched.map(|(session, events)| PollFd::new(&session.io, events)));
            // Interrupted or not: everything is looked at below.
            let _ = poll(&mut fds, wait.map(timespec).as_ref());
            drop(fds);
            let mut rings = [0; 64];
            while matches!(io::Read::read(&mut &*ear, &mut rings), Ok(1..)) {}
            // After the reads, which would otherwise swallow a ring that the flag then keeps from being repeated; and
            // before the look at the sessions, which sees whatever a ring in between was about.
            self.rung.store(false, Ordering::Release);
            for session in &waiting {
                session.look_after();
            }
        }
    }
}

impl Shared {
    /// Whether the session has ended and nobody is at work on it.
    fn is_over(&self) -> bool {
        let state = self.state();
        state.endpoint.ended().is_some() && !state.leader
    }

    /// Whether somebody leads, how long until something is due, and whether there is output that did not fit.
    fn outlook(&self, now: Instant) -> (bool, Duration, bool) {
        let state = self.state();
        let timeout = state.endpoint.poll_timeout().map_or(TICK, |timeout| timeout.saturating_duration_since(now));
        (state.leader, timeout, state.blocked)
    }

    /// Does whatever can be done without waiting, unless somebody is at it already.
    fn look_after(&self) {
        let Ok(mut state) = self.state.try_lock() else { return };
        if state.leader {
            self.flush(&mut state);
        } else {
            drop(self.lead(state, None));
        }
    }
}

/// Performs the dialling side of a handshake on the calling thread.
///
/// # Errors
///
/// Whatever either side objects to; the peer has been told.
pub(crate) fn dial_hands_blocking(
    channel: &BlockingChannel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let broken = |error: io::Error| {
        RpcError::new(ErrorKind::PeerLost, format!("the connection broke during the handshake: {error}"))
    };
    let work = || {
        let mut handshake = Handshake::dial(config, Instant::now());
        let mut input = BytesMut::new();
        let mut buffer = [0; 4096];
        loop {
            let outcome = handshake.handle_input(&mut input);
            let output = handshake.take_output();
            let written = io::Write::write_all(&mut channel.io(), &output);
            if let Some(negotiated) = outcome? {
                return written.map(|()| (negotiated, input)).map_err(broken);
            }
            // A peer that refuses may have closed already; what it said is still there to be read.
            if let Err(error) = written
                && !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
            {
                return Err(broken(error));
            }
            let now = Instant::now();
            handshake.handle_timeout(now)?;
            let left = handshake.deadline().saturating_duration_since(now).max(Duration::from_millis(1));
            set_read_timeout(channel.io(), Some(left)).map_err(broken)?;
            match channel.io().read(&mut buffer) {
                Ok(0) => return Err(handshake.end_of_stream()),
                Ok(count) => input.extend_from_slice(&buffer[..count]),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(broken(error)),
            }
        }
    };
    work().map_err(|error: RpcError| error.with_peer(channel.peer()))
}
