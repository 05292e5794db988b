//! Storages and their dynamic borrows: many readers or one writer, with a fair queue of waiters.
//!
//! The rules, cited by the tests:
//!
//! * B-1: At any time a storage has only readers, only one writer, or no borrow.
//! * B-2: Waiters are served in order, and before later requests (except [`Storage::try_read`]).
//! * B-3: A waiter is handed the borrow exactly once, with no lock held, or never if it stops
//!   waiting first.
//! * B-4: No waiter waits for a storage that it could have.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};

use crate::device::{DeviceApi, HostAccess, Mapping, Memory};
use crate::dlpack::Device;
use crate::error::{ErrorKind, Result, RpcError};

/// Kind of access to a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read, together with other readers.
    Read,
    /// Read and write, exclusively.
    Write,
}

/// Callback that is called once with the borrow that its owner has waited for.
///
/// It runs on the thread that released the conflicting borrow, inside its `drop`, with no lock of
/// this module held. It must not block: move the borrow to its user and return. Dropping the borrow
/// passes it to the next waiter. A panic is logged.
pub type Resume = Box<dyn FnOnce(Borrow) + Send>;

/// One allocation of a device's memory, shared by any number of tensors.
///
/// Its contents are accessed through a [`Borrow`] only. Borrows keep the storage alive, so it can
/// outlive the session that created it.
pub struct Storage {
    device: Device,
    /// Size in bytes. Constant, as [`Memory`] promises.
    len: u64,
    /// Declared above `_lease`, so that it is dropped first.
    memory: Box<dyn Memory>,
    state: Mutex<BorrowState>,
    _lease: Option<Box<dyn Any + Send + Sync>>,
}

/// Invariant (B-4): the first waiter, if there is one, conflicts with the holders.
#[derive(Default)]
struct BorrowState {
    holders: Holders,
    waiters: VecDeque<Waiter>,
    next_ticket: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Holders {
    #[default]
    None,
    Readers(u64),
    Writer,
}

struct Waiter {
    ticket: u64,
    access: Access,
    resume: Resume,
}

impl Storage {
    /// Creates a storage over `memory`, which lies on `device`. `lease` is dropped once the memory
    /// has been freed, for example to return its quota.
    pub fn new(device: Device, memory: Box<dyn Memory>, lease: Option<Box<dyn Any + Send + Sync>>) -> Arc<Self> {
        Arc::new(Self { device, len: memory.len(), memory, state: Mutex::default(), _lease: lease })
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the storage has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the memory itself, for the functions of its device. Users must hold a borrow.
    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Borrows the storage if that is possible at once. Never waits, and fails while others wait,
    /// because the storage is theirs next.
    pub fn try_borrow(self: &Arc<Self>, access: Access) -> Option<Borrow> {
        self.lock().admit(access).then(|| self.borrow(access))
    }

    /// Borrows the storage for reading unless it is being written, even while a writer waits. Never
    /// waits. Only for code that cannot wait and whose call may be one of the readers already, such
    /// as a nested call: for such code, [`Busy`](ErrorKind::Busy) because of an unrelated waiter
    /// would make no sense. Writers would starve if all readers used this.
    pub fn try_read(self: &Arc<Self>) -> Option<Borrow> {
        self.lock().hold(Access::Read).then(|| self.borrow(Access::Read))
    }

    /// Borrows the storage, or queues `resume` to be called with the borrow when all those before
    /// it have released theirs. Both in one step, so that no release is missed in between. `resume`
    /// may have been called before this returns.
    ///
    /// Do not wait while you hold a borrow that another thread may be waiting for: [`borrow_all`]
    /// takes several in an order that cannot deadlock.
    ///
    /// # Errors
    ///
    /// [`PendingBorrow`], if `resume` was queued. It need not be kept.
    pub fn borrow_or_wait(self: &Arc<Self>, access: Access, resume: Resume) -> Result<Borrow, PendingBorrow> {
        self.borrow_or_queue(access, || resume)
    }

    /// Borrows like [`borrow_or_wait`](Self::borrow_or_wait), and creates the [`Resume`] only if it
    /// is needed. `resume` runs under the lock: it must only build a closure.
    fn borrow_or_queue(
        self: &Arc<Self>,
        access: Access,
        resume: impl FnOnce() -> Resume,
    ) -> Result<Borrow, PendingBorrow> {
        let mut state = self.lock();
        if state.admit(access) {
            drop(state);
            return Ok(self.borrow(access));
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiters.push_back(Waiter { ticket, access, resume: resume() });
        Err(PendingBorrow { storage: Arc::downgrade(self), ticket })
    }

    /// Returns the guard of a borrow that the state has counted.
    fn borrow(self: &Arc<Self>, access: Access) -> Borrow {
        Borrow { storage: Arc::clone(self), access }
    }

    /// Locks the state. No foreign code runs under the lock, and a panic here leaves the state
    /// consistent.
    fn lock(&self) -> MutexGuard<'_, BorrowState> {
        self.state.lock()
    }

    /// Changes the holders or the queue by `change`, then hands borrows to the waiters that can
    /// have them now (B-2, B-4).
    fn update<T>(self: &Arc<Self>, change: impl FnOnce(&mut BorrowState) -> T) -> T {
        let mut state = self.lock();
        let outcome = change(&mut state);
        if state.waiters.is_empty() {
            return outcome;
        }
        let mut served = Vec::new();
        while let Some(waiter) = state.serve() {
            served.push((waiter.resume, self.borrow(waiter.access)));
        }
        drop(state);
        deliver(served);
        outcome
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holders = self.lock().holders;
        f.debug_struct("Storage")
            .field("device", &format_args!("{}", self.device))
            .field("len", &self.len)
            .field("holders", &holders)
            .finish_non_exhaustive()
    }
}

impl BorrowState {
    /// Counts a borrow if it is possible now and overtakes no waiter.
    fn admit(&mut self, access: Access) -> bool {
        self.waiters.is_empty() && self.hold(access)
    }

    /// Removes the first waiter from the queue and counts its borrow, if it does not conflict.
    fn serve(&mut self) -> Option<Waiter> {
        let access = self.waiters.front()?.access;
        if self.hold(access) { self.waiters.pop_front() } else { None }
    }

    /// Counts a borrow unless it conflicts (B-1).
    fn hold(&mut self, access: Access) -> bool {
        self.holders = match (self.holders, access) {
            (Holders::None, Access::Read) => Holders::Readers(1),
            (Holders::Readers(readers), Access::Read) => Holders::Readers(readers + 1),
            (Holders::None, Access::Write) => Holders::Writer,
            (Holders::Readers(_), Access::Write) | (Holders::Writer, _) => return false,
        };
        true
    }

    fn release(&mut self) {
        self.holders = match self.holders {
            Holders::Readers(readers) if readers > 1 => Holders::Readers(readers - 1),
            Holders::Readers(_) | Holders::Writer | Holders::None => Holders::None,
        };
    }
}

/// Calls each waiter with its borrow (B-3).
///
/// A waiter that drops its borrow at once lets in the next ones, from inside this function. They
/// are queued here and called after it instead of within it, so that a thousand waiters of a dead
/// session do not exhaust the stack.
fn deliver(served: Vec<(Resume, Borrow)>) {
    thread_local! {
        /// Waiters still to be called by the loop on this thread; `None` while there is no loop.
        static PENDING: RefCell<Option<VecDeque<(Resume, Borrow)>>> = const { RefCell::new(None) };
    }

    fn call((resume, borrow): (Resume, Borrow)) {
        if catch_unwind(AssertUnwindSafe(|| resume(borrow))).is_err() {
            crate::log_limited!(ERROR, "a function that waited for a tensor panicked when it was resumed");
        }
    }

    if served.is_empty() {
        return;
    }
    let mut served = Some(served);
    let looping = PENDING.try_with(|pending| {
        let mut pending = pending.borrow_mut();
        let running = pending.is_some();
        pending.get_or_insert_default().extend(served.take().into_iter().flatten());
        running
    });
    match looping {
        Ok(true) => {}
        // Panics end in `call`, so that the loop always finishes and clears the queue.
        Ok(false) => loop {
            let next = PENDING.with_borrow_mut(|pending| {
                let next = pending.as_mut().and_then(VecDeque::pop_front);
                if next.is_none() {
                    *pending = None;
                }
                next
            });
            match next {
                Some(next) => call(next),
                None => break,
            }
        },
        // The thread is ending and its thread-locals are gone.
        Err(_) => served.into_iter().flatten().for_each(call),
    }
}

/// A queued request for a borrow of a storage. Dropping it changes nothing.
#[derive(Debug)]
pub struct PendingBorrow {
    /// Weak, because the waiter's storage may be gone before this value.
    storage: Weak<Storage>,
    ticket: u64,
}

impl PendingBorrow {
    /// Leaves the queue. Returns true if that was in time: the [`Resume`] has been dropped and is
    /// not called. Otherwise it has been called or is about to be.
    pub fn stop(&self) -> bool {
        let Some(storage) = self.storage.upgrade() else { return false };
        // Waiters behind a writer that gives up may fit beside the readers it waited for.
        let waiter = storage.update(|state| {
            let position = state.waiters.iter().position(|waiter| waiter.ticket == self.ticket)?;
            state.waiters.remove(position)
        });
        waiter.is_some()
    }
}

/// A borrow of a storage: the right to read its contents together with others, or to read and write
/// them exclusively.
///
/// It keeps the storage alive, may move between threads, and ends when it is dropped, which hands
/// the storage to the next waiters. A leaked borrow keeps the storage borrowed for ever, and does
/// no other harm.
#[must_use = "the borrow ends when it is dropped"]
pub struct Borrow {
    /// The storage. Its `holders` count this borrow until the drop; no `Borrow` exists that they do
    /// not count.
    storage: Arc<Storage>,
    access: Access,
}

impl Borrow {
    /// Returns the storage's bytes, if they are in host memory and this is a write borrow.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.access != Access::Write {
            return None;
        }
        let start = self.storage.memory.host()?;
        // SAFETY: `Memory` promises `len` ≤ `isize::MAX` initialised bytes for as long as the
        // storage lives, which `self` keeps alive. No other slice of them exists: a write borrow
        // excludes all others (B-1), and `&mut self` all other slices from this one.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.storage.len as usize) })
    }

    /// Writes `data` at offset `at` of the storage in bytes, on any device.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the range is beyond the end, [`ErrorKind::ApiMisuse`] for
    /// a read borrow, and errors of the device.
    pub fn copy_in(&mut self, at: u64, data: &[u8]) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, data.len() as u64)?;
        match self.bytes_mut() {
            Some(bytes) => {
                bytes[at as usize..][..data.len()].copy_from_slice(data);
                Ok(())
            }
            // SAFETY: the range has been checked, and a write borrow excludes all others (B-1).
            None => unsafe { self.storage.memory.copy_from_host(at, data) },
        }
    }

    /// Copies `len` bytes at `from` of another storage to `at` of this one. `api` serves the device
    /// of one of the two: the one that is not host memory, if there is one.
    ///
    /// # Errors
    ///
    /// As [`copy_in`](Self::copy_in).
    pub fn copy_from(&mut self, api: &dyn DeviceApi, at: u64, source: &Self, from: u64, len: u64) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, len)?;
        source.storage.check(from, len)?;
        // SAFETY: both ranges have been checked. The source is borrowed (and is another storage, as
        // this one is borrowed for writing), so it is not written; the destination is borrowed
        // exclusively (B-1).
        unsafe { api.copy(&*source.storage.memory, from, &*self.storage.memory, at, len) }
    }

    /// Copies `len` bytes within the storage, from `from` to `at`. The ranges may overlap. `api`
    /// serves its device.
    ///
    /// # Errors
    ///
    /// As [`copy_in`](Self::copy_in).
    pub fn copy_within(&mut self, api: &dyn DeviceApi, from: u64, at: u64, len: u64) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, len)?;
        self.storage.check(from, len)?;
        let memory = &*self.storage.memory;
        // SAFETY: both ranges have been checked, and a write borrow excludes all others (B-1).
        unsafe { api.copy(memory, from, memory, at, len) }
    }

    /// Returns the storage's bytes, if they are in host memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        let start = self.storage.memory.host()?;
        // SAFETY: `Memory` promises `len` ≤ `isize::MAX` initialised bytes for as long as the
        // storage lives, which `self` keeps alive. They are not written: another borrow can only be
        // a reader (B-1), and if this is the writer, then `&self` excludes `bytes_mut`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), self.storage.len as usize) })
    }

    /// Lets the processor read `len` bytes from offset `at` of the storage, on any device, until
    /// the mapping ends.
    ///
    /// # Errors
    ///
    /// As [`copy_out`](Self::copy_out).
    pub fn map(&self, at: u64, len: usize) -> Result<Mapping<'_>> {
        self.storage.check(at, len as u64)?;
        // SAFETY: the range has been checked, and it is not written: other borrows are readers
        // (B-1), and if this is the writer, then it is borrowed for as long as the mapping.
        unsafe { self.storage.memory.map(at, len, HostAccess::Read) }
    }

    /// Lets the processor read and write `len` bytes from offset `at` of the storage, on any
    /// device, until the mapping ends.
    ///
    /// # Errors
    ///
    /// As [`copy_in`](Self::copy_in).
    pub fn map_mut(&mut self, at: u64, len: usize) -> Result<Mapping<'_>> {
        self.check_write()?;
        self.storage.check(at, len as u64)?;
        // SAFETY: the range has been checked, and a write borrow excludes all others (B-1); it is
        // borrowed for as long as the mapping.
        unsafe { self.storage.memory.map(at, len, HostAccess::Write) }
    }

    /// Returns the storage's address on its device, for libraries that work there. Valid while this
    /// borrow lives; writing requires a write borrow. `None` if the device has no addresses, or the
    /// storage no bytes.
    pub fn device_address(&self) -> Option<NonNull<u8>> {
        self.storage.memory.device_address()
    }

    /// Fills `out` from offset `at` of the storage in bytes, on any device.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the range is beyond the end, and errors of the device.
    pub fn copy_out(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.storage.check(at, out.len() as u64)?;
        match self.bytes() {
            Some(bytes) => {
                out.copy_from_slice(&bytes[at as usize..][..out.len()]);
                Ok(())
            }
            // SAFETY: the range has been checked, and it is not written: other borrows are readers
            // (B-1), and if this is the writer, then it is busy here.
            None => unsafe { self.storage.memory.copy_to_host(at, out) },
        }
    }

    /// Converts the borrow into a buffer of the bytes in `range` of the storage, without a copy.
    /// The storage stays borrowed until the last clone of the buffer is dropped. Returns `None`,
    /// and ends the borrow, if the storage is not in host memory or too small.
    pub fn into_bytes(self, range: Range<u64>) -> Option<Bytes> {
        let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
        self.bytes()?.get(range.clone())?;
        Some(Bytes::from_owner(OwnedRead { borrow: self, range }))
    }

    /// Turns a write borrow into a read borrow, so that other readers are admitted. A read borrow
    /// stays one.
    pub fn downgrade(&mut self) {
        if self.access == Access::Write {
            self.access = Access::Read;
            self.storage.update(|state| state.holders = Holders::Readers(1));
        }
    }

    /// Returns another read borrow of the same storage. It does not queue behind waiters, because
    /// they wait for this one anyway. `None` if this is a write borrow.
    pub fn share(&self) -> Option<Self> {
        // This reader holds the storage, so another one fits.
        if self.access == Access::Read { self.storage.try_read() } else { None }
    }

    /// Returns the borrowed storage.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Returns the kind of access.
    pub fn access(&self) -> Access {
        self.access
    }

    fn check_write(&self) -> Result<()> {
        match self.access {
            Access::Write => Ok(()),
            Access::Read => Err(RpcError::new(ErrorKind::ApiMisuse, "the tensor is borrowed for reading only")),
        }
    }
}

impl Storage {
    /// Checks that `len` bytes at `at` lie within the storage.
    fn check(&self, at: u64, len: u64) -> Result<()> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RpcError::invalid_argument(format!(
                "{len} bytes at {at} are beyond a storage of {} bytes",
                self.len
            ))),
        }
    }
}

impl Drop for Borrow {
    fn drop(&mut self) {
        self.storage.update(BorrowState::release);
    }
}

impl fmt::Debug for Borrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrow").field("storage", &self.storage).field("access", &self.access).finish()
    }
}

/// A range of a borrowed storage, as the owner of a [`Bytes`].
struct OwnedRead {
    borrow: Borrow,
    /// Lies within the storage, which is in host memory.
    range: Range<usize>,
}

impl AsRef<[u8]> for OwnedRead {
    fn as_ref(&self) -> &[u8] {
        self.borrow.bytes().map_or(&[], |bytes| &bytes[self.range.clone()])
    }
}

/// Borrows several storages for one call. Returns `Some` if all are free at once. Otherwise returns
/// `None`, waits without a time limit, and calls `resume` later, like a [`Resume`], with the
/// borrows in the order of `wanted`.
///
/// A storage may be listed several times for reading. Storages are taken in one global order, each
/// held while the next is waited for, so that two calls never wait for each other.
///
/// # Errors
///
/// [`ErrorKind::Busy`] if two of `wanted` conflict: waiting would not help.
pub fn borrow_all(
    wanted: Vec<(Arc<Storage>, Access)>,
    resume: Box<dyn FnOnce(Vec<Borrow>) + Send>,
) -> Result<Option<Vec<Borrow>>> {
    let address = |storage: &Arc<Storage>| Arc::as_ptr(storage).addr();
    let mut missing: Vec<_> = wanted.into_iter().enumerate().collect();
    missing.sort_by_key(|(_, (storage, _))| std::cmp::Reverse(address(storage)));
    for pair in missing.windows(2) {
        let [(first, (one, access)), (second, (other, other_access))] = pair else { continue };
        if Arc::ptr_eq(one, other) && (*access == Access::Write || *other_access == Access::Write) {
            let (first, second) = (first.min(second), first.max(second));
            return Err(RpcError::new(
                ErrorKind::Busy,
                format!("tensors {first} and {second} of one call share a storage, and one of them is written"),
            ));
        }
    }
    Ok(MultiBorrow { missing, held: Vec::new(), resume }.proceed().map(|(borrows, _)| borrows))
}

/// A call that is collecting its borrows.
struct MultiBorrow {
    /// Storages still to be borrowed, each with its index in `wanted`; the next one last.
    missing: Vec<(usize, (Arc<Storage>, Access))>,
    held: Vec<(usize, Borrow)>,
    resume: Box<dyn FnOnce(Vec<Borrow>) + Send>,
}

impl MultiBorrow {
    /// Takes as many as possible. Returns `None` if it waits for one; it then continues when that
    /// borrow is handed over.
    #[expect(clippy::type_complexity, reason = "one caller needs the borrows, the other one both")]
    fn proceed(mut self) -> Option<(Vec<Borrow>, Box<dyn FnOnce(Vec<Borrow>) + Send>)> {
        while let Some((index, (storage, access))) = self.missing.pop() {
            if let Some((_, last)) = self.held.last()
                && Arc::ptr_eq(last.storage(), &storage)
                && let Some(shared) = last.share()
            {
                self.held.push((index, shared));
                continue;
            }
            let mut this = Some(self);
            let outcome = storage.borrow_or_queue(access, || {
                let this = this.take();
                Box::new(move |borrow| {
                    let Some(mut this) = this else { return };
                    this.held.push((index, borrow));
                    if let Some((borrows, resume)) = this.proceed() {
                        resume(borrows);
                    }
                })
            });
            self = this?;
            if let Ok(borrow) = outcome {
                self.held.push((index, borrow));
            }
        }
        self.held.sort_by_key(|(index, _)| *index);
        Some((self.held.into_iter().map(|(_, borrow)| borrow).collect(), self.resume))
    }
}
