//! `bench`: how fast calls and copies are, beside bare sockets that move the same bytes.
//!
//! Every case is a [`Case`](cases::Case): a probe of ours, and others to compare with, measured in turn block by block, so
//! that what disturbs the machine disturbs both. Client and server are separate processes on all sides; the servers of our
//! own are this program again ([`run_child`]).

mod bare;
mod cases;
mod child;
mod ours;
mod pin;
mod secure;
mod statistics;

use std::time::Duration;

use clap::{Args, ValueEnum};
use rpc_transports::Address;

use self::cases::{Case, Lab};
use self::pin::Pins;
use self::statistics::{Limits, Line};
use super::connect::Globals;
use super::failure::Failure;
use super::output::{Output, digits};

pub(super) use self::child::{ChildArgs, announce, exit_with_stdin, run_child};
pub(super) use self::secure::Certificates;
pub(super) use self::statistics::{quantile, rounded};

const DETAILS: &str = "\
Cases:
  call                    round trip of a small call of an inline function, async client
  call_blocking_client    the same, client on the caller's thread
  call_blocking_fn        the same, function on a thread of its own (the default kind)
  call_pipelined_64       calls with 64 of them in flight
  copy_to_*, copy_from_*  64B, 4KiB, 1MiB, 64MiB, 256MiB to and from a tensor; warm buffers; 1 GB is 10^9 bytes
  connect                 from nothing to a session; over QUIC another session on the connection that there is
  object_churn            remote objects made and dropped, 64 in flight
  *_1hop                  with --hop: through a server of our own that forwards; *_2hop with --hop=2, and so on

Output:
  median, p99             of all samples; p99 is the slow end: 99% of the samples were as good or better
  baseline                the median of bare tokio (bare std sockets for call_blocking_client over TCP and Unix sockets; bare
                          rustls over TCP, and bare quinn, for those transports) that moves 64 bytes there and back for a
                          call, as many bytes as the copy and a one-byte acknowledgement or request for a copy;
                          through a bare relay for *_1hop
                          (call_pipelined_64, object_churn: whatever has arrived is echoed in one piece; no call gets
                          as far, and the number is there to see the ceiling)
  ratio                   ours / bare, the median over pairs of neighbouring blocks. For µs LOWER is better, 1 being as
                          fast as bare sockets; for GB/s, calls/s and objects/s HIGHER is better
  direct, ratio_direct    for *_1hop: the same without the hop

Compare only numbers with equal --pin: whether a call has to wake another core decides more than all else.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Pin {
    /// Processes run where the system puts them
    None,
    /// All processes on one core
    Same,
    /// The client on one core and the servers on another; with --hop the hop on a third, if there is one
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
pub(super) struct BenchArgs {
    /// The server; without it one of our own on this machine
    address: Option<String>,
    /// Measure only these cases; * stands for anything. May be repeated, or given as a list with commas
    #[arg(long, env = "RPC_CLI_CASES", value_name = "CASE", value_delimiter = ',')]
    cases: Vec<String>,
    /// Stop a case after so many samples
    #[arg(long, env = "RPC_CLI_ITERATIONS", value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Stop a case after this time, but not before 11 blocks; warm-up comes on top
    #[arg(long, env = "RPC_CLI_SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Measure bare sockets on the same transport as well, and print the ratio
    #[arg(long, env = "RPC_CLI_BASELINE")]
    baseline: bool,
    /// Measure through servers that forward as well: one, or as many as are given
    #[arg(long, env = "RPC_CLI_HOP", value_name = "NUMBER", num_args = 0..=1, require_equals = true, default_value_t = 0)]
    #[arg(default_missing_value = "1", value_parser = clap::value_parser!(u8).range(0..=8))]
    hop: u8,
    /// Which cores client and servers run on; the servers are single-threaded if this is not none
    #[arg(long, env = "RPC_CLI_PIN", default_value = "none")]
    pin: Pin,
    /// The transport of our own server
    #[arg(long, env = "RPC_CLI_TRANSPORT", default_value = "tcp")]
    transport: Transport,
}

pub(super) fn bench(globals: &Globals, output: &Output, args: &BenchArgs) -> Result<(), Failure> {
    check(globals, args)?;
    let names = select(&args.cases, args.hop)?;
    // Before any thread is started, so that all of them are where they should be.
    let pins = Pins::choose(args.pin)?;
    pin::pin(pins.client)?;
    let lab = Lab::set_up(globals, args, &pins)?;
    let limits = limits(args);
    let mut table = Table::new(args);
    for name in &names {
        let spinner = output.spinner();
        spinner.set_message(name.clone());
        spinner.enable_steady_tick(Duration::from_millis(100));
        let case = lab.case(name, &limits);
        let line = case.and_then(|case: Case| case.measure(lab.suite(), &limits));
        spinner.finish_and_clear();
        let line = match line {
            Ok(line) => line,
            // A server of another make may lack a function that one case needs.
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

fn check(globals: &Globals, args: &BenchArgs) -> Result<(), Failure> {
    let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
    if !args.seconds.is_finite() || args.seconds < 0.0 {
        return usage("--seconds is a time");
    }
    let Some(text) = &args.address else {
        return if globals.jump().is_empty() { Ok(()) } else { usage("--jump leads nowhere without an address") };
    };
    let address: Address =
        text.parse().map_err(|error| Failure::Connect(rpc_transports::ConnectError::Address(error)))?;
    if args.pin != Pin::None {
        return usage("--pin cannot move a server that runs already; leave the address out");
    }
    let is_near = matches!(address.scheme(), "tcp" | "unix") && address.is_loopback() && globals.jump().is_empty();
    if args.baseline && !is_near {
        return usage(
            "--baseline compares with sockets of this machine: the address must be a loopback port or a Unix socket",
        );
    }
    if args.hop > 0 && !globals.jump().is_empty() {
        return usage("--hop and --jump do not go together");
    }
    Ok(())
}

/// The names of the cases that were asked for, in their order.
fn select(wanted: &[String], hops: u8) -> Result<Vec<String>, Failure> {
    let all = cases::names(hops);
    if wanted.is_empty() {
        return Ok(all);
    }
    for pattern in wanted {
        if !all.iter().any(|name| matches(pattern, name)) {
            let hint = if pattern.contains("hop") { "; it needs --hop, or --hop=2 for two of them" } else { "" };
            return Err(Failure::Usage(format!("there is no case '{pattern}'{hint}; there are {}", all.join(", "))));
        }
    }
    Ok(all.into_iter().filter(|name| wanted.iter().any(|pattern| matches(pattern, name))).collect())
}

/// Whether `name` is as `pattern` says, in which `*` stands for anything.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((prefix, rest)) => name
            .strip_prefix(prefix)
            .is_some_and(|name| (0..=name.len()).any(|at| name.is_char_boundary(at) && matches(rest, &name[at..]))),
    }
}

fn limits(args: &BenchArgs) -> Limits {
    let iterations = args.iterations.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    Limits { iterations, time: Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::MAX) }
}

/// The lines for people.
struct Table {
    table: comfy_table::Table,
    baseline: bool,
    direct: bool,
}

impl Table {
    fn new(args: &BenchArgs) -> Self {
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

    fn add(&mut self, line: &Line) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_choose_cases() {
        assert!(matches("copy_*_64MiB", "copy_to_64MiB") && !matches("copy_*_64MiB", "copy_to_64MiB_1hop"));
        assert!(matches("*", "call") && matches("call*", "call") && !matches("call", "call_1hop"));
        assert_eq!(select(&["call".to_owned()], 0).unwrap(), ["call"]);
        assert!(select(&["call_1hop".to_owned()], 0).is_err());
        assert_eq!(select(&["copy_to_64MiB_2hop".to_owned()], 2).unwrap(), ["copy_to_64MiB_2hop"]);
    }
}
