//! The connection of a server or client of TVM to a proxy: the hello, the wait, and the end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError, printable_line};
use rpc_transports::{ChannelIo, DialectConnection};
use rpc_tvm::wire::{HelloAnswer, ProxyHello, ProxyRole, ProxyWire};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::link::{lost, write};
use super::pairing::{Arrival, PairedPeer, Waiting};
use super::{Carrier, ProxyState};

/// Time in which a server that has lost its client may end by itself. One of TVM that writes an
/// answer to nobody would end for good.
const FAREWELL: Duration = Duration::from_secs(60);

/// Largest message by WebSocket in bytes: what a proxy of TVM takes. A server sends each of its
/// replies as one.
#[cfg(feature = "websocket")]
const MAX_MESSAGE: usize = 10 << 20;

/// Time that a peer may take for the answer to its hello.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// End of a wait.
enum WaitEnd {
    /// The connection was handed over to the task of the other side.
    Paired,
    /// The peer has gone.
    Gone(io::Result<()>),
    /// The peer has sent something before its answer.
    Early,
    /// There was no other side in time.
    Expired(Duration),
    /// The server stops.
    Stopped(RpcError),
}

/// Serves a connection to its end.
pub(super) async fn serve(
    proxy: &ProxyState,
    carrier: Carrier,
    connection: &mut DialectConnection,
) -> Result<(), RpcError> {
    connection.probe_silence();
    #[cfg_attr(not(feature = "websocket"), allow(unused_mut, reason = "bare connections hold next to nothing"))]
    let mut memory = None;
    match carrier {
        Carrier::Bare => {}
        #[cfg(feature = "websocket")]
        Carrier::WebSocket => {
            let origins = proxy.origins.clone();
            let accept = |channel| rpc_websocket::accept_upgrade(channel, origins, MAX_MESSAGE);
            let upgraded = connection.upgrade(accept).await;
            upgraded.map_err(|error| RpcError::new(ErrorKind::Refused, format!("no WebSocket: {error}")))?;
            memory = Some(connection.queued().reserve(2 * MAX_MESSAGE as u64)?);
        }
    }
    let hello = match ProxyHello::parse(&read_hello(connection).await?) {
        Ok(hello) => hello,
        Err(error) => return refuse(connection, HelloAnswer::Mismatch, error.to_string()).await,
    };
    if let Err(error) = connection.admit() {
        write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
        return Err(error);
    }
    let key = printable_line(hello.match_key());
    // Peers that wait or are paired are idle for as long as they like.
    let _working = connection.activity().working();
    let mut notices = connection.notices();
    match proxy.pairing.arrive(&hello, connection.open_files()).await {
        Arrival::Paired(mut peer, place) => {
            // Dropped in this order: the tracker forgets the server before it could be offered.
            let _place = place;
            let _registration = peer.registration.take();
            connection.set_note(Arc::new(format!("{} '{key}' of TVM", other_side(hello.role))));
            tokio::select! {
                biased;
                reason = notices.stopped() => Err(reason),
                // On the heap, so that a peer that waits takes little memory.
                ended = Box::pin(pass_bytes(connection, &hello, *peer)) => ended,
            }
        }
        Arrival::Waits(waiting) => match wait(proxy, connection, &hello, waiting, memory).await {
            WaitEnd::Paired | WaitEnd::Gone(Ok(())) => Ok(()),
            WaitEnd::Gone(Err(error)) => Err(lost(&error)),
            WaitEnd::Early => {
                let text = "the peer sends requests before the proxy has answered its hello";
                Err(RpcError::new(ErrorKind::Protocol, text))
            }
            WaitEnd::Expired(limit) => {
                let text = format!("no {} with key '{key}' has come within {limit:?}", other_side(hello.role));
                refuse(connection, HelloAnswer::Mismatch, text).await
            }
            WaitEnd::Stopped(reason) => {
                write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
                Err(reason)
            }
        },
        Arrival::Duplicate => {
            let text = format!("another peer waits under the key '{key}'");
            refuse(connection, HelloAnswer::Duplicate, text).await
        }
        Arrival::Refused(error) => {
            write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
            Err(error)
        }
        Arrival::Mismatch => {
            let text = format!("no server waits with the match key '{key}': the client has to ask the tracker");
            refuse(connection, HelloAnswer::Mismatch, text).await
        }
    }
}

/// Reads the hello, and returns the text of its key. The server limits the time.
async fn read_hello(connection: &mut DialectConnection) -> Result<String, RpcError> {
    let mut wire = ProxyWire::new();
    loop {
        match wire.poll_hello() {
            Ok(Some(hello)) => return Ok(hello.key),
            Ok(None) => {}
            Err(error) => return Err(RpcError::new(ErrorKind::Protocol, error.to_string())),
        }
        let read = connection.io().read_buf(&mut wire.input()).await;
        if read.map_err(|error| lost(&error))? == 0 {
            return Err(RpcError::new(ErrorKind::PeerLost, "the peer left during the handshake"));
        }
    }
}

/// Waits until the other side has come, and hands the connection over to its task.
async fn wait(
    proxy: &ProxyState,
    connection: &mut DialectConnection,
    hello: &ProxyHello,
    mut waiting: Waiting<'_>,
    memory: Option<MemoryLease>,
) -> WaitEnd {
    let limit = match hello.role {
        ProxyRole::Server => proxy.terms.server_timeout,
        ProxyRole::Client => proxy.terms.client_timeout,
    };
    let (mut notices, mut early) = (connection.notices(), [0]);
    let mut expired = std::pin::pin!(tokio::time::sleep(limit));
    tokio::select! {
        biased;
        reason = notices.going_away() => WaitEnd::Stopped(reason),
        read = connection.io().read(&mut early) => match read {
            Ok(0) => WaitEnd::Gone(Ok(())),
            Ok(_) => WaitEnd::Early,
            Err(error) => WaitEnd::Gone(Err(error)),
        },
        handover = waiting.claimed() => {
            let Some((handover, connection)) = handover.zip(connection.detach()) else {
                return WaitEnd::Gone(Ok(()));
            };
            // If the other side has gone meanwhile, the peer comes again, as after a session.
            let registration = waiting.take_registration();
            let _ = handover.send(PairedPeer { connection, text: hello.text.clone(), registration, _memory: memory });
            WaitEnd::Paired
        }
        () = &mut expired => WaitEnd::Expired(limit),
    }
}

/// Answers both sides, and passes their bytes on until one is gone.
async fn pass_bytes(
    connection: &mut DialectConnection,
    hello: &ProxyHello,
    mut peer: PairedPeer,
) -> Result<(), RpcError> {
    let other = &mut peer.connection;
    let answered = async {
        write(other.io(), &HelloAnswer::Accepted(&hello.text).encode()).await?;
        write(connection.io(), &HelloAnswer::Accepted(&peer.text).encode()).await
    };
    let late = |_| RpcError::new(ErrorKind::DeadlineExceeded, "a peer takes no answer to its hello");
    tokio::time::timeout(ANSWER_LIMIT, answered).await.map_err(late)??;
    let ended = connection.splice(other).await;
    match hello.role {
        ProxyRole::Server => {
            drop(peer);
            leave(connection.io()).await;
        }
        ProxyRole::Client => leave(peer.connection.io()).await,
    }
    ended.map_err(|error| lost(&error))
}

/// Ends the direction to a server, and reads what it still answers, for which nobody waits.
async fn leave(server: &mut dyn ChannelIo) {
    let leave = async {
        server.shutdown().await?;
        let mut discarded = [0; 4096];
        while server.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    // A broken connection needs nothing more.
    let _ = tokio::time::timeout(FAREWELL, leave).await;
}

/// Tells a peer that it is not served.
async fn refuse(connection: &mut DialectConnection, answer: HelloAnswer<'_>, reason: String) -> Result<(), RpcError> {
    write(connection.io(), &answer.encode()).await?;
    Err(RpcError::new(ErrorKind::Refused, reason))
}

fn other_side(role: ProxyRole) -> &'static str {
    match role {
        ProxyRole::Server => "client",
        ProxyRole::Client => "server",
    }
}
