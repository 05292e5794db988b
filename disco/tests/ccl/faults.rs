//! Groups in which a rank fails, dies, stops, disagrees or stays away: never a hang, and never the
//! data of another call.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use disco::ccl::{
    BreakCause, Breakdown, Buffers, Ccl, CclError, Collective, CollectiveInput, Control, Operation, Outcome, Rank,
    ReduceOp, host,
};
use rpc_core::{DataType, ErrorKind, RpcError};
use rustix::process::Signal;

use crate::launch::{
    ALL, ChildRank, JoinArguments, Launch, as_child, group, long_limits, on_threads, options, start_child,
};
use ccl_conformance::{self as model, assert_mismatch, random_program};

/// Time of limits that are to run out.
const SHORT: Duration = Duration::from_millis(700);
/// Time of limits that are not to run out.
const LONG: Duration = Duration::from_secs(120);
/// Times of a limit that is to run out, each for one attempt. A machine that stands still for
/// longer than one of them makes another rank late, too; the next attempt allows for more.
const ATTEMPTS: [Duration; 3] = [SHORT, Duration::from_secs(5), Duration::from_secs(30)];

fn allreduce(ccl: &mut dyn Ccl, count: usize) -> Result<(), CclError> {
    let mut data = vec![1_u8; count * 4];
    ccl.allreduce(ReduceOp::Sum, DataType::F32, count, Buffers::in_place(&mut data).into())
}

fn breakdown(result: Result<(), CclError>) -> Breakdown {
    match result {
        Err(CclError::Broken(breakdown)) => (*breakdown).clone(),
        other => panic!("the group should be broken: {other:?}"),
    }
}

/// Returns what the ranks see in the first attempt in which no limit of another rank than `late`
/// has run out, or in the last one.
fn once_only_late(late: Rank, attempt: impl Fn(Duration) -> Vec<Breakdown>) -> Vec<Breakdown> {
    let is_other =
        |one: &Breakdown| one.rank != late && matches!(one.cause, BreakCause::NeverEntered | BreakCause::Silent);
    let mut seen = Vec::new();
    for limit in ATTEMPTS {
        seen = attempt(limit);
        if !seen.iter().any(is_other) {
            break;
        }
    }
    seen
}

#[test]
fn poison_reaches_all_ranks_and_the_group_lives() {
    let cause = RpcError::new(ErrorKind::Application, "no data today").with_application_kind("my::Error");
    for launch in ALL {
        on_threads(launch, 3, &long_limits(), |ccl| {
            for count in [4, 100_000] {
                let mut data = vec![7_u8; count * 4];
                let input = match ccl.rank() {
                    Rank(1) => CollectiveInput::Poisoned(cause.clone()),
                    _ => Buffers::in_place(&mut data).into(),
                };
                let error = ccl.allreduce(ReduceOp::Sum, DataType::F32, count, input).unwrap_err();
                let CclError::Poisoned { rank: Rank(1), cause: found, .. } = &error else { panic!("{error}") };
                assert_eq!(found, &cause);
                assert_eq!(RpcError::from(error), cause);
                assert!(data.iter().all(|byte| *byte == 7), "the output was touched");
            }
            random_program(ccl, 3, 5);
        });
    }
}

#[test]
fn a_wrong_argument_is_an_error_of_all_that_names_the_rank() {
    for launch in ALL {
        on_threads(launch, 2, &long_limits(), |ccl| {
            let mut data = vec![0_u8; if ccl.rank() == Rank(0) { 16 } else { 15 }];
            let error =
                ccl.allreduce(ReduceOp::Sum, DataType::F32, 4, Buffers::in_place(&mut data).into()).unwrap_err();
            assert!(error.to_string().contains("needs a buffer of 16 bytes on rank 1, and it has 15"), "{error}");
            let error = ccl.broadcast(Rank(9), DataType::U8, 1, Buffers::output(&mut data).into()).unwrap_err();
            assert!(error.to_string().contains("no rank 9 among 2"), "{error}");
            let error = ccl.send(ccl.rank(), DataType::U8, 1, Buffers::input(&[1]).into()).unwrap_err();
            assert!(!error.is_broken(), "{error}");
            let error = ccl
                .allreduce(ReduceOp::Sum, DataType::BOOL, 15, Buffers::in_place(&mut data[..15]).into())
                .unwrap_err();
            assert!(error.to_string().contains("bool cannot be reduced"), "{error}");
            allreduce(ccl, 10).unwrap();
        });
    }
}

#[test]
fn calls_that_differ_are_an_error_of_all_that_names_both() {
    for launch in ALL {
        on_threads(launch, 3, &long_limits(), |ccl| {
            let odd = ccl.rank() == Rank(2);
            let error = allreduce(ccl, if odd { 100_000 } else { 8 }).unwrap_err();
            assert_mismatch(
                &error,
                &["rank 0 is in allreduce(sum) of 8 float32", "rank 2 is in allreduce(sum) of 100000"],
            );
            let error = if odd { ccl.barrier() } else { allreduce(ccl, 50_000) }.unwrap_err();
            assert_mismatch(&error, &["rank 0 is in allreduce(sum) of 50000 float32", "rank 2 is in barrier"]);
            let op = if odd { ReduceOp::Max } else { ReduceOp::Min };
            let mut data = [0; 8];
            let error = ccl.allreduce(op, DataType::I64, 1, Buffers::in_place(&mut data).into()).unwrap_err();
            assert_mismatch(&error, &["rank 0 is in allreduce(min)", "rank 2 is in allreduce(max)"]);
            let dtype = if odd { DataType::U64 } else { DataType::I64 };
            let error = ccl.allreduce(ReduceOp::Sum, dtype, 1, Buffers::in_place(&mut data).into()).unwrap_err();
            assert_mismatch(&error, &["rank 0", "int64", "rank 2", "uint64"]);
            let root = Rank(u32::from(odd));
            let error = ccl.broadcast(root, DataType::U8, 8, Buffers::in_place(&mut data).into()).unwrap_err();
            assert_mismatch(&error, &["rank 0 is in broadcast(root 0)", "rank 2 is in broadcast(root 1)"]);
            random_program(ccl, 5, 5);
            assert!(ccl.control().flights().iter().any(|flight| flight.outcome == Outcome::Failed));
        });
    }
}

#[test]
fn both_ends_of_a_transfer_hear_that_they_differ_or_that_there_is_nothing() {
    for launch in ALL {
        on_threads(launch, 2, &long_limits(), |ccl| {
            let mut data = [0; 40];
            let result = match ccl.rank() {
                Rank(0) => ccl.send(Rank(1), DataType::U8, 10, Buffers::input(&data[..10]).into()),
                _ => ccl.recv(Rank(0), DataType::U8, 40, Buffers::output(&mut data).into()),
            };
            assert_mismatch(
                &result.unwrap_err(),
                &["rank 0 is in send(to rank 1) of 10", "rank 1 is in recv(from rank 0) of 40"],
            );
            let result = match ccl.rank() {
                Rank(0) => {
                    let poison = CollectiveInput::Poisoned(RpcError::internal("broken earlier"));
                    ccl.send(Rank(1), DataType::U8, 10, poison)
                }
                _ => ccl.recv(Rank(0), DataType::U8, 40, Buffers::output(&mut data).into()),
            };
            assert_eq!(RpcError::from(result.unwrap_err()), RpcError::internal("broken earlier"));
            model::transfers(ccl, 9);
            random_program(ccl, 5, 3);
        });
    }
}

#[test]
fn a_rank_that_never_comes_is_named_and_the_group_stays_broken() {
    for launch in ALL {
        let attempt = |limit| {
            // Held until the others have given up, so that the rank is there and just does not
            // come.
            let absent = Mutex::new(());
            let held = absent.lock().unwrap();
            std::thread::scope(|scope| {
                let mut ranks: Vec<_> = group(launch, 3, &options(limit, LONG)).into_iter().map(Some).collect();
                let mut late = ranks.pop().flatten().unwrap();
                let absent = &absent;
                let present: Vec<_> = ranks
                    .into_iter()
                    .flatten()
                    .map(|mut ccl| {
                        scope.spawn(move || {
                            let first = breakdown(allreduce(&mut *ccl, 1 << 20));
                            let again = breakdown(allreduce(&mut *ccl, 1));
                            assert_eq!(first, again);
                            first
                        })
                    })
                    .collect();
                let late = scope.spawn(move || {
                    drop(absent.lock());
                    breakdown(allreduce(&mut *late, 1 << 20))
                });
                let mut seen: Vec<_> = present.into_iter().map(|rank| rank.join().unwrap()).collect();
                drop(held);
                seen.push(late.join().unwrap());
                seen
            })
        };
        let seen = once_only_late(Rank(2), attempt);
        for breakdown in &seen[..2] {
            assert_eq!((&breakdown.cause, breakdown.rank), (&BreakCause::NeverEntered, Rank(2)), "{launch:?}");
            let text = breakdown.to_string();
            assert!(text.starts_with("rank 2 never entered allreduce(sum) of 1048576 float32 #1"), "{text}");
        }
        assert_eq!(seen[2].rank, Rank(2), "{launch:?}: {}", seen[2]);
    }
}

#[test]
fn a_rank_that_went_on_is_named_at_once() {
    for launch in ALL {
        // Steps are counted in 64 bits.
        for (goes_on_to_another, size, step) in
            [(false, 10, 8), (true, 10, 8), (true, 100_000, 8), (false, 10, 1 << 32)]
        {
            let given_up = AtomicUsize::new(0);
            on_threads(launch, 3, &long_limits(), |ccl| {
                ccl.set_step(7);
                allreduce(ccl, 10).unwrap();
                let rank = ccl.rank();
                ccl.set_step(step);
                if rank == Rank(1) {
                    ccl.leave_step();
                    // It may not come before the others have given up on it.
                    while !goes_on_to_another && given_up.load(Ordering::Acquire) < 2 {
                        std::thread::yield_now();
                    }
                    ccl.set_step(step + 1);
                }
                let breakdown = breakdown(allreduce(ccl, size));
                given_up.fetch_add(1, Ordering::AcqRel);
                assert_eq!((breakdown.cause.clone(), breakdown.rank), (BreakCause::OutOfStep, Rank(1)), "{launch:?}");
            });
        }
        // A step that all leave alike, as when a function fails everywhere, harms nobody.
        on_threads(launch, 2, &long_limits(), |ccl| {
            for step in 1..20 {
                ccl.set_step(step);
                if step % 3 == 0 {
                    ccl.leave_step();
                } else {
                    allreduce(ccl, 1000 * step as usize).unwrap();
                }
            }
            random_program(ccl, 3, 5);
        });
    }
}

#[test]
fn an_abort_wakes_every_waiting_rank() {
    for launch in ALL {
        std::thread::scope(|scope| {
            let mut ranks = group(launch, 3, &long_limits());
            // The third never comes, so that the others wait.
            let aborting = ranks.pop().unwrap();
            let controls: Vec<_> = ranks.iter().map(|ccl| ccl.control()).collect();
            let waiting: Vec<_> = ranks
                .into_iter()
                .map(|mut ccl| scope.spawn(move || breakdown(allreduce(&mut *ccl, 1 << 20))))
                .collect();
            // Until they have entered; whether they already sleep makes no difference.
            while controls.iter().any(|control| control.flights().is_empty()) {
                std::thread::yield_now();
            }
            aborting.abort("enough");
            for rank in waiting {
                let breakdown = rank.join().unwrap();
                assert_eq!(breakdown.cause, BreakCause::Aborted("enough".to_owned()));
                assert_eq!(breakdown.rank, Rank(2));
            }
            assert!(controls.iter().all(|control| control.broken().is_some()));
        });
    }
}

/// By a thread of the rank that waits itself, in the middle of the data of a stream of collectives.
#[test]
fn an_abort_in_the_middle_of_data_leaves_no_rank_waiting() {
    for launch in ALL {
        for count in [10, 3_000_000] {
            std::thread::scope(|scope| {
                let ranks = group(launch, 3, &long_limits());
                let control = ranks[1].control();
                let running: Vec<_> = ranks
                    .into_iter()
                    .map(|mut ccl| {
                        scope.spawn(move || {
                            loop {
                                if let Err(error) = allreduce(&mut *ccl, count) {
                                    return breakdown(Err(error));
                                }
                            }
                        })
                    })
                    .collect();
                while control.flights().len() < 5 {
                    std::thread::yield_now();
                }
                control.abort("stop");
                for rank in running {
                    let breakdown = rank.join().unwrap();
                    let aborted = BreakCause::Aborted("stop".to_owned());
                    assert_eq!(
                        (&breakdown.cause, breakdown.rank),
                        (&aborted, Rank(1)),
                        "{launch:?}, {count}: {breakdown}"
                    );
                }
            });
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for launch in ALL {
        let results = on_threads(launch, 3, &long_limits(), |ccl| {
            allreduce(ccl, 3).unwrap();
            (ccl.rank() != Rank(1)).then(|| allreduce(ccl, 3))
        });
        // `on_threads` drops each communicator when its program returns.
        for result in results.into_iter().flatten() {
            let breakdown = breakdown(result);
            assert_eq!((breakdown.cause, breakdown.rank), (BreakCause::Left, Rank(1)), "{launch:?}");
        }
    }
}

/// A rank in a process of its own, for the tests below.
#[test]
fn child() {
    if let Some((program, mut ccl)) = as_child(&options(LONG, LONG)) {
        if program == "agrees" {
            // And never finishes, until somebody ends this process.
            let mut ccl = ccl.into_agreement().unwrap();
            ccl.agree(Collective::barrier(), Ok(())).unwrap();
            while ccl.check().is_ok() {
                std::thread::yield_now();
            }
            return;
        }
        let count = if program == "small" { 16 } else { 4_000_000 };
        // Until somebody ends this process, or the group.
        let end = loop {
            if let Err(error) = allreduce(&mut *ccl, count) {
                break breakdown(Err(error));
            }
        };
        if program == "told" {
            assert_eq!((end.cause, end.rank), (BreakCause::Aborted("enough".to_owned()), Rank(1)));
        }
    }
}

/// A way for a group of `size`, and what has to live as long as its ranks join.
fn way(launch: Launch, size: usize, folder: &tempfile::TempDir) -> (JoinArguments, Option<host::Offer>) {
    if launch == Launch::Processes {
        let offer = host::Offer::new(size, &long_limits()).expect("a segment");
        return (JoinArguments::Segment(offer.ticket()), Some(offer));
    }
    let folder = folder.path().join(format!("{size}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    (JoinArguments::Unix(host::SessionKey::generate().expect("a key"), folder, size), None)
}

/// Runs ranks 0 and 1 here and rank 2 as a process; when the group has come some way, does `harm`
/// to that process, by the control of rank 1 perhaps. Gives what the two see, and the process.
fn with_a_child(
    launch: Launch,
    program: &str,
    limits: &host::Options,
    harm: impl Fn(&mut ChildRank, &dyn Control),
) -> (Vec<Breakdown>, ChildRank) {
    let folder = tempfile::tempdir().expect("a folder");
    let (way, _offer) = way(launch, 3, &folder);
    let mut victim = start_child("faults::child", program, &way, 2);
    let count = if program == "small" { 16 } else { 4_000_000 };
    let breakdowns = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let way = &way;
                scope.spawn(move || way.join(rank, limits).expect("to join"))
            })
            .collect();
        let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
        let control = ranks[1].control();
        let running: Vec<_> = ranks
            .into_iter()
            .map(|mut ccl| {
                scope.spawn(move || {
                    loop {
                        if let Err(error) = allreduce(&mut *ccl, count) {
                            return breakdown(Err(error));
                        }
                    }
                })
            })
            .collect();
        // A group that is broken before comes no further.
        while control.flights().len() < 5 && control.broken().is_none() {
            std::thread::yield_now();
        }
        harm(&mut victim, &*control);
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    (breakdowns, victim)
}

/// In what another backend carries out, after all have agreed.
#[test]
fn a_process_that_dies_after_an_agreement_is_named() {
    for launch in [Launch::Processes, Launch::Unix] {
        let folder = tempfile::tempdir().unwrap();
        let (way, _offer) = way(launch, 2, &folder);
        let mut victim = start_child("faults::child", "agrees", &way, 1);
        let mut ccl = way.join(0, &long_limits()).unwrap().into_agreement().unwrap();
        ccl.agree(Collective::barrier(), Ok(())).unwrap();
        victim.0.kill().unwrap();
        let error = loop {
            if let Err(error) = ccl.check() {
                break error;
            }
            std::thread::yield_now();
        };
        let breakdown = breakdown(Err(error.clone()));
        assert_eq!((breakdown.rank, breakdown.during.as_str()), (Rank(1), "barrier #1"), "{launch:?}: {breakdown}");
        assert!(matches!(breakdown.cause, BreakCause::Died | BreakCause::Link(_)), "{breakdown}");
        ccl.finish(&Err(error));
        assert_eq!(ccl.control().flights()[0].outcome, Outcome::Broken);
    }
}

/// Agreements, transfers among them, poison, and a failure of one rank in the half that another
/// backend carries out.
#[test]
fn a_failure_after_an_agreement_is_an_error_of_all_ranks() {
    for launch in ALL {
        let ranks = group(launch, 3, &long_limits()).into_iter();
        std::thread::scope(|scope| {
            for (rank, ccl) in ranks.enumerate() {
                scope.spawn(move || {
                    let mut ccl = ccl.into_agreement().unwrap();
                    let sum = Collective::new(Operation::Allreduce(ReduceOp::Sum), DataType::I16, 1 << 30);
                    ccl.agree(sum, Ok(())).unwrap();
                    ccl.finish(&Ok(()));
                    let cause = RpcError::new(ErrorKind::Application, "nothing");
                    let error = ccl.agree(sum, if rank == 1 { Err(cause) } else { Ok(()) }).unwrap_err();
                    assert!(matches!(error, CclError::Poisoned { sequence: 2, rank: Rank(1), .. }), "{error}");
                    if rank < 2 {
                        let (to, from) = (Operation::Send { to: Rank(1) }, Operation::Recv { from: Rank(0) });
                        let transfer = if rank == 0 { to } else { from };
                        ccl.agree(Collective::new(transfer, DataType::U8, 5_000_000), Ok(())).unwrap();
                        ccl.finish(&Ok(()));
                    }
                    ccl.agree(sum, Ok(())).unwrap();
                    if rank == 2 {
                        ccl.fail(BreakCause::Backend("no memory".to_owned()));
                    }
                    let error = loop {
                        if let Err(error) = ccl.check() {
                            break error;
                        }
                        std::thread::yield_now();
                    };
                    let text = error.to_string();
                    assert!(
                        text.starts_with("rank 2 failed in allreduce(sum) of 1073741824 int16 #3: no memory"),
                        "{launch:?}: {text}"
                    );
                });
            }
        });
    }
}

fn signal(child: &ChildRank, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(&child.0), signal).expect("a child of ours");
}

#[test]
fn a_killed_process_is_named() {
    for launch in [Launch::Processes, Launch::Unix] {
        for program in ["small", "large"] {
            let (breakdowns, _) = with_a_child(launch, program, &long_limits(), |victim, _| victim.0.kill().unwrap());
            for breakdown in breakdowns {
                assert_eq!(breakdown.rank, Rank(2), "{launch:?}: {breakdown}");
                assert!(matches!(breakdown.cause, BreakCause::Died | BreakCause::Link(_)), "{breakdown}");
                assert!(breakdown.during.starts_with("allreduce(sum)"), "{breakdown}");
            }
        }
    }
}

#[test]
fn a_stopped_process_is_named_when_its_time_is_up() {
    for launch in [Launch::Processes, Launch::Unix] {
        for program in ["small", "large"] {
            let stop = |victim: &mut ChildRank, _: &dyn Control| signal(victim, Signal::STOP);
            let attempt = |limit| with_a_child(launch, program, &options(limit, limit), stop).0;
            for breakdown in once_only_late(Rank(2), attempt) {
                // And not one of those that wait for it in turn.
                assert_eq!(breakdown.rank, Rank(2), "{launch:?}: {breakdown}");
                assert!(matches!(breakdown.cause, BreakCause::NeverEntered | BreakCause::Silent), "{breakdown}");
            }
        }
    }
}

/// The others go on at once, and their word reaches a rank whose sockets were full of data when
/// they went.
#[test]
fn a_rank_that_does_not_read_hears_later_who_broke_the_group() {
    for launch in [Launch::Processes, Launch::Unix] {
        let (breakdowns, victim) = with_a_child(launch, "told", &long_limits(), |victim, control| {
            signal(victim, Signal::STOP);
            control.abort("enough");
        });
        for breakdown in breakdowns {
            assert_eq!((breakdown.cause, breakdown.rank), (BreakCause::Aborted("enough".to_owned()), Rank(1)));
        }
        signal(&victim, Signal::CONT);
        assert!(victim.finish(LONG), "{launch:?}: the rank that was stopped has not heard who broke the group");
    }
}

#[test]
fn a_segment_takes_each_rank_once_and_no_stranger() {
    let short = {
        let mut options = options(LONG, LONG);
        options.join_timeout = SHORT;
        options
    };
    let offer = host::Offer::new(2, &short).unwrap();
    let error = offer.ticket().join(Rank(0), &short).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains("rank 1 did not join"), "{error}");
    let error = offer.ticket().join(Rank(0), &short).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Refused);
    let mut forged = serde_json::to_value(offer.ticket()).unwrap();
    forged["nonce"][0] = ((forged["nonce"][0].as_u64().unwrap() + 1) % 256).into();
    let forged: host::Ticket = serde_json::from_value(forged).unwrap();
    assert_eq!(forged.join(Rank(1), &short).err().unwrap().kind(), ErrorKind::Refused);
    drop(offer);
    assert_eq!(forged.join(Rank(1), &short).err().unwrap().kind(), ErrorKind::NotFound);
}

/// A connection that has another key, or is of another epoch, is refused; the rank that belongs
/// there still gets in. And a stranger who says nothing holds up nobody.
#[test]
fn data_connections_prove_key_and_epoch() {
    let mut limits = long_limits();
    limits.epoch = 7;
    let any = host::Address::Tcp(([127, 0, 0, 1], 0).into());
    let listeners = [host::Listener::bind(&any).unwrap(), host::Listener::bind(&any).unwrap()];
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().clone()).collect();
    let host::Address::Tcp(address) = addresses[0] else { panic!("a TCP address") };
    let _stranger = std::net::TcpStream::connect(address).unwrap();
    let key = host::SessionKey::generate().unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| listeners[0].join(Rank(0), &addresses, &key, &limits).unwrap());
        let other_key = host::SessionKey::generate().unwrap();
        let error = listeners[1].join(Rank(1), &addresses, &other_key, &limits).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
        let mut stale = limits.clone();
        stale.epoch = 6;
        // It tells what its last attempt to connect came to: nothing, if the machine stood still
        // just then.
        let errors = ATTEMPTS.into_iter().map(|limit| {
            stale.join_timeout = limit;
            listeners[1].join(Rank(1), &addresses, &key, &stale).err().unwrap()
        });
        let mut errors = errors.inspect(|error| assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}"));
        assert!(errors.any(|error| error.message().contains("another epoch")));
        let mut second = listeners[1].join(Rank(1), &addresses, &key, &limits).unwrap();
        let other = scope.spawn(move || allreduce(&mut *first.join().unwrap(), 5));
        allreduce(&mut *second, 5).unwrap();
        other.join().unwrap().unwrap();
        assert_eq!(second.epoch(), 7);
    });
}

/// After a group is broken, the same listeners make the next one.
#[test]
fn a_broken_group_is_made_anew_with_the_next_epoch() {
    let any = host::Address::Tcp(([127, 0, 0, 1], 0).into());
    let listeners = [host::Listener::bind(&any).unwrap(), host::Listener::bind(&any).unwrap()];
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().clone()).collect();
    let key = host::SessionKey::generate().unwrap();
    std::thread::scope(|scope| {
        for (rank, listener) in listeners.iter().enumerate() {
            let (addresses, key) = (&addresses, &key);
            scope.spawn(move || {
                let mut limits = long_limits();
                for epoch in 0..4 {
                    limits.epoch = epoch;
                    let mut ccl = listener.join(Rank(rank as u32), addresses, key, &limits).unwrap();
                    allreduce(&mut *ccl, 100_000).unwrap();
                    if rank == 0 {
                        ccl.abort("again");
                    }
                    while allreduce(&mut *ccl, 10).is_ok() {}
                }
            });
        }
    });
}
