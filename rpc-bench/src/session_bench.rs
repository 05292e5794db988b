//! `rpc-bench rpc`: calls and copies of a session, beside bare sockets that move the same bytes.
//!
//! A [`Case`] has a probe of ours and probes to compare with, which are measured in
//! turn, block by block, so that a disturbance of the machine affects all of them. Clients and
//! servers are separate processes; the servers that a bench starts are this program again
//! ([`run_child`]).

mod bare_sockets;
mod bare_tls;
mod cases;
mod child_server;
mod core_affinity;
mod probe;
mod session_probes;

use std::time::Duration;

use clap::{Args, ValueEnum};
use rpc_server::cli::{CommonOptions, Failure, Output, digits};
use rpc_transports::{Address, Transports};

use self::cases::{Case, Testbed};
use self::core_affinity::CoreAssignment;
use crate::case_filter;
use crate::statistics::{CaseResult, Limits};

pub(crate) use self::child_server::{ChildArgs, run_child};

const DETAILS: &str = "\
Cases:
  call                    round trip of a small call of an inline function, async client
  call_blocking_client    the same, client on the caller's thread
  call_blocking_fn        the same, function on a thread of its own (the default kind)
  call_pipelined_64       calls with 64 of them in flight
  copy_to_*, copy_from_*  64B, 4KiB, 1MiB, 64MiB, 256MiB to and from a tensor; warm buffers; 1 GB is 10^9 bytes
  connect                 from nothing to a session; over QUIC another session on the existing connection
  object_churn            remote objects created and dropped, 64 in flight
  *_1hop                  with --hop: through a forwarding server that the bench starts; *_2hop with --hop=2, and so on

Output:
  median, p99             of all samples; p99 is the slow end: 99% of the samples were as good or better
  baseline                the median of bare tokio (bare std sockets for call_blocking_client over TCP and Unix
                          sockets; bare rustls over TCP, and bare quinn, for those transports) that moves 64 bytes
                          there and back for a call, as many bytes as the copy and a one-byte acknowledgement or
                          request for a copy; through a bare relay for *_1hop
                          (call_pipelined_64, object_churn: whatever has arrived is echoed in one piece; no call can
                          reach that; the number shows the ceiling)
  ratio                   ours / bare, the median over pairs of neighbouring blocks. For µs LOWER is better, 1 being as
                          fast as bare sockets; for GB/s, calls/s and objects/s HIGHER is better
  direct, ratio_direct    for *_1hop: the same without the hop

Compare only numbers with equal --pin: waking another core costs more than everything else in a call.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Pin {
    /// The system chooses the cores
    None,
    /// All processes on one core
    Same,
    /// The client on one core and the servers on another; with --hop the hop on a third, if there
    /// is one
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Tcp,
    Unix,
    Tls,
    Quic,
}

#[derive(Args, Debug)]
#[command(after_long_help = DETAILS)]
pub(crate) struct SessionBenchArgs {
    /// Address of the server; without it a server is started on this machine
    address: Option<String>,
    /// Measure only these cases; * stands for any text. May be repeated, or given as a list with
    /// commas
    #[arg(long, env = "RPC_BENCH_CASES", value_name = "CASE", value_delimiter = ',')]
    cases: Vec<String>,
    /// Maximum number of samples of a case
    #[arg(long, env = "RPC_BENCH_ITERATIONS", value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Time limit of a case in seconds; at least 11 blocks are measured, and warm-up is not counted
    #[arg(long, env = "RPC_BENCH_SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Measure bare sockets on the same transport as well, and print the ratio
    #[arg(long, env = "RPC_BENCH_BASELINE")]
    baseline: bool,
    /// Measure through this many forwarding servers as well; 1 without a number
    #[arg(long, env = "RPC_BENCH_HOP", value_name = "NUMBER", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = 0, default_missing_value = "1", value_parser = clap::value_parser!(u8).range(0..=8))]
    hop: u8,
    /// Cores on which client and servers run; the servers are single-threaded unless this is none
    #[arg(long, env = "RPC_BENCH_PIN", default_value = "none")]
    pin: Pin,
    /// Have the client, and the servers that are started, look for input before they sleep
    #[arg(long, env = "RPC_BENCH_SPIN")]
    spin: bool,
    /// Transport of the server that is started
    #[arg(long, env = "RPC_BENCH_TRANSPORT", default_value = "tcp")]
    transport: Transport,
}

pub(crate) fn run(options: &CommonOptions, output: &Output, args: &SessionBenchArgs) -> Result<(), Failure> {
    check(options, args)?;
    let all = cases::names(args.hop);
    let hint = |pattern: &str| if pattern.contains("hop") { "; it needs --hop, or --hop=2 for two hops" } else { "" };
    let names = case_filter::select(&args.cases, all.iter().map(String::as_str), hint)?;
    // Threads inherit the core of the thread that starts them, so the main thread is pinned first.
    let cores = CoreAssignment::choose(args.pin)?;
    core_affinity::pin_thread(cores.client)?;
    let testbed = Testbed::set_up(options, args, &cores)?;
    let limits = limits(args);
    let mut table = Table::new(args);
    for name in names {
        let spinner = output.spinner();
        spinner.set_message(name.to_owned());
        spinner.enable_steady_tick(Duration::from_millis(100));
        let case = testbed.case(name, &limits);
        let line = case.and_then(|case: Case| case.measure(testbed.suite(), &limits));
        spinner.finish_and_clear();
        let line = match line {
            Ok(line) => line,
            // A server that is another program may lack a function that a case needs.
            Err(Failure::Remote(error)) if error.kind() == rpc_core::ErrorKind::NotFound => {
                output.warn(&format!("{name} cannot be measured: {error}"));
                continue;
            }
            Err(failure) => return Err(failure),
        };
        if output.is_json() { output.json(&line)? } else { table.add(&line) }
    }
    if output.is_json() { Ok(()) } else { output.line(&table.text()) }
}

fn check(options: &CommonOptions, args: &SessionBenchArgs) -> Result<(), Failure> {
    let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
    if !args.seconds.is_finite() || args.seconds < 0.0 {
        return usage("--seconds must be a time that is not negative");
    }
    let Some(text) = &args.address else {
        return if options.jump().is_empty() { Ok(()) } else { usage("--jump needs the address of a server") };
    };
    let address: Address =
        text.parse().map_err(|error| Failure::Connect(rpc_transports::ConnectError::Address(error)))?;
    if args.pin != Pin::None {
        return usage("--pin cannot move a server that is running already; leave out the address");
    }
    let is_near = matches!(address.scheme(), "tcp" | "unix")
        && Transports::default().check(&address).is_ok_and(|properties| properties.is_local())
        && options.jump().is_empty();
    if args.baseline && !is_near {
        return usage(
            "--baseline compares with sockets of this machine: the address must be a loopback port or a Unix socket",
        );
    }
    if args.hop > 0 && !options.jump().is_empty() {
        return usage("--hop and --jump cannot be combined");
    }
    Ok(())
}

fn limits(args: &SessionBenchArgs) -> Limits {
    let iterations = args.iterations.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    Limits { iterations, time: Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::MAX) }
}

/// Table of results for people.
struct Table {
    table: comfy_table::Table,
    baseline: bool,
    direct: bool,
}

impl Table {
    fn new(args: &SessionBenchArgs) -> Self {
        let mut header = vec!["case", "median", "p99", "unit", "n"];
        if args.baseline {
            header.extend(["bare", "ours/bare"]);
        }
        if args.hop > 0 {
            header.extend(["direct", "ours/direct"]);
        }
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header.clone());
        for column in (1..header.len()).filter(|column| *column != 3) {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(comfy_table::CellAlignment::Right);
            }
        }
        Self { table, baseline: args.baseline, direct: args.hop > 0 }
    }

    fn add(&mut self, line: &CaseResult) {
        let mut row =
            vec![line.case.clone(), digits(line.median), digits(line.p99), line.unit.to_owned(), line.n.to_string()];
        let optional = |value: Option<f64>| value.map_or_else(String::new, digits);
        if self.baseline {
            row.extend([optional(line.baseline), optional(line.ratio)]);
        }
        if self.direct {
            row.extend([optional(line.direct), optional(line.ratio_direct)]);
        }
        self.table.add_row(row);
    }

    fn text(&self) -> String {
        format!("{}\nours/bare: for µs lower is better, for the others higher", self.table)
    }
}
