//! Safe wrappers of the functions of MPI that are used: one call at a time, buffers that live as
//! long as MPI may use them, results as errors.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ::mpi::ffi;
use rpc_core::{ErrorKind, RpcError};

use super::lost;

/// Lock that is held during every call, because the library may allow only one at a time. No call
/// waits for other processes, except those at the beginning and the end of a job.
static CALLS: Mutex<Calls> = Mutex::new(Calls { left: Vec::new(), held: 0, is_over: false });

/// State of the calls so far.
struct Calls {
    /// Messages whose owners have been dropped before MPI was done with them.
    left: Vec<Message>,
    /// Number of messages that have an owner.
    held: usize,
    /// True once MPI has been finalised: none of its functions may be called any more.
    is_over: bool,
}

/// Pause between two attempts to finalise MPI.
const PAUSE: Duration = Duration::from_millis(1);

/// MPI, initialised in this process.
#[derive(Debug)]
pub(super) struct Library {
    comm: Comm,
    rank: u32,
    size: u32,
    version: String,
}

/// A communicator of MPI, of all processes of the job, for the messages of this crate alone.
#[derive(Clone, Copy, Debug)]
struct Comm(ffi::MPI_Comm);

// SAFETY: a handle, a number or a pointer to what MPI keeps, used under `CALLS` only.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Message that MPI is sending or receiving, and its bytes.
#[derive(Debug)]
struct Message {
    request: ffi::MPI_Request,
    bytes: Vec<u8>,
}

// SAFETY: a handle, used under `CALLS` only, and bytes that are not looked at before MPI is through
// with them.
unsafe impl Send for Message {}

impl Message {
    /// Returns true once MPI has finished with the message.
    fn is_done(&mut self, _calls: &Calls) -> io::Result<bool> {
        let mut done = 0;
        // SAFETY: the request is this message's own; a finished one is null, which is always done.
        checked(unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }
}

/// A message that MPI may still be using. Dropping it leaves it to MPI.
#[derive(Debug)]
pub(super) struct Transfer(Option<Message>);

impl Transfer {
    /// Returns the bytes, once MPI is done with them.
    ///
    /// # Errors
    ///
    /// The error of the library.
    pub(super) fn poll(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut calls = calls()?;
        let message = self.0.as_mut().ok_or_else(|| io::Error::other("a message that has been taken"))?;
        let is_done = message.is_done(&calls)?;
        calls.held -= usize::from(is_done);
        Ok(self.0.take_if(|_| is_done).map(|message| message.bytes))
    }

    fn new(message: Message, calls: &mut Calls) -> Self {
        calls.held += 1;
        Self(Some(message))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let Some(mut message) = self.0.take() else { return };
        let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
        calls.held -= 1;
        // If the library cannot report the state, the bytes are kept.
        if calls.is_over || !message.is_done(&calls).unwrap_or(false) {
            calls.left.push(message);
        }
    }
}

impl Library {
    /// Starts MPI. Blocks until all processes of the job do.
    ///
    /// # Errors
    ///
    /// The error of the library; too little support of threads.
    pub(super) fn start() -> Result<Self, RpcError> {
        let _calls = calls().map_err(lost)?;
        let (mut is_started, mut provided) = (0, 0);
        // SAFETY: may be called at any time.
        checked(unsafe { ffi::MPI_Initialized(&mut is_started) }).map_err(lost)?;
        if is_started != 0 {
            return Err(RpcError::new(ErrorKind::ApiMisuse, "other code of this process has started MPI"));
        }
        // SAFETY: MPI takes null for no arguments, has not been started, and `provided` is written.
        let code = unsafe {
            ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), ffi::RSMPI_THREAD_SERIALIZED, &mut provided)
        };
        checked(code).map_err(lost)?;
        // SAFETY: constants of the library, which is loaded.
        if provided < unsafe { ffi::RSMPI_THREAD_SERIALIZED } {
            // SAFETY: MPI has been started, by this thread.
            _ = unsafe { ffi::MPI_Finalize() };
            let text = "this MPI library lets one thread use it; it has to let all of them, one at a time \
                        (MPI_THREAD_SERIALIZED)";
            return Err(RpcError::unsupported(text));
        }
        // SAFETY: MPI has been started; all pointers are to locals that the calls write.
        let (comm, rank, size) = unsafe {
            let mut comm = ffi::RSMPI_COMM_NULL;
            let (mut rank, mut size) = (0, 0);
            checked(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm)).map_err(lost)?;
            checked(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN)).map_err(lost)?;
            checked(ffi::MPI_Comm_rank(comm, &mut rank)).map_err(lost)?;
            checked(ffi::MPI_Comm_size(comm, &mut size)).map_err(lost)?;
            (comm, rank, size)
        };
        Ok(Self { comm: Comm(comm), rank: rank.unsigned_abs(), size: size.unsigned_abs(), version: version() })
    }

    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    pub(super) fn size(&self) -> u32 {
        self.size
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Gives every process of the job the bytes of process 0. Blocks until all have come here.
    ///
    /// # Errors
    ///
    /// The error of the library.
    pub(super) fn share(&self, bytes: &mut [u8; 16]) -> Result<(), RpcError> {
        let _calls = calls().map_err(lost)?;
        // SAFETY: the buffer has 16 bytes, on every process, and the call returns when MPI is
        // through with them.
        let code = unsafe {
            ffi::MPI_Bcast(bytes.as_mut_ptr().cast(), bytes.len() as c_int, ffi::RSMPI_UINT8_T, 0, self.comm.0)
        };
        checked(code).map_err(lost)
    }

    /// Begins to send a message. Messages to one process with one tag arrive in their order.
    ///
    /// # Errors
    ///
    /// The error of the library.
    pub(super) fn send(&self, to: u32, tag: u16, bytes: Vec<u8>) -> io::Result<Transfer> {
        let mut calls = calls()?;
        calls.reap();
        let len = c_int::try_from(bytes.len()).map_err(|_| io::Error::other("a message above 2 GiB"))?;
        // SAFETY: `bytes` live in the message, unmoved on the heap, until MPI is through with them;
        // a null request is a constant.
        unsafe {
            let mut message = Message { request: ffi::RSMPI_REQUEST_NULL, bytes };
            let start = message.bytes.as_ptr().cast();
            let (to, tag) = (to as c_int, c_int::from(tag));
            checked(ffi::MPI_Isend(start, len, ffi::RSMPI_UINT8_T, to, tag, self.comm.0, &mut message.request))?;
            Ok(Transfer::new(message, &mut calls))
        }
    }

    /// Begins to receive the next message with this tag, if it is there, into `room`, which it gets
    /// from `room_for` its length.
    ///
    /// # Errors
    ///
    /// The error of the library; a message of more than `most` bytes.
    pub(super) fn receive(
        &self,
        from: u32,
        tag: u16,
        most: usize,
        room_for: impl FnOnce(usize) -> Vec<u8>,
    ) -> io::Result<Option<Transfer>> {
        let mut calls = calls()?;
        // SAFETY: all pointers are to locals that the calls write; the status is read only after a
        // match, which fills it. The buffer lives in the message, unmoved on the heap, until MPI is
        // through with it, and has room for as many bytes as the status says.
        unsafe {
            let mut found = 0;
            let mut matched = ffi::RSMPI_MESSAGE_NULL;
            let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
            let (from, tag) = (from as c_int, c_int::from(tag));
            checked(ffi::MPI_Improbe(from, tag, self.comm.0, &mut found, &mut matched, status.as_mut_ptr()))?;
            if found == 0 {
                return Ok(None);
            }
            let mut len = 0;
            checked(ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut len))?;
            let size = usize::try_from(len).ok().filter(|len| *len <= most);
            let size = size.ok_or_else(|| io::Error::other(format!("a message of {len} bytes, of {most} at most")))?;
            let mut bytes = room_for(size);
            bytes.resize(size, 0);
            let mut message = Message { request: ffi::RSMPI_REQUEST_NULL, bytes };
            let start = message.bytes.as_mut_ptr().cast();
            checked(ffi::MPI_Imrecv(start, len, ffi::RSMPI_UINT8_T, &mut matched, &mut message.request))?;
            Ok(Some(Transfer::new(message, &mut calls)))
        }
    }

    /// Finalises MPI, once it is done with all messages. The thread has to be the one that called
    /// [`start`](Self::start).
    ///
    /// # Errors
    ///
    /// MPI is still in use after `limit`; the error of the library.
    pub(super) fn finish(&self, limit: Duration) -> Result<(), RpcError> {
        let until = Instant::now() + limit;
        let late = |what: String| {
            RpcError::new(ErrorKind::DeadlineExceeded, format!("MPI cannot be ended: {what} after {limit:?}"))
        };
        loop {
            match CALLS.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() >= until => {
                    return Err(late("a thread is in a call of it".to_owned()));
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Poisoned(_)) => return Err(lost("a thread panicked in a call")),
                Ok(calls) if calls.is_over => return Ok(()),
                Ok(mut calls) => {
                    calls.reap();
                    let open = calls.held + calls.left.len();
                    if open == 0 || Instant::now() >= until {
                        calls.is_over = true;
                    }
                    if open == 0 {
                        self.receive_leftovers().map_err(lost)?;
                        // SAFETY: MPI has been started, no message is under way, and nothing of it
                        // is called after this.
                        return checked(unsafe { ffi::MPI_Finalize() }).map_err(lost);
                    }
                    if calls.is_over {
                        return Err(late(format!("{open} messages have not been taken")));
                    }
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Receives the last messages of groups that have ended, which no rank waits for, because MPI
    /// demands that every message is received. Blocks until all processes have called it, as
    /// `MPI_Finalize` does. The caller holds the lock of MPI.
    fn receive_leftovers(&self) -> io::Result<()> {
        // SAFETY: MPI has been started, and the communicator is one of all processes.
        checked(unsafe { ffi::MPI_Barrier(self.comm.0) })?;
        loop {
            // SAFETY: all pointers are to locals that the calls write; the status is read only
            // after a match, which fills it; the buffer has room for as many bytes as the status
            // says, and the call returns when MPI is through with it.
            unsafe {
                let mut found = 0;
                let mut matched = ffi::RSMPI_MESSAGE_NULL;
                let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
                let (anybody, any) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_ANY_TAG);
                checked(ffi::MPI_Improbe(anybody, any, self.comm.0, &mut found, &mut matched, status.as_mut_ptr()))?;
                if found == 0 {
                    return Ok(());
                }
                let mut len = 0;
                checked(ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut len))?;
                let mut bytes = vec![0_u8; usize::try_from(len).unwrap_or(0)];
                let start = bytes.as_mut_ptr().cast();
                checked(ffi::MPI_Mrecv(start, len, ffi::RSMPI_UINT8_T, &mut matched, ffi::RSMPI_STATUS_IGNORE))?;
            }
        }
    }
}

/// Locks MPI for a call.
///
/// # Errors
///
/// MPI has been finalised.
fn calls() -> io::Result<MutexGuard<'static, Calls>> {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    if calls.is_over { Err(io::Error::other("MPI has been ended")) } else { Ok(calls) }
}

impl Calls {
    /// Frees the dropped messages that MPI is done with.
    fn reap(&mut self) {
        let mut left = std::mem::take(&mut self.left);
        left.retain_mut(|message| !message.is_done(self).unwrap_or(false));
        self.left = left;
    }
}

fn version() -> String {
    // SAFETY: the buffer is as long as the library says that it has to be, and `len` is written.
    unsafe {
        let mut text = vec![0_u8; ffi::RSMPI_MAX_LIBRARY_VERSION_STRING.unsigned_abs() as usize + 1];
        let mut len: c_int = 0;
        if ffi::MPI_Get_library_version(text.as_mut_ptr().cast::<c_char>(), &mut len) != ffi::MPI_SUCCESS as c_int {
            return String::new();
        }
        text.truncate(len.unsigned_abs() as usize);
        String::from_utf8_lossy(&text).trim_end_matches(['\0', '\n']).trim().to_owned()
    }
}

/// Returns the result of a call.
fn checked(code: c_int) -> io::Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is as long as the library says that it has to be; it was zeroed, so that
    // it ends with a zero.
    let text = unsafe {
        _ = ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len);
        CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    };
    Err(io::Error::other(format!("{text} (code {code})")))
}
