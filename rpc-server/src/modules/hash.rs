//! SHA-256 of a stream.

use std::fmt;
use std::io::{self, Read};

use ring::digest::{Context, SHA256};
use rpc_core::client::Digest;

/// Bytes read at a time: few enough for the caches of the processor, and enough for few system
/// calls.
pub(crate) const FILE_PIECE: usize = 128 << 10;

/// Reads `source` to its end, and returns its digest and its length in bytes, as
/// [`Modules::upload`](rpc_core::client::Modules::upload) needs them. Blocks.
///
/// # Errors
///
/// `source` cannot be read.
pub fn hash(mut source: impl Read) -> io::Result<(Digest, u64)> {
    let mut hasher = Hasher::new();
    let mut piece = vec![0; FILE_PIECE];
    let mut len = 0;
    loop {
        match source.read(&mut piece) {
            Ok(0) => return Ok((hasher.finish(), len)),
            Ok(count) => {
                hasher.update(&piece[..count]);
                len += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// State of the computation of a digest.
pub(crate) struct Hasher(Context);

impl Hasher {
    pub(crate) fn new() -> Self {
        Self(Context::new(&SHA256))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        let mut bytes = [0; Digest::LEN];
        // The lengths are equal: SHA-256 is chosen above.
        bytes.copy_from_slice(self.0.finish().as_ref());
        Digest::from_bytes(bytes)
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hasher")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_that_sha256sum_prints() {
        let (digest, len) = hash(&b"abc"[..]).unwrap();
        assert_eq!(digest.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(len, 3);
        let long = vec![7; 3 * FILE_PIECE + 1];
        let mut parts = Hasher::new();
        long.chunks(1000).for_each(|part| parts.update(part));
        assert_eq!(hash(&long[..]).unwrap(), (parts.finish(), long.len() as u64));
    }
}
