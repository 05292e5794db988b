//! Signatures of functions, from the modules' metadata.
//!
//! Metadata are JSON with a `type_schema`, which is JSON again: `{"type": "ffi.Function", "args":
//! [return, parameter …]}`, or `{"type": "ffi.Function", "named_args": {"return": [return],
//! "params": [parameter …]}}` from 0.1.13 on.

use std::borrow::Cow;

use serde_json::Value as Json;

use rpc_core::function::Signature;

/// Known signature of a function.
pub(super) struct Typed {
    pub(super) signature: Signature,
    /// Forms of the parameters, if the parameters are known.
    pub(super) forms: Option<Box<[ArgForm]>>,
}

/// Form in which a parameter takes its argument.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ArgForm {
    /// The cheapest form.
    #[default]
    Any,
    /// A tensor object, not a borrowed `DLTensor`.
    TensorObject,
    /// A C string.
    CString,
}

impl Typed {
    /// Returns the signature for any number of arguments of any type.
    pub(super) fn unknown() -> Self {
        Self { signature: Signature { params: vec!["...".into()], returns: "any".into() }, forms: None }
    }

    /// Reads metadata. If they contain no signature, or cannot be read, the signature is unknown.
    pub(super) fn from_metadata(metadata: &str) -> Self {
        Self::parse(metadata).unwrap_or_else(Self::unknown)
    }

    fn parse(metadata: &str) -> Option<Self> {
        let metadata: Json = serde_json::from_str(metadata).ok()?;
        let schema: Json = match metadata.get("type_schema")? {
            Json::String(schema) => serde_json::from_str(schema).ok()?,
            schema => schema.clone(),
        };
        if schema.get("type")? != "ffi.Function" {
            return None;
        }
        let (returns, params) = match schema.get("named_args") {
            Some(named) => (named.get("return")?.get(0)?, named.get("params")?.as_array()?.as_slice()),
            // In this form, a function without arguments has an unknown signature.
            None => schema.get("args")?.as_array()?.split_first()?,
        };
        let signature =
            Signature { params: params.iter().map(|param| name(param, 0)).collect(), returns: name(returns, 0) };
        Some(Self { signature, forms: Some(params.iter().map(arg_form).collect()) })
    }
}

fn arg_form(param: &Json) -> ArgForm {
    match param.get("type").and_then(Json::as_str) {
        Some("ffi.Tensor") => ArgForm::TensorObject,
        Some("const char*") => ArgForm::CString,
        // One of the alternatives decides: the others accept its form.
        Some("Optional" | "Union" | "Variant") => {
            let args = param.get("args").and_then(Json::as_array).into_iter().flatten();
            args.map(arg_form).find(|form| *form != ArgForm::Any).unwrap_or_default()
        }
        _ => ArgForm::Any,
    }
}

/// Returns the session's name of a type.
fn name(schema: &Json, depth: usize) -> Cow<'static, str> {
    let args = schema.get("args").and_then(Json::as_array).map(Vec::as_slice).unwrap_or_default();
    let arg = |index: usize| args.get(index).map_or(Cow::Borrowed("any"), |arg| name(arg, depth + 1));
    match schema.get("type").and_then(Json::as_str) {
        _ if depth > MAX_DEPTH => "any".into(),
        Some("None") => "null".into(),
        Some("int") => "int".into(),
        Some("float") => "float".into(),
        Some("bool") => "bool".into(),
        Some("DataType" | "dtype") => "dtype".into(),
        Some("Device") => "device".into(),
        Some("DLTensor*" | "ffi.Tensor") => "tensor".into(),
        Some("ffi.String" | "ffi.SmallStr" | "const char*" | "std::string") => "str".into(),
        Some("ffi.Bytes" | "ffi.SmallBytes" | "TVMFFIByteArray*") => "bytes".into(),
        Some("ffi.Shape") => "shape".into(),
        Some("ffi.Function") => "function".into(),
        Some("ffi.Module") => "module".into(),
        Some("ffi.Array" | "ffi.List" | "list" | "tuple") => format!("[{}]", arg(0)).into(),
        Some("ffi.Map" | "ffi.Dict" | "dict") => format!("{{{}: {}}}", arg(0), arg(1)).into(),
        Some("Optional") => format!("{}?", arg(0)).into(),
        Some("Union" | "Variant") => (0..args.len()).map(arg).collect::<Vec<_>>().join(" | ").into(),
        Some("Any") | None => "any".into(),
        Some(other) => format!("object<{}>", clip(other)).into(),
    }
}

/// Shortens a name to the length that a signature should show.
fn clip(name: &str) -> &str {
    let end = (0..=name.len().min(100)).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    &name[..end]
}

const MAX_DEPTH: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(schema: &str) -> String {
        let metadata = serde_json::json!({ "type_schema": schema }).to_string();
        Typed::from_metadata(&metadata).signature.to_string()
    }

    #[test]
    fn both_forms_are_read() {
        let old = concat!(
            r#"{"type":"ffi.Function","args":[{"type":"int"},{"type":"DLTensor*"},"#,
            r#"{"type":"Optional","args":[{"type":"float"}]}]}"#
        );
        assert_eq!(signature(old), "(tensor, float?) -> int");
        let new = concat!(
            r#"{"type":"ffi.Function","named_args":{"return":[{"type":"None"}],"params":["#,
            r#"{"type":"ffi.Map","args":[{"type":"ffi.String"},{"type":"Any"}]},"#,
            r#"{"type":"ffi.Array","args":[{"type":"ffi.Tensor"}]},"#,
            r#"{"type":"Variant","args":[{"type":"int"},{"type":"ffi.String"}]},{"type":"relax.Exec"}]}}"#
        );
        assert_eq!(signature(new), "({str: any}, [tensor], int | str, object<relax.Exec>) -> null");
    }

    #[test]
    fn metadata_that_cannot_be_read_give_an_unknown_signature() {
        for schema in
            ["", "{}", "[1]", r#"{"type":"ffi.Function"}"#, r#"{"type":"ffi.Function","args":[]}"#, r#"{"type":"int"}"#]
        {
            assert_eq!(signature(schema), "(...) -> any", "{schema}");
        }
        for metadata in ["", "{}", "[]", "\"\"", "{\"type_schema\": 7}"] {
            assert_eq!(Typed::from_metadata(metadata).signature.to_string(), "(...) -> any", "{metadata}");
        }
        // Endless nesting is cut off.
        let nested = |levels| {
            let list = (0..levels)
                .fold(r#"{"type":"int"}"#.to_owned(), |inner, _| format!(r#"{{"type":"ffi.Array","args":[{inner}]}}"#));
            signature(&format!(r#"{{"type":"ffi.Function","args":[{{"type":"None"}},{list}]}}"#))
        };
        assert_eq!(nested(2), "([[int]]) -> null");
        assert_eq!(nested(20), "([[[[[[[[[any]]]]]]]]]) -> null");
        assert_eq!(nested(10_000), "(...) -> any");
    }

    #[test]
    fn parameters_have_the_form_in_which_they_take_tensors_and_strings() {
        let schema = concat!(
            r#"{"type":"ffi.Function","args":[{"type":"None"},{"type":"DLTensor*"},{"type":"ffi.Tensor"},"#,
            r#"{"type":"const char*"},{"type":"Optional","args":[{"type":"ffi.Tensor"}]}]}"#
        );
        let metadata = serde_json::json!({ "type_schema": schema }).to_string();
        let forms = Typed::from_metadata(&metadata).forms.unwrap();
        assert!(*forms == [ArgForm::Any, ArgForm::TensorObject, ArgForm::CString, ArgForm::TensorObject]);
    }
}
