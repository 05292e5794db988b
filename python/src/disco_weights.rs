//! Weights of safetensors files: the controller's side of loading.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::disco::{DRef, Part, Scope, ShardLoader, TensorInfo};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::attach::attached;
use crate::disco::{DiscoSession, constraint, exception, operation, room};
use crate::disco_mesh::{InGroup, repr_of};
use crate::disco_ref::DiscoRef;
use crate::functions::runtime;
use crate::operation::{Born, Operation};
use crate::types::DataType;

/// Part of a tensor that each worker gets, made by its class methods.
#[pyclass(frozen, name = "Part", module = "tensor_rpc.disco", from_py_object)]
#[derive(Clone)]
pub(crate) struct DiscoPart(Part);

#[pymethods]
impl DiscoPart {
    /// Return the whole tensor, for each worker.
    #[staticmethod]
    fn whole() -> Self {
        Self(Part::Whole)
    }

    /// Return one of as many equal shards as there are workers, in the order of their numbers.
    ///
    /// Parameters
    /// ----------
    /// dim : int
    ///     Dimension that is divided, from 0. Its length is a multiple of the number of workers.
    /// in_group : bool or Group
    ///     The workers of each group, such as those along an axis of a mesh, share one tensor, and
    ///     not all workers.
    #[staticmethod]
    #[pyo3(signature = (dim, in_group = InGroup::Own(false)), text_signature = "(dim, in_group=False)")]
    fn shard(dim: usize, in_group: InGroup) -> Self {
        Self(Part::Shard { dim, scope: in_group.scope() })
    }

    /// Return what a function makes, which each worker calls with a `WeightReader`.
    ///
    /// Parameters
    /// ----------
    /// name : str
    ///     Name of the function on the workers. What it returns, usually a tensor, is the worker's
    ///     value.
    #[staticmethod]
    fn by_function(name: String) -> Self {
        Self(Part::with(name))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        match &self.0 {
            Part::Whole => "Part.whole()".to_owned(),
            Part::Shard { dim, scope: Scope::World } => format!("Part.shard({dim})"),
            Part::Shard { dim, scope: Scope::Group } => format!("Part.shard({dim}, in_group=True)"),
            Part::Shard { dim, scope } => format!("Part.shard({dim}, in_group={})", repr_of(*scope)),
            Part::With { function } => format!("Part.by_function({function:?})"),
        }
    }
}

/// The files of a model, opened by the controller and its workers.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct DiscoLoader {
    session: ::disco::DiscoSession,
    /// `None` while this is dropped.
    loader: Option<Born<Arc<ShardLoader>>>,
    /// True once nothing is to be told of progress any more.
    is_over: Arc<AtomicBool>,
}

impl DiscoLoader {
    fn loader(&self) -> PyResult<&Arc<ShardLoader>> {
        self.loader.as_ref().ok_or_else(|| PyRuntimeError::new_err("the loader is gone"))?.get()
    }
}

impl Drop for DiscoLoader {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // The end of a loader waits for the function for progress, which waits for the interpreter
        // that this thread has, or runs on this thread.
        if let Some(loader) = self.loader.take()
            && loader.get().is_ok()
            && let Ok(runtime) = runtime()
        {
            runtime.spawn_blocking(move || drop(loader));
        }
    }
}

/// Facts of a tensor: its name, type, shape and size in bytes.
type Facts = (String, DataType, Vec<i64>, u64);

fn facts((name, TensorInfo { dtype, shape, size_bytes, .. }): (&str, &TensorInfo)) -> Facts {
    (name.to_owned(), DataType(*dtype), shape.clone(), *size_bytes)
}

#[pymethods]
impl DiscoLoader {
    /// All tensors, by name.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.loader()?.tensors().map(facts).collect::<Vec<_>>())
    }

    /// Files that workers cannot read: worker, file and reason.
    fn unreadable(&self) -> PyResult<Vec<(u32, PathBuf, String)>> {
        let all = self.loader()?.unreadable().iter();
        Ok(all.map(|one| (one.worker.0, one.file.clone(), one.reason.clone())).collect())
    }

    /// Loads tensors, and waits only while the workers are behind by a whole window.
    fn load_op(
        &self,
        py: Python<'_>,
        parts: BTreeMap<String, DiscoPart>,
        device: Option<String>,
    ) -> PyResult<Operation> {
        let (loader, device) = (self.loader()?.clone(), constraint(py, device)?);
        room(py, &self.session)?;
        // Loads block, and read files where no worker can.
        let work = runtime()?.spawn_blocking(move || -> ::disco::Result<Vec<DRef>> {
            if let Some(unknown) = parts.keys().find(|name| loader.tensor(name).is_none()) {
                return loader.load(unknown, Part::Whole, device).map(|loaded| vec![loaded]);
            }
            let part = |name: &str, _: &TensorInfo| parts.get(name).map(|part| part.0.clone());
            Ok(loader.load_all(part, device)?.into_values().collect())
        });
        let work = async move {
            work.await.map_err(|error| rpc_core::RpcError::internal(format!("a load panicked: {error}")))
        };
        Ok(Operation::new(work, |py, _, loaded| {
            let loaded = loaded.map_err(|error| exception(py, &error))?;
            let loaded = loaded.into_iter().map(|loaded| Bound::new(py, DiscoRef::of(loaded)));
            Ok(PyTuple::new(py, loaded.collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
        }))
    }
}

/// Opens the files of a model. `progress` is called with the bytes that were loaded, and those that
/// all loads will bring.
#[pyfunction]
#[pyo3(signature = (session, path, folder = None, progress = None))]
pub(crate) fn open_weights_op(
    session: &DiscoSession,
    path: PathBuf,
    folder: Option<PathBuf>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Operation> {
    let session = session.session()?.clone();
    let opened = match folder {
        Some(folder) => ShardLoader::open_at(&session, path, folder),
        None => ShardLoader::open(&session, path),
    };
    Ok(operation(opened, move |py, _, loader| {
        let is_over = Arc::new(AtomicBool::new(false));
        let loader = match progress {
            Some(progress) => {
                let is_over = is_over.clone();
                py.detach(move || loader.progress(move |done, total| report(&progress, &is_over, done, total)))
            }
            None => loader,
        };
        let loader = DiscoLoader { session, loader: Some(Born::new(Arc::new(loader))), is_over };
        Ok(Bound::new(py, loader)?.into_any().unbind())
    }))
}

/// Calls a function for progress, until it raises an exception for the first time.
fn report(progress: &Py<PyAny>, is_over: &AtomicBool, done: u64, total: u64) {
    if is_over.load(Ordering::Relaxed) {
        return;
    }
    attached(|py| {
        if let Err(error) = progress.call1(py, (done, total)) {
            is_over.store(true, Ordering::Relaxed);
            // There is no caller on this thread that it could be raised to.
            error.write_unraisable(py, Some(progress.bind(py)));
        }
    });
}
