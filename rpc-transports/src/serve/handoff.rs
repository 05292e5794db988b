//! Handing the socket of a client to another process, which then serves the session by itself.
//!
//! A session in a process of its own would cost a hop if this process passed its bytes on. Where
//! the client is connected by a bare socket (TCP, Unix), the socket goes to that process as a
//! descriptor once the handshake is over, with the input that was read beyond it. This process
//! keeps a duplicate, which it neither reads nor writes while the other one serves:
//!
//! - The end of the session by the server (its stop, its drain, the longest duration, a reason of
//!   its own) is an order to the process, which is killed if it does not follow.
//! - If the process ends without having ended the session, this one tells the client the reason,
//!   provided that the output stopped at the end of a frame: see [`OutputMark`].
//! - Over TCP the kernel tells how long the client has been silent. So a client whose machine is
//!   gone is noticed even if the process does not send its pings, or ignores that there is no
//!   answer. A [dialect](crate::Dialect) has no pings, and its clients may be silent: the kernel's
//!   probes break the connection of a machine that is gone.
//! - A time at which the session ends by an agreement of the dialect is kept by the process, which
//!   is killed if it is late.
//!
//! The process itself checks the idle time and the pace of the client. Code of the client may run
//! there and forge that, which gains no more than requests or bytes at the right pace would.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{EndpointConfig, Negotiated, ServerEndpoint};
use rpc_core::{ErrorKind, MemoryQuota, RpcError, RpcSession as _, SharedSession, Submission};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::access_record::{AccessRecord, Traffic};
use super::connection::LINGER;
use super::mailbox::{Command, Mailbox};
use super::options::ServeOptions;
use super::output_mark::OutputMark;
use super::session_process::{ConnectionState, EndReport, PassedConnection, PassedProtocol, SessionProcess};
use super::stall_timeouts::lasted_too_long;
use super::task::{SessionParts, stopped};
use crate::channel::Channel;
use crate::{clock, tcp_silence};

/// A session that another process serves, over the socket of the client.
pub(super) struct HandedOff {
    process: Arc<dyn SessionProcess>,
    /// Session of the factory, whose end is that of the process, and its share in the server.
    owned: Option<(SharedSession, SessionShare)>,
    protocol: HandedProtocol,
    /// Channel of the client, without its socket.
    channel: Channel,
    mark: OutputMark,
    monitor: HandoffMonitor,
}

/// Share of a session in the server, which ends after the session.
pub(super) type SessionShare = Box<dyn Send + Sync>;

/// Protocol of a session that another process serves, for the last message.
enum HandedProtocol {
    Native { negotiated: Box<Negotiated>, keep_alive: Duration },
    Dialect(LastMessage),
}

/// Function of a dialect that returns the message by which a client learns why its session ends.
pub(super) type LastMessage = Box<dyn Fn(&RpcError) -> Vec<u8> + Send + Sync>;

/// Socket that was passed to another process, which serves it from then on.
pub(super) struct PassedSocket {
    process: Arc<dyn SessionProcess>,
    mark: OutputMark,
    socket: Arc<OwnedFd>,
}

/// Facts about a connection in a dialect whose socket was passed.
pub(super) struct HandedDialect {
    pub(super) last_message: LastMessage,
    pub(super) mailbox: Arc<Mailbox>,
    /// Time by which the process ends the session by itself, and the reason.
    pub(super) deadline: Option<(Instant, RpcError)>,
}

/// Facts by which this process ends a session that another one serves.
struct HandoffMonitor {
    mailbox: Arc<Mailbox>,
    socket: Arc<OwnedFd>,
    /// End of the longest duration of the session.
    expires: Option<Instant>,
    /// Time by which the process is to end the session by itself, and the reason.
    deadline: Option<(Instant, RpcError)>,
    /// Longest silence of a client that is there, by its socket.
    silence_limit: Option<Duration>,
    is_going_away: bool,
    /// Reason for which the process was told to end the session.
    closing: Option<RpcError>,
}

/// Occasions on which this process acts.
enum Event {
    Reported(EndReport),
    /// The process has ended without a report.
    Lost(RpcError),
    /// The server ends the session.
    Close(RpcError),
    /// The process has to end the session by itself now.
    Due(RpcError),
    GoAway,
}

impl PassedSocket {
    /// Passes the socket of a channel to `process`. The channel has none then. `None` if it cannot
    /// be passed: the channel keeps it.
    pub(super) async fn pass(
        process: &Arc<dyn SessionProcess>,
        channel: &mut Channel,
        protocol: PassedProtocol,
        input: Vec<u8>,
        queued: Arc<MemoryQuota>,
    ) -> Option<Self> {
        // Out of the runtime, which is not to be woken for the input of the other process.
        let socket = channel.take_socket().ok()?;
        let state = ConnectionState { protocol, input, peer: channel.peer().to_owned(), process: channel.process() };
        let pass = async {
            let (mark, file) = OutputMark::create()?;
            let connection = PassedConnection { socket: socket.try_clone()?, mark: file, state };
            process.take(connection, queued).await.map(|()| mark)
        };
        match pass.await {
            Ok(mark) => Some(Self { process: process.clone(), mark, socket: Arc::new(socket) }),
            Err(error) => {
                tracing::debug!(peer = channel.peer(), %error, "the process of a session cannot have its socket");
                if let Err(error) = channel.put_socket(socket) {
                    tracing::debug!(peer = channel.peer(), %error, "the socket of a session is lost");
                }
                None
            }
        }
    }
}

impl HandedOff {
    /// Passes the socket of a bare channel to `process`. Returns the channel and the parts of the
    /// session if it cannot be passed: the session is served here then.
    pub(super) async fn begin(
        process: &Arc<dyn SessionProcess>,
        mut channel: Channel,
        negotiated: &Negotiated,
        input: &BytesMut,
        parts: SessionParts,
        options: &ServeOptions,
    ) -> Result<Self, (Channel, SessionParts)> {
        let protocol = PassedProtocol::Native(Box::new(negotiated.clone()));
        let queued = MemoryQuota::new("max_queued", most_queued(negotiated), Some(parts.queued.clone()));
        let passed = PassedSocket::pass(process, &mut channel, protocol, input.to_vec(), queued).await;
        let Some(PassedSocket { process, mark, socket }) = passed else { return Err((channel, parts)) };
        let watched = Arc::downgrade(&socket);
        let SessionParts { session, mailbox, entry, .. } = parts;
        mailbox.set_silence_source(Box::new(move || watched.upgrade().and_then(|socket| tcp_silence::of(&socket))));
        let keep_alive = options.keep_alive;
        let mut monitor = HandoffMonitor::new(mailbox, socket, options.session_duration);
        // The process gives the client up after three intervals. One that does not send its pings
        // may be blocked, which is noticed by its own silence after as long.
        monitor.silence_limit = Some(keep_alive.saturating_mul(6).saturating_add(LINGER));
        let protocol = HandedProtocol::Native { negotiated: Box::new(negotiated.clone()), keep_alive };
        Ok(Self { process, owned: Some((session, Box::new(entry))), protocol, channel, mark, monitor })
    }

    /// Creates the same for a session in a dialect, whose `channel` has no socket any more.
    pub(super) fn of_dialect(
        passed: PassedSocket,
        channel: Channel,
        owned: (SharedSession, SessionShare),
        handed: HandedDialect,
    ) -> Self {
        let HandedDialect { last_message, mailbox, deadline } = handed;
        let PassedSocket { process, mark, socket } = passed;
        let mut monitor = HandoffMonitor::new(mailbox, socket, None);
        monitor.deadline = deadline;
        Self { process, owned: Some(owned), protocol: HandedProtocol::Dialect(last_message), channel, mark, monitor }
    }

    /// Sets the end of the longest duration of the session.
    pub(super) fn expire_at(&mut self, expires: Option<Instant>) {
        self.monitor.expires = expires;
    }

    /// Watches over the session to its end, and records that.
    pub(super) async fn run(&mut self, record: &AccessRecord) {
        let (reason, report) = self.wait_for_end().await;
        // Until then the process, whose code may be the client's, could write to the socket, or
        // have this process wait in it.
        let has_exited = tokio::time::timeout(EXIT_TIMEOUT, self.process.exited()).await.is_ok();
        // The server has ended once the session is freed, and its connection closed.
        let owned = self.owned.take();
        let was_told = has_exited
            && match &report {
                Some(report) if report.last_message_sent => self.reopen().is_ok(),
                _ => self.tell(&reason).await,
            };
        // A dialect counts neither.
        let report = report.filter(|_| matches!(self.protocol, HandedProtocol::Native { .. }));
        let traffic = report.map(|EndReport { requests, received, sent, .. }| Traffic { requests, received, sent });
        record.log_end_of_session(&reason, traffic.as_ref());
        crate::runtime::free(owned);
        if was_told {
            self.drain().await;
        }
        // This also ends the connection for a process that has passed the socket on.
        let _ = shutdown(&self.monitor.socket, Shutdown::Both);
    }

    /// Resolves to the reason of the end, and to the report of the process if there is one.
    async fn wait_for_end(&mut self) -> (RpcError, Option<EndReport>) {
        let process = self.process.clone();
        let mut reported = process.ended();
        let session_ended = self.owned.as_ref().map_or_else(Submission::never, |(session, _)| session.ended());
        let mut session_ended = session_ended.reply();
        loop {
            let event = tokio::select! {
                biased;
                report = &mut reported => Event::Reported(report),
                outcome = &mut session_ended => Event::Lost(outcome.err().unwrap_or_else(no_reason)),
                event = self.monitor.notice() => event,
                event = self.monitor.time_out() => event,
            };
            match event {
                Event::Reported(report) => return (report.reason.clone(), Some(report)),
                Event::Lost(error) => {
                    // The report comes by another way, and may be later than the end of the
                    // session.
                    let exited = tokio::time::timeout(EXIT_TIMEOUT, process.exited()).await;
                    if exited.is_ok()
                        && let Ok(report) = tokio::time::timeout(Duration::ZERO, &mut reported).await
                    {
                        return (report.reason.clone(), Some(report));
                    }
                    let reason = match self.monitor.closing.take() {
                        Some(reason) => reason,
                        None if process.client_is_gone() => {
                            RpcError::new(ErrorKind::PeerLost, "the client closed the connection").may_have_run(true)
                        }
                        None => error,
                    };
                    return (reason, None);
                }
                Event::GoAway => {
                    self.monitor.is_going_away = true;
                    process.go_away();
                }
                Event::Close(reason) => {
                    process.close(&reason);
                    process.end_soon();
                    self.monitor.closing = Some(reason);
                }
                Event::Due(reason) => {
                    process.end_soon();
                    self.monitor.closing = Some(reason);
                }
            }
        }
    }

    /// Gives the channel its socket again, once the process has ended. The process may have changed
    /// how the socket behaves.
    fn reopen(&mut self) -> io::Result<()> {
        let socket = &self.monitor.socket;
        rustix::net::sockopt::set_socket_linger(socket, None)?;
        rustix::io::ioctl_fionbio(socket, true)?;
        self.channel.put_socket(socket.try_clone()?)
    }

    /// Tells the client the reason why its session has ended, instead of the process, which is
    /// gone. Returns false if the output stopped in the middle of a frame, or the client takes no
    /// more.
    async fn tell(&mut self, reason: &RpcError) -> bool {
        if !self.mark.is_at_frame_end() || self.reopen().is_err() {
            return false;
        }
        let message = self.protocol.last_message(reason);
        let channel = &mut self.channel;
        let mut left = &message[..];
        let write = poll_fn(move |cx| {
            let socket = channel.plain_socket().ok_or(io::ErrorKind::NotConnected)?;
            while !left.is_empty() {
                ready!(socket.poll_write_ready(cx))?;
                // Never waits, even if the socket was made to meanwhile.
                let mut write =
                    || send(socket.as_fd(), left, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map_err(io::Error::from);
                match socket.try_write_io(&mut write) {
                    Ok(written) => left = &left[written..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Poll::Ready(Err(error)),
                }
            }
            Poll::Ready(Ok(()))
        });
        matches!(tokio::time::timeout(LINGER, write).await, Ok(Ok(())))
    }

    /// Ends the output, and waits for the client to end its own, as
    /// [`drain_and_close`](super::connection::drain_and_close) does, without a call that waits.
    async fn drain(&mut self) {
        let channel = &mut self.channel;
        if shutdown(&self.monitor.socket, Shutdown::Write).is_err() {
            return;
        }
        let read = poll_fn(move |cx| {
            let Some(socket) = channel.plain_socket() else { return Poll::Ready(()) };
            loop {
                if ready!(socket.poll_read_ready(cx)).is_err() {
                    return Poll::Ready(());
                }
                let mut discarded = [0; 4096];
                let mut read = || match recv(socket.as_fd(), &mut discarded, RecvFlags::DONTWAIT) {
                    Ok((count, _)) => Ok(count),
                    Err(error) => Err(io::Error::from(error)),
                };
                match socket.try_read_io(&mut read) {
                    Ok(1..) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    _ => return Poll::Ready(()),
                }
            }
        });
        let _ = tokio::time::timeout(LINGER, read).await;
    }
}

impl Drop for HandedOff {
    fn drop(&mut self) {
        // A socket may have been made to wait when it is closed.
        let channel = std::mem::replace(&mut self.channel, Channel::new(tokio::io::empty(), ""));
        crate::runtime::free((channel, self.monitor.socket.clone()));
    }
}

impl HandedProtocol {
    /// Returns the message that tells a client the reason for the end of its session.
    fn last_message(&self, reason: &RpcError) -> Vec<u8> {
        match self {
            Self::Native { negotiated, keep_alive } => {
                let config = EndpointConfig { keep_alive: *keep_alive };
                let mut endpoint = ServerEndpoint::new(negotiated, config, clock::now());
                endpoint.close(Some(reason));
                endpoint.stage();
                let mut slices = [IoSlice::new(&[]); 4];
                let count = endpoint.slices(&mut slices);
                slices[..count].iter().flat_map(|slice| slice.iter().copied()).collect()
            }
            Self::Dialect(last_message) => last_message(reason),
        }
    }
}

impl HandoffMonitor {
    fn new(mailbox: Arc<Mailbox>, socket: Arc<OwnedFd>, session_duration: Option<Duration>) -> Self {
        let expires = session_duration.and_then(|duration| clock::now().checked_add(duration));
        Self { mailbox, socket, expires, deadline: None, silence_limit: None, is_going_away: false, closing: None }
    }

    /// Resolves to what the server tells this session, until it is to end.
    async fn notice(&self) -> Event {
        poll_fn(|cx| {
            self.mailbox.register(cx.waker());
            if self.closing.is_some() {
                return Poll::Pending;
            }
            match (self.mailbox.take_end(), self.mailbox.commanded()) {
                (Some(reason), _) => Poll::Ready(Event::Close(reason)),
                (None, Some(Command::Stop)) => Poll::Ready(Event::Close(stopped())),
                (None, Some(Command::GoAway)) if !self.is_going_away => Poll::Ready(Event::GoAway),
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// Resolves when the session has lasted too long, or its client has been silent for too long.
    async fn time_out(&self) -> Event {
        let silence_and_limit = || Some((tcp_silence::of(&self.socket)?, self.silence_limit?));
        loop {
            if self.closing.is_some() {
                return std::future::pending().await;
            }
            let now = clock::now();
            if self.expires.is_some_and(|expires| now >= expires) {
                return Event::Close(lasted_too_long());
            }
            if let Some((_, reason)) = self.deadline.as_ref().filter(|(deadline, _)| now >= *deadline) {
                return Event::Due(reason.clone());
            }
            let next = match silence_and_limit() {
                Some((silence, limit)) if silence >= limit => {
                    let text = format!("nothing was received for {silence:?}, and the process of the session went on");
                    return Event::Close(RpcError::new(ErrorKind::PeerSilent, text));
                }
                Some((silence, limit)) => now.checked_add(limit - silence),
                None => None,
            };
            let deadline = self.deadline.as_ref().map(|(deadline, _)| *deadline);
            match [self.expires, deadline, next].into_iter().flatten().min() {
                Some(next) => tokio::time::sleep_until(next.into()).await,
                None => return std::future::pending().await,
            }
        }
    }
}

/// Longest wait for the end of a process whose session is over, beyond the time that it is given.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that may be granted to a process beyond those that a session may have queued: a window of
/// shared memory, and steps in which memory is granted.
pub(super) const BESIDE: u64 = 64 << 20;

/// Returns the most bytes that an endpoint of a session may have queued, by the credit of both
/// sides: requests, replies that wait, and a window of shared memory.
fn most_queued(negotiated: &Negotiated) -> u64 {
    let endpoint = ServerEndpoint::new(negotiated, EndpointConfig { keep_alive: Duration::MAX }, clock::now());
    let window = negotiated.ours.window.saturating_add(negotiated.ours.max_message);
    endpoint.max_unsent_bytes().saturating_add(window.saturating_mul(2)).saturating_add(BESIDE)
}

fn no_reason() -> RpcError {
    RpcError::new(ErrorKind::PeerLost, "the process of the session has ended")
}
