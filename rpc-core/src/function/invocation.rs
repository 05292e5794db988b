//! One call of a function: its arguments, with the borrows of their tensors, as they are taken,
//! converted and counted.
//!
//! `object.rs` says why these files import each other.

use std::borrow::Cow;
use std::sync::Arc;

use crate::error::{Result, RpcError};
use crate::function::context::Context;
use crate::function::object::LocalValue;
use crate::tensor::Borrow;

/// One argument of a call, before its conversion.
#[derive(Debug)]
pub struct Arg {
    pub(crate) value: LocalValue,
    /// Borrow taken before the call, as the parameter's
    /// [`FromArg::ACCESS`](crate::function::convert::FromArg::ACCESS) requires.
    pub(crate) borrow: Option<Borrow>,
}

/// One call of a function, as the function's conversion code sees it.
pub struct Invocation {
    pub(crate) args: Args,
    pub(crate) context: Context,
    /// Name of the function, for errors.
    pub(crate) function: Option<Arc<str>>,
}

/// Returns an argument's description for an error, such as "argument 0 of `add`".
pub(crate) fn argument(index: usize, function: Option<&str>) -> String {
    match function {
        Some(name) => format!("argument {index} of `{name}`"),
        None => format!("argument {index}"),
    }
}

/// The remaining arguments.
pub(crate) struct Args {
    pub(crate) values: std::vec::IntoIter<LocalValue>,
    /// Borrows taken for the call, by argument index, in ascending order.
    borrows: std::iter::Peekable<std::vec::IntoIter<(usize, Borrow)>>,
    pub(crate) next: usize,
}

impl Iterator for Args {
    type Item = LocalValue;

    fn next(&mut self) -> Option<LocalValue> {
        self.next += 1;
        self.values.next()
    }
}

impl Invocation {
    pub(crate) fn new(values: Vec<LocalValue>, borrows: Vec<(usize, Borrow)>, context: Context) -> Self {
        let args = Args { values: values.into_iter(), borrows: borrows.into_iter().peekable(), next: 0 };
        Self { args, context, function: None }
    }

    /// Takes all remaining arguments and borrows.
    pub(crate) fn take_all(&mut self) -> (Vec<LocalValue>, Vec<Borrow>) {
        let borrows = self.args.borrows.by_ref().map(|(_, borrow)| borrow).collect();
        (self.args.by_ref().collect(), borrows)
    }

    pub(crate) fn next_arg(&mut self) -> Option<Arg> {
        let index = self.args.next;
        let value = self.args.next()?;
        let borrow = self.args.borrows.next_if(|(at, _)| *at == index).map(|(_, borrow)| borrow);
        Some(Arg { value, borrow })
    }

    /// Takes the next argument and converts it. If there is none it is the one that `missing`
    /// returns; `type_name` is for errors.
    ///
    /// # Errors
    ///
    /// It is missing, or not convertible.
    pub(crate) fn take<T>(
        &mut self,
        convert: impl FnOnce(Arg) -> Result<T>,
        missing: impl FnOnce() -> Option<T>,
        type_name: impl FnOnce() -> Cow<'static, str>,
    ) -> Result<T> {
        let index = self.args.next;
        match self.next_arg() {
            Some(arg) => convert(arg).map_err(|error| error.context(argument(index, self.function.as_deref()))),
            None => missing().ok_or_else(|| {
                let argument = argument(index, self.function.as_deref());
                RpcError::invalid_argument(format!("{argument} is missing: expected {}", type_name()))
            }),
        }
    }

    /// Checks that no argument is left.
    ///
    /// # Errors
    ///
    /// More arguments were given than the function takes.
    pub(crate) fn finish(&mut self) -> Result<()> {
        match self.args.values.len() {
            0 => Ok(()),
            left => {
                let function = self.function.as_deref().map_or("the function".to_owned(), |name| format!("`{name}`"));
                let (takes, given) = (self.args.next, self.args.next + left);
                Err(RpcError::invalid_argument(format!("{given} arguments were given, and {function} takes {takes}")))
            }
        }
    }
}
