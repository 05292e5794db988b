//! Copies between a client of TVM and tensors of its session, in pieces: neither side's data is
//! ever held as a whole.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use rpc_core::client::CHUNK;
use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, Lane, Operation, PendingReply, Request, RpcError, RpcSession, TensorRef, Value};
use rpc_tvm::wire::{TensorHeader, WireValue, copy_ack_header, exception, returned};

use super::error_text::error_text;
use super::link::{End, Link, Reply, SMALL_REPLY};
use super::session::TvmSession;

/// Maximum number of pieces in flight to the session, or from it.
const IN_FLIGHT: usize = 4;

/// Length from which a piece is read straight into the tensor where the session can.
const IN_PLACE: u64 = 4 << 10;

/// Returns the bytes that a copy is charged with, of `bytes` that it holds at a time. A small one
/// is charged to nobody, as a small reply is: the process of a session would ask its server for
/// them.
fn charged(len: u64, bytes: u64) -> u64 {
    if len <= SMALL_REPLY { 0 } else { bytes }
}

/// Receives the data of a copy into a tensor. Returns the reply, or `None` if the rest of the data
/// has been refused.
pub(super) async fn copy_to(
    link: &mut Link<'_>,
    session: &TvmSession,
    to: &TensorHeader,
    len: u64,
) -> Result<Option<Vec<u8>>, End> {
    match receive(link, session, to, len).await? {
        Ok(()) => Ok(Some(returned(&[WireValue::None]))),
        Err(error) if link.wire.payload_left() > 0 => {
            link.wire.refuse(&error_text(&error));
            Ok(None)
        }
        Err(error) => Ok(Some(exception(&error_text(&error)))),
    }
}

/// Receives the data. The inner result is the session's.
async fn receive(
    link: &mut Link<'_>,
    session: &TvmSession,
    to: &TensorHeader,
    len: u64,
) -> Result<Result<(), RpcError>, End> {
    let target = match session.flat(to, len) {
        Ok(target) => target,
        Err(error) => return Ok(Err(error)),
    };
    let shared = session.shared();
    let mut pending: VecDeque<(PendingReply, MemoryLease)> = VecDeque::new();
    let mut offset = 0;
    while offset < len {
        let piece = (len - offset).min(CHUNK as u64);
        let in_place = (pending.is_empty() && piece >= IN_PLACE)
            .then(|| shared.write_in_place(Lane::DEFAULT, &target, offset, piece))
            .flatten();
        if let Some(mut place) = in_place {
            while place.remaining() > 0 {
                let count = link.read_payload(place.unfilled()).await?;
                place.advance(count);
            }
            link.stop_receiving();
        } else {
            let lease = match session.queued().reserve(charged(len, piece)) {
                Ok(lease) => lease,
                Err(error) => return Ok(Err(error)),
            };
            let data = read_piece(link, piece as usize).await?;
            let write = Operation::Write { to: target.clone().into(), offset, data };
            pending.push_back((shared.submit(Request::new(write)).reply(), lease));
            if pending.len() >= IN_FLIGHT
                && let Err(error) = finish_first(link, &mut pending).await?
            {
                return Ok(Err(error));
            }
        }
        offset += piece;
    }
    while !pending.is_empty() {
        if let Err(error) = finish_first(link, &mut pending).await? {
            return Ok(Err(error));
        }
    }
    if len == 0 {
        // Nothing else has looked at the handle.
        return link.until(check(session, target)).await;
    }
    Ok(Ok(()))
}

/// Checks that a tensor exists by reading nothing of it.
async fn check(session: &TvmSession, from: TensorRef) -> Result<(), RpcError> {
    session.submit(Operation::Read { from: from.into(), offset: 0, len: 0, into: None }).await.map(drop)
}

async fn read_piece(link: &mut Link<'_>, len: usize) -> Result<Bytes, End> {
    let mut data = BytesMut::zeroed(len);
    let mut filled = 0;
    while filled < len {
        filled += link.read_payload(&mut data[filled..]).await?;
    }
    link.stop_receiving();
    Ok(data.freeze())
}

async fn finish_first(
    link: &mut Link<'_>,
    pending: &mut VecDeque<(PendingReply, MemoryLease)>,
) -> Result<Result<(), RpcError>, End> {
    let Some((reply, lease)) = pending.pop_front() else { return Ok(Ok(())) };
    let outcome = link.until(reply).await?;
    drop(lease);
    Ok(outcome.map(drop))
}

/// Sends the first `len` bytes of a tensor.
pub(super) async fn copy_from(
    link: &mut Link<'_>,
    session: &TvmSession,
    from: &TensorHeader,
    len: u64,
) -> Result<(), End> {
    let target = session.flat(from, len);
    let lease = session.queued().reserve(charged(len, len.min((IN_FLIGHT * CHUNK) as u64)));
    let (target, _lease) = match target.and_then(|target| Ok((target, lease?))) {
        Ok(ready) => ready,
        Err(error) => return link.reply(Reply::Frame(exception(&error_text(&error)))).await,
    };
    let (mut asked, mut sent, mut pieces) = (0, 0, VecDeque::new());
    let mut has_begun = false;
    loop {
        while pieces.len() < IN_FLIGHT && (asked < len || (len == 0 && !has_begun && pieces.is_empty())) {
            let piece = (len - asked).min(CHUNK as u64);
            let read = Operation::Read { from: target.clone().into(), offset: asked, len: piece, into: None };
            pieces.push_back((piece, session.shared().submit(Request::new(read)).reply()));
            asked += piece;
        }
        let Some((piece, reply)) = pieces.pop_front() else { break };
        let outcome = link.until(reply).await.map_err(|end| match end {
            // The client would take a message for data.
            End::Told(_, reason) if has_begun => End::Lost(reason),
            end => end,
        });
        let data = match outcome? {
            Ok(Value::Bytes(data)) if data.len() as u64 == piece => data,
            other => {
                let error = other.err().unwrap_or_else(|| RpcError::internal("a read gave other bytes than asked for"));
                if has_begun {
                    // A part of the answer is out, so that nothing else can be said.
                    return Err(End::Lost(RpcError::new(
                        ErrorKind::Io,
                        format!("a copy to the client broke off: {error}"),
                    )));
                }
                return link.reply(Reply::Frame(exception(&error_text(&error)))).await;
            }
        };
        if !has_begun {
            link.connection.begin_message();
            link.write(&copy_ack_header(len)).await?;
            has_begun = true;
        }
        link.write(&data).await?;
        // A local session lends the memory of the tensor.
        drop(data);
        sent += piece;
        if sent >= len {
            break;
        }
    }
    link.connection.end_message();
    link.flush().await
}
