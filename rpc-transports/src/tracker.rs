//! Trackers: who has which server, and who gets one next. What is said to them, and their clients.
//!
//! A tracker is a server like any other, whose functions are named in [`functions`]. Servers
//! register there with a key, and clients ask for one server with that key, or for several
//! together. What a client is given is an address and a [ticket](TicketKey) that only this server
//! takes, once, and not for long.
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
mod ticket;

pub use self::client::{Loan, TrackerClient, address_of};
pub use self::messages::{
    DeviceOffer, Grant, Holder, HolderState, Loss, LossReason, QueueEntry, Reach, Registered, Registration, Renewed,
    Returned, Sample, ServerRequest, ServerStatus, ServerSummary, Summary, Use, functions,
};
pub use self::ticket::{Ticket, TicketError, TicketKey};

pub(crate) use self::client::connect;

/// The [application kind](rpc_core::RpcError::application_kind) of a server's refusal of a client
/// that has no ticket, or one that is not good.
pub const TICKET_REFUSED: &str = "ticket";
