//! The device kind `opencl`: GPUs, boards and processors, through the OpenCL that is loaded at run
//! time.
//!
#![doc = include_str!("../README.md")]
//!
//! # Order
//!
//! Each device has one default stream in the process. Zeroing, copies and kernels of
//! [`OpenClModules`] are submitted to it, and so run in the order of the calls. A call that only
//! starts work may return at once: the borrow of a tensor ends then, and the next user's work runs
//! behind it. Memory comes from a pool and returns to it in the same order.
//!
//! A lane that has set another stream has its kernels there. They begin behind the default stream's
//! work at that time, and later work on one of their tensors runs behind them, on any stream; other
//! work of the default stream, such as the copies of the next tensors, runs beside them.
//!
//! # Memory
//!
//! OpenCL's memory has handles and no addresses. The scope `host` is host memory that the device
//! uses, too: the processor has it, except while a kernel is given it, which is why such a call
//! returns when the kernel is done. Other memory can be [mapped](rpc_core::device::Memory::map),
//! which costs no copy where the device works in host memory.
//!
//! # Errors
//!
//! Errors carry OpenCL's name as [`application_kind`](rpc_core::RpcError::application_kind). Work
//! that runs later fails later. The first error of a stream is kept, and reported once: by
//! [`Stream::synchronize`](rpc_core::device::Stream::synchronize), or by the next download, if the
//! stream is the default one. A stream takes some hundreds of commands; further ones wait for
//! those.
//!
//! Once the driver no longer knows the device or its queues, that call and every later one on the
//! device is [`ErrorKind::DeviceLost`](rpc_core::ErrorKind::DeviceLost), for as long as the process
//! lives.

mod attributes;
mod copy_buffers;
mod device_api;
mod device_list;
mod event;
mod failure;
mod functions;
mod handle;
mod kernel;
mod library;
mod loaded_program;
mod memory;
mod memory_pool;
mod module_loader;
mod native_code;
mod on_demand;
mod opened_device;
mod other_stream_work;
mod parameter;
mod release_thread;
mod source;
mod stream;
mod stream_order;
mod submitted_commands;
mod transfer;

pub use device_api::OpenClDevice;
pub use functions::register;
pub use memory::OpenClMemory;
pub use memory_pool::PoolStatistics;
pub use module_loader::{OpenClModules, module_of_source};
pub use native_code::NativeCodeRule;
pub use on_demand::{OpenClModulesOnDemand, on_demand};
pub use stream::OpenClStream;
