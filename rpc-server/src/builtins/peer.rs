//! `rpc.peer.*`: sends of tensors directly to another server, where the operators allow it.
//!
//! The destination's session offers a range of a tensor, and gets a capability for it. The source's
//! session, which the client gives the capability, connects to the destination and writes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rpc_core::client::CHUNK;
use rpc_core::tensor::Borrow;
use rpc_core::{
    Context, DataType, ErrorKind, Permission, Registry, RemoteTensor, Result, RpcError, Session, Shared, Tensor,
    TensorView,
};
use rpc_transports::{Address, Capability, ConnectError, Connector, Dial, Tokens};

use super::cancellable;
use crate::offers::{GET_RANGE, MAX_OFFERS, MAX_SENDS, Offer, OfferTerms, PeerQuota};
use crate::policy;

/// Longest time for which a capability is good.
const MAX_LIFETIME: Duration = Duration::from_secs(60);

/// Maximum number of addresses that one send tries.
const MAX_ADDRESSES: usize = 8;

/// Time limit for connecting to one address, and for the handshake there. The client sends through
/// itself after that.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes that a send counts against the memory of its session: the buffers of its connection.
const SEND_BYTES: u64 = 1 << 20;

/// Pieces in flight from memory that the host cannot access.
const PIECES: usize = 4;

/// Interval at which a send checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(250);

pub(super) fn register(registry: &Registry) {
    registry
        .add_async(
            "rpc.peer.offer",
            |context: Context, to: Tensor, offset: i64, len: i64, lifetime_ms: i64, encrypted: bool| async move {
                offer(&context, &to, (offset, len), lifetime_ms, encrypted)
            },
        )
        .add_inline("rpc.peer.withdraw", |Shared(offer): Shared<Offer>| offer.withdraw())
        .add_async(
            "rpc.peer.send",
            |context: Context,
             from: TensorView,
             offset: i64,
             len: i64,
             addresses: Vec<String>,
             capability: String,
             encrypted: bool| async move {
                let capability = capability.parse()?;
                let range = byte_range(from.tensor(), (offset, len))?;
                let send = send(&context, from, range, &addresses, &capability, encrypted);
                cancellable(&context, CANCEL_CHECK, send).await
            },
        );
}

/// Makes an offer. Returns it with the addresses for other servers and the capability.
fn offer(
    context: &Context,
    to: &Tensor,
    range: (i64, i64),
    lifetime_ms: i64,
    must_be_encrypted: bool,
) -> Result<(Shared<Offer>, Vec<String>, String)> {
    let range = byte_range(to, range)?;
    let quota = context.extension::<PeerQuota>();
    let unavailable =
        || RpcError::unsupported("other servers cannot send to this session, which has a process of its own");
    let quota = quota.ok_or_else(unavailable)?;
    let table = quota.table.as_ref().ok_or_else(unavailable)?;
    let permit = quota.offers.clone().try_acquire_owned();
    let permit = permit.map_err(|_| RpcError::limit("offers", MAX_OFFERS as u64, MAX_OFFERS as u64 + 1))?;
    let memory = context.reserve_memory(Offer::BYTES)?;
    let lifetime = Duration::from_millis(u64::try_from(lifetime_ms).unwrap_or_default()).min(MAX_LIFETIME);
    // A range that was checked fits.
    let len = (range.end - range.start) as i64;
    let terms = OfferTerms {
        range: Tensor::new(to.storage().clone(), range.start, [len], None, DataType::U8)?,
        lifetime,
        must_be_encrypted,
        devices: context.devices().clone(),
        limits: context.limits().clone(),
    };
    let (offer, capability) = table.offer(terms, &quota, permit, memory)?;
    Ok((Shared(Arc::new(offer)), table.addresses(must_be_encrypted), capability.to_text()))
}

/// Sends the bytes `range` of the storage to the offer behind `capability`. Returns true and the
/// address at which it was reached, or false and the reasons why it could not be reached.
async fn send(
    context: &Context,
    from: TensorView,
    range: Range<u64>,
    addresses: &[String],
    capability: &Capability,
    must_be_encrypted: bool,
) -> Result<(bool, String)> {
    let quota = context.extension::<PeerQuota>();
    let quota = quota.ok_or_else(|| RpcError::unsupported("this session belongs to no server that sends"))?;
    let permit = quota.sends.clone().try_acquire_owned();
    let _permit = permit.map_err(|_| RpcError::limit("sends", MAX_SENDS as u64, MAX_SENDS as u64 + 1))?;
    let (_memory, _files) = (context.reserve_memory(SEND_BYTES)?, context.reserve_open_files(1)?);
    let mut reasons = Vec::new();
    for address in addresses.iter().take(MAX_ADDRESSES) {
        match connect(context, address, capability, must_be_encrypted).await {
            Ok(session) => {
                write(context, &session, from, range).await?;
                // All is answered; the end only tells the destination that there will be no more.
                let _ = session.shutdown().await;
                return Ok((true, address.clone()));
            }
            Err(reason) => reasons.push(format!("{address}: {}", reason.message())),
        }
    }
    Ok((false, reasons.join("; ")))
}

/// Opens the session of the capability at `address`, if the client may have it opened there.
async fn connect(
    context: &Context,
    address: &str,
    capability: &Capability,
    must_be_encrypted: bool,
) -> Result<Session> {
    let malformed = |error: rpc_transports::AddressError| RpcError::invalid_argument(error.to_string());
    let address: Address = address.parse().map_err(malformed)?;
    policy::check(context, &Permission::Peer(&address.to_string()))?;
    let transports = crate::transports();
    let properties = transports.check(&address).map_err(|error| RpcError::unsupported(error.to_string()))?;
    if properties.starts_programs || transports.get(address.scheme()).is_none() {
        return Err(RpcError::unsupported("no server is sent to at such an address"));
    }
    if must_be_encrypted && !properties.encrypted {
        return Err(RpcError::new(ErrorKind::Refused, "a session of the client is encrypted, and this address is not"));
    }
    let dial = Dial {
        tokens: Tokens::capability(capability.clone()),
        connect_timeout: CONNECT_TIMEOUT,
        may_prompt: false,
        ..Dial::default()
    };
    let connector = Connector::new().transports(transports).dial(dial).handshake_timeout(CONNECT_TIMEOUT);
    connector.connect(&address).await.map_err(ConnectError::into_rpc_error)
}

/// Writes the bytes `range` of the storage to the range that the session has.
async fn write(context: &Context, session: &Session, from: TensorView, range: Range<u64>) -> Result<()> {
    let to: RemoteTensor = session.get_function(GET_RANGE).await?.call(()).await?;
    let len = range.end - range.start;
    if to.size_bytes() != len {
        let text = format!("the destination offers {} bytes, and {len} were to be sent", to.size_bytes());
        return Err(RpcError::invalid_argument(text));
    }
    let (_, borrow) = from.into_parts();
    if borrow.bytes().is_some() {
        let bytes = borrow.into_bytes(range).ok_or_else(|| RpcError::internal("a checked range was out of bounds"))?;
        return session.copy_to_remote(&to, bytes).await;
    }
    let _pieces = context.reserve_memory((PIECES * CHUNK) as u64)?;
    let mut borrow = Some(borrow);
    let mut in_flight = VecDeque::with_capacity(PIECES);
    for at in (0..len).step_by(CHUNK) {
        if in_flight.len() == PIECES
            && let Some(oldest) = in_flight.pop_front()
        {
            oldest.await?;
        }
        let piece = read(&mut borrow, range.start + at, CHUNK.min((len - at) as usize)).await?;
        in_flight.push_back(session.copy_to_remote_at(&to, at, piece).start());
    }
    for pending in in_flight {
        pending.await?;
    }
    Ok(())
}

/// Reads a piece of memory that the host cannot access, on a thread that may block.
async fn read(borrow: &mut Option<Borrow>, at: u64, len: usize) -> Result<Bytes> {
    let taken = borrow.take().ok_or_else(|| RpcError::internal("the borrow of a send is lost"))?;
    let read = move || {
        let mut piece = BytesMut::zeroed(len);
        let copied = taken.copy_out(at, &mut piece);
        (taken, copied.map(|()| piece.freeze()))
    };
    let (back, piece) = tokio::task::spawn_blocking(read)
        .await
        .map_err(|_| RpcError::internal("reading a device for a send has failed"))?;
    *borrow = Some(back);
    piece
}

/// Returns the range in the storage of these bytes of a densely packed tensor.
fn byte_range(tensor: &Tensor, (offset, len): (i64, i64)) -> Result<Range<u64>> {
    match (u64::try_from(offset), u64::try_from(len)) {
        (Ok(offset), Ok(len)) => tensor.byte_range(offset, len),
        _ => Err(RpcError::invalid_argument("offset and length of a range are not negative")),
    }
}
