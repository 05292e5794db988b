//! `doctor`: why an address does not work, found out one step at a time.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use clap::Args;
use rpc_core::proto::{MAGIC, VERSION_MAX, VERSION_MIN};
use rpc_core::{ErrorKind, Pack, RpcError, Session};
use rpc_transports::tracker::{Summary, functions};
use rpc_transports::{Address, AddressKind, Channel, ConnectError, Connector, DialOptions, TransportError, dial};
use serde::Serialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connect::{CommonOptions, close};
use super::failure::{Failure, connect_code, place};
use super::missing::{Verdict, look_for};
use super::output::Output;

#[derive(Args, Debug)]
pub(super) struct DoctorArgs {
    /// The address to look at
    address: String,
}

pub(super) async fn doctor(options: &CommonOptions, output: &Output, args: DoctorArgs) -> Result<(), Failure> {
    let (connector, dial) = (options.bare_connector()?, options.dial_options()?);
    let mut visit = Visit { output, steps: Vec::new(), connector, dial };
    let outcome = examine(options, &mut visit, &args.address).await;
    let code = outcome.as_ref().err().copied().unwrap_or(0);
    if output.is_json() {
        output.json(&json!({
            "address": args.address,
            "jump": options.jump(),
            "ok": code == 0,
            "exit_code": code,
            "steps": visit.steps,
        }))?;
    } else if code == 0 {
        output.line(&format!("{} works", args.address))?;
    }
    if code == 0 { Ok(()) } else { Err(Failure::Reported(code)) }
}

/// One step, as it is reported.
#[derive(Debug, Serialize)]
struct Step {
    step: String,
    ok: bool,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// What went wrong, what to do, and the exit code that says so.
struct Finding {
    detail: String,
    advice: String,
    code: u8,
}

impl Finding {
    fn new(detail: impl Into<String>, advice: impl Into<String>, code: u8) -> Self {
        Self { detail: detail.into(), advice: advice.into(), code }
    }
}

/// The steps so far.
struct Visit<'a> {
    output: &'a Output,
    steps: Vec<Step>,
    connector: Connector,
    dial: DialOptions,
}

impl Visit<'_> {
    fn ok(&mut self, step: &str, detail: impl Into<String>) {
        self.record(Step { step: step.to_owned(), ok: true, detail: detail.into(), advice: None });
    }

    /// Records a failure. The result is what the examination ends with.
    fn failed(&mut self, step: &str, finding: Finding) -> u8 {
        let Finding { detail, advice, code } = finding;
        self.record(Step { step: step.to_owned(), ok: false, detail, advice: Some(advice) });
        code
    }

    fn record(&mut self, step: Step) {
        if !self.output.is_json() {
            let verdict = self.output.verdict(step.ok, if step.ok { "ok    " } else { "failed" });
            // A reader that goes away misses lines that are not worth failing for.
            let _ = self.output.line(&format!("{verdict} {:10} {}", step.step, step.detail));
            if let Some(advice) = &step.advice {
                let _ = self.output.line(&format!("       {:10} {advice}", "advice"));
            }
        }
        self.steps.push(step);
    }
}

/// The examination. An error is the exit code of the step that failed.
async fn examine(options: &CommonOptions, visit: &mut Visit<'_>, target: &str) -> Result<(), u8> {
    let limit = options.connect_limit();
    let mut route: Vec<&str> = options.jump().iter().map(String::as_str).collect();
    route.push(target);
    let mut addresses = Vec::with_capacity(route.len());
    for text in &route {
        match text.parse::<Address>() {
            Ok(address) => addresses.push(address),
            Err(error) => return Err(visit.failed("parse", Finding::new(error.to_string(), "correct the address", 2))),
        }
    }
    visit.ok("parse", addresses.iter().map(describe).collect::<Vec<_>>().join(", then "));

    // Of a tracker it is found out first whether it works itself.
    let asked = addresses.last().filter(|address| address.tracker_address().is_some()).cloned();
    let tracker = asked.as_ref().and_then(Address::tracker_address).map(Address::to_string);
    if let (Some(last), Some(text), Some(address)) = (addresses.last_mut(), route.last_mut(), &tracker) {
        *last = last.tracker_address().unwrap_or(last).clone();
        *text = address;
    }

    // The first server is the one that this machine talks to; the others are reached through it.
    let first = &addresses[0];
    resolve(visit, first, limit).await?;
    if *first.kind() == AddressKind::Local {
        visit.ok("connect", "this process needs no connection");
        return Ok(());
    }
    let (channel, received) = connect(visit, first, limit).await?;
    let mut session = greet(visit, channel, &received, limit).await?;
    // The key is for the last server, and counts here only if there is no other.
    if let (Some(key), 1) = (first.key(), addresses.len()) {
        close(&session).await;
        session = with_key(visit, first, key, limit).await?;
    }
    visit.ok("session", format!("{} opened one", first.clone().without_key()));
    for hops in 1..route.len() {
        close(&session).await;
        session = through(visit, &route[..=hops], limit).await?;
    }
    echo(visit, &session, limit).await?;
    if let Some(asked) = asked {
        servers(visit, &session, asked.key(), limit).await?;
    }
    close(&session).await;
    Ok(())
}

/// Looks which servers a tracker has to give.
async fn servers(visit: &mut Visit<'_>, session: &Session, key: Option<&str>, limit: Duration) -> Result<(), u8> {
    let ask = async {
        let summary = session.function::<(), Pack<Summary>>(functions::SUMMARY).await?;
        summary.call(()).await
    };
    let finding = match tokio::time::timeout(limit, ask).await {
        Ok(Ok(Pack(summary))) => match look_for(&summary, key) {
            Verdict::There(detail) => {
                visit.ok("servers", detail);
                return Ok(());
            }
            Verdict::Missing { detail, advice } => Finding::new(detail, advice, 69),
        },
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => {
            let advice = "correct the address: write tcp:// for a server, or the address of the tracker";
            Finding::new("a server answers there, and it is no tracker", advice, 76)
        }
        Ok(Err(error)) => {
            let code = Failure::Remote(error.clone()).exit_code();
            Finding::new(error.to_string(), "look at the tracker's log", code)
        }
        Err(_) => Finding::new(format!("no answer within {limit:?}"), "look at the tracker's log and load", 124),
    };
    Err(visit.failed("servers", finding))
}

fn describe(address: &Address) -> String {
    match address.kind() {
        AddressKind::Tracker { at } => {
            let of = address.key().map_or("a server".to_owned(), |key| format!("a server with the key '{key}'"));
            format!("{of} of the tracker at {at}")
        }
        AddressKind::Tcp { host, port } => format!("TCP port {port} of {host}"),
        AddressKind::Tls { host, port } => format!("TCP port {port} of {host}, encrypted by TLS"),
        AddressKind::Quic { host, port } => format!("UDP port {port} of {host}, in QUIC"),
        AddressKind::Unix { path } => format!("Unix socket {}", path.display()),
        AddressKind::Exec { argv } => format!("the program {}", argv.first().map_or("", String::as_str)),
        _ => address.to_string(),
    }
}

async fn resolve(visit: &mut Visit<'_>, address: &Address, limit: Duration) -> Result<(), u8> {
    let Some((host, port)) = address.host_and_port() else { return Ok(()) };
    let lookup = tokio::net::lookup_host((host, port));
    match tokio::time::timeout(limit, lookup).await {
        Ok(Ok(found)) => {
            let mut found: Vec<_> = found.map(|socket| socket.ip().to_string()).collect();
            found.dedup();
            visit.ok("resolve", format!("{host} is {}", found.join(", ")));
            Ok(())
        }
        Ok(Err(error)) => Err(visit.failed(
            "resolve",
            Finding::new(
                format!("no address is known for {host}: {error}"),
                "check the name's spelling, and that this machine can resolve names; or write the IP address",
                69,
            ),
        )),
        Err(_) => Err(visit.failed(
            "resolve",
            Finding::new(
                format!("no name server answered within {limit:?}"),
                "check this machine's network and name servers; or write the IP address",
                124,
            ),
        )),
    }
}

async fn connect(visit: &mut Visit<'_>, address: &Address, limit: Duration) -> Result<(Channel, Received), u8> {
    let start = Instant::now();
    match open(visit, address, limit).await {
        Ok(opened) => {
            visit.ok("connect", format!("in {:.1} ms", start.elapsed().as_secs_f64() * 1e3));
            Ok(opened)
        }
        Err(error) => Err(visit.failed("connect", transport_finding(&error))),
    }
}

/// A channel that remembers what was first received on it.
async fn open(visit: &Visit<'_>, address: &Address, limit: Duration) -> Result<(Channel, Received), TransportError> {
    let address = address.clone().without_key();
    let options = DialOptions { connect_timeout: limit, ..visit.dial.clone() };
    let received = Received::default();
    let record = |io| Recorder { io, received: received.clone() };
    let channel = dial(&address, &options).await?.map_io(record);
    Ok((channel, received))
}

fn transport_finding(error: &TransportError) -> Finding {
    let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
    let (detail, advice) = match error {
        TransportError::Refused { .. } => (
            "refused: the machine is up, and nobody listens there",
            "start the server (rpc-server serve --listen ADDRESS), or correct the port; a server that listens on \
             127.0.0.1 is not seen from other machines",
        ),
        TransportError::TimedOut { .. } => (
            "timeout: nothing answers",
            "check that the machine is up and that no firewall drops the packets; --timeout waits longer",
        ),
        TransportError::Unreachable { .. } => (
            "unreachable: no network leads there",
            "check this machine's network, or go through another one with --jump",
        ),
        TransportError::NotFound { .. } => {
            ("the socket file is missing", "start the server, or correct the path; the server makes the file")
        }
        TransportError::PermissionDenied { .. } => {
            ("this user may not use it", "run as the user of the server, or change the mode of the socket file")
        }
        TransportError::Spawn { .. } => {
            ("the program does not start", "check that it is installed, executable, and on PATH")
        }
        TransportError::Unsupported { .. } => ("this cannot be dialled", "use a tcp:// or unix: address"),
        TransportError::Insecure { hint, .. } => ("the two sides do not agree on how to encrypt", *hint),
        TransportError::Unauthenticated { problem, .. } => ("the server refused the connection", *problem),
        TransportError::Closed { .. } => ("the connection was closed at once", "look at the server's log"),
        _ => ("the system reports an error", "look at the cause"),
    };
    Finding::new(format!("{detail}{cause}"), advice, connect_code(&ConnectError::Transport(error.clone())))
}

/// Introduces ourselves without a key, and tells from the answer which of the first steps have been taken.
async fn greet(visit: &mut Visit<'_>, channel: Channel, received: &Received, limit: Duration) -> Result<Session, u8> {
    let outcome = tokio::time::timeout(limit, visit.connector.connect_channel(channel)).await;
    let first = received.bytes();
    let is_ours = first.starts_with(&MAGIC);
    let error = match outcome {
        Ok(Ok(session)) => {
            introduced(visit);
            visit.ok("version", format!("we speak {VERSION_MIN} to {VERSION_MAX}, and so does it"));
            visit.ok("identity", "accepted");
            return Ok(session);
        }
        Err(_) if is_ours => {
            introduced(visit);
            let finding = Finding::new(
                format!("it did not finish the introduction within {limit:?}"),
                "it may be overloaded, or waiting for the next server on the way: look at its log; --timeout waits longer",
                124,
            );
            return Err(visit.failed("session", finding));
        }
        Err(_) => {
            let finding = Finding::new(
                format!("it accepted the connection and said {} within {limit:?}", said(&first)),
                "something else may listen there, or the server is stopped or overloaded; --timeout waits longer",
                124,
            );
            return Err(visit.failed("protocol", finding));
        }
        Ok(Err(ConnectError::Session(error))) => error,
        Ok(Err(error)) => {
            let advice = "look at the cause";
            return Err(visit.failed("protocol", Finding::new(chain(&error), advice, connect_code(&error))));
        }
    };
    if !is_ours {
        return Err(visit.failed("protocol", stranger(&first, &error)));
    }
    introduced(visit);
    let code = connect_code(&ConnectError::Session(error.clone()));
    let detail = error.message().to_owned();
    if error.kind() == ErrorKind::VersionMismatch {
        let advice = "use an rpc-cli and an rpc-server of the same release";
        return Err(visit.failed("version", Finding::new(detail, advice, code)));
    }
    visit.ok("version", "a version that both sides speak");
    if error.kind() == ErrorKind::Unauthenticated {
        let advice = "give what the server wants: a token that it knows (--token-file), or a certificate by an authority that it \
                      trusts (--cert, --cert-key)";
        return Err(visit.failed("identity", Finding::new(detail, advice, code)));
    }
    visit.ok("identity", "accepted");
    Err(visit.failed("session", Finding::new(detail, session_advice(&error), code)))
}

fn introduced(visit: &mut Visit<'_>) {
    visit.ok("protocol", "it speaks ours");
}

/// What to say of a peer that does not begin as ours do.
fn stranger(first: &[u8], error: &RpcError) -> Finding {
    let looks_like = match first {
        [] => {
            let advice = "something else may listen there, or the server is at its limit or stopping: look at its log";
            return Finding::new(format!("it said nothing: {}", error.message()), advice, 76);
        }
        [b'H', b'T', b'T', b'P', b'/', ..] => "a web server",
        [b'S', b'S', b'H', b'-', ..] => "an SSH server",
        [0x15, 0x03, ..] => "a TLS server",
        [b'2', b'2', b'0', b' ' | b'-', ..] => "a mail or FTP server",
        [b'-', b'E', b'R', b'R', ..] => "a Redis server",
        _ => "a server of another kind",
    };
    Finding::new(
        format!("not ours: it said {}, as {looks_like} does", said(first)),
        "correct the port: something else listens there",
        76,
    )
}

fn said(first: &[u8]) -> String {
    if first.is_empty() { "nothing".to_owned() } else { format!("\"{}\"", first.escape_ascii()) }
}

fn session_advice(error: &RpcError) -> &'static str {
    match error.kind() {
        ErrorKind::LimitExceeded => {
            "the server has as many sessions as it may: try again later, or raise --max-sessions there"
        }
        ErrorKind::Draining => "the server is stopping: try again when it has been started again",
        ErrorKind::Refused => "ask the server's operator",
        ErrorKind::PeerLost | ErrorKind::PeerSilent => "look at the server's log",
        _ => "look at the server's log, and compare versions",
    }
}

/// Opens the session again, now with the key of the address.
async fn with_key(visit: &mut Visit<'_>, address: &Address, key: &str, limit: Duration) -> Result<Session, u8> {
    let attempt = async {
        let (channel, _) = open(visit, address, limit).await?;
        visit.connector.clone().key(key).connect_channel(channel).await
    };
    let advice = "ask the server which key it has (rpc-cli info, without the key), or leave the key out";
    match tokio::time::timeout(limit, attempt).await {
        Ok(Ok(session)) => {
            visit.ok("key", format!("it is '{key}'"));
            Ok(session)
        }
        Ok(Err(error)) => Err(visit.failed("key", Finding::new(chain(&error), advice, connect_code(&error)))),
        Err(_) => Err(visit.failed("key", Finding::new(format!("no answer within {limit:?}"), "try again", 124))),
    }
}

/// Opens a session with the last server of `route` through the others, the last but one of which works.
async fn through(visit: &mut Visit<'_>, route: &[&str], limit: Duration) -> Result<Session, u8> {
    let Some((target, hops)) = route.split_last() else { return Err(1) };
    let step = format!("hop {}", hops.len());
    let connector = hops.iter().fold(visit.connector.clone(), |connector: Connector, hop| connector.via(hop));
    let last = hops.last().copied().unwrap_or_default();
    match tokio::time::timeout(limit, connector.connect(target)).await {
        Ok(Ok(session)) => {
            visit.ok(&step, format!("{last} reaches {target}"));
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
                    format!("{last} cannot reach {target}: {} (at {})", error.message(), place(error)),
                    format!("run rpc-cli doctor {target} on the machine of {last}"),
                ),
                error => (chain(error), "look at the cause".to_owned()),
            };
            Err(visit.failed(&step, Finding::new(detail, advice, code)))
        }
        Err(_) => {
            let detail = format!("{last} did not reach {target} within {limit:?}");
            let advice = format!("run rpc-cli doctor {target} on the machine of {last}; --timeout waits longer");
            Err(visit.failed(&step, Finding::new(detail, advice, 124)))
        }
    }
}

/// An error with its causes, on one line.
fn chain(error: &ConnectError) -> String {
    let mut text = match error {
        ConnectError::Session(error) => return error.message().to_owned(),
        error => error.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

async fn echo(visit: &mut Visit<'_>, session: &Session, limit: Duration) -> Result<(), u8> {
    let start = Instant::now();
    let trip = async {
        let echo = session.get_function("rpc.echo").await?;
        echo.call::<i64>((1,)).await
    };
    match tokio::time::timeout(limit, trip).await {
        Ok(Ok(_)) => {
            visit.ok("echo", format!("a call came back, after {:.1} ms", start.elapsed().as_secs_f64() * 1e3));
            Ok(())
        }
        Ok(Err(error)) => {
            let code = Failure::Remote(error.clone()).exit_code();
            let advice = match error.kind() {
                ErrorKind::NotFound => "the server has no rpc.echo, and may work all the same",
                _ => "look at the server's log",
            };
            Err(visit.failed("echo", Finding::new(error.to_string(), advice, code)))
        }
        Err(_) => {
            let advice = "the session is open and calls are not answered: look at the server's log and load";
            Err(visit.failed("echo", Finding::new(format!("no answer within {limit:?}"), advice, 124)))
        }
    }
}

/// The first bytes that came from the peer.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<u8>>>);

/// No more than tells one protocol from another.
const FIRST_BYTES: usize = 64;

impl Received {
    fn add(&self, bytes: &[u8]) {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let room = FIRST_BYTES - first.len();
        first.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Recorder<T> {
    io: T,
    received: Received,
}

impl<T: AsyncRead + Unpin> AsyncRead for Recorder<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buffer))?;
        self.received.add(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Recorder<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
