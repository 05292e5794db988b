//! Functions of NCCL as its header declares them: names, types, and the versions that introduced
//! them.

use std::ffi::{c_char, c_int, c_void};

use rpc_core::RpcError;

use super::config::Config;
use super::{UniqueId, Version};

/// The oldest supported version: it introduced communicators that do not block, and only those can
/// be aborted safely.
pub(super) const OLDEST: Version = Version::new(2, 14, 0);

/// `ncclComm_t`: a communicator.
pub(super) type Comm = *mut c_void;

/// `cudaStream_t` or `hipStream_t`.
pub(super) type Stream = *mut c_void;

/// A function that was introduced after [`OLDEST`], and may be missing.
#[derive(Clone, Copy)]
pub(super) struct Newer<F> {
    pub(super) name: &'static str,
    pub(super) since: Version,
    pub(super) function: Option<F>,
}

macro_rules! functions {
    (
        old { $($old:ident = $old_name:literal: $old_type:ty;)* }
        newer { $($new:ident = $new_name:literal since $major:literal, $minor:literal: $new_type:ty;)* }
    ) => {
        /// All functions that are used.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $old: $old_type,)*
            $(pub(super) $new: Newer<$new_type>,)*
        }

        impl Functions {
            /// Looks up all functions.
            ///
            /// # Errors
            ///
            /// The name of the first missing function among those that [`OLDEST`] has.
            ///
            /// # Safety
            ///
            /// The library must be NCCL, or have its interface, and never be unloaded.
            pub(super) unsafe fn of(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: NCCL has never changed the declarations of its functions, and the
                    // caller promises that the library is NCCL.
                    $($old: unsafe { find(library, $old_name) }.ok_or(concat!($old_name))?,)*
                    $($new: Newer {
                        name: $new_name,
                        since: Version::new($major, $minor, 0),
                        // SAFETY: as above.
                        function: unsafe { find(library, $new_name) },
                    },)*
                })
            }
        }
    };
}

type Unary = unsafe extern "C" fn(Comm) -> c_int;
type Ask = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
type Group = unsafe extern "C" fn() -> c_int;
/// Input, output, count, type, communicator, stream.
type Exchange = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
/// … with a reduction or a root before the communicator.
type Directed = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;

functions! {
    old {
        get_unique_id = "ncclGetUniqueId": unsafe extern "C" fn(*mut UniqueId) -> c_int;
        get_error_string = "ncclGetErrorString": unsafe extern "C" fn(c_int) -> *const c_char;
        get_last_error = "ncclGetLastError": unsafe extern "C" fn(Comm) -> *const c_char;
        comm_init_rank_config = "ncclCommInitRankConfig":
            unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
        comm_finalize = "ncclCommFinalize": Unary;
        comm_destroy = "ncclCommDestroy": Unary;
        comm_abort = "ncclCommAbort": Unary;
        comm_get_async_error = "ncclCommGetAsyncError": Ask;
        comm_count = "ncclCommCount": Ask;
        comm_user_rank = "ncclCommUserRank": Ask;
        all_reduce = "ncclAllReduce": Directed;
        reduce_scatter = "ncclReduceScatter": Directed;
        all_gather = "ncclAllGather": Exchange;
        broadcast = "ncclBroadcast": Directed;
        send = "ncclSend": unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        recv = "ncclRecv": unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
        group_start = "ncclGroupStart": Group;
        group_end = "ncclGroupEnd": Group;
    }
    newer {
        comm_split = "ncclCommSplit" since 2, 18:
            unsafe extern "C" fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> c_int;
        all_to_all = "ncclAlltoAll" since 2, 28: Exchange;
        gather = "ncclGather" since 2, 28: Directed;
        scatter = "ncclScatter" since 2, 28: Directed;
    }
}

/// Returns the function `name`, if the library has it.
///
/// # Safety
///
/// `F` must be a function pointer of the type that the function has in the library, and the library
/// must never be unloaded.
unsafe fn find<F: Copy>(library: &libloading::Library, name: &str) -> Option<F> {
    // SAFETY: promised by the caller.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

impl<F: Copy> Newer<F> {
    /// Returns the function, if the library has it.
    ///
    /// # Errors
    ///
    /// [`rpc_core::ErrorKind::Unsupported`]: the function needs a newer version than the library
    /// `found`.
    pub(super) fn get(&self, found: &super::Library) -> Result<F, RpcError> {
        self.function.ok_or_else(|| {
            let Self { name, since: Version { major, minor, .. }, .. } = self;
            RpcError::unsupported(format!("{name} needs NCCL {major}.{minor}, found {found}"))
        })
    }
}
