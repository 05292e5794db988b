//! `forward`: a local port that leads to a service near a server, in the manner of `ssh -L`, or a
//! port near a server that leads here, in the manner of `ssh -R`.

mod reverse;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::FalseyValueParser;
use rpc_core::{ErrorKind, Pack, Permission, RpcError, Session};
use rpc_transports::tracker::{Loan, TICKET_REFUSED};
use rpc_transports::{Address, Bind, Channel, ConnectError, Connector, Tunnel};
use serde_json::json;
use tokio::task::JoinSet;

use super::connect::CommonOptions;
use super::failure::Failure;
use super::interruption::Interruption;
use super::output::Output;
use crate::policy::Answer;

#[derive(Args, Debug)]
pub(super) struct ForwardArgs {
    /// The other way: the server listens at the first address, which its operator allows with
    /// --allow-listen, and its connections lead to the second one, as seen from here
    #[arg(short = 'R', long, env = "RPC_CLI_REVERSE", value_parser = FalseyValueParser::new())]
    reverse: bool,
    /// Address to listen at, and that of the service as the server reaches it:
    /// [HOST:]PORT:[HOST:]PORT, with 127.0.0.1 on either side if there is no HOST; or unix:PATH on
    /// either side. With port 0 the system chooses the first one
    #[arg(value_name = "LOCAL:REMOTE")]
    forwarding: Forwarding,
    /// The server, whose operator allows the service with --allow-port; one of a tracker is held
    /// until the end. Default: that of rpc-cli use
    pub(super) address: String,
}

/// Address to listen at, and that of the service to which connections lead.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Forwarding {
    at: Address,
    to: Address,
}

/// Carries local connections to the service until the interruption comes, or until a server of a
/// tracker is lost. A connection that fails is reported, and closed; the others go on.
pub(super) async fn forward(
    options: &CommonOptions,
    output: &Output,
    args: ForwardArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let Forwarding { at, to } = args.forwarding;
    if args.reverse {
        return reverse::forward(options, output, &args.address, &at, &to, interruption).await;
    }
    let local = at;
    let borrowed = tokio::select! {
        borrowed = options.borrow_server(&args.address) => borrowed?,
        failure = interruption.wait() => return Err(failure),
    };
    let server = match borrowed {
        Some(loan) => Server::Borrowed(loan),
        None => Server::At { connector: Box::new(options.connector()?), address: args.address.clone() },
    };
    let checked = tokio::select! {
        checked = server.check(options, &to) => checked,
        failure = interruption.wait() => Err(failure),
    };
    let outcome = match checked {
        Ok(()) => accept(&server, options, output, &local, &to, interruption).await,
        Err(failure) => Err(failure),
    };
    if let Server::Borrowed(loan) = &server {
        super::connect::close(loan.session()).await;
    }
    outcome
}

/// Accepts connections at `local`, and carries each to the service.
async fn accept(
    server: &Server,
    options: &CommonOptions,
    output: &Output,
    local: &Address,
    to: &Address,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let bound = options.transports().bind(local, &Bind::default()).await;
    let mut listener = bound.map_err(|error| Failure::Unsuitable(format!("cannot listen at {local}: {error}")))?;
    let local = listener.local_address().to_string();
    if output.is_json() {
        output.json(&json!({ "local": local, "to": to.to_string(), "address": server.to_string() }))?;
    } else {
        output.line(&format!("{local} leads to {to} at {server}"))?;
    }
    let mut connections = JoinSet::new();
    let mut lost = std::pin::pin!(server.lost());
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let channel = accepted.map_err(|error| Failure::Connect(error.into()))?;
                connections.spawn(carry(server.clone(), to.clone(), options.connect_limit(), channel));
            }
            error = &mut lost => return Err(error.into()),
            Some(ended) = connections.join_next() => {
                if let Ok(Err(failure)) = ended {
                    failure.report(output, options.jump());
                }
            }
            failure = interruption.wait() => return Err(failure),
        }
    }
}

/// Carries the bytes of one local connection to the service and back, until it ends.
///
/// # Errors
///
/// The service cannot be reached within `limit`. A connection that breaks later on is no failure:
/// its end tells both sides.
async fn carry(server: Server, to: Address, limit: Duration, local: Channel) -> Result<(), Failure> {
    let opened = tokio::time::timeout(limit, server.open_tunnel(&to)).await;
    let timed_out = |_| Failure::TimedOut { what: format!("connecting to {to} at {server}"), limit, why: None };
    let tunnel = opened.map_err(timed_out)?.map_err(Failure::Connect)?;
    if let Err(error) = tunnel.join(local).await {
        tracing::info!(%to, %error, "a forwarded connection broke");
    }
    Ok(())
}

/// The server that dials the service.
#[derive(Clone)]
enum Server {
    At {
        connector: Box<Connector>,
        address: String,
    },
    /// A server of a tracker. The loan ends with the command.
    Borrowed(Loan),
}

impl Server {
    async fn open_tunnel(&self, to: &Address) -> Result<Tunnel, ConnectError> {
        match self {
            Self::At { connector, address } => connector.open_tunnel(address, to).await,
            Self::Borrowed(loan) => loan.open_tunnel(to).await,
        }
    }

    /// Checks that the server can be reached, and allows the service. The session that asks ends
    /// before this returns: while no connection comes, none is held.
    ///
    /// # Errors
    ///
    /// The server cannot be reached, refuses the client, or does not allow the service. A service
    /// that does not run is none: it may be started later.
    async fn check(&self, options: &CommonOptions, to: &Address) -> Result<(), Failure> {
        let limit = options.connect_limit();
        let check = async {
            let (connector, address) = match self {
                Self::At { connector, address } => (connector, address),
                Self::Borrowed(loan) => return ask(loan.session(), to).await,
            };
            // Tunnels need no ticket, and what they may do is not asked without a session.
            let session = match Connector::clone(connector).through_tunnels().connect(address).await {
                Err(ConnectError::Session(error)) if error.application_kind() == Some(TICKET_REFUSED) => return Ok(()),
                connected => connected.map_err(Failure::Connect)?,
            };
            let allowed = ask(&session, to).await;
            super::connect::close(&session).await;
            allowed
        };
        let timed_out = |_| Failure::TimedOut { what: format!("connecting to {self}"), limit, why: None };
        tokio::time::timeout(limit, check).await.map_err(timed_out)?
    }

    /// Waits for the end of the loan. A server that is not borrowed is dialled anew each time.
    async fn lost(&self) -> RpcError {
        match self {
            Self::At { .. } => std::future::pending().await,
            Self::Borrowed(loan) => loan.session().ended().await,
        }
    }
}

/// Asks the server of a session if it allows the service.
async fn ask(session: &Session, to: &Address) -> Result<(), Failure> {
    let can = match session.get_function("rpc.can").await {
        // It is asked with each connection.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        can => can?,
    };
    let Pack(answer): Pack<Answer> = can.call((Permission::Port(&to.to_string()).to_string(),)).await?;
    if answer.allowed {
        return Ok(());
    }
    let text = format!("the server does not let this client reach {to}: {}", answer.reason);
    Err(RpcError::new(ErrorKind::Refused, text).into())
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { address, .. } => f.write_str(address),
            Self::Borrowed(loan) => f.write_str(&loan.grant().address.join(",")),
        }
    }
}

impl FromStr for Forwarding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("'{text}' is not [HOST:]PORT:[HOST:]PORT, nor has it unix:PATH on a side");
        let (first, second) = split(text).ok_or_else(malformed)?;
        let address = |side: &str| side_address(side).parse().map_err(|error| format!("{side}: {error}"));
        Ok(Self { at: address(first)?, to: address(second)? })
    }
}

/// Splits the address to listen at from that of the service.
fn split(text: &str) -> Option<(&str, &str)> {
    let is_port = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let end_of_host = match text.strip_prefix('[') {
        Some(rest) => rest.find("]:")? + 2,
        None => text.find(':')?,
    };
    let first = &text[..end_of_host];
    // The first side is one part or two; behind a host or `unix` comes the second.
    let len = if is_port(first) {
        first.len()
    } else {
        let rest = &text[end_of_host + 1..];
        let second = rest.find(':')?;
        if first != "unix" && !is_port(&rest[..second]) {
            return None;
        }
        end_of_host + 1 + second
    };
    let remote = &text[len + 1..];
    (!remote.is_empty()).then_some((&text[..len], remote))
}

/// Returns the text of the address of one side.
fn side_address(side: &str) -> String {
    if side.starts_with("unix:") {
        side.to_owned()
    } else if side.contains(':') {
        format!("tcp://{side}")
    } else {
        format!("tcp://127.0.0.1:{side}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_ports_hosts_or_paths() {
        let parse = |text: &str| -> Option<[String; 2]> {
            let Forwarding { at, to } = text.parse().ok()?;
            Some([at.to_string(), to.to_string()])
        };
        for (text, at, to) in [
            ("8080:80", "tcp://127.0.0.1:8080", "tcp://127.0.0.1:80"),
            ("0:db:5432", "tcp://127.0.0.1:0", "tcp://db:5432"),
            ("0.0.0.0:8080:80", "tcp://0.0.0.0:8080", "tcp://127.0.0.1:80"),
            ("[::1]:8080:[fe80::1]:80", "tcp://[::1]:8080", "tcp://[fe80::1]:80"),
            ("8080:unix:/run/x.sock", "tcp://127.0.0.1:8080", "unix:/run/x.sock"),
            ("unix:/tmp/x.sock:db:80", "unix:/tmp/x.sock", "tcp://db:80"),
        ] {
            assert_eq!(parse(text), Some([at.to_owned(), to.to_owned()]), "{text}");
        }
        for text in
            ["", ":", "80", "8080:", ":80", "host:80", "a:b:80", "8080:db:port", "99999:80", "[::1:80:80", "x:80:"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
