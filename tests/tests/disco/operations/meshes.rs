//! Collectives along the axes of meshes, over every kind of launch, against values that are
//! computed here; meshes that cannot be, and what breaks along one axis.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use disco::{CclState, Mesh};
use rpc_core::{AccessControl, Permission};

use super::*;

/// Returns the sums of the ids of the workers along an axis, for each worker.
fn sums_along(session: &DiscoSession, mesh: &Mesh, axis: usize) -> Vec<Value> {
    let coordinates = |worker: u32| {
        let mut at = mesh.coordinates(WorkerId(worker)).unwrap();
        // All others are the same along the axis.
        at[axis] = 0;
        at
    };
    let all = || 0..session.num_workers();
    let sum = |worker: u32| all().filter(|peer| coordinates(*peer) == coordinates(worker)).sum::<u32>();
    all().map(|worker| Value::Float(sum(worker).into())).collect()
}

/// Checks every collective along every axis, from the controller and from functions.
fn check_axes(session: &DiscoSession, mesh: &Mesh) {
    let sum_along = session.get_global_func("sum_along").unwrap();
    let place = session.get_global_func("place_on_mesh").unwrap();
    for (at, (axis, size)) in mesh.axes().enumerate() {
        check_copies(session, mesh.group(axis).unwrap());
        check_collectives(session, mesh.group(axis).unwrap());
        let (sums, places) = (sum_along.call((axis,)).unwrap(), place.call((axis,)).unwrap());
        let expected = sums_along(session, mesh, at);
        for worker in 0..session.num_workers() {
            assert_eq!(value(session, &sums, worker), expected[worker as usize], "{mesh}: {axis}, worker {worker}");
            let mut there = mesh.coordinates(WorkerId(worker)).unwrap();
            there.extend([there[at], size]);
            let there = there.into_iter().map(Value::from).collect();
            assert_eq!(value(session, &places, worker), Value::List(there));
        }
    }
}

#[test]
fn every_collective_runs_along_every_axis() {
    everywhere(NODE, &[(4, 1)], |session| {
        let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
        check_axes(session, &mesh);
        // A later making of the collectives has the mesh, too.
        session.reinit_ccl().wait().unwrap();
        let sums = session.get_global_func("sum_along").unwrap().call(("dp",)).unwrap();
        assert_eq!(value(session, &sums, 3), Value::Float(4.0));
    });
    for launch in [Launch::Processes(NODE), Launch::Tcp { per_node: 2, data: Data::Tcp }] {
        let fixture = launch.start(6, 1);
        let mesh = fixture.session.mesh(&[("dp", 2), ("tp", 3)]).wait().unwrap();
        check_axes(&fixture.session, &mesh);
        fixture.session.shutdown().wait().unwrap();
    }
    // Axes of other sizes, some of them the session's own groups, and one of a single worker.
    for (workers, groups, axes) in [
        (6, 1, &[("dp", 2), ("tp", 3)][..]),
        (6, 2, &[("dp", 3), ("tp", 2)]),
        (6, 2, &[("dp", 2), ("pp", 1), ("tp", 3)]),
        (8, 8, &[("a", 2), ("b", 2), ("c", 2)]),
        (1, 1, &[("all", 1)]),
    ] {
        let fixture = Launch::Threads.start(workers, groups);
        let session = &fixture.session;
        let mesh = session.mesh(axes).wait().unwrap();
        check_axes(session, &mesh);
        check_collectives(session, Scope::World);
        check_collectives(session, Scope::Group);
        session.shutdown().wait().unwrap();
    }
}

#[test]
fn a_session_has_several_meshes_and_programs_use_them() {
    let fixture = Launch::Threads.start(8, 1);
    let session = &fixture.session;
    let cube = session.mesh(&[("dp", 2), ("pp", 2), ("tp", 2)]).wait().unwrap();
    let x = by_worker(session, &[1]);
    let (pp, tp) = (cube.group("pp").unwrap(), cube.group("tp").unwrap());
    let program = session
        .record(|program| {
            let x = program.parameter();
            let y = program.allreduce(&x, None, ReduceOp::Sum, tp)?;
            Ok(vec![program.allreduce(&y, None, ReduceOp::Max, pp)?])
        })
        .unwrap();
    // Two axes of the first as one of the second, and an axis that both have.
    let plane = session.mesh(&[("replica", 4), ("tp", 2)]).wait().unwrap();
    check_axes(session, &cube);
    check_collectives(session, plane.group("replica").unwrap());
    let outputs = program.run((&x,)).unwrap();
    for worker in 0..8 {
        // The larger of the sums of two neighbours, among four workers.
        let last = worker / 4 * 4 + 3;
        assert_eq!(tensor(session, &outputs[0], worker).1, [(100 * (2 * last - 1)) as f32]);
    }
    // A mesh that there is already costs no new collectives.
    let again = session.mesh(&[("replica", 4), ("tp", 2)]);
    assert_eq!(session.ccl_state(), CclState::Running);
    assert_eq!(again.wait().unwrap(), plane);
    session.sync_all().wait().unwrap();
    // It has none when it has ended.
    session.shutdown().wait().unwrap();
    let error = session.mesh(&[("replica", 4), ("tp", 2)]).wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn meshes_that_do_not_fit_the_session_change_nothing() {
    let fixture = Launch::Threads.start(4, 1);
    let session = &fixture.session;
    let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
    for (axes, why) in [
        (&[("dp", 2), ("tp", 3)][..], "the mesh (dp=2, tp=3) has 6 workers, and the session 4"),
        (&[("dp", 4), ("x", 1)], "the axis \"dp\" of the mesh (dp=4, x=1) is one of groups of 4 workers, and that of"),
        (&[("a", 2), ("a", 2)], "two axes have the name \"a\""),
        (&[("", 4)], "the name of an axis has 1 to 64 bytes, not 0"),
        (&[("a", 4), ("b", 0)], "the axis \"b\" has no workers"),
        (&[], "it has 1 to 8 axes, not 0"),
    ] {
        let error = session.mesh(axes).wait().unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(session.ccl_state(), CclState::Running);
    }
    // As many as there may be: the others have one axis of all workers, and one of each.
    for number in 1..16 {
        session.mesh(&[(&format!("all {number}"), 4), (&format!("one {number}"), 1)]).wait().unwrap();
    }
    let error = session.mesh(&[("more", 4)]).wait().unwrap_err();
    assert!(error.to_string().contains("meshes of a session"), "{error}");
    check_axes(session, &mesh);
    let sums = session.get_global_func("sum_along").unwrap().call(("pp",)).unwrap();
    let error = session.debug_get_from_remote(&sums, WorkerId(3)).wait().unwrap_err().to_string();
    assert!(error.contains("has an axis \"pp\"; its meshes: (dp=2, tp=2), (all 1=4, one 1=1), "), "{error}");
    session.sync_all().wait().unwrap_err();
    // A group of another session, whose mesh this one does not have.
    let other = Launch::Threads.start(4, 1);
    other.session.allreduce(&by_worker(&other.session, &[2]), None, ReduceOp::Sum, mesh.group("dp").unwrap()).unwrap();
    let error = other.session.sync_all().wait().unwrap_err();
    assert_eq!(error.failures().len(), 4, "{error}");
    let text = "allreduce(sum) among groups of 2 workers, 2 apart, which are of no mesh of this session";
    assert!(error.to_string().contains(text), "{error}");
    other.session.barrier(Scope::World).unwrap();
    other.session.sync_all().wait().unwrap();
}

/// A missing input poisons its own group alone; a worker that leaves out a collective breaks its
/// group, and the error says which one.
#[test]
fn failures_stay_along_their_axis_until_one_breaks_it() {
    for launch in [Launch::Threads, Launch::Processes(NODE), Launch::Tcp { per_node: 2, data: Data::Tcp }] {
        let fixture = launch.start(4, 1);
        let session = &fixture.session;
        let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
        let dp = mesh.group("dp").unwrap();
        let missing = session.get_global_func("tensor_unless").unwrap().call((1,)).unwrap();
        let sums = session.allreduce(&missing, None, ReduceOp::Sum, dp).unwrap();
        for worker in [0, 2] {
            assert_eq!(tensor(session, &sums, worker).1, [2.0, 4.0]);
        }
        for worker in [1, 3] {
            let error = session.debug_get_from_remote(&sums, WorkerId(worker)).wait().unwrap_err();
            assert!(error.to_string().contains("no tensor here"), "{error}");
        }
        session.sync_all().wait().unwrap_err();
        assert_eq!(session.ccl_state(), CclState::Running);

        session.get_global_func("sum_along_unless").unwrap().call(("dp", 1)).unwrap();
        session.barrier(Scope::World).unwrap();
        let error = session.sync_all().wait().unwrap_err().to_string();
        let place = "in groups of 2 workers, 2 apart, in that whose rank 0 is worker 1";
        assert!(error.contains("told to fail") && error.contains(place), "{error}");
        let state = session.ccl_state();
        assert_eq!(state.breakage().unwrap().culprit, Some(WorkerId(1)), "{state:?}");
        session.reinit_ccl().wait().unwrap();
        check_collectives(session, dp);
        session.shutdown().wait().unwrap();
    }
}

/// Rights of a session that may do everything, but for one use of a device.
#[derive(Debug, Default)]
struct RefuseOnce(AtomicBool);

impl AccessControl for RefuseOnce {
    fn check(&self, permission: &Permission<'_>) -> rpc_core::Result<()> {
        if matches!(permission, Permission::Device(_)) && self.0.swap(false, Ordering::Relaxed) {
            return Err(rpc_core::RpcError::new(ErrorKind::Refused, "told to refuse"));
        }
        Ok(())
    }

    fn to_text(&self) -> Option<String> {
        None
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Regression: in place of broken collectives each worker enters the new ones without waiting for
/// the others, and kept a mesh that the session does not have if another one had failed.
#[test]
fn a_mesh_that_fails_on_one_worker_is_on_none() {
    let access = Arc::new(RefuseOnce::default());
    let node = LocalSession::builder(rpc_tests::spmd::registry()).access_control(Arc::<RefuseOnce>::clone(&access));
    let session = DiscoSession::over([Session::new(node.build())], 2, 1, disco::Options::default()).wait().unwrap();
    let mesh = session.mesh(&[("both", 2)]).wait().unwrap();
    session.abort_ccl("enough").unwrap();
    access.0.store(true, Ordering::Relaxed);
    let error = session.mesh(&[("dp", 2), ("one", 1)]).wait().unwrap_err();
    assert_eq!(error.failures().len(), 1, "{error}");
    assert!(error.to_string().contains("told to refuse"), "{error}");
    let place = session.get_global_func("place_on_mesh").unwrap().call(("dp",)).unwrap();
    for worker in 0..2 {
        let error = session.debug_get_from_remote(&place, WorkerId(worker)).wait().unwrap_err().to_string();
        assert!(error.contains("has an axis \"dp\"; its meshes: (both=2)"), "worker {worker}: {error}");
    }
    session.sync_all().wait().unwrap_err();
    let other = session.mesh(&[("dp", 1), ("tp", 2)]).wait().unwrap();
    check_axes(&session, &mesh);
    check_collectives(&session, other.group("tp").unwrap());
    session.shutdown().wait().unwrap();
}
