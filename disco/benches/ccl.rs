//! Time of collectives among 2 and 4 ranks: threads, processes that read from each other's
//! buffers, processes with a segment alone, and processes with TCP connections, in the clear and
//! encrypted. Medians.
//!
//! `cargo bench -p disco --bench ccl -- [--json] [--over KIND] [--ranks N] [--op NAME]
//! [--bytes N]`, where `KIND` is `threads`, `processes`, `segment`, `tcp` or `encrypted`, and with
//! `--features mpi` also `mpi`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use disco::ccl::{Buffers, Ccl, Rank, ReduceOp, host};
use rpc_core::{DataType, Tensor};

/// One line of the table: what is measured, and over how many bytes.
#[derive(Clone, Copy)]
struct Case {
    operation: &'static str,
    bytes: usize,
    /// Number of calls that are timed together.
    batch: usize,
    batches: usize,
}

const CASES: [Case; 9] = [
    Case { operation: "barrier", bytes: 0, batch: 1000, batches: 21 },
    Case { operation: "allreduce", bytes: 4 << 10, batch: 1000, batches: 21 },
    Case { operation: "allreduce", bytes: 1 << 20, batch: 10, batches: 41 },
    Case { operation: "allreduce", bytes: 64 << 20, batch: 1, batches: 21 },
    Case { operation: "broadcast", bytes: 4 << 10, batch: 1000, batches: 21 },
    Case { operation: "broadcast", bytes: 1 << 20, batch: 10, batches: 41 },
    Case { operation: "broadcast", bytes: 64 << 20, batch: 1, batches: 21 },
    Case { operation: "allgather", bytes: 64 << 20, batch: 1, batches: 11 },
    Case { operation: "reduce_scatter", bytes: 64 << 20, batch: 1, batches: 11 },
];

/// The variable that tells a child which rank it is.
const CHILD: &str = "DISCO_CCL_BENCH_RANK";

struct Arguments {
    json: bool,
    over: Option<String>,
    ranks: Option<usize>,
    operation: Option<String>,
    bytes: Option<usize>,
}

impl Arguments {
    fn parse() -> Self {
        let mut this = Self { json: false, over: None, ranks: None, operation: None, bytes: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
            match word.as_str() {
                "--json" => this.json = true,
                "--over" => this.over = Some(value()),
                "--ranks" => this.ranks = Some(value().parse().expect("a number of ranks")),
                "--op" => this.operation = Some(value()),
                "--bytes" => this.bytes = Some(value().parse().expect("a number of bytes")),
                // Cargo's own.
                "--bench" => {}
                other => panic!("unknown argument {other}"),
            }
        }
        this
    }

    fn cases(&self) -> impl Iterator<Item = Case> + '_ {
        CASES.into_iter().filter(|case| {
            self.operation.as_ref().is_none_or(|name| name == case.operation)
                && self.bytes.is_none_or(|bytes| bytes == case.bytes)
        })
    }
}

fn main() {
    let arguments = Arguments::parse();
    #[cfg(feature = "mpi")]
    if std::env::var_os(mpi::RANK).is_some() {
        return mpi::rank(&arguments);
    }
    if let Ok(text) = std::env::var(CHILD) {
        let (rank, over) = text.split_once(' ').expect("a rank and the way");
        let rank = Rank(rank.parse().expect("a rank"));
        let mut ccl = if is_stream(over) {
            let listener = listener();
            println!("{}", serde_json::to_string(listener.address()).expect("an address"));
            let (key, addresses): (host::SessionKey, Vec<host::Address>) = from_stdin();
            listener.join(rank, &addresses, &key, &options(over)).expect("to join")
        } else {
            let ticket: host::Ticket = from_stdin();
            ticket.join(rank, &options(over)).expect("to join")
        };
        for case in arguments.cases() {
            measure(&mut *ccl, case);
        }
        return;
    }
    if !arguments.json {
        println!("{:<10} {:>5}  {:<15} {:>9} {:>12} {:>9}", "over", "ranks", "operation", "bytes", "median", "GB/s");
    }
    let all = ["threads", "processes", "segment", "tcp", "encrypted"];
    for over in all.into_iter().filter(|over| arguments.over.as_ref().is_none_or(|one| one == over)) {
        for ranks in [2, 4].into_iter().filter(|ranks| arguments.ranks.is_none_or(|one| one == *ranks)) {
            run(&arguments, over, ranks);
        }
    }
    #[cfg(feature = "mpi")]
    if arguments.over.as_ref().is_none_or(|one| one == "mpi") {
        for ranks in [2, 4].into_iter().filter(|ranks| arguments.ranks.is_none_or(|one| one == *ranks)) {
            mpi::run(ranks);
        }
    }
}

/// Ranks that `mpirun` starts.
#[cfg(feature = "mpi")]
mod mpi {
    use std::process::Command;

    use disco::ccl::host::mpi::{MpiScope, Process};
    use disco::ccl::host::{Options, SessionKey};

    use super::{Arguments, measure, print};

    /// The variable that tells a process that it is a rank.
    pub(super) const RANK: &str = "DISCO_CCL_BENCH_MPI";

    /// Starts this program again as a job of so many processes, of which the first prints.
    pub(super) fn run(ranks: usize) {
        let status = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
            .arg(std::env::current_exe().expect("this binary"))
            .args(std::env::args().skip(1))
            .env(RANK, "1")
            .status();
        assert!(status.expect("mpirun").success());
    }

    pub(super) fn rank(arguments: &Arguments) {
        let process = Process::start().expect("MPI");
        let all: Vec<u32> = (0..process.size()).collect();
        let key = SessionKey::generate().expect("a key");
        let mut ccl = process.join(MpiScope::World, &all, &key, &Options::default()).expect("to join");
        for case in arguments.cases() {
            let took = measure(&mut *ccl, case);
            if process.rank() == 0 {
                print(arguments, "mpi", all.len(), case, took);
            }
        }
        drop(ccl);
        process.finish().expect("no messages are left");
    }
}

/// Runs all cases; rank 0 measures in this process.
fn run(arguments: &Arguments, over: &str, ranks: usize) {
    let report = |ccl: &mut dyn Ccl| {
        for case in arguments.cases() {
            print(arguments, over, ranks, case, measure(ccl, case));
        }
    };
    if over == "threads" {
        let mut group = host::threads(ranks, &host::Options::default()).expect("a group");
        let others = group.split_off(1);
        std::thread::scope(|scope| {
            for mut ccl in others {
                scope.spawn(move || {
                    for case in arguments.cases() {
                        measure(&mut *ccl, case);
                    }
                });
            }
            report(&mut *group[0]);
        });
        return;
    }
    let mut children: Vec<Child> = (1..ranks).map(|rank| start(rank, over)).collect();
    let mut ccl = if is_stream(over) {
        let listener = listener();
        let mut addresses = vec![listener.address().clone()];
        for child in &mut children {
            let mut line = String::new();
            BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("an address");
            addresses.push(serde_json::from_str(&line).expect("an address"));
        }
        let key = host::SessionKey::generate().expect("a key");
        children.iter_mut().for_each(|child| to_stdin(child, &(&key, &addresses)));
        listener.join(Rank(0), &addresses, &key, &options(over)).expect("to join")
    } else {
        let offer = host::Offer::new(ranks, &options(over)).expect("a segment");
        children.iter_mut().for_each(|child| to_stdin(child, &offer.ticket()));
        offer.ticket().join(Rank(0), &options(over)).expect("to join")
    };
    report(&mut *ccl);
    for mut child in children {
        assert!(child.wait().expect("a child").success());
    }
}

/// Starts this program again, as a rank above 0.
fn start(rank: usize, over: &str) -> Child {
    Command::new(std::env::current_exe().expect("this binary"))
        .args(std::env::args().skip(1))
        .env(CHILD, format!("{rank} {over}"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this binary again")
}

fn is_stream(over: &str) -> bool {
    matches!(over, "tcp" | "encrypted")
}

fn options(over: &str) -> host::Options {
    let mut options = host::Options::default();
    options.read_from = options.read_from.filter(|_| over != "segment");
    options.encrypt = over == "encrypted";
    options
}

fn listener() -> host::Listener {
    host::Listener::bind(&host::Address::Tcp(([127, 0, 0, 1], 0).into())).expect("to listen")
}

fn to_stdin(child: &mut Child, what: &impl serde::Serialize) {
    let line = serde_json::to_string(what).expect("what has a form");
    writeln!(child.stdin.as_mut().expect("a pipe"), "{line}").expect("a child that reads");
}

fn from_stdin<T: serde::de::DeserializeOwned>() -> T {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    serde_json::from_str(&line).expect("what has been sent")
}

/// Returns the median time of one call.
fn measure(ccl: &mut dyn Ccl, case: Case) -> Duration {
    let size = ccl.size();
    let (input_len, output_len) = match case.operation {
        "allgather" => (case.bytes / size, case.bytes),
        "reduce_scatter" => (case.bytes, case.bytes / size),
        _ => (case.bytes, case.bytes),
    };
    // Tensors, as workers have them.
    let elements: Vec<f32> = (0..input_len / 4).map(|at| at as f32).collect();
    let input = Tensor::from_slice([elements.len() as i64], &elements).expect("a tensor");
    let output = Tensor::from_slice([output_len as i64], &vec![1_u8; output_len]).expect("a tensor");
    let (input, mut output) = (input.read().expect("nobody writes"), output.write().expect("nobody reads"));
    let input = input.bytes().expect("host memory");
    let output = output.bytes_mut().expect("host memory");
    let mut call = |ccl: &mut dyn Ccl| {
        let buffers = Buffers::new(input, output);
        match case.operation {
            "barrier" => ccl.barrier(),
            "allreduce" => ccl.allreduce(ReduceOp::Sum, DataType::F32, case.bytes / 4, buffers.into()),
            "broadcast" if ccl.rank() == Rank(0) => {
                ccl.broadcast(Rank(0), DataType::F32, case.bytes / 4, Buffers::input(input).into())
            }
            "broadcast" => ccl.broadcast(Rank(0), DataType::F32, case.bytes / 4, buffers.into()),
            "allgather" => ccl.allgather(DataType::F32, case.bytes / 4 / size, buffers.into()),
            "reduce_scatter" => ccl.reduce_scatter(ReduceOp::Sum, DataType::F32, case.bytes / 4 / size, buffers.into()),
            other => panic!("no operation {other}"),
        }
        .expect("a collective");
    };
    for _ in 0..2 {
        call(ccl);
    }
    let mut times: Vec<Duration> = (0..case.batches)
        .map(|_| {
            ccl.barrier().expect("a barrier");
            let began = Instant::now();
            for _ in 0..case.batch {
                call(ccl);
            }
            // The time until all have it, and not only this rank.
            ccl.barrier().expect("a barrier");
            began.elapsed() / case.batch as u32
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

fn print(arguments: &Arguments, over: &str, ranks: usize, case: Case, median: Duration) {
    let micros = median.as_secs_f64() * 1e6;
    let rate = case.bytes as f64 / median.as_secs_f64() / 1e9;
    let Case { operation, bytes, .. } = case;
    if arguments.json {
        println!(r#"{{"over":"{over}","ranks":{ranks},"op":"{operation}","bytes":{bytes},"median_us":{micros:.2}}}"#);
    } else {
        println!("{over:<10} {ranks:>5}  {operation:<15} {bytes:>9} {micros:>9.1} µs {rate:>9.2}");
    }
}
