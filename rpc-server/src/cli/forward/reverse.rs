//! `forward -R`: a port near a server that leads to a service near this side, in the manner of
//! `ssh -R`.

use std::collections::VecDeque;
use std::future::{Future, IntoFuture};
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use rpc_core::client::{Pending, RemoteConnection, RemoteListener};
use rpc_core::{ErrorKind, Lane, RpcError, Session};
use rpc_transports::{Address, Channel, Dial, TUNNEL_LINGER, TransportError};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::cli::connect::{CommonOptions, Files, close};
use crate::cli::failure::Failure;
use crate::cli::interruption::Interruption;
use crate::cli::output::Output;

/// Maximum number of pieces of one direction that are on their way at a time.
const PIECES_IN_FLIGHT: usize = 4;

/// Pause after a connection that the server's limits do not allow at present.
const LIMIT_PAUSE: Duration = Duration::from_secs(1);

/// Time in which the far end has to take a piece after the end of the other direction. It is longer
/// than [`TUNNEL_LINGER`], since a piece is large for a slow line, and is only seen as a whole.
const PIECE_LIMIT: Duration = Duration::from_secs(60);

/// Size of the first read of a connection: most connections carry little.
const READ_MIN: usize = 16 << 10;

/// Has the server listen at `at`, and carries its connections to `to`, until the interruption comes
/// or the session is lost. A connection that fails is reported, and closed; the others go on.
pub(super) async fn forward(
    options: &CommonOptions,
    output: &Output,
    address: &str,
    at: &Address,
    to: &Address,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let opened = async {
        let session = match options.borrow_server(address).await? {
            Some(loan) => loan.into_session(),
            None => options.connect(address, Files::None).await?,
        };
        let limit = options.connect_limit();
        let timed_out = |_| Failure::TimedOut { what: format!("listening at {at}, at {address}"), limit, why: None };
        let listening = tokio::time::timeout(limit, session.listen(&at.to_string()).into_future()).await;
        match listening.map_err(timed_out).and_then(|listening| Ok(listening?)) {
            Ok(listener) => Ok((session, listener)),
            Err(failure) => {
                close(&session).await;
                Err(failure)
            }
        }
    };
    let (session, listener) = tokio::select! {
        opened = opened => opened?,
        failure = interruption.wait() => return Err(failure),
    };
    let outcome = async {
        let at = listener.address();
        if output.is_json() {
            output.json(&json!({ "remote": at, "to": to.to_string(), "address": address }))?;
        } else {
            output.line(&format!("{at} at {address} leads to {to}"))?;
        }
        accept(&session, &listener, options, output, to, interruption).await
    }
    .await;
    drop(listener);
    close(&session).await;
    outcome
}

/// Accepts connections at the server, and carries each to the service.
async fn accept(
    session: &Session,
    listener: &RemoteListener,
    options: &CommonOptions,
    output: &Output,
    to: &Address,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let mut connections = JoinSet::new();
    let mut lost = std::pin::pin!(session.ended());
    // Kept from one turn to the next: dropping it could lose a connection.
    let mut accepting = next_connection(listener, Duration::ZERO);
    let mut lanes = Lanes(0);
    let mut is_refused = false;
    loop {
        tokio::select! {
            accepted = &mut accepting => {
                let pause = match accepted {
                    Ok(connection) => {
                        let service = Service { options: options.clone(), to: to.clone() };
                        connections.spawn(carry(connection, service, lanes.next_pair()));
                        is_refused = false;
                        Duration::ZERO
                    }
                    Err(error) if error.kind() == ErrorKind::LimitExceeded => {
                        // Once, and not for each of the attempts.
                        if !std::mem::replace(&mut is_refused, true) {
                            output.warn(&format!("no connection can be accepted now: {}", error.message()));
                        }
                        LIMIT_PAUSE
                    }
                    Err(error) => return Err(error.into()),
                };
                accepting = next_connection(listener, pause);
            }
            error = &mut lost => return Err(error.into()),
            Some(ended) = connections.join_next() => {
                if let Ok(Err(failure)) = ended {
                    failure.report(output, options.jump());
                }
            }
            failure = interruption.wait() => return Err(failure),
        }
    }
}

type Accepting = Pin<Box<dyn Future<Output = rpc_core::Result<RemoteConnection>>>>;

/// Waits for the next connection, after a pause.
fn next_connection(listener: &RemoteListener, pause: Duration) -> Accepting {
    let accept = listener.accept();
    Box::pin(async move {
        tokio::time::sleep(pause).await;
        accept.await
    })
}

/// Source of lanes, which keep the order of what is in flight: two for each connection.
struct Lanes(u32);

impl Lanes {
    fn next_pair(&mut self) -> [Lane; 2] {
        // After two billion connections the first ones have ended.
        self.0 = (self.0 + 2) % (Lane::CONCURRENT.0 - 2);
        [Lane(self.0 + 1), Lane(self.0 + 2)]
    }
}

/// Service near this side.
struct Service {
    options: CommonOptions,
    to: Address,
}

impl Service {
    /// Connects to the service.
    async fn dial(&self) -> Result<Channel, Failure> {
        let limit = self.options.connect_limit();
        let terms = Dial { connect_timeout: limit + Duration::from_secs(1), ..Dial::default() };
        let dialled = tokio::time::timeout(limit, self.options.transports().dial(&self.to, &terms)).await;
        let timed_out = |_| Failure::TimedOut { what: format!("connecting to {}", self.to), limit, why: None };
        dialled.map_err(timed_out)?.map_err(|error: TransportError| Failure::Connect(error.into()))
    }
}

/// Carries the bytes of one connection to the service and back, until it ends.
///
/// # Errors
///
/// The service cannot be reached. A connection that breaks later on is no failure: its end tells
/// both sides.
async fn carry(connection: RemoteConnection, service: Service, lanes: [Lane; 2]) -> Result<(), Failure> {
    let (io, _, _guard) = service.dial().await?.into_parts();
    let (local_read, local_write) = tokio::io::split(io);
    let [there, back] = lanes;
    let patience = Patience::default();
    let there = async { patience.ends(to_service(&connection, local_write, there, &patience).await) };
    let back = async { patience.ends(to_connection(local_read, &connection, back, &patience).await) };
    if let Err(error) = tokio::try_join!(there, back) {
        tracing::info!(peer = connection.peer(), to = %service.to, %error, "a forwarded connection broke");
    }
    Ok(())
}

/// Patience of the two directions of a connection: it has no limit until one of them has ended.
/// Otherwise a peer that closes, and a service that does not, would hold their place for ever.
#[derive(Default)]
struct Patience {
    one_has_ended: watch::Sender<bool>,
}

impl Patience {
    /// Does some work of one direction.
    ///
    /// # Errors
    ///
    /// The other direction has ended, and the work has taken longer than `limit` since.
    async fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> io::Result<T> {
        let mut ended = self.one_has_ended.subscribe();
        let is_over = async {
            // The sender lives as long as `self`.
            let _ = ended.wait_for(|ended| *ended).await;
            tokio::time::sleep(limit).await;
        };
        tokio::select! {
            biased;
            outcome = work => Ok(outcome),
            () = is_over => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    /// Takes note of the end of one direction.
    fn ends<T>(&self, outcome: T) -> T {
        self.one_has_ended.send_replace(true);
        outcome
    }
}

/// Carries the bytes of the connection to the service, until their end. Several reads are in flight
/// while large pieces come.
async fn to_service(
    connection: &RemoteConnection,
    mut service: impl AsyncWrite + Unpin,
    lane: Lane,
    patience: &Patience,
) -> rpc_core::Result<()> {
    let mut reads: VecDeque<Pending<Option<Bytes>>> = VecDeque::with_capacity(PIECES_IN_FLIGHT);
    let mut in_flight = 1;
    loop {
        while reads.len() < in_flight {
            reads.push_back(connection.read().lane(lane).start());
        }
        let Some(read) = reads.pop_front() else { return Ok(()) };
        let Some(mut piece) = patience.within(TUNNEL_LINGER, read).await?? else { break };
        in_flight = if piece.len() == RemoteConnection::MAX_PIECE { PIECES_IN_FLIGHT } else { 1 };
        while !piece.is_empty() {
            if patience.within(TUNNEL_LINGER, service.write_buf(&mut piece)).await?? == 0 {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
        }
        if reads.is_empty() {
            patience.within(TUNNEL_LINGER, service.flush()).await??;
        }
    }
    patience.within(TUNNEL_LINGER, service.shutdown()).await??;
    Ok(())
}

/// Carries the bytes of the service to the connection, until their end.
async fn to_connection(
    mut service: impl AsyncRead + Unpin,
    connection: &RemoteConnection,
    lane: Lane,
    patience: &Patience,
) -> rpc_core::Result<()> {
    let mut writes: VecDeque<Pending<()>> = VecDeque::with_capacity(PIECES_IN_FLIGHT);
    let mut size = READ_MIN;
    loop {
        let mut piece = BytesMut::with_capacity(size);
        let mut room = (&mut piece).limit(size);
        // Writes that are done are looked at meanwhile, so that a broken connection is noticed.
        let count = {
            let mut reading = std::pin::pin!(service.read_buf(&mut room));
            loop {
                let limit = if writes.is_empty() { TUNNEL_LINGER } else { PIECE_LIMIT };
                let next = async {
                    tokio::select! {
                        biased;
                        Some(written) = oldest(&mut writes) => written.map(|()| None),
                        count = &mut reading => count.map(Some).map_err(RpcError::from),
                    }
                };
                if let Some(count) = patience.within(limit, next).await?? {
                    break count;
                }
            }
        };
        if count == 0 {
            break;
        }
        if count == size {
            size = (size * 4).min(RemoteConnection::MAX_PIECE);
        }
        if writes.len() >= PIECES_IN_FLIGHT
            && let Some(written) = patience.within(PIECE_LIMIT, oldest(&mut writes)).await?
        {
            written?;
        }
        writes.push_back(connection.write(piece.freeze()).lane(lane).start());
    }
    while let Some(written) = patience.within(PIECE_LIMIT, oldest(&mut writes)).await? {
        written?;
    }
    patience.within(PIECE_LIMIT, connection.finish().lane(lane).into_future()).await?
}

/// Waits for the oldest of these writes; `None` if there is none. Cancel-safe.
async fn oldest(writes: &mut VecDeque<Pending<()>>) -> Option<rpc_core::Result<()>> {
    let outcome = writes.front_mut()?.await;
    writes.pop_front();
    Some(outcome)
}
