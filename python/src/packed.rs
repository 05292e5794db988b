//! Structured values: objects of Python as MessagePack maps, and back.

use std::cell::Cell;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use rpc_core::Packed;
use rpc_core::value::MAX_DEPTH;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Error as _, Serialize, SerializeMap as _, SerializeSeq as _, Serializer};

/// Encodes an object: `None`, truth values, numbers, text, bytes, lists, tuples, dictionaries and
/// dataclasses.
pub(crate) fn pack(object: &Bound<'_, PyAny>) -> PyResult<Packed> {
    Packed::encode(&Source(object, 0)).map_err(|error| PyTypeError::new_err(error.message().to_owned()))
}

/// Decodes an object: maps become dictionaries.
pub(crate) fn unpack(py: Python<'_>, packed: &Packed) -> PyResult<Py<PyAny>> {
    DECODED.set(0);
    match packed.decode::<Decoded>() {
        Ok(Decoded(object)) => Ok(object),
        Err(error) => Err(crate::errors::exception(py, &error)),
    }
}

/// Most values in one packed value, as in a message without packed ones: an object of Python takes
/// some eighty times the byte that a small value is.
const MAX_VALUES: usize = 1 << 20;

thread_local! {
    /// Number of values that have been decoded of the present packed value.
    static DECODED: Cell<usize> = const { Cell::new(0) };
}

/// An object to encode, and how deep it lies.
struct Source<'a, 'py>(&'a Bound<'py, PyAny>, usize);

impl Serialize for Source<'_, '_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self(object, depth) = *self;
        if depth > MAX_DEPTH {
            return Err(S::Error::custom(format!("it is nested deeper than {MAX_DEPTH}")));
        }
        let inner = |error: PyErr| S::Error::custom(error);
        if object.is_none() {
            to.serialize_unit()
        } else if let Ok(truth) = object.cast::<PyBool>() {
            to.serialize_bool(truth.is_true())
        } else if object.cast::<PyInt>().is_ok() {
            match object.extract::<i64>() {
                Ok(number) => to.serialize_i64(number),
                Err(_) => to.serialize_u64(object.extract().map_err(inner)?),
            }
        } else if let Ok(number) = object.cast::<PyFloat>() {
            to.serialize_f64(number.value())
        } else if let Ok(text) = object.cast::<PyString>() {
            to.serialize_str(&text.to_cow().map_err(inner)?)
        } else if let Ok(bytes) = object.cast::<PyBytes>() {
            to.serialize_bytes(bytes.as_bytes())
        } else if let Ok(bytes) = object.cast::<PyByteArray>() {
            to.serialize_bytes(&bytes.to_vec())
        } else if let Ok(map) = object.cast::<PyDict>() {
            // A copy, because another thread may change it meanwhile.
            let map = map.copy().map_err(inner)?;
            let mut entries = to.serialize_map(Some(map.len()))?;
            for (key, value) in &map {
                entries.serialize_entry(&Source(&key, depth + 1), &Source(&value, depth + 1))?;
            }
            entries.end()
        } else if object.cast::<PyList>().is_ok() || object.cast::<PyTuple>().is_ok() {
            let mut items = to.serialize_seq(Some(object.len().map_err(inner)?))?;
            for item in object.try_iter().map_err(inner)? {
                items.serialize_element(&Source(&item.map_err(inner)?, depth + 1))?;
            }
            items.end()
        } else if is_dataclass(object) {
            let fields = object.getattr("__dataclass_fields__").and_then(|fields| fields.call_method0("keys"));
            let names: Vec<String> =
                fields.and_then(|names| names.try_iter()?.map(|name| name?.extract()).collect()).map_err(inner)?;
            let mut entries = to.serialize_map(Some(names.len()))?;
            for name in names {
                let value = object.getattr(name.as_str()).map_err(inner)?;
                entries.serialize_entry(&name, &Source(&value, depth + 1))?;
            }
            entries.end()
        } else {
            let class = object.get_type().qualname().map_err(inner)?;
            Err(S::Error::custom(format!("an object of {class} has no form as data")))
        }
    }
}

/// Returns true for an instance of a dataclass.
pub(crate) fn is_dataclass(object: &Bound<'_, PyAny>) -> bool {
    object.get_type().hasattr("__dataclass_fields__").unwrap_or(false)
}

/// A decoded object.
struct Decoded(Py<PyAny>);

impl<'de> Deserialize<'de> for Decoded {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        DECODED.set(DECODED.get() + 1);
        if DECODED.get() > MAX_VALUES {
            return Err(serde::de::Error::custom(format!("it has more than {MAX_VALUES} values")));
        }
        from.deserialize_any(Objects)
    }
}

struct Objects;

fn made<'py, T: IntoPyObject<'py>, E: serde::de::Error>(py: Python<'py>, value: T) -> Result<Decoded, E> {
    match value.into_pyobject(py) {
        Ok(object) => Ok(Decoded(object.into_any().into_bound().unbind())),
        Err(error) => Err(E::custom(error.into())),
    }
}

use pyo3::BoundObject as _;

impl<'de> Visitor<'de> for Objects {
    type Value = Decoded;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Decoded, E> {
        Python::attach(|py| Ok(Decoded(py.None())))
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Decoded, E> {
        self.visit_unit()
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Decoded, E> {
        Python::attach(|py| made(py, value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Decoded, E> {
        Python::attach(|py| made(py, value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Decoded, E> {
        Python::attach(|py| made(py, value))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Decoded, E> {
        Python::attach(|py| made(py, value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Decoded, E> {
        Python::attach(|py| made(py, value))
    }

    fn visit_bytes<E: serde::de::Error>(self, value: &[u8]) -> Result<Decoded, E> {
        Python::attach(|py| made(py, PyBytes::new(py, value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Decoded, A::Error> {
        let mut objects = Vec::new();
        while let Some(Decoded(item)) = items.next_element()? {
            objects.push(item);
        }
        Python::attach(|py| match PyList::new(py, objects) {
            Ok(list) => Ok(Decoded(list.into_any().unbind())),
            Err(error) => Err(serde::de::Error::custom(error)),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Decoded, A::Error> {
        let mut objects = Vec::new();
        while let Some((Decoded(key), Decoded(value))) = entries.next_entry()? {
            objects.push((key, value));
        }
        Python::attach(|py| {
            let map = PyDict::new(py);
            for (key, value) in objects {
                map.set_item(key, value).map_err(serde::de::Error::custom)?;
            }
            Ok(Decoded(map.into_any().unbind()))
        })
    }
}
