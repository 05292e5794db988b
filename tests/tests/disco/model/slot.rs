//! A worker's variable in the interpreter: its value, or the reason why it has none.

use std::cell::RefCell;
use std::rc::Rc;

use rpc_core::ErrorKind;

use super::data::{Data, Layout};
use super::session::{Fault, Seen};

#[derive(Clone, Debug)]
pub(crate) struct ModelTensor {
    pub(crate) data: Rc<RefCell<Data>>,
    pub(crate) shape: Vec<i64>,
}

impl ModelTensor {
    pub(crate) fn new(data: Data, shape: &[i64]) -> Self {
        Self { data: Rc::new(RefCell::new(data)), shape: shape.to_vec() }
    }

    pub(crate) fn len(&self) -> usize {
        self.data.borrow().len()
    }

    pub(crate) fn get(&self) -> Data {
        self.data.borrow().clone()
    }

    pub(crate) fn set(&self, data: Data) {
        *self.data.borrow_mut() = data;
    }

    pub(crate) fn is(&self, layout: &Layout) -> bool {
        matches!(*self.data.borrow(), Data::F32(_)) == layout.float
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Slot {
    Null,
    Int(i64),
    Float(f64),
    Tensor(ModelTensor),
    Poison(Fault),
}

/// Reason why a command has no result.
#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// Failure of the command itself, of this kind.
    Own(ErrorKind),
    /// Dependence on a failed command.
    Inherited(Fault),
}

pub(crate) const WRONG: Trouble = Trouble::Own(ErrorKind::InvalidArgument);

impl Slot {
    pub(crate) fn tensor(&self) -> Result<ModelTensor, Trouble> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Poison(fault) => Err(Trouble::Inherited(fault.clone())),
            _ => Err(WRONG),
        }
    }

    pub(crate) fn seen(&self) -> Seen {
        match self {
            Self::Null => Seen::Null,
            Self::Int(int) => Seen::Int(*int),
            Self::Float(float) => Seen::Float(float.to_bits()),
            Self::Tensor(tensor) => {
                let data = tensor.data.borrow();
                let float = matches!(*data, Data::F32(_));
                Seen::Tensor { float, shape: tensor.shape.clone(), bits: data.bits() }
            }
            Self::Poison(fault) => Seen::Failures(vec![fault.clone()]),
        }
    }
}
