//! Authentication by certificates and tokens, tested through both programs.

use std::io::{BufRead, BufReader, Lines, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

use rpc_server::pki::CertificatePlan;
use rustix::process::{Pid, Signal, kill_process};

use crate::NO_OPENCL;

fn cli(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rpc-cli"))
        .args(args)
        .env_clear()
        .env(NO_OPENCL.0, NO_OPENCL.1)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ok(output: Output) -> String {
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Folder with certificates, tokens, and the workspaces of servers.
struct TrustFiles(tempfile::TempDir);

impl TrustFiles {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).into_os_string().into_string().unwrap()
    }

    fn with_certificates() -> Self {
        let files = Self::new();
        ok(cli(&["cert", "--out", &files.path("pki"), "--host", "localhost,127.0.0.1", "--client-name", "alice"]));
        files
    }

    fn pki(&self, name: &str) -> String {
        self.path(&format!("pki/{name}"))
    }

    fn token(&self, file: &str, more: &[&str]) {
        ok(cli(&[&["token", "--out", &self.path(file)], more].concat()));
    }

    fn serve(&self, addresses: &[&str], args: &[&str]) -> Daemon {
        self.start("serve", addresses, args)
    }

    /// Starts `rpc-server` with this subcommand.
    fn start(&self, subcommand: &str, addresses: &[&str], args: &[&str]) -> Daemon {
        let mut command = crate::server_program();
        command
            .arg(subcommand)
            .env_clear()
            .env(NO_OPENCL.0, NO_OPENCL.1)
            .env("XDG_STATE_HOME", self.path("state"))
            .args(args);
        for address in addresses {
            command.args(["--listen", address]);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = |line: String| line.strip_prefix("listening on ").unwrap().to_owned();
        let addresses = addresses.iter().map(|_| address(printed.next().unwrap().unwrap())).collect();
        Daemon { child, addresses, log, printed }
    }

    /// Returns the error of a server that does not start.
    fn refused(&self, args: &[&str]) -> String {
        let work = self.path("work");
        let args = [&["serve", "--workdir", &work], args].concat();
        let output = crate::server_program().env_clear().env(NO_OPENCL.0, NO_OPENCL.1).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(78), "{}", said(&output));
        said(&output)
    }
}

struct Daemon {
    child: Child,
    addresses: Vec<String>,
    log: Lines<BufReader<ChildStderr>>,
    /// Lines after the addresses.
    printed: Lines<BufReader<ChildStdout>>,
}

impl Daemon {
    /// Returns the first line of the log with `text` that has not been read.
    fn await_log(&mut self, text: &str) -> String {
        let found = self.log.find_map(|line| line.ok().filter(|line| line.contains(text)));
        found.unwrap_or_else(|| panic!("the log does not say {text}"))
    }

    fn hang_up(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn echo(address: &str, trust: &[&str]) -> Output {
    cli(&[&["call", address, "rpc.echo", "42"], trust].concat())
}

#[test]
fn clients_with_a_certificate_are_served_over_tls_and_quic() {
    let (files, stranger) = (TrustFiles::with_certificates(), TrustFiles::with_certificates());
    let server = files.serve(
        &["tls://127.0.0.1:0", "quic://127.0.0.1:0"],
        &[
            "--cert",
            &files.pki("server.pem"),
            "--cert-key",
            &files.pki("server.key"),
            "--client-ca",
            &files.pki("ca.pem"),
        ],
    );
    for address in &server.addresses {
        let (ca, cert, key) = (files.pki("ca.pem"), files.pki("client.pem"), files.pki("client.key"));
        assert_eq!(ok(echo(address, &["--ca", &ca, "--cert", &cert, "--cert-key", &key])), "42\n");
        // No certificate; one of another authority; a server of another authority; no trust at all.
        let refused = echo(address, &["--ca", &ca]);
        assert!(refused.status.code() == Some(77) && said(&refused).contains("--cert"), "{}", said(&refused));
        let (cert, key) = (stranger.pki("client.pem"), stranger.pki("client.key"));
        let refused = echo(address, &["--ca", &ca, "--cert", &cert, "--cert-key", &key]);
        assert_eq!(refused.status.code(), Some(77), "{}", said(&refused));
        let wrong = echo(address, &["--ca", &stranger.pki("ca.pem")]);
        assert!(!wrong.status.success() && said(&wrong).contains("certificate"), "{}", said(&wrong));
        let bare = echo(address, &[]);
        assert_eq!(bare.status.code(), Some(2));
        assert!(said(&bare).contains("--ca") || said(&bare).contains("token"), "{}", said(&bare));
    }
}

#[test]
fn a_token_is_enough_and_can_be_changed_while_the_server_runs() {
    let files = TrustFiles::new();
    files.token("tokens", &["--name", "alice"]);
    files.token("other", &[]);
    std::fs::copy(files.path("tokens"), files.path("first")).unwrap();
    // The server makes a certificate for itself.
    let mut server =
        files.serve(&["tls://127.0.0.1:0", "quic://127.0.0.1:0"], &["--token-file", &files.path("tokens")]);
    let (first, other) = (files.path("first"), files.path("other"));
    for address in &server.addresses {
        assert_eq!(ok(echo(address, &["--token-file", &first])), "42\n");
        let refused = echo(address, &["--token-file", &other]);
        assert_eq!(refused.status.code(), Some(77), "{}", said(&refused));
    }
    // Both tokens are valid while clients are changed over.
    files.token("tokens", &["--append"]);
    let text = std::fs::read_to_string(files.path("tokens")).unwrap();
    let second = text.lines().last().unwrap();
    std::fs::write(files.path("second"), second).unwrap();
    server.hang_up();
    server.await_log("have been read again");
    let second = files.path("second");
    for address in &server.addresses {
        assert_eq!(ok(echo(address, &["--token-file", &first])), "42\n");
        assert_eq!(ok(echo(address, &["--token-file", &second])), "42\n");
    }
    // The old token is removed. A file that cannot be used changes nothing.
    std::fs::copy(&second, files.path("tokens")).unwrap();
    server.hang_up();
    server.await_log("have been read again");
    std::fs::write(files.path("tokens"), "too short\n").unwrap();
    server.hang_up();
    server.await_log("the old ones stay in use");
    for address in &server.addresses {
        assert_eq!(echo(address, &["--token-file", &first]).status.code(), Some(77));
        assert_eq!(ok(echo(address, &["--token-file", &second])), "42\n");
    }
}

#[test]
fn a_certificate_may_be_for_some_servers_alone() {
    let files = TrustFiles::with_certificates();
    let limit = |keys: &[&str]| {
        let out = files.path("pki");
        ok(cli(&[&["cert", "--out", &out], keys].concat()))
    };
    assert!(limit(&["--client-key", "board-7,board-8"]).contains("servers with the key board-7"));
    // A renewed certificate keeps the limit.
    limit(&[]);
    let (cert, key, ca) = (files.pki("server.pem"), files.pki("server.key"), files.pki("ca.pem"));
    let args = ["--cert", &cert, "--cert-key", &key, "--client-ca", &ca];
    let (cert, key) = (files.pki("client.pem"), files.pki("client.key"));
    let trust = ["--ca", &ca, "--cert", &cert, "--cert-key", &key];
    for address in ["tls://127.0.0.1:0", "quic://127.0.0.1:0"] {
        let allowed = files.serve(&[address], &[&args[..], &["--key", "board-7"]].concat());
        assert_eq!(ok(echo(&allowed.addresses[0], &trust)), "42\n");
        for more in [&["--key", "board-9"][..], &[]] {
            let other = files.serve(&[address], &[&args[..], more].concat());
            let refused = echo(&other.addresses[0], &trust);
            assert_eq!(refused.status.code(), Some(77));
            assert!(said(&refused).contains("board-7, board-8"), "{}", said(&refused));
        }
    }
    // A certificate without the limit serves all servers again.
    ok(cli(&["cert", "--out", &files.path("pki"), "--client-name", "bob"]));
    let any = files.serve(&["tls://127.0.0.1:0"], &args);
    assert_eq!(ok(echo(&any.addresses[0], &trust)), "42\n");
}

#[test]
fn a_hop_proves_itself_by_a_certificate_or_a_token_of_its_own() {
    let files = TrustFiles::with_certificates();
    files.token("tokens", &[]);
    let (cert, key, ca) = (files.pki("server.pem"), files.pki("server.key"), files.pki("ca.pem"));
    let (hop_cert, hop_key, tokens) = (files.pki("client.pem"), files.pki("client.key"), files.path("tokens"));
    let shows = ["--cert", &cert, "--cert-key", &key, "--client-ca", &ca];
    let by_certificate = ["--forward-cert", &hop_cert, "--forward-cert-key", &hop_key];
    for address in ["tls://127.0.0.1:0", "quic://127.0.0.1:0"] {
        // A target that takes certificates alone, and one that takes tokens as well.
        for (more, proof) in
            [(&[][..], &by_certificate[..]), (&["--token-file", &tokens], &["--forward-token-file", &tokens])]
        {
            let target = files.serve(&[address], &[&shows[..], more].concat());
            let forward =
                ["--allow-forward", &target.addresses[0], "--forward-ca", &ca, "--cert", &cert, "--cert-key", &key];
            let through = |proof: &[&str]| {
                let hop = files.serve(&["tcp://127.0.0.1:0"], &[&forward[..], proof].concat());
                echo(&target.addresses[0], &["-J", &hop.addresses[0]])
            };
            assert_eq!(ok(through(proof)), "42\n");
            // The hop's own certificate does not authenticate it there.
            let refused = through(&[]);
            assert_eq!(refused.status.code(), Some(77), "{}", said(&refused));
        }
    }
}

/// Holders of a token and of a certificate with one name, and a client whom a hop calls so.
#[test]
fn clients_with_one_name_have_the_rights_of_their_proof_and_a_broken_policy_changes_nothing() {
    let files = TrustFiles::with_certificates();
    files.token("alice", &["--name", "alice"]);
    files.token("gateway", &["--name", "gateway"]);
    let [alice, gateway] = ["alice", "gateway"].map(|name| std::fs::read_to_string(files.path(name)).unwrap());
    std::fs::write(files.path("tokens"), alice + &gateway).unwrap();
    let rule = |identity: &str, function: &str| {
        format!("[[rule]]\nname = '{identity}'\nidentities = ['{identity}']\nfunctions = ['{function}']\n")
    };
    let policy = |of_token: &str| {
        let rules =
            [("token:alice", of_token), ("cert:alice", "rpc.time_function"), ("via:gateway/alice", "rpc.new_object")];
        rules.map(|(identity, function)| rule(identity, function)).concat()
    };
    let file = files.path("policy");
    std::fs::write(&file, policy("rpc.sleep")).unwrap();
    let (cert, key, ca) = (files.pki("server.pem"), files.pki("server.key"), files.pki("ca.pem"));
    let (tokens, hop_token, alice) = (files.path("tokens"), files.path("gateway"), files.path("alice"));
    let mut server = files.serve(
        &["tls://127.0.0.1:0", "quic://127.0.0.1:0"],
        &[
            &["--cert", &cert, "--cert-key", &key, "--client-ca", &ca, "--token-file", &tokens][..],
            &["--trust-proxy", "token:gateway", "--policy", &file],
        ]
        .concat(),
    );
    let hop = files.serve(
        &["tcp://127.0.0.1:0"],
        &["--token-file", &tokens, "--forward-token-file", &hop_token, "--allow-forward", "*"],
    );
    let (client_cert, client_key) = (files.pki("client.pem"), files.pki("client.key"));
    let functions = ["rpc.sleep", "rpc.time_function", "rpc.new_object"];
    let may_call = |address: &str, trust: &[&str]| {
        functions.map(|function| {
            let permission = format!("call:{function}");
            let answer = cli(&[&["can", &permission, address], trust].concat());
            assert!([Some(0), Some(1)].contains(&answer.status.code()), "{}", said(&answer));
            answer.status.success()
        })
    };
    for address in &server.addresses {
        assert_eq!(may_call(address, &["--token-file", &alice]), [true, false, false]);
        let by_certificate = ["--ca", &ca, "--cert", &client_cert, "--cert-key", &client_key];
        assert_eq!(may_call(address, &by_certificate), [false, true, false]);
        assert_eq!(may_call(address, &["-J", &hop.addresses[0], "--token-file", &alice]), [false, false, true]);
    }

    let address = server.addresses[0].clone();
    std::fs::write(&file, "[[rule]]\nname = 'x'\nidentitys = ['*']\n").unwrap();
    server.hang_up();
    let logged = server.await_log("the old ones stay in use");
    assert!(logged.contains(&file) && logged.contains("line 3") && logged.contains("identitys"), "{logged}");
    assert_eq!(may_call(&address, &["--token-file", &alice]), [true, false, false]);
    // Neither is one taken that others could have written.
    std::fs::write(&file, policy("rpc.time*")).unwrap();
    let open_to = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    open_to(0o620);
    server.hang_up();
    let logged = server.await_log("the old ones stay in use");
    assert!(logged.contains("may be changed by other users") && logged.contains("chmod go-w"), "{logged}");
    assert_eq!(may_call(&address, &["--token-file", &alice]), [true, false, false]);
    let text = files.refused(&["--policy", &file]);
    assert!(text.contains(&file) && text.contains("may be changed by other users"), "{text}");
    open_to(0o600);
    server.hang_up();
    server.await_log("have been read again");
    assert_eq!(may_call(&address, &["--token-file", &alice]), [false, true, false]);
    let text = files.refused(&["--policy", &files.path("absent")]);
    assert!(text.contains("cannot read the policy"), "{text}");
}

#[test]
fn renewed_certificates_are_shown_after_a_hangup() {
    let files = TrustFiles::with_certificates();
    let (cert, key) = (files.pki("server.pem"), files.pki("server.key"));
    let mut server = files
        .serve(&["tls://127.0.0.1:0"], &["--cert", &cert, "--cert-key", &key, "--client-ca", &files.pki("ca.pem")]);
    let client = |ca: &str| {
        let (cert, key) = (files.pki("client.pem"), files.pki("client.key"));
        echo(&server.addresses[0], &["--ca", ca, "--cert", &cert, "--cert-key", &key]).status.success()
    };
    let old: PathBuf = files.path("old.pem").into();
    std::fs::copy(files.pki("ca.pem"), &old).unwrap();
    assert!(client(&files.pki("ca.pem")));
    // New certificates, with another authority.
    ok(cli(&["cert", "--out", &files.path("pki"), "--host", "localhost,127.0.0.1", "--force"]));
    assert!(!client(&files.pki("ca.pem")));
    server.hang_up();
    server.await_log("have been read again");
    let client = |ca: &str| {
        let (cert, key) = (files.pki("client.pem"), files.pki("client.key"));
        echo(&server.addresses[0], &["--ca", ca, "--cert", &cert, "--cert-key", &key]).status.success()
    };
    assert!(client(&files.pki("ca.pem")));
    assert!(!client(old.to_str().unwrap()));
}

/// A regression: servers showed certificates that every client refused.
#[test]
fn a_certificate_that_has_expired_is_refused_and_one_that_expires_soon_is_a_warning() {
    let files = TrustFiles::new();
    let day = Duration::from_secs(24 * 3600);
    let issue = |folder: &str, age: Duration| {
        let plan = CertificatePlan::new(files.path(folder)).validity(30 * day).host("localhost".parse().unwrap());
        plan.write(SystemTime::now() - age).unwrap();
        let [cert, key] = ["server.pem", "server.key"].map(|name| files.path(&format!("{folder}/{name}")));
        (cert, key, files.path(&format!("{folder}/ca.pem")))
    };
    let (cert, key, ca) = issue("expired", 31 * day);
    let listen = ["--listen", "tls://127.0.0.1:0"];
    let text = files.refused(&[&listen[..], &["--cert", &cert, "--cert-key", &key, "--client-ca", &ca]].concat());
    assert!(text.contains("has expired on") && text.contains(&cert) && text.contains("rpc-cli cert"), "{text}");
    let text = files.refused(&["--forward-cert", &cert, "--forward-cert-key", &key]);
    assert!(text.contains("has expired on"), "{text}");

    let (cert, key, ca) = issue("soon", 25 * day);
    let trust = ["--cert", &cert, "--cert-key", &key, "--client-ca", &ca, "--metrics", "127.0.0.1:0"];
    let mut server = files.serve(&["tls://127.0.0.1:0"], &trust);
    server.await_log("expires soon");
    let metrics = server.printed.next().unwrap().unwrap();
    let metrics = metrics.strip_prefix("metrics on http://").unwrap().split('/').next().unwrap().to_owned();
    let mut stream = std::net::TcpStream::connect(metrics).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let page = std::io::read_to_string(stream).unwrap();
    let end = page.lines().find_map(|line| line.strip_prefix("rpc_certificate_expiry_timestamp_seconds "));
    let end = Duration::from_secs_f64(end.unwrap().parse().unwrap());
    let left = (SystemTime::UNIX_EPOCH + end).duration_since(SystemTime::now()).unwrap();
    assert!(left > 4 * day && left < 6 * day, "{left:?}");

    // A renewed certificate that has expired already changes nothing.
    std::fs::copy(files.path("expired/server.pem"), &cert).unwrap();
    std::fs::copy(files.path("expired/server.key"), &key).unwrap();
    server.hang_up();
    server.await_log("the old ones stay in use");
}

/// Sends the request of a browser on a page of `origin`, and returns the first line of the answer.
#[cfg(feature = "websocket")]
fn ask_as_a_page(address: &str, origin: &str) -> String {
    let socket = address.strip_prefix("ws://").unwrap();
    let mut stream = std::net::TcpStream::connect(socket).unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: {socket}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nOrigin: {origin}\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    BufReader::new(stream).lines().next().unwrap().unwrap()
}

#[cfg(feature = "websocket")]
#[test]
fn web_pages_are_served_by_the_origins_that_the_operator_lists_at_present() {
    const CONSOLE: &str = "https://console.example";
    const BOARD: &str = "http://board.lan:8080";
    for subcommand in ["serve", "tracker", "relay", "worker"] {
        let files = TrustFiles::new();
        // A worker serves other clients while it waits for its controller.
        let controller: &[&str] =
            if subcommand == "worker" { &["--controller", "memory:nobody", "--join-timeout", "1h"] } else { &[] };
        // By default no page is served.
        let server = files.start(subcommand, &["ws://127.0.0.1:0"], controller);
        assert!(ask_as_a_page(&server.addresses[0], CONSOLE).contains("403"), "{subcommand}");

        let file = files.path("settings.toml");
        std::fs::write(&file, format!("allow-origin = [\"{CONSOLE}\"]\n")).unwrap();
        let mut server = files.start(subcommand, &["ws://127.0.0.1:0"], &[controller, &["--config", &file]].concat());
        let answers = |server: &Daemon| [CONSOLE, BOARD].map(|origin| ask_as_a_page(&server.addresses[0], origin));
        let [console, board] = answers(&server);
        assert!(console.contains("101") && board.contains("403"), "{subcommand}: {console}, {board}");
        std::fs::write(&file, format!("allow-origin = [\"{BOARD}\"]\n")).unwrap();
        server.hang_up();
        server.await_log("have been read again");
        let [console, board] = answers(&server);
        assert!(console.contains("403") && board.contains("101"), "{subcommand}: {console}, {board}");
        // A file that cannot be used changes nothing.
        std::fs::write(&file, "allow-origin = [\"*\"]\n").unwrap();
        server.hang_up();
        server.await_log("is not the origin of web pages");
        let [console, board] = answers(&server);
        assert!(console.contains("403") && board.contains("101"), "{subcommand}: {console}, {board}");

        // A flag overrides the file.
        let flags = ["--config", &file, "--allow-origin", "https://one.example,https://console.example"];
        std::fs::write(&file, format!("allow-origin = [\"{BOARD}\"]\n")).unwrap();
        let server = files.start(subcommand, &["ws://127.0.0.1:0"], &[controller, &flags].concat());
        let [console, board] = answers(&server);
        assert!(console.contains("101") && board.contains("403"), "{subcommand}: {console}, {board}");
    }
}

#[test]
fn a_server_on_the_network_without_authentication_is_refused_with_advice() {
    let files = TrustFiles::with_certificates();
    files.token("tokens", &[]);
    let (cert, key, tokens) = (files.pki("server.pem"), files.pki("server.key"), files.path("tokens"));
    // Without encryption a token is not enough: it proves the identity at the beginning alone.
    for args in [&["--listen", "tcp://0.0.0.0:0"][..], &["--listen", "tcp://0.0.0.0:0", "--token-file", &tokens]] {
        let text = files.refused(args);
        assert!(text.contains("--insecure") && text.contains("--token-file"), "{text}");
    }
    // Encrypted, and without authentication of clients.
    let text = files.refused(&["--listen", "quic://0.0.0.0:0", "--cert", &cert, "--cert-key", &key]);
    assert!(text.contains("--client-ca"), "{text}");
    // Without a certificate of the server.
    assert!(files.refused(&["--listen", "tls://127.0.0.1:0"]).contains("--cert"));
    assert!(files.refused(&["--listen", "tls://127.0.0.1:0", "--cert", &cert]).contains("--cert-key"));
    // It starts with --insecure, or with encryption and tokens.
    let mut server = files.serve(&["tcp://0.0.0.0:0"], &["--insecure"]);
    server.await_log("without proof of identity");
    files.serve(&["quic://0.0.0.0:0"], &["--token-file", &tokens]);
}

#[test]
fn the_doctor_says_what_is_wrong_with_credentials() {
    let files = TrustFiles::new();
    files.token("tokens", &[]);
    files.token("other", &[]);
    let server = files.serve(&["quic://127.0.0.1:0"], &["--token-file", &files.path("tokens")]);
    let (right, wrong) = (files.path("tokens"), files.path("other"));
    ok(cli(&["doctor", &server.addresses[0], "--token-file", &right]));
    let report = cli(&["doctor", &server.addresses[0], "--token-file", &wrong]);
    let text = String::from_utf8_lossy(&report.stdout).into_owned() + &said(&report);
    assert!(!report.status.success() && text.contains("token"), "{text}");
}

/// A regression: the log at `info` was empty for wrong tokens and refused forwards.
#[test]
fn the_log_names_clients_that_are_refused() {
    let files = TrustFiles::new();
    files.token("tokens", &[]);
    files.token("other", &[]);
    let mut server = files.serve(&["tcp://127.0.0.1:0"], &["--token-file", &files.path("tokens")]);
    let address = server.addresses[0].clone();
    assert_eq!(echo(&address, &["--token-file", &files.path("other")]).status.code(), Some(77));
    server.await_log("refused a client");
    let mut hop = files.serve(&["tcp://127.0.0.1:0"], &[]);
    let forwarded = cli(&["call", "-J", &hop.addresses[0], "tcp://127.0.0.1:1", "rpc.echo", "42"]);
    assert_eq!(forwarded.status.code(), Some(77), "{}", said(&forwarded));
    hop.await_log("refused a client");
}

/// The gateway speaks TLS and tokens to the world, and TVM's protocol, which has neither, to the
/// server.
#[cfg(feature = "tvm")]
#[test]
fn a_gateway_guards_a_server_of_tvm() {
    let files = TrustFiles::with_certificates();
    files.token("tokens", &[]);
    let board = files.serve(&["tcp://127.0.0.1:0"], &["--tvm", "--tvm-self-test", "--key", "board"]);
    let target = board.addresses[0].replace("tcp://", "tvm://") + "/board";
    let (cert, key, ca, token) =
        (files.pki("server.pem"), files.pki("server.key"), files.pki("ca.pem"), files.path("tokens"));
    let bare = target.replace("/board", "");
    let gateway = files.serve(
        &["tls://127.0.0.1:0"],
        &["--cert", &cert, "--cert-key", &key, "--token-file", &token, "--allow-forward", &bare],
    );
    let call = |target: &str, function: &str, trust: &[&str]| {
        cli(&[&["call", "-J", &gateway.addresses[0], target, function, "41"], trust].concat())
    };
    let trust = ["--ca", &ca, "--token-file", &token];
    assert_eq!(ok(call(&target, "rpc.test.addone", &trust)).trim(), "42");
    assert_eq!(ok(call(&format!("{target}?timeout=60"), "rpc.test.addone", &trust)).trim(), "42");
    let failed = call(&target, "rpc.test.strcat", &trust);
    assert!(!failed.status.success() && said(&failed).contains("strcat"), "{}", said(&failed));
    let stranger = call(&target, "rpc.test.addone", &["--ca", &ca]);
    assert!(!stranger.status.success(), "{}", said(&stranger));
    let elsewhere = call("tvm://127.0.0.1:1/board", "rpc.test.addone", &trust);
    assert!(said(&elsewhere).contains("may not be used to reach"), "{}", said(&elsewhere));
}
