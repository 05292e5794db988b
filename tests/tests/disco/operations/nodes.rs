//! Nodes: paths between workers, refused launches, trees.

use super::*;

#[test]
fn workers_without_a_path_to_each_other_run_all_but_collectives() {
    let mut options = disco::Options::default();
    // One address for two nodes.
    options.data_addresses = vec![std::net::Ipv4Addr::LOCALHOST.into()];
    let sessions = (0..2).map(|_| rpc_core::Session::new(rpc_core::LocalSession::new(rpc_tests::spmd::registry())));
    let session = DiscoSession::over(sessions, 1, 1, options).wait().unwrap();
    let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &id, 1), Value::Int(1));
    session.sync_all().wait().unwrap();
    session.barrier(Scope::World).unwrap();
    let error = session.sync_all().wait().unwrap_err();
    let why = "the data addresses of 1 of 2 nodes are known";
    assert!(error.to_string().contains(why), "{error}");
    // The controller knows by now that there are none. Regression: then a mesh was granted that no
    // worker had.
    assert!(session.ccl_state().breakage().is_some());
    for outcome in [session.mesh(&[("dp", 2)]).wait().map(|_| ()), session.reinit_ccl().wait()] {
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(session.ccl_state().breakage().is_some());
    session.sync_all().wait().unwrap();
    session.shutdown().wait().unwrap();
}

/// Unless the controller may relay, the error names the pairs of workers without a path to each
/// other. If it may, their data goes through it.
#[test]
fn pairs_without_a_path_are_named_unless_their_data_may_be_relayed() {
    let network = runtime();
    let start = |may_relay: bool| {
        let (addresses, servers) = serve(&network, 3);
        let mut options = disco::Options::default();
        Data::Relayed.set(3, &mut options);
        options.allow_controller_relay = may_relay;
        if !may_relay {
            // The time for which the workers try to reach each other.
            options.init_timeout = std::time::Duration::from_secs(3);
        }
        (SocketSession::new(addresses, 1, 1).options(options).start().wait().unwrap(), servers)
    };
    let (session, _servers) = start(false);
    let told = session.sync_all().wait().unwrap_err().to_string();
    for (from, to) in [(1, 0), (2, 0), (2, 1)] {
        assert!(told.contains(&format!("rank {from} cannot reach rank {to} at tcp://127.7.7.7:1")), "{told}");
    }
    assert!(told.contains("Options::allow_controller_relay"), "{told}");
    // All other operations work.
    let id = session.get_global_func("worker_id").unwrap().call(()).unwrap();
    assert_eq!(value(&session, &id, 2), Value::Int(2));
    session.shutdown().wait().unwrap();

    let (session, _servers) = start(true);
    let x = session.empty(&[1 << 20], DataType::F32, None).unwrap();
    session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    session.shutdown().wait().unwrap();
}

/// Without data addresses in the options, nodes of several machines name their own, or the
/// controller relays, or there are no collectives.
#[test]
fn nodes_of_several_machines_use_their_data_addresses_or_the_controller() {
    let start = |data: Option<&str>, may_relay: bool| {
        let nodes: Option<Vec<Node>> = (0..2).map(|_| Node::apart(NODE, data)).collect();
        let nodes = nodes?;
        let mut options = disco::Options::default();
        options.allow_controller_relay = may_relay;
        let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_owned()).collect();
        let session = SocketSession::new(addresses, 2, 2).options(options).start().wait().unwrap();
        session.sync_all().wait().unwrap();
        for scope in [Scope::World, Scope::Group] {
            session.barrier(scope).unwrap();
        }
        Some((session.sync_all().wait(), session, nodes))
    };
    let Some((outcome, _session, _nodes)) = start(None, false) else {
        assert!(std::env::var_os("RPC_TESTS_REQUIRE_NETNS").is_none(), "namespaces are demanded");
        println!("SKIPPED: namespaces of processes cannot be made here");
        return;
    };
    let told = outcome.unwrap_err().to_string();
    assert!(told.contains("the data addresses of 0 of 2 nodes are known"), "{told}");
    for (data, may_relay) in [(Some("127.0.0.1"), false), (None, true)] {
        let (outcome, session, _nodes) = start(data, may_relay).unwrap();
        outcome.unwrap();
        session.shutdown().wait().unwrap();
    }
}

/// The controller's process is a node with a data address of its own, as other nodes have.
#[test]
fn the_controllers_own_node_has_a_data_address_beside_those_of_other_machines() {
    let Some(node) = Node::apart(NODE, Some("127.0.0.1")) else {
        assert!(std::env::var_os("RPC_TESTS_REQUIRE_NETNS").is_none(), "namespaces are demanded");
        println!("SKIPPED: namespaces of processes cannot be made here");
        return;
    };
    let start = |data: Option<&str>| {
        let session = SocketSession::new([node.address()], 1, 1);
        let session = session.controller_as_node(rpc_tests::spmd::registry(), rpc_core::Devices::new());
        let session = match data {
            Some(data) => session.controller_data_address(data.parse().unwrap()),
            None => session,
        };
        let session = session.start().wait().unwrap();
        session.barrier(Scope::World).unwrap();
        (session.sync_all().wait(), session)
    };
    let (outcome, _session) = start(None);
    let told = outcome.unwrap_err().to_string();
    assert!(told.contains("the data addresses of 1 of 2 nodes are known"), "{told}");
    let (outcome, session) = start(Some("127.0.0.1"));
    outcome.unwrap();
    session.shutdown().wait().unwrap();
}

/// It comes before all others, also before those that dial in, which do not count it; and each node
/// runs what its own program has.
#[test]
fn the_controller_is_the_first_node_if_it_is_to_be_one() {
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let address = listener.address();
    let mut options = disco::JoinOptions::default();
    options.rank = Some(disco::NodeRank { rank: 0, nodes: 1 });
    let node = std::thread::spawn(move || disco::join(&rpc_tests::spmd::registry(), &address, options).wait());
    let registry = rpc_tests::spmd::registry();
    registry.add("of_the_controller", || 7);
    let session = SocketSession::dialled_by(1, &listener, 2, 2);
    let session = session.controller_as_node(registry, rpc_core::Devices::new()).start().wait().unwrap();
    assert_eq!((session.num_workers(), session.num_groups()), (4, 2));
    let seven = session.get_global_func("of_the_controller").unwrap().call(()).unwrap();
    let error = session.sync_all().wait().unwrap_err();
    let failed: Vec<u32> = error.failures().iter().map(|failure| failure.worker.0).collect();
    assert_eq!(failed, [2, 3], "{error}");
    assert_eq!(value(&session, &seven, 1), Value::Int(7));
    session.shutdown().wait().unwrap();
    node.join().unwrap().unwrap();
}

#[test]
fn impossible_launches_are_refused() {
    let refused = |launch: Launch, workers, groups| match launch.try_start(workers, groups) {
        Ok(_) => panic!("a session"),
        Err(error) => error.to_string(),
    };
    assert!(refused(Launch::Threads, 3, 2).contains("3 workers cannot be in 2 groups"));
    assert!(refused(Launch::Threads, 0, 1).contains("0 workers"));
    assert!(refused(Launch::Processes("/nowhere/at/all"), 2, 1).contains("/nowhere/at/all"));
    let session = rpc_core::Session::new(rpc_core::LocalSession::new(rpc_core::Registry::new()));
    let error = DiscoSession::over([session], 1, 1, disco::Options::default()).wait().unwrap_err();
    assert!(error.to_string().contains("it is no node"), "{error}");
    let mut options = disco::Options::default();
    options.keep_alive = std::time::Duration::ZERO;
    let error = Launch::Processes(NODE).try_start_with(2, 1, options).map(drop).unwrap_err();
    assert!(error.to_string().contains("a keep_alive below 1 ms"), "{error}");
}

/// Nodes open each other only if the operator of each allows it, and only at addresses.
#[test]
fn a_tree_of_nodes_needs_permission_and_addresses() {
    let runtime = runtime();
    let (addresses, _servers) = serve(&runtime, 3);
    let error = SocketSession::new(&addresses, 1, 1).fan_out(1).start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("--allow-forward"), "{error}");
    // With a fan-out as large as the number of nodes, no node opens another one.
    let session = SocketSession::new(&addresses, 1, 1).fan_out(3).start().wait().unwrap();
    session.shutdown().wait().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let error = SocketSession::dialled_by(2, &listener, 1, 1).fan_out(1).start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::InvalidArgument, "{error}");
}
