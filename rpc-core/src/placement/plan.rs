//! What was decided: where each thing is, and in which order what has to happen.

use std::collections::BTreeMap;
use std::fmt;

use super::graph::{CallGraph, CallId, Edge, InputId, Layout, OutputId, ValueId};
use crate::device::target::Target;
use crate::device::virtual_device::VirtualDevice;
use crate::dlpack::Device;

/// Where something is, for good.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The name of the session.
    pub session: String,
    /// The device, as that session counts.
    pub device: Device,
    /// The memory of the device.
    pub memory_scope: String,
    /// What code for the device is compiled for.
    pub target: Target,
}

impl Place {
    /// The device as a virtual one, fully constrained.
    pub fn virtual_device(&self) -> VirtualDevice {
        let scope = VirtualDevice::builder().memory_scope(&*self.memory_scope).build().unwrap_or_default();
        VirtualDevice::from(self.device).default_to(&self.target.clone().into()).default_to(&scope)
    }

    /// Whether data there is there too.
    pub(super) fn is_memory_of(&self, other: &Self) -> bool {
        (&self.session, self.device, &self.memory_scope) == (&other.session, other.device, &other.memory_scope)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.session, self.device, self.memory_scope)
    }
}

/// A step of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// An input is brought there, unless it is there already.
    Input {
        /// Its name.
        name: String,
        /// Where it lies.
        place: Place,
    },
    /// A tensor is copied.
    Copy {
        /// What it is, such as `result #0 of call #1 'matmul'`.
        value: String,
        /// From there.
        from: Place,
        /// To there.
        to: Place,
    },
    /// A function is called.
    Call {
        /// Which call of the graph.
        call: CallId,
        /// The function.
        function: String,
        /// Where it runs.
        place: Place,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input { name, place } => write!(f, "input '{name}' on {place}"),
            Self::Copy { value, from, to } => write!(f, "copy {value} from {from} to {to}"),
            Self::Call { call, function, place } => write!(f, "call #{} '{function}' on {place}", call.0),
        }
    }
}

/// A tensor of a plan, by its number: an input, a result, or a copy.
pub(super) type Slot = usize;

/// A tensor of a plan.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) value: ValueId,
    pub(super) layout: Layout,
    pub(super) place: Place,
}

/// A step, by numbers.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Input {
        input: InputId,
        to: Slot,
    },
    Copy {
        from: Slot,
        to: Slot,
    },
    /// `tensors` are for those arguments that are tensors, in their order.
    Call {
        call: CallId,
        place: Place,
        tensors: Vec<Slot>,
        results: Vec<Slot>,
    },
}

/// Where everything of a graph is, and the copies that this takes. Shown as text it has a line for each step.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) graph: CallGraph,
    pub(super) places: BTreeMap<Edge, Place>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) work: Vec<Work>,
    /// The tensors of the outputs, in their order.
    pub(super) outputs: Vec<Slot>,
}

impl Plan {
    /// Where an input lies, a call runs, an argument is taken, or an output is delivered. `None` of what the graph does not have, and of arguments that are no tensors.
    pub fn place(&self, edge: impl Into<Edge>) -> Option<&Place> {
        self.places.get(&edge.into())
    }

    /// What happens, in an order in which it can. Steps that do not need each other happen at the same time.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        self.work.iter().map(|work| match work {
            Work::Input { input, to } => {
                Step::Input { name: self.graph.inputs[input.0].name.clone(), place: self.tensors[*to].place.clone() }
            }
            Work::Copy { from, to } => Step::Copy {
                value: self.graph.value_name(self.tensors[*from].value),
                from: self.tensors[*from].place.clone(),
                to: self.tensors[*to].place.clone(),
            },
            Work::Call { call, place, .. } => {
                Step::Call { call: *call, function: self.graph.calls[call.0].function.clone(), place: place.clone() }
            }
        })
    }

    /// How many copies there are.
    pub fn copies(&self) -> usize {
        self.work.iter().filter(|work| matches!(work, Work::Copy { .. })).count()
    }

    pub(super) fn output_names(&self) -> impl Iterator<Item = (&str, Slot)> {
        self.graph.outputs.iter().map(|output| output.name.as_str()).zip(self.outputs.iter().copied())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps().try_for_each(|step| writeln!(f, "{step}"))?;
        (0..self.graph.outputs.len()).map(|output| Edge::Output(OutputId(output))).try_for_each(|edge| {
            let place = self.places.get(&edge);
            place.map_or(Ok(()), |place| writeln!(f, "{} on {place}", self.graph.name(edge)))
        })
    }
}
