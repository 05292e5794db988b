//! Files and modules: uploads and downloads in pieces, which TVM's protocol sends as a whole.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rpc_core::client::{Digest, FileEntry};
use rpc_core::reply::Outcome;
use rpc_core::{Handle, Packed, RpcError, Value};
use rpc_tvm::wire::{CallResult, Expected, Request, ServerReply, Text, WireValue};

use super::arguments::Args;
use super::link::Frame;
use super::objects::{Held, other_kind};
use super::server_calls::{call, optional_function, server_function, unexpected, with_kind};
use super::state::ClientCore;
use super::upload::{Target, Upload};
use super::values::{ObjectKind, Received, checked_name};

/// `rpc.file.begin_write(path, length or none)`.
pub(super) fn begin_write(core: &ClientCore, args: &mut Args) -> Outcome {
    let (path, len) = (checked_path(args.text()?)?, args.optional_number()?);
    begin(core, Target::File(path), len)
}

/// `rpc.module.begin_upload(digest, length)`.
pub(super) fn begin_module(core: &ClientCore, args: &mut Args) -> Outcome {
    let (digest, len) = (checked_digest(&args.text()?)?, args.number()?);
    begin(core, Target::Module(digest), Some(len))
}

fn begin(core: &ClientCore, target: Target, len: Option<u64>) -> Outcome {
    if let Some(len) = len {
        check_len(core, len)?;
    }
    let lease = core.memory.reserve(0)?;
    let upload = Upload { target, len, pieces: Vec::new(), lease, received: 0, is_committed: false };
    core.keep(Received::Object(Held::Upload(Arc::new(Mutex::new(upload))), ObjectKind::Object))
}

/// `rpc.file.write(file, offset, data)`, and the same for modules.
pub(super) fn write(core: &ClientCore, args: &mut Args) -> Outcome {
    let (handle, offset, data) = (args.object()?, args.number()?, args.bytes()?);
    let upload = upload(core, handle)?;
    let mut upload = upload.lock();
    upload.check_open()?;
    if offset != upload.received {
        let (expected, text) = (upload.received, "a file for a server of TVM is written from its beginning to its end");
        return Err(RpcError::invalid_argument(format!("{text}: offset {offset} follows {expected} bytes")));
    }
    check_len(core, upload.received + data.len() as u64)?;
    upload.add(&data)?;
    Ok(Value::Null)
}

/// `rpc.file.commit(file)`, and the same for modules.
pub(super) async fn commit(core: &ClientCore, args: &mut Args) -> Outcome {
    let upload = upload(core, args.object()?)?;
    let function = server_function(core, "tvm.rpc.server.upload").await?;
    let (path, digest, pieces, lease) = {
        let mut upload = upload.lock();
        upload.check_open()?;
        let len = upload.received;
        if let Some(announced) = upload.len.filter(|announced| *announced != len) {
            let text = format!("{announced} bytes were announced, and {len} were sent");
            return Err(RpcError::invalid_argument(text));
        }
        let lease = std::mem::replace(&mut upload.lease, core.memory.reserve(0)?);
        let pieces = std::mem::take(&mut upload.pieces);
        // A second attempt would have no pieces to send.
        upload.is_committed = true;
        match &upload.target {
            Target::File(path) => (path.clone(), None, pieces, lease),
            Target::Module(digest) => {
                let path = format!("{digest}{}", suffix(pieces.first().map_or(&[][..], |piece| piece)));
                (Text::from(path), Some(digest.clone()), pieces, lease)
            }
        }
    };
    // As the pieces say: a header that announces more or less would break the connection.
    let len = pieces.iter().map(|piece| piece.len() as u64).sum();
    let head = Request::encode_call_of_bytes(function, vec![WireValue::Str(path.clone())], len);
    let parts = std::iter::once(head.into()).chain(pieces).collect();
    let frame = Frame { parts, expected: Expected::Call, waits_for_device: false, lease: Some(lease) };
    match core.link.ask(frame).await? {
        ServerReply::Call(_) => {}
        _ => return Err(unexpected("the result of an upload")),
    }
    if let Some(digest) = digest {
        core.objects.lock().add_module(digest, path.as_str().to_owned())?;
    }
    Ok(Value::Null)
}

/// `rpc.file.open(path)`: the file, which is received as a whole, and its length.
pub(super) async fn open(core: &ClientCore, args: &mut Args) -> Outcome {
    let path = checked_path(args.text()?)?;
    let function = server_function(core, "tvm.rpc.server.download").await?;
    let CallResult::Bytes(data) = call(core, function, vec![WireValue::Str(path)]).await? else {
        return Err(unexpected("the bytes of a file"));
    };
    let len = data.len() as u64;
    let lease = core.memory.reserve(len)?;
    let file = core.keep(Received::Object(Held::Download(Arc::new((data, lease))), ObjectKind::Object))?;
    Ok(Value::List(vec![file, Value::Int(len.cast_signed())]))
}

/// `rpc.file.read(file, offset, length)`.
pub(super) fn read(core: &ClientCore, args: &mut Args) -> Outcome {
    let (handle, offset, len) = (args.object()?, args.number()?, args.number()?);
    let file = match core.objects.lock().get(handle)? {
        Held::Download(file) => file.clone(),
        _ => return Err(other_kind(handle, "file")),
    };
    let end = offset.saturating_add(len).min(file.0.len() as u64);
    let start = offset.min(end);
    // A copy, so that a reply does not keep the whole file.
    Ok(Value::Bytes(Bytes::copy_from_slice(&file.0[start as usize..end as usize])))
}

/// `rpc.file.ls(folder)`. TVM's protocol tells names alone.
pub(super) async fn list(core: &ClientCore, args: &mut Args) -> Outcome {
    let folder = match args.text()? {
        folder if folder.is_empty() => Text::from("."),
        folder => checked_path(folder)?,
    };
    let function = server_function(core, "tvm.rpc.server.listdir").await?;
    let CallResult::Str(names) = call(core, function, vec![WireValue::Str(folder.clone())]).await? else {
        return Err(unexpected("the names of files"));
    };
    let _lease = core.memory.reserve(charge_of_list(&folder, &names))?;
    let inside = Some(folder.as_str()).filter(|folder| *folder != ".");
    let entries = names.as_str().split(',').filter_map(|name| {
        // Some servers tell whole paths.
        let name = name.rsplit('/').next().filter(|name| !name.is_empty())?;
        let name = inside.map_or_else(|| name.to_owned(), |folder| format!("{folder}/{name}"));
        Some(FileEntry { name, size: 0, modified: std::time::SystemTime::UNIX_EPOCH, executable: false })
    });
    Packed::encode(&entries.collect::<Vec<_>>()).map(Value::Packed)
}

/// Returns the bytes that a list of the names in a folder takes: each entry is a path, and is there
/// twice while the list is encoded.
fn charge_of_list(folder: &Text, names: &Text) -> u64 {
    let count = names.as_str().split(',').count() as u64;
    2 * (count * (folder.len() + size_of::<FileEntry>()) as u64 + names.len() as u64)
}

/// `rpc.file.folders()`, of servers of this project. TVM's protocol has no form for structures,
/// which arrive as bytes.
pub(super) async fn list_folders(core: &ClientCore) -> Outcome {
    let Some(function) = optional_function(core, "rpc.file.folders").await? else {
        return Err(RpcError::unsupported("a server of TVM does not list folders"));
    };
    match call(core, function, Vec::new()).await.map_err(with_kind)? {
        CallResult::Bytes(folders) => Ok(Value::Packed(Packed::from_bytes(folders))),
        _ => Err(unexpected("a list of folders")),
    }
}

/// `rpc.file.rm(path)`. A server of TVM says nothing of a file that is not there; one of this
/// project has a function that does.
pub(super) async fn remove(core: &ClientCore, args: &mut Args) -> Outcome {
    let path = checked_path(args.text()?)?;
    if let Some(function) = optional_function(core, "rpc.file.rm").await? {
        return call(core, function, vec![WireValue::Str(path)]).await.map(|_| Value::Null).map_err(with_kind);
    }
    let function = server_function(core, "tvm.rpc.server.remove").await?;
    call(core, function, vec![WireValue::Str(path)]).await.map(|_| Value::Null)
}

/// `rpc.module.find(digest)`: true if this session has uploaded the module.
pub(super) fn find_module(core: &ClientCore, args: &mut Args) -> Outcome {
    let digest = checked_digest(&args.text()?)?;
    Ok(Value::Bool(core.objects.lock().modules.contains_key(&digest)))
}

/// Returns the path of a module at the server.
pub(super) fn module_path(core: &ClientCore, path: String) -> Result<Text, RpcError> {
    let Some(digest) = Digest::from_module_path(&path) else { return checked_path(path) };
    let digest = digest.map_err(|error| RpcError::invalid_argument(error.to_string()))?.to_string();
    let found = core.objects.lock().modules.get(&digest).map(|path| path.as_str().into());
    found.ok_or_else(|| RpcError::not_found(format!("this session has uploaded no module {digest}")))
}

fn upload(core: &ClientCore, handle: Handle) -> Result<Arc<Mutex<Upload>>, RpcError> {
    match core.objects.lock().get(handle)? {
        Held::Upload(upload) => Ok(upload.clone()),
        _ => Err(other_kind(handle, "file that is being written")),
    }
}

fn check_len(core: &ClientCore, len: u64) -> Result<(), RpcError> {
    if len <= core.max_message {
        return Ok(());
    }
    Err(RpcError::limit("max_message (a file for a server of TVM is one message)", core.max_message, len))
}

/// Checks a path of a file. Servers of TVM do not check it themselves.
fn checked_path(path: String) -> Result<Text, RpcError> {
    let leaves = path.starts_with('/') || path.split('/').any(|name| name == "..");
    if path.is_empty() || leaves {
        let text = format!("{path:?} is no path in the folder of the session");
        return Err(RpcError::invalid_argument(text));
    }
    checked_name(path, "a path")
}

fn checked_digest(text: &str) -> Result<String, RpcError> {
    let digest: Result<Digest, _> = text.parse();
    digest.map(|digest| digest.to_string()).map_err(|error| RpcError::invalid_argument(error.to_string()))
}

/// Returns the end of the name by which a server of TVM knows what a module is: a shared library,
/// an object file, or an archive of such files.
fn suffix(content: &[u8]) -> &'static str {
    const RELOCATABLE: u8 = 1;
    match content {
        [0x7f, b'E', b'L', b'F', ..] if content.get(16) == Some(&RELOCATABLE) => ".o",
        _ if content.get(257..262) == Some(b"ustar") => ".tar",
        _ => ".so",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_the_folder_of_the_session() {
        for path in ["x", "lib/x.so", "..x", "x..", "a/.b"] {
            assert!(checked_path(path.to_owned()).is_ok(), "{path}");
        }
        for path in ["", "/etc/x", "..", "../x", "a/../b", "a/..", "x\0y"] {
            assert!(checked_path(path.to_owned()).is_err(), "{path}");
        }
    }

    #[test]
    fn lists_are_charged_with_a_path_for_each_name() {
        let (folder, names) = ("d/".repeat(500).into(), ",".repeat(1000).into());
        assert!(charge_of_list(&folder, &names) > 2 * 1000 * 1000);
    }

    #[test]
    fn modules_are_named_by_what_they_are() {
        let elf = |kind: u8| [b"\x7fELF".as_slice(), &[0; 12], &[kind, 0]].concat();
        assert_eq!((suffix(&elf(1)), suffix(&elf(3)), suffix(b"")), (".o", ".so", ".so"));
        let mut tar = vec![0; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert_eq!(suffix(&tar), ".tar");
    }
}
