//! Servers as nodes of Disco sessions: `rpc-server worker`, `rpc-server serve` behind a tracker,
//! and workers in processes of their own.

use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use disco::{
    Content, DiscoSession, Hosting, NodeListener, Options, Part, ReduceOp, Scope, ShardLoader, SocketSession, WorkerId,
};
use rpc_core::{ErrorKind, Tensor, Value};
use rpc_server::ServerProcess;
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{Access, Bind, ClientTls, Connector, ServeOptions, ServerTls, Tokens};
use tempfile::TempDir;

/// Returns the command `rpc-server` with these arguments, without variables of this environment.
fn program(folder: &TempDir, args: &[&str]) -> Command {
    let mut command = crate::server_program();
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["RPC_", "OMPI_", "PMI_", "SLURM_"].iter().any(|prefix| text.starts_with(prefix)) || text == "RANK" {
            command.env_remove(name);
        }
    }
    command.args(args).args(["--log-level", "error"]).env("XDG_STATE_HOME", folder.path()).stdin(Stdio::null());
    command
}

fn server(folder: &TempDir, args: &[&str]) -> ServerProcess {
    ServerProcess::spawn(program(folder, &[args, &["--exit-with-stdin", "--listen", "tcp://127.0.0.1:0"]].concat()))
        .unwrap()
}

fn worker(folder: &TempDir, controller: &str, more: &[&str]) -> Child {
    let args = [&["worker", "--controller", controller], more].concat();
    program(folder, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the exit code and the text on standard error.
fn outcome(child: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Checks that the workers compute and reach each other.
fn works(session: &DiscoSession) {
    let n = session.num_workers();
    let echo = session.get_global_func("rpc.echo").unwrap();
    let back = echo.call((42,)).unwrap();
    for worker in 0..n {
        let content = session.debug_get_from_remote(&back, WorkerId(worker)).wait().unwrap();
        assert!(matches!(content, Content::Value(Value::Int(42))), "{content:?}");
    }
    let x = session.broadcast(&Tensor::from_slice([2], &[1.0_f32, 2.0]).unwrap(), None, Scope::World).unwrap();
    let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    let sum = session.copy_from_worker_0(&sum).wait().unwrap();
    assert_eq!(sum.read().unwrap().as_slice::<f32>().unwrap(), [n as f32, 2.0 * n as f32]);
    session.sync_all().wait().unwrap();
}

fn pids(session: &DiscoSession) -> Vec<Value> {
    let info = session.get_global_func("rpc.info").unwrap().call(()).unwrap();
    let of = |worker| match session.debug_get_from_remote(&info, WorkerId(worker)).wait().unwrap() {
        Content::Value(Value::Packed(info)) => info.decode::<rpc_server::builtins::ServerInfo>().unwrap().pid.into(),
        other => panic!("{other:?}"),
    };
    (0..session.num_workers()).map(of).collect()
}

#[test]
fn nodes_join_with_the_ranks_of_their_launcher_and_end_with_the_session() {
    let folder = tempfile::tempdir().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let address = listener.address();
    // The rank comes from a flag, from the environment of mpirun, or from the controller.
    let flagged = worker(&folder, &address, &["--rank", "2", "--nodes", "3"]);
    let mut command = program(&folder, &["worker", "--controller", &address]);
    command.envs([("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "3")]).stderr(Stdio::piped());
    let (launched, unnumbered) = (command.spawn().unwrap(), worker(&folder, &address, &[]));
    let ids = [launched.id(), unnumbered.id(), flagged.id()];
    let session = SocketSession::dialled_by(3, &listener, 2, 1).start().wait().unwrap();
    assert_eq!(session.num_workers(), 6);
    works(&session);
    let expected: Vec<Value> = ids.iter().flat_map(|id| [Value::from(*id), Value::from(*id)]).collect();
    assert_eq!(pids(&session), expected);
    session.shutdown().wait().unwrap();
    drop(session);
    for node in [launched, unnumbered, flagged] {
        assert_eq!(outcome(node), (Some(0), String::new()));
    }
}

#[test]
fn nodes_and_controller_prove_themselves_to_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let secret = "disco 0123456789abcdef0123456789abcdef";
    let file = folder.path().join("token");
    rpc_server::pki::token_file::store(secret, &file).unwrap();
    let file = file.to_str().unwrap();
    let tokens = Tokens::parse(secret).unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let certificate = rpc_transports::Certificate::from_pem(pem.as_bytes(), key.as_bytes()).unwrap();
    let listen = Bind { tls: Some(ServerTls::new(certificate, None).unwrap()), ..Bind::default() };
    let access = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
    let serve = ServeOptions { access, ..ServeOptions::default() };
    let listener = NodeListener::bind_with("quic://127.0.0.1:0", listen, serve).wait().unwrap();
    let node = |flags: &[&str]| worker(&folder, &listener.address(), flags);
    // A node without proof of identity is refused.
    let (code, text) = outcome(node(&["--forward-ca", file]));
    assert_ne!(code, Some(0), "{text}");
    let nodes: Vec<_> = (0..2).map(|_| node(&["--forward-token-file", file, "--token-file", file])).collect();
    let connector = Connector::new().tokens(tokens).tls(ClientTls::unverified(None).unwrap());
    let session = SocketSession::dialled_by(2, &listener, 1, 1).connector(connector).start().wait().unwrap();
    works(&session);
    session.shutdown().wait().unwrap();
    drop(session);
    for node in nodes {
        assert_eq!(outcome(node), (Some(0), String::new()));
    }
}

/// Regression: every client that was let in could start workers. Holds for sessions in processes of
/// their own, too, which get the settings of the server.
#[test]
fn controllers_are_served_where_clients_are_known_or_the_operator_says() {
    let folder = tempfile::tempdir().unwrap();
    let start = |flags: &[&str]| {
        let flags = [&["serve", "--exit-with-stdin", "--insecure", "--listen", "tcp://0.0.0.0:0"], flags].concat();
        let server = ServerProcess::spawn(program(&folder, &flags)).unwrap();
        let address = server.address().to_string().replace("0.0.0.0", "127.0.0.1");
        (SocketSession::new([address], 1, 1).start().wait(), server)
    };
    for isolate in ["none", "process"] {
        let (refused, _server) = start(&["--isolate", isolate]);
        let error = refused.unwrap_err();
        assert_eq!(error.cause().kind(), ErrorKind::Refused, "{error}");
        assert!(error.to_string().contains("has not given --allow-disco"), "{error}");
        let (allowed, _server) = start(&["--isolate", isolate, "--allow-disco"]);
        allowed.unwrap().shutdown().wait().unwrap();
    }
}

/// Regression: a killed hop was told as the loss of a worker, which lived.
#[test]
fn a_killed_hop_is_told_as_the_loss_of_a_hop() {
    let folder = tempfile::tempdir().unwrap();
    let node = server(&folder, &["serve"]);
    let mut hop = server(&folder, &["serve", "--allow-forward", "tcp://127.0.0.1:*"]);
    let hop_address = hop.address().to_owned();
    let connector = Connector::new().via(&hop_address);
    let session = SocketSession::new([node.address()], 1, 1).connector(connector).start().wait().unwrap();
    session.sync_all().wait().unwrap();
    hop.kill().unwrap();
    while session.sync_all().wait().is_ok() {}
    let error = session.sync_all().wait().unwrap_err().to_string();
    assert!(error.contains(&format!("the way there broke at the hop {hop_address}")), "{error}");
}

#[test]
fn a_node_that_cannot_join_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let (code, text) = outcome(worker(&folder, "tcp://127.0.0.1:1", &["--join-timeout", "1ms"]));
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("cannot join the controller at tcp://127.0.0.1:1"), "{text}");
    // Meanwhile the terminal shows that it waits, and for how long.
    // A machine that stands still for that time shows nothing.
    let waits = ["300ms", "5s", "30s"].into_iter().any(|limit| {
        let mut waiting = crate::server_program();
        waiting.args(["worker", "--controller", "tcp://127.0.0.1:1", "--join-timeout", limit]);
        waiting.env("XDG_STATE_HOME", folder.path()).stderr(Stdio::piped());
        let (code, text) = outcome(waiting.spawn().unwrap());
        assert_eq!(code, Some(69), "{text}");
        text.contains(&format!("the controller is not there; trying again for {limit}"))
    });
    assert!(waits, "nothing says that the node waits for its controller");
    let (code, text) = outcome(worker(&folder, "tcp://192.0.2.1:1", &[]));
    assert_eq!(code, Some(78), "{text}");
    assert!(text.contains("the controller at tcp://192.0.2.1:1 would drive this node"), "{text}");
    let (code, text) = outcome(worker(&folder, "tcp://127.0.0.1:1", &["--rank", "3", "--nodes", "3"]));
    assert_eq!(code, Some(78), "{text}");
    assert!(text.contains("--rank 3 is none of --nodes 3"), "{text}");
    // So does one that cannot be a process of a job of MPI.
    #[cfg(not(feature = "mpi"))]
    {
        let (code, text) = outcome(worker(&folder, "tcp://127.0.0.1:1", &["--mpi"]));
        assert_eq!(code, Some(69), "{text}");
        assert!(text.contains("it was built without MPI; build it with"), "{text}");
    }
    // The session is to have another number of nodes, or does not want a second one of this number.
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let node = worker(&folder, &listener.address(), &["--rank", "0", "--nodes", "3"]);
    let error = SocketSession::dialled_by(2, &listener, 1, 1).start().wait().unwrap_err();
    assert!(error.to_string().contains("says that it is number 0 of 3, and the session is to have 2 nodes"), "{error}");
    let _ = outcome(node);
    let nodes = [0, 1].map(|_| worker(&folder, &listener.address(), &["--rank", "1", "--nodes", "2"]));
    let error = SocketSession::dialled_by(2, &listener, 1, 1).start().wait().unwrap_err();
    assert!(error.to_string().contains("two nodes have dialled in and say that they are number 1 of 2"), "{error}");
    drop(listener);
    for node in nodes {
        let _ = outcome(node);
    }
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let session = SocketSession::dialled_by(2, &listener, 1, 1).join_timeout(Duration::from_millis(1)).start();
    let error = session.wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::DeadlineExceeded);
    assert!(error.to_string().contains("nodes 0, 1 of 2 have not dialled in at tcp://127.0.0.1:"), "{error}");
}

#[test]
fn a_tracker_grants_nodes_which_are_free_again_after_the_session() {
    let folder = tempfile::tempdir().unwrap();
    let tracker = server(&folder, &["tracker"]);
    let at = tracker.address();
    let _servers = [0, 1].map(|_| server(&folder, &["serve", "--tracker", at, "--tracker-key", "board"]));
    for _ in 0..2 {
        let both = ServerRequest::new("board").count(2).distinct();
        let session = SocketSession::from_tracker(at, both, 2, 2).start().wait().unwrap();
        works_in_groups(&session);
        session.shutdown().wait().unwrap();
    }
    let error = SocketSession::from_tracker("tcp://127.0.0.1:1", ServerRequest::new("board"), 1, 1).start().wait();
    assert!(error.unwrap_err().to_string().contains("the tracker at tcp://127.0.0.1:1"));
}

fn works_in_groups(session: &DiscoSession) {
    works(session);
    assert_eq!((session.num_workers(), session.num_groups()), (4, 2));
}

#[test]
fn workers_are_processes_if_the_options_ask_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let servers = [0, 1].map(|_| server(&folder, &["serve"]));
    let mut options = Options::default();
    options.hosting = Hosting::Processes;
    let addresses = servers.iter().map(ServerProcess::address);
    let session = SocketSession::new(addresses, 2, 1).options(options).start().wait().unwrap();
    works(&session);
    let mut pids = pids(&session);
    pids.extend(servers.iter().map(|server| Value::from(server.id())));
    let distinct = pids.iter().enumerate().all(|(at, pid)| !pids[..at].contains(pid));
    assert!(distinct, "{pids:?}");
    session.shutdown().wait().unwrap();
}

/// Writes a file with the tensor `x`, which has an element for each of two workers.
fn write_weights(folder: &TempDir) {
    let header = r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let data = [0.5_f32, 1.5].map(f32::to_le_bytes).concat();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
}

/// The folders of `--weights` apply to sessions in processes of their own and in the server's
/// process alike, wherever their workers are.
#[test]
fn workers_of_isolated_sessions_read_the_folders_of_the_server_alone() {
    let [folder, inside, outside] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    [&inside, &outside].into_iter().for_each(write_weights);
    let readable = inside.path().to_str().unwrap();
    for isolate in ["process", "none"] {
        let server = server(&folder, &["serve", "--weights", readable, "--isolate", isolate]);
        for hosting in [Hosting::Threads, Hosting::Processes] {
            let mut options = Options::default();
            options.hosting = hosting;
            let session = SocketSession::new([server.address()], 2, 1).options(options).start().wait().unwrap();
            for (weights, unable) in [(&inside, 0), (&outside, 2)] {
                let loader = ShardLoader::open(&session, weights.path()).wait().unwrap();
                let told = loader.unreadable();
                assert_eq!(told.len(), unable, "--isolate {isolate}, {hosting:?}: {told:?}");
                assert!(told.iter().all(|one| one.reason.contains("may not read there")), "{told:?}");
                // A worker that cannot read it gets it from another one.
                let x = loader.load("x", Part::shard(0), None).unwrap();
                session.sync_all().wait().unwrap();
                for (worker, expected) in [(0, 0.5), (1, 1.5)] {
                    let content = session.debug_get_from_remote(&x, WorkerId(worker)).wait().unwrap();
                    let Content::Tensor(part) = content else { panic!("{content:?}") };
                    assert_eq!(part.read().unwrap().as_slice::<f32>().unwrap(), [expected]);
                }
            }
            session.shutdown().wait().unwrap();
        }
    }
}

/// Each server opens a session with the next one on behalf of the controller, if its operator
/// allows it.
#[test]
fn servers_open_sessions_with_each_other_where_forwarding_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let forwarding = ["serve", "--allow-forward", "tcp://127.0.0.1:*"];
    let servers = [&forwarding[..], &forwarding, &["serve"]].map(|args| server(&folder, args));
    let addresses = servers.each_ref().map(ServerProcess::address);
    for hosting in [Hosting::Threads, Hosting::Processes] {
        let mut options = Options::default();
        options.hosting = hosting;
        let session = SocketSession::new(addresses, 2, 1).fan_out(1).options(options).start().wait().unwrap();
        works(&session);
        session.shutdown().wait().unwrap();
    }
    let [first, second, last] = addresses;
    // A controller need not reach more than the first one.
    for fan_out in [1, 2] {
        let session = Connector::new().connect_blocking(first).unwrap();
        let further = [second, last].map(str::to_owned).to_vec();
        let session = SocketSession::over([(session, further)], 2, 1).fan_out(fan_out).start().wait().unwrap();
        assert_eq!(session.num_workers(), 6);
        works(&session);
        session.shutdown().wait().unwrap();
    }
    // The last server may open no sessions.
    let error = SocketSession::new([last, first, second], 1, 1).fan_out(1).start().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("--allow-forward"), "{error}");
}

#[test]
fn workers_count_against_the_threads_of_their_session() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(&folder, &["serve", "--max-threads", "4"]);
    let start = |workers| SocketSession::new([server.address()], workers, 1).start().wait();
    works(&start(3).unwrap());
    let error = start(4).unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("max_threads"), "{error}");
}

#[test]
fn a_program_runs_once_for_each_worker_where_the_operator_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let allowed = || server(&folder, &["serve", "--allow-run", "sh", "--isolate", "process"]);
    let (first, second) = (allowed(), allowed());
    let session = SocketSession::new([first.address(), second.address()], 2, 1).start().wait().unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let collected = lines.clone();
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE; printf $RANK >&2; exit $RANK";
    let command = session.run_all("sh").args(["-c", script]).on_line(move |worker, stream, line| {
        collected.lock().unwrap().push((worker.0, stream.number(), String::from_utf8(line.to_vec()).unwrap()));
    });
    let statuses = command.status().wait().unwrap();
    assert_eq!(statuses.iter().map(|status| status.code).collect::<Vec<_>>(), [0, 1, 2, 3].map(Some));
    let mut lines = std::mem::take(&mut *lines.lock().unwrap());
    lines.sort();
    let expected =
        (0..4).flat_map(|rank| [(rank, 1, format!("{rank} of 4, {} of 2", rank % 2)), (rank, 2, rank.to_string())]);
    assert_eq!(lines, expected.collect::<Vec<_>>());
    let error = session.run_all("true").status().wait().unwrap_err();
    assert_eq!(error.cause().kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("worker "), "{error}");
    works(&session);
    session.shutdown().wait().unwrap();
}
