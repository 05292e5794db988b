//! Sessions of many workers: they start, do what small ones do, and say in a few words what many
//! have to say.

use disco::ThreadedSession;
use rpc_tests::spmd::registry;

use super::*;

#[test]
fn a_session_of_256_threads_does_what_a_small_one_does() {
    const COUNT: u32 = 256;
    let session = ThreadedSession::new(COUNT, 1).registry(registry()).start().wait().unwrap();
    let ids = session.get_global_func("worker_id").unwrap().call(()).unwrap();
    for worker in [0, 1, COUNT - 1] {
        assert_eq!(value(&session, &ids, worker), Value::Int(worker.into()));
    }
    let add_id = session.get_global_func("add_id").unwrap();
    // Small tensors that one worker reduces for all, and larger ones that many share out.
    for len in [3, 20_000] {
        let x = session.broadcast(&f32s(&[len], (0..len).map(|at| at as f32)), None, Scope::World).unwrap();
        add_id.call((&x,)).unwrap();
        session.allreduce(&x, Some(&x), ReduceOp::Sum, Scope::World).unwrap();
        session.sync_all().wait().unwrap();
        let of_ids = (COUNT * (COUNT - 1) / 2) as f32;
        let expected: Vec<f32> = (0..len).map(|at| (COUNT as f32).mul_add(at as f32, of_ids)).collect();
        for worker in [0, 100, COUNT - 1] {
            assert_eq!(tensor(&session, &x, worker), (vec![len], expected.clone()), "{len}, worker {worker}");
        }
    }
    session.get_global_func("fail").unwrap().call(()).unwrap();
    let error = session.sync_all().wait().unwrap_err();
    assert_eq!(error.failures().len(), COUNT as usize);
    let text = error.to_string();
    assert!(text.starts_with("workers 0 to 255: fail (#") && text.ends_with(": told to fail"), "{text}");
    session.sync_all().wait().unwrap();
    session.shutdown().wait().unwrap();
}

#[test]
fn a_session_of_1024_threads_starts_and_meets_in_groups() {
    let session = ThreadedSession::new(1024, 4).registry(registry()).start().wait().unwrap();
    let x = session.broadcast(&f32s(&[1], [1.0]), None, Scope::Group).unwrap();
    session.allreduce(&x, Some(&x), ReduceOp::Sum, Scope::Group).unwrap();
    session.barrier(Scope::World).unwrap();
    session.sync_all().wait().unwrap();
    assert_eq!(tensor(&session, &x, 1023), (vec![1], vec![256.0]));
    session.shutdown().wait().unwrap();
}
