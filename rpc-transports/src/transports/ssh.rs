//! `ssh://` addresses: a server on another machine, started there through the user's own `ssh`.
//!
//! Dialling `ssh://[user@]host[:port][/KEY][?program=PATH]` runs `PATH serve --stdio` on the host,
//! and speaks to it over the standard input and output of `ssh`. Without `?program=` the program is
//! `rpc-server`, which the login shell there finds on its `PATH`. A relative path with a slash
//! starts in the home folder. `ssh` reads the user's own configuration, so that aliases of hosts,
//! keys, jumps and known hosts are as in a terminal.
//!
//! The login shell must not print anything by itself, because its output comes in front of the
//! protocol. The time limit of the handshake covers all that `ssh` does before there is a session.
//! `ssh` itself may take half of the time limit for connecting to reach the host, so that its own
//! words about a host that does not answer arrive within the time limit of the handshake.
//!
//! `ssh` encrypts, but a token is not bound to its connection, so that these channels do not count
//! as encrypted. They start a program, so that patterns of operators must name the scheme, and
//! trackers cannot lead to them. The session ends with the channel: `ssh` is ended like the child
//! of an [`exec:`](crate::exec) address, and the server reads the end of its standard input.

mod failure;
mod stderr;
#[cfg(test)]
mod tests;

use std::fs::OpenOptions;
use std::sync::Arc;
use std::time::Duration;

use self::failure::SshEnd;
use self::stderr::StderrTail;
use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel, Peer};
use crate::error::TransportError;
use crate::transport::{BoxFuture, Dial, Properties, Reach, Transport};
use crate::transports::exec::{ChildCommand, ChildStderr, Started, spawn_error};

/// The transport of `ssh://` addresses.
///
/// ```
/// use rpc_transports::Transports;
/// use rpc_transports::ssh::Ssh;
///
/// // A key of its own, in place of the one that the user's configuration names.
/// let ssh = Ssh::new().command("ssh", ["-i", "/etc/rpc/id_ed25519"]);
/// let transports = Transports::default().with(ssh);
/// assert!(transports.check(&"ssh://me@board.lan".parse()?)?.starts_programs);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ssh {
    command: Vec<String>,
    stderr: Option<ChildStderr>,
}

impl Default for Ssh {
    fn default() -> Self {
        Self { command: vec!["ssh".to_owned()], stderr: None }
    }
}

impl Ssh {
    /// Creates the transport. It runs `ssh` from `PATH`, whose standard error goes to that of this
    /// process.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the command in place of `ssh`, and arguments of its own, such as `-i` or `-o`. They
    /// come before those of this transport, and so count before them.
    #[must_use]
    pub fn command<I>(self, program: impl Into<String>, arguments: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let command = [program.into()].into_iter().chain(arguments.into_iter().map(Into::into)).collect();
        Self { command, ..self }
    }

    /// Sets the receiver of the standard error of `ssh`, which has that of the remote program in
    /// it. Default: none, and both go to the standard error of this process.
    #[must_use]
    pub fn stderr(self, stderr: ChildStderr) -> Self {
        Self { stderr: Some(stderr), ..self }
    }

    /// Returns what one attempt to dial needs.
    fn attempt(&self, to: &Address, with: &Dial) -> Result<Attempt, AddressError> {
        let destination = Destination::of(to)?;
        let asks = may_ask(with, has_terminal);
        let mut argv = self.command.clone();
        let local_words = argv.len();
        argv.extend(destination.arguments(asks, with.limit() / 2));
        let command = ChildCommand { argv, local_words };
        let tail = Arc::new(StderrTail::default());
        Ok(Attempt { command, destination, asks, tail })
    }
}

impl Transport for Ssh {
    fn schemes(&self) -> &[&str] {
        &["ssh"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        Destination::of(at).map(|_| Properties::program(Reach::Network))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(async move {
            let Attempt { command, destination, asks, tail } = self.attempt(to, with)?;
            let (program, stderr) = (command.program(), tail.receiver(self.stderr.clone()));
            let started = Started::start(command, Some(stderr)).await;
            let started = started.map_err(|error| spawn_error(to, program, error))?;
            let peer = Peer::new(peer_text(to, &started));
            let channel = started.into_channel(peer, |ssh| SshEnd { ssh, destination, asks, tail });
            channel.map_err(|error| TransportError::from_io(to.to_string(), error))
        })
    }

    fn dial_blocking(&self, to: &Address, with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        let dial = || {
            let Attempt { command, destination, asks, tail } = self.attempt(to, with)?;
            let (program, stderr) = (command.program(), tail.receiver(self.stderr.clone()));
            let started = Started::start_blocking(command, Some(stderr));
            let started = started.map_err(|error| spawn_error(to, program, error))?;
            let peer = peer_text(to, &started);
            Ok(started.into_blocking_channel(peer, |ssh| SshEnd { ssh, destination, asks, tail }))
        };
        Some(dial())
    }
}

/// Command line of one attempt to dial, and what explains its failure.
struct Attempt {
    command: ChildCommand,
    destination: Destination,
    /// True if `ssh` may ask the user.
    asks: bool,
    tail: Arc<StderrTail>,
}

fn peer_text(address: &Address, started: &Started) -> String {
    format!("{address} (ssh is process {})", started.pid())
}

/// Returns true if `ssh` may ask: questions are for a user who dials, and who has a terminal.
fn may_ask(with: &Dial, has_terminal: impl FnOnce() -> bool) -> bool {
    with.may_prompt && has_terminal()
}

/// Returns true if this process has a terminal on which `ssh` can ask for a password, or whether an
/// unknown host is to be trusted.
///
/// Without a terminal, `ssh` must not ask: it would start a graphical program for it, or wait for
/// an answer that nobody gives. With a terminal it asks there, and not on standard input, which
/// carries the session. The answer must come within the time limit of the handshake.
fn has_terminal() -> bool {
    OpenOptions::new().read(true).write(true).open("/dev/tty").is_ok()
}

/// Destination of an `ssh://` address: a user on a host, and the program to run there.
#[derive(Debug)]
struct Destination {
    user: Option<String>,
    host: String,
    port: Option<u16>,
    program: String,
}

/// The program at the host, unless the address names one.
const PROGRAM: &str = "rpc-server";

impl Destination {
    fn of(address: &Address) -> Result<Self, AddressError> {
        let invalid = |problem: &str| {
            let example = "write for example ssh://me@board.lan or ssh://board.lan:2222/KEY?program=/opt/rpc-server";
            AddressError::invalid(address, format!("{problem}; {example}"))
        };
        let host = address.host().ok_or_else(|| invalid("it names no host"))?;
        let (user, port) = (address.user(), address.port());
        // `ssh` would take it as an option, some of which run programs on this machine.
        if host.starts_with('-') || user.is_some_and(|user| user.starts_with('-')) {
            return Err(invalid("user and host must not begin with a hyphen"));
        }
        if port == Some(0) {
            return Err(invalid("no server has port 0"));
        }
        if address.parameters().any(|name| name != "program") {
            return Err(invalid("its only parameter is program"));
        }
        let program = address.parameter("program");
        let program = program.as_deref().unwrap_or(PROGRAM);
        // Text that is not UTF-8 has been decoded to replacement characters.
        if program.is_empty() || program.chars().any(|c| c.is_control() || c == char::REPLACEMENT_CHARACTER) {
            return Err(invalid("the program is not the path of a file"));
        }
        // The login shell would take it as an option.
        if program.starts_with('-') {
            return Err(invalid("the program must not begin with a hyphen"));
        }
        let (user, host, program) = (user.map(str::to_owned), host.to_owned(), program.to_owned());
        Ok(Self { user, host, port, program })
    }

    /// Returns the arguments of `ssh`, which may ask the user if `asks` is true. It may take
    /// `connect_timeout` in whole seconds, and at least one, to reach the host. Options of the
    /// user's configuration that would disturb the session are overruled, as `scp` does it.
    fn arguments(&self, asks: bool, connect_timeout: Duration) -> Vec<String> {
        let mut arguments: Vec<String> = [
            // No terminal there, and neither the agent nor the display of this side.
            "-T",
            "-a",
            "-x",
            "-oClearAllForwardings=yes",
            "-oPermitLocalCommand=no",
            "-oRemoteCommand=none",
            // A connection that others share would have to outlive the session.
            "-oControlMaster=no",
        ]
        .map(str::to_owned)
        .into();
        // 0 would be no limit.
        arguments.push(format!("-oConnectTimeout={}", connect_timeout.as_secs().max(1)));
        if !asks {
            arguments.push("-oBatchMode=yes".to_owned());
        }
        if let Some(user) = &self.user {
            arguments.extend(["-l".to_owned(), user.clone()]);
        }
        if let Some(port) = self.port {
            arguments.extend(["-p".to_owned(), port.to_string()]);
        }
        arguments.extend(["--".to_owned(), self.host.clone(), self.remote_command()]);
        arguments
    }

    /// Returns the text that the login shell there runs.
    ///
    /// The program is always quoted, also where crates for this would leave it bare: an unquoted
    /// word may be an assignment, an alias or a keyword of the shell.
    fn remote_command(&self) -> String {
        format!("'{}' serve --stdio", self.program.replace('\'', r"'\''"))
    }

    /// Returns user and host, as on the command line of `ssh`.
    fn login(&self) -> String {
        let port = self.port.map(|port| format!("-p {port} ")).unwrap_or_default();
        let user = self.user.as_ref().map(|user| format!("{user}@")).unwrap_or_default();
        format!("{port}{user}{}", self.host)
    }
}
