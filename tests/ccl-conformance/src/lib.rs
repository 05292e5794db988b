//! A sequential model of every collective, and the programs that check a communicator against it,
//! for the backends of Disco and for those of others ([`Ccl`]).
//!
//! Every rank of a communicator runs the same program at the same time, each on its own [`Ccl`]. A
//! program panics where the communicator does not do what [`Ccl`] promises. [`conformance()`] is
//! the whole contract of one without faults; the other functions are parts of it.

use disco::ccl::{Buffers, Ccl, CclError, Collective, Operation, Rank, ReduceOp};
use half::{bf16, f16};
use rpc_core::DataType;
use rpc_core::dlpack::{from_bytes, to_bytes};

/// All reductions.
const REDUCTIONS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

/// All types that collectives reduce.
const NUMERIC: [DataType; 12] = [
    DataType::I8,
    DataType::I16,
    DataType::I32,
    DataType::I64,
    DataType::U8,
    DataType::U16,
    DataType::U32,
    DataType::U64,
    DataType::F16,
    DataType::BF16,
    DataType::F32,
    DataType::F64,
];

/// Numbers that look random and are the same on every rank and in every run.
struct Random(u64);

impl Random {
    /// Returns the sequence of a seed.
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number.
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns the next number, below `limit`, which is not 0.
    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 33) as usize % limit
    }
}

/// Returns `count` elements of rank `rank`. Floats are of ordinary size, with fractions that do not
/// sum exactly, and a few infinities and NaN.
fn input(dtype: DataType, count: usize, seed: u64, rank: usize) -> Vec<u8> {
    let mut random = Random::new(seed.wrapping_mul(31).wrapping_add(rank as u64 + 1));
    let lanes = count * usize::from(dtype.lanes);
    let lane = DataType { lanes: 1, ..dtype };
    let mut float = move || match random.next() % 256 {
        0 => f64::NAN,
        1 => f64::INFINITY,
        2 => f64::NEG_INFINITY,
        3..60 => (random.next() % 16) as f64 - 8.0,
        _ => (random.next() as i64 as f64) / 2.0_f64.powi(61),
    };
    match lane {
        DataType::F16 => to_bytes(&(0..lanes).map(|_| f16::from_f64(float())).collect::<Vec<_>>()).to_vec(),
        DataType::BF16 => to_bytes(&(0..lanes).map(|_| bf16::from_f64(float())).collect::<Vec<_>>()).to_vec(),
        DataType::F32 => to_bytes(&(0..lanes).map(|_| float() as f32).collect::<Vec<_>>()).to_vec(),
        DataType::F64 => to_bytes(&(0..lanes).map(|_| float()).collect::<Vec<_>>()).to_vec(),
        _ => {
            let mut random = Random::new(seed.wrapping_mul(37).wrapping_add(rank as u64 + 1));
            let bytes = dtype.size_bytes(count as u64).expect("small") as usize;
            (0..bytes).map(|_| (random.next() >> 40) as u8).collect()
        }
    }
}

macro_rules! fold {
    (
        $type:ty, $op:expr, $inputs:expr, $load:expr, $store:expr,
        $add:expr, $mul:expr, $min:expr, $max:expr, $divide:expr
    ) => {{
        let ranks: Vec<Vec<$type>> = $inputs.iter().map(|bytes| from_bytes::<$type>(bytes)).collect();
        let elements = (0..ranks[0].len()).map(|at| {
            let values = ranks.iter().map(|rank| $load(rank[at]));
            let folded = match $op {
                ReduceOp::Sum | ReduceOp::Avg => values.reduce($add),
                ReduceOp::Prod => values.reduce($mul),
                ReduceOp::Min => values.reduce($min),
                ReduceOp::Max => values.reduce($max),
                _ => unreachable!(),
            };
            let folded = folded.expect("at least one rank");
            $store(if $op == ReduceOp::Avg { $divide(folded, ranks.len()) } else { folded })
        });
        to_bytes(&elements.collect::<Vec<$type>>()).to_vec()
    }};
}

macro_rules! fold_float {
    ($type:ty, $sum:ty, $op:expr, $inputs:expr, $load:expr, $store:expr) => {
        fold!(
            $type,
            $op,
            $inputs,
            $load,
            $store,
            |a: $sum, b: $sum| a + b,
            |a: $sum, b: $sum| a * b,
            |a: $sum, b: $sum| if a.is_nan() || a < b { a } else { b },
            |a: $sum, b: $sum| if a.is_nan() || a > b { a } else { b },
            |sum: $sum, by: usize| sum / by as $sum
        )
    };
}

macro_rules! fold_integer {
    ($type:ty, $op:expr, $inputs:expr) => {
        fold!(
            $type,
            $op,
            $inputs,
            |value| value,
            |value| value,
            <$type>::wrapping_add,
            <$type>::wrapping_mul,
            Ord::min,
            Ord::max,
            |sum: $type, by: usize| (i128::from(sum) / by as i128) as $type
        )
    };
}

/// Returns the reduction of all inputs, in the order of ranks.
fn reduced(dtype: DataType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    match (DataType { lanes: 1, ..dtype }) {
        DataType::I8 => fold_integer!(i8, op, inputs),
        DataType::I16 => fold_integer!(i16, op, inputs),
        DataType::I32 => fold_integer!(i32, op, inputs),
        DataType::I64 => fold_integer!(i64, op, inputs),
        DataType::U8 => fold_integer!(u8, op, inputs),
        DataType::U16 => fold_integer!(u16, op, inputs),
        DataType::U32 => fold_integer!(u32, op, inputs),
        DataType::U64 => fold_integer!(u64, op, inputs),
        DataType::F16 => fold_float!(f16, f32, op, inputs, f16::to_f32, f16::from_f32),
        DataType::BF16 => fold_float!(bf16, f32, op, inputs, bf16::to_f32, bf16::from_f32),
        DataType::F32 => fold_float!(f32, f32, op, inputs, |value| value, |value| value),
        DataType::F64 => fold_float!(f64, f64, op, inputs, |value| value, |value| value),
        other => panic!("{other} is not reduced"),
    }
}

/// Makes any NaN the same one, since payloads are not promised.
fn without_payloads(dtype: DataType, bytes: &[u8]) -> Vec<u8> {
    macro_rules! canonical {
        ($type:ty) => {
            to_bytes(
                &from_bytes::<$type>(bytes)
                    .into_iter()
                    .map(|x| if x.is_nan() { <$type>::NAN } else { x })
                    .collect::<Vec<_>>(),
            )
            .to_vec()
        };
    }
    match (DataType { lanes: 1, ..dtype }) {
        DataType::F16 => canonical!(f16),
        DataType::BF16 => canonical!(bf16),
        DataType::F32 => canonical!(f32),
        DataType::F64 => canonical!(f64),
        _ => bytes.to_vec(),
    }
}

/// Returns the result of rank `rank` of `size`; `None` where it gets nothing.
fn expected(collective: Collective, inputs: &[Vec<u8>], rank: usize) -> Option<Vec<u8>> {
    let bytes = collective.dtype.size_bytes(collective.count as u64).expect("small") as usize;
    let share = |all: &[u8], rank: usize| all[rank * bytes..(rank + 1) * bytes].to_vec();
    match collective.operation {
        Operation::Allreduce(op) => Some(reduced(collective.dtype, op, inputs)),
        Operation::ReduceScatter(op) => Some(share(&reduced(collective.dtype, op, inputs), rank)),
        Operation::Allgather => Some(inputs.concat()),
        Operation::Broadcast { root } => Some(inputs[root.0 as usize].clone()),
        Operation::Scatter { root } => Some(share(&inputs[root.0 as usize], rank)),
        Operation::Gather { root } => (root.0 as usize == rank).then(|| inputs.concat()),
        Operation::AllToAll => Some(inputs.iter().flat_map(|input| share(input, rank)).collect()),
        _ => None,
    }
}

/// Returns the number of elements of a rank that has an input.
fn input_count(collective: Collective, size: usize) -> usize {
    match collective.operation {
        Operation::ReduceScatter(_) | Operation::Scatter { .. } | Operation::AllToAll => collective.count * size,
        _ => collective.count,
    }
}

/// Aliasing of a rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aliasing {
    /// Input and output apart from each other.
    Apart,
    /// The output where the input is.
    InPlace,
    /// Even ranks in place, odd ones not.
    Mixed,
}

/// Runs one collective on inputs made from `seed`, the same on every rank, checks this rank's
/// result, and gives it back.
///
/// # Panics
///
/// The collective fails, or its result is not that of the model.
pub fn check(ccl: &mut dyn Ccl, collective: Collective, seed: u64, aliasing: Aliasing) -> Vec<u8> {
    let (rank, size) = (ccl.rank().0 as usize, ccl.size());
    let elements = input_count(collective, size);
    let inputs: Vec<Vec<u8>> = (0..size).map(|rank| input(collective.dtype, elements, seed, rank)).collect();
    let bytes = collective.dtype.size_bytes(collective.count as u64).expect("small") as usize;
    let expected = expected(collective, &inputs, rank);
    let input = &inputs[rank];
    let in_place = aliasing == Aliasing::InPlace || (aliasing == Aliasing::Mixed && rank.is_multiple_of(2));
    // One byte off, so that nothing relies on alignment.
    let mut output = vec![0xcd_u8; 1 + expected.as_ref().map_or(0, Vec::len)];
    let result = if in_place {
        let is_root = |root: Rank| root.0 as usize == rank;
        let (mut buffer, at) = match collective.operation {
            Operation::Allgather => (vec![0xcd; size * bytes], rank * bytes),
            Operation::Gather { root } if is_root(root) => (vec![0xcd; size * bytes], rank * bytes),
            Operation::Broadcast { root } | Operation::Scatter { root } if !is_root(root) => (vec![0xcd; bytes], 0),
            _ => (vec![0; input.len()], 0),
        };
        let copied = input.len().min(buffer.len() - at);
        buffer[at..at + copied].copy_from_slice(&input[..copied]);
        let result = ccl.run(collective, Buffers::in_place(&mut buffer).into());
        let at = match collective.operation {
            Operation::ReduceScatter(_) => rank * bytes,
            Operation::Scatter { root } if is_root(root) => rank * bytes,
            _ => 0,
        };
        let len = output.len() - 1;
        output[1..].copy_from_slice(&buffer[at..at + len]);
        result
    } else {
        let is_source = match collective.operation {
            Operation::Broadcast { root } | Operation::Scatter { root } => root.0 as usize == rank,
            _ => true,
        };
        let output = &mut output[1..];
        let buffers = match (is_source, expected.is_some()) {
            (true, true) => Buffers::new(input, output),
            (true, false) => Buffers::input(input),
            (false, _) => Buffers::output(output),
        };
        ccl.run(collective, buffers.into())
    };
    result.unwrap_or_else(|error| panic!("rank {rank} of {size}: {collective} {aliasing:?}: {error}"));
    let output = output.split_off(1);
    if let Some(expected) = expected {
        let [output, expected] = [&output, &expected].map(|bytes| without_payloads(collective.dtype, bytes));
        if output != expected {
            let at = output.iter().zip(&expected).position(|(a, b)| a != b);
            panic!("rank {rank} of {size}: {collective} {aliasing:?}: wrong from byte {at:?} of {}", expected.len());
        }
    }
    output
}

/// Checks every operation, type and size.
///
/// # Panics
///
/// As [`check`].
pub fn conformance(ccl: &mut dyn Ccl) {
    conformance_of(ccl, &NUMERIC);
}

/// Checks every operation, type and size of a backend that reduces these types.
///
/// # Panics
///
/// As [`check`].
pub fn conformance_of(ccl: &mut dyn Ccl, numeric: &[DataType]) {
    let size = ccl.size();
    let mut seed = 0;
    let mut next = || {
        seed += 1;
        seed
    };
    let roots = [Rank(0), Rank(size as u32 - 1)];
    for &dtype in numeric {
        for op in REDUCTIONS {
            // Below and above what travels with the announcement.
            for count in [0, 1, 20_000 * 8 / usize::from(dtype.bits) + 3] {
                let aliasing =
                    [Aliasing::Apart, Aliasing::InPlace, Aliasing::Mixed][(count + dtype.bits as usize / 8) % 3];
                check(ccl, Collective::new(Operation::Allreduce(op), dtype, count), next(), aliasing);
                check(ccl, Collective::new(Operation::ReduceScatter(op), dtype, count / 3), next(), aliasing);
            }
        }
    }
    let complex_pair = DataType { lanes: 3, ..DataType::F32 };
    check(ccl, Collective::new(Operation::Allreduce(ReduceOp::Sum), complex_pair, 1001), next(), Aliasing::Apart);
    let others = [DataType::U8, DataType::BOOL, DataType::F64, complex_pair];
    for (dtype, counts) in others.into_iter().zip([[0, 1, 90_001], [3, 17, 16_385], [1, 2, 90_001], [1, 5, 10_007]]) {
        for count in counts {
            for aliasing in [Aliasing::Apart, Aliasing::InPlace, Aliasing::Mixed] {
                let mut operations = vec![Operation::Allgather, Operation::AllToAll];
                for root in roots {
                    operations.extend([
                        Operation::Broadcast { root },
                        Operation::Scatter { root },
                        Operation::Gather { root },
                    ]);
                }
                for operation in operations {
                    check(ccl, Collective::new(operation, dtype, count), next(), aliasing);
                }
            }
        }
    }
    // Many chunks, so that stages are used in turn.
    let root = Rank(size as u32 / 2);
    for (operation, dtype, count) in [
        (Operation::Allreduce(ReduceOp::Sum), DataType::F32, 400_007),
        (Operation::Allreduce(ReduceOp::Avg), DataType::F16, 500_001),
        (Operation::ReduceScatter(ReduceOp::Max), DataType::I32, 200_003),
        // More than one thread may take.
        (Operation::Broadcast { root }, DataType::U8, 5_000_011),
        (Operation::Gather { root }, DataType::U8, 700_001),
        (Operation::AllToAll, DataType::U8, 300_001),
    ] {
        check(ccl, Collective::new(operation, dtype, count), next(), Aliasing::Mixed);
    }
    transfers(ccl, next());
    for _ in 0..50 {
        ccl.barrier().expect("a barrier");
    }
}

/// Checks transfers between every pair of ranks, in both directions and with several sizes.
///
/// # Panics
///
/// A transfer fails, or what arrives is not what was sent.
pub fn transfers(ccl: &mut dyn Ccl, seed: u64) {
    let (rank, size) = (ccl.rank().0 as usize, ccl.size());
    for from in 0..size {
        for to in (0..size).filter(|to| *to != from) {
            // One is so long that more than one thread may take it.
            let longest = if (from, to) == (0, 1) { 2_500_003 } else { 300_001 };
            for count in [0, 1, 1000, longest] {
                let sent = input(DataType::U16, count, seed + count as u64, from);
                if rank == from {
                    ccl.send(Rank(to as u32), DataType::U16, count, Buffers::input(&sent).into()).expect("a send");
                } else if rank == to {
                    let mut received = vec![0; sent.len()];
                    ccl.recv(Rank(from as u32), DataType::U16, count, Buffers::output(&mut received).into())
                        .expect("a receive");
                    assert!(received == sent, "{count} elements from {from} to {to}");
                }
            }
        }
    }
}

/// Runs a random sequence of collectives, the same on every rank. Returns a digest of all results
/// of this rank.
///
/// # Panics
///
/// As [`check`].
pub fn random_program(ccl: &mut dyn Ccl, seed: u64, steps: usize) -> u64 {
    let size = ccl.size();
    let mut random = Random::new(seed);
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    for step in 0..steps {
        let op = REDUCTIONS[random.below(REDUCTIONS.len())];
        let root = Rank(random.below(size) as u32);
        let operation = match random.below(7) {
            0 | 1 => Operation::Allreduce(op),
            2 => Operation::ReduceScatter(op),
            3 => Operation::Allgather,
            4 => Operation::Broadcast { root },
            5 => Operation::Gather { root },
            _ => Operation::AllToAll,
        };
        let dtype = NUMERIC[random.below(NUMERIC.len())];
        let limit = [10, 2000, 60_000][random.below(3)];
        let collective = Collective::new(operation, dtype, random.below(limit));
        let aliasing = [Aliasing::Apart, Aliasing::InPlace, Aliasing::Mixed][random.below(3)];
        for byte in check(ccl, collective, seed + step as u64, aliasing) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    digest
}

/// Checks the error that every rank gets where ranks run different collectives: its text has all
/// these parts.
///
/// # Panics
///
/// It is another error, or has another text.
pub fn assert_mismatch(error: &CclError, parts: &[&str]) {
    let text = error.to_string();
    assert!(matches!(error, CclError::Mismatch { .. }), "{text}");
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
}
