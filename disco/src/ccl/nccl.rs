//! Collectives on the memory of GPUs, by NVIDIA's NCCL.
//!
//! The library is [looked for at run time](Library::load), so that one program serves machines with
//! and without GPUs. It has to be NCCL 2.14 or newer: communicators that do not block came with
//! that version, and only those can be aborted. The settings that NCCL reads from the environment
//! (`NCCL_…`) are left as they are.
//!
//! # Division of work
//!
//! [`NcclCcl`] is one rank. NCCL moves and reduces the data on a [stream](DeviceStream) of CUDA or
//! HIP, which the caller provides. NCCL does not detect ranks that call different collectives, have
//! no input, or never call at all: in each of these cases it hangs. So each rank also has a
//! *control communicator* of the [`host`](super::host) backend, and every collective has two
//! halves:
//!
//! 1. All ranks [agree](super::Agreement) over the control communicator on the call that they are
//!    about to make. A mismatch, poison, a rank that is out of step, has died or never comes is
//!    found here, as the same error on all ranks, before anything has been enqueued. This half runs
//!    on the processors alone, so that the devices can work meanwhile and its cost is hidden behind
//!    their work.
//! 2. NCCL's call is enqueued, between two [marks](Mark) in the order of the stream, and
//!    [`run`](super::Ccl::run) returns. Work that is submitted to the stream later runs after it.
//!    [`complete`](super::Ccl::complete) waits until all enqueued collectives are done. Until then
//!    a thread polls the communicator, the marks and the other ranks. If the communicator reports
//!    an error, or a time limit passes, this rank breaks the group over the control communicator.
//!    Each rank with collectives in progress notices that within milliseconds and aborts them, so
//!    that no thread waits for the stream for ever. The next `complete` returns the error of the
//!    lost collectives.
//!
//! A rank whose group is broken aborts its communicator of NCCL, no matter which rank broke the
//! group. An abort can itself hang, so it runs on a thread of its own. If it takes longer than
//! [`Options::abort_timeout`], not counting other work of the caller on the stream,
//! [`Options::on_stuck`] is called. Nothing but the end of the process releases the buffers then:
//! the device may still write to them. **Ranks with GPUs should therefore be processes**, not
//! threads of one, and end when they are [stuck](end_process_when_stuck), as Disco's workers do.
//! The default only logs it, because the process may be a controller's, or serve others.
//!
//! The first half costs the processor as much as a barrier of the control communicator. If a call
//! of NCCL blocks although the communicator is one that does not block, its rank blocks too. The
//! other ranks then break the group when their time limits pass, and the blocked rank can only be
//! ended from outside of its process.
//!
//! # Rules of NCCL that are kept here
//!
//! From its user guide, chapters
//! [communicators](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html)
//! and [groups](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html):
//!
//! * While a call is in progress (`ncclInProgress`), no other call is made with that communicator.
//!   The call has ended when `ncclCommGetAsyncError` no longer returns that state, and only then is
//!   its operation on the stream.
//! * While a communicator is aborted, no other thread is in a call with it: all calls hold one
//!   lock, under which the abort takes the communicator from them.
//! * An abort needs no thread that stands in a call of the device's driver, and makes no such call
//!   before NCCL's own. Such a call, a query of a mark included, may wait for a thread that frees
//!   memory, which waits for the device, and that for the abort. So each communicator has a thread
//!   that makes no such call: it ends the communicator, and aborts it if this rank has stood in the
//!   driver for as long as a collective may take.
//! * When one rank fails, all ranks abort. Communicators that were [split](NcclCcl::split) from one
//!   another are aborted separately, each when its own group breaks. Code that breaks one group
//!   because a rank is gone has to [abort](super::Control::abort) the other groups of that rank as
//!   well.
//! * No thread synchronises with a stream blindly.
//! * A communicator is finalised, then destroyed. If that takes too long because other ranks do not
//!   take part, it is aborted.
//! * Several communicators of one device are used from one thread, in the same order on all ranks.
//!   The caller is responsible for that.
//!
//! # What differs from the contract
//!
//! The [contract](super#the-contract) holds except for its third point. NCCL does the arithmetic,
//! in an order that depends on the topology and on the size of the data:
//!
//! * Sums of floats are rounded in NCCL's order, and `float16` and `bfloat16` may be rounded after
//!   each addition. All ranks of a group still get the same bits; the same sum on other machines
//!   may have different bits.
//! * The average of integers, and the minimum or maximum with a NaN, is what NCCL computes, which
//!   its documentation does not define.
//! * Reductions take signed and unsigned integers of 8, 32 and 64 bits, `float16`, `bfloat16`,
//!   `float32`, `float64`, and from 2.24 on `float8_e4m3fn` and `float8_e5m2`; not `int16` and
//!   `uint16`. Operations that only move data take every type of whole bytes.
//!
//! # Test coverage
//!
//! The loader is tested with NCCL 2.32.3 on a machine without a GPU. Everything else is tested
//! against a stand-in library that implements the same functions on host memory. It has not run on
//! a GPU so far.

#[allow(unsafe_code)]
mod backend;
mod busy_devices;
#[allow(unsafe_code)]
mod comm_handle;
#[allow(unsafe_code)]
mod communicator;
mod config;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
mod elements;
#[allow(unsafe_code)]
mod enqueue;
mod error;
mod guard;
#[allow(unsafe_code)]
mod library;
mod member;
mod options;
mod search_path;
#[allow(unsafe_code)]
mod stream;
#[allow(unsafe_code)]
mod symbols;
mod version;
mod wait;
mod watch;

pub use backend::NcclCcl;
pub use error::{Attempt, LoadError, NcclError};
pub use library::{Library, UniqueId};
pub use options::{OnStuck, Options, end_process_when_stuck};
pub use search_path::LIBRARY_VARIABLE;
pub use stream::{DeviceStream, Mark};
pub use version::Version;
