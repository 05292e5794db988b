//! Decoding of MessagePack from a peer, with a limit on nesting.

use rmp::Marker;
use serde::de::{DeserializeOwned, Error as _};

/// Largest nesting depth of lists, maps and packed values. Deeper ones are refused.
pub const MAX_DEPTH: usize = 64;

/// Decodes MessagePack from a peer, with a limit on nesting, so that decoding cannot overflow the
/// stack.
pub(crate) fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(MAX_DEPTH);
    T::deserialize(&mut deserializer)
}

/// Decodes one map with field names as keys, which must be all that `bytes` hold: the structures of
/// the protocol. A struct may also be written as an array, which later versions could not extend.
pub(crate) fn unpack_map<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, rmp_serde::decode::Error> {
    let is_map = |first: &u8| matches!(Marker::from_u8(*first), Marker::FixMap(_) | Marker::Map16 | Marker::Map32);
    if !bytes.first().is_some_and(is_map) {
        return Err(rmp_serde::decode::Error::custom("it is not a map"));
    }
    let mut deserializer = rmp_serde::Deserializer::new(bytes);
    deserializer.set_max_depth(MAX_DEPTH);
    let value = T::deserialize(&mut deserializer)?;
    match *deserializer.get_ref() {
        [] => Ok(value),
        left => {
            Err(rmp_serde::decode::Error::custom(format_args!("{} bytes are left over behind the map", left.len())))
        }
    }
}
