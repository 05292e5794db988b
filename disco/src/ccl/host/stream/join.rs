//! Joining of ranks: addresses, the session's key, and the handshake of a data connection.
//!
//! The higher rank dials the lower one. All integers are little-endian.
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
//! 2 (another group) or 4 (not encrypted alike); the second is 0 (welcome) or 3 (not proven). Both
//! HMACs are under the session's key.
//!
//! A connection thus proves the session (by its key), the epoch, both ranks and its encryption, in
//! both directions; leftovers of another epoch cannot be taken for this one's. If it is encrypted,
//! all that follows is as [`super::secure`] says; if not, it is neither encrypted nor protected.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ring::hmac;
use rpc_core::{ErrorKind, RpcError};

use super::address::{Address, SessionKey, random};
#[cfg(feature = "mpi")]
use super::connection::boxed;
use super::connection::{Connection, Stream};
use super::link::Link;
use super::secure::Secret;
#[cfg(feature = "mpi")]
use super::socket::Socket;
use super::{Options, StreamCcl};
use crate::ccl::{Ccl, Rank};

const HELLO: usize = 60;
const NONCE: usize = 32;
/// A hello with a proof behind it.
#[cfg(feature = "mpi")]
const WORDS: usize = HELLO + 32;
const VERSION: u16 = 1;
/// Time that a handshake may take from the connection on, however little of it comes at a time.
const PATIENCE: Duration = Duration::from_secs(5);
/// Shortest time for a handshake, at the end of the time for all of them.
const LEAST_PATIENCE: Duration = Duration::from_millis(100);
/// Time that an attempt to dial may take where there may be a detour.
const PATIENCE_BEFORE_DETOUR: Duration = Duration::from_secs(2);
/// Ranks that are dialled at a time, so that some that do not answer delay no other.
const MAX_DIALLED: usize = 16;
/// Between two attempts to reach a rank that is not there yet.
const PAUSE: Duration = Duration::from_millis(20);
/// Time between two looks for a hello that is not announced.
#[cfg(feature = "mpi")]
const LOOK: Duration = Duration::from_micros(200);
/// Number of times that a rank looks for messages before it sleeps.
#[cfg(feature = "mpi")]
const LOOKS_FOR_MESSAGES: u32 = 1000;
/// Handshakes at a time. More connections wait in the listener's queue.
const MAX_HANDSHAKES: usize = 64;

const GO_ON: u8 = 0;
const OTHER_EPOCH: u8 = 1;
const OTHER_GROUP: u8 = 2;
const NOT_PROVEN: u8 = 3;
const OTHER_PROTECTION: u8 = 4;

/// Flag of a hello whose sender encrypts all that follows.
const ENCRYPTED: u16 = 1;

/// Connects to the listener of a rank that cannot be dialled, in some other way, until then; or
/// says why not.
pub(crate) type Detour<'a> = dyn Fn(Rank, Instant) -> Result<UnixStream, RpcError> + Sync + 'a;

/// Listener of one rank, before the group is made and each time that it is made anew.
#[derive(Debug)]
pub struct Listener {
    socket: Bound,
    address: Address,
}

#[derive(Debug)]
enum Bound {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Listens at `address`. Port 0 becomes a free one; a Unix socket's path must not exist, and is
    /// removed when this is dropped.
    ///
    /// # Errors
    ///
    /// Those of the system.
    pub fn bind(address: &Address) -> Result<Self, RpcError> {
        let named = |error: io::Error| RpcError::from(error).context(format!("cannot listen at {address}"));
        let (socket, address) = match address {
            Address::Tcp(wanted) => {
                let socket = TcpListener::bind(wanted).map_err(named)?;
                socket.set_nonblocking(true)?;
                let address = Address::Tcp(socket.local_addr()?);
                (Bound::Tcp(socket), address)
            }
            Address::Unix(path) => {
                let socket = UnixListener::bind(path).map_err(named)?;
                socket.set_nonblocking(true)?;
                (Bound::Unix(socket), address.clone())
            }
        };
        Ok(Self { socket, address })
    }

    /// Returns the address of the listener.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Makes the group: connects with every other rank, and waits until all have. `addresses` are
    /// those of all ranks, in their order; this rank's own is not used. All ranks give the same
    /// key, [`Options::epoch`] and number of addresses; connections that do not are refused.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::DeadlineExceeded`]: some ranks were not there within
    ///   [`Options::join_timeout`]; the message names them.
    /// * [`ErrorKind::Unauthenticated`]: a rank has another key, or only one of two encrypts
    ///   ([`Options::encrypt`]).
    pub fn join(
        &self,
        rank: Rank,
        addresses: &[Address],
        key: &SessionKey,
        options: &Options,
    ) -> Result<Box<dyn Ccl>, RpcError> {
        let addresses: Vec<_> = addresses.iter().cloned().map(Some).collect();
        self.join_by(rank, &addresses, key, options, None)
    }

    /// As [`join`](Self::join), where some addresses are not known or of no use: what cannot be
    /// dialled is reached by the detour, if there is one.
    pub(crate) fn join_by(
        &self,
        rank: Rank,
        addresses: &[Option<Address>],
        key: &SessionKey,
        options: &Options,
        detour: Option<&Detour<'_>>,
    ) -> Result<Box<dyn Ccl>, RpcError> {
        if rank.index() >= addresses.len() {
            return Err(RpcError::invalid_argument(format!("no rank {rank} in a group of {}", addresses.len())));
        }
        let (size, encrypt) = (addresses.len() as u32, options.encrypt);
        let group = Group { rank: rank.0, size, epoch: options.epoch, key, encrypt };
        let until = Instant::now() + options.join_timeout;
        let mut links: Vec<Option<Link>> = addresses.iter().map(|_| None).collect();
        let (below, above) = links.split_at_mut(rank.index());
        std::thread::scope(|scope| {
            // Others dial us while we dial others, so that no workers wait in a circle.
            let accepting = scope.spawn(|| self.accept_all(&group, &mut above[1..], until));
            let dialled = group.dial_all(below, addresses, detour, until);
            let accepted = accepting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all_of(dialled.into_iter().chain(accepted.err()))
        })?;
        Ok(Box::new(StreamCcl::new(rank.index(), links, options.clone())?))
    }

    /// Takes one connection from each rank above this one. Each handshake has a thread, so that a
    /// silent stranger delays no rank.
    fn accept_all(&self, group: &Group<'_>, links: &mut [Option<Link>], until: Instant) -> Result<(), RpcError> {
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            let mut handshakes = Handshakes::default();
            while let Some(missing) = links.iter().position(Option::is_none) {
                while let Ok((number, welcomed)) = receiver.try_recv() {
                    handshakes.0.remove(&number);
                    let Some((peer, link)) = welcomed else { continue };
                    let place: Option<&mut Option<Link>> = links.get_mut((peer - group.rank - 1) as usize);
                    if let Some(place) = place.filter(|place| place.is_none()) {
                        *place = Some(link);
                    }
                }
                let accepted = if handshakes.0.len() < MAX_HANDSHAKES { self.accept()? } else { None };
                if let Some(stream) = accepted {
                    let number = handshakes.add(&stream)?;
                    let sender = sender.clone();
                    scope.spawn(move || {
                        let welcomed = group.welcome(stream);
                        if let Err(error) = &welcomed {
                            tracing::warn!(rank = group.rank, %error, "a data connection was refused");
                        }
                        // The receiver is gone when all others have come.
                        _ = sender.send((number, welcomed.ok()));
                    });
                    continue;
                }
                if Instant::now() >= until {
                    let missing: Vec<String> = (missing..links.len())
                        .filter(|at| links[*at].is_none())
                        .map(|at| (group.rank as usize + 1 + at).to_string())
                        .collect();
                    let text = format!("rank {} did not connect to rank {}", missing.join(", "), group.rank);
                    return Err(RpcError::new(ErrorKind::DeadlineExceeded, text));
                }
                if links.iter().any(Option::is_none) {
                    let is_busy = !handshakes.0.is_empty();
                    self.await_connection(if is_busy { Duration::from_millis(1) } else { PAUSE });
                }
            }
            Ok(())
        })
    }

    fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match &self.socket {
            Bound::Tcp(socket) => socket.accept().map(|(stream, _)| Connection::Tcp(stream)),
            Bound::Unix(socket) => socket.accept().map(|(stream, _)| Connection::Unix(stream)),
        };
        match accepted.and_then(|connection| Stream::new(connection, PATIENCE)) {
            Ok(stream) => Ok(Some(stream)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn await_connection(&self, at_most: Duration) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let file = match &self.socket {
            Bound::Tcp(socket) => PollFd::new(socket, PollFlags::IN),
            Bound::Unix(socket) => PollFd::new(socket, PollFlags::IN),
        };
        let at_most = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
        _ = poll(&mut [file], Some(&at_most));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Unix(path) = &self.address {
            _ = std::fs::remove_file(path);
        }
    }
}

/// The connections whose handshakes go on, by number. Those that are left when this is dropped are
/// not needed any more, and end.
#[derive(Default)]
struct Handshakes(HashMap<u64, Connection>, u64);

impl Handshakes {
    fn add(&mut self, stream: &Stream) -> io::Result<u64> {
        self.1 += 1;
        self.0.insert(self.1, stream.connection.try_clone()?);
        Ok(self.1)
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        for connection in self.0.values() {
            // One that has ended by itself needs no more.
            _ = match connection {
                Connection::Tcp(stream) => stream.shutdown(Shutdown::Both),
                Connection::Unix(stream) => stream.shutdown(Shutdown::Both),
            };
        }
    }
}

/// Facts that both sides of a handshake have to agree on.
struct Group<'a> {
    rank: u32,
    size: u32,
    epoch: u64,
    key: &'a SessionKey,
    encrypt: bool,
}

/// One rank of a group whose ranks have ways to each other without dialling.
#[cfg(feature = "mpi")]
pub(in super::super) struct Member<'a> {
    pub(in super::super) rank: Rank,
    pub(in super::super) size: usize,
    pub(in super::super) key: &'a SessionKey,
    pub(in super::super) options: &'a Options,
}

/// A communicator over streams that are there already, one to each other rank, which `open` gives
/// by number. The two ends of each tell each other in a hello who they are, as a dialler does, with
/// a proof that they know the key. Blocks until all have.
///
/// # Errors
///
/// [`ErrorKind::DeadlineExceeded`]: not all have done so within [`Options::join_timeout`];
/// [`ErrorKind::Refused`]: one is of another group, or encrypts where this one does not.
#[cfg(feature = "mpi")]
pub(in super::super) fn by_messages<S: Socket + 'static>(
    member: &Member<'_>,
    open: impl Fn(usize) -> S,
) -> Result<Box<dyn Ccl>, RpcError> {
    let Member { rank, size, key, options } = member;
    let group = Group { rank: rank.0, size: Rank::of(*size).0, epoch: options.epoch, key, encrypt: options.encrypt };
    let until = Instant::now() + options.join_timeout;
    let mut meetings = Vec::new();
    for peer in (0..group.size).filter(|peer| *peer != group.rank) {
        let hello = group.hello(peer, &random()?);
        let mut words = [0; WORDS];
        words[..HELLO].copy_from_slice(&hello);
        words[HELLO..].copy_from_slice(group.prove(BY_MESSAGES, &hello, &[]).as_ref());
        meetings.push(Meeting { peer, stream: open(peer as usize), words, sent: 0, theirs: [0; WORDS], read: 0 });
    }
    loop {
        let mut missing = Vec::new();
        for meeting in &mut meetings {
            if !meeting.advance().map_err(|error| meeting.failed(&error))? {
                missing.push(meeting.peer);
            }
        }
        if missing.is_empty() {
            break;
        }
        if Instant::now() >= until {
            let text =
                format!("rank {rank} has waited for {:?} and not heard of ranks {missing:?}", options.join_timeout);
            return Err(RpcError::new(ErrorKind::DeadlineExceeded, text));
        }
        std::thread::sleep(LOOK);
    }
    let mut links: Vec<Option<Link>> = (0..*size).map(|_| None).collect();
    for meeting in meetings {
        let peer = meeting.peer as usize;
        links[peer] = Some(meeting.into_link(&group)?);
    }
    // They are looked at for longer than sockets, because nothing wakes a rank that sleeps.
    Ok(Box::new(StreamCcl::new(rank.index(), links, (*options).clone())?.looking(LOOKS_FOR_MESSAGES)))
}

/// Two ranks that introduce themselves to each other.
#[cfg(feature = "mpi")]
struct Meeting<S> {
    peer: u32,
    stream: S,
    /// A hello, and the proof.
    words: [u8; WORDS],
    sent: usize,
    theirs: [u8; WORDS],
    read: usize,
}

#[cfg(feature = "mpi")]
impl<S: Socket + 'static> Meeting<S> {
    /// Gets on as far as that is possible now; says whether both hellos are through.
    fn advance(&mut self) -> io::Result<bool> {
        while self.sent < WORDS {
            match self.stream.write(&self.words[self.sent..]) {
                Ok(written) => self.sent += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        while self.read < WORDS {
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
        Ok(is_out && self.sent == WORDS && self.read == WORDS)
    }

    fn failed(&self, error: &io::Error) -> RpcError {
        RpcError::new(ErrorKind::PeerLost, format!("no connection with rank {}: {error}", self.peer))
    }

    fn into_link(self, group: &Group<'_>) -> Result<Link, RpcError> {
        let refused =
            |kind, why: &str| Err(RpcError::new(kind, format!("rank {} and rank {}: {why}", group.rank, self.peer)));
        let (Some(own), Some((theirs, proof))) =
            (self.words.first_chunk::<HELLO>(), self.theirs.split_first_chunk::<HELLO>())
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

/// Failure of an attempt to connect.
enum Failure {
    /// No peer is there. A later attempt may succeed.
    Unreachable(String),
    /// The rank may be there later.
    Transient(String),
    Final(RpcError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Transient(error.to_string())
    }
}

impl Group<'_> {
    /// Connects to all ranks below; returns the failures, by rank.
    fn dial_all(
        &self,
        links: &mut [Option<Link>],
        addresses: &[Option<Address>],
        detour: Option<&Detour<'_>>,
        until: Instant,
    ) -> Vec<RpcError> {
        let count = links.len();
        let mut errors: Vec<Option<RpcError>> = vec![None; count];
        let places = Mutex::new(links.iter_mut().zip(&mut errors).zip(addresses).enumerate());
        let silent = Mutex::new(HashSet::new());
        let dial_some = || {
            loop {
                let next = places.lock().next();
                let Some((peer, ((link, error), address))) = next else { return };
                match self.dial(peer as u32, address.as_ref(), detour.map(|way| (way, &silent)), until) {
                    Ok(dialled) => *link = Some(dialled),
                    Err(failure) => *error = Some(failure),
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..count.min(MAX_DIALLED) {
                // Without more threads they are dialled by fewer.
                if std::thread::Builder::new().spawn_scoped(scope, dial_some).is_err() {
                    break;
                }
            }
            dial_some();
        });
        errors.into_iter().flatten().collect()
    }

    /// Connects to `peer`, however often that takes. A detour comes with the hosts that have not
    /// answered: others there are not dialled.
    fn dial(
        &self,
        peer: u32,
        address: Option<&Address>,
        detour: Option<(&Detour<'_>, &Mutex<HashSet<IpAddr>>)>,
        until: Instant,
    ) -> Result<Link, RpcError> {
        let mut detour = detour;
        let mut no_detour = String::new();
        loop {
            let mut attempt = match address {
                Some(address) => self.try_dial(peer, address, detour.map(|(_, silent)| silent), until),
                None => Err(Failure::Unreachable("its address is not known here".to_owned())),
            };
            if let (Err(Failure::Unreachable(text)), Some((way, _))) = (&attempt, detour) {
                attempt = match way(Rank(peer), until) {
                    Ok(stream) => self.introduce(peer, Connection::Unix(stream), until),
                    Err(error) => {
                        detour = None;
                        no_detour = format!(", nor on a detour: {}", error.message());
                        Err(Failure::Unreachable(text.clone()))
                    }
                };
            }
            let (text, is_hopeless) = match attempt {
                Ok(link) => return Ok(link),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Unreachable(text)) => (text, address.is_none()),
                Err(Failure::Transient(text)) => (text, false),
            };
            if is_hopeless || Instant::now() >= until {
                let at = address.map_or_else(String::new, |address| format!(" at {address}"));
                let text = format!("rank {} cannot reach rank {peer}{at}: {text}{no_detour}", self.rank);
                return Err(RpcError::new(ErrorKind::DeadlineExceeded, text));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn try_dial(
        &self,
        peer: u32,
        address: &Address,
        silent: Option<&Mutex<HashSet<IpAddr>>>,
        until: Instant,
    ) -> Result<Link, Failure> {
        let connected = match (address, silent) {
            (Address::Tcp(address), None) => TcpStream::connect_timeout(address, patience(until)),
            (Address::Tcp(address), Some(silent)) => {
                let mut known = silent.lock();
                if known.contains(&address.ip()) {
                    return Err(Failure::Unreachable("its host did not answer".to_owned()));
                }
                drop(known);
                let connected = TcpStream::connect_timeout(address, patience(until).min(PATIENCE_BEFORE_DETOUR));
                if connected.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
                    known = silent.lock();
                    known.insert(address.ip());
                }
                connected
            }
            (Address::Unix(path), _) => {
                let connected = UnixStream::connect(path).map_err(|error| Failure::Unreachable(error.to_string()))?;
                return self.introduce(peer, Connection::Unix(connected), until);
            }
        };
        let connected = connected.map_err(|error| Failure::Unreachable(error.to_string()))?;
        self.introduce(peer, Connection::Tcp(connected), until)
    }

    /// Performs the dialling side's part of the handshake.
    fn introduce(&self, peer: u32, connection: Connection, until: Instant) -> Result<Link, Failure> {
        let mut stream = Stream::new(connection, patience(until))?;
        let hello = self.hello(peer, &random().map_err(Failure::Final)?);
        stream.write_all(&hello)?;
        let mut answer = [0; 1 + NONCE];
        stream.read_exact(&mut answer)?;
        match answer[0] {
            GO_ON => {}
            OTHER_EPOCH => return Err(Failure::Transient("it is in another epoch".to_owned())),
            OTHER_PROTECTION => return Err(Failure::Final(self.refused(peer, ONE_ENCRYPTS))),
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
    fn welcome(&self, mut stream: Stream) -> Result<(u32, Link), RpcError> {
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

    /// This rank's hello to `peer`.
    fn hello(&self, peer: u32, nonce: &[u8; NONCE]) -> [u8; HELLO] {
        let mut hello = [0; HELLO];
        hello[..4].copy_from_slice(b"DCCL");
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
    fn secret(&self, hello: &[u8; HELLO], challenge: &[u8], is_dialler: bool) -> Option<Secret> {
        self.encrypt.then(|| Secret::derive(&self.key.0, hello, challenge, is_dialler))
    }

    fn prove(&self, label: &[u8], hello: &[u8; HELLO], challenge: &[u8]) -> hmac::Tag {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key.0);
        hmac::sign(&key, &[label, hello, challenge].concat())
    }

    fn proves(&self, label: &[u8], hello: &[u8; HELLO], challenge: &[u8], proof: &[u8]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.key.0);
        hmac::verify(&key, &[label, hello, challenge].concat(), proof).is_ok()
    }
}

/// Returns the time that something may take until then: at least one attempt, however late it is.
fn patience(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).clamp(LEAST_PATIENCE, PATIENCE)
}

/// The most errors of one join that are told in full.
const MAX_TOLD: usize = 16;

/// Returns one error that says all of these, if there are any, and is of the kind of one that no
/// waiting would help.
fn all_of(errors: impl Iterator<Item = RpcError>) -> Result<(), RpcError> {
    let errors: Vec<RpcError> = errors.collect();
    let is_final = |error: &&RpcError| error.kind() != ErrorKind::DeadlineExceeded;
    let Some(worst) = errors.iter().find(is_final).or(errors.first()) else { return Ok(()) };
    let told: Vec<&str> = errors.iter().take(MAX_TOLD).map(RpcError::message).collect();
    let more = match errors.len() - told.len() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Err(RpcError::new(worst.kind(), format!("{}{more}", told.join("; "))))
}

const ONE_ENCRYPTS: &str = "one of the two encrypts its connections, and the other does not";

const BY_DIALLER: &[u8] = b"disco data 1: dialler";
const BY_ACCEPTOR: &[u8] = b"disco data 1: acceptor";
#[cfg(feature = "mpi")]
const BY_MESSAGES: &[u8] = b"disco data 1: by messages";
