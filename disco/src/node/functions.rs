//! The functions of a node: by them a controller, or the node above, opens and drives workers.
//!
//! Their names begin with `disco.`:
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `disco.open` | set-up, packed | the host of some workers, and what is known of it, packed |
//! | `disco.submit` | host, number of the first command, commands, list of bulk | null; inline |
//! | `disco.events` | host | what has happened, once that is anything; an empty list after the end |
//! | `disco.offer` | host, epoch | tickets to segments for the whole session, packed |
//! | `disco.listen` | host, IP addresses of its node and those below it | where their workers listen for each other, packed |
//! | `disco.break_ccl` | host, epoch, reason | null; inline: ends the collectives of that epoch, also those that workers are in |
//! | `disco.abort` | host | null; inline: passes everything that is queued |
//! | `disco.relays` | host | an end, and between whom it is to lead, packed, once a worker there or below asks for that; `Closed` when none will any more |
//! | `disco.connect` | host, worker, whether it is the world's | an end, at which that worker's listener is |
//! | `disco.answer` | end, reason or null | null: its worker may begin, or if there is a reason gives up |
//! | `disco.take` | end | the next bytes that come out of it, up to 64 KiB; none at the end |
//! | `disco.give` | end, bytes | null, once it has taken them; none are the end |

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::{Context, ErrorKind, Pack, Registry, Result, RpcError, Shared as SharedObject};

use crate::link::local::LocalHost;
use crate::link::relay::{Held, Wanted, WorkerDirectory};
use crate::node::host::WorkerHost;
use crate::weights;
use crate::wire::set_up::SetUp;

/// Adds what workers are created and driven by to `registry`, whose functions they call.
///
/// A program that registers this and serves its registry can be a node of any Disco session: as a child process, over a network, behind a chain of
/// hops.
pub fn register(registry: &Registry) {
    registry
        .add("disco.open", |context: Context, set_up: Pack<SetUp>| -> Result<_> {
            let (host, info) = WorkerHost::open(&context, &set_up.0)?;
            Ok((SharedObject(host), Pack(info)))
        })
        .add_inline("disco.submit", |host: SharedObject<WorkerHost>, first: u64, heads: Bytes, bulk: Vec<Bytes>| {
            host.0.submit_batch(first, heads, bulk)
        })
        .add_async("disco.events", |host: SharedObject<WorkerHost>| {
            let events = host.0.events();
            // The host itself may go while somebody waits.
            drop(host);
            async move {
                match events {
                    Some(events) => events.next().await,
                    None => Err(RpcError::new(ErrorKind::ApiMisuse, "the controller of this host is in its process")),
                }
            }
        })
        .add("disco.offer", |host: SharedObject<WorkerHost>, epoch: u64| -> Result<_> { host.0.offer(epoch) })
        .add("disco.listen", |host: SharedObject<WorkerHost>, addresses: Pack<Vec<IpAddr>>| -> Result<_> {
            host.0.listen(&addresses.0).map(Pack)
        })
        .add_inline("disco.break_ccl", |host: SharedObject<WorkerHost>, epoch: u64, reason: String| {
            host.0.break_collectives(epoch, &reason);
        })
        .add_inline("disco.abort", |host: SharedObject<WorkerHost>| host.0.abort());
    register_relay(registry);
    weights::register(registry);
}

/// Adds the relay's functions to those that drive workers.
fn register_relay(registry: &Registry) {
    registry
        .add_async("disco.relays", |host: SharedObject<WorkerHost>| {
            let relays = Arc::clone(host.0.relays());
            // The host itself may go while somebody waits.
            drop(host);
            async move {
                let Wanted { between, end } = relays.next().await?;
                Ok::<_, RpcError>((Held::share(end), Pack(between)))
            }
        })
        .add_async("disco.connect", |host: SharedObject<WorkerHost>, worker: u32, is_world: bool| {
            let to = host.0.destination(worker, is_world);
            let place = host.0.relays().place();
            drop(host);
            async move {
                let place = place?;
                let nobody = || RpcError::invalid_argument(format!("worker {worker} is not at this node"));
                let end = to.ok_or_else(nobody)??.open().await?;
                Ok::<_, RpcError>(Held::share(end.at(place)))
            }
        })
        .add_async("disco.answer", |end: SharedObject<Held>, reason: Option<String>| {
            Held::lend(end, async move |end| end.answer(reason).await)
        })
        .add_async("disco.take", |end: SharedObject<Held>| Held::lend(end, async move |end| end.take().await))
        .add_async("disco.give", |end: SharedObject<Held>, bytes: Bytes| {
            Held::lend(end, async move |end| end.give(bytes).await)
        });
}
