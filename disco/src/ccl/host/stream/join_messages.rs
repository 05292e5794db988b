//! Joining of ranks over streams that are there already, such as messages of MPI: both ends of a
//! stream introduce themselves at the same time.

use std::io;
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};

use super::super::join_deadline::JoinDeadline;
use super::address::{SessionKey, random};
use super::connection::boxed;
use super::framed_connection::Link;
use super::group_state::WakeSockets;
use super::handshake::{BY_MESSAGES, Group, HELLO, NONCE, ONE_ENCRYPTS, OTHER_VERSION_TEXT, is_of_other_version};
use super::socket::Socket;
use super::{Options, StreamCcl};
use crate::ccl::{Ccl, Rank};

/// Time between two looks for a hello that is not announced.
const LOOK: Duration = Duration::from_micros(200);
/// Number of times that a rank looks for messages before it sleeps.
const LOOKS_FOR_MESSAGES: u32 = 1000;
/// Size of a hello with a proof behind it, in bytes.
const HELLO_AND_PROOF: usize = HELLO + 32;

/// One rank of a group whose ranks have ways to each other without dialling.
pub(in super::super) struct Member<'a> {
    pub(in super::super) rank: Rank,
    pub(in super::super) size: usize,
    pub(in super::super) key: &'a SessionKey,
    pub(in super::super) options: &'a Options,
}

/// Makes a communicator over streams that exist already, one to each other rank, which `open` gives
/// by number. The two ends of each introduce themselves by a hello, as a dialler does, with a proof
/// that they know the key. Blocks until all have.
///
/// # Errors
///
/// [`ErrorKind::DeadlineExceeded`]: not all have done so within [`Options::join_timeout`];
/// [`ErrorKind::Refused`]: one is of another group, or encrypts where this one does not.
pub(in super::super) fn by_messages<S: Socket + 'static>(
    member: &Member<'_>,
    open: impl Fn(usize) -> S,
) -> Result<Box<dyn Ccl>, RpcError> {
    let Member { rank, size, key, options } = member;
    let group = Group { rank: rank.0, size: Rank::of(*size).0, epoch: options.epoch, key, encrypt: options.encrypt };
    let until = JoinDeadline::of(options);
    let wake_sockets = WakeSockets::open(&options.open_files)?;
    let mut introductions = Vec::new();
    for peer in (0..group.size).filter(|peer| *peer != group.rank) {
        let hello = group.hello(peer, &random()?);
        let mut ours = [0; HELLO_AND_PROOF];
        ours[..HELLO].copy_from_slice(&hello);
        ours[HELLO..].copy_from_slice(group.prove(BY_MESSAGES, &hello, &[]).as_ref());
        introductions.push(Introduction {
            peer,
            stream: open(peer as usize),
            ours,
            sent: 0,
            theirs: [0; HELLO_AND_PROOF],
            read: 0,
        });
    }
    loop {
        let mut missing = Vec::new();
        for introduction in &mut introductions {
            if !introduction.advance().map_err(|error| introduction.failed(&error))? {
                missing.push(introduction.peer);
            }
        }
        if missing.is_empty() {
            break;
        }
        if until.is_over() {
            let text =
                format!("rank {rank} has waited for {:?} and not heard of ranks {missing:?}", options.join_timeout);
            return Err(until.error(text));
        }
        std::thread::sleep(LOOK);
    }
    let mut links: Vec<Option<Link>> = (0..*size).map(|_| None).collect();
    for introduction in introductions {
        let peer = introduction.peer as usize;
        links[peer] = Some(introduction.into_link(&group)?);
    }
    // They are looked at for longer than sockets, because nothing wakes a rank that sleeps.
    let ccl = StreamCcl::new(rank.index(), links, (*options).clone(), wake_sockets);
    Ok(Box::new(ccl.looking(LOOKS_FOR_MESSAGES)))
}

/// Introduction of this rank and another one to each other.
struct Introduction<S> {
    peer: u32,
    stream: S,
    /// A hello, and the proof.
    ours: [u8; HELLO_AND_PROOF],
    sent: usize,
    theirs: [u8; HELLO_AND_PROOF],
    read: usize,
}

impl<S: Socket + 'static> Introduction<S> {
    /// Reads and writes as far as that is possible now. Returns true once both hellos are through.
    fn advance(&mut self) -> io::Result<bool> {
        while self.sent < HELLO_AND_PROOF {
            match self.stream.write(&self.ours[self.sent..]) {
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        while self.read < HELLO_AND_PROOF {
            match self.stream.read(&mut self.theirs[self.read..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.read += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let is_out = match self.stream.flush() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            flushed => flushed.map(|()| true)?,
        };
        Ok(is_out && self.sent == HELLO_AND_PROOF && self.read == HELLO_AND_PROOF)
    }

    fn failed(&self, error: &io::Error) -> RpcError {
        RpcError::new(ErrorKind::PeerLost, format!("no connection with rank {}: {error}", self.peer))
    }

    fn into_link(self, group: &Group<'_>) -> Result<Link, RpcError> {
        let refused =
            |kind, why: &str| Err(RpcError::new(kind, format!("rank {} and rank {}: {why}", group.rank, self.peer)));
        let (Some(own), Some((theirs, proof))) =
            (self.ours.first_chunk::<HELLO>(), self.theirs.split_first_chunk::<HELLO>())
        else {
            return refused(ErrorKind::Internal, "a hello that is too short");
        };
        let nonce = |hello: &[u8; HELLO]| {
            let mut nonce = [0; NONCE];
            nonce.copy_from_slice(&hello[HELLO - NONCE..]);
            nonce
        };
        let of_peer = Group { rank: self.peer, ..*group };
        let expected = of_peer.hello(group.rank, &nonce(theirs));
        if *theirs != expected {
            if is_of_other_version(theirs) {
                return refused(ErrorKind::Refused, OTHER_VERSION_TEXT);
            }
            let only_protection = theirs[..6] == expected[..6] && theirs[8..] == expected[8..];
            return refused(ErrorKind::Refused, if only_protection { ONE_ENCRYPTS } else { "it is in another group" });
        }
        if !group.proves(BY_MESSAGES, theirs, &[], proof) {
            return refused(ErrorKind::Unauthenticated, "one of the two has another key");
        }
        // As where the higher rank dials.
        let is_dialler = group.rank > self.peer;
        let (dialler, acceptor) = if is_dialler { (own, theirs) } else { (theirs, own) };
        let secret = group.secret(dialler, &nonce(acceptor), is_dialler);
        Ok(Link::new(boxed(self.stream, secret)))
    }
}
