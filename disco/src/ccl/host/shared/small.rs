//! Small collectives: inputs are attached to the announcements, and each rank computes its result
//! from them.

use super::SharedCcl;
use crate::ccl::host::algorithm::route;
use crate::ccl::host::{check, kernel};
use crate::ccl::{Collective, Lent, Operation};

impl SharedCcl {
    pub(super) fn small(&self, collective: Collective, bytes: usize, lent: Lent) {
        let size = self.segment.size();
        let inline = |rank| self.segment.inline(rank, self.sequence).cast_const();
        let skipped = match collective.operation {
            Operation::Allreduce(_) => 0,
            Operation::ReduceScatter(_) => self.rank * bytes,
            operation => {
                for from in 0..size {
                    if let Some((at, to)) = route(operation, bytes, from, self.rank)
                        && lent.has_output
                    {
                        // SAFETY: every rank has announced this collective with the same size, so
                        // that its input is in its slot. No slot is written to before this rank
                        // announces the next collective. `lent` has room for the output.
                        unsafe { kernel::copy(inline(from).add(at), lent.output.add(to), bytes, false) };
                    }
                }
                return;
            }
        };
        let Some(op) = collective.operation.reduce_op() else { return };
        let mut on_stack = [std::ptr::null(); 16];
        let mut on_heap = Vec::new();
        let sources = if size <= on_stack.len() {
            &mut on_stack[..size]
        } else {
            on_heap.resize(size, std::ptr::null());
            &mut on_heap[..]
        };
        for (rank, source) in sources.iter_mut().enumerate() {
            *source = inline(rank).wrapping_add(skipped);
        }
        // SAFETY: as above; results are written to `lent` only.
        unsafe {
            kernel::reduce(check::numeric(&collective), op, sources, bytes, &mut |at, block| {
                kernel::copy(block.as_ptr(), lent.output.add(at), block.len(), false);
            });
        }
    }
}
