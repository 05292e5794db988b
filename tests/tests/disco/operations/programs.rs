//! Recorded programs: their steps, parameters and refusals.

use super::*;

#[test]
fn recorded_programs_have_the_results_of_their_steps() {
    everywhere(NODE, &[(1, 1), (2, 1), (4, 2)], |session| {
        let n = session.num_workers();
        let (add_to, add, copy) = (
            session.get_global_func("add_to").unwrap(),
            session.get_global_func("add").unwrap(),
            session.get_global_func("copy").unwrap(),
        );
        let weights = by_worker(session, &[3]);
        let program = session
            .record(|program| {
                let (x, step, scale) = (program.parameter(), program.parameter(), program.parameter());
                let weights = program.capture(&weights)?;
                let own = program.call(&copy, (&x,))?;
                program.call(&add_to, (&own, &step))?;
                let sum = program.allreduce(&own, None, ReduceOp::Sum, Scope::World)?;
                let all = program.allgather(&weights, None, Scope::Group)?;
                let number = program.call(&add, (0.5, &scale))?;
                program.call(&add_to, (&weights, 1.0))?;
                program.barrier(Scope::World);
                Ok(vec![sum, all, number])
            })
            .unwrap();
        // The program keeps its captured tensors, and does not change its arguments.
        let (kept, register) = (weights.clone(), weights.register());
        drop(weights);
        let x = by_worker(session, &[3]);
        for round in 0..3 {
            let [sum, all, number] = &program.run((&x, round, 1.5)).unwrap()[..] else { panic!("three outputs") };
            assert!(sum.register() != register);
            for worker in 0..n {
                let summed = (0..3).map(|i| (0..n).map(|peer| (100 * peer + i) as f32 + round as f32).sum());
                assert_eq!(tensor(session, sum, worker), (vec![3], summed.collect::<Vec<f32>>()));
                let peers = peers(session, Scope::Group, worker);
                let gathered = peers.iter().flat_map(|peer| own(*peer, 3)).map(|x| x + round as f32);
                assert_eq!(tensor(session, all, worker).1, gathered.collect::<Vec<f32>>());
                assert_eq!(value(session, number, worker), Value::Float(2.0));
                assert_eq!(tensor(session, &x, worker).1, own(worker, 3));
            }
        }
        session.sync_all().wait().unwrap();

        // Each failed step is reported with its number, and the others run.
        let fails = session.get_global_func("fail_on").unwrap();
        let unless = session.get_global_func("tensor_unless").unwrap();
        let faulty = session
            .record(|program| {
                let worker = program.parameter();
                let bad = program.call(&fails, (&worker,))?;
                let worse = program.call(&add, (&bad, 1.0))?;
                let missing = program.call(&unless, (&worker,))?;
                let sum = program.allreduce(&missing, None, ReduceOp::Sum, Scope::World)?;
                let fine = program.call(&add, (1.0, 2.0))?;
                Ok(vec![worse, sum, fine])
            })
            .unwrap();
        let outputs = faulty.run((0,)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        let told: Vec<_> = error.failures().iter().map(|one| (one.worker.0, one.command.clone())).collect();
        let of = |text: &str| (0, format!("{text} of program {}", faulty.number()));
        assert_eq!(told, [of("fail_on, step 1"), of("tensor_unless, step 3")]);
        for (output, poisoned_on) in [(&outputs[0], 0), (&outputs[1], n - 1)] {
            session.debug_get_from_remote(output, WorkerId(poisoned_on)).wait().unwrap_err();
        }
        assert_eq!(value(session, &outputs[2], 0), Value::Float(3.0));
        // A later run is not affected, and a poisoned argument poisons the results.
        let outputs = faulty.run((n,)).unwrap();
        session.sync_all().wait().unwrap();
        assert_eq!(tensor(session, &outputs[1], n - 1).1, [n as f32, 2.0 * n as f32]);
        let poison = fails.call((0,)).unwrap();
        session.sync_all().wait().unwrap_err();
        let outputs = program.run((&x, 0, &poison)).unwrap();
        session.sync_all().wait().unwrap();
        let error = session.debug_get_from_remote(&outputs[2], WorkerId(0)).wait().unwrap_err();
        assert_eq!(error.failures()[0].command, "fail_on");
        // Dropping the program frees its tensors.
        drop((program, faulty, kept, outputs, x));
        let echo = session.get_global_func("echo").unwrap().call((1,)).unwrap();
        assert_eq!(value(session, &echo, 0), Value::Int(1));
    });
}

#[test]
fn parameters_are_checked_against_their_types() {
    everywhere(NODE, &[(2, 1)], |session| {
        let copy = session.get_global_func("copy").unwrap();
        let program = session
            .record(|program| {
                let x = program.parameter_of(ParameterType::tensor(DataType::F32, &[-1]));
                program.parameter_of(ParameterType::Int);
                Ok(vec![program.call(&copy, (&x,))?])
            })
            .unwrap();
        let x = session.empty(&[2], DataType::F32, None).unwrap();
        let made = program.run((&x, 1)).unwrap();
        assert_eq!(tensor(session, &made[0], 1), (vec![2], vec![0.0; 2]));
        let made = program.run((&f32s(&[1], [7.0]), 1)).unwrap();
        assert_eq!(tensor(session, &made[0], 1), (vec![1], vec![7.0]));
        // Arguments that the controller can check are refused before any command is issued.
        let error = program.run((&x, 1.5)).unwrap_err();
        assert!(error.to_string().contains("parameter 2 takes int, and was given float"), "{error}");
        let error = program.run((&f32s(&[1, 1], [7.0]), 1)).unwrap_err();
        assert!(error.to_string().contains("parameter 1 takes tensor of float32 [-1], and was given"), "{error}");
        session.sync_all().wait().unwrap();
        // Each worker checks the contents of registers, and a mismatch is reported once.
        session.debug_set_register(&x, WorkerId(1), 5).unwrap();
        let made = program.run((&x, 1)).unwrap();
        let error = session.sync_all().wait().unwrap_err();
        let [failure] = error.failures() else { panic!("{error}") };
        assert_eq!((failure.worker, &*failure.command), (WorkerId(1), "run"));
        assert!(
            failure.cause.message().contains("parameter 1 takes tensor of float32 [-1], and was given int"),
            "{error}"
        );
        assert_eq!(tensor(session, &made[0], 0), (vec![2], vec![0.0; 2]));
        session.debug_get_from_remote(&made[0], WorkerId(1)).wait().unwrap_err();
    });
}

#[test]
fn invalid_programs_are_refused() {
    let (one, two) = (Launch::Threads.start(1, 1).session, Launch::Threads.start(1, 1).session);
    let refused = |result: disco::Result<disco::Program>, why: &str| match result {
        Ok(program) => panic!("{program:?}"),
        Err(error) => assert!(error.to_string().contains(why), "{error}"),
    };
    let x = one.empty(&[1], DataType::F32, None).unwrap();
    let echo = one.get_global_func("echo").unwrap();
    refused(one.record(|program| Ok(vec![program.parameter()])), "its steps make");
    refused(one.record(|program| Ok(vec![program.capture(&x)?])), "its steps make");
    refused(
        one.record(|program| {
            let made = program.call(&echo, (1,))?;
            Ok(vec![made, made])
        }),
        "each of them once",
    );
    refused(two.record(|program| Ok(vec![program.capture(&x)?])), "belongs to another session");
    let mut stolen = None;
    let program = one
        .record(|program| {
            stolen = Some(program.parameter());
            Ok(vec![])
        })
        .unwrap();
    let stolen = stolen.unwrap();
    refused(one.record(|program| Ok(vec![program.call(&echo, (&stolen,))?])), "another program");
    let error = echo.call((&stolen,)).unwrap_err();
    assert!(error.to_string().contains("belongs to the recording"), "{error}");
    let error = program.run(()).unwrap_err();
    assert!(error.to_string().contains("0 arguments for a program with 1 parameters"), "{error}");
    program.run((&x,)).unwrap();
    let error = program.run((&two.empty(&[1], DataType::F32, None).unwrap(),)).unwrap_err();
    assert!(error.to_string().contains("belongs to another session"), "{error}");
    one.sync_all().wait().unwrap();
    one.shutdown().wait().unwrap();
    assert!(program.run((&x,)).is_err());
    refused(one.record(|_| Ok(vec![])), "shut down");
}

#[test]
fn a_recording_needs_no_closure() {
    let session = Launch::Threads.start(2, 1).session;
    let (echo, x) = (session.get_global_func("echo").unwrap(), session.empty(&[1], DataType::F32, None).unwrap());
    let (first, second) = (session.recorder(), session.recorder());
    let of_first = first.call(&echo, (&x,)).unwrap();
    let of_second = second.call(&echo, (2,)).unwrap();
    assert!(first.call(&echo, (&of_second,)).unwrap_err().to_string().contains("another program"));
    // A recorder that is dropped has sent nothing, and lets go of what it has captured.
    drop(first);
    let second = second.finish(&[of_second]).unwrap();
    assert_eq!(second.number(), session.recorder().finish(&[]).unwrap().number() - 1);
    assert_eq!(value(&session, &second.run(()).unwrap()[0], 1), Value::Int(2));
    assert!(session.recorder().finish(&[of_first]).unwrap_err().to_string().contains("another program"));
    session.shutdown().wait().unwrap();
}
