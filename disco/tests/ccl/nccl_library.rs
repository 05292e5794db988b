//! The stand-in for NCCL: compiled for each test, so that none sees what another does to it.

use std::ffi::{c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use disco::ccl::nccl::{DeviceStream, Library, Mark, NcclCcl, Options};
use disco::ccl::{Ccl, Rank, host};
use rpc_core::{Device, RpcError};

use crate::launch::{self, Launch};

/// One loaded copy of `fake_nccl.c`.
pub(crate) struct Fake {
    pub(crate) library: Arc<Library>,
    symbols: libloading::Library,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// Builds the newest version.
    pub(crate) fn new() -> Option<Self> {
        Self::version(23_203)
    }

    /// Builds a version by its code; `None`, and a line on why, where there is no compiler.
    pub(crate) fn version(version: u32) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = compile(folder.path(), "libnccl.so.2", &[&format!("-DVERSION={version}")])?;
        let library = Library::open(&path).expect("a library");
        // SAFETY: our own code, which does nothing when it is loaded.
        let symbols = unsafe { libloading::Library::new(&path) }.expect("the same library");
        Some(Self { library, symbols, _folder: folder })
    }

    /// Calls `void name(int, int)`.
    pub(crate) fn steer(&self, name: &str, first: c_int, second: c_int) {
        // SAFETY: these functions have that type.
        unsafe {
            let call = self.symbols.get::<unsafe extern "C" fn(c_int, c_int)>(name.as_bytes()).expect("a function");
            call(first, second);
        }
    }

    /// Calls `int name(void)`.
    pub(crate) fn ask(&self, name: &str) -> c_int {
        // SAFETY: these functions have that type.
        unsafe { self.symbols.get::<unsafe extern "C" fn() -> c_int>(name.as_bytes()).expect("a function")() }
    }

    /// Makes a stream on the memory of this process, which calls itself `device`.
    pub(crate) fn stream(&self, device: Device) -> Arc<FakeStream> {
        // SAFETY: the functions have these types.
        let (make, query, hold, mark, reached, aborts) = unsafe {
            (
                *self.symbols.get::<unsafe extern "C" fn() -> *mut c_void>(b"fake_stream").expect("a function"),
                *self.symbols.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"fake_query").expect("a function"),
                *self.symbols.get::<unsafe extern "C" fn(*mut c_void, c_int)>(b"fake_hold").expect("a function"),
                *self.symbols.get::<unsafe extern "C" fn(*mut c_void) -> c_long>(b"fake_mark").expect("a function"),
                *self.symbols.get::<Reached>(b"fake_reached").expect("a function"),
                *self.symbols.get::<unsafe extern "C" fn() -> c_int>(b"fake_aborts").expect("a function"),
            )
        };
        // SAFETY: it takes nothing.
        let raw = unsafe { make() };
        Arc::new(FakeStream {
            raw,
            device,
            query,
            hold,
            mark,
            reached,
            scratch: Mutex::default(),
            fails: Arc::default(),
            panics: Arc::default(),
            marks: AtomicUsize::new(0),
            stands: Arc::new(DriverLock { held_for: Mutex::default(), waits: AtomicUsize::new(0), aborts }),
            capability: Mutex::default(),
            rooms: AtomicUsize::new(0),
        })
    }

    /// Checks the invariant after every test: no rule of NCCL was broken, and no communicator is
    /// left.
    pub(crate) fn assert_tidy(&self) {
        assert_eq!(self.ask("fake_violations"), 0);
        assert_eq!(self.ask("fake_live"), 0);
    }
}

/// Compiles the stand-in as `name`; `None`, and a word on why, where there is no compiler.
pub(crate) fn compile(folder: &Path, name: &str, flags: &[&str]) -> Option<PathBuf> {
    let (source, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/fake_nccl.c"), folder.join(name));
    let usual =
        ["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-fwrapv", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"];
    match Command::new("cc").args(usual).args(flags).arg("-o").arg(&to).arg(source).output() {
        Ok(output) if output.status.success() => Some(to),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            println!("SKIPPED: no C compiler: {error}");
            None
        }
    }
}

/// A stream of the stand-in.
pub(crate) struct FakeStream {
    raw: *mut c_void,
    device: Device,
    query: unsafe extern "C" fn(*mut c_void) -> c_int,
    hold: unsafe extern "C" fn(*mut c_void, c_int),
    mark: unsafe extern "C" fn(*mut c_void) -> c_long,
    reached: Reached,
    /// The last is the largest. None goes, because something may be under way in it.
    scratch: Mutex<Vec<Vec<u64>>>,
    fails: Arc<Mutex<Option<RpcError>>>,
    panics: Arc<AtomicBool>,
    /// Number of marks that have been made.
    marks: AtomicUsize,
    stands: Arc<DriverLock>,
    capability: Mutex<Option<(u32, u32)>>,
    /// Number of requests to return idle memory.
    rooms: AtomicUsize,
}

type Reached = unsafe extern "C" fn(*mut c_void, c_long) -> c_int;

/// A point in the order of a stream.
struct FakeMark {
    raw: *mut c_void,
    number: c_long,
    reached: Reached,
    fails: Arc<Mutex<Option<RpcError>>>,
    panics: Arc<AtomicBool>,
    stands: Arc<DriverLock>,
}

/// Kind of call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriverCall {
    /// Choice of the device as the current one of a thread.
    MakeCurrent,
    /// Query of a mark.
    MarkQuery,
    /// Query of the stream.
    StreamQuery,
    /// Request for scratch memory.
    Scratch,
    /// Mark with that number on its stream, from 0.
    Mark(usize),
}

/// A lock of the driver, which calls of some kinds wait for while it is held: by a thread that
/// waits for the device, and so until a collective that hangs is aborted.
pub(crate) struct DriverLock {
    held_for: Mutex<Vec<DriverCall>>,
    /// Number of calls that have come while it was held.
    pub(crate) waits: AtomicUsize,
    aborts: unsafe extern "C" fn() -> c_int,
}

impl DriverLock {
    /// Holds the lock from now on for calls of that kind, too.
    pub(crate) fn hold(&self, call: DriverCall) {
        self.held_for.lock().expect("no panic").push(call);
    }

    fn wait(&self, call: DriverCall) {
        // SAFETY: the function has that type.
        let is_busy = || self.held_for.lock().expect("no panic").contains(&call) && unsafe { (self.aborts)() } == 0;
        if is_busy() {
            self.waits.fetch_add(1, Ordering::SeqCst);
            let began = Instant::now();
            // The limit is for a test that fails.
            while is_busy() && began.elapsed() < Duration::from_secs(90) {
                std::thread::yield_now();
            }
        }
    }
}

// SAFETY: the stand-in takes a stream from any thread, under a lock of its own.
unsafe impl Send for FakeMark {}

// SAFETY: as of the stream.
unsafe impl Mark for FakeMark {
    fn is_reached(&self) -> Result<bool, RpcError> {
        if let Some(error) = &*self.fails.lock().expect("no panic") {
            return Err(error.clone());
        }
        self.stands.wait(DriverCall::MarkQuery);
        // SAFETY: streams are never freed.
        let is_reached = unsafe { (self.reached)(self.raw, self.number) } != 0;
        assert!(is_reached || !self.panics.swap(false, Ordering::SeqCst), "as the test wants it");
        Ok(is_reached)
    }
}

// SAFETY: the stand-in takes a stream from any thread, under a lock of its own.
unsafe impl Send for FakeStream {}
// SAFETY: as above.
unsafe impl Sync for FakeStream {}

impl FakeStream {
    /// Returns true if the stream has work that does not end.
    pub(crate) fn hold(&self, held: bool) {
        // SAFETY: streams are never freed.
        unsafe { (self.hold)(self.raw, c_int::from(held)) };
    }

    /// Makes the next question that finds the stream at work panic.
    pub(crate) fn panic_in_next_wait(&self) {
        self.panics.store(true, Ordering::SeqCst);
    }

    /// Returns the lock of the driver, which calls wait for.
    pub(crate) fn driver_lock(&self) -> &DriverLock {
        &self.stands
    }

    /// Lets the device say that it can do as much.
    pub(crate) fn pretend(&self, major: u32, minor: u32) {
        *self.capability.lock().expect("no panic") = Some((major, minor));
    }

    /// Returns the number of requests to return idle memory.
    pub(crate) fn rooms(&self) -> usize {
        self.rooms.load(Ordering::SeqCst)
    }

    /// Makes all requests to the stream fail from now on.
    pub(crate) fn fail(&self, error: RpcError) {
        *self.fails.lock().expect("no panic") = Some(error);
    }
}

// SAFETY: the stand-in knows how far its streams are. Tests that look at scratch memory wait for
// it.
unsafe impl DeviceStream for FakeStream {
    fn device(&self) -> Device {
        self.device
    }

    fn raw(&self) -> *mut c_void {
        self.raw
    }

    fn make_current(&self) -> Result<(), RpcError> {
        self.stands.wait(DriverCall::MakeCurrent);
        Ok(())
    }

    fn is_done(&self) -> Result<bool, RpcError> {
        if let Some(error) = &*self.fails.lock().expect("no panic") {
            return Err(error.clone());
        }
        self.stands.wait(DriverCall::StreamQuery);
        // SAFETY: streams are never freed.
        let is_done = unsafe { (self.query)(self.raw) } != 0;
        assert!(is_done || !self.panics.swap(false, Ordering::SeqCst), "as the test wants it");
        Ok(is_done)
    }

    fn mark(&self) -> Result<Box<dyn Mark>, RpcError> {
        self.stands.wait(DriverCall::Mark(self.marks.fetch_add(1, Ordering::SeqCst)));
        // SAFETY: streams are never freed.
        let number = unsafe { (self.mark)(self.raw) };
        let (fails, panics, stands) = (Arc::clone(&self.fails), Arc::clone(&self.panics), Arc::clone(&self.stands));
        Ok(Box::new(FakeMark { raw: self.raw, number, reached: self.reached, fails, panics, stands }))
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        *self.capability.lock().expect("no panic")
    }

    fn make_room(&self) -> Result<(), RpcError> {
        self.rooms.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn scratch(&self, bytes: usize) -> Result<*mut c_void, RpcError> {
        self.stands.wait(DriverCall::Scratch);
        let mut scratch = self.scratch.lock().expect("no panic");
        if scratch.last().is_none_or(|last| last.len() * 8 < bytes) {
            scratch.push(vec![0; bytes.div_ceil(8)]);
        }
        Ok(scratch.last_mut().expect("one").as_mut_ptr().cast())
    }
}

/// A rank, with what a test steers it by.
pub(crate) struct Member {
    pub(crate) ccl: NcclCcl,
    pub(crate) stream: Arc<FakeStream>,
}

/// Runs `program` on `size` ranks that are threads; the control communicators are over whatever
/// `launch` has between ranks.
pub(crate) fn on_ranks<T: Send>(
    fake: &Fake,
    launch: Launch,
    size: usize,
    options: &Options,
    program: impl Fn(Member) -> T + Sync,
) -> Vec<T> {
    on_ranks_of(fake, launch::group(launch, size, &launch::long_limits()), options, |member| {
        program(member.expect("to join"))
    })
}

/// Runs ranks on devices of their own, whose memory collectives are left to. Buffers are still in
/// that of this process.
pub(crate) fn on_devices<T: Send>(
    fake: &Fake,
    size: usize,
    options: &Options,
    program: impl Fn(Member) -> T + Sync,
) -> Vec<T> {
    let controls = launch::group(Launch::Segment, size, &launch::long_limits());
    run_ranks(fake, controls, options, Device::cuda, |member| program(member.expect("to join")))
}

/// Runs ranks with these control communicators, whether they can join or not.
pub(crate) fn on_ranks_of<T: Send>(
    fake: &Fake,
    controls: Vec<Box<dyn Ccl>>,
    options: &Options,
    program: impl Fn(Result<Member, RpcError>) -> T + Sync,
) -> Vec<T> {
    run_ranks(fake, controls, options, |_| Device::cpu(), program)
}

fn run_ranks<T: Send>(
    fake: &Fake,
    controls: Vec<Box<dyn Ccl>>,
    options: &Options,
    device: fn(i32) -> Device,
    program: impl Fn(Result<Member, RpcError>) -> T + Sync,
) -> Vec<T> {
    let (program, size, id) = (&program, controls.len(), fake.library.unique_id().expect("an id"));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(controls)
            .map(|(rank, control)| {
                scope.spawn(move || {
                    let stream = fake.stream(device(rank));
                    let (library, on) = (Arc::clone(&fake.library), Arc::clone(&stream));
                    let ccl = NcclCcl::new(library, id, Rank(rank as u32), size, control, on, options.clone());
                    program(ccl.map(|ccl| Member { ccl, stream }))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Options whose limits do not run out, and which take a hanging abort for a failure of the test.
pub(crate) fn long_limits() -> Options {
    let mut options = Options::default();
    let long = Duration::from_secs(120);
    options.join_timeout = long;
    options.stall_timeout = long;
    options.drain_timeout = Some(long);
    options.abort_timeout = long;
    options.close_timeout = long;
    options.on_stuck = Arc::new(|breakdown| panic!("stuck: {breakdown}"));
    options
}

/// Returns the control communicators of groups within a group, by world rank.
pub(crate) fn controls_of_groups(sizes: &[usize], options: &host::Options) -> Vec<Vec<Box<dyn Ccl>>> {
    sizes.iter().map(|size| host::threads(*size, options).expect("a group")).collect()
}
