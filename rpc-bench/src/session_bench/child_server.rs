//! Servers that the bench starts: this program again, in child processes.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use rpc_server::cli::Failure;
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, ServerProcess};
use rpc_transports::Address;

use super::{bare_sockets, core_affinity};
use crate::certificates::Certificates;
use crate::child_process::{announce, exit_with_stdin};

/// Role of a child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Role {
    /// Server of ours, as `rpc-server serve` runs it.
    Server,
    /// Bare tokio, on one thread.
    Tokio,
    /// Bare std sockets, one thread per connection.
    Std,
    /// Bare tokio that forwards bytes.
    Relay,
}

#[derive(Args, Debug)]
pub(crate) struct ChildArgs {
    role: Role,
    /// Address to listen on
    listen: Address,
    /// Address to which a server may forward, or to which a relay forwards
    forward: Option<String>,
    #[arg(long)]
    core: Option<usize>,
    /// Switches spinning on
    #[arg(long)]
    spin: bool,
    #[arg(long)]
    workdir: Option<PathBuf>,
    /// Folder with certificates
    #[arg(long)]
    certificates: Option<PathBuf>,
}

/// Starter of child servers, and owner of their files.
#[derive(Debug)]
pub(super) struct ChildServers {
    /// Folder of sockets and workspaces, removed on drop.
    folder: tempfile::TempDir,
    scheme: &'static str,
    /// True if servers of ours spin.
    spin: bool,
    /// Present for `tls` and `quic`.
    certificates: Option<Certificates>,
    children: std::cell::Cell<usize>,
}

impl ChildServers {
    pub(super) fn new(scheme: &'static str, spin: bool) -> Result<Self, Failure> {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder for sockets", error))?;
        let certificates = match scheme {
            "tls" | "quic" => Some(Certificates::make(folder.path().join("certificates"))?),
            _ => None,
        };
        Ok(Self { folder, scheme, spin, certificates, children: 0.into() })
    }

    /// Returns the certificates of the servers, if their transport needs any.
    pub(super) fn certificates(&self) -> Option<&Certificates> {
        self.certificates.as_ref()
    }

    /// Starts a child and waits until it listens.
    pub(super) fn start(
        &self,
        role: Role,
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
        let name = role.to_possible_value();
        command.arg("session-server").arg(name.as_ref().map_or("", |name| name.get_name())).arg(listen);
        command.args(forward).arg("--workdir").arg(self.path(&format!("workdir-{number}")));
        if let Some(certificates) = &self.certificates {
            command.arg("--certificates").arg(certificates.folder());
        }
        if self.spin {
            command.arg("--spin");
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

/// Runs as a child server until standard input ends.
pub(crate) fn run_child(args: ChildArgs) -> Result<(), Failure> {
    core_affinity::pin_thread(args.core)?;
    match args.role {
        Role::Server => serve(args),
        Role::Std => {
            let listener = bare_sockets::std_listener(&args.listen)?;
            announce(&listener.address()?);
            exit_with_stdin()?;
            bare_sockets::serve_std(&listener)
        }
        Role::Tokio | Role::Relay => rpc_server::cli::runtime()?.block_on(async {
            let certificates = args.certificates.map(Certificates::existing);
            let listener = bare_sockets::listener(&args.listen, certificates.as_ref()).await?;
            announce(&listener.address()?);
            exit_with_stdin()?;
            match &args.forward {
                Some(target) if args.role == Role::Relay => {
                    let connector = bare_sockets::Connector::new(args.listen.scheme(), certificates.as_ref())?;
                    bare_sockets::relay(&listener, target, connector).await
                }
                _ => bare_sockets::serve(&listener).await,
            }
        }),
    }
}

fn serve(args: ChildArgs) -> Result<(), Failure> {
    let mut config = ServeConfig::default();
    config.listen = vec![args.listen.into()];
    config.exit_with_stdin = true;
    config.spin = args.spin;
    config.allow_forward = args.forward.into_iter().collect();
    config.workdir = args.workdir.unwrap_or(config.workdir);
    if let Some(certificates) = args.certificates.map(Certificates::existing) {
        config.cert = Some(certificates.certificate());
        config.cert_key = Some(certificates.key());
        config.forward_ca = Some(certificates.authority());
    }
    let server = RpcServer::default().config(config);
    let outcome = match args.core {
        Some(_) => rpc_server::cli::runtime()?.block_on(server.run_until_signal()),
        None => server.run_blocking(),
    };
    match rpc_server::server::exit_code::of_server(&outcome) {
        0 => Ok(()),
        code => Err(Failure::Reported(code)),
    }
}
