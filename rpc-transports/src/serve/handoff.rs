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
//!   answer.
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
use super::session_process::{ConnectionState, EndReport, PassedConnection, SessionProcess};
use super::stall_timeouts::lasted_too_long;
use super::state::ConnectionEntry;
use super::task::{SessionParts, stopped};
use crate::channel::Channel;
use crate::{clock, tcp_silence};

/// A session that another process serves, over the socket of the client.
pub(super) struct HandedOff {
    process: Arc<dyn SessionProcess>,
    /// Session of the factory, whose end is that of the process, and the entry of the connection.
    owned: Option<(SharedSession, Arc<ConnectionEntry>)>,
    negotiated: Negotiated,
    /// Channel of the client, without its socket.
    channel: Channel,
    mark: OutputMark,
    monitor: HandoffMonitor,
}

/// Facts by which this process ends a session that another one serves.
struct HandoffMonitor {
    mailbox: Arc<Mailbox>,
    socket: Arc<OwnedFd>,
    /// End of the longest duration of the session.
    expires: Option<Instant>,
    keep_alive: Duration,
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
    GoAway,
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
        // Out of the runtime, which is not to be woken for the input of the other process.
        let Ok(socket) = channel.take_socket() else { return Err((channel, parts)) };
        let state = ConnectionState {
            negotiated: negotiated.clone(),
            input: input.to_vec(),
            peer: channel.peer().to_owned(),
            process: channel.process(),
        };
        let pass = async {
            let (mark, file) = OutputMark::create()?;
            let socket = socket.try_clone()?;
            let connection = PassedConnection { socket, mark: file, state };
            let queued = MemoryQuota::new("max_queued", most_queued(negotiated), Some(parts.queued.clone()));
            process.take(connection, queued).await.map(|()| mark)
        };
        let mark = match pass.await {
            Ok(mark) => mark,
            Err(error) => {
                tracing::debug!(peer = channel.peer(), %error, "the process of a session cannot have its socket");
                if let Err(error) = channel.put_socket(socket) {
                    tracing::debug!(peer = channel.peer(), %error, "the socket of a session is lost");
                }
                return Err((channel, parts));
            }
        };
        let socket = Arc::new(socket);
        let watched = Arc::downgrade(&socket);
        let SessionParts { session, mailbox, entry, .. } = parts;
        mailbox.set_silence_source(Box::new(move || watched.upgrade().and_then(|socket| tcp_silence::of(&socket))));
        Ok(Self {
            process: process.clone(),
            owned: Some((session, entry)),
            negotiated: negotiated.clone(),
            channel,
            mark,
            monitor: HandoffMonitor {
                mailbox,
                socket,
                expires: options.session_duration.and_then(|duration| clock::now().checked_add(duration)),
                keep_alive: options.keep_alive,
                is_going_away: false,
                closing: None,
            },
        })
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
                reason = self.monitor.time_out() => Event::Close(reason),
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
        let config = EndpointConfig { keep_alive: self.monitor.keep_alive };
        let mut endpoint = ServerEndpoint::new(&self.negotiated, config, clock::now());
        endpoint.close(Some(reason));
        endpoint.stage();
        let mut slices = [IoSlice::new(&[]); 4];
        let count = endpoint.slices(&mut slices);
        let message: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.iter().copied()).collect();
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

impl HandoffMonitor {
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
    async fn time_out(&self) -> RpcError {
        // The process gives the client up after three intervals. One that does not send its pings
        // may be blocked, which is noticed by its own silence after as long.
        let limit = self.keep_alive.saturating_mul(6).saturating_add(LINGER);
        let mut silence = tcp_silence::of(&self.socket);
        loop {
            if self.closing.is_some() {
                return std::future::pending().await;
            }
            if self.expires.is_some_and(|expires| clock::now() >= expires) {
                return lasted_too_long();
            }
            if let Some(silence) = silence.filter(|silence| *silence >= limit) {
                let text = format!("nothing was received for {silence:?}, and the process of the session went on");
                return RpcError::new(ErrorKind::PeerSilent, text);
            }
            let next = silence.and_then(|silence| clock::now().checked_add(limit - silence));
            match [self.expires, next].into_iter().flatten().min() {
                Some(next) => tokio::time::sleep_until(next.into()).await,
                None => return std::future::pending().await,
            }
            silence = tcp_silence::of(&self.socket);
        }
    }
}

/// Longest wait for the end of a process whose session is over, beyond the time that it is given.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the most bytes that an endpoint of a session may have queued, by the credit of both
/// sides: requests, replies that wait, and a window of shared memory.
fn most_queued(negotiated: &Negotiated) -> u64 {
    /// Window of shared memory, and steps in which memory is granted.
    const BESIDE: u64 = 64 << 20;
    let endpoint = ServerEndpoint::new(negotiated, EndpointConfig { keep_alive: Duration::MAX }, clock::now());
    let window = negotiated.ours.window.saturating_add(negotiated.ours.max_message);
    endpoint.max_unsent_bytes().saturating_add(window.saturating_mul(2)).saturating_add(BESIDE)
}

fn no_reason() -> RpcError {
    RpcError::new(ErrorKind::PeerLost, "the process of the session has ended")
}
