//! Lanes of a run: which steps follow each other on one lane of their session, so that none of them
//! waits at the client for the one before.

use super::plan::{Plan, PlannedStep, TensorIndex};

/// Lanes of the steps of a plan, and the uses of its tensors.
pub(super) struct Schedule {
    /// Lane of each pipelined step, by the number of the first step on it. `None` for a step that
    /// is submitted once everything that it needs is there.
    lanes: Vec<Option<usize>>,
    /// Step that makes each tensor.
    makers: Vec<usize>,
    uses: Vec<Uses>,
}

/// Numbers of uses of a tensor.
#[derive(Clone, Copy, Default)]
pub(super) struct Uses {
    /// Uses by steps that follow on the lane of the step that makes the tensor.
    pub(super) on_lane: usize,
    /// Uses by all other steps, and as an output.
    pub(super) elsewhere: usize,
}

impl Schedule {
    /// Assigns lanes to the steps that `is_pipelined` accepts.
    ///
    /// A step continues the lane of a step that it depends on, unless another one has continued it
    /// before: independent steps are on different lanes, and run at the same time. An input is on
    /// the lane of the first call or copy that uses it.
    pub(super) fn new(plan: &Plan, is_pipelined: impl Fn(usize) -> bool) -> Self {
        let mut makers = vec![0; plan.tensors.len()];
        for (step, planned) in plan.planned.iter().enumerate() {
            made_by(planned).for_each(|slot| makers[slot] = step);
        }
        let is_input = |step: usize| matches!(plan.planned[step], PlannedStep::Input { .. });
        let mut lanes: Vec<Option<usize>> = vec![None; plan.planned.len()];
        // Last step of each lane, by the lane.
        let mut last: Vec<usize> = (0..plan.planned.len()).collect();
        for (step, planned) in plan.planned.iter().enumerate() {
            if !is_pipelined(step) || is_input(step) {
                continue;
            }
            let needed = || needed(planned).map(|slot| makers[slot]);
            let ends_lane = |maker: &usize| lanes[*maker].is_some_and(|lane| last[lane] == *maker);
            let before = needed().filter(|maker| !is_input(*maker)).filter(ends_lane).max();
            let lane = before.and_then(|before| lanes[before]).unwrap_or(step);
            (lanes[step], last[lane]) = (Some(lane), step);
            for input in needed().filter(|maker| is_input(*maker) && is_pipelined(*maker)) {
                lanes[input].get_or_insert(lane);
            }
        }
        // Inputs that no step uses on its session.
        for step in (0..lanes.len()).filter(|step| is_input(*step) && is_pipelined(*step)) {
            lanes[step].get_or_insert(step);
        }
        let mut uses = vec![Uses::default(); plan.tensors.len()];
        for (step, planned) in plan.planned.iter().enumerate() {
            for slot in needed(planned) {
                match lanes[step] {
                    Some(lane) if lanes[makers[slot]] == Some(lane) => uses[slot].on_lane += 1,
                    _ => uses[slot].elsewhere += 1,
                }
            }
        }
        plan.outputs.iter().for_each(|slot| uses[*slot].elsewhere += 1);
        Self { lanes, makers, uses }
    }

    /// Returns the lane of a step that is pipelined.
    pub(super) fn lane(&self, step: usize) -> Option<usize> {
        self.lanes[step]
    }

    /// Returns true if the step follows on the lane of the step that makes the tensor.
    pub(super) fn follows(&self, step: usize, slot: TensorIndex) -> bool {
        self.lanes[step].is_some() && self.lanes[step] == self.lanes[self.makers[slot]]
    }

    pub(super) fn uses(&self, slot: TensorIndex) -> Uses {
        self.uses[slot]
    }
}

/// Returns the tensors that a step needs.
pub(super) fn needed(step: &PlannedStep) -> impl Iterator<Item = TensorIndex> {
    let slots = match step {
        PlannedStep::Input { .. } => &[][..],
        PlannedStep::Copy { from, .. } => std::slice::from_ref(from),
        PlannedStep::Call { tensors, .. } => tensors,
    };
    slots.iter().copied()
}

/// Returns the tensors that a step makes.
pub(super) fn made_by(step: &PlannedStep) -> impl Iterator<Item = TensorIndex> {
    let slots = match step {
        PlannedStep::Input { to, .. } | PlannedStep::Copy { to, .. } => std::slice::from_ref(to),
        PlannedStep::Call { results, .. } => results,
    };
    slots.iter().copied()
}
