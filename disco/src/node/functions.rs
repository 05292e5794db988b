//! Functions `disco.*` of a node, by which a controller, or the node above, opens and drives
//! workers.
//!
//! Their names begin with `disco.`:
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `disco.version` | | version of the messages (2) |
//! | `disco.open` | set-up | the host of some workers, and its description |
//! | `disco.submit` | host, number of the first command, commands, list of bulk | null (2) |
//! | `disco.events` | host | the next events; an empty list is the end |
//! | `disco.offer` | host, epoch, meshes | tickets to segments for the whole session |
//! | `disco.listen` | host, IP addresses (3), meshes | addresses of the workers' listeners |
//! | `disco.break_ccl` | host, epoch, kind of error, reason, bool | null (2, 4) |
//! | `disco.abort` | host | null (2): drops all that is queued |
//! | `disco.relays` | host | an end, and the pair of workers that it is for (5) |
//! | `disco.connect` | host, worker, communicator (7) | an end, at that worker's listener |
//! | `disco.answer` | end, reason or null | null (6) |
//! | `disco.take` | end | the next bytes that come out of it, up to 64 KiB; none at the end |
//! | `disco.give` | end, bytes | null, once it has taken them; no bytes are the end |
//!
//! 1. A controller looks for it before it opens a host: version 1 of the messages has none.
//! 2. Inline: it runs where the frame was read.
//! 3. Those of the node and of the nodes below it.
//! 4. Ends the collectives of that epoch, also those that workers are in, and if the last argument
//!    is true those by which they join each other: one of them is lost.
//! 5. Once a worker there or below asks for it; `Closed` when none will any more.
//! 6. Its worker may begin, or if there is a reason gives up.
//! 7. Its number in a `RelayedPair`.
//!
//! The functions of loaders are called on workers, by commands (`weights/worker.rs`):
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `disco.weights.open` | list of `RequestedFile` | the files |
//! | `disco.weights.unreadable` | files | for each file null, or why the worker cannot read it |
//! | `disco.weights.load` | files, `LoadRequest` | the worker's part of a tensor |
//! | `disco.weights.cache_limit` | | bytes that the cache of the worker's node may hold |
//! | `disco.weights.find` | `FindRequest` | the bytes of the worker's part in that cache, or null |
//! | `disco.weights.is_found` | what was found | true if that is bytes |
//! | `disco.weights.take` | tensor of bytes, `LoadRequest` | the worker's part, made of them |
//!
//! So are those by which two sessions reshard (`weights/reshard/worker.rs`):
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `disco.reshard.open` | `ReshardRequest`, list (9) | the worker, as others reach it (8) |
//! | `disco.reshard.describe` | what was opened | `WorkerEnd` |
//! | `disco.reshard.join` | what was opened, `JoinRequest` | the worker as a rank (10) |
//! | `disco.reshard.failure` | that rank | null, or why the worker has not joined |
//! | `disco.reshard.send` | that rank, `WorkerTask`, list of tensors | true, once all have come |
//! | `disco.reshard.receive` | that rank, `WorkerTask`, list (9) | tensors, once all have come |
//! | `disco.reshard.allocate` | `WorkerTask`, list (9) | list of tensors, without content |
//! | `disco.reshard.read` | list of tensors, `RelayedPiece` | tensor of bytes; null elsewhere |
//! | `disco.reshard.write` | list of tensors, bytes, `RelayedPiece`, true | true |
//! | `disco.reshard.is_done` | anything | true |
//! | `disco.reshard.tensor` | list of tensors, number | that one |
//!
//! 8. It listens, or has made a segment, as the request says. `disco.break_ccl` with the number of
//!    the `JoinRequest` ends what follows.
//! 9. Tensors: those to send, or to fill, with null for new ones.
//! 10. One of the group of both sessions.

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::function::Rest;
use rpc_core::{Context, ErrorKind, Pack, Packed, Registry, Result, RpcError, Shared as SharedObject};

use crate::link::local::LocalHost;
use crate::link::relayed_data::{EndObject, RelayRequest, WorkerDirectory};
use crate::node::host::WorkerHost;
use crate::weights;
use crate::wire::mesh::Mesh;
use crate::wire::set_up::{MESSAGES, SetUp};

/// Adds the functions by which workers are created and driven to `registry`, whose functions they
/// call.
///
/// A program that registers this and serves its registry can be a node of any Disco session: as a
/// child process, over a network, behind a chain of hops.
pub fn register(registry: &Registry) {
    registry
        .add("disco.open", |context: Context, set_up: Packed| -> Result<_> {
            let (host, info) = WorkerHost::open(&context, &SetUp::decode(&set_up)?)?;
            Ok((SharedObject(host), Pack(info)))
        })
        .add_inline("disco.version", || MESSAGES.version())
        .add_inline("disco.submit", |host: SharedObject<WorkerHost>, first: u64, heads: Bytes, bulk: Vec<Bytes>| {
            host.0.submit_batch(first, heads, bulk)
        })
        .add_async("disco.events", |host: SharedObject<WorkerHost>| {
            let events = host.0.events();
            // The host itself may go while a caller waits.
            drop(host);
            async move {
                match events {
                    Some(events) => events.next().await,
                    None => Err(RpcError::new(ErrorKind::ApiMisuse, "the controller of this host is in its process")),
                }
            }
        })
        .add("disco.offer", |host: SharedObject<WorkerHost>, epoch: u64, meshes: Pack<Vec<Mesh>>| -> Result<_> {
            host.0.offer(epoch, &meshes.0)
        })
        .add(
            "disco.listen",
            |host: SharedObject<WorkerHost>, addresses: Pack<Vec<IpAddr>>, meshes: Pack<Vec<Mesh>>| -> Result<_> {
                host.0.listen(&addresses.0, &meshes.0).map(Pack)
            },
        )
        .add_inline(
            "disco.break_ccl",
            |host: SharedObject<WorkerHost>, epoch: u64, kind: u16, reason: String, and_joins: bool| {
                let cause = RpcError::new(ErrorKind::from_code(kind), shortened(&reason).to_owned());
                host.0.break_collectives(epoch, &cause, and_joins);
            },
        )
        .add_inline("disco.abort", |host: SharedObject<WorkerHost>| host.0.abort());
    register_relay(registry);
    weights::register(registry);
}

/// Longest reason that workers keep, in bytes.
const MAX_REASON: usize = 4096;

/// Returns the beginning of a reason, which each worker keeps.
fn shortened(reason: &str) -> &str {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

/// Adds functions to `registry` that refuse every controller for this reason, in place of those of
/// a node.
pub fn refuse(registry: &Registry, reason: impl Into<String>) {
    let reason = reason.into();
    registry
        .add_inline("disco.version", || MESSAGES.version())
        .add_inline("disco.open", move |_: Rest| -> Result<()> {
            Err(RpcError::new(ErrorKind::Refused, reason.clone()))
        });
}

/// Adds the relay's functions to those that drive workers.
fn register_relay(registry: &Registry) {
    registry
        .add_async("disco.relays", |host: SharedObject<WorkerHost>| {
            let relays = Arc::clone(host.0.relays());
            // The host itself may go while a caller waits.
            drop(host);
            async move {
                let RelayRequest { between, end } = relays.next().await?;
                Ok::<_, RpcError>((EndObject::share(end), Pack(between)))
            }
        })
        .add_async("disco.connect", |host: SharedObject<WorkerHost>, worker: u32, communicator: u32| {
            let to = host.0.destination(worker, communicator);
            let permit = host.0.relays().take_permit();
            drop(host);
            async move {
                let permit = permit?;
                let missing = || RpcError::invalid_argument(format!("worker {worker} is not at this node"));
                let end = to.ok_or_else(missing)??.open().await?;
                Ok::<_, RpcError>(EndObject::share(end.with_permit(permit)))
            }
        })
        .add_async("disco.answer", |end: SharedObject<EndObject>, reason: Option<String>| {
            EndObject::lend(end, async move |end| end.answer(reason).await)
        })
        .add_async("disco.take", |end: SharedObject<EndObject>| EndObject::lend(end, async move |end| end.take().await))
        .add_async("disco.give", |end: SharedObject<EndObject>, bytes: Bytes| {
            EndObject::lend(end, async move |end| end.give(bytes).await)
        });
}
