//! Agreement of ranks on a collective: their announcements when they enter it, and the conclusion
//! that all draw from them.
//!
//! Every rank sees the announcements of all, so that each comes to the same verdict by itself: go
//! on, or the same error everywhere.

use rpc_core::{DataType, DataTypeCode, RpcError};

use crate::ccl::{CclError, Collective, Operation, Rank, ReduceOp};

/// The bytes of an announcement in shared memory and on a connection.
pub(super) const LEN: usize = 56;

/// The longest cause of poison, in bytes.
pub(super) const MAX_POISON: usize = 2048;

/// One rank's word about the call that it has entered.
///
/// Layout, little-endian: operation `u8`, reduction `u8`, dtype code `u8`, bits `u8`, lanes `u16`,
/// flags `u16` (1 in place, 2 has output), root or peer `u32`, length of the cause of poison `u32`
/// (0: none), count `u64`, address of input `u64`, of output `u64`, sequence `u64`, step `u64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) collective: Collective,
    pub(super) sequence: u64,
    /// Number of the rank's step, as its caller counts; 0 where steps are not counted.
    pub(super) step: u64,
    pub(super) in_place: bool,
    pub(super) has_output: bool,
    pub(super) poison: u32,
    /// Address of the input, for ranks of the same address space.
    pub(super) input: u64,
    pub(super) output: u64,
}

impl Announcement {
    pub(super) fn to_bytes(self) -> [u8; LEN] {
        let (operation, root) = operation_code(self.collective.operation);
        let dtype = self.collective.dtype;
        let mut bytes = [0; LEN];
        bytes[0] = operation;
        bytes[1] = self.collective.operation.reduce_op().map_or(0, reduce_code);
        bytes[2] = dtype.code.0;
        bytes[3] = dtype.bits;
        bytes[4..6].copy_from_slice(&dtype.lanes.to_le_bytes());
        bytes[6] = u8::from(self.in_place) | u8::from(self.has_output) << 1;
        bytes[8..12].copy_from_slice(&root.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.poison.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.collective.count as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.input.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.output.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.step.to_le_bytes());
        bytes
    }

    /// Decodes an announcement; `None` if the bytes are none.
    pub(super) fn from_bytes(bytes: &[u8; LEN]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let root = Rank(u32_at(8));
        let operation = match (bytes[0], reduce_op(bytes[1])) {
            (1, Some(op)) => Operation::Allreduce(op),
            (2, Some(op)) => Operation::ReduceScatter(op),
            (3, _) => Operation::Allgather,
            (4, _) => Operation::Broadcast { root },
            (5, _) => Operation::Scatter { root },
            (6, _) => Operation::Gather { root },
            (7, _) => Operation::AllToAll,
            (8, _) => Operation::Barrier,
            (9, _) => Operation::Send { to: root },
            (10, _) => Operation::Recv { from: root },
            _ => return None,
        };
        let dtype =
            DataType { code: DataTypeCode(bytes[2]), bits: bytes[3], lanes: u16::from_le_bytes([bytes[4], bytes[5]]) };
        Some(Self {
            collective: Collective::new(operation, dtype, usize::try_from(u64_at(16)).ok()?),
            in_place: bytes[6] & 1 != 0,
            has_output: bytes[6] & 2 != 0,
            poison: u32_at(12).min(MAX_POISON as u32),
            input: u64_at(24),
            output: u64_at(32),
            sequence: u64_at(40),
            step: u64_at(48),
        })
    }
}

fn operation_code(operation: Operation) -> (u8, u32) {
    match operation {
        Operation::Allreduce(_) => (1, 0),
        Operation::ReduceScatter(_) => (2, 0),
        Operation::Allgather => (3, 0),
        Operation::Broadcast { root } => (4, root.0),
        Operation::Scatter { root } => (5, root.0),
        Operation::Gather { root } => (6, root.0),
        Operation::AllToAll => (7, 0),
        Operation::Barrier => (8, 0),
        Operation::Send { to } => (9, to.0),
        Operation::Recv { from } => (10, from.0),
    }
}

fn reduce_code(op: ReduceOp) -> u8 {
    match op {
        ReduceOp::Sum => 1,
        ReduceOp::Prod => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
        ReduceOp::Avg => 5,
    }
}

fn reduce_op(code: u8) -> Option<ReduceOp> {
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg]
        .into_iter()
        .find(|op| reduce_code(*op) == code)
}

/// Returns the first rank that is a step ahead of others: it went on without a collective that they
/// are in.
pub(super) fn ahead(announcements: &[Announcement]) -> Option<usize> {
    let most = announcements.iter().map(|one| one.step).max()?;
    let all_there = announcements.iter().all(|one| one.step == most);
    if all_there { None } else { announcements.iter().position(|one| one.step == most) }
}

/// Returns the conclusion from the announcements of all ranks, which come in the order of ranks.
/// `poison` finds the cause that a rank gave.
///
/// # Errors
///
/// Two ranks disagree, or one has no input: the same error on every rank, because the lowest ranks
/// are named.
pub(super) fn agree(
    sequence: u64,
    announcements: &[Announcement],
    poison: impl FnOnce(Rank) -> RpcError,
) -> Result<(), CclError> {
    let Some(first) = announcements.first() else { return Ok(()) };
    // All operations first: of a rank without input nothing else is known.
    let operation = |one: &Announcement| std::mem::discriminant(&one.collective.operation);
    let other = announcements.iter().position(|one| operation(one) != operation(first));
    if let Some(other) = other {
        return Err(mismatch(sequence, (Rank(0), first), (Rank::of(other), &announcements[other])));
    }
    let mut healthy = announcements.iter().enumerate().filter(|(_, one)| one.poison == 0);
    if let Some((rank, first)) = healthy.next()
        && let Some((other, announcement)) = healthy.find(|(_, one)| one.collective != first.collective)
    {
        return Err(mismatch(sequence, (Rank::of(rank), first), (Rank::of(other), announcement)));
    }
    match announcements.iter().position(|one| one.poison != 0) {
        Some(rank) => Err(CclError::Poisoned { sequence, rank: Rank::of(rank), cause: poison(Rank::of(rank)) }),
        None => Ok(()),
    }
}

/// Returns the conclusion from the announcements of both ends of a transfer.
///
/// # Errors
///
/// As [`agree`]; of the receiver's poison too, because a sender that waits has to hear of it.
pub(super) fn agree_pair(
    sequence: u64,
    sender: (Rank, &Announcement),
    receiver: (Rank, &Announcement),
    poison: impl FnOnce(Rank) -> RpcError,
) -> Result<(), CclError> {
    let poisoned = [sender, receiver].into_iter().find(|(_, one)| one.poison != 0);
    if let Some((rank, _)) = poisoned {
        return Err(CclError::Poisoned { sequence, rank, cause: poison(rank) });
    }
    let (a, b) = (sender.1.collective, receiver.1.collective);
    if (a.dtype, a.count) == (b.dtype, b.count) { Ok(()) } else { Err(mismatch(sequence, sender, receiver)) }
}

fn mismatch(sequence: u64, first: (Rank, &Announcement), second: (Rank, &Announcement)) -> CclError {
    CclError::Mismatch {
        sequence,
        first: (first.0, first.1.collective.to_string()),
        second: (second.0, second.1.collective.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(operation: Operation, count: usize, poison: u32) -> Announcement {
        Announcement {
            collective: Collective::new(operation, DataType::BF16, count),
            sequence: 1 << 40,
            step: 1 << 50,
            in_place: true,
            has_output: false,
            poison,
            input: u64::MAX,
            output: 7,
        }
    }

    #[test]
    fn announcements_survive_their_bytes() {
        let root = Rank(70_000);
        let reductions = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];
        let reduced = reductions.into_iter().flat_map(|op| [Operation::Allreduce(op), Operation::ReduceScatter(op)]);
        let others = [
            Operation::Allgather,
            Operation::Broadcast { root },
            Operation::Scatter { root },
            Operation::Gather { root },
            Operation::AllToAll,
            Operation::Barrier,
            Operation::Send { to: root },
            Operation::Recv { from: root },
        ];
        for operation in reduced.chain(others) {
            let this = announcement(operation, 1 << 33, 5);
            assert_eq!(Announcement::from_bytes(&this.to_bytes()), Some(this));
        }
        assert_eq!(Announcement::from_bytes(&[0xff; LEN]), None);
    }

    /// Bytes that Python's `struct.pack("<BBBBHHIIQQQQQ", …)` has made of the same fields.
    #[test]
    fn announcements_keep_their_bytes() {
        let hex = |one: Announcement| one.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let sum = announcement(Operation::Allreduce(ReduceOp::Sum), 1 << 33, 5);
        assert_eq!(
            hex(sum),
            concat!(
                "010104100100010000000000050000000000000002000000ffffffff",
                "ffffffff070000000000000000000000000100000000000000000400"
            )
        );
        let broadcast = announcement(Operation::Broadcast { root: Rank(70_000) }, 3, 0);
        assert_eq!(
            hex(broadcast),
            concat!(
                "040004100100010070110100000000000300000000000000ffffffff",
                "ffffffff070000000000000000000000000100000000000000000400"
            )
        );
    }

    #[test]
    fn the_rank_that_went_on_is_ahead() {
        let at = |step| Announcement { step, ..announcement(Operation::Barrier, 0, 0) };
        assert_eq!(ahead(&[at(5), at(5)]), None);
        assert_eq!(ahead(&[at(5), at(7), at(5), at(7)]), Some(1));
        assert_eq!(ahead(&[]), None);
    }

    #[test]
    fn disagreement_goes_before_poison_and_names_the_lowest_ranks() {
        let sum = Operation::Allreduce(ReduceOp::Sum);
        let cause = |_| RpcError::internal("cause");
        let all = [announcement(sum, 4, 0), announcement(sum, 4, 9), announcement(sum, 5, 0)];
        let error = agree(3, &all, cause).unwrap_err();
        assert_eq!(
            error.to_string(),
            "collective #3: rank 0 is in allreduce(sum) of 4 bfloat16 and rank 2 is in allreduce(sum) of 5 \
             bfloat16; all ranks must make the same call"
        );
        let error = agree(3, &all[..2], cause).unwrap_err();
        assert_eq!(error, CclError::Poisoned { sequence: 3, rank: Rank(1), cause: RpcError::internal("cause") });
        agree(3, &all[..1], cause).unwrap();
        // A rank without input is held to the operation, and to nothing else.
        let other = [announcement(Operation::AllToAll, 0, 9), announcement(sum, 4, 0)];
        assert!(matches!(agree(3, &other, cause), Err(CclError::Mismatch { .. })));
    }
}
