//! `rpc-cli logs`: log lines of a server, for those who may read them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use rpc_core::{Lane, Packed};
use rpc_server::ServerProcess;
use rpc_server::builtins::LogPage;
use rpc_transports::Connector;
use serde_json::Value as Json;
use tempfile::TempDir;

use super::cli::{cli, command};

const SECRET: &str = "00000000000000000000000000000001-secret";

/// Starts a server that logs everything, with these flags.
fn start(folder: &TempDir, name: &str, flags: &[&str]) -> ServerProcess {
    let mut server = crate::server_program();
    server.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin"]).args(flags);
    if !flags.contains(&"--log-level") {
        server.args(["--log-level", "info"]);
    }
    server.arg("--workdir").arg(folder.path().join(name)).stderr(Stdio::null());
    ServerProcess::spawn(server).unwrap()
}

fn file(folder: &TempDir, name: &str, text: &str) -> String {
    let file = folder.path().join(name);
    fs::write(&file, text).unwrap();
    file.into_os_string().into_string().unwrap()
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lines_are_shown_and_followed_also_from_isolated_sessions_and_over_hops() {
    let folder = tempfile::tempdir().unwrap();
    let hop = start(&folder, "hop", &["--allow-forward", "tcp://127.0.0.1:*"]);
    for isolate in ["none", "process"] {
        let server = start(&folder, isolate, &["--isolate", isolate, "--allow-logs", "--key", "board"]);
        let logged = cli(&["logs", server.address()]).ok();
        assert!(logged.contains("listening") && logged.contains("INFO"), "{logged}");
        let last = cli(&["logs", "--lines", "1", server.address()]).ok();
        assert_eq!(last.lines().count(), 1, "{last}");

        let mut follow =
            command(&["-J", hop.address(), "logs", "--follow", "--lines", "1", "--json", server.address()]);
        let mut follow = KillOnDrop(follow.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(follow.0.stdout.take().unwrap()).lines();
        let mut next = || serde_json::from_str::<Json>(&lines.next().unwrap().unwrap()).unwrap();
        let first = next();
        // What happens from now on is told without being asked for again.
        let refused = cli(&["call", &format!("{}/other-key", server.address()), "rpc.noop"]);
        assert_eq!(refused.code, 77, "{refused:?}");
        let mut number = first["number"].as_u64().unwrap();
        loop {
            let line = next();
            number += 1;
            assert_eq!(line["number"], number, "{line}");
            if line["line"].as_str().unwrap().contains("other-key") {
                break;
            }
        }
    }
}

#[test]
fn the_log_is_for_those_whom_the_operator_lets_and_names_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = [("reader", 1), ("guest", 2)].map(|(name, number)| format!("{name} {number}{SECRET}"));
    let all = file(&folder, "tokens", &tokens.join("\n"));
    let [reader, guest] = [0, 1].map(|at| file(&folder, &format!("token{at}"), &tokens[at]));
    let policy = "[[rule]]\nname = 'readers'\nidentities = ['token:reader']\nlogs = true\n\n\
                  [[rule]]\nname = 'all'\nidentities = ['*']\nfunctions = ['*']";
    let policy = file(&folder, "policy", policy);
    for isolate in ["none", "process"] {
        let closed = start(&folder, "closed", &["--isolate", isolate]);
        let refused = cli(&["logs", closed.address()]);
        assert!(refused.code == 77 && refused.stderr.contains("--allow-logs"), "{refused:?}");
        assert_eq!(cli(&["can", "logs", closed.address()]).code, 1);

        let flags = ["--isolate", isolate, "--token-file", &all, "--policy", &policy, "--log-level", "trace"];
        let server = start(&folder, "open", &flags);
        let as_client = |args: &[&str], token: &str| cli(&[args, &[server.address(), "--token-file", token]].concat());
        for (token, code) in [(&reader, 0), (&guest, 1)] {
            assert_eq!(as_client(&["can", "logs"], token).code, code);
        }
        let refused = as_client(&["logs"], &guest);
        assert!(refused.code == 77 && refused.stderr.contains("given by 'logs'"), "{refused:?}");
        let logged = as_client(&["logs", "--lines", "4000"], &reader).ok();
        assert!(logged.contains("guest") && !logged.contains(SECRET), "{logged}");

        // The settings of the server are the ceiling.
        let server = start(&folder, "ceiling", &[&flags[..6], &["--allow-logs=false"]].concat());
        let refused = cli(&["logs", server.address(), "--token-file", &reader]);
        assert!(refused.code == 77 && refused.stderr.contains("--allow-logs"), "{refused:?}");
    }
}

/// A regression: a read beyond sixteen was refused, or never answered, and reads that the client
/// had cancelled kept their places for half a minute.
#[test]
fn many_reads_at_a_time_are_all_answered() {
    const END: i64 = i64::MAX;
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, "server", &["--isolate", "process", "--allow-logs"]);
    let session = Connector::new().connect_blocking(server.address()).unwrap();
    let function = session.function::<(Option<i64>, i64), Packed>("rpc.logs.read").wait().unwrap();
    // They wait for lines that do not come, and are given up.
    let waiting: Vec<_> = (0..40).map(|_| function.call((Some(END), 30_000)).lane(Lane::CONCURRENT).start()).collect();
    drop(waiting);
    let reads: Vec<_> = (0..40).map(|_| function.call((None, 0)).lane(Lane::CONCURRENT).start()).collect();
    for read in reads {
        let page: LogPage = read.wait().unwrap().decode().unwrap();
        assert!(page.lines[0].contains("INFO"), "{page:?}");
    }
}
