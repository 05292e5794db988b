//! Meshes: workers as a grid with named axes, and the groups along them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use ::disco::{Mesh, Scope, WorkerId};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors;

/// Workers that take part in a collective, as callers name them.
#[derive(FromPyObject)]
pub(crate) enum InGroup {
    /// True for the workers of the session's own groups, false for all.
    #[pyo3(transparent, annotation = "bool")]
    Own(bool),
    #[pyo3(transparent, annotation = "Group")]
    Along(DiscoGroup),
}

impl InGroup {
    /// Returns the scope.
    pub(crate) fn scope(&self) -> Scope {
        match self {
            Self::Own(true) => Scope::Group,
            Self::Own(false) => Scope::World,
            Self::Along(DiscoGroup(scope)) => *scope,
        }
    }
}

/// The workers of each group along an axis of a mesh, for the `in_group` of an operation.
#[pyclass(frozen, name = "Group", module = "tensor_rpc.disco", from_py_object)]
#[derive(Clone, Copy)]
pub(crate) struct DiscoGroup(pub(crate) Scope);

#[pymethods]
impl DiscoGroup {
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        repr_of(self.0)
    }
}

/// Describes the groups along an axis.
pub(crate) fn repr_of(scope: Scope) -> String {
    match scope {
        Scope::Groups(grouping) => format!("<{grouping}>"),
        _ => "<all workers>".to_owned(),
    }
}

/// All workers of a session as a grid with named axes: what `Session.mesh` returns.
///
/// Workers have their numbers in row-major order: along the last axis they are neighbours.
#[pyclass(frozen, name = "Mesh", module = "tensor_rpc.disco")]
pub(crate) struct DiscoMesh(pub(crate) Mesh);

#[pymethods]
impl DiscoMesh {
    /// Size of each axis, by its name.
    #[getter]
    fn axes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let axes = PyDict::new(py);
        self.0.axes().try_for_each(|(name, size)| axes.set_item(name, size))?;
        Ok(axes)
    }

    /// Number of workers, the product of all sizes.
    #[getter]
    fn num_workers(&self) -> u32 {
        self.0.num_workers()
    }

    /// Return the groups along an axis: those of workers that differ in their coordinate there
    /// alone.
    fn group(&self, py: Python<'_>, axis: &str) -> PyResult<DiscoGroup> {
        self.0.group(axis).map(DiscoGroup).map_err(|error| errors::exception(py, &error))
    }

    /// Return the coordinates of a worker, by the names of the axes.
    fn coordinates<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Bound<'py, PyDict>> {
        let at = self.0.coordinates(WorkerId(worker)).map_err(|error| errors::exception(py, &error))?;
        let coordinates = PyDict::new(py);
        self.0.axes().zip(at).try_for_each(|((name, _), at)| coordinates.set_item(name, at))?;
        Ok(coordinates)
    }

    /// Return the worker that has these coordinates, one for each axis.
    #[pyo3(signature = (**coordinates))]
    fn worker(&self, py: Python<'_>, coordinates: Option<&Bound<'_, PyDict>>) -> PyResult<u32> {
        let pairs = pairs(coordinates)?;
        let pairs: Vec<(&str, u32)> = pairs.iter().map(|(name, at)| (name.as_str(), *at)).collect();
        let worker = self.0.worker(&pairs).map_err(|error| errors::exception(py, &error))?;
        Ok(worker.0)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.axes().for_each(|axis| axis.hash(&mut hasher));
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<mesh {}>", self.0)
    }
}

/// Reads numbers by the names of axes, in their order.
pub(crate) fn pairs(numbers: Option<&Bound<'_, PyDict>>) -> PyResult<Vec<(String, u32)>> {
    let pair = |(name, number): (Bound<'_, PyAny>, Bound<'_, PyAny>)| Ok((name.extract()?, number.extract()?));
    numbers.into_iter().flat_map(|numbers| numbers.iter()).map(pair).collect()
}
