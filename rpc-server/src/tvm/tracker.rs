//! TVM's tracker protocol, spoken by a tracker beside the native one (`tracker --tvm`): servers of
//! TVM register there, and clients of TVM ask for servers.
//!
//! ```text
//! bytes ──► rpc_tvm::wire::TrackerWire ──► connection ──► peer ──► Tracker
//!           what the peer says             when           what     one queue for all
//! ```
//!
//! And the other direction: `registration` registers a server at a tracker of TVM
//! (`serve --tvm-tracker`), whose clients come with `match_keys`.

mod connection;
pub(super) mod link;
mod match_keys;
mod peer;
mod registration;

use std::sync::Arc;

use rpc_core::RpcError;
use rpc_transports::{BoxFuture, Dialect, DialectConnection, Recognition};
use rpc_tvm::wire::TRACKER_MAGIC;

pub(crate) use self::match_keys::{MatchKeys, UsedPlace};
pub(crate) use self::registration::{TvmAdvertisement, TvmRegistrar};
use super::magic::recognize;
use crate::tracker::Tracker;

/// The dialect of TVM's servers and clients at a tracker.
#[derive(Clone, Debug)]
pub(crate) struct TvmTrackerDialect(pub(crate) Arc<Tracker>);

impl Dialect for TvmTrackerDialect {
    fn name(&self) -> &str {
        "tvm"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        recognize(first, TRACKER_MAGIC)
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(connection::serve(&self.0, connection))
    }
}
