//! The cache of a worker's node: a part of a tensor that the node has had before is taken from
//! there, and its bytes are not sent again.
//!
//! The cache is that of the node's server, which registers the functions `rpc.file.*` for it. It
//! keeps contents by the SHA-256 that it has computed itself, apart for each identity of its
//! clients, and verifies a content while it copies it.

use ring::digest::{Context as Hasher, SHA256};
use rpc_core::client::Digest;
use rpc_core::function::{FunctionKind, Object};
use rpc_core::{Context, ErrorKind, LocalValue, Result, RpcError, Tensor, Value};

/// Functions of a node with a cache: the bytes that it may hold, and copies of a tensor from and to
/// it.
const LIMIT: &str = "rpc.file.cache_limit";
const FILL: &str = "rpc.file.tensor_from_cache";
const KEEP: &str = "rpc.file.tensor_to_cache";

/// Bytes that are hashed at a time where they have to be copied to host memory.
const PIECE: u64 = 1 << 20;

/// Returns the bytes that the cache of the node may hold; 0 if it has none, or none for this
/// session.
pub(super) fn limit(context: &Context) -> u64 {
    match call(context, LIMIT, Vec::new()) {
        Ok(Value::Int(limit)) if has(context, FILL) && has(context, KEEP) => u64::try_from(limit).unwrap_or(0),
        _ => 0,
    }
}

/// Fills a densely packed tensor with the content that has this digest. Returns false if the cache
/// does not have it, or cannot be used; the content of the tensor is unspecified then.
pub(super) fn fill(context: &Context, digest: &Digest, tensor: &Tensor) -> bool {
    let args = vec![Value::from(digest.to_string()), Value::Object(Object::Tensor(tensor.clone()))];
    match call(context, FILL, args) {
        Ok(found) => matches!(found, Value::Bool(true)),
        Err(error) => {
            tracing::debug!(%error, "a part of a tensor is not taken from the node's cache");
            false
        }
    }
}

/// Copies the content of a densely packed tensor to the cache. Without the cache it is sent again
/// the next time.
pub(super) fn keep(context: &Context, tensor: &Tensor) {
    if let Err(error) = call(context, KEEP, vec![Value::Object(Object::Tensor(tensor.clone()))]) {
        tracing::debug!(%error, "a part of a tensor is not kept in the node's cache");
    }
}

/// Returns the SHA-256 of the content of a densely packed tensor, on any device.
pub(super) fn digest_of(context: &Context, tensor: &Tensor) -> Result<Digest> {
    let range = tensor.byte_range(0, tensor.size_bytes())?;
    let mut hasher = Hasher::new(&SHA256);
    let view = tensor.read()?;
    if let Ok(bytes) = view.bytes() {
        hasher.update(bytes);
        return Ok(finish(hasher));
    }
    let _staged = context.stage(PIECE.min(tensor.size_bytes()))?;
    // At most one piece, which fits memory.
    let mut piece = vec![0; PIECE.min(tensor.size_bytes()) as usize];
    for at in range.clone().step_by(PIECE as usize) {
        let piece = &mut piece[..(range.end - at).min(PIECE) as usize];
        view.guard().copy_out(at, piece)?;
        hasher.update(piece);
    }
    Ok(finish(hasher))
}

/// Returns the digest of all that was hashed.
pub(super) fn finish(hasher: Hasher) -> Digest {
    let mut digest = [0; Digest::LEN];
    digest.copy_from_slice(hasher.finish().as_ref());
    Digest::from_bytes(digest)
}

fn has(context: &Context, name: &str) -> bool {
    context.function(name).is_ok_and(|function| function.kind() != FunctionKind::Async)
}

fn call(context: &Context, name: &str, args: Vec<LocalValue>) -> Result<LocalValue> {
    let function = context.function(name)?;
    if function.kind() == FunctionKind::Async {
        return Err(RpcError::new(ErrorKind::Unsupported, format!("{name} is asynchronous")));
    }
    context.call(&function, args)
}
