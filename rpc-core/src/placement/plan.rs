//! The plan: the location of each part of a graph, and the steps in an order in which they can run.

use std::collections::BTreeMap;
use std::fmt;

use super::graph::{CallGraph, CallId, Edge, InputId, Layout, OutputId, ValueId};
use crate::device::target::Target;
use crate::device::virtual_device::VirtualDevice;
use crate::dlpack::Device;

/// The location that was decided for a part of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// Name of the session.
    pub session: String,
    /// Device, in the numbering of that session.
    pub device: Device,
    /// Memory scope of the device.
    pub memory_scope: String,
    /// Target of code for the device.
    pub target: Target,
}

impl Location {
    /// Returns the device as a virtual one, fully constrained.
    pub fn virtual_device(&self) -> VirtualDevice {
        let scope = VirtualDevice::builder().memory_scope(&*self.memory_scope).build().unwrap_or_default();
        VirtualDevice::from(self.device).default_to(&self.target.clone().into()).default_to(&scope)
    }

    /// Returns true if data at one location is also at the other: the same memory.
    pub(super) fn is_memory_of(&self, other: &Self) -> bool {
        (&self.session, self.device, &self.memory_scope) == (&other.session, other.device, &other.memory_scope)
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.session, self.device, self.memory_scope)
    }
}

/// A step of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Provides an input, writing it to a fresh tensor if needed.
    Input {
        /// Name of the input.
        name: String,
        /// Location of the input.
        location: Location,
    },
    /// Copies a tensor.
    Copy {
        /// The tensor, such as `result #0 of call #1 'matmul'`.
        value: String,
        /// Source.
        from: Location,
        /// Destination.
        to: Location,
    },
    /// Calls a function.
    Call {
        /// Id of the call in the graph.
        call: CallId,
        /// Name of the function.
        function: String,
        /// Location where it runs.
        location: Location,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input { name, location } => write!(f, "input '{name}' on {location}"),
            Self::Copy { value, from, to } => write!(f, "copy {value} from {from} to {to}"),
            Self::Call { call, function, location } => write!(f, "call #{} '{function}' on {location}", call.0),
        }
    }
}

/// Index of a tensor in a plan: an input, a result, or a copy.
pub(super) type TensorIndex = usize;

/// A tensor of a plan.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) value: ValueId,
    pub(super) layout: Layout,
    pub(super) location: Location,
}

/// A step, by indices.
#[derive(Clone, Debug)]
pub(super) enum PlannedStep {
    Input {
        input: InputId,
        to: TensorIndex,
    },
    Copy {
        from: TensorIndex,
        to: TensorIndex,
    },
    /// `tensors` are for those arguments that are tensors, in their order.
    Call {
        call: CallId,
        location: Location,
        tensors: Vec<TensorIndex>,
        results: Vec<TensorIndex>,
    },
}

/// Locations of all parts of a graph, and the copies that they need. Its text form has a line for
/// each step.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) graph: CallGraph,
    pub(super) locations: BTreeMap<Edge, Location>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) planned: Vec<PlannedStep>,
    /// The tensors of the outputs, in their order.
    pub(super) outputs: Vec<TensorIndex>,
}

impl Plan {
    /// Returns the location of an edge. `None` for edges that the graph does not have, and for
    /// arguments that are no tensors.
    pub fn location(&self, edge: impl Into<Edge>) -> Option<&Location> {
        self.locations.get(&edge.into())
    }

    /// Returns the steps, in an order in which they can run. Independent steps run at the same
    /// time.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        self.planned.iter().map(|step| match step {
            PlannedStep::Input { input, to } => Step::Input {
                name: self.graph.inputs[input.0].name.clone(),
                location: self.tensors[*to].location.clone(),
            },
            PlannedStep::Copy { from, to } => Step::Copy {
                value: self.graph.value_name(self.tensors[*from].value),
                from: self.tensors[*from].location.clone(),
                to: self.tensors[*to].location.clone(),
            },
            PlannedStep::Call { call, location, .. } => Step::Call {
                call: *call,
                function: self.graph.calls[call.0].function.clone(),
                location: location.clone(),
            },
        })
    }

    /// Returns the number of copies.
    pub fn copies(&self) -> usize {
        self.planned.iter().filter(|step| matches!(step, PlannedStep::Copy { .. })).count()
    }

    pub(super) fn output_names(&self) -> impl Iterator<Item = (&str, TensorIndex)> {
        self.graph.outputs.iter().map(|output| output.name.as_str()).zip(self.outputs.iter().copied())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps().try_for_each(|step| writeln!(f, "{step}"))?;
        (0..self.graph.outputs.len()).map(|output| Edge::Output(OutputId(output))).try_for_each(|edge| {
            let location = self.locations.get(&edge);
            location.map_or(Ok(()), |location| writeln!(f, "{} on {location}", self.graph.name(edge)))
        })
    }
}
