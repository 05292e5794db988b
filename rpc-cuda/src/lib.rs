//! The device kind `cuda`: NVIDIA GPUs, through the driver that is loaded at run time.
//!
#![doc = include_str!("../README.md")]
//!
//! # Order
//!
//! Each device has one default stream in the process. Zeroing, copies, kernels of [`CudaModules`]
//! and [`matmul`] are submitted to it, and so run in the order of the calls. A call that only
//! starts work may return at once: the borrow of a tensor ends then, and the next user's work runs
//! behind it. Memory comes from a pool and returns to it in the same order.
//!
//! A lane that has set another stream has its kernels and products there. They begin behind the
//! default stream's work at that time, and later work on one of their tensors runs behind them, on
//! any stream; other work of the default stream, such as the copies of the next tensors, runs
//! beside them. A copy between two devices is on the default stream of the source, and the default
//! stream of the destination goes on behind it. The duties of functions that use streams of their
//! own are documented at [`CudaMemory::device_pointer`].
//!
//! No thread waits for a stream on behalf of a session, or of another CUDA stream:
//! [`Stream::when_done`] and [`Stream::wait_for`] do not block. One thread of the process notifies
//! all sessions of completed work.
//!
//! # Errors
//!
//! Errors carry CUDA's description, and CUDA's name as
//! [`application_kind`](rpc_core::RpcError::application_kind). Work that runs later fails later,
//! and its error is reported by some later call; [`Stream::synchronize`] reports it for certain.
//! After a trap (a bad address, an assertion, a hardware fault) the context is gone: that call and
//! every later one on the device is [`ErrorKind::DeviceLost`](rpc_core::ErrorKind::DeviceLost),
//! with the cause, for as long as the process lives.
//!
//! # State of the tests
//!
//! All of this has been tested only against a simulated driver, which keeps CUDA's rules of order
//! and addresses on the processor, because no GPU was available. `tests/gpu.rs` holds the tests
//! that need one.
//!
//! [`Stream::synchronize`]: rpc_core::device::Stream::synchronize
//! [`Stream::wait_for`]: rpc_core::device::Stream::wait_for
//! [`Stream::when_done`]: rpc_core::device::Stream::when_done

mod arguments;
mod attributes;
mod cublas;
mod device_api;
mod driver;
mod event;
mod failure;
mod functions;
mod gpu;
mod gpu_list;
mod handle;
mod idle_memory;
mod kernel;
mod libraries;
mod loaded_module;
mod matmul;
mod memory;
mod memory_pool;
mod module_image;
mod module_loader;
pub mod nvml;
mod on_demand;
mod opened_gpu;
mod other_stream_work;
mod peer_access;
mod pinned_ranges;
mod ptx_signature;
mod release_thread;
mod retired_modules;
mod stream;
mod stream_order;
mod transfer;

pub use device_api::CudaDevice;
pub use event::Event as CudaEvent;
pub use functions::register;
pub use matmul::matmul;
pub use memory::CudaMemory;
pub use memory_pool::PoolStatistics;
pub use module_loader::CudaModules;
pub use on_demand::{CudaModulesOnDemand, on_demand};
pub use stream::CudaStream;
