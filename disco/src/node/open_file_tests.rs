//! Tests with controllers that make a node open descriptors: they are charged to their session
//! before they are opened, for as long as they are, and beyond the limit are an error to them.

use std::time::{Duration, Instant};

use rpc_core::{
    Context, Devices, ErrorKind, LocalSession, OpenFileQuota, Pack, Registry, RemoteObject, RpcError, Session,
};
use rpc_transports::memory::duplex;
use rpc_transports::{Connector, ServeOptions};

use super::functions::register;
use super::raw_controller::{RawController, join_sockets, session, set_up};
use super::self_start::WorkerSettings;
use super::server::server_of;
use crate::ccl::host::{SessionKey, Ticket};
use crate::options::Hosting;
use crate::wire::mesh::Mesh;
use crate::wire::plan::Layout;
use crate::wire::set_up::SetUp;

/// Two groups of two workers.
const GROUPS: Layout = Layout { world_size: 4, num_groups: 2 };
/// Two workers.
const PAIR: Layout = Layout { world_size: 2, num_groups: 1 };

/// Opens the host of a set-up in a session that may have so many descriptors open.
fn open(limit: u64, set_up: &SetUp) -> Result<(RawController, OpenFileQuota), RpcError> {
    let quota = OpenFileQuota::new("max_open_files", limit, None);
    Ok((RawController::open(session().open_files(quota.clone()), set_up)?, quota))
}

fn assert_refused<T>(result: Result<T, RpcError>, purpose: &str) {
    let Err(error) = result else { panic!("{purpose} was not refused") };
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert!(error.message().contains(purpose) && error.message().contains("--max-open-files"), "{error}");
}

/// Waits until so many descriptors are charged.
fn await_use(quota: &OpenFileQuota, used: u64) {
    let within = Instant::now() + Duration::from_secs(60);
    while quota.used() != used {
        assert!(Instant::now() < within, "{} descriptors are charged, not {used}", quota.used());
        std::thread::yield_now();
    }
}

#[test]
fn segments_are_charged_until_others_are_offered_or_the_session_ends() {
    let offer = |controller: &RawController, epoch: u64| {
        let offer = controller.session.get_function("disco.offer").wait().unwrap();
        offer.call::<Pack<Vec<Ticket>>>((&controller.host, epoch, Pack(Vec::<Mesh>::new()))).wait()
    };
    let (controller, quota) = open(3, &set_up(0, GROUPS)).unwrap();
    for epoch in 0..10 {
        assert_eq!(offer(&controller, epoch).unwrap().0.len(), 3);
        assert_eq!(quota.used(), 3);
    }
    drop(controller);
    await_use(&quota, 0);
    let (controller, quota) = open(2, &set_up(0, GROUPS)).unwrap();
    assert_refused(offer(&controller, 0), "a segment");
    assert_eq!(quota.used(), 0);
}

#[test]
fn listeners_are_charged_until_others_are_bound_or_the_session_ends() {
    let all = SetUp { count: 4, ..set_up(0, GROUPS) };
    // For each worker one for the world and one for its group, and two more while some are bound
    // anew.
    let (controller, quota) = open(10, &all).unwrap();
    for _ in 0..10 {
        assert_eq!(controller.listen().unwrap().len(), 4);
        assert_eq!(quota.used(), 8);
    }
    drop(controller);
    await_use(&quota, 0);
    let (controller, _) = open(7, &all).unwrap();
    assert_refused(controller.listen(), "the data listeners of worker 3");
}

/// Regression: the sessions of workers in processes of their own had no quota.
#[test]
fn the_process_of_a_worker_has_the_limit_of_its_session() {
    for limit in [0, 1] {
        let registry = Registry::new();
        register(&registry);
        let node_registry = registry.clone();
        let settings = |context: Context| serde_json::to_string(&WorkerSettings::of(&context).unwrap()).unwrap();
        node_registry.add_inline("settings", settings);
        let quota = OpenFileQuota::new("max_open_files", limit, None);
        let node = Session::new(LocalSession::builder(node_registry).open_files(quota).build());
        let settings: String = node.get_function("settings").wait().unwrap().call(()).wait().unwrap();
        let settings = WorkerSettings::decode(settings.as_bytes()).unwrap();
        let connecting = async {
            let server = server_of(registry, Devices::new(), settings, None, None, ServeOptions::default());
            let (near, far) = duplex();
            server.serve_channel(far);
            Connector::new().connect_channel(near).await
        };
        let session = crate::runtime::runtime().unwrap().block_on(connecting).unwrap();
        let worker = RawController::open_in(session, &set_up(0, PAIR)).unwrap();
        match limit {
            0 => assert_refused(worker.listen(), "the data listeners of worker 0"),
            _ => assert_eq!(worker.listen().unwrap().len(), 1),
        }
    }
}

#[test]
fn processes_are_charged_before_they_are_started() {
    let processes = SetUp { count: 4, hosting: Hosting::Processes, ..set_up(0, GROUPS) };
    assert_refused(open(11, &processes), "4 processes of workers");
}

/// Of each of two workers: its listener, its connection, and two for waking it.
#[test]
fn data_connections_are_charged_until_they_close() {
    let key = SessionKey::generate().unwrap();
    let nodes = [0, 1].map(|worker| open(100, &set_up(worker, PAIR)).unwrap());
    let listening: Vec<_> = nodes.iter().map(|(node, _)| node.listen().unwrap().remove(0)).collect();
    let quotas = nodes.each_ref().map(|(_, quota)| quota.clone());
    let join = |mut node: RawController, epoch, is_tentative| {
        node.submit([join_sockets(&listening, epoch, is_tentative, &key)]).unwrap();
        let failures = node.sync();
        (node, failures)
    };
    let mut nodes = nodes.map(|(node, _)| node);
    // The second attempt joins beside the first, and the next one in its place.
    for (epoch, is_tentative, used) in [(0, false, 4), (1, true, 7), (2, true, 7), (3, false, 4)] {
        let joined = std::thread::scope(|scope| {
            let each = nodes.map(|node| scope.spawn(|| join(node, epoch, is_tentative)));
            each.map(|one| one.join().unwrap())
        });
        assert!(joined.iter().all(|(_, failures)| failures.is_empty()), "{:?}", joined.map(|(_, failures)| failures));
        nodes = joined.map(|(node, _)| node);
        quotas.iter().for_each(|quota| await_use(quota, used));
    }
    drop(nodes);
    quotas.iter().for_each(|quota| await_use(quota, 0));
}

#[test]
fn a_worker_joins_no_more_others_than_its_session_has_descriptors_for() {
    let key = SessionKey::generate().unwrap();
    let layout = Layout { world_size: 9, num_groups: 1 };
    let (mut controller, quota) = open(8, &set_up(8, layout)).unwrap();
    let listening = vec![controller.listen().unwrap().remove(0); 9];
    controller.submit([join_sockets(&listening, 0, false, &key)]).unwrap();
    let mut failures = controller.sync();
    assert_refused(Err::<(), _>(failures.remove(0).cause), "the connections of rank 8 with 8 others");
    assert_eq!(quota.used(), 1);
}

/// An end holds a socket, in a worker's node and in that of the other worker.
#[test]
fn relayed_connections_are_charged_until_they_close() {
    let (controller, quota) = open(3, &set_up(0, PAIR)).unwrap();
    controller.listen().unwrap();
    let connect = controller.session.get_function("disco.connect").wait().unwrap();
    let connect = || connect.call::<RemoteObject>((&controller.host, 0, 0)).wait();
    let ends = [connect().unwrap(), connect().unwrap()];
    assert_refused(connect(), "relayed data");
    drop(ends);
    await_use(&quota, 1);
    connect().unwrap();
}
