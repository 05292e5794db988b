//! Conversions of tuples: lists of arguments, and lists of fixed length in arguments and returns.

use std::borrow::Cow;

use super::{ArgScope, FromReply, IntoArg, IntoArgs, IntoReturn, mismatch};
use crate::error::Result;
use crate::function::object::LocalValue;
use crate::session::{SharedSession, release};
use crate::value::Value;

macro_rules! tuples {
    (@args $($item:ident)*) => {
        #[allow(non_snake_case, unused_variables)]
        impl<$($item: IntoArg),*> IntoArgs for ($($item,)*) {
            fn type_kinds() -> Option<Vec<Option<&'static str>>> {
                Some(vec![$($item::type_kind()),*])
            }

            fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
                let ($($item,)*) = self;
                Ok(vec![$($item.into_arg(scope)?),*])
            }
        }
    };
    ($($item:ident)*) => {
        tuples!(@args $($item)*);

        #[allow(non_snake_case)]
        impl<$($item: FromReply),*> FromReply for ($($item,)*) {
            fn type_kind() -> Option<&'static str> {
                Some("list")
            }

            fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
                const LEN: usize = [$(stringify!($item)),*].len();
                match value {
                    Value::List(values) if values.len() == LEN => {
                        let mut values = values.into_iter();
                        // All are converted before the first error counts, so that all objects are
                        // owned and freed.
                        $(let $item = $item::from_reply(values.next().unwrap_or_default(), session);)*
                        Ok(($($item?,)*))
                    }
                    other => {
                        let error = mismatch(&format!("a list of {LEN}"), &other);
                        release(session, &other);
                        Err(error)
                    }
                }
            }
        }

        #[allow(non_snake_case, unused_variables)]
        impl<$($item: IntoArg),*> IntoArg for ($($item,)*) {
            fn type_kind() -> Option<&'static str> {
                Some("list")
            }

            fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
                self.into_args(scope).map(Value::List)
            }
        }

        #[allow(non_snake_case)]
        impl<$($item: IntoReturn),*> IntoReturn for ($($item,)*) {
            fn type_name() -> Cow<'static, str> {
                let names: &[Cow<'static, str>] = &[$($item::type_name()),*];
                format!("({})", names.join(", ")).into()
            }

            fn into_return(self) -> Result<LocalValue> {
                let ($($item,)*) = self;
                Ok(Value::List(vec![$($item.into_return()?),*]))
            }
        }
    };
}

tuples!(@args);
tuples!(A1);
tuples!(A1 A2);
tuples!(A1 A2 A3);
tuples!(A1 A2 A3 A4);
tuples!(A1 A2 A3 A4 A5);
tuples!(A1 A2 A3 A4 A5 A6);
tuples!(A1 A2 A3 A4 A5 A6 A7);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8);
// Kernels take many.
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15);
tuples!(@args A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15 A16);

impl IntoArgs for Vec<Value> {
    fn into_args(self, _: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        Ok(self)
    }
}
