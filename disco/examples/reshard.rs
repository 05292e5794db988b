//! Brings a tensor from the workers of one session to those of another one that divides it in
//! another way, again and again, and prints how fast, beside what the machine can do: copies of as
//! many bytes from memory to memory, and over loopback sockets.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use clap::Parser;
use disco::{Cut, DRef, DiscoSession, Options, ProcessSession, Reshard, Resharded, ThreadedSession};
use rpc_core::{DataType, Registry};

/// Reshards a tensor from one session to another.
#[derive(Parser)]
struct Args {
    /// Kind of the workers
    #[arg(long, value_enum, default_value = "processes")]
    over: Over,
    /// Workers that have the tensor, and workers that get it
    #[arg(long, num_args = 2, value_names = ["FROM", "TO"], default_values = ["2", "4"])]
    workers: Vec<u32>,
    /// Size of the tensor in MiB
    #[arg(long, default_value_t = 256)]
    size: i64,
    /// Times that it is brought; the best one counts
    #[arg(long, default_value_t = 5)]
    times: u32,
}

/// Kind of the workers, and of the way between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Over {
    /// Threads of this process
    Threads,
    /// Processes that share memory
    Processes,
    /// Processes that connect to each other over TCP
    Sockets,
}

type Failure = Box<dyn std::error::Error>;

const COLUMNS: i64 = 4096;

fn main() -> ExitCode {
    disco::serve_if_worker(&Registry::new());
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let [from, to] = args.workers[..] else { return Err("two numbers of workers".into()) };
    let shape = [(args.size << 20) / (4 * COLUMNS), COLUMNS];
    let bytes = 4 * (shape[0] * shape[1]) as u64;
    let (sources, destinations) = (start(args.over, from)?, start(args.over, to)?);
    let each = [shape[0] / i64::from(from), shape[1]];
    let part = sources.empty(&each, DataType::F32, None)?;
    let reshard = |cut: Cut, filled: Option<&DRef>| -> Result<(Resharded, f64), Failure> {
        let reshard = Reshard::new(&sources, &destinations);
        let reshard = reshard.tensor("x", &part, DataType::F32, shape, Cut::shard(0), cut);
        let reshard = filled.into_iter().fold(reshard, Reshard::fill);
        let began = Instant::now();
        let resharded = reshard.start().wait()?;
        Ok((resharded, began.elapsed().as_secs_f64()))
    };
    println!("{} MiB from {from} to {to} workers, {:?}", args.size, args.over);
    for (name, cut) in [("rows to rows", Cut::shard(0)), ("rows to columns", Cut::shard(1))] {
        let (first, new) = reshard(cut.clone(), None)?;
        let there = &first.tensors["x"];
        let mut best = f64::INFINITY;
        for _ in 0..args.times {
            best = best.min(reshard(cut.clone(), Some(there))?.1);
        }
        report(&format!("{name}, {}", first.route), bytes, best);
        report(&format!("{name}, to new tensors"), bytes, new);
    }
    sources.shutdown().wait()?;
    destinations.shutdown().wait()?;
    let threads = usize::min(to as usize, thread::available_parallelism().map_or(1, usize::from));
    report(&format!("memcpy by {threads} threads"), bytes, best(args.times, || memcpy(bytes as usize, threads)));
    let over_loopback = || loopback(bytes as usize / threads, threads);
    report(&format!("{threads} loopback connections"), bytes, best(args.times, over_loopback));
    Ok(())
}

fn start(over: Over, workers: u32) -> disco::Result<DiscoSession> {
    let mut options = Options::default();
    if over == Over::Sockets {
        options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); workers as usize];
    }
    match over {
        Over::Threads => ThreadedSession::new(workers, 1).options(options).start().wait(),
        Over::Processes | Over::Sockets => ProcessSession::new(workers, 1).options(options).start().wait(),
    }
}

fn report(what: &str, bytes: u64, seconds: f64) {
    println!("{what:<50} {:>8.2} GB/s {:>9.1} ms", bytes as f64 / seconds / 1e9, seconds * 1e3);
}

/// Returns the shortest of several times, the first of which does not count.
fn best(times: u32, mut once: impl FnMut() -> f64) -> f64 {
    once();
    (0..times).map(|_| once()).fold(f64::INFINITY, f64::min)
}

/// Copies from buffers to buffers that were written before, with some threads at once. Returns the
/// seconds.
fn memcpy(bytes: usize, threads: usize) -> f64 {
    let source = vec![1_u8; bytes];
    let mut destination = vec![2_u8; bytes];
    let each = bytes.div_ceil(threads);
    let began = Instant::now();
    thread::scope(|scope| {
        for (from, to) in source.chunks(each).zip(destination.chunks_mut(each)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
    let took = began.elapsed().as_secs_f64();
    assert_eq!(std::hint::black_box(&destination)[bytes - 1], 1);
    took
}

/// Sends as many bytes over each of some connections at once. Returns the seconds.
fn loopback(bytes: usize, connections: usize) -> f64 {
    const PIECE: usize = 1 << 20;

    let pairs: Vec<_> = (0..connections)
        .map(|_| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
            let sender = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
            (sender, listener.accept().expect("a connection").0)
        })
        .collect();
    let source = vec![1_u8; PIECE];
    let mut buffers = vec![vec![2_u8; bytes]; connections];
    let began = Instant::now();
    thread::scope(|scope| {
        for ((mut sender, mut receiver), buffer) in pairs.into_iter().zip(&mut buffers) {
            let source = &source;
            scope.spawn(move || {
                for at in (0..bytes).step_by(PIECE) {
                    sender.write_all(&source[..PIECE.min(bytes - at)]).expect("the other end reads");
                }
            });
            scope.spawn(move || receiver.read_exact(buffer).expect("the other end writes"));
        }
    });
    began.elapsed().as_secs_f64()
}
