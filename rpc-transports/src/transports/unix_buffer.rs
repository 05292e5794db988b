//! The send buffer of Unix sockets, of `unix:` and `exec:` alike.

use std::os::fd::AsFd;

/// The send buffer of a Unix socket, in bytes; the kernel doubles it for what it keeps beside them.
const UNIX_SEND_BUFFER: usize = 512 << 10;

/// Gives a Unix socket a larger send buffer, as far as the system allows. With the usual one, of
/// 208 KiB, both sides of a copy wait for each other every hundred kilobytes or so, and each wait
/// is a wake-up. The kernel does not grow it by itself as it does TCP's, and receiving takes no
/// buffer.
pub(crate) fn widen_unix_socket(socket: impl AsFd) {
    _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, UNIX_SEND_BUFFER);
}
