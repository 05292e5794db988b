//! The cases: what is measured, with what, against what.

use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;
use rpc_core::Session;
use rpc_transports::{Address, Connector};
use tokio::runtime::Runtime;

use super::bare::{Client, Dialler, StdClient, Wish};
use super::child::{Nursery, Part};
use super::pin::Pins;
use super::statistics::{Limits, Line, Samples, Unit, rounded};
use super::{BenchArgs, Transport, ours};
use crate::cli::connect::Globals;
use crate::cli::failure::Failure;
use crate::spawn::ServerProcess;

/// Takes as many samples as it is told.
pub(super) type Probe = Box<dyn FnMut(usize) -> Result<Vec<f64>, Failure>>;

/// µs since `start`.
pub(super) fn timed(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// `count` per second since `start`.
pub(super) fn rate(count: usize, start: Instant) -> f64 {
    count as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

/// Pairs that are measured whatever the time limit says: loopback TCP has two speeds, and a median needs a few.
const MIN_BLOCKS: usize = 11;

/// The sizes of copies.
const SIZES: [(&str, usize); 5] =
    [("64B", 64), ("4KiB", 4 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20), ("256MiB", 256 << 20)];

/// The size of copies through a hop.
const HOP_SIZE: (&str, usize) = SIZES[3];

/// The names of all cases, in the order in which they are measured.
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

/// One thing to measure.
pub(super) struct Case {
    name: String,
    unit: Unit,
    /// Samples that are taken in one go before it is the next one's turn.
    block: usize,
    ours: Probe,
    bare: Option<Probe>,
    direct: Option<Probe>,
}

impl Case {
    /// Measures all sides in turn, after one block each that does not count.
    pub(super) fn measure(self, suite: &str, limits: &Limits) -> Result<Line, Failure> {
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
        let mut line = Line::new(suite, &name, unit, ours);
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

/// All that cases need: servers, and sessions with them.
pub(super) struct Lab {
    // Sessions before the servers, and those before their folder.
    session: Session,
    hop_session: Option<Session>,
    runtime: Rc<Runtime>,
    connector: Connector,
    address: String,
    suite: String,
    /// What is written, of the largest size, shared by all sides.
    data: Bytes,
    bare: Option<Bare>,
    _ours: Option<ServerProcess>,
    _hops: Vec<ServerProcess>,
    _nursery: Nursery,
}

/// The bare servers.
struct Bare {
    tokio: ServerProcess,
    /// None for transports without sockets that a thread can block on.
    std: Option<ServerProcess>,
    /// The one that is dialled.
    relay: Option<ServerProcess>,
    _relays: Vec<ServerProcess>,
    dialler: Dialler,
}

/// Starts so many, each to pass on to the one before it, and the first to `to`.
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

impl Lab {
    pub(super) fn set_up(globals: &Globals, args: &BenchArgs, pins: &Pins) -> Result<Self, Failure> {
        let scheme = match (&args.address, args.transport) {
            (Some(address), _) => parse(address)?.scheme(),
            (None, Transport::Tcp) => "tcp",
            (None, Transport::Unix) => "unix",
            (None, Transport::Tls) => "tls",
            (None, Transport::Quic) => "quic",
        };
        let nursery = Nursery::new(scheme)?;
        let server = match &args.address {
            Some(_) => None,
            None => Some(nursery.start(Part::Server, None, pins.server)?),
        };
        let address = match (&args.address, &server) {
            (Some(address), _) => address.clone(),
            (None, server) => server.as_ref().map_or_else(String::new, |server| server.address().to_owned()),
        };
        let runtime = Rc::new(crate::cli::runtime()?);
        let mut connector = globals.connector()?;
        if let (None, Some(certificates)) = (&args.address, nursery.certificates()) {
            connector = connector.tls(certificates.trust()?);
        }
        let session = runtime.block_on(connector.connect(&address)).map_err(Failure::Connect)?;
        let hops = chain(args.hop, &parse(&address)?.without_key().to_string(), |next| {
            nursery.start(Part::Server, Some(next), pins.hop)
        })?;
        // The last that was started is the first on the way.
        let via = hops.iter().rev().fold(connector.clone(), |connector, hop| connector.via(hop.address()));
        let hop_session = match args.hop {
            0 => None,
            _ => Some(runtime.block_on(via.connect(&address)).map_err(Failure::Connect)?),
        };
        let bare = if args.baseline {
            let tokio = nursery.start(Part::Tokio, None, pins.server)?;
            // There are no sockets to block on.
            let std = match nursery.certificates() {
                Some(_) => None,
                None => Some(nursery.start(Part::Std, None, pins.server)?),
            };
            let mut relays = chain(args.hop, tokio.address(), |next| nursery.start(Part::Relay, Some(next), pins.hop))?;
            let relay = relays.pop();
            let dialler = runtime.block_on(async { Dialler::new(scheme, nursery.certificates()) })?;
            Some(Bare { tokio, std, relay, _relays: relays, dialler })
        } else {
            None
        };
        let largest = SIZES.iter().map(|(_, len)| *len).max().unwrap_or(0);
        // Pages that nobody has written to all are one and the same page: written, so that reading them costs what it should.
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
            _nursery: nursery,
        })
    }

    pub(super) fn suite(&self) -> &str {
        &self.suite
    }

    /// Prepares the case `name`.
    pub(super) fn case(&self, name: &str, limits: &Limits) -> Result<Case, Failure> {
        let (runtime, session) = (&self.runtime, &self.session);
        // Long enough that starting and ending do not show; short if few samples are wanted.
        let batch = if limits.iterations < BATCH { 2 * ours::WINDOW } else { BATCH };
        let case = |unit, block, ours, bare| Case { name: name.to_owned(), unit, block, ours, bare, direct: None };
        Ok(match name {
            "call" => case(Unit::Micros, CALLS, ours::calls(runtime, session, "rpc.echo")?, self.bare_calls()?),
            "call_blocking_client" => {
                let ours = ours::blocking_calls(&self.connector, &self.address)?;
                case(Unit::Micros, CALLS, ours, self.bare_std_calls()?)
            }
            "call_blocking_fn" => {
                case(Unit::Micros, CALLS, ours::calls(runtime, session, "rpc.noop")?, self.bare_calls()?)
            }
            "call_pipelined_64" => {
                case(Unit::CallsPerSecond, 1, ours::pipelined(runtime, session, batch)?, self.bare_pipeline(batch)?)
            }
            "connect" => {
                let ours = ours::connects(runtime, &self.connector, &self.address);
                case(Unit::Micros, CONNECTS, ours, self.bare_connects()?)
            }
            "object_churn" => case(
                Unit::ObjectsPerSecond,
                1,
                ours::object_churn(runtime, session, batch)?,
                self.bare_pipeline(batch)?,
            ),
            call if call.starts_with("call_") => Case {
                direct: Some(ours::calls(runtime, session, "rpc.echo")?),
                ..case(
                    Unit::Micros,
                    CALLS,
                    ours::calls(runtime, self.through_hop()?, "rpc.echo")?,
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
                ours::copies_to(&self.runtime, session, self.data.slice(..len))
            } else {
                ours::copies_from(&self.runtime, session, len)
            }
        };
        let wish = if to { Wish::Write(len) } else { Wish::Read(len) };
        let (session, server) = match (hop, &self.bare) {
            (true, bare) => (self.through_hop()?, bare.as_ref().and_then(|bare| bare.relay.as_ref())),
            (false, bare) => (&self.session, bare.as_ref().map(|bare| &bare.tokio)),
        };
        Ok(Case {
            name: name.to_owned(),
            unit: Unit::GigabytesPerSecond,
            // As many as take about a millisecond, and always one.
            block: ((1 << 20) / len).clamp(1, 100),
            ours: copies(session)?,
            bare: match (&self.bare, server) {
                (Some(bare), Some(server)) => Some(self.bare_copies(bare, server, wish)?),
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
        let mut client = runtime.block_on(Client::connect(&bare.dialler, &parse(server.address())?, Wish::Echo))?;
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
        let mut client = runtime.block_on(Client::connect(&bare.dialler, &address, Wish::Echo))?;
        Ok(Some(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    client.pipeline(batch, ours::WINDOW).await?;
                    samples.push(rate(batch, start));
                }
                Ok(samples)
            })
        })))
    }

    /// A connection, or where there is one already a stream of it, and one round trip on it.
    fn bare_connects(&self) -> Result<Option<Probe>, Failure> {
        let Some(bare) = &self.bare else { return Ok(None) };
        let (runtime, address) = (self.runtime.clone(), parse(bare.tokio.address())?);
        let dialler = bare.dialler.clone();
        let first = runtime.block_on(Client::connect(&dialler, &address, Wish::Echo))?;
        Ok(Some(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    let mut client = first.another(&dialler, &address).await?;
                    client.call().await?;
                    samples.push(timed(start));
                }
                Ok(samples)
            })
        })))
    }

    fn bare_copies(&self, bare: &Bare, server: &ServerProcess, wish: Wish) -> Result<Probe, Failure> {
        let runtime = self.runtime.clone();
        let mut client = runtime.block_on(Client::connect(&bare.dialler, &parse(server.address())?, wish))?;
        let data = self.data.clone();
        Ok(Box::new(move |count| {
            runtime.block_on(async {
                let mut samples = Vec::with_capacity(count);
                for _ in 0..count {
                    let start = Instant::now();
                    let len = match wish {
                        Wish::Write(len) => client.write(&data[..len]).await.map(|()| len)?,
                        Wish::Read(len) => client.read().await.map(|()| len)?,
                        Wish::Echo => 0,
                    };
                    samples.push(rate(len, start) / 1e9);
                }
                Ok(samples)
            })
        }))
    }
}

/// Calls in a block: a few milliseconds.
const CALLS: usize = 200;

/// Connections in a block.
const CONNECTS: usize = 10;

/// Pipelined calls, or objects, in a sample.
const BATCH: usize = 4096;

fn parse(address: &str) -> Result<Address, Failure> {
    address.parse().map_err(|error| Failure::Connect(rpc_transports::ConnectError::Address(error)))
}
