//! `doctor`: finds the reason for which an address does not work, one step at a time.

use std::time::{Duration, Instant};

use clap::Args;
use rpc_core::proto::{MAGIC, VERSION_MAX, VERSION_MIN};
use rpc_core::{ErrorKind, Pack, Packed, RpcError, Session};
use rpc_transports::tracker::{MESSAGES, ServerRequest, Summary, address_of, functions};
use rpc_transports::{
    Address, AddressError, Channel, ConnectError, Connector, Dial, TransportError, Transports, exec, unix,
};
use serde_json::json;

use self::examination::{Examination, Finding};
use self::recorder::{Received, Recorder};
use super::connect::{CommonOptions, close};
use super::failure::{Failure, connect_code};
use super::failure_report::{TUNNEL, origin};
use super::output::Output;
use super::tracker_pool::{PoolVerdict, look_for};
use crate::builtins::ServerInfo;
use crate::pki::trust::TrustError;

mod examination;
mod recorder;

#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// The address to look at
    pub(super) address: String,
}

pub(super) async fn doctor(options: &CommonOptions, output: &Output, args: DoctorArgs) -> Result<(), Failure> {
    let (connector, dial, transports) = (Connector::new(), Dial::default(), options.transports());
    let mut examination = Examination { output, steps: Vec::new(), connector, dial, transports };
    let outcome = match read_credentials(options, &mut examination) {
        Ok(()) => examine(options, &mut examination, &args.address).await,
        Err(code) => Err(code),
    };
    let code = outcome.as_ref().err().copied().unwrap_or(0);
    if output.is_json() {
        output.json(&json!({
            "address": args.address,
            "jump": options.jump(),
            "ok": code == 0,
            "exit_code": code,
            "steps": examination.steps,
        }))?;
    } else if code == 0 {
        output.line(&format!("{} works", args.address))?;
    }
    match examination.fault() {
        None if code == 0 => Ok(()),
        None => Err(Failure::Reported(code)),
        Some((step, detail)) => Err(Failure::Examined { step: step.to_owned(), detail: detail.to_owned(), code }),
    }
}

/// Reads the files of certificates and tokens. An error is the exit code.
fn read_credentials(options: &CommonOptions, examination: &mut Examination<'_>) -> Result<(), u8> {
    let read = options.bare_connector().and_then(|connector| Ok((connector, options.dial_options()?)));
    match read {
        Ok((connector, dial)) => {
            (examination.connector, examination.dial) = (connector, dial);
            Ok(())
        }
        Err(failure) => {
            let advice = match failure {
                Failure::Trust(TrustError::Expired { .. }) => {
                    "renew it: rpc-cli cert --out FOLDER, where its authority is"
                }
                _ => "correct --ca, --cert, --cert-key or --token-file",
            };
            let finding = Finding::new(causes(&failure), advice, failure.exit_code());
            Err(examination.failed("identity", finding))
        }
    }
}

/// Examines an address. An error is the exit code of the step that failed.
async fn examine(options: &CommonOptions, examination: &mut Examination<'_>, target: &str) -> Result<(), u8> {
    let limit = options.connect_limit();
    let mut route: Vec<&str> = options.jump().iter().map(String::as_str).collect();
    route.push(target);
    let mut addresses = Vec::with_capacity(route.len());
    let mut described = Vec::with_capacity(route.len());
    for (at, text) in route.iter().enumerate() {
        // The last stop is no hop.
        let tunnelled = text.strip_prefix(TUNNEL).filter(|_| at + 1 < route.len());
        match parse(examination.transports, tunnelled.unwrap_or(text), at == 0) {
            Ok(address) => {
                let text = describe(&address);
                described.push(if tunnelled.is_some() { format!("a tunnel through {text}") } else { text });
                addresses.push(address);
            }
            Err(problem) => {
                return Err(examination.failed("parse", Finding::new(problem, "correct the address", 2)));
            }
        }
    }
    examination.ok("parse", described.join(", then "));

    // A tracker is examined first as a server.
    let asked = addresses.last().filter(|address| address_of(address).is_some()).cloned();
    if let Err(failure) = options.check_requirements(target) {
        let advice = "leave them out, or write tracker://HOST:PORT/KEY";
        return Err(examination.failed("parse", Finding::new(failure.to_string(), advice, failure.exit_code())));
    }
    let tracker = asked.as_ref().and_then(address_of);
    let tracker_text = tracker.as_ref().map(Address::to_string);
    if let (Some(last), Some(text), Some(address), Some(tracker_text)) =
        (addresses.last_mut(), route.last_mut(), &tracker, &tracker_text)
    {
        *last = address.clone();
        *text = tracker_text;
    }

    // This machine connects to the first server; the others are reached through it.
    let first = &addresses[0];
    resolve(examination, first, limit).await?;
    if addresses.len() == 1 && examination.transports.opener(first.scheme()).is_some() {
        return open_without_channel(examination, first, limit).await;
    }
    let (channel, received) = connect(examination, first, limit).await?;
    let greeting = greet(examination, channel, &received, limit).await?;
    let is_relay = matches!(greeting, Greeting::Relay);
    let mut session = match (greeting, first.key()) {
        // A relay has no session of its own: it needs the name of the server that waits there.
        (Greeting::Relay, Some(key)) => with_key(examination, first, key, is_relay, limit).await?,
        (Greeting::Relay, None) => {
            let advice = format!("name a server that waits there, as in {first}/NAME");
            let finding = Finding::new("it is a relay, and the address does not say which server", advice, 2);
            return Err(examination.failed("key", finding));
        }
        // The key is for the last server, and counts here only if there is no other.
        (Greeting::Session(session), Some(key)) if addresses.len() == 1 => {
            close(&session).await;
            with_key(examination, first, key, is_relay, limit).await?
        }
        (Greeting::Session(session), _) => session,
    };
    examination.ok("session", format!("{} opened one", first.clone().without_key()));
    for hops in 1..route.len() {
        close(&session).await;
        session = through(examination, &route[..=hops], limit).await?;
    }
    echo(examination, &session, limit).await?;
    modules(examination, &session, limit).await?;
    if let Some(asked) = asked {
        servers(examination, &session, options.wanted_of(asked.key()), limit).await?;
    }
    close(&session).await;
    Ok(())
}

/// Opens a session at an address that leads to no channel of the native protocol. Its functions are
/// not known here, so that none is called.
async fn open_without_channel(examination: &mut Examination<'_>, address: &Address, limit: Duration) -> Result<(), u8> {
    match tokio::time::timeout(limit, examination.connector.connect(address)).await {
        Ok(Ok(session)) => {
            examination.ok("session", format!("{address} opened one, without a connection of this protocol"));
            close(&session).await;
            Ok(())
        }
        Ok(Err(error)) => {
            let finding = Finding::new(chain(&error), "look at the cause", connect_code(&error));
            Err(examination.failed("session", finding))
        }
        Err(_) => {
            let advice = "look at what serves the address; --timeout waits longer";
            Err(examination.failed("session", Finding::new(format!("no session within {limit:?}"), advice, 124)))
        }
    }
}

/// Checks that a tracker has servers for the request.
async fn servers(
    examination: &mut Examination<'_>,
    session: &Session,
    wanted: ServerRequest,
    limit: Duration,
) -> Result<(), u8> {
    let ask = async {
        let summary = session.get_function(functions::SUMMARY).await?;
        let summary = summary.call::<Packed>(()).await?;
        MESSAGES.decode::<Summary>(&summary, "the tracker", "this program")
    };
    let finding = match tokio::time::timeout(limit, ask).await {
        Ok(Ok(summary)) => match look_for(&summary, &wanted) {
            PoolVerdict::Available(detail) => {
                examination.ok("servers", detail);
                return Ok(());
            }
            PoolVerdict::Missing { detail, advice } => Finding::new(detail, advice, 69),
        },
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {
            let advice = "correct the address: write tcp:// for a server, or the address of the tracker";
            Finding::new("the server there is no tracker", advice, 76)
        }
        Ok(Err(error)) => {
            let code = Failure::Remote(error.clone()).exit_code();
            Finding::new(error.to_string(), "look at the tracker's log", code)
        }
        Err(_) => Finding::new(format!("no answer within {limit:?}"), "look at the tracker's log and load", 124),
    };
    Err(examination.failed("servers", finding))
}

fn describe(address: &Address) -> String {
    if let Some(at) = address_of(address) {
        let of = address.key().map_or("a server".to_owned(), |key| format!("a server with the key '{key}'"));
        return format!("{of} of the tracker at {at}");
    }
    match (address.scheme(), address.host_and_port()) {
        ("tcp", Some((host, port))) => format!("TCP port {port} of {host}"),
        ("tls", Some((host, port))) => format!("TCP port {port} of {host}, encrypted by TLS"),
        ("quic", Some((host, port))) => format!("UDP port {port} of {host}, in QUIC"),
        ("unix", _) => match unix::path_of(address) {
            Ok(path) => format!("Unix socket {}", path.display()),
            Err(_) => address.to_string(),
        },
        ("ssh", _) => format!("a server started on {} through ssh", address.host().unwrap_or_default()),
        ("exec", _) => {
            let program = exec::argv_of(address).ok().and_then(|argv| argv.into_iter().next());
            format!("the program {}", program.unwrap_or_default())
        }
        _ => address.to_string(),
    }
}

async fn resolve(examination: &mut Examination<'_>, address: &Address, limit: Duration) -> Result<(), u8> {
    // The host of an `ssh://` address may be an alias of the user's configuration.
    let Some((host, port)) = address.host_and_port().filter(|_| address.scheme() != "ssh") else { return Ok(()) };
    let lookup = tokio::net::lookup_host((host, port));
    match tokio::time::timeout(limit, lookup).await {
        Ok(Ok(found)) => {
            let mut found: Vec<_> = found.map(|socket| socket.ip().to_string()).collect();
            found.dedup();
            examination.ok("resolve", format!("{host} is {}", found.join(", ")));
            Ok(())
        }
        Ok(Err(error)) => Err(examination.failed(
            "resolve",
            Finding::new(
                format!("no address is known for {host}: {error}"),
                "check the name's spelling, and that this machine can resolve names; or write the IP address",
                69,
            ),
        )),
        Err(_) => Err(examination.failed(
            "resolve",
            Finding::new(
                format!("no name server answered within {limit:?}"),
                "check this machine's network and name servers; or write the IP address",
                124,
            ),
        )),
    }
}

/// Parses an address, and has its transport check it where this program has that: those of further
/// hops may be known to the hop before them alone. `is_first` is for the address that is dialled
/// from here.
fn parse(transports: &Transports, text: &str, is_first: bool) -> Result<Address, String> {
    let address: Address = text.parse().map_err(|error: AddressError| error.to_string())?;
    let is_known = transports.get(address.scheme()).is_some() || transports.opener(address.scheme()).is_some();
    if is_first || is_known {
        transports.check(&address).map_err(|error| error.to_string())?;
    }
    Ok(address)
}

async fn connect(
    examination: &mut Examination<'_>,
    address: &Address,
    limit: Duration,
) -> Result<(Channel, Received), u8> {
    let start = Instant::now();
    match open(examination, address, limit).await {
        Ok(opened) => {
            examination.ok("connect", format!("in {:.1} ms", start.elapsed().as_secs_f64() * 1e3));
            Ok(opened)
        }
        Err(error) => Err(examination.failed("connect", transport_finding(&error))),
    }
}

/// Opens a channel that records the first bytes received.
async fn open(
    examination: &Examination<'_>,
    address: &Address,
    limit: Duration,
) -> Result<(Channel, Received), TransportError> {
    let address = address.clone().without_key();
    let options = Dial { connect_timeout: limit, ..examination.dial.clone() };
    let received = Received::default();
    let record = |io| Recorder { io, received: received.clone() };
    let channel = examination.transports.dial(&address, &options).await?.map_io(record);
    Ok((channel, received))
}

fn transport_finding(error: &TransportError) -> Finding {
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    let (detail, advice) = match error {
        TransportError::Refused { .. } => (
            "refused: the machine is up, and nothing listens on the port",
            "start the server (rpc-server serve --listen ADDRESS), or correct the port; a server on \
             127.0.0.1 cannot be reached from other machines",
        ),
        TransportError::TimedOut { address, .. } if address.starts_with("quic:") => (
            "timeout: no answer",
            "check that the machine is up, that a server listens on the UDP port, and that no firewall drops the \
             packets; --timeout waits longer",
        ),
        TransportError::TimedOut { .. } => (
            "timeout: no answer",
            "check that the machine is up and that no firewall drops the packets; --timeout waits longer",
        ),
        TransportError::Unreachable { .. } => (
            "unreachable: there is no route to the host",
            "check this machine's network, or go through another one with --jump",
        ),
        TransportError::NotFound { .. } => {
            ("the socket file is missing", "start the server, or correct the path; the server makes the file")
        }
        TransportError::NoFolder { .. } => ("the folder of the socket file is missing", "correct the path"),
        TransportError::PermissionDenied { .. } => {
            ("this user may not use the socket", "run as the user of the server, or change the mode of the socket file")
        }
        TransportError::Spawn { .. } => {
            ("the program does not start", "check that it is installed, executable, and on PATH")
        }
        TransportError::EndlessStart { .. } => ("the program would start itself without end", "do as the cause says"),
        TransportError::Unsupported { scheme, .. } if matches!(scheme.as_str(), "tls" | "quic") => (
            "there is nothing to check the server's certificate by",
            "give the certificate of its authority (--ca), or a token that it knows (--token-file)",
        ),
        TransportError::Unsupported { why, .. } => ("such addresses cannot be dialled", why.as_ref()),
        TransportError::Insecure { hint, .. } => ("no secure channel", *hint),
        TransportError::Unauthenticated { problem, .. } => ("the server refused the connection", *problem),
        TransportError::Closed { .. } => ("the connection was closed at once", "look at the server's log"),
        _ => ("the system reports an error", "look at the cause"),
    };
    Finding::new(format!("{detail}{cause}"), advice, connect_code(&ConnectError::Transport(error.clone())))
}

/// Answer of the first server to a client that asks for no key.
enum Greeting {
    Session(Session),
    /// It is a relay, which opens no sessions itself.
    Relay,
}

/// Opens a session without a key, and records which of the first steps have succeeded.
async fn greet(
    examination: &mut Examination<'_>,
    channel: Channel,
    received: &Received,
    limit: Duration,
) -> Result<Greeting, u8> {
    let outcome = tokio::time::timeout(limit, examination.connector.connect_channel(channel)).await;
    let first = received.bytes();
    let is_ours = first.starts_with(&MAGIC);
    let error = match outcome {
        Ok(Ok(session)) => {
            introduced(examination);
            examination.ok("version", format!("both sides speak a version from {VERSION_MIN} to {VERSION_MAX}"));
            examination.ok("identity", "accepted");
            return Ok(Greeting::Session(session));
        }
        Err(_) if is_ours => {
            introduced(examination);
            let finding = Finding::new(
                format!("it did not finish the handshake within {limit:?}"),
                "it may be overloaded, or waiting for the next hop: look at its log; --timeout waits longer",
                124,
            );
            return Err(examination.failed("session", finding));
        }
        Err(_) => {
            let finding = Finding::new(
                format!("it accepted the connection and sent {} within {limit:?}", said(&first)),
                "another program may listen there, or the server is stopped or overloaded; --timeout waits longer",
                124,
            );
            return Err(examination.failed("protocol", finding));
        }
        Ok(Err(ConnectError::Session(error))) => error,
        Ok(Err(error)) => {
            let advice = "look at the cause";
            return Err(examination.failed("protocol", Finding::new(chain(&error), advice, connect_code(&error))));
        }
    };
    // The server objects to the certificate before it says anything else.
    if error.kind() == ErrorKind::Unauthenticated && !is_ours {
        let code = connect_code(&ConnectError::Session(error.clone()));
        return Err(examination.failed("identity", Finding::new(error.message().to_owned(), PROVE_IDENTITY, code)));
    }
    if !is_ours {
        return Err(examination.failed("protocol", stranger(&first, &error)));
    }
    introduced(examination);
    let code = connect_code(&ConnectError::Session(error.clone()));
    let detail = error.message().to_owned();
    if error.kind() == ErrorKind::VersionMismatch {
        let advice = "use an rpc-cli and an rpc-server of the same release";
        return Err(examination.failed("version", Finding::new(detail, advice, code)));
    }
    examination.ok("version", "both sides speak a common version");
    if error.kind() == ErrorKind::Unauthenticated {
        return Err(examination.failed("identity", Finding::new(detail, PROVE_IDENTITY, code)));
    }
    examination.ok("identity", "accepted");
    // Only a relay answers so: a server needs no key, and nothing else was asked for that could be
    // missing.
    if error.kind() == ErrorKind::NotFound {
        examination.ok("relay", "it is a relay");
        return Ok(Greeting::Relay);
    }
    Err(examination.failed("session", Finding::new(detail, session_advice(&error), code)))
}

const PROVE_IDENTITY: &str = "give a token that the server knows (--token-file), or a valid certificate by an \
     authority that it trusts (--cert, --cert-key)";

fn introduced(examination: &mut Examination<'_>) {
    examination.ok("protocol", "it speaks this protocol");
}

/// Describes a peer that speaks another protocol.
fn stranger(first: &[u8], error: &RpcError) -> Finding {
    let looks_like = match first {
        [] => {
            let advice = "another program may listen there, or the server is at a limit or stopping: look at its log";
            return Finding::new(format!("it sent nothing: {}", error.message()), advice, 76);
        }
        [b'H', b'T', b'T', b'P', b'/', ..] => "a web server",
        [b'S', b'S', b'H', b'-', ..] => "an SSH server",
        [0x15, 0x03, ..] => {
            let detail = format!("the server speaks TLS: it sent {}", said(first));
            return Finding::new(detail, "write tls:// instead of tcp://, or wss:// instead of ws://", 76);
        }
        [b'2', b'2', b'0', b' ' | b'-', ..] => "a mail or FTP server",
        [b'-', b'E', b'R', b'R', ..] => "a Redis server",
        _ => "a server of another kind",
    };
    Finding::new(
        format!("another protocol: it sent {}, as {looks_like} does", said(first)),
        "correct the port: another program listens there",
        76,
    )
}

fn said(first: &[u8]) -> String {
    if first.is_empty() { "nothing".to_owned() } else { format!("\"{}\"", first.escape_ascii()) }
}

fn session_advice(error: &RpcError) -> &'static str {
    match error.kind() {
        ErrorKind::LimitExceeded => {
            "the server has its maximum of sessions: try again later, or raise --max-sessions there"
        }
        ErrorKind::Draining => "the server is stopping: try again after its restart",
        ErrorKind::Refused => "ask the server's operator",
        ErrorKind::PeerLost | ErrorKind::PeerSilent => "look at the server's log",
        _ => "look at the server's log, and compare versions",
    }
}

/// Opens the session again, with the key of the address.
async fn with_key(
    examination: &mut Examination<'_>,
    address: &Address,
    key: &str,
    is_relay: bool,
    limit: Duration,
) -> Result<Session, u8> {
    let attempt = async {
        let (channel, _) = open(examination, address, limit).await?;
        examination.connector.clone().key(key).connect_channel(channel).await
    };
    let advice = if is_relay {
        format!("start the server with --relay {address}, or look at its log")
    } else {
        "ask the server which key it has (rpc-cli info, without the key), or leave the key out".to_owned()
    };
    match tokio::time::timeout(limit, attempt).await {
        Ok(Ok(session)) => {
            let detail = if is_relay {
                format!("'{key}' waits at the relay")
            } else {
                format!("the server has the key '{key}'")
            };
            examination.ok("key", detail);
            Ok(session)
        }
        Ok(Err(error)) => Err(examination.failed("key", Finding::new(chain(&error), advice, connect_code(&error)))),
        Err(_) => Err(examination.failed("key", Finding::new(format!("no answer within {limit:?}"), "try again", 124))),
    }
}

/// Opens a session with the last server of `route` through the others, all of which work.
async fn through(examination: &mut Examination<'_>, route: &[&str], limit: Duration) -> Result<Session, u8> {
    let Some((target, hops)) = route.split_last() else { return Err(1) };
    // A stop behind which there is a tunnel is reached like any other server.
    let target = target.strip_prefix(TUNNEL).unwrap_or(target);
    let step = format!("hop {}", hops.len());
    let connector = hops.iter().fold(examination.connector.clone(), |connector: Connector, hop| connector.via(hop));
    let jump: Vec<_> = hops.iter().map(ToString::to_string).collect();
    let hop = hops.last().copied().unwrap_or_default();
    let (last, is_tunnel) = hop.strip_prefix(TUNNEL).map_or((hop, false), |hop| (hop, true));
    match tokio::time::timeout(limit, connector.connect(target)).await {
        Ok(Ok(session)) => {
            let how = if is_tunnel { "passes the bytes to" } else { "reaches" };
            examination.ok(&step, format!("{last} {how} {target}"));
            Ok(session)
        }
        Ok(Err(error)) => {
            let code = connect_code(&error);
            let (detail, advice) = match &error {
                ConnectError::Session(error) if error.kind() == ErrorKind::Refused => (
                    format!("{last} was to reach {target}: {}", error.message()),
                    format!(
                        "if it is {last} that refuses, have its operator allow it with --allow-forward {target}; a key \
                             is refused by {target}"
                    ),
                ),
                ConnectError::Session(error) => (
                    format!("{last} cannot reach {target}: {} (at {})", error.message(), origin(error, &jump)),
                    match error.kind() {
                        ErrorKind::Unauthenticated if is_tunnel => PROVE_IDENTITY.to_owned(),
                        ErrorKind::Unauthenticated => {
                            format!("have {last} prove its identity there (--forward-token-file, --forward-cert)")
                        }
                        _ => format!("run rpc-cli doctor {target} on the machine of {last}"),
                    },
                ),
                ConnectError::Transport(error) => {
                    let finding = transport_finding(error);
                    (finding.detail, finding.advice)
                }
                error => (chain(error), "look at the cause".to_owned()),
            };
            Err(examination.failed(&step, Finding::new(detail, advice, code)))
        }
        Err(_) => {
            let detail = format!("{last} did not reach {target} within {limit:?}");
            let advice = format!("run rpc-cli doctor {target} on the machine of {last}; --timeout waits longer");
            Err(examination.failed(&step, Finding::new(detail, advice, 124)))
        }
    }
}

/// Formats an error with its causes on one line.
fn chain(error: &ConnectError) -> String {
    match error {
        ConnectError::Session(error) => error.message().to_owned(),
        error => causes(error),
    }
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

async fn echo(examination: &mut Examination<'_>, session: &Session, limit: Duration) -> Result<(), u8> {
    let start = Instant::now();
    let trip = async {
        let echo = session.get_function("rpc.echo").await?;
        echo.call::<i64>((1,)).await
    };
    match tokio::time::timeout(limit, trip).await {
        Ok(Ok(_)) => {
            examination.ok("echo", format!("a call returned after {:.1} ms", start.elapsed().as_secs_f64() * 1e3));
            Ok(())
        }
        Ok(Err(error)) => {
            let code = Failure::Remote(error.clone()).exit_code();
            let advice = match error.kind() {
                ErrorKind::NotFound => "the server has no rpc.echo; its other functions may work",
                _ => "look at the server's log",
            };
            Err(examination.failed("echo", Finding::new(error.to_string(), advice, code)))
        }
        Err(_) => {
            let advice = "the session is open and calls are not answered: look at the server's log and load";
            Err(examination.failed("echo", Finding::new(format!("no answer within {limit:?}"), advice, 124)))
        }
    }
}

/// Checks that modules can be loaded, if the server takes any.
async fn modules(examination: &mut Examination<'_>, session: &Session, limit: Duration) -> Result<(), u8> {
    let ask = async {
        let info = session.get_function("rpc.info").await?;
        info.call::<Pack<ServerInfo>>(()).await
    };
    // Servers of other kinds have no such function, and need none.
    let Ok(Ok(Pack(info))) = tokio::time::timeout(limit, ask).await else { return Ok(()) };
    let Some(modules) = info.modules else { return Ok(()) };
    match modules.unavailable {
        None => {
            examination.ok("modules", "native modules are taken, and can be loaded");
            Ok(())
        }
        Some(reason) => {
            let advice =
                "install the library at the server, or name its file with --tvm-ffi there; all other functions work";
            Err(examination.failed("modules", Finding::new(reason, advice, 1)))
        }
    }
}
