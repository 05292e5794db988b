//! Conversions of optional values, lists and maps.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::{ArgScope, FromArg, FromReply, IntoArg, IntoReturn, mismatch};
use crate::error::{Result, RpcError};
use crate::function::invocation::Arg;
use crate::function::object::LocalValue;
use crate::session::{SharedSession, release};
use crate::tensor::Access;
use crate::value::Value;

impl<T: FromArg> FromArg for Option<T> {
    const ACCESS: Option<Access> = T::ACCESS;

    fn type_name() -> Cow<'static, str> {
        format!("{}?", T::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        if let Value::Null = arg.value { Ok(None) } else { T::from_arg(arg).map(Some) }
    }

    fn missing() -> Option<Self> {
        Some(None)
    }
}

impl<T: FromReply> FromReply for Option<T> {
    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        if let Value::Null = value { Ok(None) } else { T::from_reply(value, session).map(Some) }
    }
}

impl<T: IntoReturn> IntoReturn for Option<T> {
    fn type_name() -> Cow<'static, str> {
        format!("{}?", T::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        self.map_or(Ok(Value::Null), T::into_return)
    }
}

impl<T: IntoArg> IntoArg for Option<T> {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        self.map_or(Ok(Value::Null), |value| value.into_arg(scope))
    }
}

impl<T: FromArg> FromArg for Vec<T> {
    fn type_name() -> Cow<'static, str> {
        format!("[{}]", T::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        match arg.value {
            Value::List(values) => values
                .into_iter()
                .enumerate()
                .map(|(at, value)| {
                    T::from_arg(Arg { value, borrow: None })
                        .map_err(|error| error.context(format_args!("element {at}")))
                })
                .collect(),
            other => Err(mismatch("list", &other)),
        }
    }
}

impl<T: FromReply> FromReply for Vec<T> {
    fn type_kind() -> Option<&'static str> {
        Some("list")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        match value {
            // Every element is converted even after an error, so that all objects are owned and
            // freed.
            Value::List(values) => {
                let converted: Vec<_> = values.into_iter().map(|value| T::from_reply(value, session)).collect();
                converted.into_iter().collect()
            }
            other => {
                let error = mismatch("list", &other);
                release(session, &other);
                Err(error)
            }
        }
    }
}

impl<T: IntoReturn> IntoReturn for Vec<T> {
    fn type_name() -> Cow<'static, str> {
        format!("[{}]", T::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        self.into_iter().map(T::into_return).collect::<Result<_>>().map(Value::List)
    }
}

impl<T: IntoArg> IntoArg for Vec<T> {
    fn type_kind() -> Option<&'static str> {
        Some("list")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        self.into_iter().map(|value| value.into_arg(scope)).collect::<Result<_>>().map(Value::List)
    }
}

/// Collects the pairs into a map; a duplicate key is an error.
fn unique<K: Ord, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<BTreeMap<K, V>> {
    let mut map = BTreeMap::new();
    for (at, (key, value)) in pairs.into_iter().enumerate() {
        if map.insert(key, value).is_some() {
            return Err(RpcError::invalid_argument(format!("the key of pair {at} is in the map already")));
        }
    }
    Ok(map)
}

impl<K: FromArg + Ord, V: FromArg> FromArg for BTreeMap<K, V> {
    fn type_name() -> Cow<'static, str> {
        format!("{{{}: {}}}", K::type_name(), V::type_name()).into()
    }

    fn from_arg(arg: Arg) -> Result<Self> {
        let Value::Map(pairs) = arg.value else { return Err(mismatch("map", &arg.value)) };
        let convert = |(at, (key, value))| {
            let key = K::from_arg(Arg { value: key, borrow: None })
                .map_err(|error| error.context(format_args!("key of pair {at}")))?;
            let value = V::from_arg(Arg { value, borrow: None })
                .map_err(|error| error.context(format_args!("value of pair {at}")))?;
            Ok((key, value))
        };
        unique(pairs.into_iter().enumerate().map(convert).collect::<Result<Vec<_>>>()?)
    }
}

impl<K: FromReply + Ord, V: FromReply> FromReply for BTreeMap<K, V> {
    fn type_kind() -> Option<&'static str> {
        Some("map")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        let Value::Map(pairs) = value else {
            let error = mismatch("map", &value);
            release(session, &value);
            return Err(error);
        };
        // Every key and value is converted even after an error, so that all objects are owned and
        // freed.
        let convert = |(key, value)| (K::from_reply(key, session), V::from_reply(value, session));
        let converted: Vec<_> = pairs.into_iter().map(convert).collect();
        unique(converted.into_iter().map(|(key, value)| Ok((key?, value?))).collect::<Result<Vec<_>>>()?)
    }
}

impl<K: IntoReturn, V: IntoReturn> IntoReturn for BTreeMap<K, V> {
    fn type_name() -> Cow<'static, str> {
        format!("{{{}: {}}}", K::type_name(), V::type_name()).into()
    }

    fn into_return(self) -> Result<LocalValue> {
        let convert = |(key, value): (K, V)| Ok((key.into_return()?, value.into_return()?));
        self.into_iter().map(convert).collect::<Result<_>>().map(Value::Map)
    }
}

impl<K: IntoArg, V: IntoArg> IntoArg for BTreeMap<K, V> {
    fn type_kind() -> Option<&'static str> {
        Some("map")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let mut convert = |(key, value): (K, V)| Ok((key.into_arg(scope)?, value.into_arg(scope)?));
        self.into_iter().map(&mut convert).collect::<Result<_>>().map(Value::Map)
    }
}
