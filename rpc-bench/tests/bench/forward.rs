//! `rpc-bench forward` as a program.

use std::process::Command;

use serde_json::Value as Json;

#[test]
fn a_forwarded_connection_is_measured_beside_relays_in_both_directions() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-bench"));
    let output = command.args(["forward", "--json", "--pairs", "1", "--mib", "1"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Json> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cases: Vec<_> = lines.iter().map(|line| line["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["to the service", "from the service"]);
    for line in lines {
        for name in ["median", "two_relays", "one_relay", "direct", "ratio_two_relays", "ratio_one_relay"] {
            assert!(line[name].as_f64().unwrap() > 0.0, "{name}: {line}");
        }
    }
}
