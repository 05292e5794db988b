//! Where the workers of the example run, each way started from nothing and ended with the program.

use std::process::Command;

use disco::{Completion, DiscoSession, ProcessSession, SocketSession, ThreadedSession};
use rpc_core::Registry;
use rpc_server::{ServerProcess, pki};
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{ClientTls, Connector, Tokens};

/// Over what the controller reaches its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Over {
    /// Threads of this process
    Threads,
    /// Child processes of this one
    Processes,
    /// Servers at TCP addresses of this machine
    Tcp,
    /// Servers at QUIC addresses of this machine, which share a token with the controller
    Quic,
    /// Servers behind one that forwards to them
    Chain,
    /// Servers that a tracker hands out
    Tracker,
}

/// What has been started. Dropping it ends the servers.
pub(crate) struct Place {
    pub(crate) session: DiscoSession,
    _servers: Vec<ServerProcess>,
}

type Failure = Box<dyn std::error::Error>;

impl Place {
    pub(crate) fn start(over: Over, workers: u32, registry: Registry) -> Result<Self, Failure> {
        let mut servers = Vec::new();
        let session = match over {
            Over::Threads => ThreadedSession::new(workers, 1).registry(registry).start(),
            // This program again: `serve_if_worker`, in `main`, does the rest.
            Over::Processes => ProcessSession::new(workers, 1).start(),
            Over::Tcp => SocketSession::new(serve(&mut servers, workers, &[])?, 1, 1).start(),
            Over::Quic => over_quic(&mut servers, workers)?,
            Over::Chain => {
                let addresses = serve(&mut servers, workers, &[])?;
                let gateway = serve(&mut servers, 1, &["--allow-forward", "tcp://127.0.0.1:*"])?.remove(0);
                SocketSession::new(addresses, 1, 1).connector(Connector::new().via(&gateway)).start()
            }
            Over::Tracker => {
                let tracker = spawn(&["tracker", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin"])?;
                let address = tracker.address().to_owned();
                serve(&mut servers, workers, &["--tracker", &address, "--tracker-key", "digits"])?;
                // It goes last.
                servers.push(tracker);
                let all = ServerRequest::new("digits").count(workers).distinct();
                SocketSession::from_tracker(address, all, 1, 1).start()
            }
        };
        Ok(Self { session: session.wait()?, _servers: servers })
    }

    pub(crate) fn at(addresses: Vec<String>, workers_per_node: u32) -> Result<Self, Failure> {
        let session = SocketSession::new(addresses, workers_per_node, 1).start().wait()?;
        Ok(Self { session, _servers: Vec::new() })
    }
}

/// QUIC is always encrypted; who the other side is the token proves, to both.
fn over_quic(servers: &mut Vec<ServerProcess>, workers: u32) -> Result<Completion<DiscoSession>, Failure> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("token");
    let token = pki::token::generate(Some("digits"))?;
    pki::token::store(&token, &file)?;
    let path = file.to_str().ok_or("the folder for temporary files has no name in UTF-8")?;
    let addresses = serve(servers, workers, &["--listen", "quic://127.0.0.1:0", "--token-file", path])?;
    let connector = Connector::new().tokens(Tokens::parse(&token)?).tls(ClientTls::unverified(None)?);
    Ok(SocketSession::new(addresses, 1, 1).connector(connector).start())
}

/// Starts so many servers with the functions of workers. Their addresses.
fn serve(servers: &mut Vec<ServerProcess>, count: u32, flags: &[&str]) -> Result<Vec<String>, Failure> {
    let listen: &[&str] = if flags.contains(&"--listen") { &[] } else { &["--listen", "tcp://127.0.0.1:0"] };
    let mut addresses = Vec::new();
    for _ in 0..count {
        let server = spawn(&[&["serve", "--exit-with-stdin", "--log-level", "warn"], listen, flags].concat())?;
        addresses.push(server.address().to_owned());
        servers.push(server);
    }
    Ok(addresses)
}

/// This program, as something else.
fn spawn(args: &[&str]) -> Result<ServerProcess, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args);
    Ok(ServerProcess::spawn(command)?)
}
