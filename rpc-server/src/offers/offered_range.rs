//! The session of a peer that holds a capability: one range of a tensor, which it may write to.

use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{DataType, ErrorKind, Lane, LocalSession, Operation, Request, RpcError, RpcSession, Submission, Tensor};

/// Name of the function that returns the range, as a tensor of bytes.
pub(crate) const GET_RANGE: &str = "rpc.peer.range";

/// Session that has one tensor, and lets its client write to it.
pub(super) struct OfferedRange {
    session: LocalSession,
    /// Layout of the tensor of bytes, as the session's function returns it.
    byte_offset: u64,
    shape: Vec<i64>,
    peer: String,
}

impl OfferedRange {
    /// Restricts `session`, whose function [`GET_RANGE`] returns `range`.
    pub(super) fn new(session: LocalSession, range: &Tensor, peer: String) -> Self {
        Self { session, byte_offset: range.byte_offset(), shape: range.shape().to_vec(), peer }
    }

    /// Ends the session now: no further write begins.
    pub(super) fn close(&self, reason: RpcError) {
        self.session.close(reason);
    }

    /// Returns once all writes have ended, after [`close`](Self::close).
    pub(super) async fn writes_ended(&self) {
        let _ = self.session.submit(Request::new(Operation::Shutdown)).reply().await;
    }

    /// Returns true if a request may name this view of the storage. Offsets count from its start,
    /// and the session checks that they do not reach beyond it.
    fn is_range(&self, tensor: &TensorRef) -> bool {
        tensor.byte_offset == self.byte_offset
            && tensor.shape == self.shape
            && tensor.strides.is_none()
            && tensor.dtype == DataType::U8
    }

    fn allows(&self, operation: &Operation) -> bool {
        match operation {
            Operation::GetFunction { name } => name == GET_RANGE,
            Operation::Call { args, .. } => args.is_empty(),
            Operation::Write { to, .. } => self.is_range(to),
            Operation::Free { .. } | Operation::Release { .. } | Operation::Shutdown => true,
            _ => false,
        }
    }
}

impl RpcSession for OfferedRange {
    fn submit(&self, request: Request) -> Submission {
        if self.allows(&request.operation) {
            return self.session.submit(request);
        }
        let operation = request.operation.name();
        rpc_core::log_limited!(WARN, peer = self.peer, operation, "refused what a capability does not allow");
        let text =
            format!("a capability lets its holder write to the offered bytes, and does not allow this {operation}");
        Submission::ready(Err(RpcError::new(ErrorKind::Refused, text)))
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.session)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        if self.is_range(to) { self.session.write_in_place(lane, to, offset, len) } else { None }
    }
}
