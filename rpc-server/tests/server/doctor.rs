//! `rpc-cli doctor`, as a table: each way to be misconfigured, and what it says.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rpc_server::ServerProcess;
use rpc_server::pki::CertificatePlan;
use serde_json::Value as Json;
use tempfile::TempDir;

use crate::NO_OPENCL;

/// Folder with certificates and tokens, and the servers that use them.
struct Site {
    folder: TempDir,
}

impl Site {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Makes certificates for this host as if it were so long ago.
    fn certificates(&self, folder: &str, host: &str, age: Duration) {
        let plan = CertificatePlan::new(self.path(folder)).host(host.parse().unwrap()).validity(30 * DAY);
        plan.write(SystemTime::now() - age).unwrap();
    }

    fn token(&self, file: &str) -> String {
        let file = self.path(file);
        let made = Command::new(env!("CARGO_BIN_EXE_rpc-cli"))
            .env_clear()
            .env(NO_OPENCL.0, NO_OPENCL.1)
            .args(["token", "--out", &file])
            .output();
        assert!(made.unwrap().status.success());
        file
    }

    /// Starts `rpc-server`. It ends with its handle.
    fn start(&self, command: &str, listen: &str, flags: &[&str]) -> ServerProcess {
        let mut program = crate::server_program();
        program
            .env_clear()
            .env(NO_OPENCL.0, NO_OPENCL.1)
            .env("XDG_STATE_HOME", self.folder.path())
            .args([command, "--listen", listen])
            .args(flags);
        program.args(["--exit-with-stdin", "--log-level", "error"]);
        ServerProcess::spawn(program).unwrap()
    }
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Checks the exit code of the examination of `address`, its last step, and words of what it found
/// and of its advice. All steps before have to be fine.
#[track_caller]
fn finds(address: &str, flags: &[&str], code: i32, step: &str, detail: &str, advice: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    let output = command
        .env_clear()
        .env(NO_OPENCL.0, NO_OPENCL.1)
        .stdin(Stdio::null())
        .args(["doctor", "--json", address])
        .args(flags)
        .output();
    let output = output.unwrap();
    let report: Json = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let steps = report["steps"].as_array().unwrap();
    let (last, before) = steps.split_last().unwrap();
    let text = |field: &str| last[field].as_str().unwrap_or_default();
    assert_eq!((output.status.code(), text("step")), (Some(code), step), "{address}: {report}");
    assert!(text("detail").contains(detail), "{address}: {report}");
    assert!(text("advice").contains(advice), "{address}: {report}");
    assert!(before.iter().all(|step| step["ok"] == true) && last["ok"] == (code == 0), "{address}: {report}");
}

#[test]
fn credentials() {
    let site = Site::new();
    site.certificates("pki", "localhost", Duration::ZERO);
    site.certificates("old", "localhost", 31 * DAY);
    site.certificates("other", "localhost", Duration::ZERO);
    let pki = |folder: &str, file: &str| site.path(&format!("{folder}/{file}"));
    let (cert, key, ca) = (pki("pki", "server.pem"), pki("pki", "server.key"), pki("pki", "ca.pem"));
    let shows = ["--cert", &cert, "--cert-key", &key, "--client-ca", &ca];
    let client = |folder: &str| [pki(folder, "client.pem"), pki(folder, "client.key")];
    let [right, old, other] = ["pki", "old", "other"].map(client);
    let other_ca = pki("other", "ca.pem");
    for scheme in ["tls", "quic"] {
        let server = site.start("serve", &format!("{scheme}://localhost:0"), &shows);
        // The address has the name that the certificate has.
        let at = server.address();
        assert!(at.starts_with(&format!("{scheme}://localhost:")), "{at}");
        let with = |[cert, key]: &[String; 2], code, step, detail, advice| {
            finds(at, &["--ca", &ca, "--cert", cert, "--cert-key", key], code, step, detail, advice);
        };
        with(&right, 0, "echo", "a call returned", "");
        with(&old, 77, "identity", "has expired on", "renew it");
        finds(at, &[], 2, "connect", "nothing to check the server's certificate by", "--ca");
        finds(at, &["--ca", &other_ca], 69, "connect", "no secure channel", "--ca");
        let name = at.replace("localhost", "127.0.0.1");
        finds(&name, &["--ca", &ca], 69, "connect", "not valid for", "for another name");
        if scheme == "tls" {
            // Over QUIC the server's objection may come before the channel or after it.
            finds(at, &["--ca", &ca], 77, "identity", "wants a certificate", "--cert");
            with(&other, 77, "identity", "not by an authority that it trusts", "--cert");
            finds(&at.replace("tls:", "tcp:"), &[], 76, "protocol", "speaks TLS", "tls://");
        }
    }
    let (tokens, wrong) = (site.token("tokens"), site.token("wrong"));
    let server = site.start("serve", "tcp://127.0.0.1:0", &["--token-file", &tokens]);
    finds(server.address(), &["--token-file", &tokens], 0, "echo", "a call returned", "");
    finds(server.address(), &["--token-file", &wrong], 77, "identity", "token", "--token-file");
    finds(server.address(), &[], 77, "identity", "identity", "--token-file");
    finds(server.address(), &["--token-file", "/no/such/file"], 1, "identity", "/no/such/file", "--token-file");
    let [cert, key] = [pki("pki", "client.pem"), pki("other", "client.key")];
    finds(server.address(), &["--cert", &cert, "--cert-key", &key], 1, "identity", "is not that of", "--cert-key");
    let tls = server.address().replace("tcp:", "tls:");
    finds(&tls, &["--ca", &ca], 69, "connect", "no secure channel", "tcp://");
}

#[test]
fn hops_and_keys() {
    let site = Site::new();
    let origin = site.start("serve", "tcp://127.0.0.1:0", &["--key", "board"]);
    let hop = site.start("serve", "tcp://127.0.0.1:0", &["--allow-forward", origin.address()]);
    let closed = site.start("serve", "tcp://127.0.0.1:0", &[]);
    let board = format!("{}/board", origin.address());
    let [tunnel, no_tunnel] = [&hop, &closed].map(|hop| format!("tunnel:{}", hop.address()));
    finds(&board, &["-J", hop.address()], 0, "echo", "a call returned", "");
    // A regression: no address began with tunnel:.
    finds(&board, &["-J", &tunnel], 0, "echo", "a call returned", "");
    for jump in [closed.address(), &no_tunnel] {
        finds(&board, &["-J", jump], 77, "hop 1", "was to reach", "--allow-forward");
    }
    finds(&format!("{}/desk", origin.address()), &[], 77, "key", "desk", "rpc-cli info");
    finds("tunnel:tcp://127.0.0.1:1", &[], 2, "parse", "tunnel:", "correct the address");
    finds("unix:/no/such/folder/socket", &[], 69, "connect", "the folder of the socket file is missing", "path");
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let quic = format!("quic://{}", silent.local_addr().unwrap());
    let tokens = site.token("tokens");
    let flags = ["--token-file", &tokens, "--timeout", "300ms"];
    finds(&quic, &flags, 124, "connect", "no answer", "UDP port");

    let relay = site.start("relay", "tcp://127.0.0.1:0", &[]);
    finds(relay.address(), &[], 2, "key", "it is a relay", "/NAME");
    let board = format!("{}/board", relay.address());
    finds(&board, &[], 1, "key", "no server with key 'board'", &format!("--relay {board}"));
}

#[test]
fn servers_of_a_tracker() {
    let site = Site::new();
    let tracker = site.start("tracker", "tcp://127.0.0.1:0", &[]);
    let pool = tracker.address().replace("tcp://", "tracker://");
    let board = format!("{pool}/board");
    finds(&board, &[], 69, "servers", "never registered", "--tracker-key");
    let register = ["--tracker", tracker.address(), "--tracker-key", "board", "--label", "rack=7"];
    let _server = site.start("serve", "tcp://127.0.0.1:0", &register);
    until_registered(&board);
    finds(&board, &["--label", "rack=7", "--want", "cpu"], 0, "servers", "1 server with the key 'board'", "");
    // A regression: --label and --want were ignored.
    finds(&board, &["--label", "rack=8"], 69, "servers", "rack=7", "--label");
    finds(&board, &["--want", "cuda"], 69, "servers", "--want", "--want");
    finds(&format!("{pool}/bord"), &[], 69, "servers", "there are: board", "correct the key");
    finds(tracker.address(), &["--want", "cpu"], 2, "parse", "is no tracker://", "tracker://");

    // A regression: commands waited for a misspelt key in silence.
    // The tool says what it waits for, unless the machine was too slow to ask the tracker in time.
    let mut told = String::new();
    for limit in ["1500ms", "10s", "30s"] {
        let mut call = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
        call.env_clear().env(NO_OPENCL.0, NO_OPENCL.1).args([
            "call",
            &format!("{pool}/bord"),
            "rpc.noop",
            "--timeout",
            limit,
        ]);
        let output = call.output().unwrap();
        told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(124), "{told}");
        if told.lines().any(|line| line.starts_with("waiting for a server")) {
            break;
        }
    }
    assert!(told.lines().any(|line| line.starts_with("waiting for a server")), "{told}");
    let error = told.lines().find(|line| line.starts_with("error:")).unwrap();
    assert!(error.contains("the key 'bord'") && error.contains("there are: board"), "{error}");
}

fn until_registered(address: &str) {
    let begun = Instant::now();
    loop {
        let mut doctor = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
        if doctor.env_clear().env(NO_OPENCL.0, NO_OPENCL.1).args(["doctor", address]).output().unwrap().status.success()
        {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the server does not register");
    }
}
