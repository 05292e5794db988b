//! The workers' side of a reshard, as functions `disco.reshard.*`.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use rpc_core::function::Object;
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::{DataType, Device, ErrorKind, LocalValue, Pack, Registry, Result, RpcError, Shared, Tensor, Value};

use super::meeting::{Membership, join};
use super::messages::{JoinRequest, RelayedPiece, ReshardRequest, TensorPart, WorkerEnd, WorkerTask};
use super::transfer;
use crate::ccl::host::{self, Address, Listener, SessionKey};
use crate::ccl::{BreakCause, Ccl, CclError};
use crate::open_files::OpenFiles;
use crate::weights::reader::Destination;
use crate::worker::context::WorkerContext;
use crate::worker::exchanges::{Exchange, is_exchange};

/// Adds the functions by which a controller reshards to `registry`.
pub(in crate::weights) fn register(registry: &Registry) {
    registry
        .add(
            "disco.reshard.open",
            |worker: WorkerContext, request: Pack<ReshardRequest>, tensors: Vec<Option<Tensor>>| {
                Opened::new(&worker, &request.0, &tensors).map(|opened| Shared(Arc::new(opened)))
            },
        )
        .add("disco.reshard.describe", |opened: Shared<Opened>| Pack(opened.0.end.clone()))
        .add("disco.reshard.join", |worker: WorkerContext, opened: Shared<Opened>, request: Pack<JoinRequest>| {
            Joined::new(&worker, &opened.0, &request.0).map(|joined| Shared(Arc::new(joined)))
        })
        .add("disco.reshard.failure", |joined: Shared<Joined>| joined.0.failure())
        .add(
            "disco.reshard.send",
            |worker: WorkerContext, joined: Shared<Joined>, task: Pack<WorkerTask>, tensors: Vec<Tensor>| {
                let send = |ccl: &mut dyn Ccl| {
                    worker.complete()?;
                    transfer::send_all(worker.context(), ccl, &tensors, &task.0.moves)
                };
                joined.0.run(send).map(|()| true)
            },
        )
        .add(
            "disco.reshard.receive",
            |worker: WorkerContext, joined: Shared<Joined>, task: Pack<WorkerTask>, given: Vec<Option<Tensor>>| {
                joined.0.run(|ccl| {
                    worker.complete()?;
                    let tensors = destinations(&worker, &task.0, &given)?;
                    transfer::receive_all(worker.context(), ccl, &tensors, &task.0.moves)?;
                    Ok(tensors)
                })
            },
        )
        .add("disco.reshard.allocate", |worker: WorkerContext, task: Pack<WorkerTask>, given: Vec<Option<Tensor>>| {
            destinations(&worker, &task.0, &given)
        })
        .add("disco.reshard.read", |worker: WorkerContext, tensors: Vec<Tensor>, piece: Pack<RelayedPiece>| {
            read(&worker, &tensors, &piece.0)
        })
        .add(
            "disco.reshard.write",
            // Behind the writes before, whose failure is this one's.
            |worker: WorkerContext, tensors: Vec<Tensor>, bytes: LocalValue, piece: Pack<RelayedPiece>, _: bool| {
                write(&worker, &tensors, &bytes, &piece.0).map(|()| true)
            },
        )
        .add("disco.reshard.is_done", |_: LocalValue| true)
        .add("disco.reshard.tensor", |tensors: Vec<Tensor>, number: u32| -> Result<Tensor> {
            let tensor = tensors.into_iter().nth(number as usize);
            tensor.ok_or_else(|| RpcError::invalid_argument(format!("there is no tensor {number}")))
        });
}

/// Random text of this process, by which threads of one process know each other.
static PROCESS: LazyLock<Option<String>> = LazyLock::new(|| {
    let key = SessionKey::generate().ok()?;
    Some(key.bytes().iter().map(|byte| format!("{byte:02x}")).collect())
});

/// A worker that can be reached by others.
struct Opened {
    end: WorkerEnd,
    listener: Option<Listener>,
    /// Segment for all, which stays open until they have joined.
    #[cfg(target_os = "linux")]
    _segment: Option<host::Offer>,
    _open_file: Option<OpenFileLease>,
    _charge: MemoryLease,
}

/// Bytes that the description of a tensor takes, and of one of its dimensions, about.
const PART_COST: u64 = 96;
const DIMENSION_COST: u64 = 8;

impl Opened {
    fn new(worker: &WorkerContext, request: &ReshardRequest, tensors: &[Option<Tensor>]) -> Result<Self> {
        let cost = |part: &Option<Tensor>| {
            PART_COST + DIMENSION_COST * part.as_ref().map_or(0, |part| part.shape().len() as u64)
        };
        let of_segment = match request.segment {
            size if size > 0 && worker.worker_id().0 == 0 => host::segment_bytes(size as usize, false)? as u64,
            _ => 0,
        };
        let bytes = tensors.iter().map(cost).fold(of_segment, u64::saturating_add);
        let charge = worker.context().reserve_memory(bytes)?;
        let open_files = OpenFiles::of(worker.context());
        let me = worker.worker_id();
        let (mut listener, mut open_file, mut address) = (None, None, None);
        if let Some(at) = request.listen.get(me.index()) {
            open_file = open_files.reserve(1, format_args!("the data listener of worker {me}"))?;
            let (bound, bound_to) = listen(*at)?;
            (listener, address) = (Some(bound), Some(bound_to));
        }
        #[cfg(target_os = "linux")]
        let segment = match request.segment {
            0 => None,
            _ if me.0 != 0 => None,
            size => Some(host::Offer::new(size as usize, &host::Options { open_files, ..host::Options::default() })?),
        };
        let part = |part: &Tensor| TensorPart { dtype: part.dtype(), shape: part.shape().to_vec() };
        let end = WorkerEnd {
            process: PROCESS.clone().ok_or_else(|| RpcError::internal("the system gives no random numbers"))?,
            address,
            #[cfg(target_os = "linux")]
            ticket: segment.as_ref().map(host::Offer::ticket),
            tensors: tensors.iter().map(|one| one.as_ref().map(part)).collect(),
        };
        Ok(Self {
            end,
            listener,
            #[cfg(target_os = "linux")]
            _segment: segment,
            _open_file: open_file,
            _charge: charge,
        })
    }
}

fn listen(at: IpAddr) -> Result<(Listener, SocketAddr)> {
    let listener = Listener::bind(&Address::Tcp(SocketAddr::new(at, 0)))?;
    match listener.address() {
        Address::Tcp(address) => {
            let address = *address;
            Ok((listener, address))
        }
        other => Err(RpcError::internal(format!("a worker listens at {other}"))),
    }
}

/// Bytes that a rank takes for each other one, about: mostly those of the buffer of a connection.
const LINK_COST: u64 = 40 << 10;

/// A worker that is a rank of the group of both sessions, or the reason why it is not.
struct Joined {
    membership: Mutex<Result<Membership>>,
    /// `None` if the exchange had been ended before the worker came to it.
    exchange: Option<Exchange>,
    _charge: MemoryLease,
    /// Number of workers of the session that has the tensors: the first ranks.
    sources: u32,
}

impl Joined {
    fn new(worker: &WorkerContext, opened: &Opened, request: &JoinRequest) -> Result<Self> {
        if !is_exchange(request.number) {
            return Err(RpcError::invalid_argument(format!("{} is no number of an exchange", request.number)));
        }
        let (context, me) = (worker.context(), worker.worker_id().0);
        let charge = context.reserve_memory(u64::from(request.size).saturating_mul(LINK_COST))?;
        let exchange = worker.exchanges().begin(request.number);
        let membership = exchange.as_ref().map_err(RpcError::clone).and_then(|exchange| {
            let membership = join(context, request, me, opened.listener.as_ref(), exchange);
            // The cause says more than that the worker waits no longer.
            membership.map_err(|error| exchange.end_cause().unwrap_or(error))
        });
        let (membership, exchange) = (Mutex::new(membership), exchange.ok());
        Ok(Self { membership, exchange, sources: request.sources, _charge: charge })
    }

    /// Returns why the worker has not joined, if it has not.
    fn failure(&self) -> Option<String> {
        self.membership.lock().as_ref().err().map(|error| error.message().to_owned())
    }

    /// Does this worker's part, and waits until all others have done theirs. The worker has left
    /// the group then, and with an error it has ended it for all.
    fn run<T>(&self, work: impl FnOnce(&mut dyn Ccl) -> Result<T>) -> Result<T> {
        let left = || RpcError::new(ErrorKind::ApiMisuse, "the worker has left the reshard");
        let mut membership = std::mem::replace(&mut *self.membership.lock(), Err(left()))?;
        let ccl = &mut *membership.ccl;
        let done = work(ccl).inspect_err(|error| ccl.abort(error.message()));
        let done = done.and_then(|done| Ok(ccl.barrier().map(|()| done)?));
        done.map_err(|error| self.named(ccl, error))
    }

    /// Says of an error which worker of which session it comes from.
    fn named(&self, ccl: &dyn Ccl, error: RpcError) -> RpcError {
        if let Some(cause) = self.exchange.as_ref().and_then(Exchange::end_cause) {
            return cause.context("the reshard was ended").may_have_run(true);
        }
        let Some(breakdown) = ccl.control().broken() else { return error };
        if let BreakCause::Aborted(reason) = &breakdown.cause
            && breakdown.rank == ccl.rank()
        {
            tracing::debug!(%reason, "this worker has ended a reshard");
            return error;
        }
        let error = RpcError::from(CclError::Broken(Arc::clone(&breakdown)));
        match breakdown.rank.0.checked_sub(self.sources) {
            None => error.context(format_args!("worker {} of the session that has the tensors", breakdown.rank)),
            Some(worker) => error.context(format_args!("worker {worker} of the session that gets the tensors")),
        }
    }
}

/// Returns the tensors that a worker is to have: those that are given, and new ones.
fn destinations(worker: &WorkerContext, task: &WorkerTask, given: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
    let destination = Destination::on(worker, task.device.as_ref())?;
    let tensor = |(number, part): (usize, &TensorPart)| match given.get(number).and_then(Option::as_ref) {
        Some(tensor) if tensor.dtype() == part.dtype && tensor.shape() == part.shape => Ok(tensor.clone()),
        Some(tensor) => Err(RpcError::invalid_argument(format!(
            "a tensor of {} {:?}, which was to be one of {} {:?}",
            tensor.dtype(),
            tensor.shape(),
            part.dtype,
            part.shape
        ))),
        None => destination.allocate(worker, part.dtype, &part.shape),
    };
    task.parts.iter().enumerate().map(tensor).collect()
}

/// Reads a piece, if this worker has it.
fn read(worker: &WorkerContext, tensors: &[Tensor], piece: &RelayedPiece) -> Result<Option<Tensor>> {
    if worker.worker_id().0 != piece.worker {
        return Ok(None);
    }
    worker.complete()?;
    let tensor = tensor_of(tensors, piece)?;
    // At most `MAX_PIECE`.
    let bytes = worker.context().allocate(Device::cpu(), DataType::U8, &[piece.len as i64])?;
    transfer::read(tensor, &piece.runs, piece.start, bytes.write()?.bytes_mut()?)?;
    Ok(Some(bytes))
}

/// Writes a piece, if it is for this worker.
fn write(worker: &WorkerContext, tensors: &[Tensor], bytes: &LocalValue, piece: &RelayedPiece) -> Result<()> {
    if worker.worker_id().0 != piece.worker {
        return Ok(());
    }
    let Value::Object(Object::Tensor(bytes)) = bytes else {
        return Err(RpcError::invalid_argument("a piece without bytes"));
    };
    transfer::write(tensor_of(tensors, piece)?, &piece.runs, piece.start, bytes.read()?.bytes()?)
}

fn tensor_of<'a>(tensors: &'a [Tensor], piece: &RelayedPiece) -> Result<&'a Tensor> {
    if piece.len > transfer::MAX_PIECE {
        return Err(RpcError::limit("bytes of a piece", transfer::MAX_PIECE, piece.len));
    }
    tensors.get(piece.tensor as usize).ok_or_else(|| RpcError::invalid_argument("a piece of no tensor"))
}
