//! Callbacks: functions of the session that foreign code can call.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::abi::{Any, slice_of};
use super::api::Api;
use super::object::{OwnedAny, Ref};
use super::{arguments, call_frame, failure, value};
use rpc_core::error::{ErrorKind, Result, RpcError};
use rpc_core::function::{Context, Function, FunctionKind};

/// Creates a function object that calls `function`, for as long as foreign code holds it, from any
/// thread.
pub(super) fn create(api: &'static Api, context: &Context, function: Function) -> Result<Ref> {
    let callback = Box::into_raw(Box::new(Callback { api, context: context.detached(), function })).cast();
    // SAFETY: a `Callback` may be shared between threads, and is freed once, by `delete`.
    let created = unsafe { api.create_function(callback, call, delete) };
    created.inspect_err(|_| {
        // SAFETY: nothing else has it.
        drop(unsafe { Box::from_raw(callback.cast::<Callback>()) });
    })
}

struct Callback {
    api: &'static Api,
    /// Context for calls on threads where no function of a module runs, such as threads that a
    /// module has started.
    context: Context,
    function: Function,
}

impl Callback {
    /// # Safety
    ///
    /// `args` are complete values, and everything that they refer to is alive.
    unsafe fn call(&self, args: &[Any]) -> Result<OwnedAny> {
        let frame = call_frame::current();
        let context = frame.as_ref().map_or(&self.context, |frame| &frame.context);
        let in_line = frame.as_ref().is_some_and(|frame| frame.kind == FunctionKind::Inline);
        if in_line && self.function.kind() != FunctionKind::Inline {
            return Err(RpcError::new(
                ErrorKind::ApiMisuse,
                "a function that its module declares as inline called one that may block",
            ));
        }
        // SAFETY: the caller's promise.
        let args = args.iter().map(|arg| unsafe { value::from_any(self.api, context, arg) });
        let args = args.collect::<Result<_>>()?;
        let returned = {
            let suspended = frame.as_ref().map(|frame| frame.suspend());
            let (_suspended, held) = suspended.unzip();
            context.call_lending(&self.function, args, held.unwrap_or_default())?
        };
        arguments::to_owned(self.api, context, returned)
    }
}

/// # Safety
///
/// `callback` is from [`create`], and the other arguments are as TVM-FFI defines them.
unsafe extern "C" fn call(callback: *mut c_void, args: *const Any, count: i32, result: *mut Any) -> c_int {
    // SAFETY: it is alive while it is called.
    let callback = unsafe { &*callback.cast::<Callback>() };
    // SAFETY: there are `count` arguments, complete and alive.
    let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
        callback.call(slice_of(args, usize::try_from(count).unwrap_or_default()))
    }));
    match outcome.unwrap_or_else(|_| Err(RpcError::internal("a callback from foreign code panicked"))) {
        Ok(value) => {
            // SAFETY: there is room for the result, whose count goes to the caller.
            unsafe { result.write(value.into_raw()) };
            0
        }
        Err(error) => {
            failure::raise(callback.api.bindings, error);
            -1
        }
    }
}

/// # Safety
///
/// `callback` is from [`create`], and is no longer in use.
unsafe extern "C" fn delete(callback: *mut c_void) {
    // SAFETY: it was created by leaking such a box. Freeing it may run foreign code, which must not
    // unwind.
    let deleted = catch_unwind(|| drop(unsafe { Box::from_raw(callback.cast::<Callback>()) }));
    if deleted.is_err() {
        rpc_core::log_limited!(ERROR, "a callback panicked when foreign code released it");
    }
}
