//! `rpc-bench send` as a program.

use std::process::Command;

use serde_json::Value as Json;

#[test]
fn a_send_is_measured_beside_a_bare_copy_and_the_way_through_the_client() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-bench"));
    let output = command.args(["send", "--json", "--pairs", "1", "--mib", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let line: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&line["case"], &line["n"]), (&Json::from("send"), &Json::from(1)));
    for name in ["median", "bare", "through_client", "ratio_bare", "ratio_through_client"] {
        assert!(line[name].as_f64().unwrap() > 0.0, "{name}: {line}");
    }
}
