//! Entrances for fuzzing: the bytes that peers send to nodes and controllers.

use bytes::Bytes;
use rpc_core::Packed;
use rpc_core::proto::decode_value;

use super::codec::decode_batch;
use super::event::decode_events;
use super::set_up::SetUp;

/// Reads a batch of commands as a node does. A command that is read can be written, and is read as
/// the same command again.
///
/// # Panics
///
/// The codec does not keep that promise.
pub fn commands(heads: Bytes, bulk: Vec<Bytes>) {
    let Ok(commands) = decode_batch(heads, bulk) else { return };
    for queued in commands {
        let encoded = queued.command.encode().expect("what was read can be written");
        let again = decode_batch(encoded.head, encoded.bulk.into_iter().collect()).expect("what was written is read");
        // Printed, because a float that is not a number differs from itself.
        assert_eq!(format!("{:?}", again[0].command), format!("{:?}", queued.command));
    }
}

/// Reads a set-up as a node does, and the reply of `disco.events` as a controller does.
pub fn messages(bytes: &Bytes) {
    let _ = SetUp::decode(&Packed::from_bytes(bytes.clone()));
    if let Ok(value) = decode_value(bytes, Bytes::new()) {
        let _ = decode_events(value);
    }
}
