//! Costs of copies between the host and a GPU, beside the driver's own and beside bare sockets:
//!
//!     cargo bench -p rpc-tests --bench cuda
//!
//! `--json` prints a line of JSON for each result, and `--bytes N` measures one size.
//!
//! Two sessions copy: over `tcp` on loopback, where this program is the server and the session has
//! a process of its own, as those that use GPUs have; and `local`, in this process. Each takes
//! turns with
//!
//! * the driver's own blocking copies, `cuMemcpyHtoD` and `cuMemcpyDtoH`, of pageable and of pinned
//!   memory of this process;
//! * bare TCP over loopback: as many bytes to or from a thread of this process, and one byte in the
//!   other direction that confirms or requests them.
//!
//! All buffers have been used before. The limit is the slower one of the pageable copy and, for
//! `tcp`, bare TCP. Rates are medians over the rounds, and the ratio of ours to the limit is the
//! median of the rounds' ratios.
//!
//! A copy to the device is over when its source may be written to again, as the driver's own from
//! pageable memory is, too: the last bytes may be on their way still. A turn ends, off the clock,
//! when they are there.
//!
//! Without a GPU it prints so and succeeds.

// The bench is its own check: it panics at any unexpected result.
#![allow(clippy::unwrap_used)]

use std::ffi::c_void;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use cudarc::driver::sys;
use rpc_core::{DataType, Device, DeviceApi, DeviceAttribute, Devices, LocalSession, Registry, Session, Value};
use rpc_cuda::CudaDevice;
use rpc_server::RpcServer;
use rpc_server::config::ServeConfig;
use rpc_server::isolate::{self, gpu};
use rpc_transports::Connector;

const SIZES: [usize; 6] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];

/// Least number of bytes that one turn copies, unless that takes too many copies. Reading the clock
/// costs next to nothing beside it.
const TURN_BYTES: usize = 16 << 20;
const MOST_COPIES: usize = 256;

/// Largest size that is measured in more rounds.
const SMALL: usize = 16 << 20;

fn main() {
    gpu::answer_if_asked();
    let registry = Registry::new();
    isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
    let (json, only) = arguments();
    let cuda = match CudaDevice::open() {
        Ok(cuda) => cuda,
        Err(error) => return eprintln!("SKIPPED: no GPU: {}", error.message()),
    };
    print_head(&cuda, json);

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().to_owned(),
        ..ServeConfig::default()
    };
    let server = RpcServer::new(registry.clone()).devices(gpu::for_server(&config)).config(config);
    let running = runtime.block_on(server.start()).unwrap();
    let remote = Connector::new().connect_blocking(&running.addresses()[0].to_string()).unwrap();
    let devices = Devices::new().with(Arc::new(cuda));
    let local = Session::new(LocalSession::builder(registry).devices(devices).build());

    // The bare copies are in the context that the local session uses, which a process has once.
    cuda.context(0).unwrap();
    let driver = Driver::new();
    for (over, session) in [("tcp", &remote), ("local", &local)] {
        for len in SIZES.into_iter().filter(|len| only.is_none_or(|only| only == *len)) {
            for line in measure(over, session, &driver, len) {
                line.print(json);
            }
        }
    }
    drop((remote, running));
    runtime.shutdown_background();
}

/// Arguments: a flag for JSON output, and the size to measure.
fn arguments() -> (bool, Option<usize>) {
    let (mut json, mut only) = (false, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--json" => json = true,
            "--bytes" => only = Some(words.next().and_then(|bytes| bytes.parse().ok()).expect("a number of bytes")),
            // Flag that cargo adds.
            "--bench" => {}
            other => panic!("unknown argument {other}"),
        }
    }
    (json, only)
}

/// Prints the names of the GPU and of the driver.
fn print_head(cuda: &CudaDevice, json: bool) {
    let text = |attribute| match cuda.attribute(0, attribute).unwrap() {
        Value::Str(text) => text,
        _ => "unknown".to_owned(),
    };
    let (name, version) = (text(DeviceAttribute::Name), text(DeviceAttribute::DriverVersion));
    let interface = cuda.attribute(0, DeviceAttribute::ApiVersion).unwrap();
    let interface = match interface {
        Value::Int(code) => format!("{}.{}", code / 1000, code % 1000 / 10),
        _ => "unknown".to_owned(),
    };
    if json {
        println!("{}", serde_json::json!({ "gpu": name, "driver": version, "cuda": interface }));
    } else {
        println!("{name}, driver {version} with CUDA {interface}; GB/s to and from its memory");
        println!(
            "{:<6} {:<9} {:>10} {:>9} {:>9} {:>9} {:>9} {:>12}",
            "over", "direction", "bytes", "ours", "pageable", "pinned", "bare tcp", "ours / limit"
        );
    }
}

/// Result in GB/s.
struct Line {
    over: &'static str,
    direction: &'static str,
    len: usize,
    ours: f64,
    pageable: f64,
    pinned: f64,
    sockets: Option<f64>,
    ratio: f64,
}

impl Line {
    fn print(&self, json: bool) {
        let Self { over, direction, len, ours, pageable, pinned, sockets, ratio } = self;
        if json {
            let sockets = sockets.map_or("null".to_owned(), |rate| format!("{rate:.4}"));
            println!(
                "{{\"over\":\"{over}\",\"direction\":\"{direction}\",\"bytes\":{len},\"ours_gb_s\":{ours:.4},\
                 \"pageable_gb_s\":{pageable:.4},\"pinned_gb_s\":{pinned:.4},\
                  \"tcp_gb_s\":{sockets},\"ratio\":{ratio:.3}}}"
            );
        } else {
            let sockets = sockets.map_or("-".to_owned(), |rate| format!("{rate:.3}"));
            println!(
                "{over:<6} {direction:<9} {len:>10} {ours:>9.3} {pageable:>9.3} \
                 {pinned:>9.3} {sockets:>9} {ratio:>12.2}"
            );
        }
    }
}

/// Measures both directions, after a check that the bytes arrive.
fn measure(over: &'static str, session: &Session, driver: &Driver, len: usize) -> [Line; 2] {
    let data = Bytes::from_iter((0..len).map(|at| ((at * 31 + at / 251) % 251) as u8));
    let tensor = session.alloc(Device::cuda(0), DataType::U8, &[len as i64]).wait().unwrap();
    let upload = || session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
    // Reading one byte waits for all work that was queued on the device.
    let settle = || drop(session.copy_range_from_remote(&tensor, 0..1).wait().unwrap());
    let download = |buffer| session.copy_from_remote_into(&tensor, None, buffer).wait().unwrap();
    let block = driver.allocate(len);
    let (mut pageable, mut pinned) = (vec![0; len], driver.pin(len));

    upload();
    let mut buffer = download(BytesMut::new());
    assert!(buffer == data, "{over}: {len} bytes do not arrive");
    block.write(&data);
    block.read(&mut pageable);
    block.read(pinned.bytes());
    assert!(pageable == data && *pinned.bytes() == *data, "{len} bytes do not arrive from the driver");
    let (mut taker, mut giver) = (sockets_to(len), sockets_from(data.clone()));
    let mut received = vec![0; len];
    giver.write_all(&[1]).unwrap();
    giver.read_exact(&mut received).unwrap();
    assert!(received == data, "{len} bytes do not arrive over sockets");

    let pinned_data = &*pinned.bytes();
    let to_device = compare(
        len,
        over == "tcp",
        &settle,
        [&mut || upload(), &mut || block.write(&data), &mut || block.write(pinned_data), &mut || {
            taker.write_all(&data).unwrap();
            taker.read_exact(&mut [0]).unwrap();
        }],
    );
    let from_device = compare(
        len,
        over == "tcp",
        &settle,
        [
            &mut || buffer = download(std::mem::take(&mut buffer)),
            &mut || block.read(&mut pageable),
            &mut || block.read(pinned.bytes()),
            &mut || {
                giver.write_all(&[1]).unwrap();
                giver.read_exact(&mut received).unwrap();
            },
        ],
    );
    [("to", to_device), ("from", from_device)].map(|(direction, compared)| {
        let Compared { rates: [ours, pageable, pinned, sockets], ratio } = compared;
        let sockets = (over == "tcp").then_some(sockets);
        Line { over, direction, len, ours, pageable, pinned, sockets, ratio }
    })
}

/// Medians, in the order of the kinds of copies.
struct Compared {
    rates: [f64; 4],
    /// Ratio of the first kind to the slower one of the second and, with sockets, the fourth.
    ratio: f64,
}

/// Measures the kinds of copies in turns: ours, pageable, pinned, and sockets. Only copies over
/// sockets are compared with the last.
fn compare(len: usize, has_sockets: bool, settle: &dyn Fn(), mut ways: [&mut dyn FnMut(); 4]) -> Compared {
    let copies = (TURN_BYTES / len).clamp(1, MOST_COPIES);
    let rounds = if len <= SMALL { 21 } else { 11 };
    let used = if has_sockets { 4 } else { 3 };
    let (mut rates, mut ratios) = ([const { Vec::new() }; 4], Vec::new());
    // The first round only warms up buffers and connections.
    for round in 0..=rounds {
        let mut turn = [f64::INFINITY; 4];
        for (rate, way) in turn.iter_mut().zip(&mut ways).take(used) {
            let began = Instant::now();
            for _ in 0..copies {
                way();
            }
            *rate = (copies * len) as f64 / began.elapsed().as_secs_f64() / 1e9;
            // The copies of the next turn would wait for work that ours has queued on the device.
            settle();
        }
        if round > 0 {
            rates.iter_mut().zip(turn).for_each(|(rates, rate)| rates.push(rate));
            ratios.push(turn[0] / turn[1].min(turn[3]));
        }
    }
    Compared { rates: rates.map(median), ratio: median(ratios) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns a socket whose other end reads `len` bytes at a time, and sends one byte for each.
fn sockets_to(len: usize) -> TcpStream {
    sockets(move |mut other| {
        let mut buffer = vec![0; len];
        while other.read_exact(&mut buffer).is_ok() {
            other.write_all(&[1]).unwrap();
        }
    })
}

/// Returns a socket whose other end sends `data` for each byte that it reads.
fn sockets_from(data: Bytes) -> TcpStream {
    sockets(move |mut other| {
        while other.read_exact(&mut [0]).is_ok() {
            other.write_all(&data).unwrap();
        }
    })
}

/// Returns one end of a connection over loopback. A thread serves the other end until this one is
/// closed.
fn sockets(serve: impl FnOnce(TcpStream) + Send + 'static) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    for stream in [&stream, &other] {
        stream.set_nodelay(true).unwrap();
    }
    std::thread::spawn(move || serve(other));
    stream
}

/// The driver's functions, as a program without us would call them. Results are plain numbers: a
/// newer driver has codes that an `enum` would not.
struct Driver {
    allocate: unsafe extern "C" fn(*mut u64, usize) -> u32,
    free: unsafe extern "C" fn(u64) -> u32,
    allocate_pinned: unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> u32,
    free_pinned: unsafe extern "C" fn(*mut c_void) -> u32,
    copy_to_device: unsafe extern "C" fn(u64, *const c_void, usize) -> u32,
    copy_to_host: unsafe extern "C" fn(*mut c_void, u64, usize) -> u32,
}

impl Driver {
    /// Returns the driver that this process has opened.
    fn new() -> Self {
        // SAFETY: the driver is loaded already, and the types are those of its functions, which it
        // keeps under these names.
        unsafe {
            let library = sys::culib();
            Self {
                allocate: *library.get(b"cuMemAlloc_v2").unwrap(),
                free: *library.get(b"cuMemFree_v2").unwrap(),
                allocate_pinned: *library.get(b"cuMemHostAlloc").unwrap(),
                free_pinned: *library.get(b"cuMemFreeHost").unwrap(),
                copy_to_device: *library.get(b"cuMemcpyHtoD_v2").unwrap(),
                copy_to_host: *library.get(b"cuMemcpyDtoH_v2").unwrap(),
            }
        }
    }

    fn allocate(&self, len: usize) -> Block<'_> {
        let mut address = 0;
        // SAFETY: there is room for the address, and this thread has a context.
        succeed(unsafe { (self.allocate)(&raw mut address, len) });
        Block { driver: self, address, len }
    }

    fn pin(&self, len: usize) -> Pinned<'_> {
        let mut start = std::ptr::null_mut();
        // SAFETY: as above.
        succeed(unsafe { (self.allocate_pinned)(&raw mut start, len, 0) });
        // SAFETY: the driver gave that many bytes, which are ours; zeros, so that all of them have
        // a value.
        unsafe { start.write_bytes(0, len) };
        Pinned { driver: self, start, len }
    }
}

/// Memory of the device.
struct Block<'a> {
    driver: &'a Driver,
    address: u64,
    len: usize,
}

impl Block<'_> {
    fn write(&self, from: &[u8]) {
        assert_eq!(from.len(), self.len);
        // SAFETY: both have as many bytes; the driver has read the source when it returns.
        succeed(unsafe { (self.driver.copy_to_device)(self.address, from.as_ptr().cast(), self.len) });
    }

    fn read(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        // SAFETY: both have as many bytes; the driver has written them when it returns.
        succeed(unsafe { (self.driver.copy_to_host)(to.as_mut_ptr().cast(), self.address, self.len) });
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // SAFETY: from `allocate`, and nobody else has it.
        succeed(unsafe { (self.driver.free)(self.address) });
    }
}

/// Host memory that the device reaches by itself.
struct Pinned<'a> {
    driver: &'a Driver,
    start: *mut c_void,
    len: usize,
}

impl Pinned<'_> {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: as many bytes as were allocated, all of which have a value, and `&mut` is for
        // this alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: from `pin`, and nobody has the bytes any more.
        succeed(unsafe { (self.driver.free_pinned)(self.start) });
    }
}

fn succeed(code: u32) {
    assert_eq!(code, 0, "the driver has failed");
}
