//! `rpc.run.*`: programs of clients, where the operator allows them.

use std::sync::Arc;

use bytes::Bytes;
use rpc_core::client::{RunRequest, RunStatus};
use rpc_core::{Context, ErrorKind, Pack, Packed, Permission, Registry, Result, RpcError, Shared};

use super::files::workspace;
use crate::run::{ANY_PROGRAM, RunPolicy, RunningProgram};

pub(super) fn register(registry: &Registry) {
    registry
        .add("rpc.run.start", |context: Context, request: Packed| -> Result<_> {
            let refused = || {
                let text = "this server runs no programs for its clients: its operator has not given --allow-run";
                RpcError::new(ErrorKind::Refused, text).without_effect()
            };
            let policy = context.extension::<RunPolicy>().ok_or_else(refused)?;
            // Nothing of the request is decoded where no programs are run.
            let request: RunRequest = request.decode()?;
            context.authorize(&Permission::Program(&request.program))?;
            // A client that may run some programs only must not make them run others, by variables.
            let policy = match context.authorize(&Permission::Program(ANY_PROGRAM)) {
                Ok(()) => policy,
                Err(_) => Arc::new(policy.limited_to(&request.program)),
            };
            let program = RunningProgram::start(&context, &policy, &workspace(&context)?, &request)?;
            Ok(Shared(Arc::new(program)))
        })
        .add("rpc.run.read", |context: Context, Shared(program): Shared<RunningProgram>| -> Result<_> {
            let piece = program.read(&context)?;
            Ok(piece.map(|(stream, piece)| (stream.number(), piece)))
        })
        .add("rpc.run.wait", |context: Context, Shared(program): Shared<RunningProgram>| -> Result<Pack<RunStatus>> {
            program.wait(&context).map(Pack)
        })
        .add("rpc.run.write", |context: Context, Shared(program): Shared<RunningProgram>, data: Bytes| -> Result<_> {
            program.write(&context, &data)
        })
        .add("rpc.run.close_input", |Shared(program): Shared<RunningProgram>| program.close_input())
        .add("rpc.run.terminate", |Shared(program): Shared<RunningProgram>| program.terminate());
}
