//! From constraints to places: by unification, then defaults, then copies for what is left.
//!
//! Inputs and calls are the nodes. Constraints on one node have to agree. Then each use of a tensor, in the order of the graph, makes one class of the node that
//! makes it and the node that uses it, if their constraints agree and some device satisfies both; otherwise it becomes a copy.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::error::{Origin, PlacementError};
use super::graph::{Argument, Asked, CallGraph, CallId, Constraint, Edge, InputId, Layout, OutputId, ValueId};
use super::plan::{Place, Plan, Slot, Tensor, Work};
use super::site::Site;
use crate::device::target::Target;
use crate::device::virtual_device::{DeviceDescription, GLOBAL, VirtualDevice};
use crate::dlpack::DeviceType;

type Result<T, E = PlacementError> = std::result::Result<T, E>;

impl CallGraph {
    /// Decides where everything is, among the devices of `sites`. The plan depends on nothing but the graph and the sites, in their order.
    ///
    /// # Errors
    ///
    /// Constraints that disagree, or that no device satisfies; a graph that refers to what it does not have, or whose tensors are impossible.
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
    let places = solver.decide()?;
    Ok(insert_copies(graph, places))
}

/// A constraint on one field, and the number of who asked for it.
type Known<T> = Option<(T, usize)>;

/// All that is asked of one place, and by whom.
#[derive(Clone, Default)]
struct Class {
    session: Known<String>,
    device_type: Known<DeviceType>,
    id: Known<i32>,
    target: Known<Target>,
    scope: Known<String>,
    /// The arguments that have to find a device of their own in the same session.
    beside: Vec<(CallId, usize)>,
}

/// On which field two disagree, and who asked for what the first and the second have there.
struct Disagreement {
    field: &'static str,
    askers: (usize, usize),
}

impl Class {
    fn of(constraint: &Constraint, asker: usize) -> Self {
        let Constraint { session, device } = constraint;
        Self {
            session: session.clone().map(|session| (session, asker)),
            device_type: device.device_type().map(|device_type| (device_type, asker)),
            id: device.virtual_device_id().map(|id| (id, asker)),
            target: device.target().map(|target| (target.clone(), asker)),
            scope: device.memory_scope().map(|scope| (scope.to_owned(), asker)),
            beside: Vec::new(),
        }
    }

    /// All constraints of both: [`VirtualDevice::join`], with a memory of who asked.
    fn join(&self, other: &Self) -> Result<Self, Disagreement> {
        fn agree<T: Clone + PartialEq>(
            field: &'static str,
            a: &Known<T>,
            b: &Known<T>,
        ) -> Result<Known<T>, Disagreement> {
            match (a, b) {
                (Some((a, first)), Some((b, second))) if a != b => {
                    Err(Disagreement { field, askers: (*first, *second) })
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

    /// Who asked for anything here, in their order.
    fn askers(&self) -> Vec<usize> {
        fn asker<T>(known: &Known<T>) -> Option<usize> {
            known.as_ref().map(|(_, asker)| *asker)
        }
        let Self { session, device_type, id, target, scope, .. } = self;
        let mut askers: Vec<_> = [asker(session), asker(device_type), asker(id), asker(target), asker(scope)]
            .into_iter()
            .flatten()
            .collect();
        askers.sort_unstable();
        askers.dedup();
        askers
    }
}

struct Solver<'a> {
    graph: &'a CallGraph,
    sites: &'a [Site],
    /// Of each node, another one of its class; of one in each class itself.
    parents: Vec<usize>,
    /// Of those.
    classes: Vec<Class>,
    /// Of arguments that have constraints of their own.
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

    fn origin(&self, asker: usize) -> Origin {
        self.graph.origin(&self.graph.asked[asker])
    }

    fn conflict(&self, edge: Edge, disagreement: &Disagreement) -> PlacementError {
        let Disagreement { field, askers: (first, second) } = *disagreement;
        PlacementError::Conflict {
            edge: self.graph.name(edge),
            field,
            origins: Box::new((self.origin(first), self.origin(second))),
        }
    }

    /// Puts each constraint where it belongs.
    fn take_constraints(&mut self) -> Result<()> {
        for (asker, Asked { edge, constraint, .. }) in self.graph.asked.iter().enumerate() {
            let asked = Class::of(constraint, asker);
            let place = match *edge {
                Edge::Input(InputId(input)) => &mut self.classes[input],
                Edge::Call(CallId(call)) => &mut self.classes[self.graph.inputs.len() + call],
                Edge::Output(OutputId(output)) => &mut self.outputs[output],
                Edge::Argument(call, index) => self.arguments.entry((call, index)).or_default(),
            };
            match place.join(&asked) {
                Ok(joined) => *place = joined,
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

    /// Makes one place of what is made and where it is used, wherever that is possible.
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
                    // Elsewhere than the call, but in its session.
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

    /// What satisfies both, if some device does.
    fn possible(&self, a: &Class, b: &Class) -> Option<Class> {
        let joined = a.join(b).ok()?;
        let exists = self.candidates(&joined.constraint(), &joined.beside).next().is_some();
        exists.then_some(joined)
    }

    /// The places that satisfy a constraint, the preferred ones first, in sessions that also have a device for all arguments `beside`.
    fn candidates(&self, wanted: &Constraint, beside: &[(CallId, usize)]) -> impl Iterator<Item = Place> {
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
        satisfying.map(|(site, device)| place_on(site, device, wanted.device.memory_scope()))
    }

    fn resolve(&self, edge: Edge, class: &Class) -> Result<Place> {
        let wanted = class.constraint();
        let Constraint { session, device } = &self.graph.default;
        // The default gives way, first the device and then the session.
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
        let mut there_are = devices.collect::<Vec<_>>().join(", ");
        if there_are.is_empty() {
            "none".clone_into(&mut there_are);
        }
        let mut wanted = wanted.to_string();
        let mut askers = class.askers();
        for argument in &class.beside {
            let class = &self.arguments[argument];
            _ = write!(wanted, " beside {}", class.device());
            askers.extend(class.askers());
        }
        askers.sort_unstable();
        askers.dedup();
        PlacementError::NoDevice {
            edge: self.graph.name(edge),
            wanted,
            origins: askers.into_iter().map(|asker| self.origin(asker)).collect(),
            there_are,
        }
    }

    fn decide(&self) -> Result<BTreeMap<Edge, Place>> {
        let mut places = BTreeMap::new();
        let mut of_classes: BTreeMap<usize, Place> = BTreeMap::new();
        // Calls first: inputs that nothing else is known of go where they are used.
        for call in (0..self.graph.calls.len()).map(CallId) {
            let class = self.class_of(self.node_of(call));
            let place = match of_classes.get(&class) {
                Some(place) => place.clone(),
                None => self.resolve(Edge::Call(call), &self.classes[class])?,
            };
            of_classes.insert(class, place.clone());
            for (index, argument) in self.graph.calls[call.0].arguments.iter().enumerate() {
                if matches!(argument, Argument::Tensor(_)) {
                    let there = self.argument(call, index, &place)?;
                    places.insert(Edge::Argument(call, index), there);
                }
            }
            places.insert(Edge::Call(call), place);
        }
        for input in (0..self.graph.inputs.len()).map(InputId) {
            let class = self.class_of(input.0);
            let place = match of_classes.get(&class) {
                Some(place) => place.clone(),
                None => match self.first_use(input, &self.classes[class], &places) {
                    Some(place) => place,
                    None => self.resolve(Edge::Input(input), &self.classes[class])?,
                },
            };
            places.insert(Edge::Input(input), place);
        }
        for (number, class) in self.outputs.iter().enumerate() {
            let edge = Edge::Output(OutputId(number));
            let made = &places[&Edge::from(self.graph.outputs[number].value)];
            // Where it is, or is copied to anyway.
            let mut there = std::iter::once(made).chain(self.uses(self.graph.outputs[number].value, &places));
            let place = there.find(|place| self.satisfies(place, class)).cloned();
            drop(there);
            let place = place.map_or_else(|| self.resolve(edge, class), Ok)?;
            places.insert(edge, place);
        }
        Ok(places)
    }

    /// Where a call at `place` takes its argument.
    fn argument(&self, call: CallId, index: usize, place: &Place) -> Result<Place> {
        let Some(class) = self.arguments.get(&(call, index)) else { return Ok(place.clone()) };
        if self.satisfies(place, class) {
            return Ok(place.clone());
        }
        let wanted = Constraint { session: Some(place.session.clone()), device: class.device() };
        // What is open is as for the call, as far as there is such a device.
        let of_device = Constraint { device: wanted.device.default_to(&place.device.into()), ..wanted.clone() };
        let as_call = Constraint { device: wanted.device.default_to(&place.virtual_device()), ..wanted.clone() };
        let found = [as_call, of_device, wanted.clone()].iter().find_map(|wanted| self.candidates(wanted, &[]).next());
        found.ok_or_else(|| self.no_device(Edge::Argument(call, index), &wanted, class))
    }

    /// The first place that takes the input, if it may lie there.
    fn first_use(&self, input: InputId, class: &Class, places: &BTreeMap<Edge, Place>) -> Option<Place> {
        self.uses(input.into(), places).find(|place| self.satisfies(place, class)).cloned()
    }

    /// Where calls take a value, in their order.
    fn uses<'b>(&self, value: ValueId, places: &'b BTreeMap<Edge, Place>) -> impl Iterator<Item = &'b Place> {
        let edges = self.graph.calls.iter().enumerate().flat_map(move |(call, what)| {
            let arguments = what.arguments.iter().enumerate();
            let takes = move |(_, argument): &(usize, &Argument)| **argument == Argument::Tensor(value);
            arguments.filter(takes).map(move |(index, _)| Edge::Argument(CallId(call), index))
        });
        edges.filter_map(|edge| places.get(&edge))
    }

    fn satisfies(&self, place: &Place, class: &Class) -> bool {
        let wanted = class.constraint();
        // As if the memory were asked for too, since the place is that one.
        let device = wanted.device.default_to(&place.virtual_device());
        self.candidates(&Constraint { device, ..wanted }, &[]).any(|candidate| candidate.is_memory_of(place))
    }
}

fn place_on(site: &Site, device: &DeviceDescription, scope: Option<&str>) -> Place {
    Place {
        session: site.name.clone(),
        device: device.device,
        memory_scope: scope.unwrap_or(GLOBAL).to_owned(),
        target: device.target.clone(),
    }
}

/// The steps: inputs, then calls in their order, each behind the copies that it needs.
fn insert_copies(graph: &CallGraph, places: BTreeMap<Edge, Place>) -> Plan {
    let mut plan = Plan { graph: graph.clone(), places, tensors: Vec::new(), work: Vec::new(), outputs: Vec::new() };
    let mut made: BTreeMap<ValueId, Vec<Slot>> = BTreeMap::new();
    for input in (0..graph.inputs.len()).map(InputId) {
        let place = plan.places[&Edge::Input(input)].clone();
        let to = tensor(&mut plan, &mut made, input.into(), place);
        plan.work.push(Work::Input { input, to });
    }
    for (number, call) in graph.calls.iter().enumerate() {
        let id = CallId(number);
        let mut tensors = Vec::new();
        for (index, argument) in call.arguments.iter().enumerate() {
            if let Argument::Tensor(value) = argument {
                let place = plan.places[&Edge::Argument(id, index)].clone();
                tensors.push(at(&mut plan, &mut made, *value, place));
            }
        }
        let place = plan.places[&Edge::Call(id)].clone();
        let results =
            (0..call.results.len()).map(|index| tensor(&mut plan, &mut made, id.result(index), place.clone()));
        let results = results.collect();
        plan.work.push(Work::Call { call: id, place, tensors, results });
    }
    for (number, output) in graph.outputs.iter().enumerate() {
        let place = plan.places[&Edge::Output(OutputId(number))].clone();
        let slot = at(&mut plan, &mut made, output.value, place);
        plan.outputs.push(slot);
    }
    plan
}

fn tensor(plan: &mut Plan, made: &mut BTreeMap<ValueId, Vec<Slot>>, value: ValueId, place: Place) -> Slot {
    let layout: Layout = plan.graph.layout(value).clone();
    plan.tensors.push(Tensor { value, layout, place });
    made.entry(value).or_default().push(plan.tensors.len() - 1);
    plan.tensors.len() - 1
}

/// `value` at `place`: where it was made, or the one copy that is there.
fn at(plan: &mut Plan, made: &mut BTreeMap<ValueId, Vec<Slot>>, value: ValueId, place: Place) -> Slot {
    let there = made[&value].iter().find(|slot| plan.tensors[**slot].place.is_memory_of(&place));
    if let Some(slot) = there {
        return *slot;
    }
    let from = made[&value][0];
    let to = tensor(plan, made, value, place);
    plan.work.push(Work::Copy { from, to });
    to
}
