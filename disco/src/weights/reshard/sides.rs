//! The two sessions of a reshard, as their controllers know them: where their workers are, and by
//! which means they can meet.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use rpc_core::RpcError;

use crate::ccl::host::MAX_SHARED_RANKS;
use crate::controller::dref::{DRef, IntoArguments};
use crate::controller::session::DiscoSession;
use crate::error::Result;
use crate::wire::plan::WorkerLocation;

/// One of the two sessions of a reshard, as errors name it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Session {
    From,
    To,
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::From => "has",
            Self::To => "gets",
        })
    }
}

impl Session {
    /// Says of an error which session it comes from.
    pub(super) fn named<T>(self, result: Result<T>) -> Result<T> {
        let named = |error| RpcError::from(error).context(format_args!("the session that {self} the tensors"));
        result.map_err(|error| named(error).into())
    }

    /// Looks up a function on all workers of this session, and calls it.
    pub(super) fn call(self, session: &DiscoSession, function: &str, args: impl IntoArguments) -> Result<DRef> {
        self.named(session.get_global_func(function).and_then(|function| function.call(args)))
    }
}

/// One session: its workers, in their order.
pub(super) struct Side {
    /// Name of each worker's machine; empty where that is not known.
    machines: Vec<String>,
    /// Address at which each worker is to listen, if one is known.
    addresses: Vec<Option<IpAddr>>,
    is_encrypted: bool,
    /// True if its data is to go over sockets, also within a machine.
    has_addresses: bool,
}

/// Means by which the workers of both sessions can meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Means {
    /// All are on one machine.
    Memory,
    Sockets,
    /// Some cannot reach others, for this reason.
    None(String),
}

impl Side {
    pub(super) fn of(session: &DiscoSession) -> Self {
        let controller = session.controller();
        let (mut machines, mut addresses) = (Vec::new(), Vec::new());
        let set = &controller.options.data_addresses;
        let mut set_in_turn = set.iter().copied().map(Some);
        let links = controller.links();
        for link in &links {
            for process in &link.info.processes {
                machines.extend(std::iter::repeat_n(process.machine.clone(), process.count as usize));
            }
            // All nodes have as many workers.
            let per_node = link.count as usize / link.nodes.max(1);
            for told in &link.info.data_addresses {
                let address = if set.is_empty() { *told } else { set_in_turn.next().flatten() };
                addresses.extend(std::iter::repeat_n(address, per_node));
            }
        }
        let is_encrypted = links.iter().any(|link| link.is_encrypted);
        Self { machines, addresses, is_encrypted, has_addresses: !set.is_empty() }
    }

    /// Returns the address at which each worker listens: others on its machine reach it there, if
    /// none is known.
    pub(super) fn listen(&self) -> Vec<IpAddr> {
        self.addresses.iter().map(|address| address.unwrap_or(Ipv4Addr::LOCALHOST.into())).collect()
    }
}

/// Returns true if data between these sessions is to be encrypted: if any link that drives the
/// workers of either is.
pub(super) fn is_encrypted(from: &Side, to: &Side) -> bool {
    from.is_encrypted || to.is_encrypted
}

/// Returns true if worker `source` of one session is on the machine of worker `destination` of the
/// other one.
pub(super) fn are_near(from: &Side, to: &Side, source: u32, destination: u32) -> bool {
    let machine = from.machines.get(source as usize).filter(|name| !name.is_empty());
    machine.is_some() && machine == to.machines.get(destination as usize)
}

/// Returns the locations of all ranks: the workers of both sessions.
pub(super) fn locations(from: &Side, to: &Side) -> Vec<WorkerLocation> {
    let mut known = HashMap::new();
    let all = from.machines.iter().chain(&to.machines).zip(from.addresses.iter().chain(&to.addresses));
    let location = |(at, (machine, address)): (usize, (&String, &Option<IpAddr>))| {
        // A machine that is not known is another one for each worker.
        let number = if machine.is_empty() { at } else { *known.entry(machine.clone()).or_insert(at) };
        WorkerLocation { machine: number as u32, is_local: address.is_none() }
    };
    all.enumerate().map(location).collect()
}

/// Returns the means by which the workers of two sessions can meet.
pub(super) fn means(from: &Side, to: &Side) -> Means {
    let locations = locations(from, to);
    let machine = from.machines.first().filter(|name| !name.is_empty());
    let is_there = |name: &String| Some(name) == machine;
    let are_together = from.machines.iter().chain(&to.machines).all(is_there);
    let by_sockets = from.has_addresses || to.has_addresses;
    if are_together && !by_sockets && locations.len() <= MAX_SHARED_RANKS && cfg!(target_os = "linux") {
        return Means::Memory;
    }
    // Each rank dials those below it.
    let unreachable = locations.iter().enumerate().find(|(at, location)| {
        location.is_local && locations[at + 1..].iter().any(|other| other.machine != location.machine)
    });
    match unreachable {
        None => Means::Sockets,
        Some((at, _)) => {
            let sources = from.machines.len();
            let (worker, whose) = if at < sources { (at, "has") } else { (at - sources, "gets") };
            Means::None(format!(
                "the data address of worker {worker} of the session that {whose} the tensors is not known, and not all \
                 workers are on its machine (Options::data_addresses, or --data-address there)"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(workers: &[(&str, bool)], has_addresses: bool) -> Side {
        let address = |has: bool| has.then_some(IpAddr::from(Ipv4Addr::LOCALHOST));
        Side {
            machines: workers.iter().map(|(machine, _)| (*machine).to_owned()).collect(),
            addresses: workers.iter().map(|(_, has)| address(*has)).collect(),
            is_encrypted: false,
            has_addresses,
        }
    }

    #[test]
    fn workers_meet_in_memory_over_sockets_or_not_at_all() {
        let here = side(&[("a", false), ("a", false)], false);
        assert_eq!(means(&here, &here), Means::Memory);
        let with_addresses = side(&[("a", true)], true);
        assert_eq!(means(&with_addresses, &here), Means::Sockets);
        let apart = side(&[("a", true), ("b", true)], false);
        assert_eq!(means(&apart, &side(&[("", true)], false)), Means::Sockets);
        // The last rank is dialled by none.
        assert_eq!(means(&apart, &side(&[("c", false)], false)), Means::Sockets);
        let Means::None(reason) = means(&apart, &side(&[("b", false), ("c", true)], false)) else { panic!() };
        assert!(reason.contains("worker 0 of the session that gets the tensors"), "{reason}");
        let Means::None(reason) = means(&side(&[("a", true), ("", false)], false), &apart) else { panic!() };
        assert!(reason.contains("worker 1 of the session that has the tensors"), "{reason}");
    }

    #[test]
    fn workers_are_near_on_one_machine_that_is_known() {
        let (a, b) =
            (side(&[("a", false), ("", false)], false), side(&[("b", false), ("a", false), ("", false)], false));
        assert!(are_near(&a, &b, 0, 1) && !are_near(&a, &b, 0, 0) && !are_near(&a, &b, 1, 2));
        let locations: Vec<_> = locations(&a, &b).iter().map(|one| one.machine).collect();
        assert_eq!(locations, [0, 1, 2, 0, 4]);
    }
}
