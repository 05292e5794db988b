//! Types of a recorded program's parameters, and their checks: of values at the controller, of the
//! content of registers on each worker.

use std::fmt;

use rpc_core::function::Object;
use rpc_core::{DataType, LocalValue, RpcError, Value};

/// Type of a parameter of a recorded program: see
/// [`Recorder::parameter_of`](crate::Recorder::parameter_of).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ParameterType {
    /// Anything that a call takes as an argument.
    Any,
    /// A truth value.
    Bool,
    /// An integer.
    Int,
    /// A float; no integer is converted to one.
    Float,
    /// A string.
    Str,
    /// Bytes.
    Bytes,
    /// A shape.
    Shape,
    /// A data type.
    DataType,
    /// A device.
    Device,
    /// A list.
    List,
    /// A map.
    Map,
    /// A packed `serde` value.
    Packed,
    /// A function.
    Function,
    /// A module.
    Module,
    /// A tensor.
    Tensor {
        /// Data type; `None` for any.
        dtype: Option<DataType>,
        /// Shape, in which -1 stands for any length of a dimension; `None` for any.
        shape: Option<Vec<i64>>,
    },
}

impl ParameterType {
    const PLAIN: [Self; 14] = [
        Self::Any,
        Self::Bool,
        Self::Int,
        Self::Float,
        Self::Str,
        Self::Bytes,
        Self::Shape,
        Self::DataType,
        Self::Device,
        Self::List,
        Self::Map,
        Self::Packed,
        Self::Function,
        Self::Module,
    ];

    /// Returns the type of tensors of this data type and shape, in which -1 stands for any length
    /// of a dimension.
    pub fn tensor(dtype: DataType, shape: &[i64]) -> Self {
        Self::Tensor { dtype: Some(dtype), shape: Some(shape.to_vec()) }
    }

    /// Returns the name of the type.
    fn name(&self) -> &'static str {
        match self {
            Self::Any => "anything",
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Float => "float",
            Self::Str => "str",
            Self::Bytes => "bytes",
            Self::Shape => "shape",
            Self::DataType => "dtype",
            Self::Device => "device",
            Self::List => "list",
            Self::Map => "map",
            Self::Packed => "packed",
            Self::Function => "function",
            Self::Module => "module",
            Self::Tensor { .. } => "tensor",
        }
    }

    /// Checks an argument of the controller; `Ok` for one that only workers know.
    ///
    /// # Errors
    ///
    /// The type that the argument has instead.
    pub(crate) fn check<O>(&self, value: &Value<O>, given: impl FnOnce(&O) -> Given<'_>) -> Result<(), String> {
        let given = match value {
            Value::Object(object) => given(object),
            plain => Given::Other(plain.type_name()),
        };
        let fits = match (self, &given) {
            (Self::Any, _) | (_, Given::Unknown) => true,
            (Self::Tensor { dtype, shape }, Given::Tensor(found, dimensions)) => {
                let fits = |shape: &Vec<i64>| {
                    let each = shape.iter().zip(*dimensions);
                    shape.len() == dimensions.len() && { each }.all(|(want, found)| *want == -1 || want == found)
                };
                dtype.is_none_or(|dtype| dtype == *found) && shape.as_ref().is_none_or(fits)
            }
            (_, Given::Tensor(..)) => false,
            (wanted, Given::Other(name)) => wanted.name() == *name,
        };
        if fits { Ok(()) } else { Err(given.to_string()) }
    }

    /// As [`check`](Self::check), of what a worker has.
    pub(crate) fn check_local(&self, value: &LocalValue) -> Result<(), String> {
        self.check(value, |object| match object {
            Object::Tensor(tensor) => Given::Tensor(tensor.dtype(), tensor.shape()),
            other => Given::Other(other.type_name()),
        })
    }

    pub(crate) fn to_value(&self) -> Value {
        match self {
            Self::Tensor { dtype, shape } => Value::List(vec![
                dtype.map_or(Value::Null, Value::DataType),
                shape.clone().map_or(Value::Null, Value::Shape),
            ]),
            plain => Value::from(plain.name()),
        }
    }

    /// Reads a type; `None` if the value is none.
    pub(crate) fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Str(name) => Self::PLAIN.into_iter().find(|plain| plain.name() == name),
            Value::List(parts) => {
                let [dtype, shape] = <[Value; 2]>::try_from(parts).ok()?;
                let dtype = match dtype {
                    Value::Null => None,
                    Value::DataType(dtype) => Some(dtype),
                    _ => return None,
                };
                let shape = match shape {
                    Value::Null => None,
                    Value::Shape(shape) => Some(shape),
                    _ => return None,
                };
                Some(Self::Tensor { dtype, shape })
            }
            _ => None,
        }
    }
}

impl fmt::Display for ParameterType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Self::Tensor { dtype, shape } = self {
            dtype.map_or(Ok(()), |dtype| write!(f, " of {dtype}"))?;
            shape.as_ref().map_or(Ok(()), |shape| write!(f, " {shape:?}"))?;
        }
        Ok(())
    }
}

/// Argument, as far as the controller knows it.
pub(crate) enum Given<'a> {
    /// Only workers know it.
    Unknown,
    Tensor(DataType, &'a [i64]),
    Other(&'static str),
}

impl fmt::Display for Given<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("something"),
            Self::Tensor(dtype, shape) => write!(f, "tensor of {dtype} {shape:?}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Returns the error of an argument that does not fit: the parameters are counted from 1.
pub(crate) fn unfit(position: usize, wanted: &ParameterType, found: &str) -> RpcError {
    RpcError::invalid_argument(format!("parameter {position} takes {wanted}, and was given {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<ParameterType> {
        let mut all = ParameterType::PLAIN.to_vec();
        for dtype in [None, Some(DataType::F32)] {
            for shape in [None, Some(vec![]), Some(vec![2, -1])] {
                all.push(ParameterType::Tensor { dtype, shape });
            }
        }
        all
    }

    #[test]
    fn types_survive_their_values() {
        for one in all() {
            assert_eq!(ParameterType::from_value(one.to_value()), Some(one));
        }
        for odd in [Value::Null, Value::from("tensor"), Value::from("x"), Value::List(vec![]), Value::Int(3)] {
            assert_eq!(ParameterType::from_value(odd), None);
        }
    }

    fn tensor(_: &()) -> Given<'_> {
        Given::Tensor(DataType::F32, &[2, 3])
    }

    #[test]
    fn a_type_takes_what_it_says_and_nothing_else() {
        let values: [Value<()>; 6] =
            [Value::Null, Value::Bool(true), Value::Int(1), Value::Float(1.0), Value::from("x"), Value::Object(())];
        for (at, value) in values.iter().enumerate() {
            assert!(ParameterType::Any.check(value, tensor).is_ok());
            for (position, wanted) in
                [ParameterType::Bool, ParameterType::Int, ParameterType::Float, ParameterType::Str].iter().enumerate()
            {
                assert_eq!(wanted.check(value, tensor).is_ok(), at == position + 1, "{wanted} {value:?}");
            }
        }
        let fits = |dtype, shape: Option<&[i64]>| {
            let wanted = ParameterType::Tensor { dtype, shape: shape.map(<[i64]>::to_vec) };
            wanted.check(&Value::Object(()), tensor)
        };
        for shape in [None, Some(&[2, 3][..]), Some(&[-1, 3]), Some(&[-1, -1])] {
            assert_eq!(fits(None, shape), Ok(()));
            assert_eq!(fits(Some(DataType::F32), shape), Ok(()));
            assert_eq!(fits(Some(DataType::F64), shape), Err("tensor of float32 [2, 3]".to_owned()));
        }
        for shape in [&[][..], &[-1], &[3, 2], &[2, 3, 1], &[6]] {
            assert!(fits(None, Some(shape)).is_err());
        }
    }
}
