//! Joining of ranks over sockets: each dials those below it and accepts those above it. The
//! handshake is in [`handshake`](super::handshake).

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};

use super::super::join_deadline::JoinDeadline;
use super::address::{Address, SessionKey};
use super::connection::{Connection, Stream, connect};
use super::framed_connection::Link;
use super::group_state::WakeSockets;
use super::handshake::{Failure, Group, HANDSHAKE_TIMEOUT, MIN_HANDSHAKE_TIMEOUT, handshake_timeout};
use super::{Options, StreamCcl};
use crate::ccl::{Ccl, Rank};
use crate::number_list::NumberList;

/// Target of log lines about addresses that a controller has named. They are for the operator of
/// this node: a controller could read there what answers at them.
pub const OPERATOR_LOG: &str = "disco::operator";
/// Ranks that are dialled at a time, so that some that do not answer delay no other.
const MAX_DIALLED: usize = 16;
/// Between two attempts to reach a rank that is not there yet.
const PAUSE: Duration = Duration::from_millis(20);
/// Between two looks for the outcome of handshakes.
const PAUSE_IN_HANDSHAKE: Duration = Duration::from_millis(1);
/// Handshakes at a time. More connections wait in the listener's queue.
const MAX_HANDSHAKES: usize = 64;
/// Handshakes beyond those of the ranks that are missing, so that some strangers delay no rank.
const EXTRA_HANDSHAKES: usize = 8;
/// Time after which a handshake gives way to a connection that waits to be accepted. A rank that
/// has to give way dials again.
const YIELD_AFTER: Duration = Duration::from_millis(500);
/// Time for which a failed attempt to dial an address that a peer has named is drawn out beyond the
/// end of the last attempt: more than the clocks of the system's waits differ.
const PADDING: Duration = Duration::from_millis(50);

/// Function that connects to the listener of a rank that cannot be dialled, by other means such as
/// a relay, until the given time. Returns the error because of which it cannot.
pub(crate) type FallbackDial<'a> = dyn Fn(Rank, Instant) -> Result<UnixStream, RpcError> + Sync + 'a;

/// Hosts at whose addresses no rank has proven itself in time. Further ranks there, also those of a
/// group that is made next, are reached by the [`FallbackDial`] alone, at first.
#[derive(Default)]
pub(crate) struct UnprovenHosts(Mutex<HashSet<IpAddr>>);

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

    /// As [`join`](Self::join), where some addresses are not known or of no use: with a fallback,
    /// ranks that cannot be dialled are reached by that. The addresses may then come from a peer
    /// that may not learn what is there, unless it proves the key: all else is one error, after the
    /// same time.
    pub(crate) fn join_by(
        &self,
        rank: Rank,
        addresses: &[Option<Address>],
        key: &SessionKey,
        options: &Options,
        fallback: Option<(&FallbackDial<'_>, &UnprovenHosts)>,
    ) -> Result<Box<dyn Ccl>, RpcError> {
        if rank.index() >= addresses.len() {
            return Err(RpcError::invalid_argument(format!("no rank {rank} in a group of {}", addresses.len())));
        }
        let (size, encrypt) = (addresses.len() as u32, options.encrypt);
        let group = Group { rank: rank.0, size, epoch: options.epoch, key, encrypt };
        let until = JoinDeadline::of(options);
        // Before the first is made: a connection that is made leaves no room for an error.
        let purpose = format_args!("the connections of rank {rank} with {} others", size - 1);
        let mut charges = options.open_files.reserve_each(addresses.len() - 1, purpose)?;
        let wake_sockets = WakeSockets::open(&options.open_files)?;
        let accepts = rank.index() + 1 < addresses.len();
        let extra = if accepts { EXTRA_HANDSHAKES } else { 0 };
        let extra = options.open_files.reserve(extra, "handshakes with strangers")?;
        let mut links: Vec<Option<Link>> = addresses.iter().map(|_| None).collect();
        let (below, above) = links.split_at_mut(rank.index());
        std::thread::scope(|scope| {
            // Others dial us while we dial others, so that no workers wait in a circle.
            let accept_all = || self.accept_all(&group, &mut above[1..], until);
            let accepting = std::thread::Builder::new()
                .spawn_scoped(scope, accept_all)
                .map_err(|error| RpcError::from(error).context("there is no thread for accepting data connections"))?;
            let dialled = group.dial_all(below, addresses, fallback, (until, options.direct_timeout));
            let accepted = accepting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all_of(dialled.into_iter().chain(accepted.err()))
        })?;
        drop(extra);
        links.iter_mut().flatten().for_each(|link| link.set_charge(charges.pop()));
        Ok(Box::new(StreamCcl::new(rank.index(), links, options.clone(), wake_sockets)))
    }

    /// Takes one connection from each rank above this one. Each handshake has a thread, so that a
    /// silent stranger delays no rank. The caller has charged one connection for each of these
    /// ranks and [`EXTRA_HANDSHAKES`], and no more are open at a time: strangers take none of
    /// the descriptors that the session has for other purposes.
    fn accept_all(
        &self,
        group: &Group<'_>,
        links: &mut [Option<Link>],
        until: JoinDeadline<'_>,
    ) -> Result<(), RpcError> {
        let have_come = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Handshakes that are left at the end are not needed any more.
            let _end = SetOnDrop(have_come);
            let (sender, receiver) = mpsc::channel();
            // By number, the oldest first.
            let mut handshakes: BTreeMap<u64, Handshake> = BTreeMap::new();
            let mut last_number = 0;
            loop {
                while let Ok((number, welcomed)) = receiver.try_recv() {
                    handshakes.remove(&number);
                    let Some((peer, link)) = welcomed else { continue };
                    let slot: Option<&mut Option<Link>> = links.get_mut((peer - group.rank - 1) as usize);
                    if let Some(slot) = slot.filter(|slot| slot.is_none()) {
                        *slot = Some(link);
                    }
                }
                let missing: Vec<usize> = (0..links.len()).filter(|at| links[*at].is_none()).collect();
                if missing.is_empty() {
                    return Ok(());
                }
                // Before the next connection, so that strangers who keep connecting delay nothing.
                if until.is_over() {
                    let missing = NumberList::of(missing.iter().map(|at| group.rank as usize + 1 + at));
                    let text = format!("rank {missing} did not connect to rank {}", group.rank);
                    return Err(until.error(text));
                }
                if handshakes.len() >= MAX_HANDSHAKES.min(missing.len() + EXTRA_HANDSHAKES) {
                    if let Some((_, oldest)) = handshakes.first_key_value()
                        && oldest.began.elapsed() >= YIELD_AFTER
                        && self.await_connection(Duration::ZERO)
                    {
                        oldest.gives_way.store(true, Ordering::Relaxed);
                    }
                    // The listener may be readable meanwhile.
                    until.sleep(PAUSE_IN_HANDSHAKE);
                    continue;
                }
                let Some(connection) = self.accept()? else {
                    self.await_connection(if handshakes.is_empty() { PAUSE } else { PAUSE_IN_HANDSHAKE });
                    continue;
                };
                last_number += 1;
                let (sender, number, gives_way) = (sender.clone(), last_number, Arc::new(AtomicBool::new(false)));
                let handshake = Handshake { began: Instant::now(), gives_way: Arc::clone(&gives_way) };
                let perform_handshake = move || {
                    let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
                    let given_up = || is_set(&gives_way) || is_set(have_come) || until.has_ended();
                    let stream = Stream::new(connection, HANDSHAKE_TIMEOUT, &given_up);
                    let welcomed = stream.map_err(RpcError::from).and_then(|stream| group.welcome(stream));
                    if let Err(error) = &welcomed {
                        rpc_core::log_limited!(WARN, rank = group.rank, %error, "a data connection was refused");
                    }
                    // The receiver is gone when all others have come.
                    _ = sender.send((number, welcomed.ok()));
                };
                match std::thread::Builder::new().spawn_scoped(scope, perform_handshake) {
                    Ok(_) => _ = handshakes.insert(number, handshake),
                    Err(error) => {
                        // The connection has been dropped. A rank dials again.
                        rpc_core::log_limited!(WARN, rank = group.rank, %error, "no thread for a data connection");
                        until.sleep(PAUSE);
                    }
                }
            }
        })
    }

    fn accept(&self) -> io::Result<Option<Connection>> {
        let accepted = match &self.socket {
            Bound::Tcp(socket) => socket.accept().map(|(stream, _)| Connection::Tcp(stream)),
            Bound::Unix(socket) => socket.accept().map(|(stream, _)| Connection::Unix(stream)),
        };
        match accepted {
            Ok(connection) => Ok(Some(connection)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns true once a connection waits, or false after `at_most`, which is below a second.
    fn await_connection(&self, at_most: Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let file = match &self.socket {
            Bound::Tcp(socket) => PollFd::new(socket, PollFlags::IN),
            Bound::Unix(socket) => PollFd::new(socket, PollFlags::IN),
        };
        let at_most = Timespec { tv_sec: 0, tv_nsec: at_most.subsec_nanos().into() };
        poll(&mut [file], Some(&at_most)).is_ok_and(|ready| ready > 0)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Unix(path) = &self.address {
            _ = std::fs::remove_file(path);
        }
    }
}

/// Handshake with a connection that has been accepted.
struct Handshake {
    began: Instant,
    /// Flag that ends the handshake, for another one in its place.
    gives_way: Arc<AtomicBool>,
}

/// Guard that sets a flag when it is dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Group<'_> {
    /// Connects to all ranks below; returns the failures, by rank.
    fn dial_all(
        &self,
        links: &mut [Option<Link>],
        addresses: &[Option<Address>],
        fallback: Option<(&FallbackDial<'_>, &UnprovenHosts)>,
        (until, direct_timeout): (JoinDeadline<'_>, Duration),
    ) -> Vec<RpcError> {
        let count = links.len();
        let mut errors: Vec<Option<RpcError>> = vec![None; count];
        let ranks = Mutex::new(links.iter_mut().zip(&mut errors).zip(addresses).enumerate());
        let dial_some = || {
            loop {
                let next = ranks.lock().next();
                let Some((peer, ((link, error), address))) = next else { return };
                let (peer, address) = (peer as u32, address.as_ref());
                let dialled = match fallback {
                    Some(fallback) => {
                        let limits = (until, direct_timeout);
                        self.dial_without_disclosure(peer, address, fallback, limits)
                    }
                    None => self.dial(peer, address, until),
                };
                match dialled {
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

    /// Connects to `peer`, by as many attempts as it takes.
    fn dial(&self, peer: u32, address: Option<&Address>, until: JoinDeadline<'_>) -> Result<Link, RpcError> {
        let unknown = || RpcError::invalid_argument(format!("rank {peer} has no address"));
        let address = address.ok_or_else(unknown)?;
        loop {
            let attempt_end = Instant::now() + handshake_timeout(until.until);
            let text = match self.try_dial(peer, address, until.at(attempt_end)) {
                Ok(link) => return Ok(link),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient(text)) => text,
            };
            if until.is_over() {
                let text = format!("rank {} cannot reach rank {peer} at {address}: {text}", self.rank);
                return Err(until.error(text));
            }
            until.sleep(PAUSE);
        }
    }

    /// As [`dial`](Self::dial), for an address that a peer has named.
    ///
    /// The fallback begins after `direct_timeout`, also where the address refuses at once: the
    /// request for a relay goes to the controller, which would learn from an earlier one that
    /// nothing listens at the address that it has named. Nor can the fallback begin together with
    /// the dialling and be used as soon as that fails, since the controller carries its bytes and
    /// sees when they begin.
    fn dial_without_disclosure(
        &self,
        peer: u32,
        address: Option<&Address>,
        (fallback, UnprovenHosts(failed)): (&FallbackDial<'_>, &UnprovenHosts),
        (until, direct_timeout): (JoinDeadline<'_>, Duration),
    ) -> Result<Link, RpcError> {
        let host = match address {
            Some(Address::Tcp(address)) => Some(address.ip()),
            _ => None,
        };
        if let Some(address) = address
            && !host.is_some_and(|host| failed.lock().contains(&host))
        {
            let before_fallback = until.at(Instant::now() + direct_timeout.min(until.left() / 4));
            if let Some(link) = self.dial_until(peer, address, before_fallback) {
                return Ok(link);
            }
            failed.lock().extend(host);
        }
        // Half of what is left, so that there is time for dialling once more.
        let until_given_up = until.at(Instant::now() + until.left() / 2);
        let fallback_error = loop {
            // It leads to the rank's own listener, so that its errors tell nothing of an address.
            let (text, is_over) = match fallback(Rank(peer), until.until) {
                Ok(stream) => {
                    let attempt_end = Instant::now() + handshake_timeout(until.until);
                    match self.introduce(peer, Connection::Unix(stream), until.at(attempt_end)) {
                        Ok(link) => return Ok(link),
                        Err(Failure::Final(error)) => return Err(error),
                        Err(Failure::Transient(text)) => (text, until.is_over()),
                    }
                }
                // Other connections of the session may close meanwhile.
                Err(error) if error.kind() == ErrorKind::LimitExceeded => {
                    (error.message().to_owned(), until_given_up.is_over())
                }
                Err(error) => break error.message().to_owned(),
            };
            if is_over {
                break text;
            }
            until.sleep(PAUSE);
        };
        let Some(address) = address else {
            let text = format!(
                "rank {} cannot reach rank {peer}: its address is not known here, nor by other means: {fallback_error}",
                self.rank
            );
            return Err(until.error(text));
        };
        if let Some(link) = self.dial_until(peer, address, until) {
            return Ok(link);
        }
        let text = format!(
            "rank {} cannot reach rank {peer} at {address}: it has not proven there in time that it belongs to this \
             session, which the log of rank {} has more of, at level debug; nor by other means: {fallback_error}",
            self.rank, self.rank
        );
        Err(until.error(text))
    }

    /// Dials until `until`, whatever the address answers: only a peer that proves the session's key
    /// makes a difference, in the result or in the time that it takes. However short that time is,
    /// there is an attempt of [`MIN_HANDSHAKE_TIMEOUT`], or none if even that is over.
    fn dial_until(&self, peer: u32, address: &Address, until: JoinDeadline<'_>) -> Option<Link> {
        let dialling_end = until.until + MIN_HANDSHAKE_TIMEOUT;
        if until.at(dialling_end).is_over() {
            return None;
        }
        let text = loop {
            let attempt_end = attempt_end(Instant::now(), until.until);
            let (text, pause) = match self.try_dial(peer, address, until.at(attempt_end)) {
                Ok(link) => return Some(link),
                Err(Failure::Transient(text)) => (text, PAUSE),
                // Further attempts would fail in the same way.
                Err(Failure::Final(error)) => (error.message().to_owned(), until.left()),
            };
            if until.is_over() {
                break text;
            }
            until.sleep(pause);
        };
        tracing::debug!(
            target: OPERATOR_LOG,
            rank = self.rank, peer, %address, error = text, "a rank has not proven itself at its address"
        );
        // No attempt takes longer, and some take less.
        until.sleep(until.at(dialling_end + PADDING).left());
        None
    }

    /// Connects to an address and performs the handshake, both together until `until`.
    fn try_dial(&self, peer: u32, address: &Address, until: JoinDeadline<'_>) -> Result<Link, Failure> {
        // Each attempt may take seconds, and there may be many ranks.
        if until.has_ended() {
            return Err(Failure::Transient("the session has ended".to_owned()));
        }
        let connection = match address {
            Address::Tcp(address) => Connection::Tcp(connect(*address, until.until, &|| until.has_ended())?),
            Address::Unix(path) => Connection::Unix(UnixStream::connect(path)?),
        };
        self.introduce(peer, connection, until)
    }
}

/// Returns the end of an attempt that begins now, of those that dial until `until`.
fn attempt_end(now: Instant, until: Instant) -> Instant {
    let dialling_end = until + MIN_HANDSHAKE_TIMEOUT;
    (now + HANDSHAKE_TIMEOUT).min(until).max(now + MIN_HANDSHAKE_TIMEOUT).min(dialling_end)
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

#[cfg(test)]
mod tests;
