//! JSON messages between this program and processes that it has started. Both are the same program,
//! unless its file has been replaced meanwhile, so that each message has a version.

use std::io;

use rpc_transports::MessageFamily;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The field of a message that each version but the first has.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default = "first_version")]
    version: u32,
}

/// Returns the version of a message without a number.
fn first_version() -> u32 {
    1
}

/// Decodes a message that `peer` has sent to `own`. The version is read before the other fields,
/// which may be unknown here.
///
/// # Errors
///
/// The peer speaks another version; the message is malformed.
pub(crate) fn decode<T: DeserializeOwned>(
    family: &MessageFamily,
    message: &[u8],
    peer: &str,
    own: &str,
) -> io::Result<T> {
    let Versioned { version } = serde_json::from_slice(message)?;
    let checked = family.check(version, peer, own);
    checked.map_err(|error| io::Error::other(format!("{}, and start the server again", error.message())))?;
    Ok(serde_json::from_slice(message)?)
}
