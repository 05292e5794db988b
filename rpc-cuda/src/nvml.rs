//! NVIDIA's management library (NVML): the present state of GPUs, without a context of CUDA.
//!
//! The library is loaded at the first question, on a thread of its own, which asks it everything:
//! a library that does not answer holds up nobody for longer than 3 seconds. It does not initialise
//! CUDA, so a process that must not use GPUs may ask. GPUs are named by their place
//! on the PCI bus, since NVML counts all GPUs of the machine and CUDA those that
//! `CUDA_VISIBLE_DEVICES` leaves, in another order.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread;
use std::time::Duration;

use libloading::Library;
use rpc_core::device::DeviceState;
use rpc_dylib::LibrarySearch;

/// Environment variable with the path of the only library to load.
const VARIABLE: &str = "RPC_CUDA_NVML_LIBRARY";

/// Longest time for an answer. On machines with many GPUs that no process uses, the first one takes
/// seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Maximum number of questions that wait for a library that does not answer.
const MAX_QUESTIONS: usize = 16;

/// Highest clock that is believed, in MHz.
const MAX_CLOCK_MHZ: u32 = 100_000;

/// Returns the state of the GPU at this place on the PCI bus, such as `00000000:3b:00.0`. Blocks
/// for some milliseconds, at most for 3 seconds.
pub fn gpu_state(pci_bus_id: &str) -> DeviceState {
    let questions = match asker() {
        Ok(questions) => questions,
        Err(reason) => return DeviceState::unknown(reason),
    };
    let (sender, answer) = mpsc::sync_channel(1);
    match questions.try_send(Question { pci_bus_id: pci_bus_id.to_owned(), answer: sender }) {
        Ok(()) => answer.recv_timeout(ANSWER_LIMIT).unwrap_or_else(|_| silent()),
        Err(TrySendError::Full(_)) => silent(),
        Err(TrySendError::Disconnected(_)) => DeviceState::unknown("the thread that asks NVML has ended"),
    }
}

fn silent() -> DeviceState {
    DeviceState::unknown(format!("NVIDIA's management library has not answered within {ANSWER_LIMIT:?}"))
}

struct Question {
    pci_bus_id: String,
    answer: SyncSender<DeviceState>,
}

/// Returns the queue of the thread that asks the library. The thread starts at the first call.
fn asker() -> Result<&'static SyncSender<Question>, &'static str> {
    static ASKER: OnceLock<Result<SyncSender<Question>, String>> = OnceLock::new();
    let start = || {
        let (sender, questions) = mpsc::sync_channel(MAX_QUESTIONS);
        let started = thread::Builder::new().name("rpc-nvml".into()).spawn(move || answer_all(&questions));
        started.map(|_| sender).map_err(|error| format!("cannot start a thread to ask NVML: {error}"))
    };
    ASKER.get_or_init(start).as_ref().map_err(String::as_str)
}

fn answer_all(questions: &Receiver<Question>) {
    let library = Nvml::open();
    for Question { pci_bus_id, answer } in questions {
        let state = match &library {
            Ok(library) => library.state(&pci_bus_id),
            Err(reason) => DeviceState::unknown(reason),
        };
        // An answer that is late has no receiver any more.
        let _ = answer.try_send(state);
    }
}

/// A GPU, as the library names it.
type RawGpu = *mut c_void;

/// `nvmlMemory_t`: sizes in bytes.
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: u64,
    _free: u64,
    used: u64,
}

/// `nvmlUtilization_t`: percent of the last sample period.
#[repr(C)]
#[derive(Default)]
struct RawUtilization {
    gpu: c_uint,
    _memory: c_uint,
}

/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;

/// `NVML_ERROR_NOT_SUPPORTED`: this GPU does not tell this.
const NOT_SUPPORTED: c_int = 3;

/// `NVML_CLOCK_SM`.
const CLOCK_SM: c_uint = 1;

/// The library, which is initialised and never unloaded.
struct Nvml {
    gpu_by_pci_bus_id: unsafe extern "C" fn(*const c_char, *mut RawGpu) -> c_int,
    clock: unsafe extern "C" fn(RawGpu, c_uint, *mut c_uint) -> c_int,
    memory: unsafe extern "C" fn(RawGpu, *mut RawMemory) -> c_int,
    utilization: unsafe extern "C" fn(RawGpu, *mut RawUtilization) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    _library: Library,
}

impl Nvml {
    /// Loads and initialises the library. An error is the reason for which there is none.
    fn open() -> Result<Self, String> {
        let search = LibrarySearch::new(VARIABLE).system(["libnvidia-ml.so.1"]);
        // SAFETY: loading NVIDIA's library runs its initialisers, which have no special
        // requirements.
        let library = search.first(|path| unsafe { rpc_dylib::load(path) }).map_err(|failures| failures.to_string())?;
        // SAFETY: the type is that of the function in NVIDIA's header.
        let init = unsafe { find::<unsafe extern "C" fn() -> c_int>(&library, "nvmlInit_v2") }?;
        // SAFETY: as above, for each of the functions.
        let nvml = unsafe {
            Self {
                gpu_by_pci_bus_id: find(&library, "nvmlDeviceGetHandleByPciBusId_v2")?,
                clock: find(&library, "nvmlDeviceGetClockInfo")?,
                memory: find(&library, "nvmlDeviceGetMemoryInfo")?,
                utilization: find(&library, "nvmlDeviceGetUtilizationRates")?,
                error_string: find(&library, "nvmlErrorString")?,
                _library: library,
            }
        };
        // SAFETY: it takes no arguments, and may be called at any time.
        nvml.check("nvmlInit", unsafe { init() })?;
        Ok(nvml)
    }

    fn state(&self, pci_bus_id: &str) -> DeviceState {
        let Ok(id) = CString::new(pci_bus_id) else { return DeviceState::unknown("the PCI bus id has a zero byte") };
        let mut gpu: RawGpu = ptr::null_mut();
        // SAFETY: the text ends with a zero, and there is room for the handle.
        let found = unsafe { (self.gpu_by_pci_bus_id)(id.as_ptr(), &raw mut gpu) };
        if let Err(reason) = self.check("nvmlDeviceGetHandleByPciBusId", found) {
            return DeviceState::unknown(format!("{reason} ({pci_bus_id})"));
        }
        let mut state = DeviceState::default();
        let mut reasons = Vec::new();

        let mut clock = 0;
        // SAFETY: the library has given the handle, and there is room for the number.
        match self.told("nvmlDeviceGetClockInfo", unsafe { (self.clock)(gpu, CLOCK_SM, &raw mut clock) }) {
            Ok(true) if clock <= MAX_CLOCK_MHZ => state.clock_mhz = Some(clock),
            Ok(true) => reasons.push(format!("NVML tells of a clock of {clock} MHz")),
            Ok(false) => {}
            Err(reason) => reasons.push(reason),
        }
        let mut memory = RawMemory::default();
        // SAFETY: as above.
        match self.told("nvmlDeviceGetMemoryInfo", unsafe { (self.memory)(gpu, &raw mut memory) }) {
            Ok(true) if memory.used <= memory.total => {
                (state.used_memory, state.total_memory) = (Some(memory.used), Some(memory.total));
            }
            Ok(true) => {
                reasons.push(format!("NVML tells of {} bytes of memory in use, of {}", memory.used, memory.total));
            }
            Ok(false) => {}
            Err(reason) => reasons.push(reason),
        }
        let mut utilization = RawUtilization::default();
        // SAFETY: as above.
        match self.told("nvmlDeviceGetUtilizationRates", unsafe { (self.utilization)(gpu, &raw mut utilization) }) {
            Ok(true) => match u8::try_from(utilization.gpu).ok().filter(|percent| *percent <= 100) {
                Some(percent) => state.utilization_percent = Some(percent),
                None => reasons.push(format!("NVML tells of a utilization of {} %", utilization.gpu)),
            },
            Ok(false) => {}
            Err(reason) => reasons.push(reason),
        }
        if !reasons.is_empty() {
            state.unknown_because = Some(reasons.join("; "));
        }
        state
    }

    /// Returns true if the library has told a value, and false if the GPU has none.
    fn told(&self, function: &str, code: c_int) -> Result<bool, String> {
        if code == NOT_SUPPORTED { Ok(false) } else { self.check(function, code).map(|()| true) }
    }

    fn check(&self, function: &str, code: c_int) -> Result<(), String> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: it takes any number, and returns a constant text that ends with a zero.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return Err(format!("{function} failed with code {code}"));
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let text: String = text.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect();
        Err(format!("{function}: {text}"))
    }
}

/// Maximum number of characters of a reason of the library's.
const MAX_REASON: usize = 200;

/// Returns a function of the library.
///
/// # Safety
///
/// `F` is the type of the function.
unsafe fn find<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| format!("libnvidia-ml lacks {name}: {}", rpc_dylib::reason(&error)))
}
