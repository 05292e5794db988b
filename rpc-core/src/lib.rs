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
//! # Where to read on
//!
//! * **Calling** a session: [`client`], with [`Session`], [`Action`] and the references.
//! * **Serving** one: [`function`] (closures, [`Registry`], [`Context`]), [`local`] ([`LocalSession`]), [`device`],
//!   [`tensor`] and [`limits`].
//! * **Implementing** one: [`session`] (the contract, [`RpcSession`]), [`reply`], and [`proto`], the protocol without
//!   input and output.
//! * **Words of all three**: [`value`], [`handle`], [`dlpack`], [`error`], [`trace`]; [`placement`] plans calls over
//!   several sessions.

#![deny(unsafe_code)]

pub mod blocking;
pub mod client;
#[allow(unsafe_code)]
pub mod device;
#[allow(unsafe_code)]
pub mod dlpack;
pub mod error;
pub mod function;
pub mod handle;
pub mod limits;
pub mod local;
mod panics;
pub mod placement;
pub mod proto;
pub mod reply;
pub mod session;
#[allow(unsafe_code)]
pub mod tensor;
pub mod trace;
pub mod value;

// What every part of a program uses.
pub use dlpack::{DataType, DataTypeCode, Device, DeviceType, Element};
pub use error::{ErrorKind, Fault, Result, RpcError};
pub use handle::{Handle, HandleQuota, HandleTable};
pub use trace::TraceContext;
pub use value::{Packed, Reference, TensorRef, Value};

// What a client needs.
pub use client::{
    Action, CallbackHandler, CallbackReturn, NewCallback, Pending, RemoteCallback, RemoteFunction, RemoteModule,
    RemoteObject, RemoteTensor, Session, TypedFunction,
};
pub use function::{FromReply, IntoArg, IntoArgs, Pack, Shape};

// What a server needs.
pub use device::{DeviceApi, DeviceAttribute, DeviceDescription, Devices, Target, VirtualDevice, VirtualDeviceBuilder};
pub use function::{
    Context, Function, FunctionKind, FunctionModule, LoadRequest, LocalValue, Module, ModuleLoader, Object, Registry,
    Shared, Signature, ThreadPlace, Usage, WorkspaceFiles,
};
pub use limits::MemoryQuota;
pub use local::{Backlog, LocalSession, LocalSessionBuilder, SessionLimits, Spawner, ThreadQuota};
pub use tensor::{Tensor, TensorView, TensorViewMut};

// What an implementer of a session needs.
pub use reply::{PendingReply, Responder, Submission};
pub use session::{Lane, Operation, Request, RpcSession, SharedSession};
