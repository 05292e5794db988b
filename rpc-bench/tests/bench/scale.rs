//! `rpc-bench scale` as a program.

use std::process::Command;

use serde_json::Value as Json;

const KEYS: [&str; 9] = [
    "over",
    "workers",
    "nodes",
    "start_ms",
    "call_ms",
    "call_p99_ms",
    "n",
    "controller_bytes",
    "controller_bytes_per_worker",
];

/// The exit code, standard output, standard error.
fn cli(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rpc-bench")).arg("scale").args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn every_kind_of_session_is_measured_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let chart = folder.path().join("chart.svg");
    let (code, stdout, stderr) =
        cli(&["--json", "--workers", "6,8320", "--seconds", "0", "--chart", chart.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let lines: Vec<Json> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found: Vec<_> = lines
        .iter()
        .map(|line| {
            (line["over"].as_str().unwrap(), line["workers"].as_u64().unwrap(), line["nodes"].as_u64().unwrap())
        })
        .collect();
    // Only simulated workers are more than 1,024. 130 nodes are a tree of 64 and those below.
    let expected =
        [("threads", 6, 1), ("nodes", 6, 6), ("simulated", 6, 1), ("simulated", 8320, 130), ("dial-in", 6, 6)];
    assert_eq!(found, expected);
    for line in &lines {
        let keys: Vec<_> = line.as_object().unwrap().keys().map(String::as_str).collect();
        assert!(KEYS.iter().all(|key| keys.contains(key)) && keys.len() == KEYS.len(), "{line}");
        assert!(line["start_ms"].as_f64().unwrap() > 0.0 && line["call_ms"].as_f64().unwrap() > 0.0, "{line}");
        assert_eq!(line["n"], 5, "{line}");
    }
    let chart = std::fs::read_to_string(chart).unwrap();
    assert!(chart.starts_with("<svg ") && chart.contains("<polyline"), "{chart}");
}

#[test]
fn a_table_is_printed_for_people_and_wrong_arguments_are_refused() {
    let (code, stdout, stderr) = cli(&["--workers=3", "--over=threads", "--seconds=0"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("memory KiB/worker") && stdout.contains("threads"), "{stdout}");
    for (args, said) in
        [(["--over", "pigeons"], "pigeons"), (["--workers", "0"], "0"), (["--seconds", "-1"], "must be a time")]
    {
        let (code, _, stderr) = cli(&[&args.join("=")]);
        assert_eq!(code, 2, "{args:?}: {stderr}");
        assert!(stderr.contains(said), "{args:?}: {stderr}");
    }
}
