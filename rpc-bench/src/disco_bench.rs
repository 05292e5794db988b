//! `rpc-bench disco`: commands of a controller to its workers, and collectives among the workers.
//!
//! Sessions of each kind of launch and each number of workers are measured one after the other.
//! Worker processes and nodes are this program again ([`serve_if_worker`], [`run_node`]).

mod cases;
mod functions;
mod launch;

use std::num::NonZeroU32;
use std::time::Duration;

use clap::Args;

use rpc_server::cli::{Failure, Output, digits, size};
use rpc_server::config::ByteSize;

use self::cases::{CaseResult, Subject};
use self::launch::{Launch, Testbed};
use crate::case_filter;
use crate::statistics::Limits;

pub(crate) use self::functions::{EMPTY, registry, serve_if_worker};
pub(crate) use self::launch::{NodeArgs, run_node};

const DETAILS: &str = "\
Cases:
  start                   start of a session, until its workers are ready for collectives
  issue                   calls of an empty function, each with the release of its result; the controller does not wait
  complete                the same, until all workers have executed them
  round_trip              one call of an empty function, until all workers have executed it
  copy_to_0, copy_from_0  a tensor of the largest of the sizes to and from worker 0
  copy_to_last, copy_from_last  the same to and from the last worker; copies to it are forwarded by worker 0
  allreduce, reduce_scatter, allgather, broadcast, scatter, gather, all_to_all, send_recv, barrier
                          collectives of float32, with sums as reductions; called in a loop by a function on the
                          workers, each loop between two barriers. send_recv sends from each even worker to the next

Output:
  median, p99             of all samples; p99 is the slow end: 99% of the samples were as good or better
  algorithm               bandwidth of collectives: bytes divided by the time, in GB/s (10^9 bytes). The bytes are
                          those of the larger side: the input of reduce_scatter, scatter and all_to_all, the output of
                          allgather and gather
  bus                     the same times the factor of nccl-tests, to be compared with the bandwidth of the hardware:
                          2(n-1)/n for allreduce, (n-1)/n for reduce_scatter, allgather, scatter, gather and all_to_all,
                          1 for the others

Kinds of launch:
  threads                 threads of this process
  processes               child processes, which share memory for collectives
  tcp, quic               servers on this machine, with workers as threads. They are treated as if they were on several
                          machines: tensors go over TCP connections, which are encrypted with quic
  chain                   as tcp, behind a server that forwards
  tracker                 as tcp, handed out by a tracker
  tree                    as tcp; each server opens the next one and forwards commands to it
  relay                   as tcp, but the workers cannot reach each other: the controller relays their tensors";

#[derive(Args, Debug)]
#[command(after_long_help = DETAILS)]
pub(crate) struct DiscoBenchArgs {
    /// Numbers of workers; each number is measured in a session of its own
    #[arg(long, env = "RPC_BENCH_WORKERS", value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8")]
    workers: Vec<NonZeroU32>,
    /// Kinds of launch: threads, processes, tcp, quic, chain, tracker, tree, relay
    #[arg(long, env = "RPC_BENCH_OVER", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "threads,processes,tcp")]
    over: Vec<Launch>,
    /// Number of servers over which the workers are spread in equal parts (not for threads and
    /// processes)
    #[arg(long, env = "RPC_BENCH_NODES", value_name = "NUMBER", default_value = "2")]
    nodes: NonZeroU32,
    /// Sizes of collectives; copies use the largest
    #[arg(long, env = "RPC_BENCH_SIZES", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    sizes: Vec<ByteSize>,
    /// Measure only these cases; * stands for any text. May be repeated, or given as a list with
    /// commas
    #[arg(long, env = "RPC_BENCH_CASES", value_name = "CASE", value_delimiter = ',')]
    cases: Vec<String>,
    /// Maximum number of samples of a case
    #[arg(long, env = "RPC_BENCH_ITERATIONS", value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Approximate time limit of a case in seconds; at least 5 samples are taken, and warm-up is
    /// not counted
    #[arg(long, env = "RPC_BENCH_SECONDS", default_value_t = 1.0)]
    seconds: f64,
}

pub(crate) fn run(output: &Output, args: &DiscoBenchArgs) -> Result<(), Failure> {
    let names = case_filter::select(&args.cases, cases::NAMES.into_iter(), |_| "")?;
    let sizes = sizes(&args.sizes)?;
    if !args.seconds.is_finite() || args.seconds < 0.0 {
        return Err(Failure::Usage("--seconds must be a time that is not negative".to_owned()));
    }
    let nodes = args.nodes.get();
    for workers in args.workers.iter().map(|workers| workers.get()) {
        if args.over.iter().any(|over| over.has_nodes()) && workers > nodes && workers % nodes != 0 {
            return Err(Failure::Usage(format!(
                "{workers} workers cannot be spread over {nodes} servers in equal parts"
            )));
        }
    }
    let iterations = args.iterations.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    let limits = Limits { iterations, time: Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::MAX) };
    let mut table = table();
    for over in &args.over {
        for workers in args.workers.iter().map(|workers| workers.get()) {
            let spinner = output.spinner();
            spinner.enable_steady_tick(Duration::from_millis(100));
            let mut subject = Subject::new(Testbed::set_up(*over, workers, nodes)?, limits, &sizes);
            for name in &names {
                spinner.set_message(format!("{over} {workers}: {name}"));
                for line in subject.measure(name)? {
                    if output.is_json() { output.json(&line)? } else { add(&mut table, &line) }
                }
            }
            spinner.finish_and_clear();
        }
    }
    if output.is_json() { Ok(()) } else { output.line(&table.to_string()) }
}

/// Largest tensor that can be measured.
const MAX_SIZE: u64 = 4 << 30;

fn sizes(given: &[ByteSize]) -> Result<Vec<usize>, Failure> {
    let size = |size: &ByteSize| match usize::try_from(size.0) {
        Ok(bytes) if (4..=MAX_SIZE).contains(&size.0) => Ok(bytes),
        _ => Err(Failure::Usage(format!("--sizes are from 4B to {}, not {size}", ByteSize(MAX_SIZE)))),
    };
    given.iter().map(size).collect()
}

fn table() -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    let header = ["over", "workers", "case", "size", "median", "p99", "unit", "n", "algorithm", "bus"];
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    for column in [1, 3, 4, 5, 7, 8, 9] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    table
}

fn add(table: &mut comfy_table::Table, line: &CaseResult) {
    let optional = |value: Option<f64>| value.map_or_else(String::new, digits);
    table.add_row(vec![
        line.over.clone(),
        line.workers.to_string(),
        line.case.to_owned(),
        line.bytes.map_or_else(String::new, size),
        digits(line.median),
        digits(line.p99),
        line.unit.to_owned(),
        line.n.to_string(),
        optional(line.algorithm_gb_s),
        optional(line.bus_gb_s),
    ]);
}
