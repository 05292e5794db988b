//! Credit that the workers have executed, and the least that any of them has.

/// The executed credit of each worker, as far as it is known. A report costs a few steps for any
/// number of workers: it is a tree, whose leaves are the workers and whose other nodes each have
/// the smaller of the two numbers below.
pub(super) struct ExecutedCredit {
    /// The root is the first, and the nodes below number `n` are `2n` and `2n + 1`; number 0 is
    /// unused. Leaves without a worker have the largest number.
    nodes: Vec<u64>,
    workers: usize,
}

impl ExecutedCredit {
    /// Creates it for so many workers, which have executed nothing.
    pub(super) fn new(workers: usize) -> Self {
        let leaves = workers.next_power_of_two();
        let mut this = Self { nodes: vec![0; 2 * leaves], workers };
        this.nodes[leaves + workers..].fill(u64::MAX);
        for node in (1..leaves).rev() {
            this.nodes[node] = this.least_below(node);
        }
        this
    }

    /// Records the credit that a worker has executed, unless more is known already.
    pub(super) fn raise(&mut self, worker: usize, credit: u64) {
        if worker >= self.workers {
            return;
        }
        let mut node = self.nodes.len() / 2 + worker;
        if self.nodes[node] >= credit {
            return;
        }
        self.nodes[node] = credit;
        while node > 1 {
            node /= 2;
            let least = self.least_below(node);
            if self.nodes[node] == least {
                return;
            }
            self.nodes[node] = least;
        }
    }

    /// Returns the credit that every worker has executed.
    pub(super) fn least(&self) -> u64 {
        self.nodes[1]
    }

    fn least_below(&self, node: usize) -> u64 {
        self.nodes[2 * node].min(self.nodes[2 * node + 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_that_of_all_workers_in_any_order_of_reports() {
        for workers in [1_usize, 2, 3, 7, 8, 100] {
            let (mut tree, mut model) = (ExecutedCredit::new(workers), vec![0_u64; workers]);
            let mut random = 0x2545_f491_4f6c_dd1d_u64;
            for _ in 0..2000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // Some are of workers that there are not, and some come late.
                let (worker, credit) = (random as usize % (workers + 1), random >> 40);
                tree.raise(worker, credit);
                if let Some(known) = model.get_mut(worker) {
                    *known = credit.max(*known);
                }
                assert_eq!(Some(tree.least()), model.iter().copied().min());
            }
        }
    }
}
