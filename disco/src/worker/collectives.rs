//! Handlers of collectives on registers, and of transfers between pairs of workers.

use std::sync::Arc;

use rpc_core::function::Object;
use rpc_core::{DataType, RpcError, Tensor, Value};

use super::context::CollectiveError;
use super::executor::Worker;
use super::register_content::{Fault, Outcome, Slot};
use super::result_layout::{HEADER, read_layout, result_layout, write_layout};
use crate::ccl::{Operation, Rank};
use crate::error::Failure;
use crate::wire::command::{Command, Kind, Register, Scope};

impl Worker {
    /// Takes part in a collective on registers, also after an error on this worker: the others
    /// learn of it by that.
    pub(super) fn collective(
        &mut self,
        command: &Command,
        kind: Kind,
        scope: Scope,
        from: Register,
        (to, fresh): (Register, bool),
    ) -> Outcome {
        self.begin_step();
        let (rank, size) = self.this.rank(scope);
        let root = Rank(0);
        let is_root = rank == root;
        let operation = match kind {
            Kind::Allreduce(op) => Operation::Allreduce(op),
            Kind::ReduceScatter(op) => Operation::ReduceScatter(op),
            Kind::Allgather => Operation::Allgather,
            Kind::Broadcast => Operation::Broadcast { root },
            Kind::Scatter => Operation::Scatter { root },
            Kind::Gather => Operation::Gather { root },
            Kind::AllToAll => Operation::AllToAll,
            Kind::Barrier => return self.take_part(command, scope, Operation::Barrier, Ok((None, None))),
        };
        let one_sided = matches!(kind, Kind::Broadcast | Kind::Scatter);
        let source =
            if one_sided && !is_root { Ok(None) } else { self.tensor(from).and_then(|found| self.present(found)) };
        let target = if fresh {
            // Only the root of a broadcast or scatter knows the layout that the others have to
            // expect.
            let layout = match &source {
                _ if one_sided => Some(self.announce(command, scope, kind, size, &source)?),
                Ok(Some(tensor)) => result_layout(kind, tensor, size).map_err(Fault::Own).transpose(),
                Ok(None) => None,
                Err(Fault::Own(error)) => Some(Err(Fault::Own(error.clone()))),
                Err(Fault::Inherited(failure)) => Some(Err(Fault::Inherited(Arc::clone(failure)))),
            };
            match layout {
                Some(Ok((dtype, shape))) if kind != Kind::Gather || is_root => {
                    self.this.allocate(dtype, &shape).map(Some).map_err(Fault::Own)
                }
                Some(Err(fault)) => Err(fault),
                _ => Ok(None),
            }
        } else if kind == Kind::Gather && !is_root {
            Ok(None)
        } else {
            self.tensor(to).and_then(|found| self.present(found))
        };
        let tensors = source.and_then(|source| Ok((source, target?)));
        let target = tensors.as_ref().ok().and_then(|(_, target)| target.clone());
        self.take_part(command, scope, operation, tensors)?;
        if fresh {
            self.set(to, Slot::Value(target.map_or(Value::Null, |tensor| Value::Object(Object::Tensor(tensor)))))?;
        }
        Ok(())
    }

    pub(super) fn present(&self, tensor: Option<Tensor>) -> Outcome<Option<Tensor>> {
        match tensor {
            Some(tensor) => Ok(Some(tensor)),
            None => Err(self.unexpected("a tensor", &Value::Null).into()),
        }
    }

    /// Announces the type and shape of the first worker's result to all, before its data.
    pub(super) fn announce(
        &mut self,
        command: &Command,
        scope: Scope,
        kind: Kind,
        size: u32,
        source: &Outcome<Option<Tensor>>,
    ) -> Outcome<Outcome<(DataType, Vec<i64>)>> {
        let operation = Operation::Broadcast { root: Rank(0) };
        // On the device of all tensors of collectives, which may have no room left.
        let header = match self.this.allocate(DataType::U8, &[HEADER]) {
            Ok(header) => header,
            Err(error) => {
                self.take_part(command, scope, operation, Err(Fault::Own(error.clone())))?;
                return Err(error.into());
            }
        };
        let described = match source {
            Ok(Some(tensor)) => result_layout(kind, tensor, size).map_err(Fault::Own).and_then(|layout| {
                let (dtype, shape) = layout.ok_or_else(|| RpcError::internal("a result without layout"))?;
                write_layout(&header, dtype, &shape)?;
                Ok(())
            }),
            Ok(None) => Ok(()),
            Err(Fault::Own(error)) => Err(Fault::Own(error.clone())),
            Err(Fault::Inherited(failure)) => Err(Fault::Inherited(Arc::clone(failure))),
        };
        let tensors = described.map(|()| (Some(header.clone()), Some(header.clone())));
        self.take_part(command, scope, operation, tensors)?;
        if let Some(failure) = self.settle() {
            return Err(Fault::Inherited(failure));
        }
        Ok(Ok(read_layout(&header)?))
    }

    pub(super) fn take_part(
        &self,
        command: &Command,
        scope: Scope,
        operation: Operation,
        tensors: Outcome<(Option<Tensor>, Option<Tensor>)>,
    ) -> Outcome {
        let (inherited, tensors) = match tensors {
            Ok(tensors) => (None, Ok(tensors)),
            Err(Fault::Own(error)) => (None, Err(error)),
            // A failure elsewhere is told with its worker.
            Err(Fault::Inherited(failure)) => {
                let cause = failure
                    .cause
                    .clone()
                    .context(format_args!("worker {}: {} (#{})", failure.worker, failure.command, failure.sequence));
                (Some(failure), Err(cause))
            }
        };
        let borrowed = tensors.as_ref().map(|(from, to)| (from.as_ref(), to.as_ref())).map_err(RpcError::clone);
        match (self.this.run(scope, operation, borrowed), inherited) {
            (Ok(()), _) => Ok(()),
            (Err(_), Some(failure)) => Err(Fault::Inherited(failure)),
            (Err(CollectiveError::Own(error)), None) => Err(Fault::Own(error)),
            (Err(CollectiveError::Inherited(worker, cause)), None) => Err(Fault::Inherited(Arc::new(Failure {
                worker,
                sequence: self.sequence,
                command: command.name().to_owned(),
                cause,
            }))),
        }
    }

    /// Sends and receives by pairs. All workers go through them in one order, so that none waits in
    /// a circle.
    pub(super) fn send_recv(
        &mut self,
        command: &Command,
        from: Register,
        to: Register,
        pairs: &[(u32, u32)],
    ) -> Outcome {
        self.begin_step();
        let mut outcome = Ok(());
        for (sender, receiver) in pairs {
            let (operation, tensors) = if *sender == self.id.0 {
                let tensor = self.tensor(from).and_then(|found| self.present(found));
                (Operation::Send { to: Rank(*receiver) }, tensor.map(|tensor| (tensor, None)))
            } else if *receiver == self.id.0 {
                let tensor = self.tensor(to).and_then(|found| self.present(found));
                (Operation::Recv { from: Rank(*sender) }, tensor.map(|tensor| (None, tensor)))
            } else {
                continue;
            };
            // The other ends of the pairs to come wait all the same.
            let this = self.take_part(command, Scope::World, operation, tensors);
            outcome = outcome.and(this);
        }
        outcome
    }
}
