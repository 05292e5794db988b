//! SPMD over sessions: one controller drives N workers, each behind any session of `rpc-core`.
//!
//! A program is written once, as a controller, and runs on workers that are threads, child
//! processes, servers on other machines, or devices behind a chain of hops: one constructor says
//! which. The controller issues commands (call a function, make or copy a tensor, run a
//! collective), and every worker executes them in the same order. A [`DRef`] stands for one value
//! on each worker. Tensors move between the workers directly, and not through the controller.
//!
//! ```
//! use disco::{ReduceOp, Scope, ThreadedSession, WorkerContext};
//! use rpc_core::{Registry, Result, Tensor, TensorViewMut};
//!
//! let registry = Registry::new();
//! registry.add("add_my_id", |worker: WorkerContext, mut x: TensorViewMut| -> Result<()> {
//!     x.as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += worker.worker_id().0 as f32);
//!     Ok(())
//! });
//!
//! let session = ThreadedSession::new(4, 1).registry(registry).start().wait()?;
//! let x = session.broadcast(&Tensor::from_slice([2], &[1.0_f32, 10.0])?, None, Scope::World)?;
//! session.get_global_func("add_my_id")?.call((&x,))?;
//! session.allreduce(&x, Some(&x), ReduceOp::Sum, Scope::World)?;
//! let sums = session.copy_from_worker_0(&x).wait()?;
//! assert_eq!(sums.read()?.as_slice::<f32>()?, [10.0, 46.0]);
//! session.sync_all().wait()?; // tells what has failed on workers
//! session.shutdown().wait()?;
//! # Ok::<(), disco::DiscoError>(())
//! ```
//!
//! # What follows TVM, and under which name
//!
//! | TVM's Disco | here |
//! | --- | --- |
//! | `ThreadedSession`, `ProcessSession` | [`ThreadedSession`], [`ProcessSession`] |
//! | `SocketSession` | [`SocketSession`] (addresses, a tracker, nodes that dial in) |
//! | none | [`DiscoSession::over`] any sessions |
//! | the programs of workers | [`serve_if_worker`], `rpc-server worker` |
//! | the programs of remote nodes | [`join`]; an `rpc-server` is a node |
//! | `Session.num_workers`, `GetNumWorkers` | [`DiscoSession::num_workers`] |
//! | `get_global_func`, `GetGlobalFunc` | [`DiscoSession::get_global_func`] |
//! | `call_packed`, `CallPacked` | [`DPackedFunc::call`], with a tuple or a list of [`Argument`]s |
//! | `CallWithPacked` | [`DiscoSession::call_packed`], with the same |
//! | `empty` (`in_group`) | [`DiscoSession::empty`] with a [`Scope`] |
//! | `empty` (`worker0_only`) | [`DiscoSession::empty_on_worker0`] with a [`Scope`] |
//! | `load_vm_module` | [`DiscoSession::load_module`], [`DModule::function`] |
//! | `copy_to_worker_0` | [`DiscoSession::copy_to_worker_0`] |
//! | `copy_from_worker_0` | [`DiscoSession::copy_from_worker_0`] |
//! | `broadcast`, `scatter` | [`DiscoSession::broadcast`], [`DiscoSession::scatter`] |
//! | `broadcast_from_worker0` | [`DiscoSession::broadcast_from_worker0`] |
//! | `scatter_from_worker0` | [`DiscoSession::scatter_from_worker0`] |
//! | `gather_to_worker0` | [`DiscoSession::gather_to_worker0`] |
//! | `allreduce` (`in_group`) | [`DiscoSession::allreduce`] with a [`Scope`] |
//! | `allgather` (`in_group`) | [`DiscoSession::allgather`] with a [`Scope`] |
//! | `init_ccl` | [`DiscoSession::init_ccl`]; the `host` backend is there without it |
//! | `_sync_worker`, `SyncWorker` | [`DiscoSession::sync_worker`], [`DiscoSession::sync_all`] |
//! | `DRef.debug_get_from_remote` | [`DiscoSession::debug_get_from_remote`] |
//! | `debug_copy_from` | [`DiscoSession::debug_set_register`] |
//! | `Shutdown` | [`DiscoSession::shutdown`] |
//! | `DRef`, `DPackedFunc`, `DModule` | [`DRef`], [`DPackedFunc`], [`DModule`] |
//! | `DiscoWorker`, worker-side collectives | [`WorkerContext`] |
//! | `import_python_module` | nothing: workers run the functions that their program registers |
//!
//! Besides: [`DiscoSession::ccl_state`], [`DiscoSession::abort_ccl`], [`DiscoSession::record`],
//! [`DiscoSession::reduce_scatter`], [`DiscoSession::all_to_all`], [`DiscoSession::barrier`],
//! [`DiscoSession::send_recv`], [`DiscoSession::reinit_ccl`], [`DiscoSession::run_all`]; and
//! [`ShardLoader`], which loads weights of safetensors files.
//!
//! # When things break
//!
//! * What fails on a worker poisons the result there, and all that is made of it.
//!   [`DiscoSession::sync_worker`] and [`DiscoSession::sync_all`] tell each failure once, with
//!   worker, command and cause; the session lives.
//! * In a collective the failure of one worker poisons the outputs of all.
//! * When a worker that is there never comes to a collective, goes on without it because its
//!   function failed, or cannot be reached by the others, the collectives are *broken*: they return
//!   the cause, which names rank and call, and all else works. [`DiscoSession::ccl_state`] tells,
//!   [`DiscoSession::reinit_ccl`] makes them anew, [`DiscoSession::abort_ccl`] breaks them.
//!   [`Options`] has the time limits.
//! * When a worker dies, or its link breaks, the session ends: every operation that waits, and
//!   every later one, returns the cause. Child processes end with it. A session that
//!   [awaits replacements](OnLoss::AwaitReplacement) pauses instead, until
//!   [`DiscoSession::replace`] has put another worker in the place of the lost one.
//!
//! Read first `controller/session.rs`, then `wire/command.rs`, `controller/dispatch.rs` and
//! `worker/executor.rs`; [`ccl`] has the collectives themselves.

#![deny(unsafe_code)]

pub mod ccl;
mod completion;
mod controller;
mod error;
mod held_memory;
mod launch;
mod link;
mod logs;
mod node;
mod number_list;
mod open_files;
mod options;
mod program;
mod runtime;
mod sync;
mod weights;
mod wire;
mod worker;

pub use ccl::{Rank, ReduceOp};
pub use completion::Completion;
pub use controller::ccl_state::{Breakage, CclState};
pub use controller::dref::{Argument, DModule, DPackedFunc, DRef, IntoArgument, IntoArguments, Operand, Recorded};
pub use controller::replace::RestoreGuard;
pub use controller::run_all::RunAll;
pub use controller::session::{Content, DiscoSession};
pub use error::{DiscoError, Failure, Result, WorkerId};
pub use launch::{NodeListener, ProcessSession, SocketSession, ThreadedSession};
pub use link::replacement::Replacement;
pub use logs::{OPERATOR_LOG, WorkerLogLayer};
pub use node::functions::{refuse, register};
pub use node::host_table::{CallReport, HostOwner, HostReport, HostTable, WorkerReport};
pub use node::join::{JoinOptions, NodeRank, join, join_with};
pub use node::settings::NodeSettings;
#[doc(hidden)]
pub use node::simulated::SimulatedWorkers;
pub use node::worker_process::{serve_if_worker, serve_if_worker_with, serve_if_worker_with_access};
pub use options::{Advertise, Hosting, OnLoss, Options};
pub use program::recorder::{Program, Recorder};
pub use weights::folders::WeightFolders;
pub use weights::{Cut, DataRoute, Part, Reshard, Resharded, ShardLoader, TensorInfo, Unreadable, WeightReader};
pub use wire::command::Scope;
#[doc(hidden)]
pub use wire::fuzzing;
pub use wire::grouping::Grouping;
pub use wire::mesh::Mesh;
pub use wire::parameter::ParameterType;
pub use worker::context::WorkerContext;
pub use worker::rendezvous::DataAddress;
