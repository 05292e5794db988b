//! Property: whatever a client sends without reading the answers, its server holds no more memory
//! than the limits say, and a constant.
//!
//! The kinds of frames, the operations and the built-in functions come from the code. One that is
//! new fails the test until it has a recipe. The allocator counts, and this is the only test of the
//! binary, so that nothing else is counted. What a device holds counts, too: it is host memory
//! here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod allocator;
mod peer;
mod recipes;

use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rpc_core::{Devices, Operation, Registry};
use rpc_server::builtins::MAX_READ_BYTES;
use rpc_server::config::{ByteSize, Isolate, ServeConfig};
use rpc_server::{RpcServer, builtins};
use rpc_tests::accelerator::Accelerator;

use allocator::{held_bytes, peak_bytes, reset_peak};
use peer::Peer;
use recipes::Flood;

const MIB: u64 = 1 << 20;

pub(crate) const MAX_MEMORY: u64 = 4 * MIB;
const MAX_QUEUED: u64 = MIB;
const MAX_TOTAL_QUEUED: u64 = 4 * MIB;
const MAX_FRAME: u64 = 256 << 10;
const MAX_HANDLES: u64 = 1024;
const MAX_THREADS: u64 = 2;
const MAX_REQUESTS: u32 = 64;

/// Most bytes that the limits above admit for one session.
const QUOTA: u64 = MAX_MEMORY
    // Arguments, beside what counts for all sessions, and staging buffers.
    + 2 * MAX_QUEUED
    + MAX_TOTAL_QUEUED
    // Eight frames of each session do not count.
    + 8 * MAX_FRAME
    // A handle with a small object.
    + MAX_HANDLES * 1024
    // One piece of a file for each thread that reads one.
    + MAX_THREADS * MAX_READ_BYTES;

/// Memory that a session may take beside its quota: buffers of the connection and of the frames in
/// progress, half a MiB of staged output, and the growth of lists.
const CONSTANT: u64 = 4 * MIB;

/// Bytes that a flood of large frames goes on for: more than would be allowed to stay.
const FLOOD: u64 = 48 * MIB;

/// Number of frames that a flood goes on for: as many small ones would be too much to stay as well,
/// since each takes several hundred bytes if it is kept as a request.
const FRAMES: u64 = 100_000;

/// Time to wait for a request that the server may never begin.
const MAYBE: Duration = Duration::from_millis(50);

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

/// A server with small limits, whose function `mark` tells that it has been called.
struct Fixture {
    folder: tempfile::TempDir,
    marks: Receiver<()>,
    /// Bytes that the process holds without sessions.
    idle: usize,
    findings: Vec<String>,
}

impl Fixture {
    async fn start() -> (Self, rpc_server::Running, Registry) {
        let folder = tempfile::tempdir().unwrap();
        let config = ServeConfig {
            listen: vec![format!("unix:{}", folder.path().join("socket").display()).parse().unwrap()],
            workdir: folder.path().join("work"),
            isolate: Isolate::None,
            max_memory: ByteSize(MAX_MEMORY),
            max_queued: ByteSize(MAX_QUEUED),
            max_total_queued: ByteSize(MAX_TOTAL_QUEUED),
            max_message: ByteSize(256 << 10),
            max_frame: ByteSize(MAX_FRAME),
            max_handles: MAX_HANDLES as usize,
            max_threads: MAX_THREADS as usize,
            max_requests: MAX_REQUESTS,
            ..ServeConfig::default()
        };
        let registry = Registry::new();
        let (marked, marks) = mpsc::channel();
        let marked = Mutex::new(marked);
        registry.add_inline("mark", move || _ = marked.lock().unwrap().send(()));
        let devices = Devices::new().with(std::sync::Arc::new(Accelerator::default()));
        let server = RpcServer::new(registry.clone()).devices(devices).config(config);
        let running = server.start().await.unwrap();
        (Self { folder, marks, idle: 0, findings: Vec::new() }, running, registry)
    }

    fn socket(&self) -> std::path::PathBuf {
        Path::new(self.folder.path()).join("socket")
    }

    /// Floods the server: first within the client's credit, then beyond it. Records what it held.
    fn flood(&mut self, name: &str, make: impl FnOnce(&mut Peer) -> Option<Flood>) {
        let mut peer = Peer::connect(&self.socket());
        let mark = peer.function("mark");
        let Some(mut flood) = make(&mut peer) else { return };
        peer.begin_flood();
        while self.marks.try_recv().is_ok() {}
        let before = reset_peak();
        let mut takes_more = true;
        for number in 1..u64::from(MAX_REQUESTS) {
            let frame = flood(&mut peer, number);
            takes_more = takes_more && peer.write(&frame);
        }
        // Runs behind the requests on its lane, if there is room for their replies.
        let frame = peer.request(1, Operation::Call { function: mark, args: Vec::new() });
        if takes_more && peer.write(&frame) {
            let _ = self.marks.recv_timeout(MAYBE);
        }
        let mut sent = 0;
        let mut number = u64::from(MAX_REQUESTS);
        let mut batch = Vec::new();
        while takes_more && sent < FLOOD && number < FRAMES {
            batch.clear();
            while batch.len() < 64 << 10 {
                batch.extend(flood(&mut peer, number));
                number += 1;
            }
            takes_more = peer.write(&batch);
            sent += batch.len() as u64;
        }
        let held = peak_bytes().saturating_sub(before) as u64;
        println!("{name}: {:.1} MiB held, {:.1} MiB sent", held as f64 / MIB as f64, sent as f64 / MIB as f64);
        if held > QUOTA + CONSTANT {
            self.findings.push(format!("{name}: {held} bytes were held"));
        }
        drop((peer, flood));
        self.settle(name);
    }

    /// Waits until the memory of the last session is free again.
    fn settle(&mut self, name: &str) {
        let start = Instant::now();
        while held_bytes() > self.idle + MIB as usize {
            if start.elapsed() > LIMIT {
                self.findings.push(format!("{name}: {} bytes stay", held_bytes() - self.idle));
                break;
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_client_that_reads_nothing_makes_its_server_hold_no_more_than_the_limits_say() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut fixture, running, registry) = runtime.block_on(Fixture::start());
    // The first session starts threads and fills caches.
    drop(Peer::connect(&fixture.socket()));
    fixture.idle = held_bytes();

    let kinds = recipes::frame_kinds();
    assert!(kinds.contains(&rpc_core::proto::Kind::Hello) && kinds.contains(&rpc_core::proto::Kind::Close));
    for kind in kinds {
        fixture.flood(&format!("{kind:?} frames"), |_| Some(recipes::of_frames(kind)));
    }
    let operations = recipes::operations();
    assert!(operations.starts_with(&[1, 2, 3]), "{operations:?}");
    for number in operations {
        fixture.flood(&format!("operation {number}"), |peer| Some(recipes::of_operation(number, peer)));
    }
    fixture.flood("reads of a device", |peer| Some(recipes::of_device_reads(peer)));
    builtins::register(&registry);
    for (name, _) in registry.functions() {
        if name != "mark" {
            fixture.flood(&name, |peer| recipes::of_function(&name, peer));
        }
    }
    assert!(fixture.findings.is_empty(), "the limits admit {}:\n{}", QUOTA + CONSTANT, fixture.findings.join("\n"));
    running.stop();
}
