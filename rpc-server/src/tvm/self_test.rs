//! The functions by which TVM's own programs check a server (`--tvm-self-test`), under the names
//! that servers of TVM have them by.

use rpc_core::function::Rest;
use rpc_core::{
    Context, DataType, ErrorKind, Function, LocalValue, Registry, Result, RpcError, Shape, Tensor, TensorView, Value,
};

/// Adds the functions to `registry`.
pub(crate) fn register(registry: &Registry) {
    for name in ["rpc.test.addone", "rpc.test2.addone"] {
        registry.add_inline(name, add_one).describe("Returns its argument and one (--tvm-self-test).");
    }
    registry
        .add_inline("rpc.test.strcat", |text: String, value: LocalValue| {
            Ok::<_, RpcError>(format!("{text}:{}", show(&value)?))
        })
        .describe("Returns a text, a colon and a number (--tvm-self-test).")
        .add_inline("rpc.test.except", |text: String| Err::<(), _>(RpcError::new(ErrorKind::Application, text)))
        .describe("Fails with the text that it is given (--tvm-self-test).")
        .add_inline("rpc.test.runtime_str_concat", |first: String, second: String| first + &second)
        .describe("Returns two texts as one (--tvm-self-test).")
        .add_inline("rpc.test.add_to_lhs", |lhs: i64| Function::inline(move |rhs: i64| lhs.wrapping_add(rhs)))
        .describe("Returns a function that adds the number to its argument (--tvm-self-test).")
        .add("rpc.test.remote_tensor_func", |tensor: TensorView| check_ones(&tensor))
        .describe("Fails unless its argument is a tensor of 3 times 4 ones, float64 (--tvm-self-test).")
        .add("rpc.test.remote_return_nd", |context: Context, name: String| tensor_function(&context, &name))
        .describe("Returns a function on a tensor of ten zeros, by its name (--tvm-self-test).")
        .add_inline("testing.echo", |first: Option<LocalValue>, _: Rest| first.unwrap_or(Value::Null))
        .describe("Returns its first argument (--tvm-self-test).")
        .add_inline("testing.test_raise_error", |kind: String, text: String| {
            Err::<(), _>(RpcError::new(ErrorKind::Application, text).with_application_kind(kind))
        })
        .describe("Fails with an error of a kind and a text (--tvm-self-test).")
        .add_inline("ffi.Shape", |Rest(dimensions): Rest| {
            let dimension = |value: LocalValue| match value {
                Value::Int(value) => Ok(value),
                other => Err(mismatch("int", &other)),
            };
            dimensions.into_iter().map(dimension).collect::<Result<Vec<_>>>().map(Shape)
        })
        .describe("Returns its arguments as a shape (--tvm-self-test).")
        .add_inline("rpc.testing.GetShapeElem", |Shape(shape): Shape, index: i64| {
            let element = usize::try_from(index).ok().and_then(|index| shape.get(index).copied());
            element.ok_or_else(|| RpcError::invalid_argument(format!("there is no element {index} in {shape:?}")))
        })
        .describe("Returns an element of a shape (--tvm-self-test).")
        .add_inline("rpc.testing.GetShapeSize", |Shape(shape): Shape| shape.len() as i64)
        .describe("Returns the number of elements of a shape (--tvm-self-test).");
}

fn add_one(value: LocalValue) -> Result<LocalValue> {
    match value {
        Value::Int(value) => Ok(Value::Int(value.wrapping_add(1))),
        Value::Bool(value) => Ok(Value::Int(i64::from(value) + 1)),
        Value::Float(value) => Ok(Value::Float(value + 1.0)),
        other => Err(mismatch("int or float", &other)),
    }
}

fn show(value: &LocalValue) -> Result<String> {
    match value {
        Value::Int(value) => Ok(value.to_string()),
        Value::Float(value) => Ok(format!("{value:?}")),
        Value::Str(value) => Ok(value.clone()),
        Value::Bool(value) => Ok(if *value { "True" } else { "False" }.to_owned()),
        other => Err(mismatch("int, float, bool or str", other)),
    }
}

fn check_ones(tensor: &TensorView) -> Result<()> {
    let is_right = tensor.dtype() == DataType::F64
        && tensor.shape() == [3, 4]
        && tensor.as_slice::<f64>()?.iter().all(|element| (*element - 1.0).abs() < 1e-9);
    if is_right {
        return Ok(());
    }
    Err(RpcError::new(ErrorKind::Application, "the tensor is not one of 3 times 4 ones, float64"))
}

/// Returns a function on a new tensor of ten zeros.
fn tensor_function(context: &Context, name: &str) -> Result<Function> {
    let tensor = context.allocate(rpc_core::Device::cpu(), DataType::F32, &[10])?;
    let element = |tensor: &Tensor, index: i64| -> Result<f64> {
        let view = tensor.read()?;
        let elements = view.as_slice::<f32>()?;
        let element = usize::try_from(index).ok().and_then(|index| elements.get(index));
        let element = element.ok_or_else(|| RpcError::invalid_argument(format!("there is no element {index}")))?;
        Ok((*element).into())
    };
    Ok(match name {
        "get_arr" => Function::blocking(move || tensor.clone()),
        "get_elem" => Function::blocking(move |index: i64| element(&tensor, index)),
        "get_arr_elem" => Function::blocking(move |tensor: TensorView, index: i64| element(tensor.tensor(), index)),
        // The storage is that of the tensor here, and of each handle that a client has.
        "ref_count" => Function::blocking(move || std::sync::Arc::strong_count(tensor.storage()) as i64),
        other => {
            let text = format!("there is no function {other:?}: get_arr, get_elem, get_arr_elem or ref_count");
            return Err(RpcError::invalid_argument(text));
        }
    })
}

fn mismatch(expected: &str, found: &LocalValue) -> RpcError {
    RpcError::invalid_argument(format!("expected {expected}, got {}", found.type_name()))
}
