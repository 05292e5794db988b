//! Parameters of kernels: what a kernel declares, and the values that fit.

use std::fmt;

use opencl3::kernel::{
    CL_KERNEL_ARG_ADDRESS_CONSTANT, CL_KERNEL_ARG_ADDRESS_GLOBAL, CL_KERNEL_ARG_ADDRESS_LOCAL,
    CL_KERNEL_ARG_ADDRESS_PRIVATE,
};
use opencl3::types::cl_uint;

use rpc_core::dlpack::{DataType, DataTypeCode};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{LocalValue, Object};
use rpc_core::tensor::Tensor;
use rpc_core::value::Value;

/// A parameter of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parameter {
    /// A pointer to the device's memory, with the type of what it points to.
    Pointer(TypeName),
    /// A pointer to memory that each work-group has of its own.
    Local(TypeName),
    /// A value.
    Value(TypeName),
}

/// Name of a type, and its elements if it is one of OpenCL's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TypeName {
    name: String,
    elements: Option<Elements>,
}

/// One number, or a vector of some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Elements {
    kind: Kind,
    /// Bytes of one number.
    size: usize,
    /// Bytes of the whole vector.
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Signed,
    Unsigned,
    Float,
}

/// A value for a parameter.
#[derive(Debug)]
pub(super) enum Argument<'a> {
    Tensor(&'a Tensor),
    Null,
    /// Bytes of local memory.
    Local(usize),
    Bytes(Vec<u8>),
}

impl Parameter {
    /// Returns the parameter that the driver describes with this address space and type.
    /// `has_half` is true if the device has numbers of two bytes, and so names for their vectors.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`](rpc_core::ErrorKind::Unsupported), for objects of the driver, as
    /// images and samplers are, of which the driver takes the bytes for a pointer of its own. A
    /// name that the program has given to a type may stand for one.
    pub(super) fn new(address: cl_uint, type_name: &str, has_half: bool) -> Result<Self> {
        let pointed_to = type_name.strip_suffix('*').map(|name| TypeName::new(name.trim_end_matches('*').trim_end()));
        match (address, pointed_to) {
            (CL_KERNEL_ARG_ADDRESS_GLOBAL | CL_KERNEL_ARG_ADDRESS_CONSTANT, Some(of)) => Ok(Self::Pointer(of)),
            (CL_KERNEL_ARG_ADDRESS_LOCAL, Some(of)) => Ok(Self::Local(of)),
            (CL_KERNEL_ARG_ADDRESS_PRIVATE, None) if TypeName::new(type_name).is_value(has_half) => {
                Ok(Self::Value(TypeName::new(type_name)))
            }
            _ => Err(RpcError::unsupported(format!(
                "clients cannot give a '{type_name}': a parameter is a pointer with its '*', a number or a vector by \
                 OpenCL's name of it, or a 'struct' or 'union' by its tag, since other names may stand for an object \
                 of the driver"
            ))),
        }
    }

    /// Converts a value to what the driver takes for the parameter.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`](rpc_core::ErrorKind::InvalidArgument), with the reason.
    pub(super) fn argument<'a>(&self, value: &'a LocalValue) -> Result<Argument<'a>> {
        let wrong = |expected: &str| {
            let given = match value {
                Value::Object(object) => object.type_name(),
                other => other.type_name(),
            };
            Err(RpcError::invalid_argument(format!("expected {expected} for {self}, got {given}")))
        };
        match (self, value) {
            (Self::Pointer(pointed_to), Value::Object(Object::Tensor(tensor))) => {
                pointed_to.check_elements(tensor.dtype())?;
                Ok(Argument::Tensor(tensor))
            }
            (Self::Pointer(_), Value::Null) => Ok(Argument::Null),
            (Self::Pointer(_), _) => wrong("a tensor or null"),
            (Self::Local(_), Value::Int(bytes)) => match usize::try_from(*bytes) {
                Ok(bytes) if bytes > 0 => Ok(Argument::Local(bytes)),
                _ => Err(RpcError::invalid_argument(format!("{bytes} is no size of local memory in bytes"))),
            },
            (Self::Local(_), _) => wrong("the bytes of local memory as an int"),
            (Self::Value(of), _) => of.value(value),
        }
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pointer(of) => write!(f, "{}*", of.name),
            Self::Local(of) => write!(f, "local {}*", of.name),
            Self::Value(of) => f.write_str(&of.name),
        }
    }
}

impl TypeName {
    fn new(name: &str) -> Self {
        let plain = name.strip_prefix("const ").unwrap_or(name).trim();
        Self { name: plain.to_owned(), elements: Elements::of(plain) }
    }

    /// Returns true if the name is that of a value, whatever the program defines.
    fn is_value(&self, has_half: bool) -> bool {
        let is_own_struct = self.name.starts_with("struct ") || self.name.starts_with("union ");
        // A program may define what the device's OpenCL has no name for.
        let is_vector_of_halves = |of: Elements| of.kind == Kind::Float && of.size == 2 && of.bytes > 2;
        is_own_struct || self.elements.is_some_and(|of| has_half || !is_vector_of_halves(of))
    }

    /// Checks that a kernel which is given elements of this type finds what it expects. Bytes are
    /// memory of any type, and a type of the program's own may be anything.
    fn check_elements(&self, dtype: DataType) -> Result<()> {
        let Some(Elements { kind, size, .. }) = self.elements else { return Ok(()) };
        let is_float = [DataTypeCode::FLOAT, DataTypeCode::COMPLEX].contains(&dtype.code);
        let bits = if dtype.code == DataTypeCode::COMPLEX { dtype.bits / 2 } else { dtype.bits };
        // Numbers of two bytes may be bfloat16, which OpenCL has no name for.
        let is_same_kind = (kind == Kind::Float) == is_float || dtype.code == DataTypeCode::BFLOAT && size == 2;
        if size == 1 || usize::from(bits) == 8 * size && is_same_kind {
            Ok(())
        } else {
            Err(RpcError::invalid_argument(format!("a tensor of {dtype} was given for {}*", self.name)))
        }
    }

    fn value<'a>(&self, value: &LocalValue) -> Result<Argument<'a>> {
        let name = &self.name;
        let wrong = |text: String| Err(RpcError::invalid_argument(text));
        let bytes = match (value, self.elements) {
            (Value::Bytes(bytes), Some(elements)) if bytes.len() != elements.bytes => {
                return wrong(format!("{} bytes were given for {name}, which has {}", bytes.len(), elements.bytes));
            }
            (Value::Bytes(bytes), _) => bytes.to_vec(),
            (_, None) => return wrong(format!("expected the bytes of a value of type {name}")),
            (_, Some(elements)) if elements.bytes != elements.size => {
                return wrong(format!("expected the {} bytes of a value of type {name}", elements.bytes));
            }
            (Value::Bool(bool), Some(elements)) if elements.kind != Kind::Float => {
                u64::from(*bool).to_le_bytes()[..elements.size].to_vec()
            }
            (Value::Int(int), Some(elements)) => match elements.int(*int) {
                Some(bytes) => bytes,
                None => return wrong(format!("{int} does not fit {name}")),
            },
            (Value::Float(float), Some(elements)) if elements.kind == Kind::Float => elements.float(*float),
            (Value::Float(float), Some(_)) => return wrong(format!("expected an int for {name}, got {float}")),
            (other, Some(_)) => {
                let given = match other {
                    Value::Object(object) => object.type_name(),
                    other => other.type_name(),
                };
                return wrong(format!("expected a number or bytes for {name}, got {given}"));
            }
        };
        Ok(Argument::Bytes(bytes))
    }
}

impl Elements {
    /// Returns the elements of one of OpenCL's types, by its name.
    fn of(name: &str) -> Option<Self> {
        let scalar = |name: &str| {
            Some(match name {
                "char" => (Kind::Signed, 1),
                "uchar" | "unsigned char" | "bool" => (Kind::Unsigned, 1),
                "short" => (Kind::Signed, 2),
                "ushort" | "unsigned short" => (Kind::Unsigned, 2),
                "int" => (Kind::Signed, 4),
                "uint" | "unsigned int" | "unsigned" => (Kind::Unsigned, 4),
                "long" => (Kind::Signed, 8),
                "ulong" | "unsigned long" => (Kind::Unsigned, 8),
                "half" => (Kind::Float, 2),
                "float" => (Kind::Float, 4),
                "double" => (Kind::Float, 8),
                _ => return None,
            })
        };
        if let Some((kind, size)) = scalar(name) {
            return Some(Self { kind, size, bytes: size });
        }
        let digits = name.find(|character: char| character.is_ascii_digit())?;
        // There are no vectors of those.
        let vectors_of = |name: &&str| *name != "bool" && !name.starts_with("unsigned");
        let (kind, size) = scalar(Some(&name[..digits]).filter(vectors_of)?)?;
        // A vector of three has room for four.
        let lanes = match &name[digits..] {
            "2" => 2,
            "3" | "4" => 4,
            "8" => 8,
            "16" => 16,
            _ => return None,
        };
        Some(Self { kind, size, bytes: size * lanes })
    }

    /// Returns the bytes of an int in this type, if it can be written there.
    fn int(self, int: i64) -> Option<Vec<u8>> {
        let bits = 8 * self.size as u32;
        match self.kind {
            Kind::Float if int as f64 as i128 == i128::from(int) => Some(self.float(int as f64)),
            Kind::Float => None,
            _ if bits == 64 => (self.kind == Kind::Signed || int >= 0).then(|| int.to_le_bytes().into()),
            Kind::Signed => (-(1_i64 << (bits - 1))..1 << (bits - 1)).contains(&int).then(|| self.lowest(int)),
            Kind::Unsigned => (0..1_i64 << bits).contains(&int).then(|| self.lowest(int)),
        }
    }

    fn lowest(self, int: i64) -> Vec<u8> {
        int.to_le_bytes()[..self.size].to_vec()
    }

    /// Returns the bytes of the nearest number of this type.
    fn float(self, float: f64) -> Vec<u8> {
        match self.size {
            2 => half::f16::from_f64(float).to_le_bytes().into(),
            4 => (float as f32).to_le_bytes().into(),
            _ => float.to_le_bytes().into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(type_name: &str, value: LocalValue) -> Result<Vec<u8>> {
        match Parameter::new(CL_KERNEL_ARG_ADDRESS_PRIVATE, type_name, false)?.argument(&value)? {
            Argument::Bytes(bytes) => Ok(bytes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn numbers_take_the_type_of_the_parameter() {
        assert_eq!(bytes("int", Value::Int(-2)).unwrap(), (-2_i32).to_le_bytes());
        assert_eq!(bytes("uint", Value::Int(u32::MAX.into())).unwrap(), [255; 4]);
        assert_eq!(bytes("unsigned char", Value::Int(255)).unwrap(), [255]);
        assert_eq!(bytes("long", Value::Int(i64::MIN)).unwrap(), i64::MIN.to_le_bytes());
        assert_eq!(bytes("float", Value::Float(0.5)).unwrap(), 0.5_f32.to_le_bytes());
        assert_eq!(bytes("float", Value::Int(3)).unwrap(), 3_f32.to_le_bytes());
        assert_eq!(bytes("double", Value::Float(0.5)).unwrap(), 0.5_f64.to_le_bytes());
        assert_eq!(bytes("half", Value::Float(0.5)).unwrap(), half::f16::from_f32(0.5).to_le_bytes());
        assert_eq!(bytes("int", Value::Bool(true)).unwrap(), 1_i32.to_le_bytes());
        assert_eq!(bytes("float4", Value::Bytes(vec![7; 16].into())).unwrap(), [7; 16]);
        assert_eq!(bytes("struct point", Value::Bytes(vec![7; 5].into())).unwrap(), [7; 5]);
    }

    #[test]
    fn values_that_do_not_fit_are_refused_with_a_reason() {
        for (type_name, value, text) in [
            ("int", Value::Int(1 << 31), "2147483648 does not fit int"),
            ("uint", Value::Int(-1), "-1 does not fit uint"),
            ("ulong", Value::Int(-1), "-1 does not fit ulong"),
            ("float", Value::Int(i64::MAX), "does not fit float"),
            ("int", Value::Float(1.5), "expected an int for int, got 1.5"),
            ("float", Value::Bool(true), "expected a number or bytes for float, got bool"),
            ("float3", Value::Bytes(vec![0; 12].into()), "12 bytes were given for float3, which has 16"),
            ("float4", Value::Float(1.0), "expected the 16 bytes of a value of type float4"),
            ("struct point", Value::Int(1), "expected the bytes of a value of type struct point"),
        ] {
            let error = bytes(type_name, value).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        }
        let floats = Parameter::new(CL_KERNEL_ARG_ADDRESS_GLOBAL, "float*", false).unwrap();
        let tensor = |dtype| Value::Object(Object::Tensor(Tensor::zeros([1], dtype).unwrap()));
        assert!(matches!(floats.argument(&tensor(DataType::F32)), Ok(Argument::Tensor(_))));
        let error = floats.argument(&tensor(DataType::F64)).unwrap_err();
        assert_eq!(error.message(), "a tensor of float64 was given for float*");
        assert!(floats.argument(&tensor(DataType::I32)).is_err());
        assert!(matches!(floats.argument(&Value::Null), Ok(Argument::Null)));
        assert!(
            floats.argument(&Value::Int(1)).unwrap_err().message().contains("expected a tensor or null for float*")
        );
        let bytes = Parameter::new(CL_KERNEL_ARG_ADDRESS_GLOBAL, "uchar*", false).unwrap();
        assert!(bytes.argument(&tensor(DataType::F64)).is_ok());
        let local = Parameter::new(CL_KERNEL_ARG_ADDRESS_LOCAL, "float*", false).unwrap();
        assert!(matches!(local.argument(&Value::Int(64)), Ok(Argument::Local(64))));
        assert!(local.argument(&Value::Int(0)).is_err());
    }

    #[test]
    fn objects_of_the_driver_are_no_parameters_under_any_name() {
        for type_name in [
            "sampler_t",
            "queue_t",
            "event_t",
            "reserve_id_t",
            "clk_event_t",
            "void *",
            "anything",
            "bool4",
            "half4",
            "unsigned int2",
            "float5",
            "",
        ] {
            let error = Parameter::new(CL_KERNEL_ARG_ADDRESS_PRIVATE, type_name, false).unwrap_err();
            assert!(error.message().contains(&format!("'{type_name}'")), "{error}");
        }
        // Images and pipes are in global memory, and no pointers.
        for type_name in ["image2d_t", "image1d_buffer_t", "int", "pointer"] {
            assert!(Parameter::new(CL_KERNEL_ARG_ADDRESS_GLOBAL, type_name, true).is_err(), "{type_name}");
        }
        assert!(Parameter::new(0, "int*", true).is_err());
        for type_name in ["half4", "half", "bool", "unsigned int", "uint16", "union both", "const struct pair"] {
            Parameter::new(CL_KERNEL_ARG_ADDRESS_PRIVATE, type_name, true).unwrap();
        }
    }
}
