//! Notice of a broken group: the last frame that a rank sends on each connection.
//!
//! A socket that is full of data has no room for the notice at once, and one that is closed while
//! it holds unread bytes loses the data that is still on its way out. So each connection is kept
//! until the other side has read all and has gone too. That happens on a thread of its own: a rank
//! that breaks the group, or learns that it is broken, does not wait for it.

use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rpc_core::limits::OpenFileLease;

use super::socket::Socket;

/// Time that the others may take to read the notice.
const LINGER: Duration = Duration::from_secs(10);
/// Time to sleep where no file descriptor reports readiness.
const NAP: Duration = Duration::from_millis(1);
/// Reads of one connection in a row.
const READS: u32 = 16;

/// A connection that only sends the rest of what it has begun, and ignores all that comes in.
pub(super) struct AbortNotice {
    socket: Box<dyn Socket>,
    rest: Vec<u8>,
    sent: usize,
    /// True once all has been sent, and the other side knows that nothing follows.
    finished: bool,
    /// Charge for the connection's descriptor.
    _open_file: Option<OpenFileLease>,
}

impl AbortNotice {
    pub(super) fn new(socket: Box<dyn Socket>, rest: Vec<u8>, open_file: Option<OpenFileLease>) -> Self {
        Self { socket, rest, sent: 0, finished: false, _open_file: open_file }
    }

    /// Sends and reads as far as that is possible now. Returns true if there is more to do.
    fn advance(&mut self, waste: &mut [u8]) -> bool {
        while !self.finished {
            let result = if self.socket.holds_back() {
                self.socket.flush().map(|()| None)
            } else if self.sent < self.rest.len() {
                self.socket.write(&self.rest[self.sent..]).map(Some)
            } else {
                self.finished = true;
                self.socket.finish().map(|()| None)
            };
            match result {
                Ok(Some(0)) => return false,
                Ok(written) => self.sent += written.unwrap_or(0),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        for _ in 0..READS {
            match self.socket.read(waste) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

/// Sends the rest of the data, and closes each connection when the other side has closed it, or
/// after [`LINGER`]. Returns at once.
pub(super) fn drain_and_close(mut connections: Vec<AbortNotice>) {
    // The bytes that fit go before the caller goes on, and perhaps ends.
    let mut waste = vec![0; 64 * 1024];
    connections.retain_mut(|connection| connection.advance(&mut waste));
    if connections.is_empty() {
        return;
    }
    let thread = std::thread::Builder::new().name("disco-abort".into());
    if let Err(error) = thread.spawn(move || linger(connections, &mut waste)) {
        rpc_core::log_limited!(
            WARN,
            %error,
            "no thread for the end of a broken group: ranks may hear of it as a lost connection"
        );
    }
}

fn linger(mut connections: Vec<AbortNotice>, waste: &mut [u8]) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    let until = Instant::now() + LINGER;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if connections.is_empty() || left.is_zero() {
            return;
        }
        let mut files: Vec<_> = connections
            .iter()
            .filter_map(|one| {
                let flags = if one.finished { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
                Some(PollFd::from_borrowed_fd(one.socket.file()?, flags))
            })
            .collect();
        let left = if files.len() < connections.len() { left.min(NAP) } else { left };
        let at_most = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // Interrupted or not, all connections are tried.
        _ = poll(&mut files, Some(&at_most));
        drop(files);
        connections.retain_mut(|connection| connection.advance(waste));
    }
}
