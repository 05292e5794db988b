//! The solver, which turns constraints into locations: by unification, then defaults, then copies
//! for the rest.
//!
//! Inputs and calls are the nodes. The constraints on one node have to agree. Then each use of a
//! tensor, in the order of the graph, merges the node that makes it and the node that uses it into
//! one class, if their constraints agree and some device satisfies both; otherwise it becomes a
//! copy.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::error::{Origin, PlacementError};
use super::graph::{
    Argument, CallGraph, CallId, Constraint, Edge, InputId, Layout, OutputId, RequiredConstraint, ValueId,
};
use super::plan::{Location, Plan, PlannedStep, Tensor, TensorIndex};
use super::site::Site;
use crate::device::target::Target;
use crate::device::virtual_device::{DeviceDescription, GLOBAL, VirtualDevice};
use crate::dlpack::DeviceType;

type Result<T, E = PlacementError> = std::result::Result<T, E>;

impl CallGraph {
    /// Decides all locations, among the devices of `sites`. The plan depends only on the graph and
    /// the sites, in their order.
    ///
    /// # Errors
    ///
    /// Constraints that disagree, or that no device satisfies; a graph that refers to something
    /// that it does not have, or whose tensors are impossible.
    pub fn plan(&self, sites: &[Site]) -> Result<Plan, PlacementError> {
        self.check()?;
        solve(self, sites)
    }
}

fn solve(graph: &CallGraph, sites: &[Site]) -> Result<Plan> {
    for (number, site) in sites.iter().enumerate() {
        if sites[..number].iter().any(|other| other.name == site.name) {
            return Err(PlacementError::Graph(format!("there are two sites called '{}'", site.name)));
        }
    }
    let mut solver = Solver {
        graph,
        sites,
        parents: (0..graph.inputs.len() + graph.calls.len()).collect(),
        classes: vec![Class::default(); graph.inputs.len() + graph.calls.len()],
        arguments: BTreeMap::new(),
        outputs: vec![Class::default(); graph.outputs.len()],
    };
    solver.take_constraints()?;
    solver.unify();
    let locations = solver.decide()?;
    Ok(insert_copies(graph, locations))
}

/// A constraint on one field, and the index of the request that made it.
type Known<T> = Option<(T, usize)>;

/// All constraints on one location, each with its request.
#[derive(Clone, Default)]
struct Class {
    session: Known<String>,
    device_type: Known<DeviceType>,
    id: Known<i32>,
    target: Known<Target>,
    scope: Known<String>,
    /// Arguments that need a device of their own in the same session.
    beside: Vec<(CallId, usize)>,
}

/// The field on which two classes disagree, and the requests of both.
struct Disagreement {
    field: &'static str,
    requests: (usize, usize),
}

impl Class {
    fn of(constraint: &Constraint, request: usize) -> Self {
        let Constraint { session, device } = constraint;
        Self {
            session: session.clone().map(|session| (session, request)),
            device_type: device.device_type().map(|device_type| (device_type, request)),
            id: device.virtual_device_id().map(|id| (id, request)),
            target: device.target().map(|target| (target.clone(), request)),
            scope: device.memory_scope().map(|scope| (scope.to_owned(), request)),
            beside: Vec::new(),
        }
    }

    /// Returns all constraints of both, like [`VirtualDevice::join`], and keeps the requests.
    fn join(&self, other: &Self) -> Result<Self, Disagreement> {
        fn agree<T: Clone + PartialEq>(
            field: &'static str,
            a: &Known<T>,
            b: &Known<T>,
        ) -> Result<Known<T>, Disagreement> {
            match (a, b) {
                (Some((a, first)), Some((b, second))) if a != b => {
                    Err(Disagreement { field, requests: (*first, *second) })
                }
                (Some(_), _) => Ok(a.clone()),
                (None, _) => Ok(b.clone()),
            }
        }
        Ok(Self {
            session: agree("session", &self.session, &other.session)?,
            device_type: agree("device type", &self.device_type, &other.device_type)?,
            id: agree("device number", &self.id, &other.id)?,
            target: agree("target", &self.target, &other.target)?,
            scope: agree("memory scope", &self.scope, &other.scope)?,
            beside: [&self.beside[..], &other.beside].concat(),
        })
    }

    fn device(&self) -> VirtualDevice {
        fn value<T: Clone>(known: &Known<T>) -> Option<T> {
            known.as_ref().map(|(value, _)| value.clone())
        }
        VirtualDevice::of_agreeing(value(&self.device_type), value(&self.id), value(&self.target), value(&self.scope))
    }

    fn session(&self) -> Option<&str> {
        self.session.as_ref().map(|(session, _)| session.as_str())
    }

    fn constraint(&self) -> Constraint {
        Constraint { session: self.session().map(str::to_owned), device: self.device() }
    }

    /// Returns the requests that constrain this location, in their order.
    fn requests(&self) -> Vec<usize> {
        fn request<T>(known: &Known<T>) -> Option<usize> {
            known.as_ref().map(|(_, request)| *request)
        }
        let Self { session, device_type, id, target, scope, .. } = self;
        let mut requests: Vec<_> =
            [request(session), request(device_type), request(id), request(target), request(scope)]
                .into_iter()
                .flatten()
                .collect();
        requests.sort_unstable();
        requests.dedup();
        requests
    }
}

struct Solver<'a> {
    graph: &'a CallGraph,
    sites: &'a [Site],
    /// Parent of each node in the union-find forest; a root is its own parent.
    parents: Vec<usize>,
    /// Constraints of each class, valid at its root.
    classes: Vec<Class>,
    /// Constraints of arguments that have their own.
    arguments: BTreeMap<(CallId, usize), Class>,
    outputs: Vec<Class>,
}

impl Solver<'_> {
    fn node(&self, value: ValueId) -> usize {
        match value {
            ValueId::Input(InputId(input)) => input,
            ValueId::Result(CallId(call), _) => self.graph.inputs.len() + call,
        }
    }

    fn node_of(&self, call: CallId) -> usize {
        self.graph.inputs.len() + call.0
    }

    fn class_of(&self, mut node: usize) -> usize {
        while self.parents[node] != node {
            node = self.parents[node];
        }
        node
    }

    fn origin(&self, request: usize) -> Origin {
        self.graph.origin(&self.graph.required[request])
    }

    fn conflict(&self, edge: Edge, disagreement: &Disagreement) -> PlacementError {
        let Disagreement { field, requests: (first, second) } = *disagreement;
        PlacementError::Conflict {
            edge: self.graph.name(edge),
            field,
            origins: Box::new((self.origin(first), self.origin(second))),
        }
    }

    /// Adds each constraint to the class of its edge.
    fn take_constraints(&mut self) -> Result<()> {
        for (request, RequiredConstraint { edge, constraint, .. }) in self.graph.required.iter().enumerate() {
            let required = Class::of(constraint, request);
            let location = match *edge {
                Edge::Input(InputId(input)) => &mut self.classes[input],
                Edge::Call(CallId(call)) => &mut self.classes[self.graph.inputs.len() + call],
                Edge::Output(OutputId(output)) => &mut self.outputs[output],
                Edge::Argument(call, index) => self.arguments.entry((call, index)).or_default(),
            };
            match location.join(&required) {
                Ok(joined) => *location = joined,
                Err(disagreement) => return Err(self.conflict(*edge, &disagreement)),
            }
        }
        // An argument lies in the session of its call.
        for ((call, index), class) in &self.arguments {
            let node = self.graph.inputs.len() + call.0;
            let beside = vec![(*call, *index)];
            let session = Class { session: class.session.clone(), beside, ..Class::default() };
            match self.classes[node].join(&session) {
                Ok(joined) => self.classes[node] = joined,
                Err(disagreement) => return Err(self.conflict(Edge::Argument(*call, *index), &disagreement)),
            }
        }
        Ok(())
    }

    /// Merges the class that makes a tensor with the class that uses it, wherever that is possible.
    fn unify(&mut self) {
        let graph = self.graph;
        for (number, call) in graph.calls.iter().enumerate() {
            for (index, argument) in call.arguments.iter().enumerate() {
                let Argument::Tensor(value) = argument else { continue };
                let (made, used) = (self.class_of(self.node(*value)), self.class_of(self.node_of(CallId(number))));
                if made == used {
                    continue;
                }
                if let Some(own) = self.arguments.get(&(CallId(number), index))
                    && !self.classes[used].join(own).is_ok_and(|joined| joined.device() == self.classes[used].device())
                {
                    // Not where the call runs, but in its session.
                    let own = Class { session: self.classes[used].session.clone(), ..own.clone() };
                    if let Some(joined) = self.possible(&self.classes[made], &own) {
                        self.classes[made] = joined;
                    }
                    continue;
                }
                if let Some(joined) = self.possible(&self.classes[made], &self.classes[used]) {
                    self.parents[made.max(used)] = made.min(used);
                    self.classes[made.min(used)] = joined;
                }
            }
        }
        for (output, class) in graph.outputs.iter().zip(&self.outputs) {
            let made = self.class_of(self.node(output.value));
            if let Some(joined) = self.possible(&self.classes[made], class) {
                self.classes[made] = joined;
            }
        }
    }

    /// Returns the constraints of both, if some device satisfies them.
    fn possible(&self, a: &Class, b: &Class) -> Option<Class> {
        let joined = a.join(b).ok()?;
        let exists = self.candidates(&joined.constraint(), &joined.beside).next().is_some();
        exists.then_some(joined)
    }

    /// Returns the locations that satisfy a constraint, the preferred ones first, in sessions that
    /// also have a device for all arguments `beside`.
    fn candidates(&self, wanted: &Constraint, beside: &[(CallId, usize)]) -> impl Iterator<Item = Location> {
        let has_room = move |site: &&Site| {
            beside.iter().all(|argument| {
                let wanted = self.arguments[argument].device();
                site.devices.iter().any(|device| device.satisfies(&wanted))
            })
        };
        let sites = self.sites.iter().filter(|site| wanted.session.as_ref().is_none_or(|name| *name == site.name));
        let sites = sites.filter(has_room);
        let devices = sites.flat_map(|site| site.devices.iter().map(move |device| (site, device)));
        let satisfying = devices.filter(|(_, device)| device.satisfies(&wanted.device));
        satisfying.map(|(site, device)| location_on(site, device, wanted.device.memory_scope()))
    }

    fn resolve(&self, edge: Edge, class: &Class) -> Result<Location> {
        let wanted = class.constraint();
        let Constraint { session, device } = &self.graph.default;
        // The default gives way: first its device, then its session.
        let with_session = Constraint { session: wanted.session.clone().or_else(|| session.clone()), ..wanted.clone() };
        let with_both = Constraint { device: wanted.device.default_to(device), ..with_session.clone() };
        let found = [with_both, with_session, wanted.clone()]
            .iter()
            .find_map(|wanted| self.candidates(wanted, &class.beside).next());
        found.ok_or_else(|| self.no_device(edge, &wanted, class))
    }

    fn no_device(&self, edge: Edge, wanted: &Constraint, class: &Class) -> PlacementError {
        let device = |site: &Site, device: &DeviceDescription| format!("{device} in session '{}'", site.name);
        let devices = self.sites.iter().flat_map(|site| site.devices.iter().map(move |one| device(site, one)));
        let mut available = devices.collect::<Vec<_>>().join(", ");
        if available.is_empty() {
            "none".clone_into(&mut available);
        }
        let mut wanted = wanted.to_string();
        let mut requests = class.requests();
        for argument in &class.beside {
            let class = &self.arguments[argument];
            _ = write!(wanted, " beside {}", class.device());
            requests.extend(class.requests());
        }
        requests.sort_unstable();
        requests.dedup();
        PlacementError::NoDevice {
            edge: self.graph.name(edge),
            wanted,
            origins: requests.into_iter().map(|request| self.origin(request)).collect(),
            available,
        }
    }

    fn decide(&self) -> Result<BTreeMap<Edge, Location>> {
        let mut locations = BTreeMap::new();
        let mut of_classes: BTreeMap<usize, Location> = BTreeMap::new();
        // Calls first: inputs without constraints are placed where they are used.
        for call in (0..self.graph.calls.len()).map(CallId) {
            let class = self.class_of(self.node_of(call));
            let location = match of_classes.get(&class) {
                Some(location) => location.clone(),
                None => self.resolve(Edge::Call(call), &self.classes[class])?,
            };
            of_classes.insert(class, location.clone());
            for (index, argument) in self.graph.calls[call.0].arguments.iter().enumerate() {
                if matches!(argument, Argument::Tensor(_)) {
                    let there = self.argument(call, index, &location)?;
                    locations.insert(Edge::Argument(call, index), there);
                }
            }
            locations.insert(Edge::Call(call), location);
        }
        for input in (0..self.graph.inputs.len()).map(InputId) {
            let class = self.class_of(input.0);
            let location = match of_classes.get(&class) {
                Some(location) => location.clone(),
                None => match self.first_use(input, &self.classes[class], &locations) {
                    Some(location) => location,
                    None => self.resolve(Edge::Input(input), &self.classes[class])?,
                },
            };
            locations.insert(Edge::Input(input), location);
        }
        for (number, class) in self.outputs.iter().enumerate() {
            let edge = Edge::Output(OutputId(number));
            let made = &locations[&Edge::from(self.graph.outputs[number].value)];
            // The location of the tensor, or one that it is copied to anyway.
            let mut there = std::iter::once(made).chain(self.uses(self.graph.outputs[number].value, &locations));
            let location = there.find(|location| self.satisfies(location, class)).cloned();
            drop(there);
            let location = location.map_or_else(|| self.resolve(edge, class), Ok)?;
            locations.insert(edge, location);
        }
        Ok(locations)
    }

    /// Returns the location where a call at `location` takes its argument.
    fn argument(&self, call: CallId, index: usize, location: &Location) -> Result<Location> {
        let Some(class) = self.arguments.get(&(call, index)) else { return Ok(location.clone()) };
        if self.satisfies(location, class) {
            return Ok(location.clone());
        }
        let wanted = Constraint { session: Some(location.session.clone()), device: class.device() };
        // Open fields are those of the call, as far as there is such a device.
        let of_device = Constraint { device: wanted.device.default_to(&location.device.into()), ..wanted.clone() };
        let as_call = Constraint { device: wanted.device.default_to(&location.virtual_device()), ..wanted.clone() };
        let found = [as_call, of_device, wanted.clone()].iter().find_map(|wanted| self.candidates(wanted, &[]).next());
        found.ok_or_else(|| self.no_device(Edge::Argument(call, index), &wanted, class))
    }

    /// Returns the first location that uses the input, if the input may lie there.
    fn first_use(&self, input: InputId, class: &Class, locations: &BTreeMap<Edge, Location>) -> Option<Location> {
        self.uses(input.into(), locations).find(|location| self.satisfies(location, class)).cloned()
    }

    /// Returns the locations where calls take a value, in the order of the calls.
    fn uses<'b>(&self, value: ValueId, locations: &'b BTreeMap<Edge, Location>) -> impl Iterator<Item = &'b Location> {
        let edges = self.graph.calls.iter().enumerate().flat_map(move |(call, what)| {
            let arguments = what.arguments.iter().enumerate();
            let takes = move |(_, argument): &(usize, &Argument)| **argument == Argument::Tensor(value);
            arguments.filter(takes).map(move |(index, _)| Edge::Argument(CallId(call), index))
        });
        edges.filter_map(|edge| locations.get(&edge))
    }

    fn satisfies(&self, location: &Location, class: &Class) -> bool {
        let wanted = class.constraint();
        // The memory scope is filled in from the location, since it is that one.
        let device = wanted.device.default_to(&location.virtual_device());
        self.candidates(&Constraint { device, ..wanted }, &[]).any(|candidate| candidate.is_memory_of(location))
    }
}

fn location_on(site: &Site, device: &DeviceDescription, scope: Option<&str>) -> Location {
    Location {
        session: site.name.clone(),
        device: device.device,
        memory_scope: scope.unwrap_or(GLOBAL).to_owned(),
        target: device.target.clone(),
    }
}

/// Builds the steps: inputs, then calls in their order, each behind the copies that it needs.
fn insert_copies(graph: &CallGraph, locations: BTreeMap<Edge, Location>) -> Plan {
    let mut plan =
        Plan { graph: graph.clone(), locations, tensors: Vec::new(), planned: Vec::new(), outputs: Vec::new() };
    let mut made: BTreeMap<ValueId, Vec<TensorIndex>> = BTreeMap::new();
    for input in (0..graph.inputs.len()).map(InputId) {
        let location = plan.locations[&Edge::Input(input)].clone();
        let to = tensor(&mut plan, &mut made, input.into(), location);
        plan.planned.push(PlannedStep::Input { input, to });
    }
    for (number, call) in graph.calls.iter().enumerate() {
        let id = CallId(number);
        let mut tensors = Vec::new();
        for (index, argument) in call.arguments.iter().enumerate() {
            if let Argument::Tensor(value) = argument {
                let location = plan.locations[&Edge::Argument(id, index)].clone();
                tensors.push(at(&mut plan, &mut made, *value, location));
            }
        }
        let location = plan.locations[&Edge::Call(id)].clone();
        let results =
            (0..call.results.len()).map(|index| tensor(&mut plan, &mut made, id.result(index), location.clone()));
        let results = results.collect();
        plan.planned.push(PlannedStep::Call { call: id, location, tensors, results });
    }
    for (number, output) in graph.outputs.iter().enumerate() {
        let location = plan.locations[&Edge::Output(OutputId(number))].clone();
        let slot = at(&mut plan, &mut made, output.value, location);
        plan.outputs.push(slot);
    }
    plan
}

fn tensor(
    plan: &mut Plan,
    made: &mut BTreeMap<ValueId, Vec<TensorIndex>>,
    value: ValueId,
    location: Location,
) -> TensorIndex {
    let layout: Layout = plan.graph.layout(value).clone();
    plan.tensors.push(Tensor { value, layout, location });
    made.entry(value).or_default().push(plan.tensors.len() - 1);
    plan.tensors.len() - 1
}

/// Returns the tensor of `value` at `location`: the original, or the single copy there.
fn at(
    plan: &mut Plan,
    made: &mut BTreeMap<ValueId, Vec<TensorIndex>>,
    value: ValueId,
    location: Location,
) -> TensorIndex {
    let there = made[&value].iter().find(|slot| plan.tensors[**slot].location.is_memory_of(&location));
    if let Some(slot) = there {
        return *slot;
    }
    let from = made[&value][0];
    let to = tensor(plan, made, value, location);
    plan.planned.push(PlannedStep::Copy { from, to });
    to
}
