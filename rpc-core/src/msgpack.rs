//! Decoding of MessagePack from a peer, with a limit on nesting.

use serde::de::DeserializeOwned;

/// Largest nesting depth of lists, maps and packed values. Deeper ones are refused.
pub const MAX_DEPTH: usize = 64;

/// Decodes MessagePack from a peer, with a limit on nesting, so that decoding cannot overflow the
/// stack.
pub(crate) fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(MAX_DEPTH);
    T::deserialize(&mut deserializer)
}
