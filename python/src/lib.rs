//! The native part of the Python package `tensor_rpc`: sessions, servers and Disco over the crates
//! beside it.
//!
//! One set of classes serves the blocking and the asyncio form. Every operation of a session is an
//! `Operation`, which a thread waits for, or an event loop drives. The
//! classes that users see are written in Python (`tensor_rpc/_blocking.py`, `tensor_rpc/aio.py`),
//! and are subclasses of those here.
//!
//! While a thread waits or copies it is detached from the interpreter.

mod argument;
mod array;
mod array_memory;
mod attach;
mod buffer;
mod callable;
mod callback;
mod child;
mod connect;
mod disco;
mod disco_mesh;
mod disco_program;
mod disco_recorded;
mod disco_ref;
mod disco_run_all;
mod disco_weight_reader;
mod disco_weights;
mod disco_worker;
mod errors;
mod event_loop;
mod files;
mod form;
mod functions;
mod leases;
mod lent;
mod listeners;
mod objects;
mod operation;
mod packed;
mod pipes;
mod prepare;
mod programs;
mod references;
mod reply;
mod server;
mod session;
mod types;

use pyo3::prelude::*;

/// The native part of `tensor_rpc`.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<types::DataType>()?;
    module.add_class::<types::Device>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<event_loop::EventLoop>()?;
    module.add_class::<event_loop::Task>()?;
    module.add_class::<array::DenseArray>()?;
    module.add_class::<references::Tensor>()?;
    module.add_class::<references::Function>()?;
    module.add_class::<references::Module>()?;
    module.add_class::<references::Object>()?;
    module.add_class::<references::Pipe>()?;
    module.add_class::<references::Callback>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<functions::Registry>()?;
    module.add_class::<functions::Context>()?;
    module.add_class::<functions::LocalFunction>()?;
    module.add_class::<functions::LocalModule>()?;
    module.add_class::<functions::LocalObject>()?;
    module.add_class::<functions::coroutines::CoroutineCall>()?;
    module.add_function(wrap_pyfunction!(functions::coroutines::coroutine_queue, module)?)?;
    module.add_function(wrap_pyfunction!(functions::coroutines::take_coroutine_calls, module)?)?;
    module.add_function(wrap_pyfunction!(functions::local, module)?)?;
    module.add_class::<server::Server>()?;
    module.add_function(wrap_pyfunction!(child::embed, module)?)?;
    module.add_function(wrap_pyfunction!(child::become_child, module)?)?;
    module.add_function(wrap_pyfunction!(child::run_rpc_cli, module)?)?;
    module.add_function(wrap_pyfunction!(child::run_rpc_server, module)?)?;
    module.add_class::<files::Files>()?;
    module.add_class::<files::RemoteFile>()?;
    module.add_class::<programs::Process>()?;
    module.add_class::<leases::Lease>()?;
    module.add_class::<leases::LeaseRequest>()?;
    module.add_class::<listeners::Listener>()?;
    module.add_class::<listeners::Connection>()?;
    module.add_function(wrap_pyfunction!(connect::connect, module)?)?;
    module.add_function(wrap_pyfunction!(pipes::pipe_function, module)?)?;
    module.add_function(wrap_pyfunction!(pipes::pipe_module_function, module)?)?;
    module.add_function(wrap_pyfunction!(pipes::pipe_module, module)?)?;
    module.add_function(wrap_pyfunction!(pipes::pipe_empty, module)?)?;
    module.add_function(wrap_pyfunction!(programs::run_op, module)?)?;
    module.add_function(wrap_pyfunction!(programs::start_op, module)?)?;
    module.add_function(wrap_pyfunction!(leases::lease_op, module)?)?;
    module.add_function(wrap_pyfunction!(leases::request_lease_op, module)?)?;
    module.add_function(wrap_pyfunction!(listeners::listen_op, module)?)?;
    module.add_function(wrap_pyfunction!(operation::forked, module)?)?;
    module.add_function(wrap_pyfunction!(operation::finish_requests, module)?)?;
    module.add_class::<disco::DiscoSession>()?;
    module.add_class::<disco_ref::DiscoRef>()?;
    module.add_class::<disco::DiscoListener>()?;
    module.add_class::<disco_worker::WorkerContext>()?;
    module.add_class::<disco_mesh::DiscoGroup>()?;
    module.add_class::<disco_mesh::DiscoMesh>()?;
    module.add_class::<disco_recorded::DiscoRecorded>()?;
    module.add_class::<disco_weight_reader::DiscoWeightReader>()?;
    module.add_class::<disco_weights::DiscoPart>()?;
    module.add_class::<disco_weights::DiscoLoader>()?;
    module.add_function(wrap_pyfunction!(disco_weights::open_weights_op, module)?)?;
    module.add_class::<disco_program::DiscoRecorder>()?;
    module.add_class::<disco_program::DiscoProgram>()?;
    module.add_function(wrap_pyfunction!(disco_run_all::run_all_op, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_threads, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_processes, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_servers, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_from_tracker, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_over, module)?)?;
    module.add_function(wrap_pyfunction!(disco::disco_listen, module)?)?;
    Ok(())
}
