//! Tests with controllers that break the collectives of a node's workers.

use std::thread;

use rpc_core::ErrorKind;

use super::raw_controller::{RawController, join_sockets};
use crate::ccl::host::SessionKey;
use crate::wire::command::{Command, Kind, Scope};

/// Regression: the error of a worker was of another kind if the controller told it of a breakdown
/// before the worker that had noticed it did.
#[test]
fn collectives_that_the_controller_breaks_fail_with_the_kind_of_the_cause() {
    let key = SessionKey::generate().unwrap();
    let nodes = [0, 1].map(|worker| RawController::of_worker(worker, 2, u64::MAX));
    let listening: Vec<_> = nodes.iter().map(|node| node.listen().unwrap().remove(0)).collect();
    let [mut first, _second] = thread::scope(|scope| {
        let join = |mut node: RawController| {
            node.submit([join_sockets(&listening, 0, false, &key)]).unwrap();
            assert!(node.sync().is_empty());
            node
        };
        nodes.map(|node| scope.spawn(move || join(node))).map(|joined| joined.join().unwrap())
    });
    let (kind, scope) = (Kind::Barrier, Scope::World);
    first.submit([Command::Collective { kind, scope, from: 0, to: 0, fresh: false }]).unwrap();
    let break_ccl = first.session.get_function("disco.break_ccl").wait().unwrap();
    let kind = ErrorKind::DeadlineExceeded;
    break_ccl.call::<()>((&first.host, 0_u64, kind.code(), "worker 1 never came", false)).wait().unwrap();
    let failures = first.sync();
    let cause = &failures.first().expect("the barrier fails").cause;
    assert!(cause.kind() == kind && cause.message().contains("worker 1 never came"), "{cause}");
}
