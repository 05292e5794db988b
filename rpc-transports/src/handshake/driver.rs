//! The handshake over a channel, on both sides.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Negotiated};
use rpc_core::{ErrorKind, RpcError};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::channel::{Channel, ChannelIo};

/// Performs the dialling side of a handshake. What was read beyond it comes back with the result.
///
/// # Errors
///
/// Whatever either side objects to; the peer has been told.
pub(crate) async fn dial_hands(
    channel: &mut Channel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let handshake = Handshake::dial(config, Instant::now());
    let opens_nothing = async |_: &Hello, _: &str| Ok(());
    let (negotiated, input, ()) = shake_hands(channel, handshake, &OnceLock::new(), opens_nothing).await?;
    Ok((negotiated, input))
}

/// Performs the dialling side of a handshake in which the other side may take as long as it likes to accept, while it says
/// now and then that it is there. It is given up when it has said nothing for three of its intervals.
///
/// # Errors
///
/// As [`dial_hands`].
pub(crate) async fn dial_hands_patiently(
    channel: &mut Channel,
    config: HandshakeConfig,
) -> Result<(Negotiated, BytesMut), RpcError> {
    let mut handshake = Handshake::dial(config, Instant::now());
    let (peer, mut input) = (channel.peer().to_owned(), BytesMut::new());
    let io = channel.io_mut();
    let work = async {
        loop {
            let outcome = handshake.handle_input(&mut input);
            let limit = match handshake.proven() {
                Some(theirs) => {
                    Duration::from_millis(theirs.keep_alive_ms.clamp(1, MAX_KEEP_ALIVE_MS)) * SILENT_INTERVALS
                }
                None => handshake.deadline().saturating_duration_since(Instant::now()),
            };
            let output = handshake.take_output();
            let exchange = async {
                io.write_all(&output).await?;
                io.flush().await?;
                if matches!(outcome, Ok(None)) { io.read_buf(&mut input).await } else { Ok(1) }
            };
            let read = tokio::time::timeout(limit, exchange).await;
            if let Some(negotiated) = outcome? {
                return Ok((negotiated, input));
            }
            match read {
                Ok(Ok(0)) => return Err(handshake.end_of_stream()),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(lost(error)),
                Err(_) => {
                    let text = format!("nothing was heard from the peer for {limit:?}");
                    return Err(RpcError::new(ErrorKind::PeerSilent, text));
                }
            }
        }
    };
    work.await.map_err(|error: RpcError| error.with_peer(peer))
}

/// The longest interval that a peer may name: an hour.
const MAX_KEEP_ALIVE_MS: u64 = 3_600_000;

/// How many of the peer's intervals without a word mean that it is gone.
const SILENT_INTERVALS: u32 = 3;

/// Performs either side of a handshake; on the one that was dialled, `open` opens the session before the client is accepted.
/// `patience` is how often the peer is asked whether it is still there once `open` has said that it takes its time, by setting
/// it; the time for the handshake has no end then.
///
/// # Errors
///
/// As [`dial_hands`], and those of `open`.
pub(crate) async fn shake_hands<S>(
    channel: &mut Channel,
    mut handshake: Handshake,
    patience: &OnceLock<Duration>,
    open: impl AsyncFnOnce(&Hello, &str) -> Result<S, RpcError>,
) -> Result<(Negotiated, BytesMut, S), RpcError> {
    let deadline = handshake.deadline();
    let peer = channel.peer().to_owned();
    let mut input = channel.take_unread();
    let io = channel.io_mut();
    let work = async {
        input.reserve(1024);
        let (mut open, mut opened) = (Some(open), None);
        loop {
            let mut outcome = handshake.handle_input(&mut input);
            if let Some((hello, identity)) = handshake.awaits_approval()
                && let Some(open) = open.take()
            {
                let (hello, identity) = (hello.clone(), identity.to_owned());
                let opening = open(&hello, &identity);
                match wait_with_peer(&mut handshake, io, &mut input, patience, opening).await? {
                    Ok(session) => {
                        opened = Some(session);
                        if let Some(negotiated) = handshake.approve() {
                            outcome = Ok(Some(negotiated));
                        }
                    }
                    Err(error) => {
                        handshake.refuse(&error);
                        outcome = Err(error);
                    }
                }
            }
            let output = handshake.take_output();
            let written = if output.is_empty() { Ok(()) } else { io.write_all(&output).await };
            if let Some(negotiated) = outcome? {
                written.map_err(lost)?;
                io.flush().await.map_err(lost)?;
                // The dialling side opens nothing.
                let session = match (opened, open) {
                    (Some(session), _) => session,
                    (None, Some(open)) => open(&negotiated.theirs, &negotiated.identity).await?,
                    (None, None) => return Err(RpcError::internal("a handshake ended without a session")),
                };
                return Ok((negotiated, input, session));
            }
            // A peer that refuses may have closed already; what it said is still there to be read.
            if let Err(error) = written
                && !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
            {
                return Err(lost(error));
            }
            if soon(patience, io.read_buf(&mut input)).await? == 0 {
                return Err(handshake.end_of_stream());
            }
        }
    };
    let too_late = async {
        tokio::time::sleep_until(deadline.into()).await;
        if patience.get().is_some() {
            std::future::pending::<()>().await;
        }
    };
    let outcome = tokio::select! {
        biased;
        outcome = work => Some(outcome),
        () = too_late => None,
    };
    let outcome = match outcome {
        Some(outcome) => outcome,
        None => {
            let error = handshake.handle_timeout(Instant::now().max(deadline)).err();
            let error = error.unwrap_or_else(|| RpcError::new(ErrorKind::Refused, "the handshake took too long"));
            // Whoever is merely slow hears why; nobody waits for it.
            handshake.refuse(&error);
            let output = handshake.take_output();
            let mut io = io;
            let _ = std::future::poll_fn(|cx| {
                let _ = Pin::new(&mut io).poll_write(cx, &output);
                Poll::Ready(())
            })
            .await;
            Err(error)
        }
    };
    outcome.map_err(|error| error.with_peer(peer))
}

/// Waits for `open`, while the peer is listened to: one that goes is not waited for, and one that asks is answered.
async fn wait_with_peer<T>(
    handshake: &mut Handshake,
    io: &mut dyn ChannelIo,
    input: &mut BytesMut,
    patience: &OnceLock<Duration>,
    open: impl Future<Output = Result<T, RpcError>>,
) -> Result<Result<T, RpcError>, RpcError> {
    let mut open = pin!(open);
    let mut pings = 0;
    let mut wait = pin!(tokio::time::sleep(Duration::ZERO));
    let mut waits = false;
    loop {
        tokio::select! {
            biased;
            opened = &mut open => return Ok(opened),
            read = io.read_buf(input) => {
                if read.map_err(lost)? == 0 {
                    return Err(handshake.end_of_stream());
                }
                pings = 0;
                if let Err(error) = handshake.handle_input(input) {
                    let _ = io.write_all(&handshake.take_output()).await;
                    return Err(error);
                }
            }
            () = &mut wait, if waits => {
                if pings >= SILENT_INTERVALS {
                    return Err(RpcError::new(ErrorKind::PeerSilent, "the peer does not answer"));
                }
                pings += 1;
                handshake.ping();
                waits = false;
            }
            // Until `open` has said whether it takes its time.
            () = std::future::poll_fn(|_| if patience.get().is_some() { Poll::Ready(()) } else { Poll::Pending }), if !waits => {
                wait.as_mut().reset(tokio::time::Instant::now() + patience.get().copied().unwrap_or_default());
                waits = true;
            }
        }
        let output = handshake.take_output();
        if !output.is_empty() {
            let write = async {
                io.write_all(&output).await?;
                io.flush().await
            };
            soon(patience, write).await?;
        }
    }
}

/// Input or output of a peer that has no end of its handshake to keep to any more: it may take as long as it may be silent.
async fn soon<T>(patience: &OnceLock<Duration>, exchange: impl Future<Output = io::Result<T>>) -> Result<T, RpcError> {
    let Some(interval) = patience.get() else { return exchange.await.map_err(lost) };
    match tokio::time::timeout(interval.saturating_mul(SILENT_INTERVALS), exchange).await {
        Ok(outcome) => outcome.map_err(lost),
        Err(_) => Err(RpcError::new(ErrorKind::PeerSilent, "the peer does not answer")),
    }
}

fn lost(error: io::Error) -> RpcError {
    #[cfg(feature = "tls")]
    if let Some(objection) = crate::transports::tls::objection(&error) {
        return objection;
    }
    RpcError::new(ErrorKind::PeerLost, format!("the connection broke during the handshake: {error}"))
}
