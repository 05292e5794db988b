//! Bodies of the fuzz targets that need more than the protocol: each takes any bytes, and panics
//! where a promise is broken. The targets in `fuzz/` run them from random bytes, and
//! `tests/faults` from the inputs that are kept in `fuzz/corpus` and mutations of those.

mod file_functions;
mod relay;
mod tracker_messages;
mod tvm_wire;

use bytes::Bytes;
use rpc_transports::tracker::TicketKey;

pub use self::file_functions::file_functions;
pub use self::relay::relay;
pub use self::tracker_messages::tracker_messages;
pub use self::tvm_wire::tvm_wire;

/// A fuzz target: takes any bytes, and panics where a promise is broken.
pub type Target = fn(&[u8]);

/// The targets by name: also the names of their folders in `fuzz/corpus`.
pub const TARGETS: [(&str, Target); 6] = [
    ("disco_commands", disco_commands),
    ("file_functions", file_functions),
    ("relay", relay),
    ("ticket", ticket),
    ("tracker_messages", tracker_messages),
    ("tvm_wire", tvm_wire),
];

/// A batch of commands for a Disco node. The first two bytes are the length of the heads; the bulk
/// follows them. The same bytes are also read as the other messages of Disco.
pub fn disco_commands(input: &[u8]) {
    let (heads, bulk) = split(input);
    let bulk = if bulk.is_empty() { Vec::new() } else { vec![Bytes::copy_from_slice(bulk)] };
    disco::fuzzing::commands(Bytes::copy_from_slice(heads), bulk);
    disco::fuzzing::messages(&Bytes::copy_from_slice(input));
}

/// The text of a ticket. None but the key's own is taken.
pub fn ticket(input: &[u8]) {
    let key = TicketKey::from_bytes([7; 32]);
    let text = String::from_utf8_lossy(input);
    if let Ok(ticket) = key.verify(&text) {
        assert_eq!(key.sign(ticket), text, "a ticket has one spelling");
    }
}

/// Takes a piece of the input: two bytes are its length. Returns the piece and the rest.
fn split(input: &[u8]) -> (&[u8], &[u8]) {
    let Some((len, rest)) = input.split_first_chunk::<2>() else { return (input, &[]) };
    rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()))
}

/// Runtime of the targets that need one: one thread, whose clock moves as soon as it waits.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}
