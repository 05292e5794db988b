//! A link in user space: a forwarder of TCP connections that passes bytes on at a bounded rate,
//! after a delay, with a bounded queue in front.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Most bytes that are passed on at a time.
const PIECE: usize = 64 << 10;

/// Time that bytes may wait for the link, besides what waits in the sender's socket.
const QUEUE: Duration = Duration::from_millis(5);

/// Properties of a link, the same in both directions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Time from one end to the other.
    pub(super) one_way: Duration,
    pub(super) bytes_per_second: u64,
}

/// Forwarder to one server. Its threads end with the connections, and with the process.
#[derive(Debug)]
pub(super) struct DelayLine {
    address: SocketAddr,
}

impl DelayLine {
    /// Starts a forwarder to the server at `target`.
    pub(super) fn start(target: &str, link: Link) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (address, target) = (listener.local_addr()?, target.to_owned());
        thread::Builder::new().name("link".to_owned()).spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                // A connection that cannot be made is one that ends at once.
                let _ = connect(near, &target, link);
            }
        })?;
        Ok(Self { address })
    }

    /// Returns the address that clients dial.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

fn connect(near: TcpStream, target: &str, link: Link) -> io::Result<()> {
    let far = TcpStream::connect(target)?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    carry(near.try_clone()?, far.try_clone()?, link)?;
    carry(far, near, link)
}

/// Starts the threads of one direction.
fn carry(mut from: TcpStream, mut to: TcpStream, link: Link) -> io::Result<()> {
    // The bytes on their way and in the queue, however small the pieces are that they come in.
    let on_the_link = (link.one_way + QUEUE).as_secs_f64() * link.bytes_per_second as f64;
    let (queue, arriving) = mpsc::sync_channel::<(Instant, Vec<u8>)>(16 + on_the_link as usize / 1024);
    thread::Builder::new().name("link-in".to_owned()).spawn(move || {
        let mut schedule = Schedule { link, free: Instant::now() };
        let mut buffer = vec![0; PIECE];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let (begins, arrives) = schedule.pass(Instant::now(), count);
            if queue.send((arrives, buffer[..count].to_vec())).is_err() {
                break;
            }
            // Not more is taken than the queue holds: the rest waits at the sender.
            sleep_until(begins.checked_sub(QUEUE).unwrap_or(begins));
        }
    })?;
    thread::Builder::new().name("link-out".to_owned()).spawn(move || {
        while let Ok((arrives, bytes)) = arriving.recv() {
            sleep_until(arrives);
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    })?;
    Ok(())
}

fn sleep_until(due: Instant) {
    let left = due.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        thread::sleep(left);
    }
}

/// Times of the bytes in one direction.
struct Schedule {
    link: Link,
    /// Time at which the link has taken all bytes so far.
    free: Instant,
}

impl Schedule {
    /// Returns the times at which the link has taken `count` bytes that came at `now`, and at which
    /// they arrive.
    fn pass(&mut self, now: Instant, count: usize) -> (Instant, Instant) {
        let takes = Duration::from_secs_f64(count as f64 / self.link.bytes_per_second as f64);
        self.free = self.free.max(now) + takes;
        (self.free, self.free + self.link.one_way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_pass_at_the_rate_and_arrive_after_the_delay() {
        let link = Link { one_way: Duration::from_millis(75), bytes_per_second: 1_000_000 };
        let now = Instant::now();
        let mut schedule = Schedule { link, free: now };
        let ms = Duration::from_millis;
        assert_eq!(schedule.pass(now, 1000), (now + ms(1), now + ms(76)));
        // Behind the first ones, although they come at once.
        assert_eq!(schedule.pass(now, 9000), (now + ms(10), now + ms(85)));
        assert_eq!(schedule.pass(now + ms(50), 1000), (now + ms(51), now + ms(126)));
    }

    #[test]
    fn a_line_passes_bytes_in_both_directions_and_the_end() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let link = Link { one_way: Duration::from_millis(1), bytes_per_second: 1 << 30 };
        let line = DelayLine::start(&server.local_addr().unwrap().to_string(), link).unwrap();
        let mut client = TcpStream::connect(line.address()).unwrap();
        let (mut accepted, _) = server.accept().unwrap();
        client.write_all(b"there").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let (mut there, mut back) = (Vec::new(), Vec::new());
        accepted.read_to_end(&mut there).unwrap();
        accepted.write_all(b"back").unwrap();
        drop(accepted);
        client.read_to_end(&mut back).unwrap();
        assert_eq!((&there[..], &back[..]), (&b"there"[..], &b"back"[..]));
    }
}
