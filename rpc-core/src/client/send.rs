//! Sending the content of a tensor from one session to a tensor of another: directly between the
//! servers where they can reach each other, and through the client otherwise.
//!
//! A server that takes part registers the functions `rpc.peer.*`; this module calls them. The
//! destination offers a range of bytes, and makes a *capability* for it, which is good for one
//! connection and for a limited time. The client carries it to the source, which connects to the
//! destination by it. Without these functions, or where the source cannot connect, the client reads
//! and writes the pieces itself.

use std::fmt;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::client::action::{Action, NamedResult as _, Options, ScopedAction};
use crate::client::copies::{CHUNK, check_range, received};
use crate::client::lane_deadlock;
use crate::client::piece_window::PieceWindow;
use crate::client::references::{RemoteFunction, RemoteObject, RemoteTensor};
use crate::client::session::Session;
use crate::dlpack::{DataType, dense_strides};
use crate::error::{ErrorKind, Result, RpcError};
use crate::printable_line;
use crate::session::{Operation, ReadBuffer, is_same};
use crate::value::TensorRef;

/// Time in milliseconds for which a capability may wait for the source to connect. The source is
/// idle when the destination makes it.
const CAPABILITY_LIFETIME_MS: i64 = 30_000;

/// Longest text of a server that is passed on to the caller, in characters before escapes.
const MAX_REASON: usize = 1024;

/// Route that the bytes of a [send](Session::send) have taken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SendRoute {
    /// From one server to the other.
    Direct {
        /// Address at which the source has connected to the destination.
        address: String,
    },
    /// Through this client, which has read and written them.
    ThroughClient {
        /// Reason why they did not go directly, for people.
        reason: String,
    },
    /// Within one session, by a copy at its server.
    SameSession,
}

impl fmt::Display for SendRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct { address } => write!(f, "directly, to {address}"),
            Self::ThroughClient { reason } => write!(f, "through the client: {reason}"),
            Self::SameSession => f.write_str("within the session"),
        }
    }
}

impl Session {
    /// Copies the bytes of the tensor `from` of this session to the tensor `to` of `to_session`,
    /// from the start of both. Returns the route that they took.
    ///
    /// The servers connect to each other where both support that, the source's operator allows the
    /// destination's address (`--allow-peer`), and it is reachable. If the traffic of either
    /// session is [encrypted](Self::is_encrypted), so has that connection to be. Otherwise the
    /// bytes go through this client, which holds a window of pieces and not the whole tensor.
    /// Between tensors of one session this is [`copy_among_remote`](Self::copy_among_remote).
    ///
    /// It begins when the earlier requests of its lane have completed, at both sessions. Later
    /// requests are not ordered with it until it is done, at either: a send takes several, and its
    /// place is where the transfer begins. A send that is cancelled or fails leaves the destination
    /// unspecified.
    ///
    /// A direct send reads the tensor, which nothing can write to meanwhile. So two sends at one
    /// time in opposite directions between the same two tensors, or a ring of such, wait for each
    /// other until a deadline or the end of a session.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the bytes do not fit, or a tensor is not densely packed;
    /// [`ErrorKind::Refused`] if another party has used the capability; and errors of both sessions
    /// and of the connection between the servers.
    pub fn send(&self, from: &RemoteTensor, to_session: &Self, to: &RemoteTensor) -> Action<SendRoute> {
        self.send_range(from, None, to_session, to, 0)
    }

    /// Sends like [`send`](Self::send), the bytes `range` of `from` to the byte `offset` of `to`.
    /// The default range is the whole tensor.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn send_range(
        &self,
        from: &RemoteTensor,
        range: impl Into<Option<Range<u64>>>,
        to_session: &Self,
        to: &RemoteTensor,
        offset: u64,
    ) -> Action<SendRoute> {
        let send = SendOperation {
            source: End { session: self.clone(), tensor: from.clone() },
            destination: End { session: to_session.clone(), tensor: to.clone() },
            range: range.into(),
            offset,
        };
        ScopedAction::steps(move |options| send.run(options))
    }
}

/// One end of a send.
struct End {
    session: Session,
    tensor: RemoteTensor,
}

impl End {
    /// Returns the reference to the tensor in requests.
    ///
    /// # Errors
    ///
    /// The tensor belongs to another session, or is not densely packed.
    fn reference(&self) -> Result<TensorRef> {
        let reference = self.tensor.reference_in(self.session.shared())?;
        match self.tensor.strides() {
            Some(strides) if strides != dense_strides(self.tensor.shape()) => {
                let shape = self.tensor.shape();
                Err(RpcError::invalid_argument(format!(
                    "expected a densely packed tensor, got shape {shape:?} with strides {strides:?}"
                )))
            }
            _ => Ok(reference),
        }
    }
}

/// A send, before it begins.
struct SendOperation {
    source: End,
    destination: End,
    range: Option<Range<u64>>,
    offset: u64,
}

/// Outcome of the attempt to send directly.
enum Direct {
    Sent {
        address: String,
    },
    /// The destination is as it was.
    Impossible {
        reason: String,
    },
}

impl SendOperation {
    async fn run(self, options: Options<'_>) -> Result<SendRoute> {
        let ends = [&self.source, &self.destination].map(|end| end.tensor.clone());
        let outcome = self.transfer(options).await;
        outcome.map_err(|error| ends.iter().fold(error, |error, tensor| tensor.0.explained(error)))
    }

    async fn transfer(self, mut options: Options<'_>) -> Result<SendRoute> {
        let (from, to) = (self.source.reference()?, self.destination.reference()?);
        for end in [&self.source, &self.destination] {
            end.tensor.0.check_lane(options.lane)?;
            lane_deadlock::check(end.session.shared(), options.lane)?;
        }
        let range = match &self.range {
            Some(range) => range.clone(),
            None => 0..from.size_bytes()?,
        };
        let len = range.end.checked_sub(range.start).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or_else(|| RpcError::invalid_argument(format!("{range:?} is no range of bytes")))?;
        check_range(&from, range.start, len).map_err(|error| error.context("the source"))?;
        check_range(&to, self.offset, len).map_err(|error| error.context("the destination"))?;
        let pieces = Pieces { from, to, start: range.start, offset: self.offset, len };
        if is_same(self.source.session.shared(), self.destination.session.shared()) {
            self.copy(&pieces, &options).await?;
            options.report(len as u64);
            return Ok(SendRoute::SameSession);
        }
        match self.send_directly(&pieces, &options).await? {
            Direct::Sent { address } => {
                options.report(len as u64);
                Ok(SendRoute::Direct { address })
            }
            Direct::Impossible { reason } => {
                self.pass_through(&pieces, &mut options).await?;
                Ok(SendRoute::ThroughClient { reason })
            }
        }
    }

    /// Copies within the session.
    async fn copy(&self, pieces: &Pieces, options: &Options<'_>) -> Result<()> {
        let Pieces { start, offset, len, .. } = *pieces;
        // Lengths in memory fit.
        let bytes = |tensor: &RemoteTensor, at| tensor.view(at, DataType::U8, &[len as i64], None);
        let (from, to) = (bytes(&self.source.tensor, start), bytes(&self.destination.tensor, offset));
        options.apply(self.source.session.copy_among_remote(&from, &to)).await
    }

    /// Has the source connect to the destination and send.
    ///
    /// # Errors
    ///
    /// Errors of the sessions, and of a connection that did come about: the destination may have
    /// been written to.
    async fn send_directly(&self, pieces: &Pieces, options: &Options<'_>) -> Result<Direct> {
        let (source, destination) = (&self.source.session, &self.destination.session);
        // The lane of the source comes to it when its earlier requests are complete: a capability
        // that waited for them could expire.
        let send = options.apply(source.get_function("rpc.peer.send"));
        let send: RemoteFunction = match send.await {
            Ok(send) => send,
            Err(error) => return impossible("the source", error),
        };
        let names = ["rpc.peer.offer", "rpc.peer.withdraw"];
        let [offer, withdraw] = match crate::client::files::functions(destination, options, names).await {
            Ok(functions) => functions,
            Err(error) => return impossible("the destination", error),
        };
        let encrypted = source.is_encrypted() || destination.is_encrypted();
        // Lengths and offsets within tensors that exist fit.
        let [start, offset, len] = [pieces.start, pieces.offset, pieces.len as u64].map(|number| number as i64);
        let terms = (&self.destination.tensor, offset, len, CAPABILITY_LIFETIME_MS, encrypted);
        let offered: Result<(RemoteObject, Vec<String>, String)> = options.apply(offer.call(terms)).await;
        let (offer, addresses, capability) = match offered {
            Ok(offered) => offered,
            Err(error) => return impossible("the destination", error),
        };
        if addresses.is_empty() {
            let (needed, hint) = if encrypted { ("encrypted ", "tls:// or quic://") } else { ("", "--peer-address") };
            let reason = format!("the destination has no {needed}address for other servers ({hint})");
            return Ok(Direct::Impossible { reason });
        }
        let terms = (&self.source.tensor, start, len, addresses, capability, encrypted);
        let sent: Result<(bool, String)> = options.apply(send.call(terms)).await;
        let reason = match sent {
            Ok((true, address)) => return Ok(Direct::Sent { address: limited(&address) }),
            Ok((false, reason)) => reason,
            Err(error) => return Err(error.context("the source could not send directly")),
        };
        // Nothing may come by the capability any more once the client writes itself.
        let was_used: bool = options.apply(withdraw.call((&offer,))).await?;
        if was_used {
            let text = format!(
                "the capability of this send was used, by another party or over a connection that broke, and the \
                 destination may have been written to: {reason}"
            );
            return Err(RpcError::new(ErrorKind::Refused, text).may_have_run(true));
        }
        Ok(Direct::Impossible { reason: limited(&reason) })
    }

    /// Reads the pieces from the source and writes them to the destination. A piece that was read
    /// is written at once, while others are being read.
    async fn pass_through(&self, pieces: &Pieces, options: &mut Options<'_>) -> Result<()> {
        let (source, destination) = (self.source.session.shared(), self.destination.session.shared());
        let reading = |error: RpcError| error.context("reading the source");
        let (mut reads, mut writes) = (PieceWindow::of_reads(), PieceWindow::of_writes());
        let (mut next, mut done, mut spare) = (0, 0, Vec::new());
        // A send of no bytes is one request to each session, too.
        let mut all_submitted = false;
        let read = |(at, len, buffer): &(usize, usize, ReadBuffer)| Operation::Read {
            from: pieces.from.clone().into(),
            offset: pieces.start + *at as u64,
            len: *len as u64,
            into: Some(buffer.clone()),
        };
        let write = |(at, data): &(usize, Bytes)| Operation::Write {
            to: pieces.to.clone().into(),
            offset: pieces.offset + *at as u64,
            data: data.clone(),
        };
        loop {
            if !all_submitted && !reads.is_full() {
                let size = CHUNK.min(pieces.len - next);
                let piece = (next, size, ReadBuffer::new(memory(&mut spare, size)));
                let began = reads.now();
                let pending = source.submit(options.request(read(&piece))).await.map_err(|error| {
                    let may_have_run = next > 0 || error.request_may_have_run();
                    reading(error.may_have_run(may_have_run))
                })?;
                reads.push(piece, began, pending);
                next += size;
                all_submitted = next == pieces.len;
            } else if !reads.is_empty() && !writes.is_full() {
                let again = |piece: &_| source.submit(options.request(read(piece))).reply();
                let Some(((at, _, buffer), outcome)) = reads.finish(again).await else { continue };
                let outcome = outcome.and_then(|reply| received(&buffer, reply));
                let data = outcome.map_err(|error| reading(error).may_have_run(true))?.freeze();
                let piece = (at, data);
                let began = writes.now();
                let pending = destination.submit(options.request(write(&piece))).await;
                let pending = pending.map_err(|error| {
                    let may_have_run = at > 0 || error.request_may_have_run();
                    writing(error.may_have_run(may_have_run))
                })?;
                writes.push(piece, began, pending);
            } else {
                let again = |piece: &_| destination.submit(options.request(write(piece))).reply();
                let Some(((_, data), outcome)) = writes.finish(again).await else { break };
                outcome.map_err(|error| {
                    let may_have_run = done > 0 || error.request_may_have_run();
                    writing(error.may_have_run(may_have_run))
                })?;
                done += data.len();
                options.report(done as u64);
                spare.extend(data.try_into_mut());
            }
        }
        Ok(())
    }
}

/// Ranges of a send that has been checked.
struct Pieces {
    from: TensorRef,
    to: TensorRef,
    start: u64,
    offset: u64,
    len: usize,
}

/// Returns memory for a piece, if possible that of an earlier one: fresh memory is several times
/// slower.
fn memory(spare: &mut Vec<BytesMut>, len: usize) -> BytesMut {
    match spare.pop() {
        Some(mut memory) if memory.len() >= len => {
            memory.truncate(len);
            memory
        }
        _ => BytesMut::zeroed(len),
    }
}

fn writing(error: RpcError) -> RpcError {
    error.context("writing the destination")
}

/// Returns the reason why a send cannot be direct, if the error is one: `which` has no such
/// functions, or refuses them.
fn impossible(which: &str, error: RpcError) -> Result<Direct> {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::Refused | ErrorKind::Unsupported | ErrorKind::LimitExceeded => {
            Ok(Direct::Impossible { reason: limited(&format!("{which}: {}", error.message())) })
        }
        _ => Err(error.context(format_args!("preparing a direct send at {which}"))),
    }
}

/// Returns the text of a server, cut to a length for people and safe to print.
fn limited(text: &str) -> String {
    let end = text.char_indices().nth(MAX_REASON).map_or(text.len(), |(at, _)| at);
    printable_line(&text[..end]).into_owned()
}
