//! Functions of the workers.

use std::time::Instant;

use disco::{ReduceOp, Scope, WorkerContext, WorkerId};
use rpc_core::{DataType, Registry, Result, RpcError, Tensor};

/// Name of a function that does nothing.
pub(crate) const EMPTY: &str = "bench.empty";

/// Name of a function that takes part in a collective repeatedly. Its arguments are the name of the
/// collective, the elements of the larger side, the calls that are timed together, and the number
/// of such batches. It returns the seconds of one call for each batch.
pub(super) const COLLECTIVE: &str = "bench.collective";

/// Returns the functions of workers.
pub(crate) fn registry() -> Registry {
    let registry = Registry::new();
    registry.add_inline(EMPTY, || ()).add(COLLECTIVE, collective);
    registry
}

/// Runs as a worker, and does not return, if this process was started as one.
pub(crate) fn serve_if_worker() {
    disco::serve_if_worker(&registry());
}

fn collective(worker: WorkerContext, name: String, elements: u64, batch: u32, batches: u32) -> Result<Vec<f64>> {
    let mut call = prepare(&worker, &name, elements)?;
    // The first calls touch new memory, which is slower.
    call()?;
    call()?;
    (0..batches)
        .map(|_| {
            worker.barrier(Scope::World)?;
            let began = Instant::now();
            for _ in 0..batch {
                call()?;
            }
            // The measured time ends when all workers have the result.
            worker.barrier(Scope::World)?;
            Ok(began.elapsed().as_secs_f64() / f64::from(batch.max(1)))
        })
        .collect()
}

/// Returns a function that makes one call of a collective on tensors of this worker.
fn prepare<'a>(worker: &'a WorkerContext, name: &str, elements: u64) -> Result<Box<dyn FnMut() -> Result<()> + 'a>> {
    let world = Scope::World;
    let (whole, part) = (elements, elements / u64::from(worker.world_size()));
    let tensor = |elements: u64| Tensor::from_slice([elements as i64], &vec![1.0_f32; elements as usize]);
    let (input, output) = match name {
        "reduce_scatter" | "scatter" => (tensor(whole)?, tensor(part)?),
        "allgather" | "gather" => (tensor(part)?, tensor(whole)?),
        "barrier" => (tensor(0)?, tensor(0)?),
        _ => (tensor(whole)?, tensor(whole)?),
    };
    debug_assert_eq!(input.dtype(), DataType::F32);
    Ok(match name {
        "allreduce" => Box::new(move || worker.allreduce(ReduceOp::Sum, &input, &output, world)),
        "reduce_scatter" => Box::new(move || worker.reduce_scatter(ReduceOp::Sum, &input, &output, world)),
        "allgather" => Box::new(move || worker.allgather(&input, &output, world)),
        "broadcast" if worker.worker_id().0 == 0 => {
            Box::new(move || worker.broadcast_from_worker0(Some(&input), &input, world))
        }
        "broadcast" => Box::new(move || worker.broadcast_from_worker0(None, &output, world)),
        "scatter" => Box::new(move || worker.scatter_from_worker0(Some(&input), &output, world)),
        "gather" => Box::new(move || worker.gather_to_worker0(&input, Some(&output), world)),
        "all_to_all" => Box::new(move || worker.all_to_all(&input, &output, world)),
        "send_recv" => {
            let id = worker.worker_id().0;
            let peer = WorkerId(id ^ 1);
            if peer.0 >= worker.world_size() {
                Box::new(|| Ok(()))
            } else if id.is_multiple_of(2) {
                Box::new(move || worker.send_to_worker(&input, peer))
            } else {
                Box::new(move || worker.recv_from_worker(&output, peer))
            }
        }
        "barrier" => Box::new(move || worker.barrier(world)),
        other => return Err(RpcError::invalid_argument(format!("there is no collective '{other}'"))),
    })
}
