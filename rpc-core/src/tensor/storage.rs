//! Storages and their dynamic borrows: many readers or one writer, and a fair queue of those who wait.
//!
//! The rules, which the tests cite:
//!
//! * B-1: at any time a storage has readers only, or one writer only, or nobody.
//! * B-2: who waits is served in order, and before anyone who asks later (but see [`Storage::try_read`]).
//! * B-3: who waits is handed the borrow exactly once, with no lock held, or never if it stops waiting first.
//! * B-4: nobody waits for a storage that it could have.

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;

use crate::device::{DeviceApi, Memory};
use crate::dlpack::Device;
use crate::error::{ErrorKind, Result, RpcError};

/// What somebody wants to do with a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read, beside other readers.
    Read,
    /// Read and write, alone.
    Write,
}

/// Called once with the borrow that its owner has waited for.
///
/// It runs on the thread that released the conflicting borrow, inside its `drop`, with no lock of ours held. It must
/// not block: move the borrow to where it is used and return. Dropping the borrow passes it on. A panic is logged.
pub type Resume = Box<dyn FnOnce(Borrow) + Send>;

/// One piece of a device's memory, which any number of tensors look into.
///
/// Its contents are reached through a [`Borrow`] only. The borrows hold the storage, so that it outlives the session
/// that made it for as long as anybody uses it.
pub struct Storage {
    device: Device,
    /// Constant, as [`Memory`] promises.
    len: u64,
    /// Above `lease`, so that it is dropped first.
    memory: Box<dyn Memory>,
    state: Mutex<State>,
    _lease: Option<Box<dyn Any + Send + Sync>>,
}

/// Invariant (B-4): the first waiter, if there is one, conflicts with the holders.
#[derive(Default)]
struct State {
    holders: Holders,
    waiters: VecDeque<Waiter>,
    next_ticket: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Holders {
    #[default]
    Nobody,
    Readers(u64),
    Writer,
}

struct Waiter {
    ticket: u64,
    access: Access,
    resume: Resume,
}

impl Storage {
    /// A storage over `memory`, which lies on `device`. `lease` is dropped once the memory has been freed: it gives back
    /// the quota, for example.
    pub fn new(device: Device, memory: Box<dyn Memory>, lease: Option<Box<dyn Any + Send + Sync>>) -> Arc<Self> {
        Arc::new(Self { device, len: memory.len(), memory, state: Mutex::default(), _lease: lease })
    }

    /// Where the memory lies.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory itself, for the functions of its device. Whoever uses it owes it a borrow.
    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Borrows the storage if that is possible at once; never waits. While others wait it is not, since what is free
    /// next belongs to them.
    pub fn try_borrow(self: &Arc<Self>, access: Access) -> Option<Borrow> {
        self.lock().admit(access).then(|| self.borrow(access))
    }

    /// Borrows the storage for reading unless it is being written, even while a writer waits; never waits itself. Only
    /// for code that cannot wait and whose call may be one of the readers, such as a nested call: to it,
    /// [`Busy`](ErrorKind::Busy) because of a stranger's place in the queue would make no sense. Writers would starve
    /// if everybody did so.
    pub fn try_read(self: &Arc<Self>) -> Option<Borrow> {
        self.lock().hold(Access::Read).then(|| self.borrow(Access::Read))
    }

    /// Borrows the storage, or queues `resume` to be called with the borrow when all those before it have released
    /// theirs. In one step: no release is missed in between. `resume` may have been called before this returns.
    ///
    /// Do not wait while you hold a borrow that somebody else may be waiting for: [`borrow_all`] takes several in an
    /// order that cannot deadlock.
    ///
    /// # Errors
    ///
    /// [`Waiting`], when `resume` was queued. It need not be kept.
    pub fn borrow_or_wait(self: &Arc<Self>, access: Access, resume: Resume) -> Result<Borrow, Waiting> {
        self.borrow_or_queue(access, || resume)
    }

    /// As [`borrow_or_wait`](Self::borrow_or_wait), making `resume` only when it is needed. `resume` runs under the
    /// lock: it must do nothing but build a closure.
    fn borrow_or_queue(self: &Arc<Self>, access: Access, resume: impl FnOnce() -> Resume) -> Result<Borrow, Waiting> {
        let mut state = self.lock();
        if state.admit(access) {
            drop(state);
            return Ok(self.borrow(access));
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        state.waiters.push_back(Waiter { ticket, access, resume: resume() });
        Err(Waiting { storage: Arc::downgrade(self), ticket })
    }

    /// The guard of a borrow that `state` has counted.
    fn borrow(self: &Arc<Self>, access: Access) -> Borrow {
        Borrow { storage: Arc::clone(self), access }
    }

    /// No code of others runs under the lock, and ours leaves `State` whole wherever it might panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the holders or the queue by `change`, then hands borrows to those who can have them now (B-2, B-4).
    fn update<T>(self: &Arc<Self>, change: impl FnOnce(&mut State) -> T) -> T {
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

impl State {
    /// Counts a borrow that is possible now and overtakes nobody.
    fn admit(&mut self, access: Access) -> bool {
        self.waiters.is_empty() && self.hold(access)
    }

    /// Takes the first waiter out of the queue and counts its borrow, if it does not conflict.
    fn serve(&mut self) -> Option<Waiter> {
        let access = self.waiters.front()?.access;
        if self.hold(access) { self.waiters.pop_front() } else { None }
    }

    /// Counts a borrow unless it conflicts (B-1).
    fn hold(&mut self, access: Access) -> bool {
        self.holders = match (self.holders, access) {
            (Holders::Nobody, Access::Read) => Holders::Readers(1),
            (Holders::Readers(readers), Access::Read) => Holders::Readers(readers + 1),
            (Holders::Nobody, Access::Write) => Holders::Writer,
            (Holders::Readers(_), Access::Write) | (Holders::Writer, _) => return false,
        };
        true
    }

    fn release(&mut self) {
        self.holders = match self.holders {
            Holders::Readers(readers) if readers > 1 => Holders::Readers(readers - 1),
            Holders::Readers(_) | Holders::Writer | Holders::Nobody => Holders::Nobody,
        };
    }
}

/// Calls each with its borrow (B-3).
///
/// One that drops its borrow at once lets the next ones in, from inside this very function; they are queued here and
/// called after it rather than within it, so that a thousand waiters of a dead session do not exhaust the stack.
fn deliver(served: Vec<(Resume, Borrow)>) {
    thread_local! {
        /// What is still to be called by the loop that runs on this thread; `None` while there is no loop.
        static PENDING: RefCell<Option<VecDeque<(Resume, Borrow)>>> = const { RefCell::new(None) };
    }

    fn call((resume, borrow): (Resume, Borrow)) {
        if catch_unwind(AssertUnwindSafe(|| resume(borrow))).is_err() {
            tracing::error!("a function that waited for a tensor panicked when it was resumed");
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
        // Panics end in `call`, so that the loop always comes to its end and clears the queue.
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
        // The thread is ending and has lost its locals already.
        Err(_) => served.into_iter().flatten().for_each(call),
    }
}

/// A place in the queue of a storage. Dropping it changes nothing.
#[derive(Debug)]
pub struct Waiting {
    /// Weak, because whoever waits may be gone before this is.
    storage: Weak<Storage>,
    ticket: u64,
}

impl Waiting {
    /// Leaves the queue. True if that was in time: the [`Resume`] has been dropped then and is not called; otherwise it
    /// has been called or is about to be.
    pub fn stop(&self) -> bool {
        let Some(storage) = self.storage.upgrade() else { return false };
        // Those behind a writer that gives up may fit beside the readers it waited for.
        let waiter = storage.update(|state| {
            let place = state.waiters.iter().position(|waiter| waiter.ticket == self.ticket)?;
            state.waiters.remove(place)
        });
        waiter.is_some()
    }
}

/// A borrow of a storage: the right to read its contents beside others, or to read and write them alone.
///
/// It holds the storage, may move between threads, and ends when it is dropped, which hands the storage on to those who
/// wait. One that is leaked keeps the storage borrowed for ever, and does no other harm.
#[must_use = "the borrow ends when it is dropped"]
pub struct Borrow {
    /// Its `holders` count this borrow until the drop; no `Borrow` exists that they do not count.
    storage: Arc<Storage>,
    access: Access,
}

impl Borrow {
    /// The storage's bytes, if they are in host memory and this is a write borrow.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        if self.access != Access::Write {
            return None;
        }
        let start = self.storage.memory.host()?;
        // SAFETY: `Memory` promises `len` ≤ `isize::MAX` initialised bytes for as long as the storage lives, which
        // `self` holds. They are nobody else's: a write borrow excludes all others (B-1), and `&mut self` all other
        // slices from this one.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.storage.len as usize) })
    }

    /// Writes `data` at `at`, in bytes from the start of the storage, wherever the storage lies.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if that is beyond the end, [`ErrorKind::ApiMisuse`] for a read borrow, and what
    /// the device reports.
    pub fn copy_in(&mut self, at: u64, data: &[u8]) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, data.len() as u64)?;
        match self.bytes_mut() {
            Some(bytes) => {
                bytes[at as usize..][..data.len()].copy_from_slice(data);
                Ok(())
            }
            // SAFETY: the range has been checked, and a write borrow excludes everyone else (B-1).
            None => unsafe { self.storage.memory.copy_from_host(at, data) },
        }
    }

    /// Copies `len` bytes at `from` of another storage to `at` of this one, by `api`, which serves one of the two (that
    /// which is not host memory, if one is).
    ///
    /// # Errors
    ///
    /// As [`copy_in`](Self::copy_in).
    pub fn copy_from(&mut self, api: &dyn DeviceApi, at: u64, source: &Self, from: u64, len: u64) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, len)?;
        source.storage.check(from, len)?;
        // SAFETY: both ranges have been checked. Nobody writes to the source, which is borrowed (and is another storage,
        // as this one is borrowed for writing), and nobody touches the destination (B-1).
        unsafe { api.copy(&*source.storage.memory, from, &*self.storage.memory, at, len) }
    }

    /// Copies `len` bytes within the storage, from `from` to `at`; the ranges may overlap. `api` serves its device.
    ///
    /// # Errors
    ///
    /// As [`copy_in`](Self::copy_in).
    pub fn copy_within(&mut self, api: &dyn DeviceApi, from: u64, at: u64, len: u64) -> Result<()> {
        self.check_write()?;
        self.storage.check(at, len)?;
        self.storage.check(from, len)?;
        let memory = &*self.storage.memory;
        // SAFETY: both ranges have been checked, and a write borrow excludes everyone else (B-1).
        unsafe { api.copy(memory, from, memory, at, len) }
    }

    /// The storage's bytes, if they are in host memory.
    pub fn bytes(&self) -> Option<&[u8]> {
        let start = self.storage.memory.host()?;
        // SAFETY: `Memory` promises `len` ≤ `isize::MAX` initialised bytes for as long as the storage lives, which
        // `self` holds. Nobody writes to them: another borrow can only be a reader (B-1), and if this is the writer,
        // then `&self` excludes `bytes_mut`.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), self.storage.len as usize) })
    }

    /// Where the storage lies on its device, for libraries that work there: for as long as this borrow lives, to be read, and to be written to
    /// only if this is a write borrow. `None` if the device has no addresses, or the storage no bytes.
    pub fn device_address(&self) -> Option<NonNull<u8>> {
        self.storage.memory.device_address()
    }

    /// Reads into all of `out` from `at` on, in bytes from the start of the storage, wherever the storage lies.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if that is beyond the end, and what the device reports.
    pub fn copy_out(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.storage.check(at, out.len() as u64)?;
        match self.bytes() {
            Some(bytes) => {
                out.copy_from_slice(&bytes[at as usize..][..out.len()]);
                Ok(())
            }
            // SAFETY: the range has been checked, and nobody writes: other borrows are readers (B-1), and if this is the
            // writer, then it is busy here.
            None => unsafe { self.storage.memory.copy_to_host(at, out) },
        }
    }

    /// Turns the borrow into a buffer of the bytes in `range` of the storage, without a copy; the storage stays borrowed
    /// until the last clone of the buffer is dropped. `None`, and the borrow ends, if the storage is not in host memory
    /// or smaller.
    pub fn into_bytes(self, range: Range<u64>) -> Option<Bytes> {
        let range = usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?;
        self.bytes()?.get(range.clone())?;
        Some(Bytes::from_owner(OwnedRead { borrow: self, range }))
    }

    /// Makes a write borrow one for reading, so that other readers may come in. One for reading stays what it is.
    pub fn downgrade(&mut self) {
        if self.access == Access::Write {
            self.access = Access::Read;
            self.storage.update(|state| state.holders = Holders::Readers(1));
        }
    }

    /// Another read borrow of the same storage, beside this one: it does not queue behind those who wait, because they
    /// wait for this one anyway. `None` if this is a write borrow.
    pub fn share(&self) -> Option<Self> {
        // A reader (this one) holds the storage, and so another one fits.
        if self.access == Access::Read { self.storage.try_read() } else { None }
    }

    /// What is borrowed.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// What the borrow allows.
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
    /// Whether `len` bytes at `at` lie within.
    fn check(&self, at: u64, len: u64) -> Result<()> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RpcError::invalid_argument(format!("{len} bytes at {at} of a storage of {} bytes", self.len))),
        }
    }
}

impl Drop for Borrow {
    fn drop(&mut self) {
        self.storage.update(State::release);
    }
}

impl fmt::Debug for Borrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrow").field("storage", &self.storage).field("access", &self.access).finish()
    }
}

/// A part of a borrowed storage, as the owner of a [`Bytes`].
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

/// Borrows several storages for one call, waiting for as long as it takes: `Some` at once, or else `None`, and `resume`
/// is called later, as a [`Resume`] is, with the borrows in the order of `wanted`.
///
/// A storage may be wanted several times for reading. Storages are taken in one order everywhere, each held while the
/// next is waited for, so that two calls never wait for each other.
///
/// # Errors
///
/// [`ErrorKind::Busy`], if two of `wanted` conflict: no waiting would help.
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
    Ok(Several { missing, held: Vec::new(), resume }.proceed().map(|(borrows, _)| borrows))
}

/// A call on its way to all its borrows.
struct Several {
    /// What is still wanted, with its place among the wanted; the next one last.
    missing: Vec<(usize, (Arc<Storage>, Access))>,
    held: Vec<(usize, Borrow)>,
    resume: Box<dyn FnOnce(Vec<Borrow>) + Send>,
}

impl Several {
    /// Takes as many as possible. `None` when it waits for one; it goes on by itself then.
    #[expect(clippy::type_complexity, reason = "one caller needs the borrows, the other one both")]
    fn proceed(mut self) -> Option<(Vec<Borrow>, Box<dyn FnOnce(Vec<Borrow>) + Send>)> {
        while let Some((place, (storage, access))) = self.missing.pop() {
            if let Some((_, last)) = self.held.last()
                && Arc::ptr_eq(last.storage(), &storage)
                && let Some(shared) = last.share()
            {
                self.held.push((place, shared));
                continue;
            }
            let mut this = Some(self);
            let outcome = storage.borrow_or_queue(access, || {
                let this = this.take();
                Box::new(move |borrow| {
                    let Some(mut this) = this else { return };
                    this.held.push((place, borrow));
                    if let Some((borrows, resume)) = this.proceed() {
                        resume(borrows);
                    }
                })
            });
            self = this?;
            if let Ok(borrow) = outcome {
                self.held.push((place, borrow));
            }
        }
        self.held.sort_by_key(|(place, _)| *place);
        Some((self.held.into_iter().map(|(_, borrow)| borrow).collect(), self.resume))
    }
}
