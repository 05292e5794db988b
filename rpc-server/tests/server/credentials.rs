//! `rpc-cli cert` and `rpc-cli token`, as people run them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rpc_transports::Token;
use serde_json::Value as Json;

use crate::NO_OPENCL;

fn cli(args: &[&str]) -> Output {
    // With an empty umask the modes are the program's own choice.
    let mut command = Command::new("sh");
    command.args(["-c", "umask 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_rpc-cli")]).args(args);
    command.env_clear().env(NO_OPENCL.0, NO_OPENCL.1).stdin(Stdio::null()).output().unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = cli(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the exit code and the errors of a run that must fail.
fn refused(args: &[&str]) -> (Option<i32>, String) {
    let output = cli(args);
    assert!(output.stdout.is_empty() && !output.status.success(), "{output:?}");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn mode(file: &Path) -> u32 {
    fs::metadata(file).unwrap().permissions().mode() & 0o777
}

#[test]
fn certificates_are_made_once_and_renewed_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("pki");
    let out = out.to_str().unwrap();
    let made = ok(&["cert", "--out", out, "--host", "board.lan", "10.0.0.5", "--host", "::1"]);
    assert!(made.lines().count() == 3 && made.contains("board.lan, 10.0.0.5, ::1"), "{made}");
    for file in ["ca", "server", "client"] {
        let (certificate, key) = (format!("{out}/{file}.pem"), format!("{out}/{file}.key"));
        assert_eq!((mode(certificate.as_ref()), mode(key.as_ref())), (0o644, 0o600), "{file}");
    }
    let authority = fs::read(format!("{out}/ca.pem")).unwrap();
    let report: Json = serde_json::from_str(&ok(&["cert", "--json", "--out", out, "--days", "30"])).unwrap();
    assert_eq!((report["ca"]["made"].as_str(), report["server"]["made"].as_str()), (Some("kept"), Some("renewed")));
    assert_eq!(report["client"]["names"][0], "client");
    assert_eq!(report["server"]["certificate"].as_str(), Some(&*format!("{out}/server.pem")));
    assert!(report["server"]["expires"].as_str().unwrap() < report["ca"]["expires"].as_str().unwrap());
    assert!(fs::read(format!("{out}/ca.pem")).unwrap() == authority);

    fs::remove_file(format!("{out}/ca.key")).unwrap();
    let (code, error) = refused(&["cert", "--out", out]);
    assert!(code == Some(1) && error.contains("--force"), "{error}");
    ok(&["cert", "--out", out, "--host", "board.lan", "--force"]);
    assert!(fs::read(format!("{out}/ca.pem")).unwrap() != authority);
}

#[test]
fn malformed_names_are_errors_of_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    for (args, hint) in [
        (&["cert", "--out", out][..], "--host"),
        (&["cert", "--out", out, "--host", "tcp://board:9090"], "board.lan"),
        (&["cert", "--out", out, "--host", "a", "--client-name", "two words"], "letters"),
        (&["cert", "--out", out, "--host", "a", "--days", "0"], "1..=3652"),
        (&["cert", "--host", "a"], "--out"),
        (&["token", "--append"], "--out"),
        (&["token", "--name", "two words"], "cannot make the token"),
        (&["token", "--name", "anonymous"], "anonymous"),
    ] {
        let (code, error) = refused(args);
        assert!(code == Some(2) && error.contains(hint), "{args:?}: {error}");
    }
}

#[test]
fn tokens_are_printed_or_kept_in_a_private_file() {
    let token = ok(&["token"]);
    assert!(token.starts_with("rpct_") && token.lines().count() == 1 && token != ok(&["token"]), "{token}");
    let report: Json = serde_json::from_str(&ok(&["token", "--json"])).unwrap();
    assert!(report["token"].as_str().unwrap().starts_with("rpct_"));

    let named = ok(&["token", "--name", "alice"]);
    assert_eq!(named.parse::<Token>().unwrap().name(), "alice");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let out = file.to_str().unwrap();
    assert_eq!(ok(&["token", "--out", out]), "", "a stored secret is not printed");
    assert_eq!(mode(&file), 0o600);
    let first = fs::read_to_string(&file).unwrap();
    let (code, error) = refused(&["token", "--out", out]);
    assert!(code == Some(1) && error.contains("--append"), "{error}");
    let report: Json = serde_json::from_str(&ok(&["token", "--out", out, "--append", "--json"])).unwrap();
    assert_eq!(report["tokens"], 2);
    let both = fs::read_to_string(&file).unwrap();
    assert!(both.starts_with(&first) && both.lines().count() == 2 && mode(&file) == 0o600);
}
