//! Limits on open files: those of sessions, and that of the process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RemoteObject, RpcError, Session};
use rpc_transports::{ConnectError, Connector};

use crate::NO_OPENCL;

/// A server whose process may open few files, killed when dropped.
struct SmallServer {
    child: Child,
    address: String,
    log: Vec<String>,
    _folder: tempfile::TempDir,
}

impl SmallServer {
    /// Starts a server that may open `limit` files.
    fn start(limit: u32, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("/bin/sh");
        // Lowers the hard limit, which the server cannot raise again. The soft one is less still.
        command.args(["-c", &format!("ulimit -n {limit} && ulimit -S -n 50 && exec \"$0\" \"$@\"")]);
        command.arg(env!("CARGO_BIN_EXE_rpc-server")).env_clear().env(NO_OPENCL.0, NO_OPENCL.1);
        command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--workdir"]).arg(folder.path()).args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut log = Vec::new();
        // The log of the start ends with the address. The rest stays in the pipe.
        for line in lines {
            let is_last = line.contains("listening");
            log.push(line);
            if is_last {
                break;
            }
        }
        Self { child, address, log, _folder: folder }
    }

    fn connect(&self) -> Result<Session, ConnectError> {
        Connector::new().connect_blocking(&self.address)
    }
}

impl Drop for SmallServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Opens writers until the server refuses one. Returns them and the error.
fn open_writers(session: &Session) -> (Vec<RemoteObject>, RpcError) {
    let begin = session.function::<(String, Option<u64>), RemoteObject>("rpc.file.begin_write").wait().unwrap();
    let mut writers = Vec::new();
    loop {
        match begin.call((format!("file-{}", writers.len()), None)).wait() {
            Ok(writer) => writers.push(writer),
            Err(error) => return (writers, error),
        }
        assert!(writers.len() < 2000, "no limit");
    }
}

#[test]
fn files_of_one_session_keep_neither_others_nor_its_own_connections_out() {
    let server = SmallServer::start(1024, &["--max-open-files", "20"]);
    let session = server.connect().unwrap();
    let (mut writers, error) = open_writers(&session);
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().starts_with("max_open_files is 20"), "{error}");
    // The workspace itself counts, too.
    assert_eq!(writers.len(), 17);
    // Another session has as many, and the first one gets back what it frees.
    assert_eq!(open_writers(&server.connect().unwrap()).0.len(), 17);
    writers.pop();
    assert_eq!(open_writers(&session).0.len(), 1);
}

#[test]
fn files_of_all_sessions_together_leave_descriptors_for_new_clients() {
    // 192 of them for clients: half of them for files, and 3 of 8 for sessions.
    let server = SmallServer::start(256, &["--max-sessions-per-peer", "72"]);
    let holders: Vec<_> = (0..4).map(|_| server.connect().unwrap()).collect();
    let mut held = Vec::new();
    for session in &holders {
        // Those after the first one get no workspace.
        let (writers, error) = open_writers(session);
        held.push(writers);
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(error.message().starts_with("max_total_open_files is 96"), "{error}");
    }
    // All other sessions that there may be find room.
    let others: Vec<_> = (4..72).map(|_| server.connect().unwrap()).collect();
    let Err(ConnectError::Session(error)) = server.connect() else { panic!("one session too many") };
    assert!(error.message().starts_with("max_sessions"), "{error}");
    drop((others, held));
}

#[test]
fn a_client_for_whom_there_is_no_descriptor_is_told_why() {
    let server = SmallServer::start(100, &["--max-sessions", "4096", "--max-sessions-per-peer", "4096"]);
    let warning = "this process may open fewer files than the settings admit";
    assert!(server.log.iter().any(|line| line.contains(warning)), "{:?}", server.log);

    let mut sessions = Vec::new();
    let refusal = loop {
        match server.connect() {
            Ok(session) => sessions.push(session),
            Err(error) => break error,
        }
        assert!(sessions.len() < 100, "more sessions than descriptors");
    };
    // The soft limit of 50 was raised.
    assert!(sessions.len() > 50, "{}", sessions.len());
    let ConnectError::Session(error) = refusal else { panic!("{refusal:?}") };
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("can open no more files or connections"), "{error}");

    // Those that are there are served, and there is room again once some have left.
    sessions[0].get_function("rpc.echo").wait().unwrap();
    sessions.truncate(1);
    let start = Instant::now();
    while let Err(error) = server.connect() {
        assert!(start.elapsed() < Duration::from_secs(20), "{error}");
    }
}
