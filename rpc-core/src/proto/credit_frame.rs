//! Credit: the bytes that a message takes of a window, and the frame that grants more.
//!
//! Requests of a client are admitted and granted credit in `server.rs`, which also bounds the
//! replies that a client does not take; `client.rs` spends it.

use crate::error::{ErrorKind, Result, RpcError};

/// Largest message, body and payload in bytes, that needs no credit in bytes: the number of
/// messages is limited already.
const FREE_MESSAGE_BYTES: usize = 4 << 10;

/// Returns the bytes of the window that a message of this size takes.
pub(super) fn cost(size: usize) -> u64 {
    if size > FREE_MESSAGE_BYTES { size as u64 } else { 0 }
}

/// Encodes the body of a credit frame: u32 requests, u64 bytes.
pub(super) fn encode_credit(requests: u32, bytes: u64) -> [u8; 12] {
    let mut body = [0; 12];
    body[..4].copy_from_slice(&requests.to_le_bytes());
    body[4..].copy_from_slice(&bytes.to_le_bytes());
    body
}

/// Decodes the body of a credit frame.
pub(super) fn parse_credit(body: &[u8]) -> Result<(u32, u64)> {
    let malformed = || RpcError::new(ErrorKind::Protocol, "malformed credit");
    let (requests, bytes) = body.split_first_chunk::<4>().ok_or_else(malformed)?;
    let bytes = bytes.try_into().map_err(|_| malformed())?;
    Ok((u32::from_le_bytes(*requests), u64::from_le_bytes(bytes)))
}
