//! The objects of a session: handles of the server behind handles that are minted here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use rpc_core::limits::{MemoryLease, MemoryQuota};
use rpc_core::{Device, ErrorKind, Handle, HandleTable, RpcError};
use rpc_tvm::wire::Request;

use super::client_function::ClientFunction;
use super::upload::Upload;

/// Maximum number of objects of a session.
const MAX_OBJECTS: usize = 1 << 16;

/// Bytes that an object is charged with: its place in the table, and a name.
const OBJECT: u64 = 512;

/// Maximum number of modules that a session uploads by their digests.
const MAX_MODULES: usize = 1024;

/// Maximum length in bytes of the name of a function that is kept, to measure the function.
const MAX_KEPT_NAME: usize = 128;

/// An object that callers hold.
#[derive(Clone)]
pub(super) enum Held {
    /// A function of the server.
    Function {
        handle: u64,
        /// Name by which the server can find the function, if there is one.
        origin: Option<Arc<Origin>>,
    },
    /// A module of the server.
    Module(u64),
    /// Another object of the server.
    Object(u64),
    /// Memory of the server.
    Memory(Memory),
    /// A stream of the server.
    Stream { device: Device, stream: u64 },
    /// A function that this side has for its callers.
    Ours(ClientFunction),
    /// A file that is being sent.
    Upload(Arc<Mutex<Upload>>),
    /// A file that was received.
    Download(Arc<(Bytes, MemoryLease)>),
}

/// Way to a function by its name.
pub(super) struct Origin {
    /// Module of the function; none for a function of the server.
    pub(super) module: Option<Handle>,
    pub(super) name: Box<str>,
}

impl Origin {
    pub(super) fn new(module: Option<Handle>, name: &str) -> Option<Arc<Self>> {
        (name.len() <= MAX_KEPT_NAME).then(|| Arc::new(Self { module, name: name.into() }))
    }
}

/// Memory of the server: the part of it that a caller may use.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) data: u64,
    pub(super) device: Device,
    /// Offset of the part in bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Handle by which it is freed, if a function has returned it as a tensor.
    pub(super) tensor: Option<u64>,
}

impl Held {
    /// Returns the request that frees the object at the server, if it is there.
    pub(super) fn freeing(&self) -> Option<Request> {
        match *self {
            Self::Function { handle: 0, .. } | Self::Module(0) | Self::Object(0) => None,
            Self::Function { handle, .. } | Self::Module(handle) | Self::Object(handle) => {
                Some(Request::Free { handle })
            }
            Self::Memory(Memory { tensor: Some(handle), .. }) => (handle != 0).then_some(Request::Free { handle }),
            Self::Memory(Memory { data: 0, .. }) | Self::Stream { stream: 0, .. } => None,
            Self::Memory(Memory { data, device, .. }) => Some(Request::FreeData { device, data }),
            Self::Stream { device, stream } => Some(Request::FreeStream { device, stream }),
            Self::Ours(_) | Self::Upload(_) | Self::Download(_) => None,
        }
    }
}

struct Entry {
    held: Held,
    #[allow(dead_code, reason = "held for its drop")]
    lease: MemoryLease,
    /// True once the object is queued to be freed.
    is_released: AtomicBool,
}

/// The objects of a session.
pub(super) struct Objects {
    table: HandleTable<Entry>,
    memory: Arc<MemoryQuota>,
    /// Streams that are the current ones of their devices. Other devices have their default stream.
    current_streams: HashMap<Device, u64>,
    /// Paths of modules that were uploaded, by their digests.
    pub(super) modules: HashMap<String, String>,
    /// Handles of the server's own functions, by their names; none of those that it lacks.
    pub(super) functions: HashMap<&'static str, Option<u64>>,
}

impl Objects {
    pub(super) fn new(memory: Arc<MemoryQuota>) -> Result<Self, RpcError> {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(|error| RpcError::internal(format!("no random numbers: {error}")))?;
        let table = HandleTable::new(u64::from_le_bytes(seed), MAX_OBJECTS);
        Ok(Self { table, memory, current_streams: HashMap::new(), modules: HashMap::new(), functions: HashMap::new() })
    }

    /// Stores an object.
    ///
    /// # Errors
    ///
    /// The session has too many, or all sessions have. The object then is to be freed at the
    /// server.
    pub(super) fn insert(&mut self, held: Held) -> Result<Handle, RpcError> {
        let lease = self.memory.reserve(OBJECT)?;
        self.table.insert(Entry { held, lease, is_released: AtomicBool::new(false) })
    }

    pub(super) fn get(&self, handle: Handle) -> Result<&Held, RpcError> {
        self.table.get(handle).map(|entry| &entry.held)
    }

    /// Removes an object. Returns it, and the device of which it was the current stream, if it was.
    pub(super) fn remove(&mut self, handle: Handle) -> Result<(Held, Option<Device>), RpcError> {
        let held = self.table.remove(handle)?.held;
        if let Held::Stream { device, stream } = held
            && self.current_streams.get(&device) == Some(&stream)
        {
            self.current_streams.remove(&device);
            return Ok((held, Some(device)));
        }
        Ok((held, None))
    }

    /// Makes a stream the current one of its device; 0 is the default stream.
    pub(super) fn set_current_stream(&mut self, device: Device, stream: u64) {
        // There are no more entries than streams, which are counted.
        match stream {
            0 => drop(self.current_streams.remove(&device)),
            _ => drop(self.current_streams.insert(device, stream)),
        }
    }

    /// Returns those of the handles that name objects and are not queued to be freed yet.
    pub(super) fn mark_released(&self, mut handles: Vec<Handle>) -> Vec<Handle> {
        handles.retain(|handle| match self.table.get(*handle) {
            Ok(entry) => !entry.is_released.swap(true, Ordering::Relaxed),
            Err(_) => false,
        });
        handles
    }

    pub(super) fn current_stream(&self, device: Device) -> u64 {
        self.current_streams.get(&device).copied().unwrap_or(0)
    }

    /// Returns a stream of `device`.
    pub(super) fn stream(&self, device: Device, handle: Handle) -> Result<u64, RpcError> {
        match self.get(handle)? {
            Held::Stream { device: of, stream } if *of == device => Ok(*stream),
            Held::Stream { device: of, .. } => {
                Err(RpcError::invalid_argument(format!("the stream is one of {of}, and not of {device}")))
            }
            _ => Err(other_kind(handle, "stream")),
        }
    }

    /// Returns the number of the server at a module.
    pub(super) fn module(&self, handle: Handle) -> Result<u64, RpcError> {
        match self.get(handle)? {
            Held::Module(module) => Ok(*module),
            _ => Err(other_kind(handle, "module")),
        }
    }

    /// Records a module that was uploaded.
    pub(super) fn add_module(&mut self, digest: String, path: String) -> Result<(), RpcError> {
        if self.modules.len() >= MAX_MODULES {
            return Err(RpcError::limit("modules of a session", MAX_MODULES as u64, MAX_MODULES as u64 + 1));
        }
        self.modules.insert(digest, path);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn drain(&mut self) -> Vec<Held> {
        self.table.drain().into_iter().map(|entry| entry.held).collect()
    }
}

/// Error for a handle of an object of another kind.
pub(super) fn other_kind(handle: Handle, expected: &str) -> RpcError {
    RpcError::new(ErrorKind::InvalidHandle, format!("handle {handle} names no {expected}"))
}
