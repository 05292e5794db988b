//! Drivers of a handshake over a channel: asynchronous for both sides, blocking for the side that
//! dials.

use std::future::Future;
use std::io::{self, Read, Write};
use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Negotiated};
use rpc_core::{ErrorKind, RpcError};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::peer_identity::ProvenName;
use super::steps::{HandshakeSteps, Step};
use crate::channel::{BlockingChannel, Channel, ChannelIo};
use crate::channel_io::without_reference;
use crate::clock;

/// Performs the dialling side of a handshake. Returns the agreed settings, and the input that was
/// read beyond the handshake.
///
/// # Errors
///
/// The objection of either side, which the other side has received; or the error of a broken
/// channel.
pub(crate) async fn dial_handshake(
    channel: &mut Channel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    dial(channel, config, |steps| steps).await
}

/// Performs the dialling side of a handshake in which the other side, such as a relay, may take any
/// time to accept. Gives the peer up when it has been silent for three of its keep-alive intervals.
///
/// # Errors
///
/// As [`dial_handshake`].
pub(crate) async fn dial_handshake_with_keep_alive(
    channel: &mut Channel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    dial(channel, config, HandshakeSteps::following_peer).await
}

async fn dial(
    channel: &mut Channel,
    config: HandshakeConfig,
    limit: impl FnOnce(HandshakeSteps) -> HandshakeSteps,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let opens_nothing =
        async |_: &Hello, _: &ProvenName| Err::<(), _>(RpcError::internal("the dialling side approved itself"));
    let steps = limit(HandshakeSteps::new(Handshake::dial(config, clock::now()), channel.take_unread()));
    let (negotiated, input, _) = perform_handshake(channel, steps, &KeepAliveSwitch::default(), opens_nothing).await?;
    Ok((negotiated, input))
}

/// Performs the dialled side of a handshake. `open` opens the session before the client is
/// accepted. Its time is limited by the handshake's deadline, or, once it has
/// [started](KeepAliveSwitch::start) the keep-alive, only by the peer's answers to pings.
///
/// # Errors
///
/// As [`dial_handshake`], and those of `open`.
pub(crate) async fn accept_handshake<S>(
    channel: &mut Channel,
    handshake: Handshake,
    keep_alive: &KeepAliveSwitch,
    open: impl AsyncFnOnce(&Hello, &ProvenName) -> Result<S, RpcError>,
) -> Result<(Negotiated, BytesMut, S), RpcError> {
    let steps = HandshakeSteps::new(handshake, channel.take_unread());
    let (negotiated, input, session) = perform_handshake(channel, steps, keep_alive, open).await?;
    let session = session.ok_or_else(|| RpcError::internal("a handshake ended without a session"))?;
    Ok((negotiated, input, session))
}

/// Switch of the function that opens a session, by which its handshake outlasts the deadline.
#[derive(Debug, Default)]
pub(crate) struct KeepAliveSwitch(OnceLock<Duration>);

impl KeepAliveSwitch {
    /// Replaces the handshake's deadline by a ping for each silent `interval`. Later calls have no
    /// effect.
    pub(crate) fn start(&self, interval: Duration) {
        let _ = self.0.set(interval);
    }

    /// Resolves to the interval once it is set. A future that is polled by the same task must set
    /// it.
    async fn started(&self) -> Duration {
        std::future::poll_fn(|_| self.0.get().map_or(Poll::Pending, |interval| Poll::Ready(*interval))).await
    }
}

async fn perform_handshake<S>(
    channel: &mut Channel,
    mut steps: HandshakeSteps,
    keep_alive: &KeepAliveSwitch,
    open: impl AsyncFnOnce(&Hello, &ProvenName) -> Result<S, RpcError>,
) -> Result<(Negotiated, BytesMut, Option<S>), RpcError> {
    let peer = channel.peer().to_owned();
    let io = channel.io_mut();
    steps.input().reserve(1024);
    match run_steps(io, &mut steps, keep_alive, open).await {
        Ok((negotiated, session)) => Ok((negotiated, steps.into_input(), session)),
        Err(error) => {
            // Last message to a peer that was too slow. It is not waited for.
            let (output, mut io) = (steps.take_output(), io);
            if !output.is_empty() {
                std::future::poll_fn(|cx| {
                    let _ = Pin::new(&mut io).poll_write(cx, &output);
                    let _ = Pin::new(&mut io).poll_flush(cx);
                    Poll::Ready(())
                })
                .await;
            }
            Err(error.with_peer(peer))
        }
    }
}

async fn run_steps<S>(
    io: &mut dyn ChannelIo,
    steps: &mut HandshakeSteps,
    keep_alive: &KeepAliveSwitch,
    open: impl AsyncFnOnce(&Hello, &ProvenName) -> Result<S, RpcError>,
) -> Result<(Negotiated, Option<S>), RpcError> {
    let (mut open, mut session) = (Some(open), None);
    loop {
        let step = steps.advance(clock::now());
        let written = write_output(io, steps).await?;
        match step? {
            Step::Finish(negotiated) => {
                written.map_err(broken)?;
                return Ok((*negotiated, session));
            }
            Step::Open(hello, proven) => {
                let open = open.take().ok_or_else(|| RpcError::internal("a handshake asked for a second session"))?;
                match wait_with_peer(io, steps, keep_alive, open(&hello, &proven)).await? {
                    Ok(opened) => {
                        session = Some(opened);
                        steps.approve(clock::now());
                    }
                    Err(error) => {
                        steps.refuse(&error);
                        let _ = write_output(io, steps).await?;
                        return Err(error);
                    }
                }
            }
            Step::Read => {
                may_read_on(written)?;
                let read = within(steps.timeout(), io.read_buf(steps.input())).await;
                match read {
                    Some(read) => steps.has_read(read.map_err(broken)?, clock::now())?,
                    None => return Err(steps.give_up()),
                }
            }
        }
    }
}

/// Waits for `opening`, and reads from the peer meanwhile: fails when the peer closes, and answers
/// its pings.
async fn wait_with_peer<T>(
    io: &mut dyn ChannelIo,
    steps: &mut HandshakeSteps,
    keep_alive: &KeepAliveSwitch,
    opening: impl Future<Output = Result<T, RpcError>>,
) -> Result<Result<T, RpcError>, RpcError> {
    let mut opening = pin!(opening);
    let mut is_kept_alive = false;
    loop {
        let timeout = steps.timeout();
        tokio::select! {
            biased;
            opened = &mut opening => return Ok(opened),
            interval = keep_alive.started(), if !is_kept_alive => {
                is_kept_alive = true;
                steps.start_keep_alive(interval, clock::now());
            }
            read = within(timeout, io.read_buf(steps.input())) => match read {
                Some(read) => {
                    steps.has_read(read.map_err(broken)?, clock::now())?;
                    if let Err(error) = steps.advance(clock::now()) {
                        let _ = write_output(io, steps).await?;
                        return Err(error);
                    }
                }
                None => steps.handle_timeout(clock::now())?,
            },
        }
        write_output(io, steps).await?.map_err(broken)?;
    }
}

/// Writes the output of the handshake. The inner result is that of the channel.
async fn write_output(io: &mut dyn ChannelIo, steps: &mut HandshakeSteps) -> Result<io::Result<()>, RpcError> {
    let output = steps.take_output();
    if output.is_empty() {
        return Ok(Ok(()));
    }
    let write = async {
        io.write_all(&output).await?;
        io.flush().await
    };
    within(steps.write_timeout(clock::now()), write).await.ok_or_else(|| steps.give_up())
}

/// Returns what `future` resolves to, or `None` if it does not by `limit`.
async fn within<T>(limit: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match limit {
        Some(limit) => tokio::time::timeout_at(limit.into(), future).await.ok(),
        None => Some(future.await),
    }
}

/// Returns an error if no input can be read after a write with this outcome. A peer that refuses
/// may have closed its end already, and the refusal can still be read.
fn may_read_on(written: io::Result<()>) -> Result<(), RpcError> {
    match written {
        Err(error) if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
            Err(broken(error))
        }
        _ => Ok(()),
    }
}

fn broken(error: io::Error) -> RpcError {
    #[cfg(feature = "tls")]
    if let Some(objection) = crate::transports::tls::objection(&error) {
        return objection;
    }
    RpcError::new(
        ErrorKind::PeerLost,
        format!("the connection broke during the handshake: {}", without_reference(&error)),
    )
}

/// Performs the dialling side of a handshake on the calling thread.
///
/// # Errors
///
/// As [`dial_handshake`].
pub(crate) fn dial_handshake_blocking(
    channel: &BlockingChannel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let steps = HandshakeSteps::new(Handshake::dial(config, clock::now()), BytesMut::new());
    run_steps_blocking(channel, steps).map_err(|error| error.with_peer(channel.peer()))
}

fn run_steps_blocking(
    channel: &BlockingChannel,
    mut steps: HandshakeSteps,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let mut io = channel.io();
    let mut buffer = [0; 4096];
    loop {
        let step = steps.advance(clock::now());
        let written = io.write_all(&steps.take_output());
        if let Step::Finish(negotiated) = step? {
            return written.map(|()| (*negotiated, steps.into_input())).map_err(broken);
        }
        may_read_on(written)?;
        let count = loop {
            let now = clock::now();
            steps.handle_timeout(now)?;
            let left = steps.timeout().map(|timeout| timeout.saturating_duration_since(now));
            io.set_read_timeout(left.map(|left| left.max(Duration::from_millis(1)))).map_err(broken)?;
            match io.read(&mut buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                read => break read.map_err(broken)?,
            }
        };
        steps.input().extend_from_slice(&buffer[..count]);
        steps.has_read(count, clock::now())?;
    }
}
