//! Commands of the controller to all workers, which all execute in one order.
//!
//! A command is written once, however many links it goes over; [`codec`](super::codec) says how.

use std::sync::Arc;

use bytes::Bytes;
use rpc_core::limits::MemoryLease;
use rpc_core::{DataType, Device, Packed, Value, VirtualDevice};
use serde::{Deserialize, Serialize};

use crate::ccl::ReduceOp;
use crate::wire::grouping::Grouping;
use crate::wire::parameter::ParameterType;

/// The number of a register: the same on every worker.
pub(crate) type Register = u32;

/// Marks the registers that a recorded program has for itself. Those of the session stay below.
pub(crate) const OWN: Register = 1 << 31;

/// Most registers beyond those that a worker has at which a command may set one: numbers are given
/// out one after the other.
pub(crate) const MAX_REGISTER_GAP: usize = 1 << 16;

/// Most steps of a recorded program. Each has its number among those of the program's run, on which
/// 20 bits are spent.
pub(crate) const MAX_STEPS: usize = (1 << 20) - 1;

/// The most bytes of one tensor among the arguments of a call.
pub(crate) const MAX_INLINE_TENSOR: usize = 64 << 10;

/// The most bytes of commands, as they lie in memory, that a node holds for those of its workers
/// that are slowest, and that one batch has. A controller that goes by its window sends far less.
pub(crate) const MAX_HELD: u64 = 1 << 30;

/// Value in a command that is not plain.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    Tensor(HostTensor),
}

/// A densely packed tensor as bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostTensor {
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) bytes: Bytes,
}

/// Workers that a command is for. All others skip it, and have null in its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    All,
    Worker0,
    /// The first worker of each group.
    FirstOfGroups,
    /// The first worker of each group of this grouping.
    FirstOf(Grouping),
    /// One worker; the others keep what they have.
    Worker(u32),
}

/// Workers among which a collective runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// The workers of each of the session's own groups among themselves.
    Group,
    /// All workers.
    World,
    /// The workers of each group of a grouping among themselves: those along an axis of a
    /// [`Mesh`](crate::Mesh), whose [`group`](crate::Mesh::group) this is.
    Groups(Grouping),
}

/// A collective on registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Allreduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Allgather,
    Broadcast,
    Scatter,
    Gather,
    AllToAll,
    Barrier,
}

/// One command. Each worker executes all of them, in the order of their sequence numbers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// No command: it takes the number of one that is for others.
    Nothing,
    KillReg {
        register: Register,
    },
    GetGlobalFunc {
        to: Register,
        name: String,
    },
    CallPacked {
        to: Register,
        function: Register,
        args: Vec<Value<Operand>>,
    },
    LoadModule {
        to: Register,
        path: String,
        device: Option<Device>,
    },
    ModuleFunction {
        to: Register,
        module: Register,
        name: String,
    },
    Empty {
        to: Register,
        device: Option<VirtualDevice>,
        dtype: DataType,
        shape: Vec<i64>,
        on: On,
    },
    /// Copies one piece of a tensor. The first piece makes the tensor, unless there is one already:
    /// any on [`On::Worker`], where it is of the same type and shape, and otherwise where the
    /// register is not fresh.
    CopyToWorker0 {
        to: Register,
        fresh: bool,
        dtype: DataType,
        shape: Vec<i64>,
        offset: u64,
        data: Bytes,
        on: On,
    },
    CopyFromWorker0 {
        ticket: u64,
        from: Register,
    },
    DebugGetFromRemote {
        ticket: u64,
        worker: u32,
        from: Register,
    },
    DebugSetRegister {
        worker: u32,
        to: Register,
        value: Value<Operand>,
    },
    Collective {
        kind: Kind,
        scope: Scope,
        from: Register,
        to: Register,
        fresh: bool,
    },
    SendRecv {
        from: Register,
        to: Register,
        pairs: Vec<(u32, u32)>,
    },
    /// Waits for one worker, or without one for all.
    SyncWorker {
        ticket: u64,
        worker: Option<u32>,
    },
    /// Joins the workers for collectives. The content is a [`Plan`](super::plan::Plan).
    InitCcl {
        plan: Packed,
    },
    /// Ends a tentative [`InitCcl`](Self::InitCcl) of this epoch: the workers enter the
    /// communicators that they have joined, or let go of them.
    FinishInitCcl {
        epoch: u64,
        enter: bool,
    },
    Shutdown {
        ticket: u64,
    },
    /// Stores a program: steps that use so many registers of their own ([`OWN`]), some of which are
    /// parameters, others outputs.
    Define {
        program: u32,
        registers: u32,
        parameters: Vec<(u32, ParameterType)>,
        outputs: Vec<u32>,
        steps: Vec<Self>,
    },
    /// Executes the steps of a stored program.
    Run {
        program: u32,
        args: Vec<Value<Operand>>,
        outputs: Vec<Register>,
    },
    Forget {
        program: u32,
    },
}

impl Command {
    /// Returns the name of the command in errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::KillReg { .. } => "kill_reg",
            Self::GetGlobalFunc { .. } => "get_global_func",
            Self::CallPacked { .. } => "call_packed",
            Self::LoadModule { .. } => "load_module",
            Self::ModuleFunction { .. } => "module_function",
            Self::Empty { .. } => "empty",
            Self::CopyToWorker0 { on: On::Worker(_), .. } => "debug_set_register",
            Self::CopyToWorker0 { .. } => "copy_to_worker_0",
            Self::CopyFromWorker0 { .. } => "copy_from_worker_0",
            Self::DebugGetFromRemote { .. } => "debug_get_from_remote",
            Self::DebugSetRegister { .. } => "debug_set_register",
            Self::Collective { kind, .. } => match kind {
                Kind::Allreduce(_) => "allreduce",
                Kind::ReduceScatter(_) => "reduce_scatter",
                Kind::Allgather => "allgather",
                Kind::Broadcast => "broadcast_from_worker0",
                Kind::Scatter => "scatter_from_worker0",
                Kind::Gather => "gather_to_worker0",
                Kind::AllToAll => "all_to_all",
                Kind::Barrier => "barrier",
            },
            Self::SendRecv { .. } => "send_recv",
            Self::SyncWorker { .. } => "sync_worker",
            Self::InitCcl { .. } | Self::FinishInitCcl { .. } => "init_ccl",
            Self::Shutdown { .. } => "shutdown",
            Self::Define { .. } => "record",
            Self::Run { .. } => "run",
            Self::Forget { .. } => "forget",
        }
    }

    /// Returns the register that the command sets on a worker that executes it.
    pub(crate) fn outputs(&self) -> Option<Register> {
        match self {
            Self::GetGlobalFunc { to, .. }
            | Self::CallPacked { to, .. }
            | Self::LoadModule { to, .. }
            | Self::ModuleFunction { to, .. }
            | Self::Empty { to, .. }
            | Self::CopyToWorker0 { to, .. }
            | Self::DebugSetRegister { to, .. }
            | Self::SendRecv { to, .. } => Some(*to),
            Self::Collective { kind, to, .. } => (*kind != Kind::Barrier).then_some(*to),
            _ => None,
        }
    }

    /// Gives all registers of a step to `each`.
    pub(crate) fn for_each_register(&self, each: &mut impl FnMut(Register)) {
        match self {
            Self::CallPacked { to, function, args } => {
                each(*to);
                each(*function);
                args.iter().for_each(|arg| {
                    arg.for_each_object(&mut |operand| {
                        if let Operand::Register(register) = operand {
                            each(*register);
                        }
                    });
                });
            }
            Self::Empty { to, .. } => each(*to),
            Self::Collective { from, to, .. } | Self::SendRecv { from, to, .. } => {
                each(*from);
                each(*to);
            }
            _ => {}
        }
    }

    /// Returns true if it can be a step of a program.
    pub(crate) fn is_step(&self) -> bool {
        matches!(self, Self::CallPacked { .. } | Self::Empty { .. } | Self::Collective { .. } | Self::SendRecv { .. })
    }

    /// Returns the workers that the command is for.
    pub(crate) fn on(&self) -> On {
        match self {
            Self::CopyToWorker0 { on, .. } => *on,
            Self::CopyFromWorker0 { .. } => On::Worker0,
            _ => On::All,
        }
    }

    /// Returns the command's cost in credit, in bytes: about its size while it waits.
    pub(crate) fn cost(&self) -> u64 {
        let content = match self {
            Self::GetGlobalFunc { name: text, .. }
            | Self::LoadModule { path: text, .. }
            | Self::ModuleFunction { name: text, .. } => text.len(),
            Self::Empty { shape, .. } => size_of_val(&shape[..]),
            Self::CopyToWorker0 { data, shape, .. } => data.len() + size_of_val(&shape[..]),
            Self::InitCcl { plan } => plan.as_bytes().len(),
            Self::CallPacked { args, .. } => args.iter().map(size).sum(),
            Self::DebugSetRegister { value, .. } => size(value),
            Self::SendRecv { pairs, .. } => size_of_val(&pairs[..]),
            Self::Define { parameters, outputs, steps, .. } => {
                let steps: u64 = steps.iter().map(Self::cost).sum();
                steps as usize + size_of_val(&parameters[..]) + size_of_val(&outputs[..])
            }
            Self::Run { args, outputs, .. } => args.iter().map(size).sum::<usize>() + size_of_val(&outputs[..]),
            _ => 0,
        };
        128 + content as u64
    }

    /// Returns the data that travels beside the command.
    pub(crate) fn bulk(&self) -> Option<Bytes> {
        if let Self::CopyToWorker0 { data, .. } = self { Some(data.clone()) } else { None }
    }
}

/// A command on its way through a worker's queue.
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    pub(crate) cost: u64,
    pub(crate) command: Arc<Command>,
    /// Its charge, or that of its batch, to the session of its controller. `None` if the controller
    /// is in this process.
    pub(crate) charge: Option<Arc<MemoryLease>>,
}

fn size(value: &Value<Operand>) -> usize {
    value.size_with(&|operand| match operand {
        Operand::Tensor(tensor) => tensor.bytes.len() + size_of_val(&tensor.shape[..]),
        Operand::Register(_) => 0,
    })
}
