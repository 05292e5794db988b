//! The way through the controller: it fetches pieces from the workers that have them, and passes
//! them on, a few at a time.

use std::collections::VecDeque;

use rpc_core::{Pack, RpcError};

use super::byte_runs::ByteRuns;
use super::messages::RelayedPiece;
use super::plan::Move;
use super::sides::Session;
use crate::completion::Completion;
use crate::controller::dref::DRef;
use crate::controller::session::{Content, DiscoSession};
use crate::error::{Result, WorkerId};

/// Bytes of a piece, and pieces that are on their way to the controller at a time: all that the
/// controller holds.
const PIECE: u64 = 1 << 20;
const WINDOW: usize = 4;

/// Moves that go through the controller.
pub(super) struct Relay<'a> {
    pub(super) from: &'a DiscoSession,
    pub(super) to: &'a DiscoSession,
    /// The parts that the workers of `from` have.
    pub(super) parts: Vec<&'a DRef>,
    pub(super) moves: &'a [Move],
}

impl Relay<'_> {
    /// Moves all data to the tensors in `received`. The result is there on each worker once it has
    /// all of its own.
    ///
    /// # Errors
    ///
    /// Those of either session.
    pub(super) fn run(self, received: &DRef) -> Result<DRef> {
        let Self { from, to, parts, moves } = self;
        let read = Session::From.named(from.get_global_func("disco.reshard.read"))?;
        let write = Session::To.named(to.get_global_func("disco.reshard.write"))?;
        // The register for the bytes of a piece, which only the worker that gets them looks at.
        let bytes = Session::To.call(to, "disco.reshard.is_done", (received,))?;
        let mut done = Session::To.call(to, "disco.reshard.is_done", (received,))?;
        let mut fetched: VecDeque<(&Move, u64, u64, Completion<Content>)> = VecDeque::new();
        let mut pass_on = |(one, start, len, content): (&Move, u64, u64, Completion<Content>)| -> Result<()> {
            let Content::Tensor(piece) = Session::From.named(content.wait())? else {
                return Err(RpcError::internal("a worker sends no bytes for a piece of a reshard").into());
            };
            let destination = WorkerId(one.destination);
            Session::To.named(to.debug_set_register(&bytes, destination, &piece))?;
            let piece = relayed(one, destination, &one.to, (start, len));
            done = Session::To.named(write.call((received, &bytes, Pack(piece), &done)))?;
            Ok(())
        };
        for one in moves {
            for start in (0..one.from.len).step_by(PIECE as usize) {
                if fetched.len() == WINDOW {
                    fetched.pop_front().map_or(Ok(()), &mut pass_on)?;
                }
                let (source, len) = (WorkerId(one.source), PIECE.min(one.from.len - start));
                let piece = relayed(one, source, &one.from, (start, len));
                let piece = Session::From.named(read.call((parts.clone(), Pack(piece))))?;
                fetched.push_back((one, start, len, from.debug_get_from_remote(&piece, source)));
            }
        }
        fetched.into_iter().try_for_each(&mut pass_on)?;
        Ok(done)
    }
}

fn relayed(one: &Move, worker: WorkerId, runs: &ByteRuns, (start, len): (u64, u64)) -> RelayedPiece {
    RelayedPiece { worker: worker.0, tensor: one.tensor as u32, runs: runs.clone(), start, len }
}
