//! Display of values: as text for people, as JSON for programs.

use std::fmt::Write;

use bytes::Bytes;
use rpc_core::function::FromReply;
use rpc_core::{Reference, RemoteTensor, Session, Value};
use serde_json::{Value as Json, json};

use super::failure::Failure;
use super::output::size;
use super::tensor;

/// Maximum number of elements of a tensor that is shown in full.
const SMALL_TENSOR: u64 = 1000;

/// Number of bytes that are shown of a longer sequence.
const BYTES_SHOWN: usize = 256;

/// A value with the contents of its small tensors.
#[derive(Debug)]
pub(super) enum Shown {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Bytes),
    /// A value with a type name and a text: a data type, a device, a function by its handle.
    Named(&'static str, String),
    Shape(Vec<i64>),
    Packed(Json),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
    Tensor {
        tensor: RemoteTensor,
        elements: Option<Json>,
    },
}

impl Shown {
    /// Takes a reply. Its tensors are freed on drop; other objects end with the session.
    pub(super) fn new(session: &Session, value: Value) -> Result<Self, Failure> {
        Ok(match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(value),
            Value::Int(value) => Self::Int(value),
            Value::Float(value) => Self::Float(value),
            Value::Str(value) => Self::Text(value),
            Value::Bytes(value) => Self::Bytes(value),
            Value::Shape(value) => Self::Shape(value),
            Value::DataType(value) => Self::Named("dtype", value.to_string()),
            Value::Device(value) => Self::Named("device", value.to_string()),
            Value::List(values) => {
                Self::List(values.into_iter().map(|value| Self::new(session, value)).collect::<Result<_, _>>()?)
            }
            Value::Map(pairs) => {
                let pair = |(key, value)| Ok((Self::new(session, key)?, Self::new(session, value)?));
                Self::Map(pairs.into_iter().map(pair).collect::<Result<_, Failure>>()?)
            }
            Value::Packed(packed) => match packed.decode() {
                Ok(decoded) => Self::Packed(decoded),
                // The value may have keys or bytes that JSON cannot express.
                Err(_) => Self::Bytes(packed.as_bytes().clone()),
            },
            Value::Object(Reference::Tensor(_)) => {
                Self::Tensor { tensor: RemoteTensor::from_reply(value, session.shared())?, elements: None }
            }
            Value::Object(Reference::Function(handle)) => Self::Named("function", handle.to_string()),
            Value::Object(Reference::Module(handle)) => Self::Named("module", handle.to_string()),
            Value::Object(other) => Self::Named("object", other.handle().to_string()),
            other => Self::Named("value", other.type_name().to_owned()),
        })
    }

    /// Returns the tensors in the value.
    pub(super) fn tensors(&self) -> Vec<&RemoteTensor> {
        match self {
            Self::Tensor { tensor, .. } => vec![tensor],
            Self::List(items) => items.iter().flat_map(Self::tensors).collect(),
            Self::Map(pairs) => pairs.iter().flat_map(|(key, value)| [key, value]).flat_map(Self::tensors).collect(),
            _ => Vec::new(),
        }
    }

    /// Reads the elements of small tensors.
    pub(super) async fn read_small_tensors(&mut self, session: &Session) -> Result<(), Failure> {
        let mut todo = vec![self];
        while let Some(shown) = todo.pop() {
            match shown {
                Self::List(items) => todo.extend(items),
                Self::Map(pairs) => todo.extend(pairs.iter_mut().flat_map(|(key, value)| [key, value])),
                Self::Tensor { tensor, elements } => {
                    let count: i64 = tensor.shape().iter().product();
                    if count.unsigned_abs() <= SMALL_TENSOR && tensor.strides().is_none() {
                        let bytes = session.copy_from_remote(tensor).await?;
                        *elements = tensor::elements(&bytes, tensor.dtype(), tensor.shape());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn to_json(&self) -> Json {
        match self {
            Self::Null => Json::Null,
            Self::Bool(value) => json!(value),
            Self::Int(value) => json!(value),
            Self::Float(value) => tensor::float(*value),
            Self::Text(value) => json!(value),
            Self::Bytes(bytes) => {
                let shown = &bytes[..bytes.len().min(BYTES_SHOWN)];
                json!({ "bytes": bytes.len(), "hex": hex(shown), "complete": shown.len() == bytes.len() })
            }
            Self::Named(kind, text) => json!({ *kind: text }),
            Self::Shape(shape) => json!({ "shape": shape }),
            Self::Packed(value) => value.clone(),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Map(pairs) => match object(pairs) {
                Some(object) => Json::Object(object),
                None => {
                    let pair = |(key, value): &(Self, Self)| json!([key.to_json(), value.to_json()]);
                    json!({ "map": pairs.iter().map(pair).collect::<Vec<_>>() })
                }
            },
            Self::Tensor { tensor, elements } => json!({ "tensor": {
                "dtype": tensor.dtype().to_string(),
                "shape": tensor.shape(),
                "device": tensor.device().to_string(),
                "bytes": tensor.size_bytes(),
                "elements": elements,
            } }),
        }
    }

    /// Formats the value as text. A single string is printed as it is, so that it can be piped;
    /// within a list or a map it is quoted.
    pub(super) fn to_text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::List(items) if items.iter().any(|item| matches!(item, Self::Tensor { .. } | Self::List(_))) => {
                items.iter().map(Self::to_text).collect::<Vec<_>>().join("\n")
            }
            Self::Map(pairs) if !self.tensors().is_empty() => {
                pairs.iter().map(pair_text).collect::<Vec<_>>().join("\n")
            }
            other => other.inner_text(),
        }
    }

    fn inner_text(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::Bool(value) => value.to_string(),
            Self::Int(value) => value.to_string(),
            // Printed with a point, so that it differs from an integer.
            Self::Float(value) => format!("{value:?}"),
            Self::Text(value) => format!("{value:?}"),
            Self::Bytes(bytes) => bytes_text(bytes),
            Self::Named("dtype" | "device", text) => text.clone(),
            Self::Named(kind, text) => format!("{kind} {text}"),
            Self::Shape(shape) => format!("{shape:?}"),
            Self::Packed(value) => serde_json::to_string_pretty(value).unwrap_or_else(|_| value.to_string()),
            Self::List(items) => {
                let items: Vec<_> = items.iter().map(Self::inner_text).collect();
                format!("[{}]", items.join(", "))
            }
            Self::Map(pairs) => {
                let pairs: Vec<_> = pairs.iter().map(pair_text).collect();
                format!("{{{}}}", pairs.join(", "))
            }
            Self::Tensor { tensor, elements } => {
                let (dtype, shape, device) = (tensor.dtype(), tensor.shape(), tensor.device());
                let mut text = format!("tensor {dtype} {shape:?} on {device}, {}", size(tensor.size_bytes()));
                if let Some(elements) = elements {
                    let _ = write!(text, "\n{}", tensor::lists(elements, 0));
                }
                text
            }
        }
    }
}

fn pair_text((key, value): &(Shown, Shown)) -> String {
    format!("{}: {}", key.inner_text(), value.inner_text())
}

/// Returns the map as a JSON object, if all keys are texts and unique.
fn object(pairs: &[(Shown, Shown)]) -> Option<serde_json::Map<String, Json>> {
    let mut object = serde_json::Map::new();
    for (key, value) in pairs {
        let Shown::Text(key) = key else { return None };
        if object.insert(key.clone(), value.to_json()).is_some() {
            return None;
        }
    }
    Some(object)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Formats bytes: with escapes if they are mostly text, else in hexadecimal.
fn bytes_text(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(BYTES_SHOWN)];
    let printable = shown.iter().filter(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()).count();
    let preview = if printable * 4 >= shown.len() * 3 { format!("b\"{}\"", shown.escape_ascii()) } else { hex(shown) };
    let more = if shown.len() < bytes.len() { "…" } else { "" };
    format!("{preview}{more} ({} bytes)", bytes.len())
}

#[cfg(test)]
mod tests {
    use rpc_core::{LocalSession, Pack, Packed, Registry};

    use super::*;

    fn shown(value: Value) -> Shown {
        let session = Session::new(LocalSession::new(Registry::new()));
        Shown::new(&session, value).unwrap()
    }

    #[test]
    fn a_single_string_is_printed_as_it_is_and_quoted_within_a_list() {
        assert_eq!(shown("a b".into()).to_text(), "a b");
        assert_eq!(shown(vec![Value::from("a\n"), 1.into(), 2.0.into()].into()).to_text(), r#"["a\n", 1, 2.0]"#);
    }

    #[test]
    fn bytes_are_escaped_or_in_hex_and_cut() {
        assert_eq!(shown(Bytes::from_static(b"hello\n").into()).to_text(), r#"b"hello\n" (6 bytes)"#);
        assert_eq!(shown(Bytes::from_static(&[0, 255, 16]).into()).to_text(), "00ff10 (3 bytes)");
        let long = shown(Bytes::from(vec![b'x'; 1000]).into());
        assert!(long.to_text().ends_with("x\"… (1000 bytes)"));
        assert_eq!(long.to_json()["complete"], false);
    }

    #[test]
    fn maps_with_unique_text_keys_are_json_objects() {
        let map = |pairs: &[(Value, Value)]| shown(Value::Map(pairs.to_vec()));
        let named = map(&[("a".into(), 1.into()), ("b c".into(), vec![Value::from(2.0)].into())]);
        assert_eq!(named.to_text(), r#"{"a": 1, "b c": [2.0]}"#);
        assert_eq!(named.to_json(), json!({ "a": 1, "b c": [2.0] }));
        assert_eq!((map(&[]).to_text(), map(&[]).to_json()), ("{}".to_owned(), json!({})));
        let numbered = map(&[(1.into(), "x".into()), (1.into(), Value::Null)]);
        assert_eq!(numbered.to_text(), r#"{1: "x", 1: null}"#);
        assert_eq!(numbered.to_json(), json!({ "map": [[1, "x"], [1, null]] }));
        let twice = map(&[("a".into(), 1.into()), ("a".into(), 2.into())]);
        assert_eq!(twice.to_json(), json!({ "map": [["a", 1], ["a", 2]] }));
    }

    #[test]
    fn packed_values_are_their_json_and_floats_stay_valid() {
        let Pack(value) = Pack(json!({ "a": [1, 2.5, null] }));
        let packed = Packed::encode(&value).unwrap();
        assert_eq!(shown(packed.into()).to_json(), value);
        assert_eq!(shown(f64::INFINITY.into()).to_json(), json!("inf"));
    }
}
