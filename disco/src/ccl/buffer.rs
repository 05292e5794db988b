//! Memory that one rank brings to a collective: its input, and the room for its output.

use std::marker::PhantomData;

use rpc_core::{Device, RpcError};

use super::{Collective, Operation, Rank};

/// The buffers of one call, lent to it until it returns; [memory of a device](Self::from_raw) for
/// longer.
///
/// Input and output either do not overlap at all, or are [one buffer](Self::in_place).
#[derive(Debug)]
pub struct Buffers<'a> {
    input: Option<Span>,
    output: Option<Span>,
    in_place: bool,
    /// True if the call returns only when the device is done with the memory.
    is_until_done: bool,
    device: Device,
    lent: PhantomData<&'a mut [u8]>,
}

/// Bytes somewhere.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: *mut u8,
    len: usize,
}

// SAFETY: a span stands for a slice that was borrowed for `'a`, and slices of bytes may be sent to
// another thread; `from_raw` had its caller promise the same.
unsafe impl Send for Buffers<'_> {}

impl<'a> Buffers<'a> {
    /// Makes buffers of an input and an output.
    #[must_use]
    pub fn new(input: &'a [u8], output: &'a mut [u8]) -> Self {
        Self { input: Some(Span::of(input)), output: Some(Span::of_mut(output)), ..Self::none() }
    }

    /// Makes one buffer for both. Where one of the two is longer than the other, the shorter one is
    /// this rank's share of the longer: an allgather, for example, finds its input at `rank ×
    /// count` of the buffer.
    #[must_use]
    pub fn in_place(buffer: &'a mut [u8]) -> Self {
        let span = Some(Span::of_mut(buffer));
        Self { input: span, output: span, in_place: true, ..Self::none() }
    }

    /// Makes an input alone: to send, to gather elsewhere, or to broadcast from.
    #[must_use]
    pub fn input(input: &'a [u8]) -> Self {
        Self { input: Some(Span::of(input)), ..Self::none() }
    }

    /// Makes an output alone: to receive, or to take part in another rank's broadcast or scatter.
    #[must_use]
    pub fn output(output: &'a mut [u8]) -> Self {
        Self { output: Some(Span::of_mut(output)), ..Self::none() }
    }

    /// Makes no buffers, for a barrier.
    #[must_use]
    pub fn none() -> Self {
        Self {
            input: None,
            output: None,
            in_place: false,
            is_until_done: false,
            device: Device::cpu(),
            lent: PhantomData,
        }
    }

    /// Makes buffers by address and length, for memory of `device` that no slice can stand for. The
    /// same address twice, where the lengths are those that [`in_place`](Self::in_place) would use
    /// or equal, is the way to alias them. Each backend takes the memory that it can reach: `host`
    /// that of the host, `nccl` that of its device.
    ///
    /// # Errors
    ///
    /// [`rpc_core::ErrorKind::InvalidArgument`]: the two overlap in another way.
    ///
    /// # Safety
    ///
    /// For `'a` the input must be valid for reads and the output for reads and writes, on that
    /// device and from any thread. No other code may write to the input or touch the output. Memory
    /// of a device that is not the host's is so until the stream of the communicator has done the
    /// call's work, or [`Ccl::complete`](super::Ccl::complete) has returned; once `nccl` has called
    /// [`on_stuck`](super::nccl::Options::on_stuck), the former alone counts.
    pub unsafe fn from_raw(
        device: Device,
        input: Option<(*const u8, usize)>,
        output: Option<(*mut u8, usize)>,
    ) -> Result<Self, RpcError> {
        let input = input.map(|(start, len)| Span { start: start.cast_mut(), len });
        let output = output.map(|(start, len)| Span { start, len });
        let mut in_place = false;
        if let (Some(a), Some(b)) = (input, output)
            && a.overlaps(b)
        {
            if a.start != b.start || a.len != b.len {
                return Err(RpcError::invalid_argument(format!(
                    "input ({} bytes at {:p}) and output ({} bytes at {:p}) overlap in part; they may be the same \
                     or apart",
                    a.len, a.start, b.len, b.start
                )));
            }
            in_place = true;
        }
        Ok(Self { input, output, in_place, is_until_done: false, device, lent: PhantomData })
    }

    /// Makes one buffer for both, as [`in_place`](Self::in_place), by address and length.
    ///
    /// # Safety
    ///
    /// For `'a` the buffer must be valid for reads and writes, on that device and from any thread,
    /// and no other code may touch it.
    pub(crate) unsafe fn in_place_raw(device: Device, start: *mut u8, len: usize) -> Self {
        let span = Some(Span { start, len });
        Self { input: span, output: span, in_place: true, is_until_done: false, device, lent: PhantomData }
    }

    /// Lets the call return only when the device is done with the memory, because the processor,
    /// which is not in the order of the device's stream, reaches it too.
    pub(crate) fn until_done(self) -> Self {
        Self { is_until_done: true, ..self }
    }

    /// Returns true if the call returns only when the device is done with the memory.
    pub(crate) fn is_until_done(&self) -> bool {
        self.is_until_done
    }

    /// Returns the device that the memory belongs to.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the buffers as `collective` needs them on `rank` of `size`. `reach` refuses memory
    /// that the backend has no access to.
    ///
    /// # Errors
    ///
    /// A buffer is missing, has the wrong length, or is out of reach; or there is no such root.
    pub(crate) fn lend(
        &self,
        collective: &Collective,
        rank: Rank,
        size: usize,
        reach: impl FnOnce(Device) -> Result<(), RpcError>,
    ) -> Result<Lent, RpcError> {
        if self.input.is_some() || self.output.is_some() {
            reach(self.device)?;
        }
        if let Some(root) = collective.operation.root().filter(|root| root.index() >= size) {
            return Err(RpcError::invalid_argument(format!("{collective}: no rank {root} among {size}")));
        }
        let (needs_input, needs_output) = Needs::of(collective, rank, size)?.both();
        let longer = needs_input.unwrap_or(0).max(needs_output.unwrap_or(0));
        let find = |what: &str, given: Option<Span>, needed: Option<usize>| match (given, needed) {
            (_, None) => Ok(Span::EMPTY),
            (None, Some(0)) => Ok(Span::EMPTY),
            (None, Some(needed)) => Err(RpcError::invalid_argument(format!(
                "{collective} needs an {what} of {needed} bytes on rank {rank}"
            ))),
            (Some(span), Some(needed)) if self.in_place => {
                if span.len != longer {
                    return Err(RpcError::invalid_argument(format!(
                        "{collective} in place needs a buffer of {longer} bytes on rank {rank}, and it has {}",
                        span.len
                    )));
                }
                let skipped = if needed == longer { 0 } else { needed * rank.index() };
                Ok(Span { start: span.start.wrapping_add(skipped), len: needed })
            }
            (Some(span), Some(needed)) if span.len == needed => Ok(span),
            (Some(span), Some(needed)) => Err(RpcError::invalid_argument(format!(
                "{collective} needs an {what} of {needed} bytes on rank {rank}, and it has {}",
                span.len
            ))),
        };
        // The root of a broadcast has its result already.
        let is_root = collective.operation == Operation::Broadcast { root: rank };
        let output = match self.output {
            None if is_root => Span::EMPTY,
            given => find("output", given, needs_output)?,
        };
        let input = find("input", self.input, needs_input)?;
        Ok(Lent {
            input: input.start,
            output: output.start,
            has_output: output.len > 0,
            in_place: self.in_place && needs_input.is_some() && needs_output.is_some(),
        })
    }
}

impl Span {
    const EMPTY: Self = Self { start: std::ptr::dangling_mut(), len: 0 };

    fn of(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr().cast_mut(), len: bytes.len() }
    }

    fn of_mut(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), len: bytes.len() }
    }

    fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.start.addr(), other.start.addr());
        self.len > 0 && other.len > 0 && a < b.saturating_add(other.len) && b < a.saturating_add(self.len)
    }
}

/// Number of bytes that a rank brings and takes; `None` where it has no part.
struct Needs {
    input: Option<usize>,
    output: Option<usize>,
}

impl Needs {
    fn of(collective: &Collective, rank: Rank, size: usize) -> Result<Self, RpcError> {
        let too_large = || RpcError::invalid_argument(format!("{collective}: not a size that memory can have"));
        let one = collective.bytes().ok_or_else(too_large)?;
        let all = one.checked_mul(size).filter(|all| *all <= isize::MAX as usize).ok_or_else(too_large)?;
        let at_root = |bytes| collective.operation.root().is_none_or(|root| root == rank).then_some(bytes);
        let (input, output) = match collective.operation {
            Operation::Allreduce(_) => (Some(one), Some(one)),
            Operation::ReduceScatter(_) => (Some(all), Some(one)),
            Operation::Allgather => (Some(one), Some(all)),
            Operation::Broadcast { .. } => (at_root(one), Some(one)),
            Operation::Scatter { .. } => (at_root(all), Some(one)),
            Operation::Gather { .. } => (Some(one), at_root(all)),
            Operation::AllToAll => (Some(all), Some(all)),
            Operation::Send { .. } => (Some(one), None),
            Operation::Recv { .. } => (None, Some(one)),
            Operation::Barrier => (None, None),
        };
        Ok(Self { input, output })
    }

    fn both(self) -> (Option<usize>, Option<usize>) {
        (self.input, self.output)
    }
}

/// Buffers of the right lengths, for as long as the call lasts. The pointers dangle where nothing
/// is needed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lent {
    pub(crate) input: *const u8,
    pub(crate) output: *mut u8,
    /// True if there is anywhere to put a result.
    pub(crate) has_output: bool,
    /// True if this rank's input is (in) its output.
    pub(crate) in_place: bool,
}

/// Contribution of a rank to a collective: its buffers, or the reason why it has none.
#[derive(Debug)]
pub enum CollectiveInput<'a> {
    /// Buffers of the rank.
    Ready(Buffers<'a>),
    /// The error of the step that should have made the input. The rank takes part nevertheless, so
    /// that no rank waits for it; only the operation of the call has to agree with that of the
    /// others.
    Poisoned(RpcError),
}

impl<'a> From<Buffers<'a>> for CollectiveInput<'a> {
    fn from(buffers: Buffers<'a>) -> Self {
        Self::Ready(buffers)
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::DataType;

    use super::*;

    fn everywhere(_: Device) -> Result<(), RpcError> {
        Ok(())
    }

    #[test]
    fn partial_overlap_is_refused_and_exact_aliasing_is_not() {
        let mut bytes = [0_u8; 16];
        let start = bytes.as_mut_ptr();
        let cpu = Device::cpu();
        // SAFETY: all ranges lie in `bytes`, which no other code touches.
        unsafe {
            assert!(Buffers::from_raw(cpu, Some((start, 8)), Some((start, 8))).unwrap().in_place);
            assert!(!Buffers::from_raw(cpu, Some((start, 8)), Some((start.add(8), 8))).unwrap().in_place);
            Buffers::from_raw(cpu, Some((start, 8)), Some((start.add(4), 8))).unwrap_err();
            Buffers::from_raw(cpu, Some((start, 8)), Some((start, 4))).unwrap_err();
        }
    }

    #[test]
    fn the_shorter_side_in_place_is_the_ranks_share() {
        let mut bytes = [0_u8; 24];
        let start = bytes.as_mut_ptr();
        let gather = Collective::new(Operation::Allgather, DataType::F32, 2);
        let lent = Buffers::in_place(&mut bytes).lend(&gather, Rank(1), 3, everywhere).unwrap();
        assert_eq!((lent.input, lent.output), (start.wrapping_add(8).cast_const(), start));
        let error = Buffers::in_place(&mut bytes[..8]).lend(&gather, Rank(1), 3, everywhere).unwrap_err();
        assert!(error.message().contains("24 bytes on rank 1"), "{error}");
    }

    #[test]
    fn lengths_are_checked_and_what_is_not_needed_is_not() {
        let scatter = Collective::new(Operation::Scatter { root: Rank(0) }, DataType::F32, 1);
        let mut out = [0_u8; 4];
        Buffers::new(&[1], &mut out).lend(&scatter, Rank(1), 2, everywhere).unwrap();
        let error = Buffers::new(&[1], &mut out).lend(&scatter, Rank(0), 2, everywhere).unwrap_err();
        assert!(error.message().contains("input of 8 bytes on rank 0, and it has 1"), "{error}");
        let huge = Collective::new(Operation::Allgather, DataType::F64, usize::MAX / 16);
        Buffers::none().lend(&huge, Rank(0), 4, everywhere).unwrap_err();
        let error = Buffers::output(&mut out)
            .lend(&scatter, Rank(1), 2, |device| Err(RpcError::unsupported(format!("not {device}"))));
        assert_eq!(error.unwrap_err().message(), "not cpu:0");
        let error = Buffers::output(&mut out)
            .lend(&Collective::new(Operation::Scatter { root: Rank(2) }, DataType::F32, 1), Rank(1), 2, everywhere)
            .unwrap_err();
        assert!(error.message().contains("no rank 2 among 2"), "{error}");
    }
}
