//! Programs: their steps, and the strategies that generate them.

use disco::{Mesh, ReduceOp, Scope};
use proptest::prelude::*;

use super::data::Layout;

/// Numbers of workers and of groups.
const SHAPES: [(u32, u32); 5] = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Allreduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Allgather,
    Broadcast,
    Scatter,
    Gather,
    AllToAll,
}

impl Kind {
    pub(crate) fn command(self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Allgather => "allgather",
            Self::Broadcast => "broadcast_from_worker0",
            Self::Scatter => "scatter_from_worker0",
            Self::Gather => "gather_to_worker0",
            Self::AllToAll => "all_to_all",
        }
    }

    pub(crate) fn is_one_sided(self) -> bool {
        matches!(self, Self::Broadcast | Self::Scatter)
    }
}

/// Workers among which an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Among {
    World,
    /// The session's own groups.
    Group,
    /// Those with the same place in each of the session's groups: along the first axis of a mesh.
    Across,
}

impl Among {
    /// Returns the number of workers of each group.
    pub(crate) fn size(self, (n, groups): (u32, u32)) -> u32 {
        match self {
            Self::World => n,
            Self::Group => n / groups,
            Self::Across => groups,
        }
    }

    /// Returns the axes of the mesh.
    pub(crate) fn axes((n, groups): (u32, u32)) -> [(&'static str, u32); 2] {
        [("across", groups), ("within", n / groups)]
    }

    pub(crate) fn scope(self, mesh: &Mesh) -> Scope {
        match self {
            Self::World => Scope::World,
            Self::Group => Scope::Group,
            Self::Across => mesh.group("across").unwrap(),
        }
    }
}

/// One line of a program. Variables and workers are numbers, taken modulo the existing ones.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Tensor with different elements on each worker.
    Fill {
        layout: Layout,
        seed: u32,
    },
    Empty {
        layout: Layout,
    },
    EmptyOnFirst {
        layout: Layout,
        scope: Among,
    },
    CopyIn {
        layout: Layout,
        seed: u32,
        to: Option<usize>,
    },
    Broadcast {
        layout: Layout,
        seed: u32,
        to: Option<usize>,
        scope: Among,
    },
    Scatter {
        rest: Layout,
        seed: u32,
        to: Option<usize>,
        scope: Among,
    },
    CopyOut {
        from: usize,
    },
    Get {
        from: usize,
        worker: u32,
    },
    Drop {
        at: usize,
    },
    WorkerId,
    Echo {
        of: usize,
    },
    AddTo {
        to: usize,
        value: i8,
    },
    Copy {
        of: usize,
    },
    FailOn {
        worker: u32,
    },
    FailOnAll,
    PanicOn {
        worker: u32,
    },
    TensorUnless {
        worker: u32,
    },
    SumOfIds {
        rounds: u32,
    },
    Collective {
        kind: Kind,
        scope: Among,
        from: usize,
        to: Option<usize>,
    },
    Barrier {
        scope: Among,
    },
    SendRecv {
        from: usize,
        to: usize,
        pairs: Vec<(u32, u32)>,
    },
    SetInt {
        to: usize,
        worker: u32,
        value: i64,
    },
    SetTensor {
        to: usize,
        worker: u32,
        layout: Layout,
        seed: u32,
    },
    Sync {
        worker: u32,
    },
    SyncAll,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) shape: (u32, u32),
    pub(crate) steps: Vec<Step>,
}

pub(crate) fn uses_variable(step: &Step) -> bool {
    match step {
        Step::CopyIn { to, .. } | Step::Broadcast { to, .. } | Step::Scatter { to, .. } => to.is_some(),
        Step::CopyOut { .. }
        | Step::Get { .. }
        | Step::Drop { .. }
        | Step::Echo { .. }
        | Step::AddTo { .. }
        | Step::Copy { .. }
        | Step::Collective { .. }
        | Step::SendRecv { .. }
        | Step::SetInt { .. }
        | Step::SetTensor { .. } => true,
        _ => false,
    }
}

/// Returns the pairs of `n` workers.
pub(crate) fn between(pairs: &[(u32, u32)], n: u32) -> Vec<(u32, u32)> {
    pairs.iter().map(|(from, to)| (from % n, to % n)).filter(|(from, to)| from != to).collect()
}

pub(crate) fn scattered(rest: &Layout, (n, groups): (u32, u32), scope: Among) -> Layout {
    let size = scope.size((n, groups));
    Layout { float: rest.float, shape: [&[i64::from(size)], &rest.shape[..]].concat() }
}

pub(crate) fn layout() -> impl Strategy<Value = Layout> {
    let shape = prop_oneof![
        Just(vec![0]),
        Just(vec![1]),
        Just(vec![2]),
        Just(vec![4]),
        Just(vec![2, 2]),
        Just(vec![3, 2]),
        Just(vec![4, 1, 2]),
        Just(vec![12]),
        // More elements than travel with an announcement.
        Just(vec![12, 500]),
    ];
    (any::<bool>(), shape).prop_map(|(float, shape)| Layout { float, shape })
}

pub(crate) fn small() -> impl Strategy<Value = Layout> {
    layout().prop_filter("small", |layout| layout.len() < 100)
}

pub(crate) fn scope() -> impl Strategy<Value = Among> {
    prop_oneof![Just(Among::World), Just(Among::Group), Just(Among::Across)]
}

pub(crate) fn kind() -> impl Strategy<Value = Kind> {
    let op = prop_oneof![
        Just(ReduceOp::Sum),
        Just(ReduceOp::Prod),
        Just(ReduceOp::Min),
        Just(ReduceOp::Max),
        Just(ReduceOp::Avg)
    ];
    prop_oneof![
        3 => op.clone().prop_map(Kind::Allreduce),
        3 => op.prop_map(Kind::ReduceScatter),
        1 => Just(Kind::Allgather),
        1 => Just(Kind::Broadcast),
        1 => Just(Kind::Scatter),
        1 => Just(Kind::Gather),
        1 => Just(Kind::AllToAll),
    ]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let var = 0..6_usize;
    let worker = 0..4_u32;
    let seed = 0..1000_u32;
    let to = proptest::option::of(0..6_usize);
    let pairs = proptest::collection::vec((0..4_u32, 0..4_u32), 0..4);
    prop_oneof![
        5 => (layout(), seed.clone()).prop_map(|(layout, seed)| Step::Fill { layout, seed }),
        1 => layout().prop_map(|layout| Step::Empty { layout }),
        1 => (layout(), scope()).prop_map(|(layout, scope)| Step::EmptyOnFirst { layout, scope }),
        2 => (layout(), seed.clone(), to.clone()).prop_map(|(layout, seed, to)| Step::CopyIn { layout, seed, to }),
        1 => (layout(), seed.clone(), to.clone(), scope())
            .prop_map(|(layout, seed, to, scope)| Step::Broadcast { layout, seed, to, scope }),
        1 => (small(), seed.clone(), to.clone(), scope())
            .prop_map(|(rest, seed, to, scope)| Step::Scatter { rest, seed, to, scope }),
        1 => var.clone().prop_map(|from| Step::CopyOut { from }),
        1 => (var.clone(), worker.clone()).prop_map(|(from, worker)| Step::Get { from, worker }),
        2 => var.clone().prop_map(|at| Step::Drop { at }),
        1 => Just(Step::WorkerId),
        1 => var.clone().prop_map(|of| Step::Echo { of }),
        2 => (var.clone(), any::<i8>()).prop_map(|(to, value)| Step::AddTo { to, value }),
        1 => var.clone().prop_map(|of| Step::Copy { of }),
        1 => worker.clone().prop_map(|worker| Step::FailOn { worker }),
        1 => Just(Step::FailOnAll),
        1 => worker.clone().prop_map(|worker| Step::PanicOn { worker }),
        1 => (0..5_u32).prop_map(|worker| Step::TensorUnless { worker }),
        1 => (0..3_u32).prop_map(|rounds| Step::SumOfIds { rounds }),
        9 => (kind(), scope(), var.clone(), to)
            .prop_map(|(kind, scope, from, to)| Step::Collective { kind, scope, from, to }),
        1 => scope().prop_map(|scope| Step::Barrier { scope }),
        2 => (var.clone(), var.clone(), pairs).prop_map(|(from, to, pairs)| Step::SendRecv { from, to, pairs }),
        1 => (var.clone(), worker.clone(), any::<i64>())
            .prop_map(|(to, worker, value)| Step::SetInt { to, worker, value }),
        2 => (var, worker.clone(), small(), seed)
            .prop_map(|(to, worker, layout, seed)| Step::SetTensor { to, worker, layout, seed }),
        1 => worker.prop_map(|worker| Step::Sync { worker }),
        1 => Just(Step::SyncAll),
    ]
}

pub(crate) fn program() -> impl Strategy<Value = Program> {
    let shape = proptest::sample::select(SHAPES.to_vec());
    let step = (step(), proptest::option::weighted(0.9, scope()));
    (shape, proptest::collection::vec(step, 1..30)).prop_map(|(shape, steps)| {
        let steps = steps.into_iter().map(|(step, scope)| match (step, scope) {
            // As many parts as workers, which a reduce_scatter needs and random layouts seldom
            // have.
            (Step::Fill { layout, seed }, Some(scope)) if layout.len() < 100 => {
                Step::Fill { layout: scattered(&layout, shape, scope), seed }
            }
            (step, _) => step,
        });
        Program { shape, steps: steps.collect() }
    })
}
