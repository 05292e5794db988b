//! Cases: the probe of a session, and the bare probes that it is compared with.

use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::Session;
use rpc_server::ServerProcess;
use rpc_server::cli::{CommonOptions, Failure};
use rpc_transports::{Address, Connector};
use tokio::runtime::Runtime;

use super::bare_sockets::{Client, Connector as BareConnector, StdClient, Task};
use super::child_server::{ChildServers, Role};
use super::core_affinity::CoreAssignment;
use super::probe::{Probe, rate, timed};
use super::{SessionBenchArgs, Transport, session_probes};
use crate::statistics::{CaseResult, Limits, Samples, Unit, rounded};

/// Blocks that are measured regardless of the time limit: loopback TCP has two speeds, and a median
/// needs a few samples.
const MIN_BLOCKS: usize = 11;

/// Sizes of copies.
const SIZES: [(&str, usize); 5] =
    [("64B", 64), ("4KiB", 4 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20), ("256MiB", 256 << 20)];

/// Size of copies through a hop.
const HOP_SIZE: (&str, usize) = SIZES[3];

/// Returns the names of all cases, in the order in which they are measured.
pub(super) fn names(hops: u8) -> Vec<String> {
    let mut names: Vec<String> =
        ["call", "call_blocking_client", "call_blocking_fn", "call_pipelined_64"].map(str::to_owned).into();
    for direction in ["copy_to", "copy_from"] {
        names.extend(SIZES.map(|(size, _)| format!("{direction}_{size}")));
    }
    names.extend(["connect", "object_churn"].map(str::to_owned));
    if hops > 0 {
        names.extend(["call", "copy_to", "copy_from"].map(|kind| match kind {
            "call" => format!("call_{hops}hop"),
            copy => format!("{copy}_{}_{hops}hop", HOP_SIZE.0),
        }));
    }
    names
}

/// Probes of one measurement.
pub(super) struct Case {
    name: String,
    unit: Unit,
    /// Number of samples that a probe takes before the next probe has its turn.
    block: usize,
    ours: Probe,
    bare: Option<Probe>,
    direct: Option<Probe>,
}

impl Case {
    /// Measures all probes in turn, after a warm-up block of each that does not count.
    pub(super) fn measure(self, suite: &str, limits: &Limits) -> Result<CaseResult, Failure> {
        let Self { name, unit, block, ours, bare, direct } = self;
        let block = block.min(limits.iterations).max(1);
        let mut sides: Vec<(Probe, Samples)> = Vec::new();
        let mut add = |probe: Option<Probe>| {
            probe.map(|probe| {
                sides.push((probe, Samples::default()));
                sides.len() - 1
            })
        };
        add(Some(ours));
        let (bare, direct) = (add(bare), add(direct));
        for (probe, _) in &mut sides {
            probe(block)?;
        }
        let start = Instant::now();
        let mut blocks = 0;
        while sides[0].1.len() < limits.iterations && (blocks < MIN_BLOCKS || start.elapsed() < limits.time) {
            for (probe, samples) in &mut sides {
                samples.add_block(&probe(block)?);
            }
            blocks += 1;
        }
        let ours = &sides[0].1;
        let mut line = CaseResult::new(suite, &name, unit, ours);
        if let Some(bare) = bare {
            line.baseline = Some(rounded(sides[bare].1.median()));
            line.ratio = Some(rounded(ours.ratio_to(&sides[bare].1)));
        }
        if let Some(direct) = direct {
            line.direct = Some(rounded(sides[direct].1.median()));
            line.ratio_direct = Some(rounded(ours.ratio_to(&sides[direct].1)));
        }
        Ok(line)
    }
}

/// Servers, and sessions with them, that the cases use.
pub(super) struct Testbed {
    // Dropped in this order: sessions, servers, their folder.
    session: Session,
    hop_session: Option<Session>,
    runtime: Rc<Runtime>,
    connector: Connector,
    address: String,
    suite: String,
    /// Source of all copies, of the largest size.
    data: Bytes,
    bare: Option<Bare>,
    _ours: Option<ServerProcess>,
    _hops: Vec<ServerProcess>,
    _children: ChildServers,
}

/// Bare servers.
struct Bare {
    tokio: ServerProcess,
    /// `None` for transports without blocking sockets.
    std: Option<ServerProcess>,
    /// Relay that clients dial.
    relay: Option<ServerProcess>,
    _relays: Vec<ServerProcess>,
    connector: BareConnector,
}

/// Starts `count` servers. Each forwards to the one that was started before it, the first to `to`.
fn chain(
    count: u8,
    to: &str,
    start: impl Fn(&str) -> Result<ServerProcess, Failure>,
) -> Result<Vec<ServerProcess>, Failure> {
    let mut chain: Vec<ServerProcess> = Vec::new();
    for _ in 0..count {
        let next = start(chain.last().map_or(to, ServerProcess::address))?;
        chain.push(next);
    }
    Ok(chain)
}

impl Testbed {
    pub(super) fn set_up(
        options: &CommonOptions,
        args: &SessionBenchArgs,
        cores: &CoreAssignment,
    ) -> Result<Self, Failure> {
        let scheme = match (&args.address, args.transport) {
            (Some(address), _) => match parse(address)?.scheme() {
                "tcp" => "tcp",
                "unix" => "unix",
                "tls" => "tls",
                "quic" => "quic",
                _ => "other",
            },
            (None, Transport::Tcp) => "tcp",
            (None, Transport::Unix) => "unix",
            (None, Transport::Tls) => "tls",
            (None, Transport::Quic) => "quic",
        };
        let children = ChildServers::new(scheme, args.spin)?;
        let server = match &args.address {
            Some(_) => None,
            None => Some(children.start(Role::Server, None, cores.server)?),
        };
        let address = match (&args.address, &server) {
            (Some(address), _) => address.clone(),
            (None, server) => server.as_ref().map_or_else(String::new, |server| server.address().to_owned()),
        };
        let runtime = Rc::new(rpc_server::cli::runtime()?);
        let spin = if args.spin { rpc_transports::SPIN } else { Duration::ZERO };
        let mut connector = options.connector()?.spin(spin);
        if let (None, Some(certificates)) = (&args.address, children.certificates()) {
            connector = connector.tls(certificates.client_tls()?);
        }
        let session = runtime.block_on(connector.connect(&address)).map_err(Failure::Connect)?;
        let hops = chain(args.hop, &parse(&address)?.without_key().to_string(), |next| {
            children.start(Role::Server, Some(next), cores.hop)
        })?;
        // The server that was started last is the first hop.
        let via = hops.iter().rev().fold(connector.clone(), |connector, hop| connector.via(hop.address()));
        let hop_session = match args.hop {
            0 => None,
            _ => Some(runtime.block_on(via.connect(&address)).map_err(Failure::Connect)?),
        };
        let bare = if args.baseline {
            let tokio = children.start(Role::Tokio, None, cores.server)?;
            // TLS and QUIC have no blocking sockets.
            let std = match children.certificates() {
                Some(_) => None,
                None => Some(children.start(Role::Std, None, cores.server)?),
            };
            let mut relays =
                chain(args.hop, tokio.address(), |next| children.start(Role::Relay, Some(next), cores.hop))?;
            let relay = relays.pop();
            let connector = runtime.block_on(async { BareConnector::new(scheme, children.certificates()) })?;
            Some(Bare { tokio, std, relay, _relays: relays, connector })
        } else {
            None
        };
        let largest = SIZES.iter().map(|(_, len)| *len).max().unwrap_or(0);
        // Written to: all pages that were never written are one page, and reading them would cost
        // too little.
        let data = Bytes::from(vec![0x5a; largest]);
        Ok(Self {
            session,
            hop_session,
            runtime,
            connector,
            address,
            suite: format!("rpc-{scheme}"),
            data,
            bare,
            _ours: server,
            _hops: hops,
            _children: children,
        })
    }

    pub(super) fn suite(&self) -> &str {
        &self.suite
    }

    /// Prepares the case `name`.
    pub(super) fn case(&self, name: &str, limits: &Limits) -> Result<Case, Failure> {
        let (runtime, session) = (&self.runtime, &self.session);
        // Long enough to hide the start and the end of a batch; short if few samples are taken.
        let batch = if limits.iterations < BATCH { 2 * session_probes::WINDOW } else { BATCH };
        let case = |unit, block, ours, bare| Case { name: name.to_owned(), unit, block, ours, bare, direct: None };
        Ok(match name {
            "call" => {
                case(Unit::Micros, CALLS, session_probes::calls(runtime, session, "rpc.echo")?, self.bare_calls()?)
            }
            "call_blocking_client" => {
                let ours = session_probes::blocking_calls(&self.connector, &self.address)?;
                case(Unit::Micros, CALLS, ours, self.bare_std_calls()?)
            }
            "call_blocking_fn" => {
                case(Unit::Micros, CALLS, session_probes::calls(runtime, session, "rpc.noop")?, self.bare_calls()?)
            }
            "call_pipelined_64" => case(
                Unit::CallsPerSecond,
                1,
                session_probes::pipelined(runtime, session, batch)?,
                self.bare_pipeline(batch)?,
            ),
            "connect" => {
                let ours = session_probes::connects(runtime, &self.connector, &self.address);
                case(Unit::Micros, CONNECTS, ours, self.bare_connects()?)
            }
            "object_churn" => case(
                Unit::ObjectsPerSecond,
                1,
                session_probes::object_churn(runtime, session, batch)?,
                self.bare_pipeline(batch)?,
            ),
            call if call.starts_with("call_") => Case {
                direct: Some(session_probes::calls(runtime, session, "rpc.echo")?),
                ..case(
                    Unit::Micros,
                    CALLS,
                    session_probes::calls(runtime, self.through_hop()?, "rpc.echo")?,
                    self.bare_relayed_calls()?,
                )
            },
            copy => self.copy_case(copy)?,
        })
    }

    fn copy_case(&self, name: &str) -> Result<Case, Failure> {
        let (kind, hop) = match name.strip_suffix("hop").and_then(|name| name.rsplit_once('_')) {
            Some((kind, _)) => (kind, true),
            None => (name, false),
        };
        let unknown = || Failure::Usage(format!("there is no case '{name}'"));
        let (direction, size) = kind.rsplit_once('_').ok_or_else(unknown)?;
        let (_, len) = *SIZES.iter().find(|(known, _)| *known == size).ok_or_else(unknown)?;
        let to = direction == "copy_to";
        let copies = |session: &Session| {
            if to {
                session_probes::copies_to(&self.runtime, session, self.data.slice(..len))
            } else {
                session_probes::copies_from(&self.runtime, session, len)
            }
        };
        let task = if to { Task::Write(len) } else { Task::Read(len) };
        let (session, server) = match (hop, &self.bare) {
            (true, bare) => (self.through_hop()?, bare.as_ref().and_then(|bare| bare.relay.as_ref())),
            (false, bare) => (&self.session, bare.as_ref().map(|bare| &bare.tokio)),
        };
        Ok(Case {
            name: name.to_owned(),
            unit: Unit::GigabytesPerSecond,
            // As many copies as take about a millisecond, at least one.
            block: ((1 << 20) / len).clamp(1, 100),
            ours: copies(session)?,
            bare: match (&self.bare, server) {
                (Some(bare), Some(server)) => Some(self.bare_copies(bare, server, task)?),
                _ => None,
            },
            direct: hop.then(|| copies(&self.session)).transpose()?,
        })
    }

    fn through_hop(&self) -> Result<&Session, Failure> {
        self.hop_session.as_ref().ok_or_else(|| Failure::Usage("this needs --hop".to_owned()))
    }

    fn bare_calls(&self) -> Result<Option<Probe>, Failure> {
        self.bare.as_ref().map(|bare| self.echo_probe(bare, &bare.tokio)).transpose()
    }

    fn bare_relayed_calls(&self) -> Result<Option<Probe>, Failure> {
        let relay = self.bare.as_ref().and_then(|bare| bare.relay.as_ref().map(|relay| (bare, relay)));
        relay.map(|(bare, relay)| self.echo_probe(bare, relay)).transpose()
    }

    fn echo_probe(&self, bare: &Bare, server: &ServerProcess) -> Result<Probe, Failure> {
        let runtime = self.runtime.clone();
        let mut client = runtime.block_on(Client::connect(&bare.connector, &parse(server.address())?, Task::Echo))?;
        Ok(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    client.call().await?;
                    samples.push(timed(start));
                }
                Ok(samples)
            })
        }))
    }

    fn bare_std_calls(&self) -> Result<Option<Probe>, Failure> {
        let Some(bare) = &self.bare else { return Ok(None) };
        let Some(std) = &bare.std else { return self.bare_calls() };
        let mut client = StdClient::connect(&parse(std.address())?)?;
        Ok(Some(Box::new(move |count| {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                client.call()?;
                samples.push(timed(start));
            }
            Ok(samples)
        })))
    }

    fn bare_pipeline(&self, batch: usize) -> Result<Option<Probe>, Failure> {
        let Some(bare) = &self.bare else { return Ok(None) };
        let runtime = self.runtime.clone();
        let address = parse(bare.tokio.address())?;
        let mut client = runtime.block_on(Client::connect(&bare.connector, &address, Task::Echo))?;
        Ok(Some(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    client.pipeline(batch, session_probes::WINDOW).await?;
                    samples.push(rate(batch, start));
                }
                Ok(samples)
            })
        })))
    }

    /// Returns a probe of a new connection, or over QUIC a new stream, with one round trip.
    fn bare_connects(&self) -> Result<Option<Probe>, Failure> {
        let Some(bare) = &self.bare else { return Ok(None) };
        let (runtime, address) = (self.runtime.clone(), parse(bare.tokio.address())?);
        let connector = bare.connector.clone();
        let first = runtime.block_on(Client::connect(&connector, &address, Task::Echo))?;
        Ok(Some(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    let mut client = first.another(&connector, &address).await?;
                    client.call().await?;
                    samples.push(timed(start));
                }
                Ok(samples)
            })
        })))
    }

    fn bare_copies(&self, bare: &Bare, server: &ServerProcess, task: Task) -> Result<Probe, Failure> {
        let runtime = self.runtime.clone();
        let mut client = runtime.block_on(Client::connect(&bare.connector, &parse(server.address())?, task))?;
        let data = self.data.clone();
        Ok(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    let len = match task {
                        Task::Write(len) => client.write(&data[..len]).await.map(|()| len)?,
                        Task::Read(len) => client.read().await.map(|()| len)?,
                        Task::Echo => 0,
                    };
                    samples.push(rate(len, start) / 1e9);
                }
                Ok(samples)
            })
        }))
    }
}

/// Calls in a block: they take a few milliseconds.
const CALLS: usize = 200;

/// Connections in a block.
const CONNECTS: usize = 10;

/// Pipelined calls, or objects, in a sample.
const BATCH: usize = 4096;

fn parse(address: &str) -> Result<Address, Failure> {
    address.parse().map_err(|error| Failure::Connect(rpc_transports::ConnectError::Address(error)))
}
