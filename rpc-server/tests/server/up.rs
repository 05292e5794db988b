//! `rpc-cli up` and `down`, with a stand-in for `ssh` that runs the commands on this machine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value as Json;
use tempfile::TempDir;

use super::cli::{Run, command, run};

/// Reads the options as OpenSSH does, and runs the command in a home of its own. The destination
/// `away` cannot be reached.
const SSH: &str = r#"#!/bin/sh
home=$1; shift
while [ $# -gt 0 ]; do
    case "$1" in
        --) shift; break ;;
        -G) echo "user me"; echo "hostname 127.0.0.1"; exit 0 ;;
        *) shift ;;
    esac
done
case "$1" in away) echo "ssh: connect to host away: No route to host" >&2; exit 255 ;; esac
echo "Welcome!"
env -u XDG_STATE_HOME HOME="$home" sh -c "$2"
"#;

struct Machines {
    folder: TempDir,
}

impl Machines {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ssh"), SSH).unwrap();
        fs::create_dir(folder.path().join("home")).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Returns the path of a file of the server.
    fn state(&self, name: &str) -> String {
        let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        self.path(&format!("home/.local/state/rpc-up/{}/{name}", machine.trim()))
    }

    fn cli(&self, args: &[&str]) -> Run {
        let mut command = command(args);
        command.env("RPC_CLI_CONFIG", self.path("user/config.toml"));
        command.env("RPC_CLI_SSH", format!("sh '{}' '{}'", self.path("ssh"), self.path("home")));
        run(command)
    }

    /// Returns the process of the server, if one was started and not stopped.
    fn server(&self) -> Option<String> {
        Some(fs::read_to_string(self.state("pid")).ok()?.trim().to_owned())
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        if self.server().is_some() {
            self.cli(&["down", "board"]);
        }
    }
}

#[test]
fn a_server_is_started_used_and_stopped_on_another_machine() {
    let machines = Machines::new();
    let up = ["up", "me@board", "--listen", "tls://0.0.0.0:0", "--json"];
    let started: Json = serde_json::from_str(&machines.cli(&up).ok()).unwrap();
    assert!(started["name"] == "board" && started["reached"] == true, "{started}");
    assert_eq!(machines.cli(&["call", "@board", "rpc.echo", "7"]).ok(), "7\n");
    let token = fs::read_to_string(machines.path("user/board.token")).unwrap();
    for file in [machines.path("user/board.token"), machines.state("token")] {
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o077, 0, "{file}");
        assert_eq!(fs::read_to_string(&file).unwrap(), token);
    }
    // Without the token there is no way in.
    let address = started["address"].as_str().unwrap();
    assert_ne!(machines.cli(&["call", address, "rpc.echo", "7"]).code, 0);

    let again = machines.cli(&up);
    assert!(again.code == 1 && again.stderr.contains("rpc-cli down"), "{again:?}");
    let pid = machines.server().unwrap();
    let stopped = machines.cli(&["down", "me@board"]);
    assert!(stopped.stderr.contains("stopped the server"), "{stopped:?}");
    let state = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    assert!(!state.contains("rpc-server"), "{state}");
    for gone in [machines.path("user/board.token"), machines.state("token"), machines.state("pid")] {
        assert!(!Path::new(&gone).exists(), "{gone}");
    }
    let none = machines.cli(&["down", "board"]);
    assert!(none.code == 0 && none.stderr.contains("no server"), "{none:?}");

    // The program is there already, and the name is that of the same server.
    let again = machines.cli(&["up", "board", "--listen", "tls://127.0.0.1:0", "-v"]);
    assert_eq!(again.code, 0, "{again:?}");
    assert!(!again.stderr.contains("copying") && again.stderr.contains("change the file"), "{again:?}");
}

#[test]
fn what_cannot_be_started_is_explained_and_leaves_nothing() {
    let (machines, server) = (Machines::new(), env!("CARGO_BIN_EXE_rpc-server"));
    for (args, code, words) in [
        (&["up", "away"][..], 69, "No route to host"),
        (&["up", "-x"], 2, "-x"),
        (&["up", "board", "--name", "a b"], 2, "no name of a server"),
        (&["up", "board", "--program", "/no/such/program"], 1, "/no/such/program"),
        (&["up", "board", "--program", server, "--listen", "tls://127.0.0.1:0", "--", "--no-flag"], 1, "--no-flag"),
    ] {
        let failed = machines.cli(args);
        assert!(failed.code == code && failed.stderr.contains(words), "{args:?}: {failed:?}");
        assert_eq!(machines.server(), None, "{args:?}");
        assert!(!Path::new(&machines.path("user/board.token")).exists(), "{args:?}");
    }
    // The token of a server that was named by hand stays.
    machines.cli(&["use", "board", "tls://board.lan", "--token-file", &machines.path("mine")]).ok();
    fs::write(machines.path("user/board.token"), "of another").unwrap();
    assert_eq!(machines.cli(&["down", "board"]).code, 0);
    assert_eq!(machines.cli(&["up", "board"]).code, 2);
    assert_eq!(fs::read_to_string(machines.path("user/board.token")).unwrap(), "of another");
    // A process that has got the number of a server that is gone is not taken for it.
    let folder = machines.state("");
    fs::create_dir_all(&folder).unwrap();
    fs::write(format!("{folder}/pid"), std::process::id().to_string()).unwrap();
    let none = machines.cli(&["down", "board"]);
    assert!(none.code == 0 && none.stderr.contains("no server"), "{none:?}");
}
