//! Options of all commands, and the session that they describe.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::FalseyValueParser;
use rpc_core::{Session, VirtualDevice};
use rpc_transports::tracker::{Loan, ServerRequest, address_of};
use rpc_transports::{Address, AddressError, Connector, Dial, Transports};

use super::failure::Failure;
use super::named_servers::{NamedServer, NamedServerError, NamedServers, is_reference, split_tunnel};
use super::output::{ColorChoice, Output};
use super::pool_wait::{PoolRequest, WaitReason};
use super::shell::SharedConnection;
use crate::config::{Label, SERVER_PORT, Span, with_default_port};
use crate::pki::trust::ClientTrust;

/// Environment variables of the flags that choose among a tracker's servers.
const WANT: &str = "RPC_CLI_WANT";
const LABEL: &str = "RPC_CLI_LABEL";

/// Default time limit of connecting: three lost packets, and a handshake over a slow link.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Time limit of the shutdown of a session.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Options of all commands: how to connect, and how to print.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Common options")]
pub struct CommonOptions {
    /// Transports of the program.
    #[arg(skip)]
    transports: Transports,
    /// Reason of the present wait for a server.
    #[arg(skip)]
    waiting: WaitReason,
    /// Connection of the shell that runs the command, if one does.
    #[arg(skip)]
    shared: Option<SharedConnection>,
    /// File with named servers, which rpc-cli use lists; @NAME stands for their addresses. Default:
    /// rpc/config.toml in $XDG_CONFIG_HOME or ~/.config
    #[arg(long, global = true, env = "RPC_CLI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Hops on the way to the server, in order, as with ssh; may be repeated, or given as a list
    /// with commas
    #[arg(short = 'J', long, global = true, env = "RPC_CLI_JUMP", value_name = "ADDRESS", value_delimiter = ',')]
    jump: Vec<String>,
    /// Device that a tracker's server must have, such as cuda or "cuda,target=cuda -arch=sm_90";
    /// may be repeated
    #[arg(long, global = true, env = WANT, value_name = "DEVICE")]
    want: Vec<VirtualDevice>,
    /// Label that a tracker's server must have; may be repeated, or given as a list with commas
    #[arg(long, global = true, env = LABEL, value_name = "NAME=VALUE", value_delimiter = ',')]
    label: Vec<Label>,
    /// Named workspace of commands that use files; the server keeps it across sessions
    #[arg(long, global = true, env = "RPC_CLI_WORKSPACE", value_name = "NAME", default_value = "cli")]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    workspace: String,
    /// Time limit of the command, such as 500ms or 30s; for ping, status, doctor and lease, of each
    /// step; for run, of the program; for forward, of opening each connection.
    /// Default: 10 s for connecting; 60 s for waiting while a tracker has no such server; none for
    /// waiting while it has, and for the rest
    #[arg(long, global = true, env = "RPC_CLI_TIMEOUT", value_name = "TIME")]
    timeout: Option<Span>,
    /// Print JSON, one document a line; errors too, on standard error
    #[arg(long, global = true, env = "RPC_CLI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    /// Log more on standard error; twice for debugging, three times for everything
    #[arg(short, long, global = true, env = "RPC_CLI_VERBOSE", action = clap::ArgAction::Count)]
    #[arg(conflicts_with = "quiet")]
    verbose: u8,
    /// Print nothing but data and errors
    #[arg(short, long, global = true, env = "RPC_CLI_QUIET", value_parser = FalseyValueParser::new())]
    quiet: bool,
    #[command(flatten)]
    trust: ClientTrust,
    /// When to colour text
    #[arg(long, global = true, env = "RPC_CLI_COLOR", value_name = "WHEN", default_value = "auto")]
    color: ColorChoice,
}

impl CommonOptions {
    /// Connects by these transports from now on.
    pub(super) fn set_transports(&mut self, transports: Transports) {
        self.transports = transports;
    }

    /// Returns the transports of the program.
    pub(super) fn transports(&self) -> &Transports {
        &self.transports
    }

    /// Returns the file with named servers, if one was given.
    pub(super) fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// Returns true if the user has a default server.
    pub(super) fn has_default_server(&self) -> bool {
        NamedServers::read(self.config()).is_ok_and(|servers| servers.default_name().is_some())
    }

    /// Returns the options of a shell with this connection.
    pub(super) fn with_connection(self, connection: SharedConnection) -> Self {
        Self { shared: Some(connection), ..self }
    }

    /// Returns the options of a line of a shell with these options: the connection is that of the
    /// shell, and the line may say more on time and output.
    pub(super) fn for_line(&self, line: &Self) -> Self {
        Self {
            timeout: line.timeout.or(self.timeout),
            json: line.json || self.json,
            quiet: line.quiet || self.quiet,
            ..self.clone()
        }
    }

    /// Puts addresses in the place of named servers, in `address` and among the hops, fills the
    /// gaps of these options from the servers, and completes addresses that lack a port: `port` is
    /// that of the role of `address`.
    ///
    /// # Errors
    ///
    /// A server is unknown, or the file with the servers cannot be used.
    pub(super) fn resolve_servers(&mut self, address: &mut String, port: u16) -> Result<(), Failure> {
        let Self { jump, trust, config, .. } = self;
        let timeout = resolve(address, port, jump, trust, config.as_deref())?;
        self.timeout = self.timeout.or(timeout);
        Ok(())
    }

    /// Returns the server at `address` as these options reach it.
    pub(super) fn named_server(&self, address: String) -> Result<NamedServer, Failure> {
        Ok(NamedServer {
            address,
            via: self.jump.clone(),
            key: None,
            token_file: absolute(self.trust.token_file.as_deref())?,
            ca: absolute(self.trust.ca.as_deref())?,
            cert: absolute(self.trust.cert.as_deref())?,
            cert_key: absolute(self.trust.cert_key.as_deref())?,
            timeout: self.timeout,
        })
    }

    /// Checks the addresses of the hops and of the server. Later hops may know schemes that this
    /// program does not.
    ///
    /// # Errors
    ///
    /// An address is malformed, or cannot be dialled from here.
    pub(super) fn check_addresses(&self, address: &str) -> Result<(), Failure> {
        let hops = self.jump.iter().map(|hop| split_tunnel(hop).1);
        for (at, text) in hops.chain([address]).enumerate() {
            let address = parse_address(text)?;
            if at == 0 {
                self.transports.check(&address).map_err(|error| Failure::Connect(error.into()))?;
            }
        }
        Ok(())
    }

    pub(super) fn timeout(&self) -> Option<Duration> {
        self.timeout.map(|Span(timeout)| timeout)
    }

    /// Returns the level of events that are logged.
    pub fn log_level(&self) -> &'static str {
        match self.verbose {
            _ if self.quiet => "error",
            0 => "warn",
            1 => "info",
            2 => "debug",
            _ => "trace",
        }
    }

    /// Prints JSON, as with `--json`.
    pub(super) fn print_json(&mut self) {
        self.json = true;
    }

    /// Returns the standard streams as the options ask for.
    pub fn output(&self) -> Output {
        Output::new(self.json, self.quiet, self.color)
    }

    /// Returns the hops, in order.
    pub fn jump(&self) -> &[String] {
        &self.jump
    }

    /// Returns the time limit of connecting.
    pub(super) fn connect_limit(&self) -> Duration {
        self.timeout().unwrap_or(CONNECT_LIMIT)
    }

    /// Returns the options for opening channels, with tokens and trust from the given files.
    pub(super) fn dial_options(&self) -> Result<Dial, Failure> {
        Ok(self.trust.dial_options()?)
    }

    /// Returns a connector without hops. Its limits are longer than ours, so that ours are the ones
    /// that are reported.
    pub(super) fn bare_connector(&self) -> Result<Connector, Failure> {
        let limit = self.connect_limit() + Duration::from_secs(1);
        Ok(Connector::new()
            .transports(self.transports.clone())
            .dial(self.dial_options()?)
            .connect_timeout(limit)
            .handshake_timeout(limit))
    }

    /// Returns a connector with the hops that were given, and the requirements on a tracker's
    /// server.
    ///
    /// # Errors
    ///
    /// A file with certificates or tokens cannot be used.
    pub fn connector(&self) -> Result<Connector, Failure> {
        let connector = self.jump.iter().fold(self.bare_connector()?, |connector, hop| connector.via(hop));
        Ok(self.wanted().into_iter().fold(connector, Connector::server_request))
    }

    /// Returns the request for a tracker's server with this key.
    pub(super) fn wanted_of(&self, key: Option<&str>) -> ServerRequest {
        let mut wanted = self.wanted().unwrap_or_else(ServerRequest::any);
        key.unwrap_or_default().clone_into(&mut wanted.key);
        wanted
    }

    /// Checks that requirements on a tracker's server are given for a tracker alone.
    ///
    /// # Errors
    ///
    /// [`Failure::Usage`].
    pub(super) fn check_requirements(&self, address: &str) -> Result<(), Failure> {
        // In the environment the variables are for all commands, also those that ask no tracker.
        let are_flags = [WANT, LABEL].iter().all(|variable| std::env::var_os(variable).is_none());
        if are_flags && self.wanted().is_some() && !is_tracker(address) {
            let text = format!("--want and --label choose among a tracker's servers, and {address} is no tracker://");
            return Err(Failure::Usage(text));
        }
        Ok(())
    }

    /// Returns the requirements on a tracker's server; `None` without any.
    fn wanted(&self) -> Option<ServerRequest> {
        let labels =
            self.label.iter().fold(ServerRequest::any(), |request, Label { name, value }| request.label(name, value));
        let wanted = self.want.iter().fold(labels, |request, wanted| request.virtual_device(wanted.clone()));
        (!self.want.is_empty() || !self.label.is_empty()).then_some(wanted)
    }

    /// Opens a session with the server at `address`, with a workspace or without.
    pub(super) async fn connect(&self, address: &str, files: Files) -> Result<Session, Failure> {
        let connector = match files {
            Files::Workspace => self.connector()?.workspace(&self.workspace),
            Files::None => self.connector()?,
        };
        self.check_requirements(address)?;
        let limit = self.connect_limit();
        let connected = async {
            let parsed = address.parse::<Address>().ok();
            let Some((address, tracker)) = parsed.as_ref().and_then(|address| Some((address, address_of(address)?)))
            else {
                return connector.connect(address).await.map_err(Failure::Connect);
            };
            let wanted = self.wanted_of(address.key());
            let request = PoolRequest { address, tracker, wanted, limit: self.timeout() };
            request.connect(&connector, &self.waiting, &self.output()).await
        };
        if self.timeout.is_none() && may_wait_in_queue(address) {
            // All servers may be in use for hours; --timeout limits the wait.
            return connected.await;
        }
        match tokio::time::timeout(limit, connected).await {
            Ok(outcome) => outcome,
            Err(_) => {
                Err(Failure::TimedOut { what: format!("connecting to {address}"), limit, why: self.wait_reason() })
            }
        }
    }

    /// Opens a session with the hop of this number, through those in front of it.
    pub(super) async fn connect_to_hop(&self, number: usize) -> Result<Session, Failure> {
        let (Some(hop), before) = (self.jump.get(number), self.jump.iter().take(number)) else {
            return Err(Failure::Usage(format!("there is no hop {number}")));
        };
        let connector = before.fold(self.bare_connector()?, |connector, hop| connector.via(hop));
        let limit = self.connect_limit();
        match tokio::time::timeout(limit, connector.connect(hop)).await {
            Ok(outcome) => outcome.map_err(Failure::Connect),
            Err(_) => Err(Failure::TimedOut { what: format!("connecting to {hop}"), limit, why: None }),
        }
    }

    /// Borrows a server from the tracker at `address`; `None` if that is no address of a tracker's
    /// servers.
    pub(super) async fn borrow_server(&self, address: &str) -> Result<Option<Loan>, Failure> {
        self.check_requirements(address)?;
        let Ok(address) = address.parse::<Address>() else { return Ok(None) };
        let Some(tracker) = address_of(&address) else { return Ok(None) };
        let wanted = self.wanted_of(address.key());
        let request = PoolRequest { address: &address, tracker, wanted, limit: self.timeout() };
        let (connector, output) = (self.connector()?, self.output());
        let loan = request.borrow(&connector, &self.waiting, &output);
        let Some(limit) = self.timeout() else { return loan.await.map(Some) };
        let outcome = tokio::time::timeout(limit, loan).await;
        let timed_out =
            |_| Failure::TimedOut { what: format!("connecting to {address}"), limit, why: self.wait_reason() };
        outcome.map_err(timed_out)?.map(Some)
    }

    /// Returns what the command waits for, if that is a server of a tracker.
    pub(super) fn wait_reason(&self) -> Option<String> {
        self.waiting.get()
    }

    /// As [`connect`](Self::connect), for the duration of `work`. In a shell, the session is the
    /// one of the shell, which has a workspace.
    pub(super) async fn with_session<F>(
        &self,
        address: &str,
        files: Files,
        work: impl FnOnce(Session) -> F,
    ) -> Result<(), Failure>
    where
        F: Future<Output = Result<(), Failure>>,
    {
        let Some(shared) = &self.shared else {
            let session = self.connect(address, files).await?;
            let outcome = work(session.clone()).await;
            close(&session).await;
            return outcome;
        };
        let session = match shared.current().await {
            Some(Ok(session)) => session,
            lost => {
                if let Some(Err(error)) = lost {
                    self.output().warn(&format!("the connection was lost, and is made anew: {}", error.message()));
                }
                let session = self.connect(address, Files::Workspace).await?;
                shared.set(session.clone());
                session
            }
        };
        work(session).await
    }
}

/// Puts addresses in the place of named servers, as `rpc-cli` does: `@NAME` as the `address` of a
/// server and among its `hops` stands for a server in the file `config`, by default
/// `rpc/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`. The file also fills gaps among the
/// credentials in `trust`, and names hops if none are given. Addresses that lack a port get that of
/// servers or trackers. The result is the time limit of connecting that the file names.
///
/// # Errors
///
/// A server is unknown, or the file cannot be used.
pub fn resolve_named_servers(
    address: &mut String,
    hops: &mut Vec<String>,
    trust: &mut ClientTrust,
    config: Option<&Path>,
) -> Result<Option<Duration>, NamedServerError> {
    Ok(resolve(address, SERVER_PORT, hops, trust, config)?.map(|Span(timeout)| timeout))
}

/// As [`resolve_named_servers`]; `port` is that of the role of `address`.
fn resolve(
    address: &mut String,
    port: u16,
    hops: &mut Vec<String>,
    trust: &mut ClientTrust,
    config: Option<&Path>,
) -> Result<Option<Span>, NamedServerError> {
    let mut timeout = None;
    if is_reference(address) || hops.iter().any(|hop| is_reference(hop)) {
        let servers = NamedServers::read(config)?;
        let mut target = servers.route(address)?;
        if is_reference(address) {
            timeout = target.servers[0].timeout;
        }
        *address = target.addresses.pop().unwrap_or_default();
        if hops.is_empty() {
            *hops = target.addresses;
        } else {
            // The hops that were given replace those of the file.
            target.servers.truncate(1);
            for hop in std::mem::take(hops) {
                let route = servers.route(&hop)?;
                hops.extend(route.addresses);
                target.servers.extend(route.servers);
            }
        }
        check_trust(trust, &target.servers, &servers)?;
        for server in target.servers {
            fill_trust(trust, server, &servers);
        }
    }
    *address = complete(address, port);
    for hop in hops {
        let (tunnel, hop_address) = split_tunnel(hop);
        *hop = format!("{tunnel}{}", complete(hop_address, SERVER_PORT));
    }
    Ok(timeout)
}

/// Checks that the servers on the way have the same credentials, as far as they have any and none
/// were given: a connection has one set for all its hops.
fn check_trust(trust: &ClientTrust, route: &[&NamedServer], servers: &NamedServers) -> Result<(), NamedServerError> {
    type File = fn(&NamedServer) -> &Option<PathBuf>;
    let files: [(&'static str, bool, File); 3] = [
        ("token-file", trust.token_file.is_some(), |server| &server.token_file),
        ("ca", trust.ca.is_some(), |server| &server.ca),
        ("cert", trust.cert.is_some(), |server| &server.cert),
    ];
    for (setting, is_given, file) in files {
        let mut all = route.iter().filter_map(|server| Some((server, servers.resolve_path(file(server).as_ref()?))));
        let Some((first, path)) = all.next().filter(|_| !is_given) else { continue };
        if let Some((other, _)) = all.find(|(_, other)| *other != path) {
            let (first, other) = (first.address.clone(), other.address.clone());
            return Err(NamedServerError::Credentials { setting, first, other });
        }
    }
    Ok(())
}

/// Fills the gaps among the credentials from those of the server.
fn fill_trust(trust: &mut ClientTrust, server: &NamedServer, servers: &NamedServers) {
    let path = |path: &Option<PathBuf>| path.as_deref().map(|path| servers.resolve_path(path));
    trust.ca = trust.ca.take().or_else(|| path(&server.ca));
    trust.token_file = trust.token_file.take().or_else(|| path(&server.token_file));
    // A certificate goes with its key.
    if trust.cert.is_none() && trust.cert_key.is_none() {
        (trust.cert, trust.cert_key) = (path(&server.cert), path(&server.cert_key));
    }
}

/// Parses an address.
pub(super) fn parse_address(text: &str) -> Result<Address, Failure> {
    text.parse().map_err(|error: AddressError| Failure::Connect(error.into()))
}

/// Returns the address with this port if it lacks one. A malformed address is returned as it is.
fn complete(address: &str, port: u16) -> String {
    address.parse().map_or_else(|_| address.to_owned(), |parsed| with_default_port(parsed, port).to_string())
}

/// Returns the path as one that does not depend on the current folder.
fn absolute(path: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|error| Failure::file("cannot find the folder of", path, error))
    };
    path.map(absolute).transpose()
}

pub(super) fn is_tracker(address: &str) -> bool {
    address.parse::<Address>().is_ok_and(|address| address_of(&address).is_some())
}

/// Returns true for addresses of servers that a tracker gives out, one of ours or of TVM.
fn may_wait_in_queue(address: &str) -> bool {
    is_tracker(address) || address.parse::<Address>().is_ok_and(|address| address.scheme() == "tvm-tracker")
}

/// Shuts a session down, so that the server does not report it as lost. Waits for a second at most.
pub async fn close(session: &Session) {
    let _ = tokio::time::timeout(CLOSE_LIMIT, session.shutdown().into_future()).await;
}

/// Files that a command uses at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Files {
    /// Files of the named workspace.
    Workspace,
    None,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::private_file::{Mode, write};

    #[test]
    fn a_named_server_brings_its_hops_its_credentials_and_its_time_limit() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.toml");
        let text = "[server.board]\naddress = 'tls://board.lan'\nvia = ['quic://gate']\n\
                    token-file = 'tokens'\ntimeout = '3s'\n";
        write(&config, text, Mode::Private).unwrap();
        let resolve = |address: &str, hops: &[&str], trust: &mut ClientTrust| {
            let mut address = address.to_owned();
            let mut hops = hops.iter().map(|&hop| hop.to_owned()).collect();
            let timeout = resolve_named_servers(&mut address, &mut hops, trust, Some(&config));
            timeout.map(|timeout| (address, hops.join(" "), timeout))
        };
        let mut trust = ClientTrust::default();
        let board = |hops: &str| ("tls://board.lan:9090".to_owned(), hops.to_owned(), Some(Duration::from_secs(3)));
        assert_eq!(resolve("@board", &[], &mut trust).unwrap(), board("quic://gate:9090"));
        assert_eq!(trust.token_file, Some(folder.path().join("tokens")));
        trust.token_file = Some("mine".into());
        assert_eq!(resolve("@board", &["tcp://hop:1"], &mut trust).unwrap(), board("tcp://hop:1"));
        assert_eq!(trust.token_file, Some("mine".into()));
        let plain = ("tracker://t:9190/k".to_owned(), String::new(), None);
        assert_eq!(resolve("tracker://t/k", &[], &mut trust).unwrap(), plain);
        assert!(resolve("@bord", &[], &mut trust).is_err());
    }
}
