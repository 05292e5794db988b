//! Workers of a Disco session that `mpirun` has started: `rpc-server worker --mpi`, with
//! collectives over MPI.

// Tests may unwrap, because a panic is how a test fails.
#![allow(clippy::unwrap_used)]

use std::process::{Child, Command, Output, Stdio};

use disco::{CclState, Content, DiscoSession, NodeListener, ReduceOp, Scope, SocketSession, WorkerId};
use rpc_core::{DataType, ErrorKind, Tensor};
use rpc_transports::{Access, Bind, Certificate, ClientTls, Connector, ServeOptions, ServerTls, Tokens};
use tempfile::TempDir;

/// Starts a job with this number of nodes.
fn job(folder: &TempDir, nodes: u32, controller: &str, more: &[&str]) -> Child {
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &nodes.to_string()])
        .arg(env!("CARGO_BIN_EXE_rpc-server"))
        .args(["worker", "--mpi", "--controller", controller, "--log-level", "error"])
        .args(more)
        .env("XDG_STATE_HOME", folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns the exit code and the text on standard error.
fn outcome(child: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Checks that all workers, and those of each group, reach each other.
fn works(session: &DiscoSession) {
    for (scope, n) in [(Scope::World, 4.0), (Scope::Group, 2.0)] {
        for len in [2, 500_000] {
            let x = Tensor::from_slice([len], &vec![1.5_f32; len as usize]).unwrap();
            let x = session.broadcast(&x, None, scope).unwrap();
            let sum = session.allreduce(&x, None, ReduceOp::Sum, scope).unwrap();
            let sum = session.copy_from_worker_0(&sum).wait().unwrap();
            assert!(sum.read().unwrap().as_slice::<f32>().unwrap().iter().all(|one| *one == 1.5 * n));
        }
    }
    session.sync_all().wait().unwrap();
}

/// Checks the sums of the workers' numbers along each axis of a mesh.
fn works_along_axes(session: &DiscoSession) {
    let mesh = session.mesh(&[("dp", 2), ("tp", 2)]).wait().unwrap();
    for (axis, sums) in [("dp", [2.0, 4.0, 2.0, 4.0]), ("tp", [1.0, 1.0, 5.0, 5.0_f32])] {
        let x = session.empty(&[1], DataType::F32, None).unwrap();
        for worker in 0..4 {
            let own = Tensor::from_slice([1], &[worker as f32]).unwrap();
            session.debug_set_register(&x, WorkerId(worker), &own).unwrap();
        }
        let sum = session.allreduce(&x, None, ReduceOp::Sum, mesh.group(axis).unwrap()).unwrap();
        for (worker, expected) in (0..).zip(sums) {
            let sum = session.debug_get_from_remote(&sum, WorkerId(worker)).wait().unwrap();
            let Content::Tensor(sum) = sum else { panic!("{sum:?}") };
            assert_eq!(sum.read().unwrap().as_slice::<f32>().unwrap(), [expected], "{axis}, worker {worker}");
        }
    }
}

#[test]
fn a_job_of_mpi_is_a_session_with_collectives_over_mpi() {
    let folder = tempfile::tempdir().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let job = job(&folder, 4, &listener.address(), &[]);
    let session = SocketSession::dialled_by(4, &listener, 1, 2).start().wait().unwrap();
    works(&session);
    session.init_ccl("mpi", &[]).wait().unwrap();
    works(&session);
    works_along_axes(&session);
    // A broken session is made anew over MPI, and the processes go on.
    session.abort_ccl("enough").unwrap();
    let x = session.broadcast(&Tensor::from_slice([1], &[1.0_f32]).unwrap(), None, Scope::World);
    drop(x);
    session.sync_all().wait().unwrap_err();
    assert!(matches!(session.ccl_state(), CclState::Broken(_)));
    session.reinit_ccl().wait().unwrap();
    works(&session);
    works_along_axes(&session);
    session.init_ccl("host", &[]).wait().unwrap();
    works(&session);
    session.init_ccl("mpi", &[]).wait().unwrap();
    works(&session);
    session.shutdown().wait().unwrap();
    drop(session);
    assert_eq!(outcome(job), (Some(0), String::new()));
}

#[test]
fn a_job_with_several_workers_in_a_process_has_the_other_collectives() {
    let folder = tempfile::tempdir().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let job = job(&folder, 2, &listener.address(), &[]);
    let session = SocketSession::dialled_by(2, &listener, 2, 2).start().wait().unwrap();
    let error = session.init_ccl("mpi", &[]).wait().unwrap_err().to_string();
    assert!(error.contains("the process of worker 0 has several workers"), "{error}");
    works(&session);
    session.shutdown().wait().unwrap();
    drop(session);
    assert_eq!(outcome(job), (Some(0), String::new()));
}

/// A job whose controller goes away ends, as a session whose job goes away does.
#[test]
fn a_job_ends_with_its_controller_and_a_session_with_its_job() {
    let folder = tempfile::tempdir().unwrap();
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let mut killed = job(&folder, 2, &listener.address(), &[]);
    let session = SocketSession::dialled_by(2, &listener, 1, 1).start().wait().unwrap();
    session.init_ccl("mpi", &[]).wait().unwrap();
    // The end of mpirun ends its processes.
    killed.kill().unwrap();
    killed.wait().unwrap();
    while session.sync_all().wait().is_ok() {}
    drop(session);
    let orphaned = job(&folder, 2, &listener.address(), &[]);
    let session = SocketSession::dialled_by(2, &listener, 1, 1).start().wait().unwrap();
    session.init_ccl("mpi", &[]).wait().unwrap();
    drop(session);
    outcome(orphaned);
}

#[test]
fn settings_that_contradict_mpi_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (code, text) = outcome(job(&folder, 1, "tcp://127.0.0.1:9", &["--isolate", "process"]));
    assert_eq!(code, Some(78), "{text}");
    assert!(text.contains("leave out --isolate"), "{text}");
    // There is no controller: all nodes leave MPI in good order and report the error.
    let (code, text) = outcome(job(&folder, 2, "tcp://127.0.0.1:9", &["--join-timeout", "0s"]));
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("error: cannot join the controller"), "{text}");
}

/// Starts a controller that demands a token and proves one. Returns the token file, too.
fn guarded(folder: &TempDir) -> (NodeListener, Connector, String) {
    let secret = "disco 0123456789abcdef0123456789abcdef";
    let file = folder.path().join("token");
    rpc_server::pki::token_file::store(secret, &file).unwrap();
    let tokens = Tokens::parse(secret).unwrap();
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = Certificate::from_pem(made.cert.pem().as_bytes(), made.signing_key.serialize_pem().as_bytes());
    let tls = Some(ServerTls::new(certificate.unwrap(), None).unwrap());
    let access = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
    let (listen, serve) = (Bind { tls, ..Bind::default() }, ServeOptions { access, ..ServeOptions::default() });
    let listener = NodeListener::bind_with("tls://127.0.0.1:0", listen, serve).wait().unwrap();
    let connector = Connector::new().tokens(tokens).tls(ClientTls::unverified(None).unwrap());
    (listener, connector, file.into_os_string().into_string().unwrap())
}

/// Drives two nodes to their end, with encrypted collectives, because their commands are encrypted.
fn drive(listener: &NodeListener, connector: Connector) {
    let session = SocketSession::dialled_by(2, listener, 1, 1).connector(connector).start().wait().unwrap();
    session.init_ccl("mpi", &[]).wait().unwrap();
    let x = session.broadcast(&Tensor::from_slice([1], &[1.0_f32]).unwrap(), None, Scope::World).unwrap();
    let sum = session.allreduce(&x, None, ReduceOp::Sum, Scope::World).unwrap();
    let sum = session.copy_from_worker_0(&sum).wait().unwrap();
    assert_eq!(sum.read().unwrap().as_slice::<f32>().unwrap(), [2.0]);
    session.shutdown().wait().unwrap();
}

/// Runs the script for Slurm of the deployment folder, with mpirun in place of srun.
#[test]
fn the_script_for_slurm_starts_a_session() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let (listener, connector, token) = guarded(&folder);
    let srun = folder.path().join("srun");
    let text = "#!/bin/sh\n[ \"$1 $2\" = '--mpi=pmix --kill-on-bad-exit=1' ] || exit 99\nshift 2\n\
                exec mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 \"$@\"\n";
    std::fs::write(&srun, text).unwrap();
    std::fs::set_permissions(&srun, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/disco-mpi.slurm");
    let mut command = Command::new("bash");
    command.arg(script).env("PATH", path).env("XDG_STATE_HOME", folder.path()).env("RPC_SERVER_LOG_LEVEL", "error");
    command
        .env("CONTROLLER", listener.address())
        .env("TOKEN_FILE", token)
        .env("RPC_SERVER_WORKDIR", folder.path().join("work"));
    command.env("RPC_SERVER", env!("CARGO_BIN_EXE_rpc-server"));
    let job = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drive(&listener, connector);
    assert_eq!(outcome(job), (Some(0), String::new()));
}

/// Runs the command for Kubernetes of the deployment folder, with paths of this machine.
#[test]
fn the_manifest_for_kubernetes_starts_a_session() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, connector, token) = guarded(&folder);
    let manifest = include_str!("../deploy/disco-mpi.kubernetes.yaml");
    let (_, args) = manifest.split_once("command: [\"mpirun\"]\n              args:\n").unwrap();
    let args = args.lines().map_while(|line| line.trim().strip_prefix("- \""));
    let args: Vec<String> = args.map(|arg| arg.strip_suffix('"').unwrap().to_owned()).collect();
    let work = folder.path().join("work").into_os_string().into_string().unwrap();
    let here = args.iter().map(|arg| match arg.as_str() {
        "4" => "2".to_owned(),
        "rpc-server" => env!("CARGO_BIN_EXE_rpc-server").to_owned(),
        arg => arg
            .replace("tls://disco-controller:9700", &listener.address())
            .replace("/etc/disco/token", &token)
            .replace("/tmp/disco", &work),
    });
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe"]).args(here).env("RPC_SERVER_LOG_LEVEL", "error");
    let job = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drive(&listener, connector);
    assert_eq!(outcome(job), (Some(0), String::new()));
}

#[test]
fn nodes_that_have_not_started_mpi_are_told_how() {
    let listener = NodeListener::bind("tcp://127.0.0.1:0").wait().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-server"));
    let folder = tempfile::tempdir().unwrap();
    command.args(["worker", "--controller", &listener.address(), "--log-level", "error"]);
    let mut node = command.env("XDG_STATE_HOME", folder.path()).stdin(Stdio::null()).spawn().unwrap();
    let session = SocketSession::dialled_by(1, &listener, 1, 1).start().wait().unwrap();
    let error = session.init_ccl("mpi", &[]).wait().unwrap_err();
    assert!(error.to_string().contains("mpirun -n 4 rpc-server worker --mpi"), "{error}");
    assert_eq!(rpc_core::RpcError::from(error).kind(), ErrorKind::Unsupported);
    session.shutdown().wait().unwrap();
    drop(session);
    assert!(node.wait().unwrap().success());
}
