//! Parser of the arguments of a function on the command line.
//!
//! | written | means |
//! | --- | --- |
//! | `null`, `true`, `false` | themselves |
//! | `7`, `-3` | an integer of 64 bits |
//! | `0.5`, `1e-3`, `.5` | a float |
//! | `str:TEXT` | the text, even if it looks like another kind |
//! | `@FILE.npy` | the tensor in the file, on `cpu:0` of the server |
//! | anything else | text |

use std::path::PathBuf;
use std::str::FromStr;

use rpc_core::function::{ArgScope, IntoArg, IntoArgs};
use rpc_core::{RemoteTensor, Session, Value};

use super::failure::Failure;
use super::output::Output;
use super::tensor;

/// The same table for `--help`.
pub(super) const GRAMMAR: &str = "\
Arguments:
  null, true, false         themselves
  7, -3, 0.5, 1e-3          numbers
  str:TEXT                  the text, even if it looks like something else
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
    Tensor(PathBuf),
}

/// Error of a text that is not an argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ArgumentError {
    #[error("no file name follows the @; write @FILE.npy for a tensor, or str:@ for text")]
    NoFile,
    #[error("an integer has 64 bits at most; write {0}.0 for a float, or str:{0} for text")]
    TooLarge(String),
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
        Ok(match text {
            "null" => Self::Null,
            "true" => Self::Bool(true),
            "false" => Self::Bool(false),
            _ => return number(text),
        })
    }
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
            resolved.push(Resolved::Value(match argument {
                Argument::Null => Value::Null,
                Argument::Bool(value) => value.into(),
                Argument::Int(value) => value.into(),
                Argument::Float(value) => value.into(),
                Argument::Text(value) => value.into(),
                Argument::Tensor(file) => {
                    resolved.push(Resolved::Tensor(tensor::upload(session, output, &file).await?));
                    continue;
                }
            }));
        }
        Ok(Self(resolved))
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
        assert_eq!("@".parse::<Argument>(), Err(ArgumentError::NoFile));
        let text = "9223372036854775808";
        assert_eq!(text.parse::<Argument>(), Err(ArgumentError::TooLarge(text.to_owned())));
    }
}
