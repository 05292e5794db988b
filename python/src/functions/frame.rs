//! One call of a function of Python: its context, and the borrows of the tensors that it was given.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Instant;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use rpc_core::function::LocalValue;
use rpc_core::tensor::{Access, Borrow, Storage, Tensor, borrow_all};
use rpc_core::{Function, Result, RpcError};

use super::objects::{LocalFunction, call};
use super::values;
use crate::array::DenseArray;
use crate::attach::attached;
use crate::{errors, types};

thread_local! {
    static CURRENT: RefCell<Vec<Arc<Frame>>> = const { RefCell::new(Vec::new()) };
}

/// One call.
pub(crate) struct Frame {
    pub(super) context: rpc_core::Context,
    slots: Mutex<Slots>,
    is_over: AtomicBool,
}

/// Borrows of a call. Each lives as long as the call, if it is that of an argument, and as long as
/// any array that was made of its tensors.
#[derive(Default)]
struct Slots {
    args: Vec<Arc<Slot>>,
    all: Vec<Weak<Slot>>,
    /// Number of nested calls for which the borrows are given up.
    lendings: usize,
}

impl Slots {
    fn alive(&mut self) -> Vec<Arc<Slot>> {
        self.all.retain(|slot| slot.strong_count() > 0);
        self.all.iter().filter_map(Weak::upgrade).collect()
    }
}

/// A borrow of a storage.
struct Slot {
    storage: Arc<Storage>,
    /// `None` while the function calls another one.
    borrow: Mutex<Option<Borrow>>,
}

impl Slot {
    fn new(borrow: Borrow) -> Arc<Self> {
        Arc::new(Self { storage: borrow.storage().clone(), borrow: Mutex::new(Some(borrow)) })
    }
}

/// A tensor that Python has as memory.
pub(crate) struct View {
    pub(crate) tensor: Tensor,
    /// `None` for a tensor that the function has allocated itself, which nothing else knows of.
    _slot: Option<Arc<Slot>>,
}

impl View {
    /// A view of a tensor that nothing else knows of.
    pub(super) fn of_own(tensor: Tensor) -> Self {
        Self { tensor, _slot: None }
    }
}

/// Makes `frame` the call that runs on this thread, until the guard is dropped.
pub(super) fn enter(frame: &Arc<Frame>) -> Entered {
    CURRENT.with_borrow_mut(|frames| frames.push(frame.clone()));
    Entered
}

/// Guard of [`enter`].
pub(super) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let ended = CURRENT.with_borrow_mut(Vec::pop);
        drop(ended);
    }
}

/// Returns the call that runs on this thread.
pub(super) fn current() -> Option<Arc<Frame>> {
    CURRENT.try_with(|frames| frames.borrow().last().cloned()).ok().flatten()
}

impl Frame {
    /// Begins a call that was given these borrows.
    pub(super) fn new(context: &rpc_core::Context, borrows: Vec<Borrow>) -> Arc<Self> {
        let args: Vec<_> = borrows.into_iter().map(Slot::new).collect();
        let slots = Slots { all: args.iter().map(Arc::downgrade).collect(), args, lendings: 0 };
        Arc::new(Self { context: context.clone(), slots: Mutex::new(slots), is_over: AtomicBool::new(false) })
    }

    /// Ends the call. Arrays that Python still has keep their borrows.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        let args = std::mem::take(&mut self.slots.lock().args);
        let lent: Vec<_> = args.iter().map(Arc::downgrade).collect();
        drop(args);
        if lent.iter().any(|slot| slot.strong_count() > 0) {
            // Perhaps nobody has an array any more, and only a cycle, such as an exception that is
            // kept in its own frame, holds it until the collector next runs: on an idle server,
            // for ever.
            let _ = attached(|py| py.import("gc")?.call_method1("collect", (1,)).map(drop));
        }
    }

    /// Returns this call, or, if it is over, one of the same session that has no caller.
    pub(super) fn or_detached(self: &Arc<Self>) -> Arc<Self> {
        if self.is_over.load(Ordering::Acquire) {
            Self::new(&self.context.detached(), Vec::new())
        } else {
            self.clone()
        }
    }

    /// Makes a tensor accessible as memory. It is borrowed for writing; one that the call has not
    /// been given is waited for.
    pub(super) fn view(&self, py: Python<'_>, tensor: Tensor) -> Result<DenseArray> {
        let held = self.slots.lock().alive();
        let slot = match held.into_iter().find(|slot| Arc::ptr_eq(&slot.storage, tensor.storage())) {
            Some(slot) => slot,
            None => {
                let storage = tensor.storage().clone();
                let borrow = py.detach(|| borrow_waiting(vec![storage]))?.pop();
                let slot = borrow.map(Slot::new).ok_or_else(|| RpcError::internal("a tensor was not borrowed"))?;
                self.slots.lock().all.push(Arc::downgrade(&slot));
                slot
            }
        };
        DenseArray::view(View { tensor, _slot: Some(slot) })
    }

    /// Calls `function`, and gives up the borrows of this call's tensors meanwhile: it may need
    /// them, and Python does not run.
    pub(super) fn call(&self, function: &Function, args: Vec<LocalValue>) -> Result<LocalValue> {
        let lent: Vec<Borrow> = {
            let mut slots = self.slots.lock();
            slots.lendings += 1;
            slots.alive().iter().filter_map(|slot| slot.borrow.lock().take()).collect()
        };
        let outcome = self.context.call_lending(function, args, lent);
        let missing: Vec<_> = {
            let mut slots = self.slots.lock();
            slots.lendings -= 1;
            // Another thread of the same call still calls, and borrows for both afterwards.
            let alive = if slots.lendings == 0 { slots.alive() } else { Vec::new() };
            alive.into_iter().filter(|slot| slot.borrow.lock().is_none()).collect()
        };
        if !missing.is_empty() {
            let borrows = borrow_waiting(missing.iter().map(|slot| slot.storage.clone()).collect())?;
            for (slot, borrow) in missing.iter().zip(borrows) {
                *slot.borrow.lock() = Some(borrow);
            }
        }
        outcome
    }
}

/// Borrows storages for writing, and waits for those who have them.
fn borrow_waiting(storages: Vec<Arc<Storage>>) -> Result<Vec<Borrow>> {
    let (give, given) = mpsc::channel();
    let wanted = storages.into_iter().map(|storage| (storage, Access::Write)).collect();
    match borrow_all(wanted, Box::new(move |borrows| _ = give.send(borrows)))? {
        Some(borrows) => Ok(borrows),
        None => given.recv().map_err(|_| RpcError::internal("a tensor was not handed on")),
    }
}

/// The call that a function serves: what it may ask of its session.
///
/// A parameter with this annotation takes no argument.
#[pyclass(frozen, module = "tensor_rpc")]
pub(crate) struct Context(Arc<Frame>);

impl Context {
    pub(super) fn of(frame: Arc<Frame>) -> Self {
        Self(frame)
    }
}

#[pymethods]
impl Context {
    /// True if the result is no longer needed: the call was cancelled, its time is over, or the
    /// session has ended. A function that runs for long looks at this from time to time.
    #[getter]
    fn is_cancelled(&self) -> bool {
        self.0.context.is_cancelled()
    }

    /// Seconds until the caller stops waiting; `None` if it has set no timeout.
    #[getter]
    fn remaining(&self) -> Option<f64> {
        let deadline = self.0.context.deadline()?;
        Some(deadline.saturating_duration_since(Instant::now()).as_secs_f64())
    }

    /// Allocate a tensor of zeros, which counts against the memory of the session.
    ///
    /// Parameters
    /// ----------
    /// shape : sequence of int
    ///     Dimensions, outermost first.
    /// dtype : data type
    ///     Type of the elements.
    /// device : Device or str, optional
    ///     ``cpu:0`` by default.
    ///
    /// Returns
    /// -------
    /// DenseArray
    ///     Its memory. Returned by the function, it is a tensor of the client, without a copy.
    #[pyo3(signature = (shape, dtype = None, device = None))]
    fn allocate(
        &self,
        py: Python<'_>,
        shape: Vec<i64>,
        dtype: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<DenseArray> {
        let dtype = dtype.map_or(Ok(rpc_core::DataType::F32), types::data_type)?;
        let device = device.map_or(Ok(rpc_core::Device::cpu()), types::device)?;
        let made = py.detach(|| self.0.context.allocate(device, dtype, &shape));
        made.and_then(DenseArray::of_own).map_err(|error| errors::exception(py, &error))
    }

    /// Call another function of the session, and wait for it.
    ///
    /// Parameters
    /// ----------
    /// function : str or callable
    ///     A registered name, or a function that came as an argument.
    /// *args
    ///     Its arguments. Tensors among them must not be used meanwhile.
    #[pyo3(signature = (function, *args))]
    fn call(&self, py: Python<'_>, function: &Bound<'_, PyAny>, args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
        if let Ok(name) = function.cast::<PyString>() {
            let found = self.0.context.function(&name.to_cow()?).map_err(|error| errors::exception(py, &error))?;
            return call(py, &self.0.or_detached(), &found, args);
        }
        match function.cast::<LocalFunction>() {
            Ok(function) => call(py, &self.0.or_detached(), function.get().function(), args),
            Err(_) => function.call1(args).map(Bound::unbind),
        }
    }

    /// Call a function as `call` does, on another thread: for coroutines, which await it.
    #[pyo3(signature = (function, *args))]
    fn call_async<'py>(
        slf: &Bound<'py, Self>,
        function: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call_in_thread = slf.py().import("tensor_rpc._functions")?.getattr("call_in_thread")?;
        call_in_thread.call1((slf.getattr("call")?, function, args))
    }

    fn __repr__(&self) -> String {
        format!("<context of a call{}>", if self.is_cancelled() { ", cancelled" } else { "" })
    }
}

/// Makes an object of what a nested call has returned.
pub(super) fn returned(py: Python<'_>, frame: &Arc<Frame>, outcome: Result<LocalValue>) -> PyResult<Py<PyAny>> {
    match outcome {
        Ok(value) => values::incoming(py, frame, value),
        Err(error) => Err(errors::exception(py, &error)),
    }
}
