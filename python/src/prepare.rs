//! Preparations of a call: all that it needs in its session before it can be made.

use std::sync::Arc;

use rpc_core::{Device, Result, Session};

use crate::argument::{Arg, Args};
use crate::callback::make_callback;
use crate::operation::Limits;

/// Makes the tensors and callbacks of arguments that are arrays and functions of this process.
pub(crate) async fn prepare(mut args: Args, session: &Session, limits: &Limits) -> Result<Args> {
    if std::mem::take(&mut args.needs_session) {
        let mut waiting: Vec<&mut Arg> = args.args.iter_mut().collect();
        while let Some(arg) = waiting.pop() {
            match arg {
                Arg::List(items) => waiting.extend(items),
                Arg::Map(entries) => entries.iter_mut().for_each(|(key, value)| waiting.extend([key, value])),
                Arg::Array(array) => {
                    let bytes = std::mem::take(&mut array.bytes);
                    let tensor = limits.apply(session.alloc(Device::cpu(), array.dtype, &array.shape)).await?;
                    if !bytes.is_empty() {
                        limits.apply(session.copy_to_remote(&tensor, bytes)).await?;
                    }
                    *arg = Arg::Tensor(tensor);
                }
                Arg::Callable(function) => {
                    if let Some(function) = function.take() {
                        *arg = Arg::Callback(Arc::new(make_callback(session, function, limits).await?));
                    }
                }
                _ => {}
            }
        }
    }
    Ok(args)
}
