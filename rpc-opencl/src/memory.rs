//! Memory of a device, and host memory that it shares.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};

use opencl3::command_queue::{enqueue_fill_buffer, enqueue_map_buffer, enqueue_unmap_mem_object};
use opencl3::memory::{
    CL_BUFFER_CREATE_TYPE_REGION, CL_MAP_READ, CL_MAP_WRITE, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR, create_buffer,
    create_sub_buffer, set_mem_object_destructor_callback,
};
use opencl3::types::{CL_FALSE, CL_TRUE, cl_mem};
use parking_lot::Mutex;

use crate::event::Event;
use crate::handle::BufferHandle;
use crate::memory_pool::PoolBlock;
use crate::opened_device::OpenedDevice;
use crate::other_stream_work::OtherStreamWork;
use crate::stream::OpenClStream;
use crate::transfer;
use rpc_core::device::{AllocRequest, HostAccess, Mapping, Memory};
use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// A piece of an OpenCL device's memory, or of host memory that the device uses, too (scope
/// `host`).
///
/// Device memory belongs to the device's pool, and returns to it when it is dropped, behind all
/// work that was submitted with it by then. Host memory is freed when such work is done.
pub struct OpenClMemory {
    device: &'static OpenedDevice,
    place: Place,
    len: u64,
    mapped: SharedMapping,
    pub(super) other_streams: OtherStreamWork,
}

/// The mapping of device memory for the processor, which all readers share: a driver tells mappings
/// apart by their addresses, and those of one buffer may be the same.
#[derive(Default)]
struct SharedMapping(Mutex<Mapped>);

#[derive(Default)]
struct Mapped {
    /// Number of users. Without one nothing is mapped.
    users: usize,
    /// Address of the first byte.
    start: usize,
}

enum Place {
    /// There are no bytes.
    Nowhere,
    Device(PoolBlock),
    /// Host memory, which the processor has except while a kernel uses it.
    Host(HostBuffer),
}

/// A buffer over host memory. It is mapped, so that the processor may access it, except while it is
/// [lent](OpenClMemory::lend_to_device).
struct HostBuffer {
    device: &'static OpenedDevice,
    buffer: BufferHandle,
    start: NonNull<c_void>,
    len: usize,
    /// True while the processor has the memory. Held while that changes.
    is_mapped: Mutex<bool>,
}

// SAFETY: the memory may be used from any thread; its users keep the promises of `Memory`.
unsafe impl Send for HostBuffer {}
// SAFETY: shared references only give out the address.
unsafe impl Sync for HostBuffer {}

impl OpenClMemory {
    /// Allocates memory that reads as zeros behind the work of the default stream; host memory
    /// reads as zeros at once.
    pub(super) fn allocate(device: &'static OpenedDevice, request: &AllocRequest<'_>) -> Result<Self> {
        let AllocRequest { size: len, alignment, scope } = *request;
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(RpcError::invalid_argument(format!("an alignment of {alignment} is not a power of two")));
        }
        let (is_host, most) = match scope {
            None | Some("" | "global") => (false, device.part_alignment),
            Some(HOST_SCOPE) => (true, MAX_HOST_ALIGNMENT),
            Some(scope) => {
                let device = device.listed.as_device();
                return Err(RpcError::unsupported(format!(
                    "{device} has no memory scope '{scope}'; it has global and {HOST_SCOPE}"
                )));
            }
        };
        if alignment > most {
            return Err(RpcError::invalid_argument(format!("an alignment of {alignment} is above {most}")));
        }
        device.listed.check_not_lost()?;
        let place = match len {
            0 if is_host => Place::Host(HostBuffer::empty(device, alignment)),
            0 => Place::Nowhere,
            _ if is_host => Place::Host(HostBuffer::new(device, len, alignment)?),
            _ => {
                let block = device.pool.take(device, len)?;
                zero(device, &block, len)?;
                Place::Device(block)
            }
        };
        Ok(Self { device, place, len, mapped: SharedMapping::default(), other_streams: OtherStreamWork::default() })
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> Device {
        self.device.listed.as_device()
    }

    /// Returns OpenCL's buffer, a `cl_mem`, for other code of this process; null if there are no
    /// bytes. It may be larger than the memory. It is valid until `self` is dropped.
    ///
    /// The caller must hold a borrow of the storage, and submit its work to the device's default
    /// stream, or wait until it is done before the borrow ends. Host memory is not for kernels of
    /// other code: it is mapped.
    pub fn raw(&self) -> *mut c_void {
        match &self.place {
            Place::Nowhere => ptr::null_mut(),
            Place::Device(block) => block.raw(),
            Place::Host(host) => host.buffer.raw(),
        }
    }

    pub(super) fn opened(&self) -> &'static OpenedDevice {
        self.device
    }

    /// Returns the buffer of device memory; `None` if the processor reaches the memory, or if there
    /// are no bytes.
    pub(super) fn on_device(&self) -> Option<cl_mem> {
        match &self.place {
            Place::Device(block) => Some(block.raw()),
            Place::Nowhere | Place::Host(_) => None,
        }
    }

    /// Lets later work of the default stream begin behind all work on this memory.
    pub(super) fn let_default_stream_follow(&self) -> Result<()> {
        self.other_streams.precede(&self.device.default_stream)
    }

    /// Returns a buffer over `len` bytes from `offset`, which lie within the memory.
    ///
    /// # Errors
    ///
    /// An offset that the device cannot begin a buffer at.
    pub(super) fn part(&self, offset: u64, len: u64) -> Result<BufferHandle> {
        let alignment = self.device.part_alignment;
        if !offset.is_multiple_of(alignment) {
            return Err(RpcError::invalid_argument(format!(
                "the tensor begins {offset} bytes into its memory, and a kernel on {} can be given parts from \
                 multiples of {alignment} bytes only: pass the whole tensor and the offset as an int, or copy the part",
                self.device()
            )));
        }
        let region: [usize; 2] = [offset as usize, len as usize];
        // SAFETY: the buffer is alive, and the two numbers are a `cl_buffer_region` within it.
        let part = unsafe {
            create_sub_buffer(self.raw(), CL_MEM_READ_WRITE, CL_BUFFER_CREATE_TYPE_REGION, region.as_ptr().cast())
        };
        self.device.listed.check("clCreateSubBuffer", part).map(BufferHandle::new)
    }

    /// Takes host memory from the processor, for work that is submitted to the stream next. Returns
    /// `None` for other memory.
    pub(super) fn lend_to_device<'a>(&'a self, stream: &'a OpenClStream) -> Result<Option<Lent<'a>>> {
        match &self.place {
            Place::Host(host) if host.len > 0 => {
                // Kept from an earlier kernel, if it could not be taken back.
                let mut is_mapped = host.is_mapped.lock();
                if *is_mapped {
                    host.unmap(stream)?;
                    *is_mapped = false;
                }
                drop(is_mapped);
                Ok(Some(Lent { host, stream, is_back: false }))
            }
            _ => Ok(None),
        }
    }
}

/// Host memory that the processor must not access. It is taken back on drop.
pub(super) struct Lent<'a> {
    host: &'a HostBuffer,
    stream: &'a OpenClStream,
    is_back: bool,
}

impl Lent<'_> {
    /// Waits until the device is done with the memory, and gives it to the processor.
    pub(super) fn take_back(mut self) -> Result<()> {
        self.is_back = true;
        self.host.ensure_mapped(self.stream)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if !self.is_back
            && let Err(error) = self.host.ensure_mapped(self.stream)
        {
            // Every use of the device reports it.
            tracing::debug!(%error, "host memory did not come back from a device");
        }
    }
}

impl SharedMapping {
    /// Maps the first `len` bytes of a block, unless they are. Returns the first one.
    fn enter(
        &self,
        device: &'static OpenedDevice,
        block: &PoolBlock,
        len: usize,
        access: HostAccess,
    ) -> Result<NonNull<u8>> {
        // Held until the memory is mapped, which all readers wait for.
        let mut mapped = self.0.lock();
        if mapped.users == 0 {
            let (listed, queue) = (device.listed, device.default_stream.raw());
            let flags = match access {
                HostAccess::Read => CL_MAP_READ,
                HostAccess::Write => CL_MAP_READ | CL_MAP_WRITE,
            };
            let mut start: cl_mem = ptr::null_mut();
            // SAFETY: the queue and the buffer are alive, and the range is the buffer's.
            let event =
                unsafe { enqueue_map_buffer(queue, block.raw(), CL_TRUE, flags, 0, len, &mut start, 0, ptr::null()) };
            let waited = Event::of(listed, "clEnqueueMapBuffer", event)?.wait();
            device.default_stream.take_failure().and(waited)?;
            mapped.start = start.expose_provenance();
        }
        let start = NonNull::new(ptr::with_exposed_provenance_mut(mapped.start));
        let start = start.ok_or_else(|| RpcError::internal("the driver has mapped a buffer nowhere"))?;
        mapped.users += 1;
        Ok(start)
    }

    /// Ends one use. The last one ends the mapping, before later work of the default stream.
    fn leave(&self, device: &'static OpenedDevice, block: &PoolBlock) -> Result<()> {
        let mut mapped = self.0.lock();
        mapped.users -= 1;
        if mapped.users > 0 {
            return Ok(());
        }
        let start = ptr::with_exposed_provenance_mut(mapped.start);
        let stream = &device.default_stream;
        // SAFETY: it is mapped there, and nobody uses that any more.
        let unmapped = unsafe { enqueue_unmap_mem_object(stream.raw(), block.raw(), start, 0, ptr::null()) };
        stream.note(Event::of(device.listed, "clEnqueueUnmapMemObject", unmapped)?);
        stream.flush()
    }
}

impl HostBuffer {
    fn empty(device: &'static OpenedDevice, alignment: u64) -> Self {
        let start = ptr::without_provenance_mut((alignment as usize).max(HOST_ALIGNMENT));
        Self {
            device,
            buffer: BufferHandle::none(),
            start: NonNull::new(start).unwrap_or(NonNull::dangling()),
            len: 0,
            is_mapped: Mutex::new(true),
        }
    }

    fn new(device: &'static OpenedDevice, len: u64, alignment: u64) -> Result<Self> {
        let too_large = || RpcError::new(ErrorKind::OutOfMemory, format!("no {len} bytes of host memory for a device"));
        let size = usize::try_from(len).ok().filter(|_| len <= device.pool.total()).ok_or_else(too_large)?;
        // Whole pages, so that a driver can use them in place.
        let padded = size.checked_next_multiple_of(HOST_ALIGNMENT).ok_or_else(too_large)?;
        let layout = Layout::from_size_align(padded, (alignment as usize).max(HOST_ALIGNMENT));
        let layout = layout.map_err(|_| too_large())?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(too_large)?;
        let flags = CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR;
        // SAFETY: the memory is fresh, and is freed when the driver has given up the buffer.
        let created = unsafe { create_buffer(device.context(), flags, padded, start.as_ptr().cast()) };
        let free = || {
            // SAFETY: it came from `alloc_zeroed` with this layout, and no buffer uses it.
            unsafe { dealloc(start.as_ptr(), layout) }
        };
        let buffer = match device.listed.check("clCreateBuffer", created) {
            Ok(raw) => BufferHandle::new(raw),
            Err(error) => {
                free();
                return Err(error);
            }
        };
        let owned = Box::into_raw(Box::new((start.as_ptr(), layout)));
        // SAFETY: the callback gets the box, once.
        let registered = unsafe { set_mem_object_destructor_callback(buffer.raw(), free_host_memory, owned.cast()) };
        if let Err(code) = registered {
            drop(buffer);
            // SAFETY: the callback was not taken; and no work has used the buffer.
            drop(unsafe { Box::from_raw(owned) });
            free();
            return device.listed.check("clSetMemObjectDestructorCallback", Err(code));
        }
        let host = Self { device, buffer, start: start.cast(), len: padded, is_mapped: Mutex::new(false) };
        host.ensure_mapped(&device.copy_stream)?;
        Ok(host)
    }

    /// Gives the memory to the processor, unless it has it: behind the work of the stream.
    fn ensure_mapped(&self, stream: &OpenClStream) -> Result<()> {
        let mut is_mapped = self.is_mapped.lock();
        if !*is_mapped {
            self.map(stream)?;
            *is_mapped = true;
        }
        Ok(())
    }

    /// Returns the memory to the processor if that failed behind a kernel.
    fn reclaim(&self) -> Result<()> {
        self.ensure_mapped(&self.device.default_stream)
    }

    /// Waits until the work of the stream is done, and lets the processor access the memory.
    fn map(&self, stream: &OpenClStream) -> Result<()> {
        let listed = self.device.listed;
        let mut start: cl_mem = ptr::null_mut();
        // SAFETY: the queue and the buffer are alive, and the range is the buffer's.
        let mapped = unsafe {
            let (access, raw) = (CL_MAP_READ | CL_MAP_WRITE, self.buffer.raw());
            enqueue_map_buffer(stream.raw(), raw, CL_FALSE, access, 0, self.len, &mut start, 0, ptr::null())
        };
        let mapped = Event::of(listed, "clEnqueueMapBuffer", mapped)?;
        stream.flush()?;
        mapped.wait()?;
        if start == self.start.as_ptr() {
            Ok(())
        } else {
            Err(RpcError::internal("the driver has mapped a buffer over host memory elsewhere"))
        }
    }

    /// Gives the memory to the device, for work that is submitted to the stream next.
    fn unmap(&self, stream: &OpenClStream) -> Result<()> {
        // SAFETY: it is mapped there, and the caller keeps the processor from it.
        let unmapped =
            unsafe { enqueue_unmap_mem_object(stream.raw(), self.buffer.raw(), self.start.as_ptr(), 0, ptr::null()) };
        Event::of(self.device.listed, "clEnqueueUnmapMemObject", unmapped).map(drop)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.len > 0
            && *self.is_mapped.get_mut()
            && let Err(error) = self.unmap(&self.device.copy_stream)
        {
            tracing::debug!(%error, "host memory was not unmapped");
        }
        // The driver calls back when its work with the buffer is done.
    }
}

/// Callback for the driver, called when it has given up a buffer over host memory.
extern "C" fn free_host_memory(_: cl_mem, owned: *mut c_void) {
    // SAFETY: `HostBuffer::new` has made it of a box, and the driver passes it on once. The memory
    // came from `alloc_zeroed` with this layout.
    unsafe {
        let (start, layout) = *Box::from_raw(owned.cast::<(*mut u8, Layout)>());
        dealloc(start, layout);
    }
}

/// Submits zeros to a block, whose first `len` bytes are used.
fn zero(device: &'static OpenedDevice, block: &PoolBlock, len: u64) -> Result<()> {
    const ZEROS: [u8; 16] = [0; 16];
    // Blocks are multiples of that.
    let len = (len.next_multiple_of(ZEROS.len() as u64)).min(block.size);
    let queue = device.default_stream.raw();
    // SAFETY: the range is the block's own, and the driver copies the pattern before it returns.
    let filled = unsafe {
        let pattern = ZEROS.as_ptr().cast();
        enqueue_fill_buffer(queue, block.raw(), pattern, ZEROS.len(), 0, len as usize, 0, ptr::null())
    };
    device.default_stream.note(Event::of(device.listed, "clEnqueueFillBuffer", filled)?);
    Ok(())
}

// SAFETY: the length and the address never change. Host memory holds zeros from the start, is
// aligned to a page at least, and is mapped except while a kernel uses it, whose caller holds a
// borrow.
unsafe impl Memory for OpenClMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        match &self.place {
            Place::Host(host) => Some(host.start.cast()),
            Place::Nowhere | Place::Device(_) => None,
        }
    }

    /// OpenCL's memory has handles and no addresses. That of host memory is the processor's.
    fn device_address(&self) -> Option<NonNull<u8>> {
        None
    }

    /// Returns when `data` has been read. Its last part may still be on the way to the device;
    /// every later work of the default stream begins behind it.
    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
        match &self.place {
            Place::Nowhere => self.device.listed.check_not_lost(),
            Place::Host(host) => {
                host.reclaim()?;
                // SAFETY: the caller has checked the range and has exclusive access to it.
                unsafe { ptr::copy_nonoverlapping(data.as_ptr(), host.at(offset), data.len()) };
                Ok(())
            }
            Place::Device(block) => {
                self.let_default_stream_follow()?;
                // SAFETY: as above.
                unsafe { transfer::upload(self.device, block.raw(), offset, data) }
            }
        }
    }

    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        match &self.place {
            Place::Nowhere => self.device.listed.check_not_lost(),
            Place::Host(host) => {
                host.reclaim()?;
                // SAFETY: the caller has checked the range and excludes writers.
                unsafe { ptr::copy_nonoverlapping(host.at(offset), out.as_mut_ptr(), out.len()) };
                Ok(())
            }
            Place::Device(block) => {
                self.let_default_stream_follow()?;
                // SAFETY: as above.
                unsafe { transfer::download(self.device, block.raw(), offset, out) }
            }
        }
    }

    /// Maps device memory as a whole, without a copy where the device works in host memory.
    unsafe fn map(&self, offset: u64, len: usize, access: HostAccess) -> Result<Mapping<'_>> {
        let Place::Device(block) = &self.place else {
            if let Place::Host(host) = &self.place {
                host.reclaim()?;
            }
            let start = self.host().map_or(ptr::dangling_mut(), |start| start.as_ptr().wrapping_add(offset as usize));
            // SAFETY: the caller has checked the range, and keeps others from it.
            return Ok(unsafe {
                Mapping::new(NonNull::new(start).unwrap_or(NonNull::dangling()), len, access, || Ok(()))
            });
        };
        self.let_default_stream_follow()?;
        let start = self.mapped.enter(self.device, block, self.len as usize, access)?;
        // SAFETY: within the memory, which is mapped until the call of `leave`.
        let first = unsafe { start.add(offset as usize) };
        let leave = move || self.mapped.leave(self.device, block);
        // SAFETY: the driver has mapped the bytes, which the caller keeps others from.
        Ok(unsafe { Mapping::new(first, len, access, leave) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl HostBuffer {
    fn at(&self, offset: u64) -> *mut u8 {
        self.start.as_ptr().cast::<u8>().wrapping_add(offset as usize)
    }
}

impl Drop for OpenClMemory {
    fn drop(&mut self) {
        if let Place::Device(block) = &mut self.place {
            block.other_streams = self.other_streams.take();
        }
    }
}

impl fmt::Debug for OpenClMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenClMemory")
            .field("device", &format_args!("{}", self.device()))
            .field("is_host", &matches!(self.place, Place::Host(_)))
            .field("len", &self.len)
            .finish()
    }
}

/// Memory scope of host memory that the device uses, too.
pub(super) const HOST_SCOPE: &str = "host";

/// Alignment of host memory in bytes: a page, so that drivers can use it in place.
const HOST_ALIGNMENT: usize = 4096;

/// Largest alignment of host memory in bytes.
const MAX_HOST_ALIGNMENT: u64 = 2 << 20;
