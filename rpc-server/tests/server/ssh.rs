//! `rpc-cli` at `ssh://` addresses, with a stand-in for `ssh` on its `PATH`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rpc_server::server::ServerProcess;
use tempfile::TempDir;

/// Writes its arguments to a file beside it, one a line, and runs the command on this machine.
const SSH: &str = r#"#!/bin/sh
printf '%s\n' "$@" > "${0%/*}/arguments"
for command; do :; done
exec sh -c "$command"
"#;

/// A folder with the stand-in, which is first on the `PATH` of `rpc-cli`. Behind it is the folder
/// of `rpc-server`.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ssh = folder.path().join("ssh");
        fs::write(&ssh, SSH).unwrap();
        fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    /// Runs `rpc-cli` with these variables in its environment, which the server inherits.
    fn cli(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        let programs = Path::new(env!("CARGO_BIN_EXE_rpc-server")).parent().unwrap().to_owned();
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let folders = [self.folder.path().to_owned(), programs].into_iter().chain(std::env::split_paths(&inherited));
        let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
        command.args(args).env("PATH", std::env::join_paths(folders).unwrap());
        command.env("RPC_SERVER_WORKDIR", self.folder.path().join("workdir")).env("RPC_SERVER_LOG_LEVEL", "error");
        command.envs(variables.iter().copied()).stdin(Stdio::null()).output().unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn printed(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

#[test]
fn a_call_starts_rpc_server_on_the_host() {
    let machine = Machine::new();
    let output = machine.cli(&["call", "ssh://me@board:2222", "rpc.echo", "42"], &[]);
    assert_eq!(printed(&output), "42\n");
    let arguments = fs::read_to_string(machine.folder.path().join("arguments")).unwrap();
    let end = "-l\nme\n-p\n2222\n--\nboard\n'rpc-server' serve --stdio\n";
    assert!(arguments.ends_with(end), "{arguments}");
}

#[test]
fn a_program_with_an_odd_path_is_started() {
    let machine = Machine::new();
    let odd = machine.folder.path().join("it's $HOME; \"odd\"");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_rpc-server"), &odd).unwrap();
    let written = odd.to_str().unwrap().replace(' ', "%20");
    let output = machine.cli(&["call", &format!("ssh://board?program={written}"), "rpc.echo", "42"], &[]);
    assert_eq!(printed(&output), "42\n");
}

#[test]
fn a_file_goes_to_a_server_behind_a_jump() {
    let machine = Machine::new();
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    command.arg(machine.folder.path().join("target"));
    let server = ServerProcess::spawn(command).unwrap();
    let jump = |args: &[&str]| {
        let args: Vec<&str> = args.iter().copied().chain(["-J", "ssh://board"]).collect();
        machine.cli(&args, &[("RPC_SERVER_ALLOW_FORWARD", server.address())])
    };
    let file = machine.folder.path().join("ssh").display().to_string();
    printed(&jump(&["put", server.address(), &file, "copied"]));
    let back = machine.folder.path().join("back");
    printed(&jump(&["get", server.address(), "copied", back.to_str().unwrap()]));
    assert_eq!(fs::read_to_string(back).unwrap(), SSH);
}

#[test]
fn failures_say_what_to_do() {
    let machine = Machine::new();
    let empty = tempfile::tempdir().unwrap();
    let old = env!("CARGO_BIN_EXE_rpc-cli");
    for (address, variables, words) in [
        ("ssh://board".to_owned(), &[("PATH", empty.path().to_str().unwrap())][..], "cannot start ssh for ssh://board"),
        ("ssh://board?program=/no/such".to_owned(), &[], "there is no program /no/such on board"),
        (format!("ssh://board?program={}", old.replace(' ', "%20")), &[], "does not know `serve --stdio`"),
    ] {
        let output = machine.cli(&["call", &address, "rpc.echo", "42"], variables);
        assert_eq!(output.status.code(), Some(69), "{address}: {output:?}");
        assert!(text(&output.stderr).contains(words), "{address}: {output:?}");
    }
    let refused = machine.cli(&["call", "ssh://-oProxyCommand", "rpc.echo", "42"], &[]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(text(&refused.stderr).contains("hyphen"), "{refused:?}");
}

#[test]
fn the_doctor_knows_such_addresses() {
    let output = Machine::new().cli(&["doctor", "ssh://board:22"], &[]);
    assert!(printed(&output).contains("a server started on board through ssh"), "{output:?}");
}
