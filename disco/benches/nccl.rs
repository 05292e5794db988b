//! Time of allreduces on the memory of GPUs, beside the bare calls of NCCL:
//!
//!     cargo bench -p disco --features cuda --bench nccl -- [--json] [--ranks N] [--bytes N]
//!
//! As many ranks as there are GPUs, unless `--ranks` says otherwise, each a process of this
//! program. More ranks than GPUs share these, for which the ranks get
//! `NCCL_MULTI_RANK_GPU_ENABLE=1`, and which takes NCCL 2.30.
//!
//! Both sum `float32`, in place and out of place, on the same stream and the same memory, in turns:
//!
//! * `ours` is a communicator of the `nccl` backend, as workers of a session have it;
//! * `bare` is a communicator of `ncclCommInitRank`, which blocks, with nothing around
//!   `ncclAllReduce`.
//!
//! A turn is a batch of calls, and ends when all of them are done on all ranks. The issue is the
//! time from a call to its return, on a stream that has nothing to do. All times are those of the
//! slowest rank, and medians over the rounds; the ratio is the median of the rounds' ratios, bare
//! to ours, so that 1 is as fast.
//!
//! Sizes that do not fit into the memory are left out. Without a GPU, or without NCCL, it says so
//! and ends well.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use disco::ccl::nccl::{self, Library, NcclCcl, UniqueId, Version};
use disco::ccl::{Buffers, Ccl, Rank, ReduceOp, host};
use rpc_core::device::{AllocRequest, Memory, Stream};
use rpc_core::{DataType, Device, DeviceApi, DeviceAttribute, Value};
use rpc_cuda::{CudaDevice, CudaStream};

const SIZES: [usize; 10] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// True to measure the issue, too.
const ISSUE_SIZES: [usize; 2] = [4 << 10, 64 << 20];

/// A batch has this much to sum, within these limits: long enough that one wait does not show among
/// so many calls.
const BATCH_BYTES: usize = 1 << 30;
const BATCH_CALLS: (usize, usize) = (2, 50);

const ROUNDS: usize = 21;
const ISSUE_ROUNDS: usize = 101;

/// The first version that takes more ranks than one on a GPU.
const SHARES_GPUS: Version = Version::new(2, 30, 0);

/// The variable that tells a child which rank it is.
const CHILD: &str = "DISCO_NCCL_BENCH_RANK";

/// Line that a rank gets on its standard input: of the group beside NCCL and of that of the bench
/// itself the tickets, and what the two communicators of NCCL find each other by.
type Invitation = ([host::Ticket; 2], [UniqueId; 2]);

struct Arguments {
    json: bool,
    ranks: Option<usize>,
    bytes: Option<usize>,
}

impl Arguments {
    fn parse() -> Self {
        let mut this = Self { json: false, ranks: None, bytes: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
            match word.as_str() {
                "--json" => this.json = true,
                "--ranks" => this.ranks = Some(number()),
                "--bytes" => this.bytes = Some(number()),
                // Cargo's own.
                "--bench" => {}
                other => panic!("unknown argument {other}"),
            }
        }
        this
    }
}

fn main() {
    let arguments = Arguments::parse();
    if let Ok(rank) = std::env::var(CHILD) {
        return Member::join(Rank(rank.parse().expect("a rank"))).measure(&arguments);
    }
    if let Err(reason) = launch(&arguments) {
        eprintln!("SKIPPED: {reason}");
    }
}

/// Starts the ranks and waits for them.
///
/// # Errors
///
/// Missing part of this machine.
fn launch(arguments: &Arguments) -> Result<(), String> {
    let cuda = CudaDevice::open().map_err(|error| format!("no GPU: {}", error.message()))?;
    let library = Library::load().map_err(|error| format!("no NCCL: {error}"))?;
    let gpus = cuda.count().expect("a number of GPUs") as usize;
    let ranks = arguments.ranks.unwrap_or(gpus);
    if ranks > gpus && library.version() < SHARES_GPUS {
        return Err(format!("{ranks} ranks on {gpus} GPUs take NCCL 2.30, and there is {library}"));
    }
    print_head(arguments, &cuda, &library, ranks);

    let offers = [(); 2].map(|()| host::Offer::new(ranks, &host::Options::default()).expect("a segment"));
    let ids = [(); 2].map(|()| library.unique_id().expect("an id"));
    let invitation: Invitation = (offers.each_ref().map(host::Offer::ticket), ids);
    let invitation = serde_json::to_string(&invitation).expect("what has a form");
    let children = (0..ranks).map(|rank| {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(std::env::args().skip(1)).env(CHILD, rank.to_string()).stdin(Stdio::piped());
        if ranks > gpus {
            command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
        }
        let mut child = command.spawn().expect("this binary again");
        writeln!(child.stdin.as_mut().expect("a pipe"), "{invitation}").expect("a child that reads");
        child
    });
    wait_for(children.collect());
    Ok(())
}

/// Waits until all have ended well. If one has not, the others would wait for it in NCCL for ever.
fn wait_for(mut children: Vec<Child>) {
    while !children.is_empty() {
        let mut failed = false;
        children.retain_mut(|child| match child.try_wait().expect("a child") {
            None => true,
            Some(status) => {
                failed |= !status.success();
                false
            }
        });
        if failed {
            for child in &mut children {
                child.kill().expect("a child");
                child.wait().expect("a child");
            }
            panic!("a rank has failed");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// One measurement.
fn print_head(arguments: &Arguments, cuda: &CudaDevice, library: &Library, ranks: usize) {
    let (count, ask) = (cuda.count().expect("a number of GPUs"), |attribute| cuda.attribute(0, attribute));
    let text = |attribute| match ask(attribute).expect("an answer") {
        Value::Str(text) => text,
        _ => "unknown".to_owned(),
    };
    let (name, driver) = (text(DeviceAttribute::Name), text(DeviceAttribute::DriverVersion));
    let interface = match ask(DeviceAttribute::ApiVersion).expect("an answer") {
        Value::Int(code) => format!("{}.{}", code / 1000, code % 1000 / 10),
        _ => "unknown".to_owned(),
    };
    if arguments.json {
        let (version, gpus) = (library.version().to_string(), count);
        let head = serde_json::json!({
            "gpu": name, "gpus": gpus, "driver": driver, "cuda": interface, "nccl": version, "ranks": ranks,
        });
        println!("{head}");
    } else {
        println!("ranks: {ranks}, GPUs: {count}, {name}, driver {driver} with CUDA {interface}, NCCL {library}");
        println!(
            "{:>5}  {:<22} {:>10} {:>12} {:>12} {:>9} {:>9} {:>11}",
            "ranks", "what", "bytes", "ours", "bare", "GB/s", "bare GB/s", "bare / ours"
        );
    }
}

/// Library whose call it is.
#[derive(Clone, Copy)]
enum Side {
    Ours,
    Bare,
}

/// Memory of a call: where it is in place, input and output are the same.
#[derive(Clone, Copy)]
struct Span {
    input: *const u8,
    output: *mut u8,
    len: usize,
}

/// A rank.
struct Member {
    cuda: CudaDevice,
    device: Device,
    /// In step with the others, without NCCL: before each turn, and to compare times.
    pace: Box<dyn Ccl>,
    ours: NcclCcl,
    bare: Bare,
}

impl Member {
    fn join(rank: Rank) -> Self {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).expect("a line");
        let (tickets, [our_id, bare_id]): Invitation = serde_json::from_str(&line).expect("an invitation");
        let [control, pace] = tickets.map(|ticket| ticket.join(rank, &host::Options::default()).expect("to join"));
        let size = pace.size();

        let cuda = CudaDevice::open().expect("a GPU");
        let device = Device::cuda(rank.0 as i32 % cuda.count().expect("a number of GPUs"));
        let library = Library::load().expect("NCCL");
        let stream = nccl::cuda::stream(device).expect("a stream");
        let bare_stream = cuda.stream(device.index).expect("the same stream");
        let options = nccl::Options::default();
        let ours = NcclCcl::new(Arc::clone(&library), our_id, rank, size, control, stream, options).expect("to join");
        let bare = Bare::join(&library, bare_id, rank, size, bare_stream);
        Self { cuda, device, pace, ours, bare }
    }

    fn measure(mut self, arguments: &Arguments) {
        for len in SIZES.into_iter().filter(|len| arguments.bytes.is_none_or(|bytes| bytes == *len)) {
            if !self.has_room(len) {
                continue;
            }
            let [input, output] = [(); 2].map(|()| {
                self.cuda.allocate(self.device.index, &AllocRequest::new(len as u64)).expect("memory of the GPU")
            });
            for in_place in [true, false] {
                let source = if in_place { &output } else { &input };
                self.check(&**source, &*output);
                let span = Span { input: address(&**source), output: address(&*output), len };
                let calls = (BATCH_BYTES / len).clamp(BATCH_CALLS.0, BATCH_CALLS.1);
                // Sums in place grow, to infinity at last, which takes no longer.
                let compared = self.compare(ROUNDS, |member, side| member.turn(side, span, calls));
                let what = if in_place { "allreduce in place" } else { "allreduce" };
                self.print(arguments, what, len, compared);
                if !in_place && ISSUE_SIZES.contains(&len) {
                    let compared = self.compare(ISSUE_ROUNDS, |member, side| member.issue(side, span));
                    self.print(arguments, "issue of an allreduce", len, compared);
                }
            }
        }
        // Whoever leaves first does not break the group for those that still measure.
        self.pace.barrier().expect("a barrier");
    }

    /// Returns true if the GPU has room for two buffers of each of its ranks, which all ranks
    /// answer in the same way.
    fn has_room(&self, len: usize) -> bool {
        let Value::Int(total) = self.cuda.attribute(0, DeviceAttribute::TotalMemory).expect("a size") else {
            return true;
        };
        let gpus = self.cuda.count().expect("a number of GPUs") as usize;
        2 * len * self.pace.size().div_ceil(gpus) <= total as usize / 10 * 9
    }

    /// Sees that the sums are right, whoever makes them.
    fn check(&mut self, input: &dyn Memory, output: &dyn Memory) {
        let (rank, size) = (self.pace.rank().0 as f32, self.pace.size() as f32);
        let value = |at: usize| (at % 1000) as f32;
        let span = Span { input: address(input), output: address(output), len: output.len() as usize };
        for side in [Side::Ours, Side::Bare] {
            write(output, |_| -1.0);
            write(input, |at| value(at) + rank);
            self.pace.barrier().expect("a barrier");
            self.call(side, span);
            self.wait(side);
            assert_holds(output, |at| size * value(at) + size * (size - 1.0) / 2.0);
        }
    }

    /// Lets the two sides take turns. Seconds.
    fn compare(&mut self, rounds: usize, turn: impl Fn(&mut Self, Side) -> f64) -> Compared {
        let (mut ours, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        // The first round is for the connections that are made at first use.
        for round in 0..=rounds {
            let (our, its) = (turn(self, Side::Ours), turn(self, Side::Bare));
            if round > 0 {
                ours.push(our);
                bare.push(its);
                ratios.push(its / our);
            }
        }
        Compared { ours: median(ours), bare: median(bare), ratio: median(ratios) }
    }

    /// Returns the time of a call in a batch of so many.
    fn turn(&mut self, side: Side, span: Span, calls: usize) -> f64 {
        self.pace.barrier().expect("a barrier");
        let began = Instant::now();
        for _ in 0..calls {
            self.call(side, span);
        }
        self.wait(side);
        let took = began.elapsed();
        self.slowest(took) / calls as f64
    }

    /// Returns the time until a call returns.
    fn issue(&mut self, side: Side, span: Span) -> f64 {
        self.pace.barrier().expect("a barrier");
        let began = Instant::now();
        self.call(side, span);
        let took = began.elapsed();
        self.wait(side);
        self.slowest(took)
    }

    fn call(&mut self, side: Side, Span { input, output, len }: Span) {
        match side {
            Side::Ours => {
                // SAFETY: memory of this device, of that length, which is given back after the last
                // wait; nobody else uses it.
                let buffers = unsafe { Buffers::from_raw(self.device, Some((input, len)), Some((output, len))) };
                let buffers = buffers.expect("the same, or apart");
                self.ours.allreduce(ReduceOp::Sum, DataType::F32, len / 4, buffers.into()).expect("an allreduce");
            }
            Side::Bare => self.bare.allreduce(input, output, len / 4),
        }
    }

    /// Waits until all calls of the side are done here.
    fn wait(&mut self, side: Side) {
        match side {
            Side::Ours => self.ours.complete().expect("a device that works"),
            Side::Bare => self.bare.stream.synchronize().expect("a device that works"),
        }
    }

    /// Returns the longest time of all ranks, in seconds.
    fn slowest(&mut self, took: Duration) -> f64 {
        let mut bytes = took.as_secs_f64().to_ne_bytes();
        self.pace.allreduce(ReduceOp::Max, DataType::F64, 1, Buffers::in_place(&mut bytes).into()).expect("a maximum");
        f64::from_ne_bytes(bytes)
    }

    fn print(&self, arguments: &Arguments, what: &str, len: usize, compared: Compared) {
        let (ranks, Compared { ours, bare, ratio }) = (self.pace.size(), compared);
        if self.pace.rank() != Rank(0) {
            return;
        }
        let [our_micros, bare_micros] = [ours, bare].map(|seconds| seconds * 1e6);
        if arguments.json {
            println!(
                "{{\"ranks\":{ranks},\"what\":\"{what}\",\"bytes\":{len},\"ours_us\":{our_micros:.2},\
                 \"bare_us\":{bare_micros:.2},\"ratio\":{ratio:.3}}}"
            );
            return;
        }
        // An issue moves nothing.
        let rate = |seconds: f64| match what.starts_with("issue") {
            true => "-".to_owned(),
            false => format!("{:.2}", len as f64 / seconds / 1e9),
        };
        let (our_rate, bare_rate) = (rate(ours), rate(bare));
        println!(
            "{ranks:>5}  {what:<22} {len:>10} {our_micros:>9.1} µs {bare_micros:>9.1} µs {our_rate:>9} \
             {bare_rate:>9} {ratio:>11.3}"
        );
    }
}

/// Medians, in seconds, and of the ratios.
struct Compared {
    ours: f64,
    bare: f64,
    ratio: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn address(memory: &dyn Memory) -> *mut u8 {
    memory.device_address().expect("memory of the GPU").as_ptr()
}

/// Bytes that are made or looked at in one go.
const PART: usize = 16 << 20;

fn write(memory: &dyn Memory, value: impl Fn(usize) -> f32) {
    for start in (0..memory.len() as usize).step_by(PART) {
        let end = memory.len().min((start + PART) as u64) as usize;
        let bytes: Vec<u8> = (start / 4..end / 4).flat_map(|at| value(at).to_ne_bytes()).collect();
        // SAFETY: the range is within, and nobody else uses the memory.
        unsafe { memory.copy_from_host(start as u64, &bytes) }.expect("a copy");
    }
}

fn assert_holds(memory: &dyn Memory, value: impl Fn(usize) -> f32) {
    for start in (0..memory.len() as usize).step_by(PART) {
        let mut bytes = vec![0; PART.min(memory.len() as usize - start)];
        // SAFETY: as above.
        unsafe { memory.copy_to_host(start as u64, &mut bytes) }.expect("a copy");
        let found = bytes.chunks_exact(4).map(|four| f32::from_ne_bytes(four.try_into().expect("four bytes")));
        let expected = (start / 4..).map(&value);
        assert!(found.zip(expected).all(|(found, expected)| found == expected), "a sum is wrong");
    }
}

/// NCCL as a program without us would call it.
struct Bare {
    all_reduce: AllReduce,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    communicator: *mut c_void,
    stream: Arc<CudaStream>,
}

type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
type InitRank = unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int;

/// `ncclFloat32` and `ncclSum`.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

impl Bare {
    /// On the device of the stream, which this thread works on already.
    fn join(library: &Library, id: UniqueId, rank: Rank, size: usize, stream: Arc<CudaStream>) -> Self {
        // SAFETY: it is loaded already and stays so; the types are those that NCCL's header gives
        // these names.
        let (init, mut this) = unsafe {
            let library = libloading::Library::new(library.path()).expect("the same library");
            let init: InitRank = *library.get(b"ncclCommInitRank").expect("a function");
            let this = Self {
                all_reduce: *library.get(b"ncclAllReduce").expect("a function"),
                destroy: *library.get(b"ncclCommDestroy").expect("a function"),
                error_string: *library.get(b"ncclGetErrorString").expect("a function"),
                communicator: ptr::null_mut(),
                stream,
            };
            (init, this)
        };
        // SAFETY: there is room for the communicator.
        let result = unsafe { init(&raw mut this.communicator, size as c_int, id, rank.0 as c_int) };
        this.succeed(result);
        this
    }

    fn allreduce(&self, input: *const u8, output: *mut u8, count: usize) {
        let (stream, communicator) = (self.stream.raw(), self.communicator);
        // SAFETY: both are memory of so many elements on the communicator's device, and stay until
        // the stream is waited for.
        self.succeed(unsafe {
            (self.all_reduce)(input.cast(), output.cast(), count, FLOAT32, SUM, communicator, stream)
        });
    }

    fn succeed(&self, code: c_int) {
        // SAFETY: it takes any number, and gives a constant.
        assert_eq!(code, 0, "{}", unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy());
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        // SAFETY: nobody else has it, and nothing of it is on the stream.
        self.succeed(unsafe { (self.destroy)(self.communicator) });
    }
}
