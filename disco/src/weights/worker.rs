//! The workers' side of loading, as functions `disco.weights.*`: a worker opens the files that it
//! may, and reads its part of a tensor or receives it from a worker that has read it.

use std::path::PathBuf;
use std::sync::Arc;

use rpc_core::client::Digest;
use rpc_core::dlpack::dense_size;
use rpc_core::function::{FunctionKind, Object, Opaque};
use rpc_core::limits::MemoryLease;
use rpc_core::{
    Context, DataType, ErrorKind, LocalValue, Pack, Registry, Result, RpcError, Shared, Tensor, Value, blocking,
};

use super::Part;
use super::files::{InFile, MatchingFile};
use super::messages::{FindRequest, LoadRequest, RequestedFile};
use super::node_cache;
use super::reader::{Destination, Meter, Source, WeightReader, filled};
use crate::ccl::{Operation, Rank};
use crate::error::WorkerId;
use crate::weights::folders::WeightFolders;
use crate::wire::command::Scope;
use crate::worker::context::WorkerContext;

/// Adds the functions that loaders call to `registry`.
pub(crate) fn register(registry: &Registry) {
    registry
        .add("disco.weights.open", |context: Context, wanted: Pack<Vec<RequestedFile>>| {
            OpenFiles::open(&context, wanted.0).map(|files| Shared(Arc::new(files)))
        })
        .add("disco.weights.unreadable", |files: Shared<OpenFiles>| {
            let told = files.0.files.iter().map(|file| file.as_ref().err().map(|error| error.message().to_owned()));
            Pack(told.collect::<Vec<_>>())
        })
        .add("disco.weights.load", |worker: WorkerContext, files: Shared<OpenFiles>, request: Pack<LoadRequest>| {
            load(&worker, &files.0, &request.0).map_err(|error| request.0.with_tensor_name(error))
        })
        .add("disco.weights.cache_limit", |context: Context| node_cache::limit(&context).min(i64::MAX as u64))
        .add("disco.weights.find", |worker: WorkerContext, request: Pack<FindRequest>| find(&worker, &request.0))
        .add("disco.weights.is_found", |found: Option<Tensor>| found.is_some())
        .add("disco.weights.take", |worker: WorkerContext, bytes: Tensor, request: Pack<LoadRequest>| {
            take(&worker, &bytes, &request.0).map_err(|error| request.0.with_tensor_name(error))
        });
}

/// Maximum number of files of one loader.
const MAX_FILES: usize = 4096;

/// The files of a loader on one worker, or the errors because of which it cannot read them.
struct OpenFiles {
    files: Vec<Result<MatchingFile>>,
    _charge: MemoryLease,
}

/// Bytes that a file is charged with beside its path: its entry, and the text of an error.
const FILE_COST: u64 = 1024;

impl OpenFiles {
    fn open(context: &Context, wanted: Vec<RequestedFile>) -> Result<Self> {
        if wanted.len() > MAX_FILES {
            return Err(RpcError::limit("files of one loader", MAX_FILES as u64, wanted.len() as u64));
        }
        // The path is there once, or in an error, which may quote it.
        let paths: u64 = wanted.iter().map(|wanted| wanted.path.len() as u64).sum();
        let charge = context.reserve_memory(2 * paths + FILE_COST * wanted.len() as u64)?;
        let folders = context.extension::<WeightFolders>();
        let open = |wanted: RequestedFile| {
            let Some(folders) = &folders else {
                let text = "this node's workers may read no files of weights: its operator names no folders of them \
                            (--weights of rpc-server)";
                return Err(RpcError::new(ErrorKind::Refused, text));
            };
            MatchingFile::find(folders.admit(&PathBuf::from(wanted.path))?, &wanted.identity)
        };
        Ok(Self { files: wanted.into_iter().map(open).collect(), _charge: charge })
    }
}

/// Loads this worker's part. Reads and sends the parts of the workers that it reads for before.
fn load(worker: &WorkerContext, files: &OpenFiles, request: &LoadRequest) -> Result<LocalValue> {
    let (me, readers) = (worker.worker_id(), &request.readers);
    if readers.len() != worker.world_size() as usize || readers.iter().any(|reader| *reader >= worker.world_size()) {
        return Err(RpcError::internal("a load that does not say who reads"));
    }
    let reader = readers[me.index()];
    if reader != me.0 {
        return deliver(worker, receive(worker, WorkerId(reader), request)?, request);
    }
    let file = open(files, request);
    // The workers that wait come first, and report what has failed. A part that all of them get is
    // read and hashed once.
    let (mut for_all, mut digest_for_all) = (None, None);
    for (of, _) in (0..).zip(readers).filter(|(of, reader)| *of != me.0 && **reader == me.0) {
        let read = || {
            let file = file.as_ref().map_err(RpcError::clone)?;
            // Read to the device of collectives, because NCCL does not send from host memory.
            let (slice, destination) = (request.slice_for(worker, WorkerId(of))?, Destination::of(worker.device()));
            filled(worker, &destination, request.dtype, &slice.shape, &|at, out| slice.read(file, at, out, &mut |_| ()))
        };
        let part = match request.part {
            Part::Whole | Part::With { .. } => for_all.get_or_insert_with(read).clone(),
            Part::Shard { .. } => read(),
        };
        if request.is_cached(WorkerId(of)) {
            let hash = || part.as_ref().map_err(RpcError::clone).and_then(|part| digest_of(worker, part));
            let digest = match request.part {
                Part::Whole | Part::With { .. } => digest_for_all.get_or_insert_with(hash).clone(),
                Part::Shard { .. } => hash(),
            };
            _ = send_unless_cached(worker, WorkerId(of), part, digest);
        } else {
            _ = send(worker, WorkerId(of), part);
        }
    }
    drop(for_all);
    deliver(worker, Source::File { file: file?, slice: request.slice_for(worker, me)? }, request)
}

/// Looks for this worker's part in the cache of its node. Returns its bytes; nothing if they have
/// to be sent, for whatever reason.
fn find(worker: &WorkerContext, request: &FindRequest) -> Option<Tensor> {
    // Before the digest: it checks the groups that the request names.
    let slice = request.load.slice_for(worker, worker.worker_id()).ok()?;
    let digest = request.digest_for(worker)?;
    let bytes =
        Destination::of(worker.device()).allocate(worker, DataType::U8, &[i64::try_from(slice.size_bytes).ok()?]);
    // Without memory for it the load fails, which tells the reason.
    bytes.ok().filter(|bytes| node_cache::fill(worker.context(), digest, bytes))
}

/// Makes this worker's part from the bytes that the controller has sent, or that were in the cache
/// of the node.
fn take(worker: &WorkerContext, bytes: &Tensor, request: &LoadRequest) -> Result<LocalValue> {
    if request.is_cached(worker.worker_id()) {
        // A transfer of NCCL may still be in progress.
        worker.complete()?;
        node_cache::keep(worker.context(), bytes);
    }
    let slice = request.slice_for(worker, worker.worker_id())?;
    deliver(worker, Source::Memory(bytes.view(0, slice.shape, None, request.dtype)?), request)
}

/// Loads the part to its destination, or calls the function of the request with a reader for it.
fn deliver(worker: &WorkerContext, source: Source, request: &LoadRequest) -> Result<LocalValue> {
    let size = match &source {
        Source::File { slice, .. } => slice.size_bytes,
        Source::Memory(part) => part.size_bytes(),
    };
    let destination = Destination::on(worker, request.device.as_ref())?;
    // A transfer of NCCL may still be in progress. If it fails, a part that stays where it is gets
    // poisoned later; a part that is copied, or passed to a function, has to be complete now.
    if let Source::Memory(part) = &source
        && (destination != Destination::of(part.device()) || matches!(request.part, Part::With { .. }))
    {
        worker.complete()?;
    }
    let reader = Arc::new(WeightReader {
        name: request.name.clone(),
        dtype: request.dtype,
        shape: request.shape.clone(),
        destination,
        source,
        meter: Meter::new(worker, request.loader, size),
    });
    let made = match &request.part {
        Part::Whole | Part::Shard { .. } => Value::Object(Object::Tensor(reader.part()?)),
        Part::With { function } => call(worker.context(), function, Arc::clone(&reader))
            .map_err(|error| error.context(format_args!("function '{function}'")))?,
    };
    reader.meter.finish();
    Ok(made)
}

fn call(context: &Context, function: &str, reader: Arc<WeightReader>) -> Result<LocalValue> {
    let function = context.function(function)?;
    let args = vec![Value::Object(Object::Opaque(Opaque::new(reader)))];
    match function.kind() {
        FunctionKind::Async => blocking::block_on(context.call_async(&function, args))?,
        FunctionKind::Blocking | FunctionKind::Inline => context.call(&function, args),
    }
}

/// Opens the file of the tensor on this worker.
fn open(files: &OpenFiles, request: &LoadRequest) -> Result<InFile> {
    let file = files.files.get(request.file as usize);
    let file = file.ok_or_else(|| RpcError::internal("a load from a file that there is not"))?;
    let file = file.as_ref().map_err(RpcError::clone)?;
    let end = dense_size(&request.shape, request.dtype)?.checked_add(request.start);
    if end.is_none_or(|end| end > file.len) {
        return Err(RpcError::internal("a load from behind the end of the file"));
    }
    Ok(InFile { file: file.open()?, path: file.path.clone(), start: request.start })
}

/// Sends another worker its part, or the error because of which there is none. The receiver learns
/// of an error, too, and reports it.
fn send(worker: &WorkerContext, to: WorkerId, part: Result<Tensor>) -> Result<()> {
    let bytes = part.and_then(|part| as_bytes(&part));
    let tensors = bytes.as_ref().map(|bytes| (Some(bytes), None)).map_err(RpcError::clone);
    worker.run(Scope::World, Operation::Send { to: Rank(to.0) }, tensors).map_err(|error| {
        let error = RpcError::from(error);
        tracing::debug!(%to, %error, "a part of a tensor was not sent");
        error
    })
}

/// Sends another worker the digest of its part, and the part if the node there does not have it.
/// Both go on only as far as both know that the transfer before has succeeded.
///
/// # Errors
///
/// A transfer has failed.
fn send_unless_cached(
    worker: &WorkerContext,
    to: WorkerId,
    part: Result<Tensor>,
    digest: Result<Digest>,
) -> Result<()> {
    send(worker, to, digest.and_then(|digest| small_tensor(worker, digest.as_bytes())))?;
    match receive_small::<1>(worker, to)? {
        [CACHED] => Ok(()),
        _ => send(worker, to, part),
    }
}

/// Answer of a worker whose node has the part.
const CACHED: u8 = 1;

/// Receives this worker's part from the worker that reads it, or takes it from the cache of the
/// node, if it is there.
fn receive(worker: &WorkerContext, from: WorkerId, request: &LoadRequest) -> Result<Source> {
    let me = worker.worker_id();
    let room = request.slice_for(worker, me).and_then(|slice| {
        let part = Destination::of(worker.device()).allocate(worker, request.dtype, &slice.shape)?;
        Ok((as_bytes(&part)?, part))
    });
    if request.is_cached(me) {
        let digest = Digest::from_bytes(receive_small(worker, from)?);
        let is_cached = room.as_ref().is_ok_and(|(bytes, _)| node_cache::fill(worker.context(), &digest, bytes));
        let answered = send(worker, from, small_tensor(worker, &[u8::from(is_cached) * CACHED]));
        if is_cached {
            return Ok(Source::Memory(room?.1));
        }
        // Without an answer nothing more is sent.
        answered?;
    }
    let tensors = room.as_ref().map(|(bytes, _)| (None, Some(bytes))).map_err(RpcError::clone);
    worker.run(Scope::World, Operation::Recv { from: Rank(from.0) }, tensors)?;
    let (bytes, part) = room?;
    if request.is_cached(me) {
        worker.complete()?;
        node_cache::keep(worker.context(), &bytes);
    }
    Ok(Source::Memory(part))
}

/// Returns the digest of a part, once all of it is there.
fn digest_of(worker: &WorkerContext, part: &Tensor) -> Result<Digest> {
    worker.complete()?;
    node_cache::digest_of(worker.context(), part)
}

/// Returns a tensor of these bytes where collectives send from.
fn small_tensor(worker: &WorkerContext, bytes: &[u8]) -> Result<Tensor> {
    let shape = [bytes.len() as i64];
    filled(worker, &Destination::of(worker.device()), DataType::U8, &shape, &|at, out| {
        out.copy_from_slice(&bytes[at as usize..][..out.len()]);
        Ok(())
    })
}

/// Receives `N` bytes from another worker.
fn receive_small<const N: usize>(worker: &WorkerContext, from: WorkerId) -> Result<[u8; N]> {
    let bytes = Destination::of(worker.device()).allocate(worker, DataType::U8, &[N as i64]);
    let tensors = bytes.as_ref().map(|bytes| (None, Some(bytes))).map_err(RpcError::clone);
    worker.run(Scope::World, Operation::Recv { from: Rank(from.0) }, tensors)?;
    worker.complete()?;
    let (bytes, mut out) = (bytes?, [0; N]);
    bytes.read()?.guard().copy_out(bytes.byte_offset(), &mut out)?;
    Ok(out)
}

/// Returns a view of the tensor as bytes, for any element type.
fn as_bytes(tensor: &Tensor) -> Result<Tensor> {
    let len =
        i64::try_from(tensor.size_bytes()).map_err(|_| RpcError::invalid_argument("a tensor that is too large"))?;
    tensor.view(0, [len], None, DataType::U8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::held_memory::tests::context;
    use crate::weights::messages::FileIdentity;

    /// Regression: a controller that kept many loaders made a node hold their lists uncharged.
    #[test]
    fn the_files_of_loaders_are_charged_while_the_loaders_live() {
        const LIMIT: u64 = 8 << 20;
        let context = context(LIMIT);
        let identity = FileIdentity { len: 8, header_len: 0, header: [0; 32] };
        let wanted = vec![RequestedFile { path: "/nowhere".to_owned(), identity }; MAX_FILES];
        let mut open = Vec::new();
        let error = loop {
            match OpenFiles::open(&context, wanted.clone()) {
                Ok(files) => open.push(files),
                Err(error) => break error,
            }
            assert!(open.len() < 10, "{} bytes are held", context.usage().memory_bytes);
        };
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(!open.is_empty());
        drop(open);
        assert_eq!(context.usage().memory_bytes, 0);
    }
}
