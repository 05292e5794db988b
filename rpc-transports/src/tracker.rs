//! Trackers, which assign servers to clients: their messages, tickets and clients.
//!
//! A tracker is a server like any other, whose functions are named in [`functions`]. Servers
//! register there with a key. Clients ask for one server with that key, or for several together. A
//! client gets an address and a [ticket](TicketKey), which only this server accepts, once, and for
//! a short time.
//!
//! ```no_run
//! # async fn example() -> Result<(), rpc_core::RpcError> {
//! use rpc_transports::tracker::{ServerRequest, TrackerClient};
//!
//! let tracker = TrackerClient::connect("tracker://pool.lan:9190").await?;
//! let board = tracker.request(&ServerRequest::new("rasp4")).await?;
//! let add = board.session().function::<(i64, i64), i64>("add").await?;
//! assert_eq!(add.call((1, 2)).await?, 3);
//! drop((add, board)); // Gives the board back.
//! # Ok(())
//! # }
//! ```

mod client;
mod messages;
mod opener;
mod ticket;

pub use self::client::{Loan, TrackerClient, address_of};
pub use self::messages::{
    DeviceDetails, DeviceLease, DeviceOffer, Drain, Draining, Grant, Holder, HolderState, Kick, LeaseHolder,
    LeaseWaiter, Loss, LossReason, MESSAGES, PoolEvent, PoolEventKind, QueueEntry, Reach, RecentError, Registered,
    Registration, Renewed, Returned, Sample, ServerDetails, ServerRequest, ServerStatus, ServerSummary, Summary, Use,
    functions,
};
pub use self::ticket::{Ticket, TicketError, TicketKey};

pub(crate) use self::opener::TrackerOpener;

/// [Application kind](rpc_core::RpcError::application_kind) of a server's refusal of a client
/// without a valid ticket.
pub const TICKET_REFUSED: &str = "ticket";

/// Text in place of a ticket by which a tracker asks whether a server is at its address. The server
/// opens no session, and answers with an error of the application kind [`PROBE_ANSWERED`].
pub const PROBE_TICKET: &str = "probe";

/// Number of the ticket by which a tracker has a server prove that it has made a registration. No
/// client gets it. The server answers as to [`PROBE_TICKET`], if the ticket was made with the key
/// of one of its registrations.
pub const PROOF_SERIAL: u64 = 0;

/// [Application kind](rpc_core::RpcError::application_kind) of a server's answer to the
/// [probe](PROBE_TICKET) of a tracker, which is no refusal of a client.
pub const PROBE_ANSWERED: &str = "probe";

/// Name of the label of servers that speak another protocol beside the native one, or instead of
/// it, such as `dialect=tvm`. A tracker gives its clients of that protocol these servers alone.
pub const DIALECT_LABEL: &str = "dialect";
