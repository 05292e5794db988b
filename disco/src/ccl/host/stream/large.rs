//! Large collectives over connections: the routes and the order of data, and its reduction as it
//! arrives.

use std::cmp::Reverse;
use std::ops::Range;

use super::super::algorithm::{bypasses, route, share};
use super::super::{check, kernel};
use super::framed_connection::{Incoming, Outgoing};
use super::{Links, Step, StreamCcl};
use crate::ccl::{CclError, Collective, Lent, Operation};

/// Contributions of one other rank that wait to be reduced, in bytes.
const RING: usize = 512 * 1024;
/// Fewer bytes than this are reduced only at the end. It divides [`RING`].
const QUANTUM: usize = 32 * 1024;

/// A reduction that goes on while contributions come in.
struct Reduction {
    collective: Collective,
    /// Start of this rank's own contribution, and of the result.
    input: *const u8,
    output: *mut u8,
    len: usize,
    done: usize,
    /// A ring for each other rank's contributions.
    rings: Vec<Vec<u8>>,
}

impl StreamCcl {
    pub(super) fn large(
        &self,
        links: &mut Links,
        collective: Collective,
        bytes: usize,
        lent: Lent,
    ) -> Result<(), CclError> {
        let (rank, size) = (self.rank, self.size);
        // Arriving data may go where bytes lie that have yet to be sent.
        let mut copy = Vec::new();
        let mut lent = lent;
        if collective.operation == Operation::AllToAll && lent.in_place {
            // SAFETY: the input of an exchange is `size` times as long as its count.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(lent.input, bytes * size) });
            lent.input = copy.as_ptr();
        }
        let mut reduction = None;
        // Rank whose data this rank passes on to the others, once it has come.
        let mut forwards = None;
        match collective.operation {
            Operation::Allreduce(_) => {
                let own = share(bytes, rank, size);
                let this = Reduction::new(collective, lent.input, lent.output, own.clone(), own.clone(), links, rank);
                for (peer, link) in links.each() {
                    let theirs = share(bytes, peer, size);
                    link.outgoing.extend(to_ring(lent.input, theirs.clone()));
                    link.outgoing.extend(stretch(lent.output, own.clone(), false));
                    link.incoming.extend(place(lent.output, theirs));
                }
                reduction = Some(this);
            }
            Operation::ReduceScatter(_) => {
                let own = rank * bytes..(rank + 1) * bytes;
                reduction = Some(Reduction::new(collective, lent.input, lent.output, own, 0..bytes, links, rank));
                for (peer, link) in links.each() {
                    link.outgoing.extend(to_ring(lent.input, peer * bytes..(peer + 1) * bytes));
                }
            }
            Operation::Broadcast { root } => {
                let root = root.index();
                // Every rank but the root passes on a share.
                let share = |peer: usize| share(bytes, peer - usize::from(peer > root), size - 1);
                if rank == root {
                    self.keep_own(collective, bytes, lent);
                    links.each().for_each(|(peer, link)| link.outgoing.extend(stretch(lent.input, share(peer), true)));
                } else {
                    forwards = Some(root);
                    for (peer, link) in links.each() {
                        if peer == root {
                            link.incoming.extend(place(lent.output, share(rank)));
                        } else {
                            link.outgoing.extend(stretch(lent.output, share(rank), false));
                            link.incoming.extend(place(lent.output, share(peer)));
                        }
                    }
                }
            }
            operation => {
                self.keep_own(collective, bytes, lent);
                for (peer, link) in links.each() {
                    if let Some((at, _)) = route(operation, bytes, rank, peer) {
                        link.outgoing.extend(stretch(lent.input, at..at + bytes, true));
                    }
                    if let Some((_, to)) = route(operation, bytes, peer, rank) {
                        link.incoming.extend(place(lent.output, to..to + bytes));
                    }
                }
            }
        }
        self.drive(links, |links| {
            if let Some(reduction) = &mut reduction
                && reduction.advance(links, rank)
            {
                return Ok(Step::Moved);
            }
            if let Some(root) = forwards
                && forward(links, root)
            {
                return Ok(Step::Moved);
            }
            Ok(state(links))
        })
    }

    /// Moves the bytes of one transfer between two ranks.
    pub(super) fn move_between_two(
        &self,
        links: &mut Links,
        peer: usize,
        is_send: bool,
        bytes: usize,
        lent: Lent,
    ) -> Result<(), CclError> {
        if let Some(link) = &mut links.peers[peer] {
            if is_send {
                link.outgoing.extend(stretch(lent.input, 0..bytes, true));
            } else {
                link.incoming.extend(place(lent.output, 0..bytes));
            }
        }
        self.drive(links, |links| Ok(state(links)))
    }

    /// Copies the data that this rank has for itself.
    fn keep_own(&self, collective: Collective, bytes: usize, lent: Lent) {
        if let Some((at, to)) = route(collective.operation, bytes, self.rank, self.rank)
            && lent.has_output
            && lent.input.wrapping_add(at) != lent.output.wrapping_add(to).cast_const()
        {
            // SAFETY: both are this rank's, and do not overlap.
            unsafe { kernel::copy(lent.input.add(at), lent.output.add(to), bytes, bypasses(bytes)) };
        }
    }
}

/// Bytes to send, if there are any.
fn stretch(start: *const u8, range: Range<usize>, is_ready: bool) -> Option<Outgoing> {
    let ready = if is_ready { range.len() } else { 0 };
    let start = start.wrapping_add(range.start);
    (!range.is_empty()).then_some(Outgoing { start, len: range.len(), ready, room: range.len(), sent: 0 })
}

/// Bytes to send to a rank that takes them in a ring.
fn to_ring(start: *const u8, range: Range<usize>) -> Option<Outgoing> {
    let room = range.len().min(RING);
    stretch(start, range, true).map(|outgoing| Outgoing { room, ..outgoing })
}

/// Returns the room for bytes to receive, if there are any.
fn place(start: *mut u8, range: Range<usize>) -> Option<Incoming> {
    let (start, len) = (start.wrapping_add(range.start), range.len());
    (len > 0).then_some(Incoming { start, len, room: len, received: 0, released: 0, granted: len, stays: false })
}

/// Returns the state of the call: all has moved, or the rank that is furthest behind.
fn state(links: &mut Links) -> Step {
    // Of several stretches the last is the result, which depends on what others have yet to send.
    let receives = links.each().filter_map(|(peer, link)| Some((link.incoming.len(), link.awaited()?.received, peer)));
    let behind = receives.min_by_key(|(stretches, received, _)| (Reverse(*stretches), *received));
    let behind = behind.map(|(.., peer)| peer);
    let sends = || {
        let mut links = links.peers.iter().enumerate().filter_map(|(peer, link)| Some((peer, link.as_ref()?)));
        links.find(|(_, link)| !link.outgoing.is_empty() || link.wants_output()).map(|(peer, _)| peer)
    };
    match behind.or_else(sends) {
        Some(peer) => Step::Waits { peer, has_entered: true },
        None => Step::Done,
    }
}

/// Forwards the data that has come from `root` to the others; returns true if there was any.
fn forward(links: &mut Links, root: usize) -> bool {
    let root_link = links.peers[root].as_ref();
    let come = root_link.map(|link| link.incoming.front().map_or(usize::MAX, |incoming| incoming.received));
    let mut moved = false;
    for (_, link) in links.each() {
        if let (Some(outgoing), Some(come)) = (link.outgoing.back_mut(), come) {
            let ready = come.min(outgoing.len);
            moved |= ready > outgoing.ready;
            outgoing.ready = ready;
        }
    }
    moved
}

impl Reduction {
    /// Reduces `own` of this rank's input with all contributions, to `result` of its output. Makes
    /// room for them on all links.
    fn new(
        collective: Collective,
        input: *const u8,
        output: *mut u8,
        own: Range<usize>,
        result: Range<usize>,
        links: &mut Links,
        rank: usize,
    ) -> Self {
        let len = own.len();
        let room = len.min(RING);
        let mut rings: Vec<Vec<u8>> =
            (0..links.peers.len()).map(|peer| if peer == rank { Vec::new() } else { vec![0; room] }).collect();
        for (peer, link) in links.each() {
            if len > 0 {
                let start = rings[peer].as_mut_ptr();
                let granted = room;
                link.incoming.push_back(Incoming { start, len, room, received: 0, released: 0, granted, stays: true });
            }
        }
        let (input, output) = (input.wrapping_add(own.start), output.wrapping_add(result.start));
        Self { collective, input, output, len, done: 0, rings }
    }

    /// Reduces the data that has come from all ranks; returns true if there was enough.
    fn advance(&mut self, links: &mut Links, rank: usize) -> bool {
        let Some(op) = self.collective.operation.reduce_op().filter(|_| self.done < self.len) else { return false };
        let come = links.each().filter_map(|(_, link)| Some(link.incoming.front()?.received)).min();
        let come = come.unwrap_or(self.len);
        if come < self.len && come - self.done < QUANTUM {
            return false;
        }
        // Whole quanta but at the end, so that a piece neither splits an element nor runs over the
        // end of a ring.
        let room = self.len.min(RING);
        let at = self.done % room;
        let piece = (come - self.done).min(room - at);
        let piece = if self.done + piece == self.len { piece } else { piece / QUANTUM * QUANTUM };
        let sources = self.rings.iter().enumerate().map(|(peer, ring)| {
            if peer == rank { self.input.wrapping_add(self.done) } else { ring.as_ptr().wrapping_add(at) }
        });
        let sources: Vec<*const u8> = sources.collect();
        let output = self.output.wrapping_add(self.done);
        let bypass = bypasses(self.len);
        // SAFETY: the bytes of all ranks have come and are not overwritten before they are
        // released; the output is this rank's. It may be its input: what is written lies where it
        // was read.
        unsafe {
            kernel::reduce(check::numeric(&self.collective), op, &sources, piece, &mut |offset, block| {
                kernel::copy(block.as_ptr(), output.add(offset), block.len(), bypass);
            });
        }
        self.done += piece;
        let is_for_all = matches!(self.collective.operation, Operation::Allreduce(_));
        for (_, link) in links.each() {
            link.release(self.done);
            if self.done == self.len {
                link.incoming.pop_front();
            }
            if let Some(result) = link.outgoing.back_mut().filter(|_| is_for_all) {
                result.ready = self.done;
            }
        }
        true
    }
}
