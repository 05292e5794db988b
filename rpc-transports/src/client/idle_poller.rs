//! The thread of the process that polls blocking sessions while no caller moves their bytes.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Session that the thread polls.
pub(super) trait PolledSession: Send + Sync {
    /// Returns the session's socket.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Returns the events to wait for on behalf of the session.
    fn interest(&self, now: Instant) -> Interest;

    /// Does all work that is possible without waiting, unless a caller is doing it already.
    fn poll(&self);

    /// Returns true if the session has ended and no caller moves its bytes.
    fn has_finished(&self) -> bool;

    /// Delivers the events that are left after the end to their callers.
    fn deliver_rest(&self);
}

/// Conditions that the thread waits for on behalf of a session.
pub(super) struct Interest {
    /// Readiness of the socket. `None` while a caller reads: two readers would wake each other for
    /// nothing.
    pub(super) readiness: Option<PollFlags>,
    /// Longest time until the session has to be polled again.
    pub(super) timeout: Duration,
}

/// Handle of the thread for the sessions.
pub(super) struct IdlePoller {
    sessions: Mutex<Vec<Arc<dyn PolledSession>>>,
    /// Sending end of a socket pair: a byte written to it ends the thread's wait.
    wakeups: UnixStream,
    /// True once a wake-up has been sent that the thread has not taken.
    is_woken: AtomicBool,
}

impl IdlePoller {
    /// Returns the poller of the process. The first call starts its thread.
    ///
    /// # Errors
    ///
    /// The thread or its socket pair cannot be created. The next call tries again.
    pub(super) fn get() -> io::Result<&'static Self> {
        static POLLER: OnceLock<&'static IdlePoller> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        if let Some(poller) = POLLER.get() {
            return Ok(poller);
        }
        let _starting = STARTING.lock();
        if let Some(poller) = POLLER.get() {
            return Ok(poller);
        }
        let (wakeups, receiver) = UnixStream::pair()?;
        wakeups.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        let poller: &'static Self =
            Box::leak(Box::new(Self { sessions: Mutex::default(), wakeups, is_woken: AtomicBool::new(false) }));
        std::thread::Builder::new().name("rpc-idle-poller".into()).spawn(move || poller.run(&receiver))?;
        Ok(POLLER.get_or_init(|| poller))
    }

    /// Polls `session` until it has finished.
    pub(super) fn add(&self, session: Arc<dyn PolledSession>) {
        self.sessions().push(session);
        self.wake();
    }

    /// Wakes the thread, which polls all sessions.
    pub(super) fn wake(&self) {
        if !self.is_woken.swap(true, Ordering::AcqRel) {
            // A full socket buffer wakes the thread as well.
            let _ = io::Write::write(&mut &self.wakeups, &[1]);
        }
    }

    fn sessions(&self) -> MutexGuard<'_, Vec<Arc<dyn PolledSession>>> {
        self.sessions.lock()
    }

    fn run(&self, receiver: &UnixStream) {
        let mut readiness = Vec::new();
        let mut polled: Vec<Arc<dyn PolledSession>> = Vec::new();
        let mut finished: Vec<Arc<dyn PolledSession>> = Vec::new();
        loop {
            polled.clear();
            readiness.clear();
            {
                let mut sessions = self.sessions();
                finished.extend(sessions.extract_if(.., |session| session.has_finished()));
                polled.extend(sessions.iter().cloned());
            }
            // The lock is not held, since a completed request may start a session. The caller that
            // found the end may have returned without delivering all events.
            finished.drain(..).for_each(|session| session.deliver_rest());
            let now = Instant::now();
            let mut timeout: Option<Duration> = None;
            for session in &polled {
                let interest = session.interest(now);
                readiness.push(interest.readiness);
                timeout = Some(timeout.map_or(interest.timeout, |timeout| timeout.min(interest.timeout)));
            }
            let mut fds = vec![PollFd::new(receiver, PollFlags::IN)];
            let watched =
                polled.iter().zip(&readiness).filter_map(|(session, readiness)| Some((session, (*readiness)?)));
            fds.extend(watched.map(|(session, events)| PollFd::from_borrowed_fd(session.socket(), events)));
            // All sessions are polled below, whatever the outcome, so an interruption does not
            // matter.
            let _ = poll(&mut fds, timeout.map(timespec).as_ref());
            drop(fds);
            let mut bytes = [0; 64];
            while matches!(io::Read::read(&mut &*receiver, &mut bytes), Ok(1..)) {}
            // Cleared after the reads, because otherwise they would swallow a wake-up that the flag
            // keeps from being repeated. Cleared before the sessions are polled, so that they see
            // the changes behind a wake-up in between.
            self.is_woken.store(false, Ordering::Release);
            polled.iter().for_each(|session| session.poll());
        }
    }
}

/// Converts a timeout for `poll(2)`, rounded up, so that the awaited event is due when the wait is
/// over.
pub(super) fn timespec(timeout: Duration) -> Timespec {
    let timeout = timeout.saturating_add(Duration::from_micros(50)).min(Duration::from_secs(3600));
    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() }
}
