//! Placement: decides from constraints where the calls of a small graph run and its data lies, over
//! several sessions.
//!
//! A [`CallGraph`] has inputs, calls of functions, and outputs. Constraints ([`Constraint`]: a
//! session, a [`VirtualDevice`], or both) can be put on any of them, and on single arguments.
//! [`CallGraph::plan`] decides the rest for the given [`Site`]s, and inserts the copies that are
//! needed; [`Plan::run`] then runs calls and copies as soon as their inputs are there, on all
//! sessions at once.
//!
//! The rules:
//!
//! * A call runs on the device that its results lie on, and takes its arguments there. This is one
//!   location, and all constraints on it have to agree.
//! * An argument with a constraint of its own lies where that says, in the session of the call: for
//!   example, shapes that a kernel takes in host memory. Fields that it leaves open are those of
//!   the call, as far as there is such a device.
//! * An input or a result that is used elsewhere is copied there: once, however many calls use it
//!   there. Unconstrained data is placed where it is used, in the order in which the graph was
//!   built, so that it needs no copy.
//! * Everything still open gets the graph's [default](CallGraph::default_location), and otherwise
//!   the first device of the first site that satisfies the constraints.
//!
//! Locations differ if session, device or memory scope do, as in TVM's device planning, which this
//! follows as far as the graphs are alike.
//!
//! ```
//! use rpc_core::placement::{CallGraph, Constraint, Site};
//! use rpc_core::tensor::{TensorView, TensorViewMut};
//! use rpc_core::{DataType, LocalSession, Registry, Result, Session, dlpack};
//!
//! fn session() -> Session {
//!     let registry = Registry::new();
//!     registry.add("double", |x: TensorView, mut y: TensorViewMut| -> Result<()> {
//!         let x = x.as_slice::<f32>()?;
//!         y.as_mut_slice::<f32>()?.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
//!         Ok(())
//!     });
//!     Session::new(LocalSession::new(registry))
//! }
//!
//! # rpc_core::blocking::block_on(async {
//! let sessions = [("board", session()), ("server", session())];
//! let mut sites = Vec::new();
//! for (name, session) in &sessions {
//!     sites.push(Site::of(name, session).await?);
//! }
//!
//! let mut graph = CallGraph::new();
//! let x = graph.input("x", DataType::F32, &[2]);
//! let on_board = graph.call("double", vec![x.into()], &[(DataType::F32, &[2])]);
//! let on_server = graph.call("double", vec![on_board.result(0).into()], &[(DataType::F32, &[2])]);
//! graph.output("y", on_server.result(0));
//! graph.constrain(on_board, Constraint::session("board"), "the camera is there");
//! graph.constrain(on_server, Constraint::session("server"), "it has more memory");
//!
//! let plan = graph.plan(&sites)?;
//! assert_eq!(plan.copies(), 1);
//! let outputs = plan.run(&sessions, vec![("x", dlpack::to_bytes(&[1.0_f32, 2.0]).into())]).await?;
//! let y = &outputs["y"];
//! assert_eq!(y.session().download::<f32>(y).await?, [4.0, 8.0]);
//! # Ok::<(), rpc_core::RpcError>(())
//! # }).unwrap().unwrap();
//! ```
//!
//! [`VirtualDevice`]: crate::VirtualDevice

mod error;
mod graph;
mod pipeline;
mod plan;
mod run;
mod schedule;
mod site;
mod solve;

pub use error::{Origin, PlacementError};
pub use graph::{Argument, CallGraph, CallId, Constraint, Edge, InputId, OutputId, ValueId};
pub use plan::{Location, Plan, Step};
pub use run::{CopyReport, InputData, RunReport};
pub use site::Site;

#[cfg(test)]
mod tests;
