//! `rpc.peer.*`: sends of tensors directly to another server, where the operators allow it.
//!
//! The destination's session offers a range of a tensor, and gets a capability for it. The source's
//! session, which the client gives the capability, connects to the destination and writes.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rpc_core::client::CHUNK;
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::tensor::Borrow;
use rpc_core::{
    Context, DataType, ErrorKind, Permission, Registry, RemoteTensor, Result, RpcError, Session, Shared, Tensor,
    TensorView, ThreadPermit,
};
use rpc_transports::{Address, Capability, ChannelIo, ConnectError, Connector, Dial, Machine, Tokens, WireLimits};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{SendsInfo, cancellable};
use crate::offers::{GET_RANGE, MAX_OFFERS, MAX_SENDS, Offer, OfferTerms, PeerQuota};
use crate::policy::{self, Ceiling};
use crate::server::Client;

/// Longest time for which a capability is good.
const MAX_LIFETIME: Duration = Duration::from_secs(60);

/// Maximum number of addresses that one send tries.
const MAX_ADDRESSES: usize = 8;

/// Time limit for the session at one address. The next one is tried after that.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for all addresses together, which is less than the time for which the client has a
/// capability live. The client sends through itself after that.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the orderly end of a connection over which all was written.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Largest reply that a destination may send, in bytes: a tensor's shape, or an error.
const MAX_REPLY: u64 = 64 << 10;

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
        .add_async("rpc.peer.withdraw", |Shared(offer): Shared<Offer>| async move { offer.withdraw().await })
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

/// Largest number of patterns in the description of a server.
const MAX_PATTERNS: usize = 64;

/// Returns the part of sends in the description of a server; `None` in sessions of no server.
pub(super) fn sends_info(context: &Context) -> Option<SendsInfo> {
    let (quota, ceiling) = (context.extension::<PeerQuota>()?, context.extension::<Ceiling>()?);
    let to: Vec<_> = match policy::rights_in(context) {
        // No rule gives a right that the settings give to no client.
        Some(rights) if !ceiling.peers().is_empty() => rights.peers().take(MAX_PATTERNS).map(str::to_owned).collect(),
        Some(_) => Vec::new(),
        None => ceiling.peers().iter().take(MAX_PATTERNS).cloned().collect(),
    };
    let addresses = match &quota.table {
        Some(table) => table.addresses(quota.is_encrypted, client_is_local(context)),
        None => Vec::new(),
    };
    let unreachable = match &quota.table {
        None => Some(OWN_PROCESS),
        Some(_) if addresses.is_empty() => Some(match quota.is_encrypted {
            true => "it has no encrypted address for other servers (tls:// or quic://, --peer-address)",
            false => "it has no address for other servers that it tells this client (--peer-address)",
        }),
        Some(_) => None,
    };
    Some(SendsInfo { to, addresses, unreachable: unreachable.map(str::to_owned) })
}

/// Returns true if the client of the session is a program of this machine.
fn client_is_local(context: &Context) -> bool {
    let client = context.extension::<Client>();
    client.is_some_and(|client| !client.through_hop && is_this_machine(client.machine))
}

/// Reason for which no server sends to a session with a process of its own.
const OWN_PROCESS: &str = "other servers cannot send to this session, which has a process of its own";

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
    let unavailable = || RpcError::unsupported(OWN_PROCESS);
    let quota = quota.ok_or_else(unavailable)?;
    let table = quota.table.as_ref().ok_or_else(unavailable)?;
    let permit = quota.offers.clone().try_acquire_owned();
    let permit = permit.map_err(|_| RpcError::limit("offers", MAX_OFFERS as u64, MAX_OFFERS as u64 + 1))?;
    let memory = context.reserve_memory(Offer::BYTES)?;
    let lifetime = Duration::from_millis(u64::try_from(lifetime_ms).unwrap_or_default()).min(MAX_LIFETIME);
    // A range that was checked fits.
    let len = (range.end - range.start) as i64;
    let must_be_encrypted = must_be_encrypted || quota.is_encrypted;
    let terms = OfferTerms {
        range: Tensor::new(to.storage().clone(), range.start, [len], None, DataType::U8)?,
        lifetime,
        must_be_encrypted,
        devices: context.devices().clone(),
        limits: context.limits().clone(),
    };
    let (offer, capability) = table.offer(terms, &quota, permit, memory)?;
    Ok((Shared(Arc::new(offer)), table.addresses(must_be_encrypted, client_is_local(context)), capability.to_text()))
}

fn is_this_machine(machine: Machine) -> bool {
    match machine {
        Machine::This => true,
        Machine::At(ip) => ip.to_canonical().is_loopback(),
        Machine::Unknown => false,
    }
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
    let must_be_encrypted = must_be_encrypted || quota.is_encrypted;
    let (_, borrow) = from.into_parts();
    // Nothing is connected before all is reserved, so that the client can still send by itself.
    let (reserved, data) = match reserve(context, &quota, borrow) {
        Ok(reserved) => reserved,
        Err(error) if error.kind() == ErrorKind::LimitExceeded => {
            return Ok((false, format!("the source: {}", error.message())));
        }
        Err(error) => return Err(error),
    };
    let deadline = Instant::now() + CONNECT_LIMIT;
    let mut reasons = Vec::new();
    for address in addresses.iter().take(MAX_ADDRESSES) {
        let limit = deadline.saturating_duration_since(Instant::now()).min(CONNECT_TIMEOUT);
        if limit.is_zero() {
            reasons.push(format!("{address}: no time was left, of {CONNECT_LIMIT:?} for all addresses"));
            break;
        }
        let connecting =
            Connecting { context, quota: &quota, reserved: &reserved, capability, must_be_encrypted, limit };
        let connected = tokio::time::timeout(limit, connecting.connect(address)).await;
        let connected = connected.unwrap_or_else(|_| {
            Err(RpcError::new(ErrorKind::DeadlineExceeded, format!("no session within {limit:?}")))
        });
        match connected {
            // The connection is cut when this function returns, or its future is dropped.
            Ok((session, _cut)) => {
                write(&session, data, range).await?;
                // All is answered; the end only tells the destination that there will be no more.
                let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, session.shutdown()).await;
                return Ok((true, address.clone()));
            }
            Err(reason) => reasons.push(format!("{address}: {}", reason.message())),
        }
    }
    Ok((false, reasons.join("; ")))
}

/// Share of a send in the limits. The connection keeps it for as long as it lives.
struct Reserved {
    _permit: OwnedSemaphorePermit,
    _memory: MemoryLease,
    _files: OpenFileLease,
}

/// Reserves all that a send needs.
///
/// # Errors
///
/// [`ErrorKind::LimitExceeded`].
fn reserve(context: &Context, quota: &PeerQuota, borrow: Borrow) -> Result<(Arc<Reserved>, SendData)> {
    let permit = quota.sends.clone().try_acquire_owned();
    let permit = permit.map_err(|_| RpcError::limit("sends", MAX_SENDS as u64, MAX_SENDS as u64 + 1))?;
    let is_host = borrow.bytes().is_some();
    let buffers = if is_host { 0 } else { (PIECES * CHUNK) as u64 };
    let reserved = Arc::new(Reserved {
        _permit: permit,
        _memory: context.reserve_memory(SEND_BYTES + buffers)?,
        _files: context.reserve_open_files(1)?,
    });
    let data = match is_host {
        true => SendData::Host(borrow),
        false => SendData::Device(Box::new(DeviceReader {
            borrow,
            _thread: context.reserve_thread()?,
            _reserved: reserved.clone(),
        })),
    };
    Ok((reserved, data))
}

/// Source of the bytes of a send.
enum SendData {
    /// Memory of the host.
    Host(Borrow),
    /// Memory that the host cannot access.
    Device(Box<DeviceReader>),
}

/// Attempt to open the session of a capability.
struct Connecting<'a> {
    context: &'a Context,
    quota: &'a PeerQuota,
    reserved: &'a Arc<Reserved>,
    capability: &'a Capability,
    must_be_encrypted: bool,
    limit: Duration,
}

impl Connecting<'_> {
    /// Opens the session at `address`, if the client may have it opened there. The connection ends
    /// when the returned [`Cut`] is dropped.
    async fn connect(&self, address: &str) -> Result<(Session, Cut)> {
        let malformed = |error: rpc_transports::AddressError| RpcError::invalid_argument(error.to_string());
        let address: Address = address.parse().map_err(malformed)?;
        policy::check(self.context, &Permission::Peer(&address.to_string()))?;
        let ceiling = self.context.extension::<Ceiling>();
        let transports = ceiling.map_or_else(crate::transports, |ceiling| ceiling.transports().clone());
        let properties = transports.check(&address).map_err(|error| RpcError::unsupported(error.to_string()))?;
        if properties.starts_programs || transports.get(address.scheme()).is_none() {
            return Err(RpcError::unsupported("no server is sent to at such an address"));
        }
        let unencrypted =
            || RpcError::new(ErrorKind::Refused, "a session of the client is encrypted, and this address is not");
        if self.must_be_encrypted && !properties.encrypted {
            return Err(unencrypted());
        }
        let dial = Dial {
            tokens: Tokens::capability(self.capability.clone()),
            connect_timeout: self.limit,
            keep_alive: self.quota.keep_alive,
            may_prompt: false,
            ..Dial::default()
        };
        let dialled = transports.dial(&address, &dial).await;
        let channel = dialled.map_err(|error| ConnectError::from(error).into_rpc_error())?;
        if properties.encrypted && !channel.security().is_encrypted() {
            return Err(unencrypted());
        }
        let (cut, ended) = oneshot::channel();
        let channel = channel.map_io(|io| SeverableIo { io, send: Some(ended) });
        let channel = channel.with_additional_guard(self.reserved.clone());
        let connector = Connector::new()
            .transports(transports)
            .dial(dial)
            .key(address.key().unwrap_or_default())
            .handshake_timeout(self.limit)
            .limits(WireLimits { max_message: MAX_REPLY, window: 2 * MAX_REPLY, ..WireLimits::default() })
            // It would count against no limit.
            .shared_memory(false);
        let session = connector.connect_channel(channel).await.map_err(ConnectError::into_rpc_error)?;
        Ok((session, Cut(cut)))
    }
}

/// Owner of a connection: it is cut when this is dropped, whatever its session still waits for.
struct Cut(#[allow(dead_code, reason = "held for its drop")] oneshot::Sender<()>);

/// Bytes of a connection that ends with its send.
struct SeverableIo {
    io: Box<dyn ChannelIo>,
    /// Completes when the send has ended; `None` after that.
    send: Option<oneshot::Receiver<()>>,
}

impl SeverableIo {
    /// Returns the connection.
    ///
    /// # Errors
    ///
    /// The send has ended.
    fn io(&mut self, cx: &mut task::Context<'_>) -> io::Result<Pin<&mut Box<dyn ChannelIo>>> {
        if self.send.as_mut().is_some_and(|send| Pin::new(send).poll(cx).is_ready()) {
            self.send = None;
        }
        match self.send {
            Some(_) => Ok(Pin::new(&mut self.io)),
            None => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the send has ended")),
        }
    }
}

impl AsyncRead for SeverableIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.io(cx)?.poll_read(cx, buffer)
    }
}

impl AsyncWrite for SeverableIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.io(cx)?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.io(cx)?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Writes the bytes `range` of the storage to the range that the session has.
async fn write(session: &Session, data: SendData, range: Range<u64>) -> Result<()> {
    let to: RemoteTensor = session.get_function(GET_RANGE).await?.call(()).await?;
    let len = range.end - range.start;
    if to.size_bytes() != len {
        let text = format!("the destination offers {} bytes, and {len} were to be sent", to.size_bytes());
        return Err(RpcError::invalid_argument(text));
    }
    let mut reader = match data {
        SendData::Host(borrow) => {
            let bytes = borrow.into_bytes(range);
            let bytes = bytes.ok_or_else(|| RpcError::internal("a checked range was out of bounds"))?;
            return session.copy_to_remote(&to, bytes).await;
        }
        SendData::Device(reader) => reader,
    };
    let mut in_flight = VecDeque::with_capacity(PIECES);
    for at in (0..len).step_by(CHUNK) {
        if in_flight.len() == PIECES
            && let Some(oldest) = in_flight.pop_front()
        {
            oldest.await?;
        }
        let piece;
        (reader, piece) = reader.read(range.start + at, CHUNK.min((len - at) as usize)).await?;
        in_flight.push_back(session.copy_to_remote_at(&to, at, piece?).start());
    }
    for pending in in_flight {
        pending.await?;
    }
    Ok(())
}

/// Reader of memory that the host cannot access. It counts as a thread of the session, also while a
/// read goes on whose send is over.
struct DeviceReader {
    borrow: Borrow,
    _thread: ThreadPermit,
    _reserved: Arc<Reserved>,
}

impl DeviceReader {
    /// Reads a piece, on a thread that may block. Returns the reader, too.
    async fn read(self: Box<Self>, at: u64, len: usize) -> Result<(Box<Self>, Result<Bytes>)> {
        let read = move || {
            let mut piece = BytesMut::zeroed(len);
            let copied = self.borrow.copy_out(at, &mut piece);
            (self, copied.map(|()| piece.freeze()))
        };
        let done = tokio::task::spawn_blocking(read).await;
        done.map_err(|_| RpcError::internal("reading a device for a send has failed"))
    }
}

/// Returns the range in the storage of these bytes of a densely packed tensor.
fn byte_range(tensor: &Tensor, (offset, len): (i64, i64)) -> Result<Range<u64>> {
    match (u64::try_from(offset), u64::try_from(len)) {
        (Ok(offset), Ok(len)) => tensor.byte_range(offset, len),
        _ => Err(RpcError::invalid_argument("offset and length of a range are not negative")),
    }
}
