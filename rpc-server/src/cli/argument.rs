//! Parser of the arguments of a function on the command line.
//!
//! | written | means |
//! | --- | --- |
//! | `null`, `true`, `false` | themselves |
//! | `7`, `-3` | an integer of 64 bits |
//! | `0.5`, `-1e-3`, `.5` | a float |
//! | `[1, "a"]`, `{"a": 1}` | a list or a map, in JSON |
//! | `str:TEXT` | the text, even if it looks like another kind |
//! | `hex:00ff` | bytes |
//! | `bytes:@FILE` | bytes: the content of the file |
//! | `@FILE.npy` | the tensor in the file, on `cpu:0` of the server |
//! | anything else | text |

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

use bytes::Bytes;
use rpc_core::function::{ArgScope, IntoArg, IntoArgs};
use rpc_core::{RemoteTensor, Session, Value};
use serde_json::Value as Json;

use super::failure::Failure;
use super::output::Output;
use super::tensor;

/// The same table for `--help`.
pub(super) const GRAMMAR: &str = "\
Arguments:
  null, true, false         themselves
  7, -3, 0.5, -1e-3         numbers
  '[1, \"a\"]', '{\"a\": 1}'    a list and a map, in JSON
  str:TEXT                  the text, even if it looks like something else
  hex:00ff                  bytes
  bytes:@FILE               bytes: the content of the file
  @FILE.npy                 the tensor in the file, on cpu:0 of the server
  anything else             text

What begins with a hyphen and is no number is written str:-x, or after --.";

/// A parsed argument.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Argument {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
    Bytes(Vec<u8>),
    BytesOf(PathBuf),
    Tensor(PathBuf),
}

/// Error of a text that is not an argument.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArgumentError {
    #[error("no file name follows the @; write @FILE.npy for a tensor, or str:@ for text")]
    NoFile,
    #[error("an integer has 64 bits at most; write {0}.0 for a float, or str:{0} for text")]
    TooLarge(String),
    #[error("what begins with {} is a list or a map in JSON, as [1, \"a\"] is; write str:{text} for text", &text[..1])]
    Json {
        /// The text.
        text: String,
        source: serde_json::Error,
    },
    #[error("bytes are an even number of hexadecimal digits, such as hex:00ff")]
    Hex,
    #[error("write bytes:@FILE for the content of a file, or hex:00ff for bytes")]
    Bytes,
}

impl FromStr for Argument {
    type Err = ArgumentError;

    fn from_str(text: &str) -> Result<Self, ArgumentError> {
        if let Some(text) = text.strip_prefix("str:") {
            return Ok(Self::Text(text.to_owned()));
        }
        if let Some(file) = text.strip_prefix('@') {
            return if file.is_empty() { Err(ArgumentError::NoFile) } else { Ok(Self::Tensor(file.into())) };
        }
        if let Some(digits) = text.strip_prefix("hex:") {
            return unhex(digits).map(Self::Bytes).ok_or(ArgumentError::Hex);
        }
        if let Some(file) = text.strip_prefix("bytes:") {
            let file = file.strip_prefix('@').filter(|file| !file.is_empty()).ok_or(ArgumentError::Bytes)?;
            return Ok(Self::BytesOf(file.into()));
        }
        if text.starts_with(['[', '{']) {
            let value = serde_json::from_str(text);
            return from_json(value.map_err(|source| ArgumentError::Json { text: text.to_owned(), source })?);
        }
        Ok(match text {
            "null" => Self::Null,
            "true" => Self::Bool(true),
            "false" => Self::Bool(false),
            _ => return number(text),
        })
    }
}

/// Returns the argument for a JSON value.
fn from_json(value: Json) -> Result<Argument, ArgumentError> {
    Ok(match value {
        Json::Null => Argument::Null,
        Json::Bool(value) => Argument::Bool(value),
        Json::String(text) => Argument::Text(text),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(value), _) => Argument::Int(value),
            // An integer of more than 63 bits is not rounded.
            (None, Some(value)) if number.is_f64() => Argument::Float(value),
            _ => return Err(ArgumentError::TooLarge(number.to_string())),
        },
        Json::Array(items) => Argument::List(items.into_iter().map(from_json).collect::<Result<_, _>>()?),
        Json::Object(pairs) => {
            let pair = |(key, value)| Ok((key, from_json(value)?));
            Argument::Map(pairs.into_iter().map(pair).collect::<Result<_, _>>()?)
        }
    })
}

/// Returns the bytes that hexadecimal digits stand for.
fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = digits.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    digits.len().is_multiple_of(2).then(|| digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Rewrites negative numbers that clap takes for options, such as `-1e-3` and `-.5`, without an
/// exponent: `-0.001`. Arguments behind `--` are left as they are.
pub(super) fn rewrite_negative_numbers(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut is_over = false;
    let rewrite = |arg: OsString| {
        is_over |= arg == "--";
        match arg.to_str().filter(|text| !is_over && text.starts_with('-')).map(number) {
            Some(Ok(Argument::Float(value))) if value.is_finite() => {
                let text = value.to_string();
                // A float stays one without its exponent.
                if text.contains('.') { text.into() } else { format!("{text}.0").into() }
            }
            _ => arg,
        }
    };
    args.map(rewrite).collect()
}

/// Parses a number, or else a text. Words such as `inf` and `nan` are texts.
fn number(text: &str) -> Result<Argument, ArgumentError> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if !unsigned.is_empty() && unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map(Argument::Int).map_err(|_| ArgumentError::TooLarge(text.to_owned()));
    }
    if unsigned.starts_with(|first: char| first.is_ascii_digit() || first == '.')
        && let Ok(float) = text.parse()
    {
        return Ok(Argument::Float(float));
    }
    Ok(Argument::Text(text.to_owned()))
}

/// Arguments for a session. Their tensors are freed on drop.
#[derive(Debug)]
pub(super) struct Arguments(Vec<Resolved>);

impl TryFrom<Argument> for Value {
    type Error = Failure;

    /// Converts an argument other than a tensor, for which it fails. Reads the file of bytes.
    fn try_from(argument: Argument) -> Result<Self, Failure> {
        Ok(match argument {
            Argument::Null => Self::Null,
            Argument::Bool(value) => value.into(),
            Argument::Int(value) => value.into(),
            Argument::Float(value) => value.into(),
            Argument::Text(value) => value.into(),
            Argument::Bytes(bytes) => Bytes::from(bytes).into(),
            Argument::BytesOf(file) => {
                let read = fs::read(&file).map_err(|error| Failure::file("cannot read", &file, error));
                Bytes::from(read?).into()
            }
            Argument::List(items) => Self::List(items.into_iter().map(Self::try_from).collect::<Result<_, _>>()?),
            Argument::Map(pairs) => {
                let pair = |(key, value): (String, Argument)| Ok((key.into(), Self::try_from(value)?));
                Self::Map(pairs.into_iter().map(pair).collect::<Result<_, Failure>>()?)
            }
            Argument::Tensor(file) => {
                return Err(Failure::Unsuitable(format!("a tensor ({}) is an argument of its own", file.display())));
            }
        })
    }
}

#[derive(Debug)]
enum Resolved {
    Value(Value),
    Tensor(RemoteTensor),
}

impl Arguments {
    /// Uploads the tensors among the arguments.
    pub(super) async fn upload(session: &Session, output: &Output, arguments: Vec<Argument>) -> Result<Self, Failure> {
        let mut resolved = Vec::with_capacity(arguments.len());
        for argument in arguments {
            resolved.push(match argument {
                Argument::Tensor(file) => Resolved::Tensor(tensor::upload(session, output, &file).await?),
                argument => Resolved::Value(argument.try_into()?),
            });
        }
        Ok(Self(resolved))
    }

    /// Returns the tensor that is the argument number `index`.
    pub(super) fn tensor(&self, index: usize) -> Option<&RemoteTensor> {
        match self.0.get(index) {
            Some(Resolved::Tensor(tensor)) => Some(tensor),
            _ => None,
        }
    }
}

impl IntoArgs for &Arguments {
    fn into_args(self, scope: &mut ArgScope<'_>) -> rpc_core::Result<Vec<Value>> {
        let convert = |argument: &Resolved| match argument {
            Resolved::Value(value) => Ok(value.clone()),
            Resolved::Tensor(tensor) => tensor.into_arg(scope),
        };
        self.0.iter().map(convert).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Argument {
        text.parse().unwrap()
    }

    #[test]
    fn the_type_of_an_argument_follows_from_its_text() {
        assert_eq!(parse("null"), Argument::Null);
        assert_eq!(parse("true"), Argument::Bool(true));
        assert_eq!(parse("false"), Argument::Bool(false));
        assert_eq!(parse("-3"), Argument::Int(-3));
        assert_eq!(parse("+3"), Argument::Int(3));
        assert_eq!(parse(&i64::MIN.to_string()), Argument::Int(i64::MIN));
        assert_eq!(parse("1e-3"), Argument::Float(0.001));
        assert_eq!(parse("-.5"), Argument::Float(-0.5));
        assert_eq!(parse("1."), Argument::Float(1.0));
        assert_eq!(parse("@a b.npy"), Argument::Tensor("a b.npy".into()));
        assert_eq!(parse("hex:00fF"), Argument::Bytes(vec![0, 255]));
        assert_eq!(parse("bytes:@a b"), Argument::BytesOf("a b".into()));
        let list = [Argument::Int(1), Argument::Float(-0.5), Argument::Text("@a".to_owned()), Argument::Null];
        let map = Argument::Map(vec![("a b".to_owned(), Argument::Bool(true))]);
        assert_eq!(
            parse(r#"[[1, -0.5, "@a", null], {"a b": true}]"#),
            Argument::List(vec![Argument::List(list.into()), map])
        );
    }

    #[test]
    fn negative_numbers_are_written_as_clap_expects_them() {
        let rewrite = |args: &str| {
            let rewritten = rewrite_negative_numbers(args.split(' ').map(OsString::from));
            rewritten.iter().map(|arg| arg.to_str().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            rewrite("f -1e-3 -.5 -1e3 -7 -0.5 -e -o -1x --a -- -1e-3"),
            "f -0.001 -0.5 -1000.0 -7 -0.5 -e -o -1x --a -- -1e-3"
        );
    }

    #[test]
    fn other_arguments_are_text_and_a_prefix_forces_text() {
        for text in ["", "-", "inf", "nan", "1.2.3", "0x10", "Null", "a=1", "1 2", "-x", "str"] {
            assert_eq!(parse(text), Argument::Text(text.to_owned()), "{text:?}");
        }
        for text in ["", "7", "true", "@a.npy", "str:"] {
            assert_eq!(parse(&format!("str:{text}")), Argument::Text(text.to_owned()));
        }
    }

    #[test]
    fn malformed_arguments_are_refused() {
        for (text, says) in [
            ("@", "no file name follows"),
            ("9223372036854775808", "9223372036854775808.0"),
            ("[9223372036854775808]", "9223372036854775808.0"),
            ("[1, a]", "write str:[1, a]"),
            ("{a: 1}", "begins with {"),
            ("hex:0", "even number"),
            ("hex:0g", "hexadecimal"),
            ("bytes:text", "bytes:@FILE"),
        ] {
            let error = text.parse::<Argument>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
