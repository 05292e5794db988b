//! The time since anything has come from the peer of a TCP socket, by the kernel.

#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Returns nothing: other systems do not tell.
#[cfg(not(target_os = "linux"))]
pub(crate) fn of(_socket: &OwnedFd) -> Option<Duration> {
    None
}

/// Returns the time since data or an acknowledgement was last received: a peer that takes data
/// slowly sends acknowledgements alone. `None` where the kernel does not tell, such as for other
/// sockets.
#[cfg(target_os = "linux")]
pub(crate) fn of(socket: &OwnedFd) -> Option<Duration> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).ok()?;
    // SAFETY: the kernel writes at most `len` bytes, which is the length of the zeroed memory.
    let failed = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    if failed != 0 {
        return None;
    }
    // SAFETY: all fields are numbers, for which any bytes are valid, also those that the kernel has
    // left at zero.
    let info = unsafe { info.assume_init() };
    Some(Duration::from_millis(info.tcpi_last_data_recv.min(info.tcpi_last_ack_recv).into()))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_peer_that_only_takes_data_is_not_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        let socket = OwnedFd::from(far.try_clone().unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        while of(&socket).unwrap() < Duration::from_millis(20) {
            assert!(Instant::now() < deadline, "the silence does not grow");
            std::thread::yield_now();
        }
        let before = Instant::now();
        far.write_all(b"x").unwrap();
        near.read_exact(&mut [0]).unwrap();
        while of(&socket).unwrap() > before.elapsed() + Duration::from_millis(10) {
            assert!(Instant::now() < deadline, "the acknowledgement does not count");
            std::thread::yield_now();
        }
    }

    #[test]
    fn data_ends_the_silence_and_other_sockets_tell_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        let deadline = Instant::now() + Duration::from_secs(60);
        let socket = OwnedFd::from(far.try_clone().unwrap());
        while of(&socket).unwrap() < Duration::from_millis(20) {
            assert!(Instant::now() < deadline, "the silence does not grow");
            std::thread::yield_now();
        }
        let before = Instant::now();
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
        // The kernel counts in its own ticks, which take up to 10 ms.
        assert!(of(&socket).unwrap() <= before.elapsed() + Duration::from_millis(10));
        assert_eq!(of(&UnixStream::pair().unwrap().0.into()), None);
    }
}
