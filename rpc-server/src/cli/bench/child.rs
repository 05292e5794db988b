//! The servers that a bench starts: this program again, in processes of their own.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use rpc_transports::Address;

use super::secure::Certificates;
use super::{bare, pin};
use crate::cli::failure::Failure;
use crate::config::ServeConfig;
use crate::server::RpcServer;
use crate::spawn::ServerProcess;

/// What a child is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// A server of ours, as `rpc-server serve` runs it.
    Server,
    /// Bare tokio, on one thread.
    Tokio,
    /// Bare std sockets, a thread for each connection.
    Std,
    /// Bare tokio that passes bytes on.
    Relay,
}

#[derive(Args, Debug)]
pub(crate) struct ChildArgs {
    part: Part,
    /// Where to listen
    listen: Address,
    /// What to forward to: all that a server may be used to reach, or the end of a relay
    forward: Option<String>,
    #[arg(long)]
    core: Option<usize>,
    #[arg(long)]
    workdir: Option<PathBuf>,
    /// A folder with certificates
    #[arg(long)]
    certificates: Option<PathBuf>,
}

/// Starts children, and keeps what they need.
#[derive(Debug)]
pub(super) struct Nursery {
    /// Sockets and workspaces; removed with this.
    folder: tempfile::TempDir,
    scheme: &'static str,
    /// For `tls` and `quic`.
    certificates: Option<Certificates>,
    children: std::cell::Cell<usize>,
}

impl Nursery {
    pub(super) fn new(scheme: &'static str) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder for sockets", error))?;
        let certificates = match scheme {
            "tls" | "quic" => Some(Certificates::make(folder.path().join("certificates"))?),
            _ => None,
        };
        Ok(Self { folder, scheme, certificates, children: 0.into() })
    }

    /// Those of the servers, if they need any.
    pub(super) fn certificates(&self) -> Option<&Certificates> {
        self.certificates.as_ref()
    }

    /// Starts a child and waits until it listens.
    pub(super) fn start(
        &self,
        part: Part,
        forward: Option<&str>,
        core: Option<usize>,
    ) -> Result<ServerProcess, Failure> {
        let number = self.children.get();
        self.children.set(number + 1);
        let listen = match self.scheme {
            "unix" => format!("unix:{}", self.path(&format!("socket-{number}")).display()),
            scheme => format!("{scheme}://127.0.0.1:0"),
        };
        let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
        let mut command = Command::new(program);
        let name = part.to_possible_value();
        command.arg("bench-child").arg(name.as_ref().map_or("", |name| name.get_name())).arg(listen);
        command.args(forward).arg("--workdir").arg(self.path(&format!("workdir-{number}")));
        if let Some(certificates) = &self.certificates {
            command.arg("--certificates").arg(certificates.folder());
        }
        if let Some(core) = core {
            command.arg("--core").arg(core.to_string());
        }
        Ok(ServerProcess::spawn(command)?)
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(self.folder.path()).join(name)
    }
}

/// Is such a child, until standard input ends.
pub(in crate::cli) fn run_child(args: ChildArgs) -> Result<(), Failure> {
    pin::pin(args.core)?;
    match args.part {
        Part::Server => serve(args),
        Part::Std => {
            let listener = bare::std_listener(&args.listen)?;
            announce(&listener.address()?);
            exit_with_stdin()?;
            bare::serve_std(&listener)
        }
        Part::Tokio | Part::Relay => crate::cli::runtime()?.block_on(async {
            let certificates = args.certificates.map(Certificates::made);
            let listener = bare::listener(&args.listen, certificates.as_ref()).await?;
            announce(&listener.address()?);
            exit_with_stdin()?;
            match &args.forward {
                Some(target) if args.part == Part::Relay => {
                    let dialler = bare::Dialler::new(args.listen.scheme(), certificates.as_ref())?;
                    bare::relay(&listener, target, dialler).await
                }
                _ => bare::serve(&listener).await,
            }
        }),
    }
}

fn serve(args: ChildArgs) -> Result<(), Failure> {
    let mut config = ServeConfig::default();
    config.listen = vec![args.listen.into()];
    config.exit_with_stdin = true;
    config.allow_forward = args.forward.into_iter().collect();
    config.workdir = args.workdir.unwrap_or(config.workdir);
    if let Some(certificates) = args.certificates.map(Certificates::made) {
        config.cert = Some(certificates.certificate());
        config.cert_key = Some(certificates.key());
        config.forward_ca = Some(certificates.authority());
    }
    let server = RpcServer::builder().config(config).build();
    let outcome = match args.core {
        Some(_) => crate::cli::runtime()?.block_on(server.run_until_signal()),
        None => server.run_blocking(),
    };
    match crate::exit::of_server(&outcome) {
        0 => Ok(()),
        code => Err(Failure::Told(code)),
    }
}

/// In the words of every server.
pub(in crate::cli) fn announce(address: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "listening on {address}").and_then(|()| stdout.flush());
}

/// Ends this process with its parent, whose end closes the pipe.
pub(in crate::cli) fn exit_with_stdin() -> Result<(), Failure> {
    let watch = || {
        let mut buffer = [0; 64];
        // Nothing is ever written to it.
        while io::stdin().read(&mut buffer).is_ok_and(|count| count > 0) {}
        std::process::exit(0);
    };
    let started = std::thread::Builder::new().name("stdin".to_owned()).spawn(watch);
    started.map(drop).map_err(|error| Failure::local("cannot start a thread", error))
}
