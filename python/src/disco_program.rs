//! Programs that the workers of Disco keep: their recording, and their runs.

use ::disco::{DPackedFunc, DRef, ParameterType, Program, Recorded, Recorder, WorkerId};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::disco::{DiscoSession, arguments, constraint, exception, reduction, room};
use crate::disco_mesh::InGroup;
use crate::disco_recorded::DiscoRecorded;
use crate::disco_ref::DiscoRef;
use crate::operation::Born;
use crate::types;

/// A value that a step takes: a recorded one, or a reference of the session, which is captured.
enum Source {
    Recorded(Recorded),
    Reference(DRef),
}

impl Source {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(recorded) = object.cast::<DiscoRecorded>() {
            return Ok(Self::Recorded(recorded.get().0));
        }
        match object.cast::<DiscoRef>() {
            Ok(reference) => Ok(Self::Reference(reference.get().reference()?)),
            Err(_) => Err(PyTypeError::new_err(format!(
                "an object of {}, where a value of the program or of the session's workers is wanted",
                object.get_type().qualname()?
            ))),
        }
    }

    fn recorded(self, recorder: &Recorder) -> ::disco::Result<Recorded> {
        match self {
            Self::Recorded(recorded) => Ok(recorded),
            Self::Reference(reference) => recorder.capture(&reference),
        }
    }
}

/// A program that is being recorded.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct DiscoRecorder {
    session: ::disco::DiscoSession,
    recorder: Born<Mutex<Option<Recorder>>>,
}

impl DiscoRecorder {
    /// Records something. No code of Python runs with the lock held.
    fn with<T>(&self, py: Python<'_>, record: impl FnOnce(&Recorder) -> ::disco::Result<T>) -> PyResult<T> {
        let recorded = self.recorder.get()?.lock().as_ref().map(record);
        recorded.ok_or_else(ended)?.map_err(|error| exception(py, &error))
    }

    fn step(
        &self,
        py: Python<'_>,
        record: impl FnOnce(&Recorder) -> ::disco::Result<Recorded>,
    ) -> PyResult<DiscoRecorded> {
        self.with(py, record).map(DiscoRecorded)
    }
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the recording of this program has ended")
}

#[pymethods]
impl DiscoRecorder {
    #[new]
    fn new(session: &DiscoSession) -> PyResult<Self> {
        let session = session.session()?.clone();
        let recorder = Born::new(Mutex::new(Some(session.recorder())));
        Ok(Self { session, recorder })
    }

    /// Adds a parameter of the type of this name.
    fn parameter(&self, py: Python<'_>, kind: &str) -> PyResult<DiscoRecorded> {
        let wanted = match kind {
            "any" => ParameterType::Any,
            "bool" => ParameterType::Bool,
            "int" => ParameterType::Int,
            "float" => ParameterType::Float,
            "str" => ParameterType::Str,
            "bytes" => ParameterType::Bytes,
            "shape" => ParameterType::Shape,
            "dtype" => ParameterType::DataType,
            "device" => ParameterType::Device,
            "list" => ParameterType::List,
            "map" => ParameterType::Map,
            "packed" => ParameterType::Packed,
            "function" => ParameterType::Function,
            "module" => ParameterType::Module,
            other => return Err(PyValueError::new_err(format!("{other:?} is no type of a parameter"))),
        };
        self.step(py, |recorder| Ok(recorder.parameter_of(wanted)))
    }

    /// Adds a parameter that is a tensor.
    fn tensor_parameter(
        &self,
        py: Python<'_>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<Vec<i64>>,
    ) -> PyResult<DiscoRecorded> {
        let wanted = ParameterType::Tensor { dtype: dtype.map(types::data_type).transpose()?, shape };
        self.step(py, |recorder| Ok(recorder.parameter_of(wanted)))
    }

    fn call(&self, function: &Bound<'_, PyAny>, args: &Bound<'_, PyTuple>) -> PyResult<DiscoRecorded> {
        let (py, function, args) = (function.py(), Source::new(function)?, arguments(args)?);
        self.step(py, |recorder| match function {
            Source::Recorded(function) => recorder.call_value(&function, args),
            Source::Reference(function) => recorder.call(&DPackedFunc::from(function), args),
        })
    }

    fn empty(&self, shape: Vec<i64>, dtype: &Bound<'_, PyAny>, device: Option<String>) -> PyResult<DiscoRecorded> {
        let (py, dtype) = (dtype.py(), types::data_type(dtype)?);
        let device = constraint(py, device)?;
        self.step(py, |recorder| recorder.empty(&shape, dtype, device))
    }

    fn collective(
        &self,
        kind: &str,
        from: &Bound<'_, PyAny>,
        to: Option<&Bound<'_, PyAny>>,
        op: &str,
        in_group: InGroup,
    ) -> PyResult<DiscoRecorded> {
        let (py, scope, op) = (from.py(), in_group.scope(), reduction(op)?);
        let (from, to) = (Source::new(from)?, to.map(Source::new).transpose()?);
        self.step(py, |recorder| {
            let from = from.recorded(recorder)?;
            let to = to.map(|to| to.recorded(recorder)).transpose()?;
            let to = to.as_ref();
            match kind {
                "allreduce" => recorder.allreduce(&from, to, op, scope),
                "reduce_scatter" => recorder.reduce_scatter(&from, to, op, scope),
                "allgather" => recorder.allgather(&from, to, scope),
                "all_to_all" => recorder.all_to_all(&from, to, scope),
                "broadcast" => recorder.broadcast_from_worker0(&from, to, scope),
                "scatter" => recorder.scatter_from_worker0(&from, to, scope),
                _ => recorder.gather_to_worker0(&from, to, scope),
            }
        })
    }

    fn barrier(&self, py: Python<'_>, in_group: InGroup) -> PyResult<()> {
        self.with(py, |recorder| {
            recorder.barrier(in_group.scope());
            Ok(())
        })
    }

    fn send_recv(&self, from: &Bound<'_, PyAny>, to: &Bound<'_, PyAny>, pairs: Vec<(u32, u32)>) -> PyResult<()> {
        let (py, from, to) = (from.py(), Source::new(from)?, Source::new(to)?);
        let pairs: Vec<_> = pairs.into_iter().map(|(from, to)| (WorkerId(from), WorkerId(to))).collect();
        self.with(py, |recorder| recorder.send_recv(&from.recorded(recorder)?, &to.recorded(recorder)?, &pairs))
    }

    /// Ends the recording, and sends nothing.
    fn discard(&self) -> PyResult<()> {
        // Dropped without the lock.
        let recorder = self.recorder.get()?.lock().take();
        drop(recorder);
        Ok(())
    }

    /// Ends the recording, and sends the program to the workers.
    fn finish(&self, py: Python<'_>, outputs: Vec<Py<DiscoRecorded>>) -> PyResult<DiscoProgram> {
        let outputs: Vec<_> = outputs.iter().map(|output| output.get().0).collect();
        let recorder = self.recorder.get()?;
        // First, so that a signal which ends the wait leaves the recording.
        room(py, &self.session)?;
        let recorder = recorder.lock().take().ok_or_else(ended)?;
        let program = py.detach(|| recorder.finish(&outputs)).map_err(|error| exception(py, &error))?;
        Ok(DiscoProgram { session: self.session.clone(), program: Born::new(program) })
    }
}

/// A recorded program, which the workers keep until this is dropped.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct DiscoProgram {
    session: ::disco::DiscoSession,
    program: Born<Program>,
}

#[pymethods]
impl DiscoProgram {
    /// Number by which failures name the program.
    #[getter]
    fn number(&self) -> u32 {
        self.program.facts().number()
    }

    fn run(&self, args: &Bound<'_, PyTuple>) -> PyResult<Vec<DiscoRef>> {
        let (py, program, args) = (args.py(), self.program.get()?, arguments(args)?);
        room(py, &self.session)?;
        let made = py.detach(|| program.run(args)).map_err(|error| exception(py, &error))?;
        Ok(made.into_iter().map(DiscoRef::of).collect())
    }
}
