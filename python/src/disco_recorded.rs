//! Values of programs that are being recorded.

use ::disco::{Operand, Recorded};
use pyo3::prelude::*;

/// A value of a program that is being recorded: a parameter, or what a step makes.
#[pyclass(frozen, name = "Recorded", module = "tensor_rpc.disco")]
pub(crate) struct DiscoRecorded(pub(crate) Recorded);

impl DiscoRecorded {
    /// Returns the value as an argument.
    pub(crate) fn operand(&self) -> Operand {
        Operand::Recorded(self.0)
    }
}

#[pymethods]
impl DiscoRecorded {
    fn __repr__(&self) -> &'static str {
        "<value of a program of Disco>"
    }
}
