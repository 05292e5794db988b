//! Send buffer of Unix sockets, for `unix:` and `exec:` addresses alike.

use std::os::fd::AsFd;

/// Send buffer of a Unix socket, in bytes. The kernel doubles it for its own bookkeeping.
const UNIX_SEND_BUFFER: usize = 512 << 10;

/// Gives a Unix socket a larger send buffer, as far as the system allows. With the usual buffer of
/// 208 KiB, both sides of a copy wait for each other about every hundred kilobytes, and each wait
/// is a wake-up. The kernel does not grow the buffer by itself as it does that of TCP. Receiving
/// takes no buffer.
pub(crate) fn widen_unix_socket(socket: impl AsFd) {
    _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, UNIX_SEND_BUFFER);
}
