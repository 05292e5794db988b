//! Enqueueing of collectives, as calls of NCCL.

use std::ffi::{c_int, c_void};

use super::communicator::{Communicator, FOR_EVER};
use super::elements::{Elements, reduction};
use super::error::code;
use super::wait::Fault;
use crate::ccl::{Agreement, Collective, Lent, Operation, Rank};

/// A collective of one rank, ready to be enqueued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) collective: Collective,
    pub(super) elements: Elements,
    pub(super) lent: Lent,
    /// Memory of the stream's own: for a barrier, and for an exchange in place.
    pub(super) scratch: *mut c_void,
    pub(super) rank: Rank,
    pub(super) size: usize,
}

/// One end of a transfer, within a group of such calls.
#[derive(Clone, Copy)]
enum Transfer {
    Send(*const u8, Rank),
    Receive(*mut u8, Rank),
}

impl Work {
    /// Returns true if it exchanges in place: a part of the buffer may be overwritten at any time,
    /// so that incoming data goes elsewhere first.
    pub(super) fn needs_copy(&self) -> bool {
        self.collective.operation == Operation::AllToAll && self.lent.in_place
    }

    /// Returns true if others need this rank's data.
    fn has_input(&self) -> bool {
        match self.collective.operation {
            Operation::Broadcast { root } | Operation::Scatter { root } => root == self.rank,
            Operation::Barrier | Operation::Recv { .. } => false,
            _ => true,
        }
    }

    /// Returns the sends and receives of this rank, where NCCL has no call for the whole.
    fn transfers(&self) -> Vec<Transfer> {
        let bytes = self.elements.bytes();
        let input = |rank: Rank| self.lent.input.wrapping_add(rank.index() * bytes);
        let output = |rank: Rank| self.output().wrapping_add(rank.index() * bytes);
        let everyone = || (0..self.size).map(Rank::of);
        let own = self.rank;
        match self.collective.operation {
            Operation::Scatter { root } => {
                // In place, the root's share is where it belongs.
                let stays = own == root && input(own) == self.lent.output.cast_const();
                let sends = everyone().filter(|rank| own == root && !(stays && *rank == own));
                let receives = (!stays).then_some(Transfer::Receive(self.lent.output, root));
                sends.map(|to| Transfer::Send(input(to), to)).chain(receives).collect()
            }
            Operation::Gather { root } => {
                let stays = own == root && output(own).cast_const() == self.lent.input;
                let receives = everyone().filter(|rank| own == root && !(stays && *rank == own));
                let sends = (!stays).then_some(Transfer::Send(self.lent.input, root));
                receives.map(|from| Transfer::Receive(output(from), from)).chain(sends).collect()
            }
            Operation::AllToAll => {
                let pairs =
                    everyone().map(|rank| [Transfer::Send(input(rank), rank), Transfer::Receive(output(rank), rank)]);
                pairs.flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the memory to which incoming data goes first.
    fn output(&self) -> *mut u8 {
        if self.needs_copy() { self.scratch.cast() } else { self.lent.output }
    }
}

impl Communicator {
    /// Puts all of it on the stream.
    pub(super) fn enqueue(&mut self, control: &mut dyn Agreement, work: &Work) -> Result<(), Fault> {
        // NCCL may wait for room behind the owner's own work.
        let limit = self.options.limit().unwrap_or(FOR_EVER);
        self.begin(work.collective)?;
        let call = self.call(work)?;
        self.settle(control, call, limit)?;
        if work.needs_copy() {
            let all = Elements { count: work.elements.count * work.size, ..work.elements };
            // From this rank to itself: a copy on the device that needs nothing of CUDA or HIP.
            let copy = [Transfer::Send(work.scratch.cast(), work.rank), Transfer::Receive(work.lent.output, work.rank)];
            self.transfer(&copy, all)?;
            self.settle(control, call, limit)?;
        }
        Ok(self.end_of(call)?)
    }

    /// Enqueues everything, or the part before a copy; returns the name of NCCL's call.
    fn call(&self, work: &Work) -> Result<&'static str, Fault> {
        let Work { collective, elements: Elements { dtype, count, .. }, lent, .. } = *work;
        let functions = self.library.functions();
        let (comm, stream) = (self.raw(), self.stream.raw());
        // If a rank has no use for one of the two, NCCL does not look at it; it gets memory of this
        // device all the same.
        let (mut input, mut output) = (lent.input.cast::<c_void>(), work.output().cast::<c_void>());
        if !lent.has_output {
            output = input.cast_mut();
        }
        if !work.has_input() {
            input = output.cast_const();
        }
        let number = |rank: Rank| rank.0 as c_int;
        // SAFETY of all calls: `lend` checked that the buffers have the lengths that this operation
        // has on this rank, where they are used; they are lent, or their owner keeps them, until
        // the stream has done this or the communicator is aborted. Communicator and stream exist,
        // and no call is in progress.
        let (call, result) = match collective.operation {
            Operation::Allreduce(op) => {
                // SAFETY: see above.
                let result =
                    unsafe { (functions.all_reduce)(input, output, count, dtype, reduction(op), comm, stream) };
                ("ncclAllReduce", result)
            }
            Operation::ReduceScatter(op) => {
                // SAFETY: see above.
                let result =
                    unsafe { (functions.reduce_scatter)(input, output, count, dtype, reduction(op), comm, stream) };
                ("ncclReduceScatter", result)
            }
            Operation::Allgather => {
                // SAFETY: see above.
                ("ncclAllGather", unsafe { (functions.all_gather)(input, output, count, dtype, comm, stream) })
            }
            Operation::Broadcast { root } => {
                // SAFETY: see above.
                let result = unsafe { (functions.broadcast)(input, output, count, dtype, number(root), comm, stream) };
                ("ncclBroadcast", result)
            }
            Operation::Barrier => {
                let word = work.scratch;
                // SAFETY: see above; the scratch has room for 8 bytes.
                let result = unsafe { (functions.all_reduce)(word, word, count, dtype, 0, comm, stream) };
                ("ncclAllReduce", result)
            }
            Operation::Send { to } => {
                // SAFETY: see above.
                ("ncclSend", unsafe { (functions.send)(input, count, dtype, number(to), comm, stream) })
            }
            Operation::Recv { from } => {
                // SAFETY: see above.
                ("ncclRecv", unsafe { (functions.recv)(output, count, dtype, number(from), comm, stream) })
            }
            Operation::Scatter { root } => match functions.scatter.function {
                Some(scatter) => {
                    // SAFETY: see above.
                    let result = unsafe { scatter(input, output, count, dtype, number(root), comm, stream) };
                    ("ncclScatter", result)
                }
                None => return self.transfer(&work.transfers(), work.elements),
            },
            Operation::Gather { root } => match functions.gather.function {
                Some(gather) => {
                    // SAFETY: see above.
                    let result = unsafe { gather(input, output, count, dtype, number(root), comm, stream) };
                    ("ncclGather", result)
                }
                None => return self.transfer(&work.transfers(), work.elements),
            },
            Operation::AllToAll => match functions.all_to_all.function {
                Some(all_to_all) => {
                    // SAFETY: see above.
                    ("ncclAlltoAll", unsafe { all_to_all(input, output, count, dtype, comm, stream) })
                }
                None => return self.transfer(&work.transfers(), work.elements),
            },
        };
        self.check(call, result)?;
        Ok(call)
    }

    /// Enqueues transfers as one group, in which they do not wait for each other.
    fn transfer(&self, transfers: &[Transfer], Elements { dtype, count, .. }: Elements) -> Result<&'static str, Fault> {
        const END: &str = "ncclGroupEnd";
        let functions = self.library.functions();
        let (comm, stream) = (self.raw(), self.stream.raw());
        // SAFETY: this thread's group, which ends below.
        self.check("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let mut first = ("", code::SUCCESS);
        for transfer in transfers {
            // SAFETY: as in `call`: each stretch is of a buffer that was checked.
            let (call, result) = unsafe {
                match *transfer {
                    Transfer::Send(from, to) => {
                        ("ncclSend", (functions.send)(from.cast(), count, dtype, to.0 as c_int, comm, stream))
                    }
                    Transfer::Receive(to, from) => {
                        ("ncclRecv", (functions.recv)(to.cast(), count, dtype, from.0 as c_int, comm, stream))
                    }
                }
            };
            if !matches!(result, code::SUCCESS | code::IN_PROGRESS) {
                first = (call, result);
                break;
            }
        }
        // SAFETY: the group that began above; it ends even if a call in it has failed.
        let ended = unsafe { (functions.group_end)() };
        self.check(first.0, first.1)?;
        self.check(END, ended)?;
        Ok(END)
    }
}
