//! Two devices for tests whose memory the processor cannot reach, like that of a GPU. Each has a
//! second memory.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rpc_core::device::{AllocRequest, CpuDevice, Memory, Stream};
use rpc_core::{Device, DeviceApi, DeviceAttribute, DeviceType, ErrorKind, Result, RpcError, Target, Value};

/// Scope of the second memory of each device.
pub const FAST_MEMORY: &str = "fast";

/// Scope of memory that the processor reaches, too, like pinned memory.
pub const SHARED_MEMORY: &str = "shared";

/// Devices `ext_dev:0` and `ext_dev:1`.
#[derive(Clone, Default)]
pub struct Accelerator {
    before_copy: Option<BeforeCopy>,
}

type BeforeCopy = Arc<dyn Fn(u64, usize) -> Result<()> + Send + Sync>;

const COUNT: i32 = 2;

impl Accelerator {
    /// Creates devices that call `before_copy` before each copy from the host, with the copy's
    /// offset in its piece of memory and its length. An error of `before_copy` fails the copy.
    pub fn watched(before_copy: impl Fn(u64, usize) -> Result<()> + Send + Sync + 'static) -> Self {
        Self { before_copy: Some(Arc::new(before_copy)) }
    }

    /// Target that code for the devices is compiled for.
    ///
    /// # Panics
    ///
    /// Never.
    pub fn target() -> Target {
        Target::new("ext_dev").and_then(|target| target.with("rev", "2")).expect("it is a target")
    }

    fn check(index: i32) -> Result<()> {
        if (0..COUNT).contains(&index) {
            return Ok(());
        }
        Err(RpcError::new(ErrorKind::DeviceUnavailable, format!("no ext_dev:{index}: there are {COUNT}")))
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator").finish_non_exhaustive()
    }
}

impl DeviceApi for Accelerator {
    fn kind(&self) -> DeviceType {
        DeviceType::EXT_DEV
    }

    fn count(&self) -> Result<i32> {
        Ok(COUNT)
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        if attribute == DeviceAttribute::Exists {
            return Ok(Value::Bool(Self::check(index).is_ok()));
        }
        Self::check(index)?;
        Ok(match attribute {
            DeviceAttribute::Target => Self::target().to_string().into(),
            DeviceAttribute::MemoryScopes => Value::List(vec![FAST_MEMORY.into()]),
            _ => Value::Null,
        })
    }

    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Self::check(index)?;
        match request.scope {
            None | Some("global" | FAST_MEMORY) => {
                let size = usize::try_from(request.size).ok().filter(|size| *size <= isize::MAX as usize);
                let size = size.ok_or_else(|| RpcError::new(ErrorKind::OutOfMemory, "more than there can be"))?;
                let before_copy = self.before_copy.clone();
                Ok(Box::new(Remote { bytes: Mutex::new(vec![0; size]), len: size as u64, before_copy }))
            }
            Some(SHARED_MEMORY) => CpuDevice::default().allocate(0, &AllocRequest { scope: None, ..*request }),
            Some(scope) => Err(RpcError::unsupported(format!("ext_dev has no memory scope '{scope}'"))),
        }
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        static NEXT: AtomicUsize = AtomicUsize::new(1 << 20);

        Self::check(index)?;
        Ok(Arc::new(InOrder { index, handle: NEXT.fetch_add(1, Ordering::Relaxed) }))
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Self::check(index)?;
        Ok(Arc::new(InOrder { index, handle: DEFAULT_STREAMS[index as usize] }))
    }
}

/// Streams whose work is done as soon as it has been submitted.
struct InOrder {
    index: i32,
    handle: usize,
}

/// Pairs of streams, by their native handles: the first one has been made to wait for the second.
static WAITS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Takes the waits in which this stream had a part, in order: the stream that waited, and the one
/// that it waited for.
pub fn take_waits(handle: usize) -> Vec<(usize, usize)> {
    let mut all = WAITS.lock();
    let (taken, left) = all.drain(..).partition(|(one, other)| [*one, *other].contains(&handle));
    *all = left;
    taken
}

/// Native handles of the default streams.
pub const DEFAULT_STREAMS: [usize; COUNT as usize] = [0x100, 0x200];

impl Stream for InOrder {
    fn device(&self) -> Device {
        Device::new(DeviceType::EXT_DEV, self.index)
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn wait_for(&self, other: &dyn Stream) -> Result<()> {
        if let Some(other) = other.as_any().downcast_ref::<Self>() {
            WAITS.lock().push((self.handle, other.handle));
        }
        other.synchronize()
    }

    fn library_handle(&self) -> Result<Option<NonNull<c_void>>> {
        Ok(NonNull::new(std::ptr::without_provenance_mut(self.handle)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Remote {
    bytes: Mutex<Vec<u8>>,
    len: u64,
    before_copy: Option<BeforeCopy>,
}

// SAFETY: there is no host pointer, and the length never changes.
#[allow(unsafe_code)]
unsafe impl Memory for Remote {
    fn len(&self) -> u64 {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
        if let Some(before_copy) = &self.before_copy {
            before_copy(offset, data.len())?;
        }
        let mut bytes = self.bytes.lock();
        bytes[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = self.bytes.lock();
        out.copy_from_slice(&bytes[offset as usize..][..out.len()]);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
