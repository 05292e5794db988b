//! `rpc-bench disco` as a program.

use std::process::Command;

use serde_json::Value as Json;

const ONCE: [&str; 6] = ["disco", "--json", "--iterations", "1", "--seconds", "0"];

const KEYS: [&str; 11] =
    ["over", "workers", "case", "bytes", "unit", "median", "p99", "n", "better", "algorithm_gb_s", "bus_gb_s"];

/// The exit code, standard output, standard error.
fn cli(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rpc-bench")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn lines(args: &[&str]) -> Vec<Json> {
    let (code, stdout, stderr) = cli(&[&ONCE, args].concat());
    assert_eq!(code, 0, "{stderr}");
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_way_to_launch_is_measured_in_every_case() {
    let launches = ["threads", "processes", "tcp", "quic", "chain", "tracker", "tree", "relay"];
    let lines = lines(&["--workers", "2", "--sizes", "4KiB,40000", "--over", &launches.join(",")]);
    let collectives =
        ["allreduce", "reduce_scatter", "allgather", "broadcast", "scatter", "gather", "all_to_all", "send_recv"];
    for over in launches {
        let of_launch: Vec<_> = lines.iter().filter(|line| line["over"] == over).collect();
        let mut expected: Vec<(&str, Option<u64>)> = vec![
            ("start", None),
            ("issue", None),
            ("complete", None),
            ("round_trip", None),
            ("copy_to_0", Some(40_000)),
            ("copy_from_0", Some(40_000)),
            ("copy_to_last", Some(40_000)),
            ("copy_from_last", Some(40_000)),
        ];
        expected.extend(collectives.iter().flat_map(|name| [(*name, Some(4096)), (*name, Some(40_000))]));
        expected.push(("barrier", None));
        let found: Vec<_> =
            of_launch.iter().map(|line| (line["case"].as_str().unwrap(), line["bytes"].as_u64())).collect();
        assert_eq!(found, expected, "{over}");
        for line in of_launch {
            let keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
            assert!(KEYS.iter().all(|key| keys.contains(key)) && keys.len() == KEYS.len(), "{line}");
            assert!(line["median"].as_f64().unwrap() > 0.0 && line["p99"].as_f64().unwrap() > 0.0, "{line}");
            assert_eq!((&line["workers"], &line["n"]), (&2.into(), &1.into()), "{line}");
            assert_eq!(line["algorithm_gb_s"].is_null(), line["unit"] != "µs" || line["bytes"].is_null(), "{line}");
        }
    }
}

/// As nccl-tests has it: with four ranks, half as much again for an allreduce, and three quarters
/// for an allgather.
#[test]
fn bus_bandwidth_follows_from_the_algorithm_and_the_number_of_workers() {
    let lines = lines(&[
        "--workers",
        "1,4",
        "--sizes",
        "64KiB",
        "--over",
        "threads",
        "--cases",
        "allreduce,all*ther,send_recv,*_last",
    ]);
    let found: Vec<_> =
        lines.iter().map(|line| (line["workers"].as_u64().unwrap(), line["case"].as_str().unwrap())).collect();
    // One worker has no other to send to.
    let expected = [
        (1, "allreduce"),
        (1, "allgather"),
        (4, "copy_to_last"),
        (4, "copy_from_last"),
        (4, "allreduce"),
        (4, "allgather"),
        (4, "send_recv"),
    ];
    assert_eq!(found, expected);
    for (line, factor) in lines.iter().zip([0.0, 0.0, 0.0, 0.0, 1.5, 0.75, 1.0]) {
        if let Some(rate) = line["algorithm_gb_s"].as_f64() {
            let bus = line["bus_gb_s"].as_f64().unwrap();
            assert!((bus - rate * factor).abs() <= rate * 0.001, "{line}");
        }
    }
}

#[test]
fn a_table_is_printed_for_people() {
    let (code, stdout, stderr) =
        cli(&["disco", "--workers=2", "--over=threads", "--cases=round_trip", "--iterations=1", "--seconds=0"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("algorithm") && stdout.contains("round_trip"), "{stdout}");
}

#[test]
fn cases_that_cannot_be_measured_are_refused() {
    for (args, said) in [
        (&["--over", "pigeons"][..], "pigeons"),
        (&["--workers", "0"], "0"),
        (&["--workers", "3", "--over", "tcp"], "3 workers cannot be spread over 2 servers"),
        (&["--sizes", "1B"], "--sizes are from 4B"),
        (&["--sizes", "much"], "much"),
        (&["--cases", "nothing"], "there is no case 'nothing'"),
        (&["--seconds=-1"], "--seconds must be a time"),
        (&["--iterations", "0"], "0"),
    ] {
        let (code, _, stderr) = cli(&[&["disco"], args].concat());
        assert_eq!(code, 2, "{args:?}: {stderr}");
        assert!(stderr.contains(said), "{args:?}: {stderr}");
    }
}
