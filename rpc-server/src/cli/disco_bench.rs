//! `disco-bench`: how fast a controller drives its workers, and how fast they move and reduce tensors among themselves.
//!
//! Sessions of each kind of launch and each number of workers are measured one after the other, each case by itself. Worker processes and
//! nodes are this program again ([`serve_if_worker`], [`run_node`]).

mod cases;
mod functions;
mod launch;

use std::num::NonZeroU32;
use std::time::Duration;

use clap::Args;

use self::cases::{Limits, Line, Subject};
pub(super) use self::functions::serve_if_worker;
use self::launch::{Lab, Over};
pub(super) use self::launch::{NodeArgs, run_node};
use super::failure::Failure;
use super::output::{Output, digits, size};
use crate::config::ByteSize;

const DETAILS: &str = "\
Cases:
  start                   from nothing to a session, whose workers have met for collectives
  issue                   calls of an empty function that are issued, each with the end of its result; the controller waits for none
  complete                the same, with the wait until all workers have executed them
  round_trip              one call of an empty function, and the wait until all workers have executed it
  copy_to_0, copy_from_0  a tensor of the largest of the sizes to and from worker 0
  copy_to_last, copy_from_last  the same to and from the last worker; on the way there worker 0 passes it on
  allreduce, reduce_scatter, allgather, broadcast, scatter, gather, all_to_all, send_recv, barrier
                          collectives of float32, sums where they reduce; called in a loop by a function on the workers, each loop
                          between two barriers. send_recv is from each worker with an even number to the next

Output:
  median, p99             of all samples; p99 is the slow end: 99% of the samples were as good or better
  algorithm               for collectives: bytes divided by the time, in GB/s (10^9 bytes). The bytes are those of the larger side: the input of
                          reduce_scatter, scatter and all_to_all, the output of allgather and gather
  bus                     the same times what nccl-tests multiplies it with, so that it compares with what the hardware can do:
                          2(n-1)/n for allreduce, (n-1)/n for reduce_scatter, allgather, scatter, gather and all_to_all, 1 for the others

Ways to launch:
  threads                 threads of this process
  processes               child processes, which share memory for collectives
  tcp, quic               servers on this machine, with workers as threads; they are treated as if they were on several machines, so that
                          tensors go over TCP connections, which over quic are encrypted
  chain                   as tcp, behind a server that forwards
  tracker                 as tcp, handed out by a tracker
  tree                    as tcp; each server opens the next one, and passes commands on
  relay                   as tcp, and the workers do not reach each other: the controller relays their tensors";

#[derive(Args, Debug)]
#[command(after_long_help = DETAILS)]
pub(super) struct DiscoBenchArgs {
    /// How many workers: one session after the other for each number of this list
    #[arg(long, env = "RPC_CLI_WORKERS", value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8")]
    workers: Vec<NonZeroU32>,
    /// How they are launched: a list of threads, processes, tcp, quic, chain, tracker, tree,
    /// relay
    #[arg(long, env = "RPC_CLI_OVER", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "threads,processes,tcp")]
    over: Vec<Over>,
    /// Over how many servers the workers of all others than threads and processes are spread, in equal parts
    #[arg(long, env = "RPC_CLI_NODES", value_name = "NUMBER", default_value = "2")]
    nodes: NonZeroU32,
    /// The sizes of collectives; copies have the largest
    #[arg(long, env = "RPC_CLI_SIZES", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "4KiB,64KiB,1MiB,16MiB,64MiB")]
    sizes: Vec<ByteSize>,
    /// Measure only these cases; * stands for anything. May be repeated, or given as a list with commas
    #[arg(long, env = "RPC_CLI_CASES", value_name = "CASE", value_delimiter = ',')]
    cases: Vec<String>,
    /// Stop a case after so many samples
    #[arg(long, env = "RPC_CLI_ITERATIONS", value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Stop a case after about this time, but not before 5 samples; warm-up comes on top
    #[arg(long, env = "RPC_CLI_SECONDS", default_value_t = 1.0)]
    seconds: f64,
}

pub(super) fn disco_bench(output: &Output, args: &DiscoBenchArgs) -> Result<(), Failure> {
    let names = select(&args.cases)?;
    let sizes = sizes(&args.sizes)?;
    if !args.seconds.is_finite() || args.seconds < 0.0 {
        return Err(Failure::Usage("--seconds is a time".to_owned()));
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
            let mut subject = Subject::new(Lab::set_up(*over, workers, nodes)?, limits, &sizes);
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

fn select(wanted: &[String]) -> Result<Vec<&'static str>, Failure> {
    let chosen = |name: &str| wanted.is_empty() || wanted.iter().any(|pattern| super::bench::matches(pattern, name));
    for pattern in wanted {
        if !cases::NAMES.iter().any(|name| super::bench::matches(pattern, name)) {
            return Err(Failure::Usage(format!("there is no case '{pattern}'; there are {}", cases::NAMES.join(", "))));
        }
    }
    Ok(cases::NAMES.into_iter().filter(|name| chosen(name)).collect())
}

/// The largest tensor that is worth a measurement.
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

fn add(table: &mut comfy_table::Table, line: &Line) {
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
