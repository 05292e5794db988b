//! The arguments of a function that this side has for its callers.

use bytes::Bytes;
use rpc_core::{Handle, RpcError, Value};

use super::client_function::ClientFunction;

/// Arguments of a function, taken one after the other.
pub(super) struct Args {
    function: ClientFunction,
    at: usize,
    args: Vec<Value>,
}

impl Args {
    pub(super) fn of(function: ClientFunction, args: Vec<Value>) -> Self {
        Self { function, at: 0, args }
    }

    pub(super) fn optional(&mut self) -> Option<Value> {
        let arg = self.args.get_mut(self.at).map(std::mem::take);
        self.at += 1;
        arg
    }

    fn mismatch(&self, expected: &str, found: &Value) -> RpcError {
        let (name, at, found) = (self.function.name(), self.at - 1, found.type_name());
        RpcError::invalid_argument(format!("{name}: argument {at} is of type {found}, and should be {expected}"))
    }

    pub(super) fn text(&mut self) -> Result<String, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Str(text) => Ok(text),
            other => Err(self.mismatch("str", &other)),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(self.mismatch("bytes", &other)),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64, RpcError> {
        self.optional_number()?.ok_or_else(|| self.mismatch("int", &Value::Null))
    }

    /// Takes a number that is not negative, or none.
    pub(super) fn optional_number(&mut self) -> Result<Option<u64>, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Null => Ok(None),
            Value::Int(value) if value >= 0 => Ok(Some(value.unsigned_abs())),
            other => Err(self.mismatch("int from 0 on", &other)),
        }
    }

    pub(super) fn float(&mut self) -> Result<f64, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Float(value) => Ok(value),
            Value::Int(value) => Ok(value as f64),
            other => Err(self.mismatch("float", &other)),
        }
    }

    pub(super) fn object(&mut self) -> Result<Handle, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Object(reference) => Ok(reference.handle()),
            other => Err(self.mismatch("object", &other)),
        }
    }

    pub(super) fn rest(&mut self) -> Vec<Value> {
        self.args.split_off(self.at.min(self.args.len()))
    }
}
