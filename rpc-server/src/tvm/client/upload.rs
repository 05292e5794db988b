//! A file on its way to a server.

use bytes::Bytes;
use rpc_core::RpcError;
use rpc_core::limits::MemoryLease;
use rpc_tvm::wire::Text;

/// Bytes that a piece of a file is charged with beside its data: its allocation, and its places in
/// lists.
const PIECE: u64 = 256;

/// A file that is being sent: its pieces are kept until it is complete, because the protocol has
/// one request for all of it.
pub(super) struct Upload {
    pub(super) target: Target,
    /// Announced length in bytes.
    pub(super) len: Option<u64>,
    pub(super) pieces: Vec<Bytes>,
    pub(super) lease: MemoryLease,
    pub(super) received: u64,
    /// True once the pieces have been given away, whatever came of that.
    pub(super) is_committed: bool,
}

pub(super) enum Target {
    File(Text),
    /// A module, by its digest.
    Module(String),
}

impl Upload {
    pub(super) fn check_open(&self) -> Result<(), RpcError> {
        if self.is_committed { Err(RpcError::invalid_argument("the file has been committed")) } else { Ok(()) }
    }

    /// Charges and keeps a piece.
    pub(super) fn add(&mut self, data: &[u8]) -> Result<(), RpcError> {
        if data.is_empty() {
            return Ok(());
        }
        let received = self.received + data.len() as u64;
        self.lease.resize(received + (self.pieces.len() as u64 + 1) * PIECE)?;
        self.received = received;
        // A copy: the piece may be a part of a larger message, which would stay with it.
        self.pieces.push(Bytes::copy_from_slice(data));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::limits::MemoryQuota;

    use super::*;

    #[test]
    fn small_pieces_are_charged_with_their_places() {
        let quota = MemoryQuota::new("files", 2 * PIECE + 20, None);
        let (target, lease) = (Target::File("x".into()), quota.reserve(0).unwrap());
        let mut upload = Upload { target, len: None, pieces: Vec::new(), lease, received: 0, is_committed: false };
        for piece in [&b"0"[..], b"", b"0123456789", b""] {
            upload.add(piece).unwrap();
        }
        assert_eq!((upload.pieces.len(), upload.received, quota.used()), (2, 11, 2 * PIECE + 11));
        assert!(upload.add(b"0").is_err());
        assert_eq!((upload.pieces.len(), upload.received, quota.used()), (2, 11, 2 * PIECE + 11));
    }
}
