//! Handshake of a data connection: the proofs by which two ranks take each other for members of one
//! group.
//!
//! All integers are little-endian.
//!
//! | sender | content |
//! | --- | --- |
//! | dialler | the hello: `"DCCL"`, then the fields below |
//! | acceptor | status `u8`, nonce (32 bytes) |
//! | dialler | HMAC-SHA-256 over `"disco data 1: dialler"`, the hello and the acceptor's nonce |
//! | acceptor | status `u8`, HMAC-SHA-256 over `"disco data 1: acceptor"` and the same |
//!
//! The hello's fields: version `u16`, flags `u16` (1 encrypted), size `u32`, dialler `u32`,
//! acceptor `u32`, epoch `u64`, nonce (32 bytes). The first status is 0 (go on), 1 (another epoch),
//! 2 (another group), 4 (not encrypted alike) or 5 (another version); the second is 0 (welcome) or
//! 3 (not proven). Both HMACs are under the session's key.
//!
//! A connection thus proves the session (by its key), the epoch, both ranks and its encryption, in
//! both directions; leftovers of another epoch cannot be taken for this one's. If it is encrypted,
//! all that follows is as [`super::secure`] says; if not, it is neither encrypted nor protected.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use ring::hmac;
use rpc_core::{ErrorKind, RpcError};

use super::super::join_deadline::JoinDeadline;
use super::address::{SessionKey, random};
use super::connection::{Connection, Stream};
use super::framed_connection::Link;
use super::secure::Secret;

/// Size of a hello in bytes.
pub(super) const HELLO: usize = 60;
/// Size of a nonce in bytes.
pub(super) const NONCE: usize = 32;
/// Version of the protocol of data connections: of the handshake and of all frames.
const VERSION: u16 = 1;
/// Time that a handshake may take from the connection on, however little of it comes at a time.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Shortest time for a handshake, at the end of the time for all of them.
pub(super) const MIN_HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(100);

const GO_ON: u8 = 0;
const OTHER_EPOCH: u8 = 1;
const OTHER_GROUP: u8 = 2;
const NOT_PROVEN: u8 = 3;
const OTHER_PROTECTION: u8 = 4;
const OTHER_VERSION: u8 = 5;

/// Flag of a hello whose sender encrypts all that follows.
const ENCRYPTED: u16 = 1;

/// Facts that both sides of a handshake have to agree on.
pub(super) struct Group<'a> {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) epoch: u64,
    pub(super) key: &'a SessionKey,
    pub(super) encrypt: bool,
}

/// Failure of an attempt to connect.
pub(super) enum Failure {
    /// A later attempt may succeed.
    Transient(String),
    Final(RpcError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Transient(error.to_string())
    }
}

impl Group<'_> {
    /// Performs the dialling side's part of the handshake, until `until`.
    pub(super) fn introduce(
        &self,
        peer: u32,
        connection: Connection,
        until: JoinDeadline<'_>,
    ) -> Result<Link, Failure> {
        let given_up = || until.has_ended();
        let mut stream = Stream::new(connection, until.left(), &given_up)?;
        let hello = self.hello(peer, &random().map_err(Failure::Final)?);
        stream.write_all(&hello)?;
        let mut answer = [0; 1 + NONCE];
        stream.read_exact(&mut answer)?;
        match answer[0] {
            GO_ON => {}
            OTHER_EPOCH => return Err(Failure::Transient("it is in another epoch".to_owned())),
            OTHER_PROTECTION => return Err(Failure::Final(self.refused(peer, ONE_ENCRYPTS))),
            OTHER_VERSION => return Err(Failure::Final(self.refused(peer, OTHER_VERSION_TEXT))),
            _ => return Err(Failure::Final(self.refused(peer, "it is in another group"))),
        }
        stream.write_all(self.prove(BY_DIALLER, &hello, &answer[1..]).as_ref())?;
        let mut welcome = [0; 1 + 32];
        stream.read_exact(&mut welcome)?;
        if welcome[0] != GO_ON || !self.proves(BY_ACCEPTOR, &hello, &answer[1..], &welcome[1..]) {
            return Err(Failure::Final(self.refused(peer, "one of the two has another key")));
        }
        Ok(stream.into_link(self.secret(&hello, &answer[1..], true))?)
    }

    fn refused(&self, peer: u32, why: &str) -> RpcError {
        RpcError::new(ErrorKind::Unauthenticated, format!("rank {} is not accepted by rank {peer}: {why}", self.rank))
    }

    /// Performs the accepting side's part of the handshake.
    pub(super) fn welcome(&self, mut stream: Stream<'_>) -> Result<(u32, Link), RpcError> {
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        let u32_at = |at: usize| u32::from_le_bytes([hello[at], hello[at + 1], hello[at + 2], hello[at + 3]]);
        let peer = u32_at(12);
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&hello[28..]);
        // The hello of the peer, if it is right.
        let of_peer = Group { rank: peer, ..*self };
        let expected = of_peer.hello(self.rank, &nonce);
        let status = match hello == expected {
            _ if is_of_other_version(&hello) => OTHER_VERSION,
            _ if hello[..6] != expected[..6] || hello[8..20] != expected[8..20] => OTHER_GROUP,
            _ if peer <= self.rank || peer >= self.size => OTHER_GROUP,
            _ if hello[6..8] != expected[6..8] => OTHER_PROTECTION,
            true => GO_ON,
            false => OTHER_EPOCH,
        };
        let challenge = random()?;
        let mut answer = vec![status];
        answer.extend_from_slice(&challenge);
        stream.write_all(&answer)?;
        if status != GO_ON {
            let text = match status {
                OTHER_EPOCH => "it is of another epoch",
                OTHER_PROTECTION => ONE_ENCRYPTS,
                OTHER_VERSION => OTHER_VERSION_TEXT,
                _ => "it is of another group",
            };
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        let mut proof = [0; 32];
        stream.read_exact(&mut proof)?;
        if !self.proves(BY_DIALLER, &hello, &challenge, &proof) {
            stream.write_all(&[NOT_PROVEN; 33])?;
            return Err(RpcError::new(ErrorKind::Unauthenticated, "it does not know the session's key"));
        }
        let mut welcome = vec![GO_ON];
        welcome.extend_from_slice(self.prove(BY_ACCEPTOR, &hello, &challenge).as_ref());
        stream.write_all(&welcome)?;
        Ok((peer, stream.into_link(self.secret(&hello, &challenge, false))?))
    }

    /// Returns this rank's hello to `peer`.
    pub(super) fn hello(&self, peer: u32, nonce: &[u8; NONCE]) -> [u8; HELLO] {
        let mut hello = [0; HELLO];
        hello[..4].copy_from_slice(MAGIC);
        hello[4..6].copy_from_slice(&VERSION.to_le_bytes());
        hello[6..8].copy_from_slice(&if self.encrypt { ENCRYPTED } else { 0 }.to_le_bytes());
        hello[8..12].copy_from_slice(&self.size.to_le_bytes());
        hello[12..16].copy_from_slice(&self.rank.to_le_bytes());
        hello[16..20].copy_from_slice(&peer.to_le_bytes());
        hello[20..28].copy_from_slice(&self.epoch.to_le_bytes());
        hello[28..].copy_from_slice(nonce);
        hello
    }

    /// Returns the secret under which the connection is encrypted, if it is.
    pub(super) fn secret(&self, hello: &[u8; HELLO], challenge: &[u8], is_dialler: bool) -> Option<Secret> {
        self.encrypt.then(|| Secret::derive(&self.key.0, hello, challenge, is_dialler))
    }

    pub(super) fn prove(&self, label: &[u8], hello: &[u8; HELLO], challenge: &[u8]) -> hmac::Tag {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key.0);
        hmac::sign(&key, &[label, hello, challenge].concat())
    }

    pub(super) fn proves(&self, label: &[u8], hello: &[u8; HELLO], challenge: &[u8], proof: &[u8]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key.0);
        hmac::verify(&key, &[label, hello, challenge].concat(), proof).is_ok()
    }
}

/// Returns the time that something may take until then: at least one attempt, however late it is.
pub(super) fn handshake_timeout(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).clamp(MIN_HANDSHAKE_TIMEOUT, HANDSHAKE_TIMEOUT)
}

/// Returns true if a hello is one of data connections, and of another version than this program's.
pub(super) fn is_of_other_version(hello: &[u8; HELLO]) -> bool {
    hello[..4] == *MAGIC && hello[4..6] != VERSION.to_le_bytes()
}

const MAGIC: &[u8; 4] = b"DCCL";

pub(super) const ONE_ENCRYPTS: &str = "one of the two encrypts its connections, and the other does not";

/// Error text for both sides. It names no numbers, because a dialler hears none of the acceptor.
pub(super) const OTHER_VERSION_TEXT: &str =
    "the two speak different versions of the protocol of data connections; update the program of the older one";

const BY_DIALLER: &[u8] = b"disco data 1: dialler";
const BY_ACCEPTOR: &[u8] = b"disco data 1: acceptor";
#[cfg(feature = "mpi")]
pub(super) const BY_MESSAGES: &[u8] = b"disco data 1: by messages";

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::Options;
    use super::*;

    const KEY: SessionKey = SessionKey([7; 32]);

    fn group(rank: u32) -> Group<'static> {
        Group { rank, size: 3, epoch: 5, key: &KEY, encrypt: true }
    }

    fn stream(socket: UnixStream) -> Stream<'static> {
        Stream::new(Connection::Unix(socket), HANDSHAKE_TIMEOUT, &|| false).unwrap()
    }

    #[test]
    fn a_hello_and_its_proofs_keep_their_bytes() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let hello = group(2).hello(1, &[9; NONCE]);
        assert_eq!(hex(&hello[..28]), "4443434c010001000300000002000000010000000500000000000000");
        assert_eq!(hello[28..], [9; NONCE]);
        let proofs = [BY_DIALLER, BY_ACCEPTOR].map(|label| hex(group(2).prove(label, &hello, &[8; NONCE]).as_ref()));
        assert_eq!(proofs, GOLDEN_PROOFS);
    }

    /// HMACs of the hello and the challenge above, under the key above, as Python's `hmac` makes
    /// them.
    const GOLDEN_PROOFS: [&str; 2] = [
        "c07e2a89e3421d215ab02f39971aa48527b460dba596a744962eb006cdebda95",
        "de736835864fa19c055926bbbbb2401da32e6c580a4d163a98c352ed638aafa7",
    ];

    /// Both sides say so, and the acceptor reads nothing behind the hello.
    #[test]
    fn a_rank_of_another_version_is_refused_in_words() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let accepting = std::thread::spawn(move || {
            let error = group(1).welcome(stream(ours)).err();
            error.unwrap().message().to_owned()
        });
        let mut theirs = stream(theirs);
        let mut hello = group(2).hello(1, &[9; NONCE]);
        hello[4] += 1;
        theirs.write_all(&hello).unwrap();
        let mut answer = [0; 1 + NONCE];
        theirs.read_exact(&mut answer).unwrap();
        assert_eq!(answer[0], OTHER_VERSION);
        assert_eq!(accepting.join().unwrap(), OTHER_VERSION_TEXT);
        // The same from the other side.
        let (ours, theirs) = UnixStream::pair().unwrap();
        let accepting = std::thread::spawn(move || {
            let mut stream = stream(theirs);
            stream.read_exact(&mut [0; HELLO]).unwrap();
            stream.write_all(&[OTHER_VERSION; 1 + NONCE]).unwrap();
        });
        let options = Options::default();
        let until = JoinDeadline::of(&options);
        let Err(Failure::Final(error)) = group(2).introduce(1, Connection::Unix(ours), until) else { panic!() };
        assert_eq!(error.message(), format!("rank 2 is not accepted by rank 1: {OTHER_VERSION_TEXT}"));
        accepting.join().unwrap();
    }
}
