//! `rpc-bench scale`: what a session costs with more and more workers.
//!
//! Each kind of session and number of workers is measured in a process of its own ([`run_case`]),
//! so that no memory of an earlier session is used again.

mod case;
mod chart;
mod simulated_nodes;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use rpc_server::cli::{Failure, Output, digits};
use serde::Serialize;

use self::case::{Kind, Measured};

pub(crate) use self::case::{CaseArgs, run_case};
pub(crate) use self::simulated_nodes::{SimulatedNodesArgs, run_simulated_nodes};

const DETAILS: &str = "\
Kinds of session:
  threads                 threads of the process of the controller
  nodes                   up to 8 servers on this machine, each with its part of the workers as threads, over TCP
  simulated               workers that execute nothing and report each command as executed, up to 64 at each node. All
                          nodes are in one process. The controller opens up to 64 of them over Unix sockets, and these
                          open the others over memory channels, with a fan-out of 64
  dial-in                 nodes with one simulated worker each, which dial the controller over TCP

Output:
  start                   from nothing to a session whose workers have all answered a sync, in ms
  call                    a call of an empty function on all workers, and the sync of all: the median, in ms
  memory                  what the process of the controller takes for the session beside its program and what a
                          session of one worker has left (anonymous memory), divided by the number of workers, in KiB.
                          With threads that is also the memory of the workers";

/// Largest number of workers that are not simulated, and of nodes that dial in.
const MAX_REAL: u32 = 1024;

#[derive(Args, Debug)]
#[command(after_long_help = DETAILS)]
pub(crate) struct ScaleBenchArgs {
    /// Numbers of workers; those above 1024 are for simulated ones alone
    #[arg(long, env = "RPC_BENCH_WORKERS", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "8,16,32,64,128,256,512,1024,4096,16384,65536,131072")]
    workers: Vec<NonZeroU32>,
    /// Kinds of session: threads, nodes, simulated, dial-in
    #[arg(long, env = "RPC_BENCH_OVER", value_name = "LIST", value_delimiter = ',')]
    #[arg(default_value = "threads,nodes,simulated,dial-in")]
    over: Vec<Kind>,
    /// Approximate time for the calls of one session in seconds; at least 5 are made
    #[arg(long, env = "RPC_BENCH_SECONDS", default_value_t = 0.5)]
    seconds: f64,
    /// Write a chart of the results to this file, as SVG
    #[arg(long, env = "RPC_BENCH_CHART", value_name = "FILE")]
    chart: Option<PathBuf>,
}

/// Result for one kind of session and number of workers: a line of the JSON output.
#[derive(Clone, Debug, Serialize)]
struct ScaleResult {
    over: Kind,
    workers: u32,
    nodes: u32,
    start_ms: f64,
    call_ms: f64,
    call_p99_ms: f64,
    n: usize,
    controller_bytes: u64,
    controller_bytes_per_worker: f64,
}

pub(crate) fn run(output: &Output, args: &ScaleBenchArgs) -> Result<(), Failure> {
    if !args.seconds.is_finite() || args.seconds < 0.0 {
        return Err(Failure::Usage("--seconds must be a time that is not negative".to_owned()));
    }
    let mut results = Vec::new();
    let mut table = table();
    for kind in &args.over {
        for workers in args.workers.iter().map(|workers| workers.get()) {
            if *kind != Kind::Simulated && workers > MAX_REAL {
                continue;
            }
            let spinner = output.spinner();
            spinner.enable_steady_tick(Duration::from_millis(100));
            spinner.set_message(format!("{kind}: {workers} workers"));
            let result = measure(*kind, workers, args.seconds)?;
            spinner.finish_and_clear();
            if output.is_json() {
                output.json(&result)?
            } else {
                add(&mut table, &result)
            }
            results.push(result);
        }
    }
    if let Some(file) = &args.chart {
        let chart = chart::draw(&results);
        std::fs::write(file, chart).map_err(|error| Failure::file("cannot write", file, error))?;
    }
    if output.is_json() { Ok(()) } else { output.line(&table.to_string()) }
}

/// Measures a session in a process of its own.
fn measure(over: Kind, workers: u32, seconds: f64) -> Result<ScaleResult, Failure> {
    let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let mut command = Command::new(program);
    command.arg("scale-case").arg(over.to_string()).arg(workers.to_string()).arg(seconds.to_string());
    let measured = command.stderr(Stdio::inherit()).output();
    let measured = measured.map_err(|error| Failure::local("cannot start this program", error))?;
    let text = String::from_utf8_lossy(&measured.stdout);
    let Some(measured) = Measured::parse(&text).filter(|_| measured.status.success()) else {
        let status = measured.status;
        let error = std::io::Error::other(format!("the process ended with {status}; it says why above"));
        return Err(Failure::local("cannot measure a session", error));
    };
    let Measured { nodes, start_ms, call_ms, call_p99_ms, n, controller_bytes } = measured;
    let controller_bytes_per_worker = controller_bytes as f64 / f64::from(workers);
    Ok(ScaleResult {
        over,
        workers,
        nodes,
        start_ms,
        call_ms,
        call_p99_ms,
        n,
        controller_bytes,
        controller_bytes_per_worker,
    })
}

fn table() -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    let header = ["over", "workers", "nodes", "start ms", "call ms", "p99", "n", "memory KiB/worker"];
    table.load_style(comfy_table::presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    for column in 1..header.len() {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    table
}

fn add(table: &mut comfy_table::Table, result: &ScaleResult) {
    table.add_row(vec![
        result.over.to_string(),
        result.workers.to_string(),
        result.nodes.to_string(),
        digits(result.start_ms),
        digits(result.call_ms),
        digits(result.call_p99_ms),
        result.n.to_string(),
        digits(result.controller_bytes_per_worker / 1024.0),
    ]);
}
