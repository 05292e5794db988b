//! Arguments of clients of TVM for functions of the server itself.

use bytes::Bytes;
use rpc_core::RpcError;
use rpc_tvm::wire::{Text, WireValue};

use super::server_function::ServerFunction;

/// Maximum length in bytes of a name, a path or a scope: they are copied, and errors repeat them.
const MAX_NAME: usize = 4 << 10;

/// Returns a name that a client has sent.
///
/// # Errors
///
/// It is longer than any name.
pub(super) fn checked_name<'a>(name: &'a Text, what: &str) -> Result<&'a str, RpcError> {
    let (name, len) = (name.as_str(), name.len());
    if len <= MAX_NAME {
        return Ok(name);
    }
    Err(RpcError::invalid_argument(format!("{what} has {len} bytes, and may have {MAX_NAME}")))
}

/// Arguments of a function of the server, taken one after the other.
pub(super) struct Args {
    function: ServerFunction,
    at: usize,
    args: Vec<WireValue>,
}

impl Args {
    pub(super) fn new(function: ServerFunction, args: Vec<WireValue>) -> Self {
        Self { function, at: 0, args }
    }

    fn next(&mut self) -> Option<WireValue> {
        let arg = self.args.get_mut(self.at).map(|arg| std::mem::replace(arg, WireValue::None));
        self.at += 1;
        arg
    }

    fn mismatch(&self, expected: &str, found: Option<&WireValue>) -> RpcError {
        let (name, at) = (self.function.name(), self.at - 1);
        RpcError::invalid_argument(match found {
            Some(found) => format!("{name}: argument {at} is of type {}, and should be {expected}", found.type_name()),
            None => format!("{name}: argument {at}, of type {expected}, is missing"),
        })
    }

    pub(super) fn text(&mut self) -> Result<String, RpcError> {
        match self.next() {
            Some(WireValue::Str(text)) => checked_name(&text, "a name or path").map(str::to_owned),
            other => Err(self.mismatch("str", other.as_ref())),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, RpcError> {
        match self.next() {
            Some(WireValue::Bytes(bytes)) => Ok(bytes),
            other => Err(self.mismatch("bytes", other.as_ref())),
        }
    }

    pub(super) fn module(&mut self) -> Result<u64, RpcError> {
        match self.next() {
            Some(WireValue::Module(handle)) => Ok(handle),
            other => Err(self.mismatch("Module", other.as_ref())),
        }
    }

    /// Takes a module, or none.
    pub(super) fn optional_module(&mut self) -> Result<Option<u64>, RpcError> {
        match self.next() {
            Some(WireValue::None) => Ok(None),
            Some(WireValue::Module(handle)) => Ok(Some(handle)),
            other => Err(self.mismatch("Optional[Module]", other.as_ref())),
        }
    }

    pub(super) fn int(&mut self) -> Result<i64, RpcError> {
        match self.next() {
            Some(WireValue::Int(value)) => Ok(value),
            Some(WireValue::Bool(value)) => Ok(value.into()),
            other => Err(self.mismatch("int", other.as_ref())),
        }
    }

    /// Takes a flag, as Bool or Int; `default` if it is left out.
    pub(super) fn flag_or(&mut self, default: bool) -> Result<bool, RpcError> {
        if self.at >= self.args.len() { Ok(default) } else { self.int().map(|value| value != 0) }
    }

    /// Takes an argument that means nothing here.
    pub(super) fn optional(&mut self) {
        let _ = self.next();
    }

    pub(super) fn finish(&self) -> Result<(), RpcError> {
        if self.args.len() <= self.at {
            return Ok(());
        }
        let (name, expected, found) = (self.function.name(), self.at, self.args.len());
        Err(RpcError::invalid_argument(format!("{name} takes {expected} arguments, and got {found}")))
    }
}
