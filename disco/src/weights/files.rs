//! Files of a model: finding them by a path, checking their identity, and reading tensors from
//! them.
//!
//! Files are read and not mapped into memory, so that a file that is truncated meanwhile is an
//! error, and does not end the process (`SIGBUS`).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rpc_core::{ErrorKind, Result, RpcError};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::format::{FormatError, Header, MAX_HEADER, PREFIX, header_len};
use super::messages::FileIdentity;
use super::tensor_slice::ReadAt;

/// Names of the index of a model in several files, and of the file of a model in one.
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The files of a model.
#[derive(Debug)]
pub(super) struct Model {
    /// Folder of the files.
    pub(super) folder: PathBuf,
    /// Names of the files in the folder.
    pub(super) files: Vec<String>,
    /// Number of the file that contains each tensor, by the index; `None` for a single file, whose
    /// header lists its tensors.
    pub(super) index: Option<BTreeMap<String, usize>>,
}

impl Model {
    /// Finds the files for `path`, which is a file, an index of files, or a folder with one of
    /// these.
    ///
    /// # Errors
    ///
    /// Nothing is at the path, or no such file; an index cannot be read, or names files outside of
    /// its folder.
    pub(super) fn find(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).map_err(|error| failed(path, &error))?;
        let is_folder = path.metadata().map_err(|error| failed(&path, &error))?.is_dir();
        let path = if is_folder { in_folder(&path)? } else { path };
        let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
            return Err(invalid(&path, "its name is not one in UTF-8"));
        };
        let folder = folder.to_owned();
        if path.extension().is_none_or(|extension| extension != "json") {
            return Ok(Self { folder, files: vec![name.to_owned()], index: None });
        }
        let (files, index) = read_index(&path)?;
        Ok(Self { folder, files, index: Some(index) })
    }
}

/// Finds the file or index of the model in a folder.
fn in_folder(folder: &Path) -> Result<PathBuf> {
    for name in [INDEX, SINGLE] {
        let path = folder.join(name);
        if path.exists() {
            return Ok(path);
        }
    }
    Err(RpcError::not_found(format!(
        "{}: there is neither {INDEX} nor {SINGLE} in the folder; name the file itself",
        folder.display()
    )))
}

/// Map of the index from tensors to file names. A tensor that is listed twice is an error.
struct Names(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(BTreeMap::new()))
    }
}

impl<'de> Visitor<'de> for Names {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((tensor, file)) = map.next_entry()? {
            match self.0.entry(tensor) {
                Entry::Vacant(place) => _ = place.insert(file),
                Entry::Occupied(place) => {
                    return Err(de::Error::custom(format_args!("tensor '{}' is there twice", place.key())));
                }
            }
        }
        Ok(self)
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Names,
}

/// Reads an index: the names of files, and the number of the file of each tensor.
fn read_index(path: &Path) -> Result<(Vec<String>, BTreeMap<String, usize>)> {
    let file = open(path)?;
    let mut json = Vec::new();
    file.take(MAX_HEADER + 1).read_to_end(&mut json).map_err(|error| failed(path, &error))?;
    if json.len() as u64 > MAX_HEADER {
        return Err(invalid(path, format_args!("an index has {MAX_HEADER} bytes at most")));
    }
    let index: Index = serde_json::from_slice(&json).map_err(|error| invalid(path, error))?;
    let mut numbers = BTreeMap::new();
    for name in index.weight_map.0.values() {
        // Only the name is checked, because the files of a cache are often links to other folders.
        let stays = !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if !stays {
            return Err(invalid(path, format_args!("it names the file '{name}', which is not below its own folder")));
        }
        numbers.insert(name.clone(), 0);
    }
    numbers.values_mut().enumerate().for_each(|(at, number)| *number = at);
    let tensors = index.weight_map.0.into_iter().map(|(tensor, file)| (tensor, numbers[&file]));
    let tensors = tensors.collect();
    Ok((numbers.into_keys().collect(), tensors))
}

/// A file whose header has been read. It is not kept open, because there may be many files, and
/// many workers in a process.
#[derive(Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) identity: FileIdentity,
    pub(super) header: Header,
    stamp: Stamp,
}

/// Device, inode, length, and time of the last write (seconds and nanoseconds) of a file, by which
/// a change is noticed.
type Stamp = (u64, u64, u64, (i64, i64));

impl WeightFile {
    /// Reads the header of a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is no safetensors file. The error names the file and the reason.
    pub(super) fn read(path: PathBuf) -> Result<Self> {
        let file = open(&path)?;
        let io = |error: io::Error| failed(&path, &error);
        let format = |error: FormatError| invalid(&path, error);
        let stamp = stamp(&file.metadata().map_err(io)?);
        let len = stamp.2;
        let mut prefix = [0; PREFIX as usize];
        if len >= PREFIX {
            file.read_exact_at(&mut prefix, 0).map_err(io)?;
        }
        // `header_len` returns no more than the file has.
        let mut json = vec![0; header_len(prefix, len).map_err(format)? as usize];
        file.read_exact_at(&mut json, PREFIX).map_err(io)?;
        let header = Header::parse(&json, len).map_err(format)?;
        let mut digest = ring::digest::Context::new(&ring::digest::SHA256);
        digest.update(&prefix);
        digest.update(&json);
        let identity = FileIdentity { len, header_len: json.len() as u64, header: hash(digest) };
        Ok(Self { path, identity, header, stamp })
    }

    /// Opens the file again, to read a tensor.
    ///
    /// # Errors
    ///
    /// It is gone, or not as it was.
    pub(super) fn open(&self) -> Result<File> {
        reopen(&self.path, self.stamp)
    }
}

/// A worker's file with the same identity as the controller's. The worker only compares the
/// identity, since the controller knows the header, and so reveals nothing of a file that differs.
#[derive(Debug)]
pub(super) struct MatchingFile {
    pub(super) path: PathBuf,
    /// Length of the file in bytes.
    pub(super) len: u64,
    stamp: Stamp,
}

impl MatchingFile {
    /// Opens the file at `path`, if it has the `wanted` identity.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or has another identity.
    pub(super) fn find(path: PathBuf, wanted: &FileIdentity) -> Result<Self> {
        let file = open(&path)?;
        let io = |error: io::Error| failed(&path, &error);
        let stamp = stamp(&file.metadata().map_err(io)?);
        // The text is the same for every difference, so that it reveals nothing of the file.
        let another = || invalid(&path, "another file than the controller's: its length or its header is different");
        let end = wanted.header_len.checked_add(PREFIX).filter(|end| *end <= wanted.len);
        let (Some(end), true) = (end, wanted.len == stamp.2 && wanted.header_len <= MAX_HEADER) else {
            return Err(another());
        };
        let mut digest = ring::digest::Context::new(&ring::digest::SHA256);
        let mut piece = vec![0; HASHED.min(end) as usize];
        let mut at = 0;
        while at < end {
            let piece = &mut piece[..HASHED.min(end - at) as usize];
            file.read_exact_at(piece, at).map_err(io)?;
            digest.update(piece);
            at += piece.len() as u64;
        }
        if hash(digest) == wanted.header { Ok(Self { len: wanted.len, stamp, path }) } else { Err(another()) }
    }

    /// Opens the file again, to read a tensor.
    ///
    /// # Errors
    ///
    /// It is gone, or not as it was.
    pub(super) fn open(&self) -> Result<File> {
        reopen(&self.path, self.stamp)
    }
}

/// Bytes of a header that are read at a time for hashing.
const HASHED: u64 = 64 << 10;

fn hash(digest: ring::digest::Context) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest.finish().as_ref());
    hash
}

fn reopen(path: &Path, then: Stamp) -> Result<File> {
    let file = open(path)?;
    let now = file.metadata().map_err(|error| failed(path, &error))?;
    if stamp(&now) == then {
        return Ok(file);
    }
    Err(invalid(path, "it has changed since its header was read; open it anew with another loader"))
}

/// An open file, and the position of a tensor in it.
#[derive(Debug)]
pub(super) struct InFile {
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// Start in the file, in bytes.
    pub(super) start: u64,
}

impl ReadAt for InFile {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, self.start + at).map_err(|error| failed(&self.path, &error))
    }
}

/// Opens a regular file. Refuses folders, pipes and devices.
fn open(path: &Path) -> Result<File> {
    let io = |error: io::Error| failed(path, &error);
    // Without `O_NONBLOCK`, opening a pipe would wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io)?;
    if file.metadata().map_err(io)?.is_file() {
        return Ok(file);
    }
    Err(invalid(path, "it is a folder, a pipe or a device, and no regular file"))
}

fn stamp(metadata: &Metadata) -> Stamp {
    (metadata.dev(), metadata.ino(), metadata.len(), (metadata.mtime(), metadata.mtime_nsec()))
}

fn failed(path: &Path, error: &io::Error) -> RpcError {
    let kind = if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it is shorter than its header says; it was cut off".to_owned(),
        _ => error.to_string(),
    };
    RpcError::new(kind, format!("{}: {why}", path.display()))
}

fn invalid(path: &Path, why: impl fmt::Display) -> RpcError {
    RpcError::invalid_argument(format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests;
