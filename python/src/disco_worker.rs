//! A worker of Disco, as functions of Python that run on it see it.

use ::disco::Scope;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rpc_core::{Device, RpcError, Tensor};

use crate::array::DenseArray;
use crate::disco::reduction;
use crate::disco_mesh::{DiscoGroup, DiscoMesh, InGroup};
use crate::errors;
use crate::lent::{Lent, pair};
use crate::types;

/// The worker of the calling thread: its place among the others, and collectives with them.
///
/// All workers call the same collectives in the same order. An array is read where it is if it is
/// contiguous, and copied otherwise. The result is a new array, which a function may return without
/// a copy; or `out` where one is given: a contiguous array that can be written to, of the type and
/// the size of the result. It may be the array itself (``worker.allreduce(x, out=x)``), and one of
/// them may be this worker's share of the other. No other thread may use the arrays meanwhile.
/// `in_group` is about the workers of this one's group, and not about all; or about those along an
/// axis of a mesh, which `axis` gives.
#[pyclass(frozen, subclass, module = "tensor_rpc.disco")]
pub(crate) struct WorkerContext(::disco::WorkerContext);

impl WorkerContext {
    /// Number of workers that take part.
    fn count(&self, scope: Scope) -> i64 {
        i64::from(self.0.size_of(scope))
    }

    /// Runs a collective, detached from the interpreter, and returns what it has filled: `out`, or
    /// a new array of this shape.
    fn run<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        shape: impl FnOnce(&[i64]) -> rpc_core::Result<Vec<i64>>,
        work: impl FnOnce(&::disco::WorkerContext, &Tensor, &Tensor) -> rpc_core::Result<()> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, from) = (array.py(), Lent::new(array)?);
        if let Some(out) = out {
            let (from, to) = pair(&from, &Lent::writable(&out)?)?;
            py.detach(|| work(&self.0, &from, &to)).map_err(|error| errors::exception(py, &error))?;
            return Ok(out);
        }
        let shape = shape(from.tensor().shape()).map_err(|error| errors::exception(py, &error))?;
        self.filled(py, from.tensor().dtype(), &shape, |worker, to| work(worker, from.tensor(), to))
    }

    /// Runs a collective that fills a new array.
    fn filled<'py>(
        &self,
        py: Python<'py>,
        dtype: rpc_core::DataType,
        shape: &[i64],
        work: impl FnOnce(&::disco::WorkerContext, &Tensor) -> rpc_core::Result<()> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let made = py.detach(|| {
            let to = self.0.context().allocate(Device::cpu(), dtype, shape)?;
            work(&self.0, &to)?;
            DenseArray::of_own(to)
        });
        Ok(Bound::new(py, made.map_err(|error| errors::exception(py, &error))?)?.into_any())
    }
}

/// Returns the shape of one worker's share of an array.
fn share(shape: &[i64], workers: i64) -> rpc_core::Result<Vec<i64>> {
    match shape.split_first() {
        Some((first, rest)) if first % workers == 0 => Ok([&[first / workers], rest].concat()),
        _ => Err(RpcError::invalid_argument(format!(
            "an array of shape {shape:?} has no equal shares for {workers} workers: its first dimension is divided"
        ))),
    }
}

#[pymethods]
impl WorkerContext {
    /// Return the worker of the calling thread.
    #[staticmethod]
    fn current() -> PyResult<Self> {
        ::disco::WorkerContext::current().map(Self).ok_or_else(|| {
            PyRuntimeError::new_err("this thread is no worker of Disco: only functions that workers call are on one")
        })
    }

    /// Number of this worker in its session, from 0.
    #[getter]
    fn worker_id(&self) -> u32 {
        self.0.worker_id().0
    }

    /// Number of workers of the session.
    #[getter]
    fn num_workers(&self) -> u32 {
        self.0.world_size()
    }

    /// Number of groups.
    #[getter]
    fn num_groups(&self) -> u32 {
        self.0.num_groups()
    }

    /// Number of workers in each group.
    #[getter]
    fn group_size(&self) -> u32 {
        self.0.group_size()
    }

    /// Number of this worker's group.
    #[getter]
    fn group(&self) -> u32 {
        self.0.group()
    }

    /// Number of this worker in its group.
    #[getter]
    fn rank_in_group(&self) -> u32 {
        self.0.rank_in_group().0
    }

    /// Meshes of the session, the oldest first.
    #[getter]
    fn meshes(&self) -> Vec<DiscoMesh> {
        self.0.meshes().iter().cloned().map(DiscoMesh).collect()
    }

    /// Return the groups along an axis of a mesh of the session, for `in_group`.
    fn axis(&self, py: Python<'_>, name: &str) -> PyResult<DiscoGroup> {
        self.0.axis(name).map(DiscoGroup).map_err(|error| errors::exception(py, &error))
    }

    /// Return the number of this worker in its group: along an axis, its coordinate there.
    #[pyo3(signature = (in_group = InGroup::Own(true)), text_signature = "($self, in_group=True)")]
    fn rank_in(&self, in_group: InGroup) -> u32 {
        self.0.rank_in(in_group.scope()).0
    }

    /// Return the number of workers in each group.
    #[pyo3(signature = (in_group = InGroup::Own(true)), text_signature = "($self, in_group=True)")]
    fn size_of(&self, in_group: InGroup) -> u32 {
        self.0.size_of(in_group.scope())
    }

    /// Device of tensors for which no device is named.
    #[getter]
    fn device(&self) -> types::Device {
        types::Device(self.0.device())
    }

    /// Reduce the arrays of all workers, which have the same shape, element by element.
    #[pyo3(
        signature = (array, op = "sum", in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, op='sum', in_group=True, *, out=None)"
    )]
    fn allreduce<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (op, scope) = (reduction(op)?, in_group.scope());
        self.run(array, out, |shape| Ok(shape.to_vec()), |worker, from, to| worker.allreduce(op, from, to, scope))
    }

    /// Reduce the arrays of all workers, and return this worker's share of the result: that of its
    /// number, along the first dimension.
    #[pyo3(
        signature = (array, op = "sum", in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, op='sum', in_group=True, *, out=None)"
    )]
    fn reduce_scatter<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (op, scope) = (reduction(op)?, in_group.scope());
        let count = self.count(scope);
        let work = |worker: &::disco::WorkerContext, from: &_, to: &_| worker.reduce_scatter(op, from, to, scope);
        self.run(array, out, |shape| share(shape, count), work)
    }

    /// Return the arrays of all workers, stacked along a new first dimension.
    #[pyo3(
        signature = (array, in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, in_group=True, *, out=None)"
    )]
    fn allgather<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let scope = in_group.scope();
        let count = self.count(scope);
        let stacked = |shape: &[i64]| Ok([&[count], shape].concat());
        self.run(array, out, stacked, |worker, from, to| worker.allgather(from, to, scope))
    }

    /// Return the array of worker 0; the others give one of the same shape and type.
    #[pyo3(
        signature = (array, in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, in_group=True, *, out=None)"
    )]
    fn broadcast_from_worker0<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let scope = in_group.scope();
        let work =
            |worker: &::disco::WorkerContext, from: &_, to: &_| worker.broadcast_from_worker0(Some(from), to, scope);
        self.run(array, out, |shape| Ok(shape.to_vec()), work)
    }

    /// Return this worker's share of the array of worker 0; the others give one of the same shape
    /// and type.
    #[pyo3(
        signature = (array, in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, in_group=True, *, out=None)"
    )]
    fn scatter_from_worker0<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let scope = in_group.scope();
        let count = self.count(scope);
        let work =
            |worker: &::disco::WorkerContext, from: &_, to: &_| worker.scatter_from_worker0(Some(from), to, scope);
        self.run(array, out, |shape| share(shape, count), work)
    }

    /// Return the arrays of all workers, stacked along a new first dimension, on worker 0 (of the
    /// group); `None` on the others, which need no `out`.
    #[pyo3(
        signature = (array, in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, in_group=True, *, out=None)"
    )]
    fn gather_to_worker0<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let scope = in_group.scope();
        let count = self.count(scope);
        if self.0.rank_in(scope).0 == 0 {
            let stacked = |shape: &[i64]| Ok([&[count], shape].concat());
            return self
                .run(array, out, stacked, |worker, from, to| worker.gather_to_worker0(from, Some(to), scope))
                .map(Some);
        }
        let (py, from) = (array.py(), Lent::new(array)?);
        let gathered = py.detach(|| self.0.gather_to_worker0(from.tensor(), None, scope));
        gathered.map(|()| None).map_err(|error| errors::exception(py, &error))
    }

    /// Send share j of the array to worker j, and return what the others send to this one.
    #[pyo3(
        signature = (array, in_group = InGroup::Own(true), *, out = None),
        text_signature = "($self, array, in_group=True, *, out=None)"
    )]
    fn all_to_all<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        in_group: InGroup,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let scope = in_group.scope();
        let count = self.count(scope);
        let same = |shape: &[i64]| share(shape, count).map(|_| shape.to_vec());
        self.run(array, out, same, |worker, from, to| worker.all_to_all(from, to, scope))
    }

    /// Send an array to another worker, which receives it with `recv` or `recv_into`.
    fn send(&self, array: &Bound<'_, PyAny>, to: u32) -> PyResult<()> {
        let (py, from) = (array.py(), Lent::new(array)?);
        let sent = py.detach(|| self.0.send_to_worker(from.tensor(), ::disco::WorkerId(to)));
        sent.map_err(|error| errors::exception(py, &error))
    }

    /// Receive an array of this shape and type from another worker, which sends it with `send`.
    #[pyo3(name = "recv")]
    fn receive<'py>(
        &self,
        shape: Vec<i64>,
        dtype: &Bound<'py, PyAny>,
        from_worker: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, dtype, peer) = (dtype.py(), types::data_type(dtype)?, ::disco::WorkerId(from_worker));
        self.filled(py, dtype, &shape, |worker, to| worker.recv_from_worker(to, peer))
    }

    /// Receive into a contiguous array what another worker sends with `send`.
    #[pyo3(name = "recv_into")]
    fn receive_into(&self, out: &Bound<'_, PyAny>, from_worker: u32) -> PyResult<()> {
        let (py, to) = (out.py(), Lent::writable(out)?);
        let received = py.detach(|| self.0.recv_from_worker(to.tensor(), ::disco::WorkerId(from_worker)));
        received.map_err(|error| errors::exception(py, &error))
    }

    /// Wait until all workers have come here.
    #[pyo3(signature = (in_group = InGroup::Own(true)), text_signature = "($self, in_group=True)")]
    fn barrier(&self, py: Python<'_>, in_group: InGroup) -> PyResult<()> {
        py.detach(|| self.0.barrier(in_group.scope())).map_err(|error| errors::exception(py, &error))
    }
}
