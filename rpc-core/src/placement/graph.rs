//! The call graph: inputs, calls, outputs, and the constraints on their locations.

use std::fmt;

use super::error::{Origin, PlacementError};
use crate::device::virtual_device::VirtualDevice;
use crate::dlpack::{DataType, dense_size};
use crate::value::Value;

/// Constraint on a location: a session, a device, or both.
///
/// A virtual device converts to a constraint; [`in_session`](Self::in_session) adds the session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraint {
    pub(super) session: Option<String>,
    pub(super) device: VirtualDevice,
}

impl Constraint {
    /// Allows any device of the session of that name.
    pub fn session(name: &str) -> Self {
        Self::default().in_session(name)
    }

    /// Restricts the constraint to the session of that name.
    #[must_use]
    pub fn in_session(mut self, name: &str) -> Self {
        self.session = Some(name.to_owned());
        self
    }
}

impl<T: Into<VirtualDevice>> From<T> for Constraint {
    fn from(device: T) -> Self {
        Self { session: None, device: device.into() }
    }
}

impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.session {
            Some(session) if self.device.is_fully_unconstrained() => write!(f, "session '{session}'"),
            Some(session) => write!(f, "{} in session '{session}'", self.device),
            None => self.device.fmt(f),
        }
    }
}

/// Id of an input in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InputId(pub(super) usize);

/// Id of a call in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub(super) usize);

/// Id of an output in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OutputId(pub(super) usize);

/// A tensor of a graph: an input, or a result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ValueId {
    /// An input.
    Input(InputId),
    /// A result of a call, by its index from 0.
    Result(CallId, usize),
}

impl CallId {
    /// Returns the call's result with this index, from 0.
    pub fn result(self, index: usize) -> ValueId {
        ValueId::Result(self, index)
    }

    /// Returns the call's argument with this index, from 0, to put a constraint on it.
    pub fn argument(self, index: usize) -> Edge {
        Edge::Argument(self, index)
    }
}

impl From<InputId> for ValueId {
    fn from(input: InputId) -> Self {
        Self::Input(input)
    }
}

/// An argument of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A tensor.
    Tensor(ValueId),
    /// A value that travels with the call and contains no objects.
    Value(Value),
}

impl From<ValueId> for Argument {
    fn from(value: ValueId) -> Self {
        Self::Tensor(value)
    }
}

impl From<InputId> for Argument {
    fn from(input: InputId) -> Self {
        Self::Tensor(input.into())
    }
}

impl From<Value> for Argument {
    fn from(value: Value) -> Self {
        Self::Value(value)
    }
}

/// A part of a graph that has a location and can be constrained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Edge {
    /// The location of an input.
    Input(InputId),
    /// The location where a call runs and its results lie.
    Call(CallId),
    /// The location of an argument, if that is not where the call runs.
    Argument(CallId, usize),
    /// The location where an output is delivered.
    Output(OutputId),
}

impl From<InputId> for Edge {
    fn from(input: InputId) -> Self {
        Self::Input(input)
    }
}

impl From<CallId> for Edge {
    fn from(call: CallId) -> Self {
        Self::Call(call)
    }
}

impl From<OutputId> for Edge {
    fn from(output: OutputId) -> Self {
        Self::Output(output)
    }
}

impl From<ValueId> for Edge {
    /// Returns the edge of the input, or that of the call that makes the result.
    fn from(value: ValueId) -> Self {
        match value {
            ValueId::Input(input) => Self::Input(input),
            ValueId::Result(call, _) => Self::Call(call),
        }
    }
}

/// Type and dimensions of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
}

#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) name: String,
    pub(super) layout: Layout,
}

#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) function: String,
    pub(super) arguments: Vec<Argument>,
    pub(super) results: Vec<Layout>,
}

#[derive(Clone, Debug)]
pub(super) struct Output {
    pub(super) name: String,
    pub(super) value: ValueId,
}

#[derive(Clone, Debug)]
pub(super) struct RequiredConstraint {
    pub(super) edge: Edge,
    pub(super) constraint: Constraint,
    pub(super) reason: String,
}

/// A graph of inputs, calls and outputs, with constraints on their locations.
///
/// Ids belong to the graph that created them; [`plan`](Self::plan) rejects those of another graph
/// if it can tell.
#[derive(Clone, Debug, Default)]
pub struct CallGraph {
    pub(super) inputs: Vec<Input>,
    pub(super) calls: Vec<Call>,
    pub(super) outputs: Vec<Output>,
    pub(super) required: Vec<RequiredConstraint>,
    pub(super) default: Constraint,
}

impl CallGraph {
    /// Creates an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor that exists before the graph runs.
    pub fn input(&mut self, name: &str, dtype: DataType, shape: &[i64]) -> InputId {
        self.inputs.push(Input { name: name.to_owned(), layout: Layout { dtype, shape: shape.to_vec() } });
        InputId(self.inputs.len() - 1)
    }

    /// Adds a call of the function of that name. It takes `arguments` and then a tensor for each of
    /// its `results`, to write to: fresh ones that read as zeros. Its return value is ignored. The
    /// function must write to nothing else: it is unspecified if other calls see what it writes to
    /// its arguments.
    pub fn call(&mut self, function: &str, arguments: Vec<Argument>, results: &[(DataType, &[i64])]) -> CallId {
        let layout = |(dtype, shape): &(DataType, &[i64])| Layout { dtype: *dtype, shape: shape.to_vec() };
        let results = results.iter().map(layout).collect();
        self.calls.push(Call { function: function.to_owned(), arguments, results });
        CallId(self.calls.len() - 1)
    }

    /// Adds a tensor that the caller of the run gets back.
    pub fn output(&mut self, name: &str, value: impl Into<ValueId>) -> OutputId {
        self.outputs.push(Output { name: name.to_owned(), value: value.into() });
        OutputId(self.outputs.len() - 1)
    }

    /// Adds a constraint to `edge`, besides earlier ones. Errors about conflicts include `reason`.
    pub fn constrain(&mut self, edge: impl Into<Edge>, constraint: impl Into<Constraint>, reason: &str) {
        self.required.push(RequiredConstraint {
            edge: edge.into(),
            constraint: constraint.into(),
            reason: reason.to_owned(),
        });
    }

    /// Sets the location of everything that no constraint decides. It is ignored where no device
    /// satisfies it.
    pub fn default_location(&mut self, location: impl Into<Constraint>) {
        self.default = location.into();
    }

    /// Checks that everything the graph refers to exists, and that its tensors are possible.
    pub(super) fn check(&self) -> Result<(), PlacementError> {
        let wrong = |text: String| Err(PlacementError::Graph(text));
        let names = |names: Vec<&String>, what: &str| {
            let mut seen = std::collections::BTreeSet::new();
            let twice = names.into_iter().find(|name| !seen.insert(*name));
            twice.map_or(Ok(()), |name| wrong(format!("the graph has two {what}s called '{name}'")))
        };
        names(self.inputs.iter().map(|input| &input.name).collect(), "input")?;
        names(self.outputs.iter().map(|output| &output.name).collect(), "output")?;
        let layouts = self.inputs.iter().map(|input| &input.layout);
        for layout in layouts.chain(self.calls.iter().flat_map(|call| &call.results)) {
            if let Err(error) = dense_size(&layout.shape, layout.dtype) {
                return wrong(format!("a tensor of {} {:?} is impossible: {error}", layout.dtype, layout.shape));
            }
        }
        for (number, call) in self.calls.iter().enumerate() {
            for argument in &call.arguments {
                match argument {
                    // A call takes only results of earlier calls, so that there are no cycles.
                    Argument::Tensor(value) if !self.has(*value, number) => {
                        let what = self.name(Edge::Call(CallId(number)));
                        return wrong(format!("{what} takes a tensor that no earlier call makes"));
                    }
                    Argument::Value(value) if !value.handles().is_empty() => {
                        let what = self.name(Edge::Call(CallId(number)));
                        return wrong(format!("{what} takes an object of a session as a value; make it an input"));
                    }
                    _ => {}
                }
            }
        }
        for output in &self.outputs {
            if !self.has(output.value, self.calls.len()) {
                return wrong(format!("output '{}' is of a tensor that the graph does not have", output.name));
            }
        }
        for required in &self.required {
            let exists = match required.edge {
                Edge::Input(InputId(input)) => input < self.inputs.len(),
                Edge::Call(CallId(call)) => call < self.calls.len(),
                Edge::Argument(CallId(call), index) => self
                    .calls
                    .get(call)
                    .and_then(|call| call.arguments.get(index))
                    .is_some_and(|argument| matches!(argument, Argument::Tensor(_))),
                Edge::Output(OutputId(output)) => output < self.outputs.len(),
            };
            if !exists {
                let RequiredConstraint { edge, constraint, .. } = required;
                return wrong(format!("{constraint} is required of {edge:?}, which is not a tensor of the graph"));
            }
        }
        Ok(())
    }

    /// Returns true if the graph has `value` before its call with this index.
    fn has(&self, value: ValueId, call: usize) -> bool {
        match value {
            ValueId::Input(InputId(input)) => input < self.inputs.len(),
            ValueId::Result(CallId(made), index) => made < call && index < self.calls[made].results.len(),
        }
    }

    /// Returns the name of an edge for messages.
    pub(super) fn name(&self, edge: Edge) -> String {
        match edge {
            Edge::Input(InputId(input)) => format!("input '{}'", self.inputs[input].name),
            Edge::Call(CallId(call)) => format!("call #{call} '{}'", self.calls[call].function),
            Edge::Argument(call, index) => format!("argument #{index} of {}", self.name(Edge::Call(call))),
            Edge::Output(OutputId(output)) => format!("output '{}'", self.outputs[output].name),
        }
    }

    pub(super) fn value_name(&self, value: ValueId) -> String {
        match value {
            ValueId::Input(input) => self.name(Edge::Input(input)),
            ValueId::Result(call, index) => format!("result #{index} of {}", self.name(Edge::Call(call))),
        }
    }

    pub(super) fn layout(&self, value: ValueId) -> &Layout {
        match value {
            ValueId::Input(InputId(input)) => &self.inputs[input].layout,
            ValueId::Result(CallId(call), index) => &self.calls[call].results[index],
        }
    }

    pub(super) fn origin(&self, required: &RequiredConstraint) -> Origin {
        Origin {
            constraint: required.constraint.to_string(),
            edge: self.name(required.edge),
            reason: required.reason.clone(),
        }
    }
}
