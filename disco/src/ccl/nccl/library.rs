//! The NCCL library: found and loaded at run time, with its version, functions and error texts.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::RpcError;
use serde::{Deserialize, Serialize};

use super::error::code;
use super::symbols::{Comm, Functions, OLDEST};
use super::{Attempt, LoadError, NcclError, Version, search_path};

/// Length of a [`UniqueId`] in bytes.
const ID_LEN: usize = 128;

/// Id by which the ranks of a group find each other. One rank [creates it](Library::unique_id) and
/// hands it to the others by other means. It contains the address at which that rank listens.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UniqueId {
    #[serde(with = "serde_bytes")]
    bytes: [u8; ID_LEN],
}

impl UniqueId {
    pub(crate) const LEN: usize = ID_LEN;

    pub(crate) fn from_bytes(bytes: [u8; ID_LEN]) -> Self {
        Self { bytes }
    }

    pub(crate) fn to_bytes(self) -> [u8; ID_LEN] {
        self.bytes
    }
}

impl fmt::Debug for UniqueId {
    /// Omits the bytes, because a process that has them can join the group as one of its ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

/// NCCL, loaded. It is never unloaded, because NCCL leaves threads and exit handlers behind.
pub struct Library {
    path: PathBuf,
    version: Version,
    functions: Functions,
}

impl Library {
    /// Loads the library that [`LIBRARY_VARIABLE`](super::LIBRARY_VARIABLE) (`DISCO_NCCL_LIBRARY`)
    /// names; or else the first of `libnccl.so.2` and `libnccl.so` where the system looks for
    /// libraries, or that of the Python environment in `VIRTUAL_ENV` or `CONDA_PREFIX`.
    ///
    /// Blocks while files are read, and does not use the devices. The library reads its settings
    /// (`NCCL_…`) from the environment.
    ///
    /// # Errors
    ///
    /// No library could be loaded: lists every path that was tried, with the system's message.
    pub fn load() -> Result<Arc<Self>, LoadError> {
        let mut attempts = Vec::new();
        for place in search_path::all().candidates() {
            match Self::try_open(place) {
                Ok(library) => return Ok(library),
                Err(attempt) => attempts.push(attempt),
            }
        }
        Err(LoadError { attempts })
    }

    /// Loads the library at `path`. For a name without a folder, the system searches its own
    /// folders.
    ///
    /// The file has to be trusted, because loading a library runs its code.
    ///
    /// # Errors
    ///
    /// The error of the system; the library is not NCCL, or older than 2.14.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, LoadError> {
        Self::try_open(path.as_ref()).map_err(|attempt| LoadError { attempts: vec![attempt] })
    }

    fn try_open(path: &Path) -> Result<Arc<Self>, Attempt> {
        let failed = |reason: String| Attempt { library: path.to_owned(), reason };
        // SAFETY: code of the library runs, which the user who named it trusts. The code of NCCL
        // may run on any thread.
        let opened = unsafe { rpc_dylib::load(path) };
        let opened = ManuallyDrop::new(opened.map_err(failed)?);
        // SAFETY: `ManuallyDrop` keeps it loaded, and NCCL has had this function with this type
        // from its beginning.
        let get_version = unsafe { opened.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion") };
        let get_version = get_version.map_err(|_| failed("it has no ncclGetVersion".to_owned()))?;
        let mut number = 0;
        // SAFETY: the function writes one number to the given address.
        let result = unsafe { get_version(&raw mut number) };
        if result != code::SUCCESS {
            return Err(failed(format!("ncclGetVersion fails with {result}")));
        }
        let version = Version::from_code(number);
        if version < OLDEST {
            return Err(failed(format!("it is version {version}, and {}.{} is needed", OLDEST.major, OLDEST.minor)));
        }
        // SAFETY: a library with `ncclGetVersion` has the interface of NCCL, and it stays loaded.
        let functions = unsafe { Functions::of(&opened) };
        let functions = functions.map_err(|name| failed(format!("it is version {version} and has no {name}")))?;
        tracing::debug!(path = %path.display(), %version, "loaded a library of collectives");
        Ok(Arc::new(Self { path: path.to_owned(), version, functions }))
    }

    /// Creates the id by which the ranks of one group find each other. One rank of the group calls
    /// it, and listens from then on for the others on the network that `NCCL_SOCKET_IFNAME`
    /// selects. Needs no device.
    ///
    /// # Errors
    ///
    /// The library finds no network interface, for example.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId { bytes: [0; ID_LEN] };
        // SAFETY: the function writes 128 bytes to the given address.
        let result = unsafe { (self.functions.get_unique_id)(&raw mut id) };
        if result == code::SUCCESS { Ok(id) } else { Err(self.error("ncclGetUniqueId", result, std::ptr::null_mut())) }
    }

    /// Returns the version of the library.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the path or the name that it was loaded by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the library's text for a result code. Accepts any number.
    #[must_use]
    pub fn error_string(&self, code: c_int) -> String {
        // SAFETY: the function accepts any number, and returns a static text.
        unsafe { text((self.functions.get_error_string)(code)) }
    }

    /// Returns the library's description of the last error in this process; empty if it has none.
    #[must_use]
    pub fn last_error(&self) -> String {
        self.last_error_of(std::ptr::null_mut())
    }

    /// Returns the description of the last error with a communicator, or with any if `comm` is
    /// null. A communicator must be one of this library that still exists.
    fn last_error_of(&self, comm: Comm) -> String {
        // SAFETY: the function accepts a communicator of this library, or null.
        unsafe { text((self.functions.get_last_error)(comm)) }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the error that `code` stands for.
    pub(super) fn error(&self, call: &'static str, code: c_int, comm: Comm) -> NcclError {
        NcclError { call, code, text: self.error_string(code), last_error: self.last_error_of(comm) }
    }

    /// Checks that the library has at least the version that `what` needs.
    pub(super) fn needs(&self, what: fmt::Arguments<'_>, major: u32, minor: u32) -> Result<(), RpcError> {
        if self.version >= Version::new(major, minor, 0) {
            return Ok(());
        }
        Err(RpcError::unsupported(format!("{what} needs NCCL {major}.{minor}, found {self}")))
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.path.display())
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, version, .. } = self;
        f.debug_struct("Library").field("path", path).field("version", version).finish()
    }
}

/// # Safety
///
/// `start` is null, or text that ends with a zero and does not change until this returns.
unsafe fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().trim().to_owned()
}
