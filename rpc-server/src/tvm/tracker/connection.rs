//! The connection of a server or client of TVM to a tracker: reading, writing, and its ends.

use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError};
use rpc_transports::{DialectConnection, DialectRequest};
use rpc_tvm::wire::{TRACKER_MAGIC, TrackerEvent, TrackerWire, WireError};
use tokio::io::AsyncReadExt as _;

use super::super::link::{lost, write};
use super::peer::TvmPeer;
use crate::server::server_state::Client;
use crate::tracker::Tracker;

/// Bytes that a message may take once more while it is decoded.
const COPIES: u64 = 2;

/// Event of a connection.
enum Next {
    Read(std::io::Result<usize>),
    /// A request has its answer, to be sent.
    Answer(Vec<u8>),
}

/// Serves a connection to its end.
pub(super) async fn serve(tracker: &Arc<Tracker>, connection: &mut DialectConnection) -> Result<(), RpcError> {
    let mut wire = TrackerWire::new();
    while wire.poll_event().map_err(|error| malformed(&error))?.is_none() {
        let read = connection.io().read_buf(&mut wire.input()).await;
        if read.map_err(|error| lost(&error))? == 0 {
            return Err(RpcError::new(ErrorKind::PeerLost, "the client left during the handshake"));
        }
    }
    let _session = connection.open(DialectRequest::default()).await?;
    write(connection.io(), &TRACKER_MAGIC.to_le_bytes()).await?;
    let client = Client {
        peer: connection.peer().to_owned(),
        machine: connection.machine(),
        identity: connection.identity().to_owned(),
        peer_identity: connection.peer_identity().to_string(),
        through_hop: false,
    };
    let (activity, queued) = (connection.activity(), connection.queued().clone());
    let mut peer = TvmPeer::new(tracker.clone(), client, queued.clone());
    let (mut notices, mut going_away) = (connection.notices(), connection.notices());
    let (mut receiving, mut waiting, mut body) = (None, None, None);
    loop {
        while let Some(event) = wire.poll_event().map_err(|error| malformed(&error))? {
            match event {
                TrackerEvent::Announced { len } => body = Some(queued.reserve(COPIES * len as u64)?),
                TrackerEvent::Message(message) => {
                    receiving = None;
                    let reply = peer.handle(message).await;
                    drop(body.take());
                    if let Some((reply, _memory)) = reply {
                        write(connection.io(), &reply).await?;
                    }
                }
                // There is one hello, which was read.
                _ => {}
            }
        }
        if !wire.is_inside_message() {
            receiving = None;
        } else {
            receiving.get_or_insert_with(|| activity.receiving());
            // Clients in Python write the length by itself, and their kernel keeps the rest until
            // the length is acknowledged.
            connection.acknowledge();
        }
        // A server that is registered and a client that waits have nothing to say.
        match peer.is_served() {
            false => waiting = None,
            true if waiting.is_none() => waiting = Some(activity.working()),
            true => {}
        }
        let is_idle = !wire.is_inside_message();
        let mut input = wire.input();
        let next = tokio::select! {
            biased;
            reason = notices.stopped() => return Err(reason),
            reason = going_away.going_away(), if is_idle => return Err(reason),
            // The end of a client comes before its answer, which is not for it any more.
            read = connection.io().read_buf(&mut input) => Next::Read(read),
            answer = peer.next_answer() => Next::Answer(answer),
        };
        match next {
            Next::Read(Ok(0)) if is_idle => return Ok(()),
            Next::Read(Ok(0)) => {
                return Err(RpcError::new(ErrorKind::PeerLost, "the connection ended inside a message"));
            }
            Next::Read(Ok(_)) => {}
            Next::Read(Err(error)) => return Err(lost(&error)),
            Next::Answer(answer) => write(connection.io(), &answer).await?,
        }
    }
}

fn malformed(error: &WireError) -> RpcError {
    RpcError::new(ErrorKind::Protocol, error.to_string())
}
