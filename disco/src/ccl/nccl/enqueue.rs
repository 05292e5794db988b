//! Enqueueing of collectives on the stream, by calls of NCCL.

use std::ffi::{c_int, c_void};

use rpc_core::{ErrorKind, RpcError};

use super::communicator::{Communicator, FOR_EVER};
use super::elements::{Elements, reduction};
use super::error::code;
use super::symbols::Comm;
use super::wait::Fault;
use crate::ccl::{Agreement, Collective, Lent, Operation, Rank};

/// A collective of one rank, ready to be enqueued.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) collective: Collective,
    pub(super) elements: Elements,
    pub(super) lent: Lent,
    /// [Scratch memory](super::DeviceStream::scratch) of the stream, for a barrier or an exchange
    /// in place; null otherwise.
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
    /// Returns true if this is an exchange in place. Incoming data goes to scratch memory first
    /// then, because it could overwrite parts of the buffer that have not been sent.
    pub(super) fn needs_copy(&self) -> bool {
        self.collective.operation == Operation::AllToAll && self.lent.in_place
    }

    /// Returns true if the collective reads this rank's input.
    fn has_input(&self) -> bool {
        match self.collective.operation {
            Operation::Broadcast { root } | Operation::Scatter { root } => root == self.rank,
            Operation::Barrier | Operation::Recv { .. } => false,
            _ => true,
        }
    }

    /// Returns the sends and receives of this rank, for collectives that the library has no
    /// function for.
    fn transfers(&self) -> Vec<Transfer> {
        let bytes = self.elements.bytes();
        let input = |rank: Rank| self.lent.input.wrapping_add(rank.index() * bytes);
        let output = |rank: Rank| self.output().wrapping_add(rank.index() * bytes);
        let everyone = || (0..self.size).map(Rank::of);
        let own = self.rank;
        match self.collective.operation {
            Operation::Scatter { root } => {
                // In place, the root's share is already in its output.
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

    /// Returns the memory that receives incoming data: the scratch memory of an exchange in place,
    /// and the output otherwise.
    fn output(&self) -> *mut u8 {
        if self.needs_copy() { self.scratch.cast() } else { self.lent.output }
    }
}

impl Communicator {
    /// Enqueues a collective on the stream.
    pub(super) fn enqueue(&mut self, control: &mut dyn Agreement, work: &Work) -> Result<(), Fault> {
        // NCCL may wait until other work of the caller has made room on the stream.
        let limit = self.options.limit().unwrap_or(FOR_EVER);
        self.make_room(work.collective);
        self.begin(work.collective)?;
        let call = self.locked(|comm| self.call(comm, work))?;
        self.settle(control, call, limit)?;
        if work.needs_copy() {
            let all = Elements { count: work.elements.count * work.size, ..work.elements };
            // A transfer from this rank to itself: a copy on the device without a call of CUDA or
            // HIP.
            let copy = [Transfer::Send(work.scratch.cast(), work.rank), Transfer::Receive(work.lent.output, work.rank)];
            self.locked(|comm| self.transfer(comm, &copy, all))?;
            self.settle(control, call, limit)?;
        }
        Ok(self.end_of(call)?)
    }

    /// Calls `call` with the communicator, which no other thread uses meanwhile.
    fn locked<T>(&self, call: impl FnOnce(Comm) -> Result<T, Fault>) -> Result<T, Fault> {
        let comm = self.handle().lock();
        if comm.raw.is_null() {
            return Err(Fault::Own(RpcError::new(ErrorKind::Cancelled, "the communicator is being aborted")));
        }
        call(comm.raw)
    }

    /// Enqueues the collective, without the copy of an exchange in place. Returns the name of
    /// NCCL's function.
    fn call(&self, comm: Comm, work: &Work) -> Result<&'static str, Fault> {
        let Work { collective, elements: Elements { dtype, count, .. }, lent, .. } = *work;
        let functions = self.library.functions();
        let stream = self.stream.raw();
        // NCCL does not access a buffer that the operation does not use on this rank. It gets the
        // other buffer for it, so that each pointer is to memory of this device.
        let (mut input, mut output) = (lent.input.cast::<c_void>(), work.output().cast::<c_void>());
        if !lent.has_output {
            output = input.cast_mut();
        }
        if !work.has_input() {
            input = output.cast_const();
        }
        let number = |rank: Rank| rank.0 as c_int;
        // SAFETY of all calls: `lend` has checked that the buffers have the lengths that this
        // operation needs on this rank. They are lent, or kept by their owner, until the stream has
        // done this work or the communicator is aborted. Communicator and stream exist, and no
        // other call with the communicator is in progress.
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
                None => return self.transfer(comm, &work.transfers(), work.elements),
            },
            Operation::Gather { root } => match functions.gather.function {
                Some(gather) => {
                    // SAFETY: see above.
                    let result = unsafe { gather(input, output, count, dtype, number(root), comm, stream) };
                    ("ncclGather", result)
                }
                None => return self.transfer(comm, &work.transfers(), work.elements),
            },
            Operation::AllToAll => match functions.all_to_all.function {
                Some(all_to_all) => {
                    // SAFETY: see above.
                    ("ncclAlltoAll", unsafe { all_to_all(input, output, count, dtype, comm, stream) })
                }
                None => return self.transfer(comm, &work.transfers(), work.elements),
            },
        };
        self.check(comm, call, result)?;
        Ok(call)
    }

    /// Enqueues transfers as one NCCL group, so that they do not wait for each other.
    fn transfer(
        &self,
        comm: Comm,
        transfers: &[Transfer],
        Elements { dtype, count, .. }: Elements,
    ) -> Result<&'static str, Fault> {
        const END: &str = "ncclGroupEnd";
        let functions = self.library.functions();
        let stream = self.stream.raw();
        // SAFETY: begins a group of this thread, which is ended below.
        self.check(comm, "ncclGroupStart", unsafe { (functions.group_start)() })?;
        let mut first = ("", code::SUCCESS);
        for transfer in transfers {
            // SAFETY: as in `call`; each part lies in a buffer that was checked.
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
        // SAFETY: ends the group that began above, also if a call in it has failed.
        let ended = unsafe { (functions.group_end)() };
        self.check(comm, first.0, first.1)?;
        self.check(comm, END, ended)?;
        Ok(END)
    }
}
