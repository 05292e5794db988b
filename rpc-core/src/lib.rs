//! What a remote session is: values, handles, functions, tensors and devices, the session that serves them in this
//! process, and the protocol as a state machine. No socket, no async runtime.
//!
//! ```
//! use rpc_core::{Device, DataType, LocalSession, Registry, Session, tensor::{TensorView, TensorViewMut}};
//!
//! let registry = Registry::new();
//! registry.add("scale", |x: TensorView, mut y: TensorViewMut, factor: f32| -> rpc_core::Result<()> {
//!     let x = x.as_slice::<f32>()?;
//!     for (y, x) in y.as_mut_slice::<f32>()?.iter_mut().zip(x) {
//!         *y = factor * x;
//!     }
//!     Ok(())
//! });
//!
//! // Any session would do here; this one is the process's own.
//! let session = Session::new(LocalSession::new(registry));
//! let x = session.alloc(Device::cpu(), DataType::F32, &[2]).wait()?;
//! let y = session.alloc(Device::cpu(), DataType::F32, &[2]).wait()?;
//! session.copy_to_remote(&x, vec![0, 0, 128, 63, 0, 0, 0, 64]).wait()?; // 1.0 and 2.0
//! session.get_function("scale").wait()?.call::<()>((&x, &y, 3.0)).wait()?;
//! assert_eq!(session.copy_from_remote(&y).wait()?[..4], 3.0_f32.to_le_bytes());
//! # Ok::<(), rpc_core::RpcError>(())
//! ```
//!
//! Read first [`session`] (the contract), then [`remote`] (the client's view), [`function`] (what a server registers),
//! [`local`] (how it is served) and [`callback`] (how it calls the client).

#![deny(unsafe_code)]

pub mod blocking;
pub mod callback;
pub mod convert;
#[allow(unsafe_code)]
pub mod device;
#[allow(unsafe_code)]
pub mod dlpack;
pub mod error;
pub mod files;
pub mod function;
pub mod handle;
pub mod local;
pub mod module;
pub mod modules;
pub mod object;
mod panics;
pub mod placement;
pub mod proto;
pub mod quota;
pub mod registry;
pub mod remote;
pub mod reply;
pub mod session;
pub mod shared_libraries;
pub mod target;
#[allow(unsafe_code)]
pub mod tensor;
pub mod trace;
pub mod transfer;
#[cfg(all(feature = "tvm-ffi", unix, target_pointer_width = "64"))]
#[allow(unsafe_code)]
pub mod tvm_ffi;
pub mod value;
pub mod virtual_device;

pub use callback::{CallbackHandler, CallbackReturn, NewCallback, RemoteCallback};
pub use convert::{FromReply, IntoArg, IntoArgs, Pack, Shape, Shared};
pub use device::{DeviceApi, DeviceAttribute, Devices};
pub use dlpack::{DataType, DataTypeCode, Device, DeviceType, Element};
pub use error::{ErrorKind, Fault, Result, RpcError};
pub use handle::{Handle, HandleQuota, HandleTable};
pub use local::{Backlog, LocalSession, LocalSessionBuilder, SessionLimits, Spawner, ThreadQuota};
pub use module::{FunctionModule, LoadRequest, ModuleLoader};
pub use object::{
    Context, Function, FunctionKind, LocalValue, Module, Object, Signature, ThreadPlace, Usage, WorkspaceFiles,
};
pub use quota::MemoryQuota;
pub use registry::Registry;
pub use remote::{Action, Pending, RemoteFunction, RemoteModule, RemoteObject, RemoteTensor, Session, TypedFunction};
pub use reply::{PendingReply, Responder, Submission};
pub use session::{Lane, Operation, Request, RpcSession, SharedSession};
pub use target::Target;
pub use tensor::{Tensor, TensorView, TensorViewMut};
pub use trace::TraceContext;
pub use value::{Packed, Reference, TensorRef, Value};
pub use virtual_device::{DeviceDescription, VirtualDevice, VirtualDeviceBuilder};
