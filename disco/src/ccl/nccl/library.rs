//! Finds, opens and describes a library of collectives for GPUs.

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

/// The bytes of a [`UniqueId`].
const ID_LEN: usize = 128;

/// Id by which the ranks of a group find each other. One rank [makes it](Library::unique_id) and
/// the others get it in some other way; it holds the address at which that rank listens.
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
    /// Leaves the bytes out: a process that has them can take a rank's place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").finish_non_exhaustive()
    }
}

/// A loaded library. It is never unloaded: NCCL leaves threads and exit handlers behind.
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
    /// It reads files and blocks for that long, and leaves the devices alone. The library reads its
    /// own settings, `NCCL_…`, from the environment.
    ///
    /// # Errors
    ///
    /// Every path that was tried, and the system's message.
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

    /// Loads the library at `path`; a name without a folder is looked for by the system.
    ///
    /// Only trusted files: loading a library runs code of it.
    ///
    /// # Errors
    ///
    /// The error of the system; the library is not NCCL, or older than 2.14.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>, LoadError> {
        Self::try_open(path.as_ref()).map_err(|attempt| LoadError { attempts: vec![attempt] })
    }

    fn try_open(path: &Path) -> Result<Arc<Self>, Attempt> {
        let failed = |reason: String| Attempt { library: path.to_owned(), reason };
        // SAFETY: code of the library runs, which the user who named it trusts. NCCL's may run on
        // any thread.
        let opened = unsafe { rpc_dylib::load(path) };
        let opened = ManuallyDrop::new(opened.map_err(failed)?);
        // SAFETY: `ManuallyDrop` keeps it loaded, and NCCL has had this function with this type
        // from its beginning.
        let get_version = unsafe { opened.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion") };
        let get_version = get_version.map_err(|_| failed("it has no ncclGetVersion".to_owned()))?;
        let mut number = 0;
        // SAFETY: it writes a number to where it is told.
        let result = unsafe { get_version(&raw mut number) };
        if result != code::SUCCESS {
            return Err(failed(format!("ncclGetVersion fails with {result}")));
        }
        let version = Version::from_code(number);
        if version < OLDEST {
            return Err(failed(format!("it is version {version}, and {}.{} is needed", OLDEST.major, OLDEST.minor)));
        }
        // SAFETY: what has `ncclGetVersion` has NCCL's interface, and it stays loaded.
        let functions = unsafe { Functions::of(&opened) };
        let functions = functions.map_err(|name| failed(format!("it is version {version} and has no {name}")))?;
        tracing::debug!(path = %path.display(), %version, "loaded a library of collectives");
        Ok(Arc::new(Self { path: path.to_owned(), version, functions }))
    }

    /// Makes the id by which the ranks of one group find each other. One rank of the group does so,
    /// and listens from then on for the others on the network that `NCCL_SOCKET_IFNAME` chooses.
    /// Needs no device.
    ///
    /// # Errors
    ///
    /// The library finds no network interface, for example.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId { bytes: [0; ID_LEN] };
        // SAFETY: it writes 128 bytes to where it is told.
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

    /// Returns the library's text for a result. Any number will do.
    #[must_use]
    pub fn error_string(&self, code: c_int) -> String {
        // SAFETY: it takes any number, and gives a constant.
        unsafe { text((self.functions.get_error_string)(code)) }
    }

    /// Returns the text of the last error in this process, in the library's words; empty if it says
    /// nothing.
    #[must_use]
    pub fn last_error(&self) -> String {
        self.last_error_of(std::ptr::null_mut())
    }

    /// Returns the text of the last error with a communicator, or with any if it is null. It must
    /// be one of this library that still exists.
    fn last_error_of(&self, comm: Comm) -> String {
        // SAFETY: a communicator of this library or null, both of which it takes.
        unsafe { text((self.functions.get_last_error)(comm)) }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the error that `code` stands for.
    pub(super) fn error(&self, call: &'static str, code: c_int, comm: Comm) -> NcclError {
        NcclError { call, code, text: self.error_string(code), last_error: self.last_error_of(comm) }
    }

    /// Checks that the library has something that came with this version.
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
/// Null, or text that ends with a zero and does not change until this returns.
unsafe fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().trim().to_owned()
}
