//! Sessions over `ssh://` addresses: the conformance suite and Disco through a stand-in for `ssh`,
//! and sessions through a real `sshd` on loopback.
//!
//! Without `sshd` its test prints that it is skipped; with `RPC_TESTS_REQUIRE_SSHD=1` it fails
//! instead.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

use disco::{Scope, SocketSession};
use rpc_conformance::conformance;
use rpc_conformance::fixture::{BoxFuture, Fixture};
use rpc_conformance::harness::eventually;
use rpc_core::{ErrorKind, LocalSession, RpcError, Session, SessionLimits, SharedSession};
use rpc_transports::ssh::Ssh;
use rpc_transports::{Bind, Connector, OpenRequest, ServeOptions, Server, Transports};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

/// A server with the flags of `rpc-server`.
const SERVER: &str = env!("CARGO_BIN_EXE_faults_peer");

/// A program that serves one session of the conformance suite. Its arguments are the limits.
const ORIGIN: &str = env!("CARGO_BIN_EXE_origin");

/// Reads the arguments as OpenSSH does, and knows hosts whose names begin with `board`. `$1` is
/// then the host, and `$2` the command.
const READ_ARGUMENTS: &str = r#"
while [ $# -gt 0 ]; do
    case "$1" in
        --) shift; break ;;
        -l | -p) shift 2 ;;
        -T | -a | -x | -o?*) shift ;;
        *) echo "stand-in: unexpected argument $1" >&2; exit 255 ;;
    esac
done
[ $# -eq 2 ] || { echo "stand-in: expected a host and a command" >&2; exit 255; }
case "$1" in
    board*) ;;
    *) echo "ssh: Could not resolve hostname $1" >&2; exit 255 ;;
esac
"#;

/// Returns transports whose `ssh` is a script of the shell that reads the arguments, and then runs
/// `body`.
fn stand_in(body: &str) -> Transports {
    let script = format!("{READ_ARGUMENTS}{body}");
    Transports::default().with(Ssh::new().command("sh", ["-c", &script, "ssh"]))
}

/// Returns transports whose `ssh` runs the command on this machine.
fn on_this_machine(workdir: &Path) -> Transports {
    stand_in(&format!("export RPC_SERVER_WORKDIR='{}'\nexec sh -c \"$2\"\n", workdir.display()))
}

/// Returns the address of [`SERVER`] on `host`.
fn server_on(host: &str) -> String {
    format!("ssh://{host}?program={}", SERVER.replace(' ', "%20"))
}

/// Sessions with the origin of the conformance suite, through a stand-in that reads the limits of
/// the session from the name of the host.
struct OverSsh;

impl OverSsh {
    fn connect(limits: &SessionLimits) -> (Connector, String) {
        let SessionLimits { max_requests, max_queued_bytes, max_handles, max_memory, .. } = limits;
        let host = format!("board-{max_requests}-{max_queued_bytes}-{max_handles}-{max_memory}");
        let program = ORIGIN.replace(' ', "%20");
        let transports = stand_in(
            r#"
            limits=$(echo "${1#board-}" | tr - ' ')
            eval "set -- $2"
            [ "$2 $3" = "serve --stdio" ] || exit 2
            exec "$1" $limits
            "#,
        );
        (Connector::new().transports(transports), format!("ssh://{host}?program={program}"))
    }
}

impl Fixture for OverSsh {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        Box::pin(async move {
            let (connector, address) = Self::connect(&limits);
            connector.connect(&address).await.unwrap()
        })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        let (connector, address) = Self::connect(&limits);
        connector.connect_blocking(&address).unwrap()
    }

    fn hops(&self) -> u16 {
        1
    }
}

conformance!(contract = OverSsh, blocking: #[cfg(feature = "long")]);

/// Checks that calls and copies work, and returns the process id of the server.
async fn works(session: &Session) -> Pid {
    let tensor = session.upload(&[3], &[1.0_f32, 2.0, 3.0]).await.unwrap();
    assert_eq!(session.download::<f32>(&tensor).await.unwrap(), [1.0, 2.0, 3.0]);
    let pid: i64 = session.get_function("pid").await.unwrap().call(()).await.unwrap();
    Pid::from_raw(pid.try_into().unwrap()).unwrap()
}

/// Waits until the process has ended and has been reaped.
async fn ends(pid: Pid) {
    eventually("the process has ended", async || test_kill_process(pid).is_err()).await;
}

#[tokio::test]
async fn a_session_ends_its_server_when_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let connector = Connector::new().transports(on_this_machine(folder.path()));
    let session = connector.connect(&server_on("me@board:22")).await.unwrap();
    let pid = works(&session).await;
    drop(session);
    ends(pid).await;
}

#[tokio::test]
async fn a_session_is_lost_when_ssh_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let connector = Connector::new().transports(on_this_machine(folder.path()));
    let session = connector.connect(&server_on("board")).await.unwrap();
    // The stand-in has become the server, so that this is the process that the transport started.
    let pid = works(&session).await;
    kill_process(pid, Signal::KILL).unwrap();
    assert_eq!(session.ended().await.kind(), ErrorKind::PeerLost);
    drop(session);
    ends(pid).await;
}

#[tokio::test]
async fn the_key_of_the_address_is_for_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let transports = stand_in(&format!(
        "export RPC_SERVER_KEY=desk RPC_SERVER_WORKDIR='{}'\nexec sh -c \"$2\"\n",
        folder.path().display()
    ));
    let connector = Connector::new().transports(transports);
    let at_key = |key: &str| format!("ssh://board/{key}?program={}", SERVER.replace(' ', "%20"));
    works(&connector.connect(&at_key("desk")).await.unwrap()).await;
    let error = connector.connect(&at_key("shelf")).await.unwrap_err();
    assert_eq!(error.into_rpc_error().kind(), ErrorKind::Refused);
}

/// Starts a server that only forwards, to addresses that match one of `patterns`.
async fn hop(transports: &Transports, patterns: &[&str]) -> (Server, String) {
    let options = ServeOptions {
        transports: transports.clone(),
        allow_forward: patterns.iter().map(ToString::to_string).collect(),
        ..ServeOptions::default()
    };
    let refuse = |_: &OpenRequest| -> Result<SharedSession, RpcError> {
        Err(RpcError::new(ErrorKind::Refused, "this server only forwards"))
    };
    let server = Server::new(Arc::new(refuse), options);
    let address = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
    (server, address.to_string())
}

#[tokio::test]
async fn a_hop_starts_a_program_only_if_its_operator_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let transports = on_this_machine(folder.path());
    let target = server_on("board");
    for patterns in [&["*", "*://*:*"][..], &["ssh://board"], &["ssh://other?program=*"]] {
        let (_hop, address) = hop(&transports, patterns).await;
        let error = Connector::new().via(&address).connect(&target).await.unwrap_err().into_rpc_error();
        assert_eq!(error.kind(), ErrorKind::Refused, "{patterns:?}: {error}");
    }
    let (_hop, address) = hop(&transports, &[&target]).await;
    works(&Connector::new().via(&address).connect(&target).await.unwrap()).await;
}

#[tokio::test]
async fn a_server_behind_ssh_forwards_to_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let registry = rpc_conformance::functions::registry();
    registry.add_inline("pid", || i64::from(std::process::id()));
    let open =
        move |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(LocalSession::new(registry.clone()))) };
    let target = Server::new(Arc::new(open), ServeOptions::default());
    let address = target.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap().to_string();
    let transports = stand_in(&format!(
        "export RPC_SERVER_ALLOW_FORWARD='{address}' RPC_SERVER_WORKDIR='{}'\nexec sh -c \"$2\"\n",
        folder.path().display()
    ));
    let connector = Connector::new().transports(transports).via(&server_on("board"));
    let session = connector.connect(&address).await.unwrap();
    assert_eq!(works(&session).await, rustix::process::getpid());
    assert_eq!(session.get_function("no such function").await.unwrap_err().hop(), 2);
    let error = connector.connect("tcp://127.0.0.1:1").await.unwrap_err().into_rpc_error();
    assert_eq!((error.kind(), error.hop()), (ErrorKind::Refused, 1), "{error}");
}

#[test]
fn two_workers_meet_on_nodes_behind_ssh() {
    let folder = tempfile::tempdir().unwrap();
    let connector = Connector::new().transports(on_this_machine(folder.path()));
    let nodes = [server_on("board1"), server_on("board2")];
    let session = SocketSession::new(nodes, 1, 1).connector(connector).start().wait().unwrap();
    let x =
        session.broadcast(&rpc_core::Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap(), None, Scope::World).unwrap();
    session.allreduce(&x, Some(&x), disco::ReduceOp::Sum, Scope::World).unwrap();
    let sum = session.copy_from_worker_0(&x).wait().unwrap();
    assert_eq!(sum.read().unwrap().as_slice::<f32>().unwrap(), [2.0, 4.0]);
    session.shutdown().wait().unwrap();
}

/// `sshd` on loopback with keys of its own, and the arguments by which `ssh` reaches it.
struct Sshd {
    folder: TempDir,
    port: u16,
}

impl Sshd {
    /// Returns `None`, and says why, where `sshd` is not installed or cannot run.
    fn start() -> Option<Self> {
        match Self::try_start() {
            Ok(this) => Some(this),
            Err(why) => {
                let required = std::env::var_os("RPC_TESTS_REQUIRE_SSHD").is_some_and(|value| value == "1");
                assert!(!required, "RPC_TESTS_REQUIRE_SSHD is set, and there is no sshd: {why}");
                println!("SKIPPED: sessions through sshd: {why}");
                None
            }
        }
    }

    fn try_start() -> Result<Self, String> {
        // `sshd` starts itself again, and so has to be given with its path.
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&paths).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
        let sshd = folders.map(|folder| folder.join("sshd")).find(|path| path.is_file());
        let sshd = sshd.ok_or("it is not installed (Debian: apt-get install openssh-server)")?;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        for name in ["host", "user", "stranger"] {
            output(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &at(name)]))?;
        }
        std::fs::copy(at("user.pub"), at("authorized")).unwrap();
        let config = format!(
            "HostKey {}\nAuthorizedKeysFile {}\nPubkeyAuthentication yes\nPasswordAuthentication no\n\
             KbdInteractiveAuthentication no\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n",
            at("host"),
            at("authorized"),
        );
        std::fs::write(at("config"), config).unwrap();
        output(Command::new(&sshd).args(["-t", "-f", &at("config")]))?;
        // The kernel chooses the port, and each connection has an `sshd` of its own, as from inetd.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let host_key = std::fs::read_to_string(at("host.pub")).unwrap();
        std::fs::write(at("known"), format!("[127.0.0.1]:{port} {host_key}")).unwrap();
        std::fs::write(at("unknown"), "").unwrap();
        let (config, log) = (at("config"), at("log"));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let input = OwnedFd::from(connection.unwrap());
                let output = input.try_clone().unwrap();
                let mut command = Command::new(&sshd);
                command.args(["-i", "-f", &config, "-E", &log]).stdin(input).stdout(output).stderr(Stdio::null());
                let mut child = command.spawn().unwrap();
                drop(command);
                thread::spawn(move || child.wait());
            }
        });
        Ok(Self { folder, port })
    }

    /// Returns a connector that uses this key of the user, and this list of known hosts.
    fn connector(&self, key: &str, known: &str) -> Connector {
        let at = |name: &str| self.folder.path().join(name).display().to_string();
        let known = format!("-oUserKnownHostsFile={}", at(known));
        let ssh = Ssh::new().command(
            "ssh",
            [
                "-F/dev/null",
                "-i",
                &at(key),
                &known,
                "-oStrictHostKeyChecking=yes",
                "-oIdentitiesOnly=yes",
                "-oIdentityAgent=none",
            ],
        );
        Connector::new().transports(Transports::default().with(ssh))
    }

    /// Returns the address of a program there.
    fn address(&self, program: &str) -> String {
        format!("ssh://127.0.0.1:{}?program={}", self.port, program.replace(' ', "%20"))
    }
}

/// Runs a command, and returns its standard error if it fails.
fn output(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(format!("{command:?}: {text}")) }
}

#[tokio::test]
async fn openssh_leads_to_a_server_and_its_failures_are_explained() {
    let Some(sshd) = Sshd::start() else { return };
    let connector = sshd.connector("user", "known");
    let session = connector.connect(&sshd.address(SERVER)).await.unwrap();
    let pid = works(&session).await;
    drop(session);
    ends(pid).await;
    let (blocking, address) = (connector.clone(), sshd.address(SERVER));
    let blocking = tokio::task::spawn_blocking(move || {
        let session = blocking.connect_blocking(&address).unwrap();
        session.get_function("pid").wait().unwrap().call::<i64>(()).wait().unwrap()
    });
    ends(Pid::from_raw(blocking.await.unwrap().try_into().unwrap()).unwrap()).await;
    for (connector, program, words) in [
        (connector.clone(), "/no/such/program", "no program /no/such/program on 127.0.0.1"),
        (connector.clone(), "/it's not; here", "no program /it's not; here on 127.0.0.1"),
        (sshd.connector("stranger", "known"), SERVER, "Permission denied"),
        (sshd.connector("user", "unknown"), SERVER, "Host key verification failed"),
    ] {
        let error = connector.connect(&sshd.address(program)).await.unwrap_err().into_rpc_error().to_string();
        assert!(error.contains(words), "{error}");
    }
}
