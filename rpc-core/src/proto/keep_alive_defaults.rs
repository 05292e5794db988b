//! Keep-alive: the interval of pings, and the silence after which a peer counts as gone.

use std::time::Duration;

/// Default of the keep-alive interval, on both sides of every session: the time without received
/// bytes after which a ping is sent.
pub const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Silent keep-alive intervals after which the peer is considered gone, in sessions and in
/// handshakes that wait for longer.
pub const SILENT_INTERVALS: u32 = 3;
