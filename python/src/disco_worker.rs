//! A worker of Disco, as functions of Python that run on it see it.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rpc_core::{Device, RpcError, Tensor};

use crate::argument::array;
use crate::array::{Array, DenseArray};
use crate::disco::{reduction, scope};
use crate::errors;
use crate::types;

/// The worker of the calling thread: its place among the others, and collectives with them.
///
/// Collectives take arrays and return new ones. All workers call the same ones in the same order.
#[pyclass(frozen, subclass, module = "tensor_rpc.disco")]
pub(crate) struct WorkerContext(::disco::WorkerContext);

impl WorkerContext {
    /// Copies an array into memory that counts against the session.
    fn own(&self, array: &Array) -> rpc_core::Result<Tensor> {
        let tensor = self.0.context().allocate(Device::cpu(), array.dtype, &array.shape)?;
        tensor.write()?.bytes_mut()?.copy_from_slice(&array.bytes);
        Ok(tensor)
    }

    /// Allocates the tensor that a collective fills.
    fn room(&self, dtype: rpc_core::DataType, shape: &[i64]) -> rpc_core::Result<Tensor> {
        self.0.context().allocate(Device::cpu(), dtype, shape)
    }

    /// Number of workers that take part.
    fn count(&self, in_group: bool) -> i64 {
        i64::from(if in_group { self.0.group_size() } else { self.0.world_size() })
    }

    /// Runs a collective, detached from the interpreter, and returns the tensor that it has filled.
    fn run(&self, py: Python<'_>, work: impl FnOnce(&Self) -> rpc_core::Result<Tensor> + Send) -> PyResult<DenseArray> {
        let outcome = py.detach(|| work(self).and_then(|tensor| DenseArray::of_view(tensor.read()?)));
        outcome.map_err(|error| errors::exception(py, &error))
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

    /// Device of tensors for which no device is named.
    #[getter]
    fn device(&self) -> types::Device {
        types::Device(self.0.device())
    }

    /// Reduce the arrays of all workers, which have the same shape, element by element.
    #[pyo3(signature = (array, op = "sum", in_group = true))]
    fn allreduce(&self, array: &Bound<'_, PyAny>, op: &str, in_group: bool) -> PyResult<DenseArray> {
        let (given, op) = (self::array(array)?, reduction(op)?);
        self.run(array.py(), |this| {
            let tensor = this.own(&given)?;
            this.0.allreduce(op, &tensor, &tensor, scope(in_group))?;
            Ok(tensor)
        })
    }

    /// Reduce the arrays of all workers, and return this worker's share of the result.
    #[pyo3(signature = (array, op = "sum", in_group = true))]
    fn reduce_scatter(&self, array: &Bound<'_, PyAny>, op: &str, in_group: bool) -> PyResult<DenseArray> {
        let (given, op) = (self::array(array)?, reduction(op)?);
        self.run(array.py(), |this| {
            let to = this.room(given.dtype, &share(&given.shape, this.count(in_group))?)?;
            this.0.reduce_scatter(op, &this.own(&given)?, &to, scope(in_group))?;
            Ok(to)
        })
    }

    /// Return the arrays of all workers, stacked along a new first dimension.
    #[pyo3(signature = (array, in_group = true))]
    fn allgather(&self, array: &Bound<'_, PyAny>, in_group: bool) -> PyResult<DenseArray> {
        let given = self::array(array)?;
        self.run(array.py(), |this| {
            let to = this.room(given.dtype, &[&[this.count(in_group)], &given.shape[..]].concat())?;
            this.0.allgather(&this.own(&given)?, &to, scope(in_group))?;
            Ok(to)
        })
    }

    /// Return the array of worker 0; the others give one of the same shape and type.
    #[pyo3(signature = (array, in_group = true))]
    fn broadcast_from_worker0(&self, array: &Bound<'_, PyAny>, in_group: bool) -> PyResult<DenseArray> {
        let given = self::array(array)?;
        self.run(array.py(), |this| {
            let tensor = this.own(&given)?;
            this.0.broadcast_from_worker0(Some(&tensor), &tensor, scope(in_group))?;
            Ok(tensor)
        })
    }

    /// Send share j of the array to worker j, and return what the others send to this one.
    #[pyo3(signature = (array, in_group = true))]
    fn all_to_all(&self, array: &Bound<'_, PyAny>, in_group: bool) -> PyResult<DenseArray> {
        let given = self::array(array)?;
        self.run(array.py(), |this| {
            share(&given.shape, this.count(in_group))?;
            let to = this.room(given.dtype, &given.shape)?;
            this.0.all_to_all(&this.own(&given)?, &to, scope(in_group))?;
            Ok(to)
        })
    }

    /// Send an array to another worker, which receives it with `recv`.
    fn send(&self, array: &Bound<'_, PyAny>, to: u32) -> PyResult<()> {
        let given = self::array(array)?;
        let sent = array.py().detach(|| self.0.send_to_worker(&self.own(&given)?, ::disco::WorkerId(to)));
        sent.map_err(|error| errors::exception(array.py(), &error))
    }

    /// Receive an array of this shape and type from another worker, which sends it with `send`.
    #[pyo3(name = "recv")]
    fn receive(&self, shape: Vec<i64>, dtype: &Bound<'_, PyAny>, from_worker: u32) -> PyResult<DenseArray> {
        let (py, dtype) = (dtype.py(), types::data_type(dtype)?);
        self.run(py, |this| {
            let to = this.room(dtype, &shape)?;
            this.0.recv_from_worker(&to, ::disco::WorkerId(from_worker))?;
            Ok(to)
        })
    }

    /// Wait until all workers have come here.
    #[pyo3(signature = (in_group = true))]
    fn barrier(&self, py: Python<'_>, in_group: bool) -> PyResult<()> {
        py.detach(|| self.0.barrier(scope(in_group))).map_err(|error| errors::exception(py, &error))
    }
}
