//! Looks for the end of a peer behind input that nobody reads.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Interval of the looks at a socket whose input is not read.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// Event of a socket whose peer sends no more.
#[cfg(target_os = "linux")]
const HANG_UP: PollFlags = PollFlags::RDHUP;
/// Systems without it tell of connections that are closed in both directions, or broken.
#[cfg(not(target_os = "linux"))]
const HANG_UP: PollFlags = PollFlags::empty();

/// Returns true if the peer of a socket sends no more, or if the connection is broken. Input that
/// waits to be read does not hide it.
pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut sockets = [PollFd::from_borrowed_fd(socket, HANG_UP)];
    let polled = poll(&mut sockets, Some(&Timespec::default()));
    polled.is_ok() && sockets[0].revents().intersects(HANG_UP | PollFlags::HUP | PollFlags::ERR)
}
