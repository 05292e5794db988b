//! Encryption of a data connection: a stream of records, under keys that both ends derive from the
//! proofs of the handshake.
//!
//! A record is the length of what follows, `u32`, little-endian; then up to [`RECORD`] bytes
//! encrypted with AES-256-GCM, and the tag of 16 bytes. The length is authenticated with them. The
//! nonce is the number of the record in its direction, from 0, `u64`, little-endian, and four
//! zeros. The key is HKDF-SHA-256 of the session's key, with the hello and the acceptor's nonce as
//! salt and, as information, the name of the direction and the number of the record divided by
//! 2^20, `u64`, little-endian: so no key is used for too much, and none twice.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, Nonce, UnboundKey};
use ring::hkdf;

use super::socket::Socket;

/// The most bytes of one record, before they are encrypted.
const RECORD: usize = 64 * 1024;
const LENGTH: usize = 4;
/// The records of one key: 64 GiB, far below what AES-GCM bears.
const RECORDS_PER_KEY: u64 = 1 << 20;

/// Secret that both ends of a connection share, and the end that this is.
pub(super) struct Secret {
    shared: hkdf::Prk,
    is_dialler: bool,
}

impl Secret {
    /// Derives the secret of the connection with this hello and challenge.
    pub(super) fn derive(key: &[u8; 32], hello: &[u8], challenge: &[u8], is_dialler: bool) -> Self {
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, &[hello, challenge].concat());
        Self { shared: salt.extract(key), is_dialler }
    }

    /// Encrypts all data over `stream` from here on.
    pub(super) fn secure<S>(self, stream: S) -> Secure<S> {
        let (out, back): (&[u8], &[u8]) =
            if self.is_dialler { (TO_ACCEPTOR, TO_DIALLER) } else { (TO_DIALLER, TO_ACCEPTOR) };
        Secure {
            stream,
            seals: Direction::new(self.shared.clone(), out),
            opens: Direction::new(self.shared, back),
            sealed: Vec::new(),
            sent: 0,
            input: vec![0; 2 * (LENGTH + RECORD + MAX_TAG_LEN)],
            read: 0..0,
            plain: 0..0,
        }
    }
}

const TO_ACCEPTOR: &[u8] = b"disco data 1: dialler to acceptor";
const TO_DIALLER: &[u8] = b"disco data 1: acceptor to dialler";

/// The keys of one direction, and how many records have gone there.
struct Direction {
    shared: hkdf::Prk,
    name: &'static [u8],
    key: LessSafeKey,
    records: u64,
}

impl Direction {
    fn new(shared: hkdf::Prk, name: &'static [u8]) -> Self {
        let key = Self::key(&shared, name, 0);
        Self { shared, name, key, records: 0 }
    }

    fn key(shared: &hkdf::Prk, name: &[u8], generation: u64) -> LessSafeKey {
        let info = [name, &generation.to_le_bytes()];
        let okm = shared.expand(&info, &AES_256_GCM).expect("a key is shorter than what HKDF can give");
        LessSafeKey::new(UnboundKey::from(okm))
    }

    /// Returns the nonce of the next record, for which the key is ready.
    fn next(&mut self) -> Nonce {
        if self.records > 0 && self.records.is_multiple_of(RECORDS_PER_KEY) {
            self.key = Self::key(&self.shared, self.name, self.records / RECORDS_PER_KEY);
        }
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.records.to_le_bytes());
        self.records += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// An encrypted stream that does not block. It may hold data back for a while: see
/// [`Socket::holds_back`].
pub(super) struct Secure<S> {
    stream: S,
    seals: Direction,
    opens: Direction,
    /// The record that is being sent, and how much of it is.
    sealed: Vec<u8>,
    sent: usize,
    /// Bytes that are read and not yet opened lie at `read`, and those opened and not yet taken at
    /// `plain`.
    input: Vec<u8>,
    read: Range<usize>,
    plain: Range<usize>,
}

impl<S: Read + Write> Secure<S> {
    /// Makes a record of as many bytes as it can have, and begins to send it.
    fn write_record(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_sealed()?;
        self.sealed.clear();
        self.sent = 0;
        self.sealed.extend_from_slice(&[0; LENGTH]);
        for part in parts {
            let room = LENGTH + RECORD - self.sealed.len();
            self.sealed.extend_from_slice(&part[..part.len().min(room)]);
        }
        let taken = self.sealed.len() - LENGTH;
        if taken == 0 {
            self.sealed.clear();
            return Ok(0);
        }
        let length = ((taken + MAX_TAG_LEN) as u32).to_le_bytes();
        let nonce = self.seals.next();
        let tag = self.seals.key.seal_in_place_separate_tag(nonce, Aad::from(length), &mut self.sealed[LENGTH..]);
        let tag = tag.map_err(|_| io::Error::other("a record cannot be encrypted"))?;
        self.sealed[..LENGTH].copy_from_slice(&length);
        self.sealed.extend_from_slice(tag.as_ref());
        match self.send_sealed() {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    /// Gives the stream the rest of the record that is being sent.
    fn send_sealed(&mut self) -> io::Result<()> {
        while self.sent < self.sealed.len() {
            match self.stream.write(&self.sealed[self.sent..])? {
                0 => return Err(ErrorKind::WriteZero.into()),
                written => self.sent += written,
            }
        }
        Ok(())
    }

    /// Opens the next record, if it is there as a whole.
    fn open_record(&mut self) -> io::Result<bool> {
        let read = &mut self.input[self.read.clone()];
        let Some((length, rest)) = read.split_first_chunk_mut::<LENGTH>() else { return Ok(false) };
        let len = u32::from_le_bytes(*length) as usize;
        if !(MAX_TAG_LEN + 1..=MAX_TAG_LEN + RECORD).contains(&len) {
            return Err(changed());
        }
        let Some(record) = rest.get_mut(..len) else { return Ok(false) };
        let nonce = self.opens.next();
        let opened = self.opens.key.open_in_place(nonce, Aad::from(*length), record).map_err(|_| changed())?.len();
        let start = self.read.start + LENGTH;
        self.plain = start..start + opened;
        self.read.start = start + len;
        Ok(true)
    }
}

fn changed() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "what came over the encrypted connection was changed on the way")
}

impl<S: Read + Write> Read for Secure<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.plain.is_empty() {
            if self.open_record()? {
                continue;
            }
            self.input.copy_within(self.read.clone(), 0);
            self.read = 0..self.read.len();
            match self.stream.read(&mut self.input[self.read.end..])? {
                0 => return Ok(0),
                read => self.read.end += read,
            }
        }
        let len = bytes.len().min(self.plain.len());
        bytes[..len].copy_from_slice(&self.input[self.plain.start..self.plain.start + len]);
        self.plain.start += len;
        Ok(len)
    }
}

impl<S: Read + Write> Write for Secure<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_record(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_record(parts)
    }

    /// Sends the data that is held back, here and by the stream.
    fn flush(&mut self) -> io::Result<()> {
        self.send_sealed()?;
        self.stream.flush()
    }
}

impl<S: Socket> Socket for Secure<S> {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.stream.file()
    }

    fn finish(&mut self) -> io::Result<()> {
        self.stream.finish()
    }

    fn holds_back(&self) -> bool {
        self.sent < self.sealed.len() || self.stream.holds_back()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Secure<UnixStream>, Secure<UnixStream>) {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        b.set_nonblocking(true).unwrap();
        let secret = |is_dialler| Secret::derive(&[7; 32], b"hello", b"challenge", is_dialler);
        (secret(true).secure(a), secret(false).secure(b))
    }

    /// Moves `bytes` from one to the other in writes and reads of odd sizes.
    fn carry(from: &mut Secure<UnixStream>, to: &mut Secure<UnixStream>, bytes: &[u8]) {
        let (mut written, mut got) = (0, Vec::new());
        let mut buffer = vec![0; 10_007];
        while got.len() < bytes.len() || from.holds_back() {
            match from.write(&bytes[written..bytes.len().min(written + 100_003)]) {
                Ok(len) => written += len,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            match to.read(&mut buffer) {
                Ok(len) => got.extend_from_slice(&buffer[..len]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(got == bytes);
    }

    #[test]
    fn bytes_arrive_in_both_directions() {
        let (mut a, mut b) = pair();
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
        carry(&mut a, &mut b, &bytes);
        carry(&mut b, &mut a, &bytes);
        carry(&mut a, &mut b, b"x");
    }

    #[test]
    fn keys_change_and_differ_by_direction() {
        let (mut a, mut b) = pair();
        for records in [RECORDS_PER_KEY - 1, 5 * RECORDS_PER_KEY - 1] {
            (a.seals.records, b.opens.records) = (records, records);
            carry(&mut a, &mut b, b"the last one of its key");
            carry(&mut a, &mut b, b"the first one of the next");
        }
        // A side does not take its own bytes for the other's.
        let (mut a, b) = pair();
        a.write_all(b"reflected").unwrap();
        let Secure { stream: mut far, .. } = b;
        let mut record = [0; 64];
        let len = far.read(&mut record).unwrap();
        far.write_all(&record[..len]).unwrap();
        assert_eq!(a.read(&mut [0; 64]).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_changed_repeated_or_cut_record_is_an_error() {
        let record = |text: &[u8]| {
            let (mut a, b) = pair();
            a.write_all(text).unwrap();
            let Secure { stream: mut far, .. } = b;
            let mut record = vec![0; 256];
            let len = far.read(&mut record).unwrap();
            record.truncate(len);
            record
        };
        let sent = record(b"genuine");
        assert!(!sent.windows(7).any(|part| part == b"genuine"));
        for at in 0..sent.len() {
            let (Secure { stream: mut far, .. }, mut b) = pair();
            let mut changed = sent.clone();
            changed[at] ^= 1;
            far.write_all(&changed).unwrap();
            drop(far);
            // A longer record never comes to its end.
            assert!(b.read(&mut [0; 64]).map_or_else(|error| error.kind() == ErrorKind::InvalidData, |len| len == 0));
        }
        let (Secure { stream: mut far, .. }, mut b) = pair();
        far.write_all(&[sent.clone(), sent].concat()).unwrap();
        assert_eq!(b.read(&mut [0; 64]).unwrap(), 7);
        assert_eq!(b.read(&mut [0; 64]).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
