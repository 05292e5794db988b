//! Where the calls of a small graph run and its data lives, decided from constraints: over several sessions at once.
//!
//! A [`CallGraph`] has inputs, calls of functions, and outputs. Constraints ([`Constraint`]: a session, a [`VirtualDevice`], or both) can be put
//! on any of them, and on single arguments. [`CallGraph::plan`] decides the rest for the [`Site`]s that there are, and inserts the copies that it takes;
//! [`Plan::run`] then runs calls and copies as soon as what they need is there, on all sessions at once.
//!
//! The rules:
//!
//! * A call runs on the device that its results lie on, and takes its arguments there. This is one place, and the constraints on all of it have to agree.
//! * An argument that has a constraint of its own lies where that says, in the session of the call: the shapes that a kernel takes in host memory, say. What it
//!   leaves open is as for the call, as far as there is such a device.
//! * An input or a result that is used elsewhere is copied there: once, however many calls use it there. What is not constrained moves to
//!   where it is used, in the order in which the graph was made, so that it takes no copy.
//! * What is open after that is the graph's [default](CallGraph::default_place), and then the first device of the first site that does.
//!
//! Places differ if session, device or memory scope do, as in TVM's planning of devices, which this follows as far as the graph is alike.
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
mod plan;
mod run;
mod site;
mod solve;

pub use error::{Origin, PlacementError};
pub use graph::{Argument, CallGraph, CallId, Constraint, Edge, InputId, OutputId, ValueId};
pub use plan::{Place, Plan, Step};
pub use run::{InputData, Run};
pub use site::Site;

#[cfg(test)]
mod tests;
