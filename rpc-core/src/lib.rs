//! Sessions and their parts: values, handles, functions, tensors and devices, the session that
//! serves them in this process, and the protocol as a state machine. No socket, no async runtime.
#![doc = include_str!("../README.md")]
//!
//! # Further reading
//!
//! * **Calling** a session: [`client`], with [`Session`], [`Action`] and the references.
//! * **Serving** one: [`function`] (closures, [`Registry`], [`Context`]), [`local`]
//!   ([`LocalSession`]), [`device`], [`tensor`] and [`limits`].
//! * **Implementing** one: [`session`] (the contract, [`RpcSession`]), [`reply`], and [`proto`],
//!   the protocol without input and output.
//! * **Words of all three**: [`value`], [`handle`], [`dlpack`], [`error`], [`trace`]; [`placement`]
//!   plans calls over several sessions.

#![deny(unsafe_code)]

pub mod access_control;
pub mod blocking;
pub mod client;
pub mod clock;
#[allow(unsafe_code)]
pub mod device;
#[allow(unsafe_code)]
pub mod dlpack;
pub mod error;
mod free_memory;
pub mod function;
pub mod handle;
pub mod limits;
pub mod local;
pub mod log_limit;
mod memory_quota;
mod msgpack;
mod open_file_quota;
mod panics;
pub mod placement;
mod printable;
pub mod proto;
pub mod reply;
pub mod session;
#[allow(unsafe_code)]
pub mod tensor;
pub mod trace;
pub mod value;

// For every part of a program.
pub use dlpack::{DataType, DataTypeCode, Device, DeviceType, Element};
pub use error::{ErrorKind, Fault, Result, RpcError};
pub use free_memory::give_back_free_memory;
pub use handle::{Handle, HandleQuota, HandleTable, PipeId};
pub use printable::{printable, printable_line};
pub use trace::TraceContext;
pub use value::{Packed, Reference, TensorRef, Value};

// For clients.
pub use client::{
    Action, AllocDevice, CallbackHandler, CallbackReturn, Pending, Pipe, RemoteCallback, RemoteFunction, RemoteModule,
    RemoteObject, RemoteTensor, ScopedAction, ScopedPending, Session, SessionModule, TypedFunction,
};
pub use function::{FromReply, IntoArg, IntoArgs, Pack, Shape};

// For servers.
pub use access_control::{AccessControl, Permission};
pub use device::{DeviceApi, DeviceAttribute, DeviceDescription, Devices, Target, VirtualDevice, VirtualDeviceBuilder};
pub use function::{
    Context, Function, FunctionKind, FunctionModule, LoadRequest, LocalValue, Module, ModuleLoader, Object, Registered,
    Registry, Shared, Signature, ThreadPermit, Usage, UsedDevices, WorkspaceFiles,
};
pub use limits::{MemoryQuota, OpenFileQuota, SessionLimits};
pub use local::{Backlog, DeviceGate, DeviceUse, LocalSession, LocalSessionBuilder, Spawner, ThreadQuota};
pub use tensor::{Tensor, TensorView, TensorViewMut};

// For implementers of sessions.
pub use reply::{PendingReply, Responder, Submission};
pub use session::{Lane, Operation, Request, RpcSession, SharedSession};
