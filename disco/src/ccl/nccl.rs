//! Collectives on the memory of GPUs, by NVIDIA's NCCL.
//!
//! The library is [looked for at run time](Library::load), so that one program serves machines with
//! and without GPUs. It has to be NCCL 2.14 or newer: from then on there are communicators that do
//! not block, and only those can be aborted. Its own settings (`NCCL_…`) are its own affair, and
//! stay as the environment has them.
//!
//! # Division of work
//!
//! [`NcclCcl`] is one rank. NCCL moves and reduces the data, on a [stream](DeviceStream) that the
//! owner gives, which is a stream of CUDA or of HIP. NCCL knows nothing of ranks that call
//! different things, come without an input, or do not come at all; in all of these it hangs. So
//! each rank keeps a *control communicator* beside it, of the [`host`](super::host) backend, and
//! every collective has two halves:
//!
//! 1. All ranks [agree](super::Agreement) over the control communicator on the call that they are
//!    about to make. Mismatch, poison, steps, ranks that died or never come: all are found here, as
//!    the same error on all ranks. Nothing has been enqueued then. Work of the devices meanwhile
//!    makes no difference: this half is the processors' alone, and hidden behind that work.
//! 2. NCCL's call is enqueued, between two [marks](Mark) in the order of the stream, and
//!    [`run`](super::Ccl::run) returns: work that is submitted to the stream next comes behind it.
//!    [`complete`](super::Ccl::complete) waits until all of it is done. Until then a thread asks
//!    the communicator, the marks and the other ranks in turn. If the communicator says that
//!    something is wrong, or the time is up, this rank breaks the group over the control
//!    communicator. Each rank with collectives under way hears of that within milliseconds, and
//!    aborts, so that no thread that waits for the stream waits for ever. The next `complete` tells
//!    the losses.
//!
//! A rank whose group is broken aborts its communicator of NCCL, no matter which rank broke the
//! group. An abort can itself hang. It runs on a thread of its own. When its time is up (in which
//! the owner's own work on the stream does not count), [`Options::on_stuck`] is called, which by
//! default ends the process: nothing else helps then, and buffers that a device may still write to
//! must not be touched. **Ranks with GPUs should therefore be processes**, not threads of one.
//!
//! The first half costs the processor as much as a barrier of the control communicator. A call of
//! NCCL that blocks although it should not blocks its rank, too: then the others break the group
//! when their time is up, and that rank can only be ended from outside.
//!
//! # Rules of NCCL that are kept here
//!
//! From its user guide, chapters
//! [communicators](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html)
//! and [groups](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html):
//!
//! * After a call that is still in progress, the next on that communicator comes when
//!   `ncclCommGetAsyncError` no longer says so; only then is an operation on its stream.
//! * While a communicator is aborted, no other thread is in a call with it: all calls are behind
//!   one lock, which is held until the abort is over.
//! * When one rank fails, all ranks abort. Communicators [split](NcclCcl::split) from one another
//!   are aborted each for itself, when the group of each breaks: code that breaks one because a
//!   rank is gone has to [abort](super::Control::abort) the others that this rank is in.
//! * No thread synchronises with a stream blindly.
//! * A communicator is finalised, then destroyed; if that takes too long because others do not take
//!   part, it is aborted.
//! * Several communicators of one device are used from one thread, in the same order on all ranks:
//!   that is up to the owner.
//!
//! # What differs from the contract
//!
//! The [contract](super#the-contract) holds but for its third point, because the arithmetic is
//! NCCL's, in an order that depends on topology and size:
//!
//! * Sums of floats round in NCCL's order, and `float16` and `bfloat16` may be rounded after each
//!   addition. All ranks still get the same bits; other machines may get others.
//! * An average of integers, and a minimum or maximum with a NaN, is as NCCL has it: it promises
//!   nothing.
//! * Reductions take signed and unsigned integers of 8, 32 and 64 bits, `float16`, `bfloat16`,
//!   `float32`, `float64`, and from 2.24 on `float8_e4m3fn` and `float8_e5m2`; not `int16` and
//!   `uint16`. Operations that only move data take every type of whole bytes.
//!
//! # Test coverage
//!
//! The loader, with NCCL 2.32.3 on a machine without a GPU. All else against a library of the tests
//! that does the same on host memory. No GPU has run it so far.

#[allow(unsafe_code)]
mod backend;
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
pub use options::{OnStuck, Options};
pub use search_path::LIBRARY_VARIABLE;
pub use stream::{DeviceStream, Mark};
pub use version::Version;
