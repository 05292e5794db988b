//! The device `cpu`, which always exists: the processor, with host memory from a replaceable
//! allocator.

use std::any::Any;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use super::api::{AllocRequest, DeviceApi, Stream, out_of_range};
use super::attribute::DeviceAttribute;
use super::memory::Memory;
use crate::dlpack::{Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::value::Value;

/// The processor as a device. There is one, `cpu:0`; its work is done when the call that submits it
/// returns.
#[derive(Clone)]
pub struct CpuDevice {
    allocator: Arc<dyn CpuAllocator>,
}

impl CpuDevice {
    /// Creates the device with memory from `allocator`: an arena shared with other processes,
    /// pinned memory, or a pool.
    pub fn with_allocator(allocator: Arc<dyn CpuAllocator>) -> Self {
        Self { allocator }
    }

    fn check(&self, index: i32) -> Result<()> {
        if index == 0 { Ok(()) } else { Err(out_of_range(Device::new(DeviceType::CPU, index), 1)) }
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::with_allocator(Arc::new(SystemAllocator))
    }
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice").finish_non_exhaustive()
    }
}

impl DeviceApi for CpuDevice {
    fn kind(&self) -> DeviceType {
        DeviceType::CPU
    }

    fn count(&self) -> Result<i32> {
        Ok(1)
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        if attribute == DeviceAttribute::Exists {
            return Ok(Value::Bool(index == 0));
        }
        self.check(index)?;
        Ok(match attribute {
            DeviceAttribute::Name => processor_name().into(),
            DeviceAttribute::ComputeUnits => {
                std::thread::available_parallelism().ok().and_then(|units| i64::try_from(units.get()).ok()).into()
            }
            DeviceAttribute::TotalMemory => total_memory().into(),
            DeviceAttribute::AvailableMemory => memory_bytes(&["MemAvailable"]).into(),
            DeviceAttribute::MaxAlignment => (MAX_ALIGNMENT as i64).into(),
            DeviceAttribute::MemoryScopes => {
                Value::List(self.allocator.memory_scopes().into_iter().map(Value::Str).collect())
            }
            DeviceAttribute::Target => {
                format!("llvm -mtriple={}-{}", std::env::consts::ARCH, std::env::consts::OS).into()
            }
            _ => Value::Null,
        })
    }

    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        self.check(index)?;
        self.allocator.allocate(request)
    }

    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        self.check(index)?;
        // SAFETY: the caller promises the same.
        Ok(Box::new(unsafe { HostMemory::new(address, len, owner) }))
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        self.check(index)?;
        Ok(Arc::new(CpuStream))
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        self.create_stream(index)
    }
}

/// Stream of the processor. Work is done when it has been submitted, so that there is no order to
/// keep.
#[derive(Debug)]
struct CpuStream;

impl Stream for CpuStream {
    fn device(&self) -> Device {
        Device::cpu()
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn wait_for(&self, other: &dyn Stream) -> Result<()> {
        // The next work runs on the calling thread, which therefore has to wait itself.
        other.synchronize()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Allocator of a session's host memory.
///
/// It is called from any thread, and may block. It must keep the promises of
/// [`DeviceApi::allocate`]: zeroed memory, aligned as requested (by default to at least 64 bytes,
/// so that vector code and `as_slice` work), and an error if there is none. It defines the memory
/// scopes. With [`HostMemory`] it does not have to implement [`Memory`].
pub trait CpuAllocator: Send + Sync {
    /// Allocates memory that reads as zeros and has a [`Memory::host`] pointer.
    ///
    /// # Errors
    ///
    /// As [`DeviceApi::allocate`].
    fn allocate(&self, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>>;

    /// Returns the memory scopes besides `global`, for constraints on devices. None by default.
    fn memory_scopes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Allocator of memory from the operating system.
///
/// Alignment is at least 64 bytes. From 1 MiB (on Linux) each allocation is a mapping of its own:
/// its pages are zeroed when they are first touched, and are returned when it is dropped. From 4
/// MiB it begins on a 2 MiB boundary and asks for huge pages, because the first touch of small
/// pages costs several times the copy that touches them. The scopes none, `""`, `"global"` and
/// `"host"` are all the same.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemAllocator;

impl CpuAllocator for SystemAllocator {
    fn memory_scopes(&self) -> Vec<String> {
        vec!["host".to_owned()]
    }

    fn allocate(&self, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        if !matches!(request.scope, None | Some("" | "global" | "host")) {
            let scope = request.scope.unwrap_or_default();
            return Err(RpcError::unsupported(format!("cpu has no memory scope '{scope}'; it has global and host")));
        }
        let alignment = check_alignment(request.alignment)?;
        let too_large = || RpcError::new(ErrorKind::OutOfMemory, format!("cpu cannot allocate {} bytes", request.size));
        let size = usize::try_from(request.size).ok().filter(|size| *size <= isize::MAX as usize);
        let size = size.ok_or_else(too_large)?;
        // With overcommit, reserving more than all memory would succeed, and touching it would kill
        // the process.
        if size >= CERTAIN_BYTES && memory_bytes(&["MemTotal", "SwapTotal"]).is_some_and(|all| size as u64 > all as u64)
        {
            return Err(too_large());
        }
        #[cfg(target_os = "linux")]
        if size >= MAPPED_BYTES {
            return mapped(size, alignment).ok_or_else(too_large);
        }
        on_heap(size, alignment).ok_or_else(too_large)
    }
}

/// Host memory with an owner of any type: the return value of [`CpuAllocator`]s.
pub struct HostMemory {
    start: NonNull<u8>,
    len: usize,
    /// Frees the memory when it is dropped.
    owner: Box<dyn Any + Send + Sync>,
}

impl HostMemory {
    /// Wraps the `len` bytes at `start`, which live until `owner` is dropped.
    ///
    /// # Safety
    ///
    /// The bytes are what [`Memory`] requires of host memory: valid for reads and writes from any
    /// thread until `owner` is dropped, initialised, at most `isize::MAX`, and accessed by nothing
    /// else.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner }
    }

    /// Returns the value that keeps the memory alive, for the allocator that created it, for
    /// example with the position in an arena.
    pub fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: callers of `new` promise that the bytes may be used from any thread, and the owner is
// `Send`.
unsafe impl Send for HostMemory {}

// SAFETY: a shared reference only gives out the address, without `unsafe`.
unsafe impl Sync for HostMemory {}

// SAFETY: callers of `new` promise all of it, and the fields never change.
unsafe impl Memory for HostMemory {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }

    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
        // SAFETY: the caller has checked the range and has exclusive access to it, so that `data`
        // cannot overlap it.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.start.as_ptr().add(offset as usize), data.len()) };
        Ok(())
    }

    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        // SAFETY: the caller has checked the range and excludes writers, so that `out` cannot
        // overlap it.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(offset as usize), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns the alignment to use for a requested one.
fn check_alignment(asked: u64) -> Result<usize> {
    if asked != 0 && !asked.is_power_of_two() {
        return Err(RpcError::invalid_argument(format!("an alignment of {asked} is not a power of two")));
    }
    match usize::try_from(asked) {
        Ok(alignment) if alignment <= MAX_ALIGNMENT => Ok(alignment.max(MIN_ALIGNMENT)),
        _ => Err(RpcError::invalid_argument(format!("an alignment of {asked} is above {MAX_ALIGNMENT}"))),
    }
}

fn on_heap(size: usize, alignment: usize) -> Option<Box<dyn Memory>> {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    struct Block(*mut u8, Layout);

    // SAFETY: the block may be freed from any thread, and nothing else is done with the pointer.
    unsafe impl Send for Block {}
    // SAFETY: shared references do nothing.
    unsafe impl Sync for Block {}

    impl Drop for Block {
        fn drop(&mut self) {
            // SAFETY: it came from `alloc_zeroed` with this layout, and is freed once.
            unsafe { dealloc(self.0, self.1) }
        }
    }

    if size == 0 {
        let start = NonNull::new(ptr::without_provenance_mut(alignment))?;
        // SAFETY: no bytes, at an aligned address that is not null.
        return Some(Box::new(unsafe { HostMemory::new(start, 0, Box::new(())) }));
    }
    let layout = Layout::from_size_align(size, alignment).ok()?;
    // SAFETY: the size is not zero.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    let block = Block(start.as_ptr(), layout);
    // SAFETY: a fresh block of `size` zeros, freed by `block`.
    Some(Box::new(unsafe { HostMemory::new(start, size, Box::new(block)) }))
}

/// Allocates a mapping of its own, on a huge page's boundary if it is large. Returns `None` if it
/// fails.
#[cfg(target_os = "linux")]
fn mapped(size: usize, alignment: usize) -> Option<Box<dyn Memory>> {
    use std::ffi::c_void;

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    struct Mapping(*mut c_void, usize);

    // SAFETY: the mapping may be unmapped from any thread, and nothing else is done with the
    // pointer.
    unsafe impl Send for Mapping {}
    // SAFETY: shared references do nothing.
    unsafe impl Sync for Mapping {}

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: these pages belong to this mapping alone, and are unmapped once.
            if let Err(error) = unsafe { munmap(self.0, self.1) } {
                tracing::error!(%error, bytes = self.1, "cannot unmap memory of a tensor");
            }
        }
    }

    let page = rustix::param::page_size();
    let huge = size >= HUGE_BYTES;
    let alignment = alignment.max(if huge { HUGE_PAGE_BYTES } else { page });
    let len = size.checked_next_multiple_of(page)?;
    // The kernel aligns to pages. For a larger alignment, reserve enough to contain the boundary,
    // and return the rest.
    let reserved = len.checked_add(alignment - page).filter(|reserved| *reserved <= isize::MAX as usize)?;
    // SAFETY: a new private mapping at an address of the kernel's choice affects no other memory.
    let base = unsafe {
        mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?
    };
    let before = base.addr().next_multiple_of(alignment) - base.addr();
    let start = base.wrapping_byte_add(before);
    let after = reserved - before - len;
    // SAFETY: whole pages at both ends of the mapping that was just created, which no other code
    // has seen yet. A failure only leaves them reserved and untouched.
    unsafe {
        if before > 0 {
            _ = munmap(base, before);
        }
        if after > 0 {
            _ = munmap(start.wrapping_byte_add(len), after);
        }
        if huge {
            // Only advice: kernels without huge pages refuse it.
            _ = madvise(start, len, Advice::LinuxHugepage);
        }
    }
    let mapping = Mapping(start, len);
    // SAFETY: at least `size` fresh bytes that read as zeros, unmapped by `mapping`.
    Some(Box::new(unsafe { HostMemory::new(NonNull::new(start.cast())?, size, Box::new(mapping)) }))
}

/// Returns the processor's name from the kernel, or else its architecture. Read once, because it
/// takes long with many cores.
fn processor_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        ["model name", "Model", "Hardware", "cpu model"]
            .iter()
            .find_map(|wanted| {
                info.lines().find_map(|line| {
                    let (key, name) = line.split_once(':')?;
                    (key.trim() == *wanted && !name.trim().is_empty()).then(|| name.trim().to_owned())
                })
            })
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
    })
}

/// Returns the size of host memory in bytes. Read once.
fn total_memory() -> Option<i64> {
    static BYTES: OnceLock<Option<i64>> = OnceLock::new();
    *BYTES.get_or_init(|| memory_bytes(&["MemTotal"]))
}

/// Returns the sum of these lines of `/proc/meminfo` in bytes; `None` without such a file or line.
fn memory_bytes(keys: &[&str]) -> Option<i64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    keys.iter().try_fold(0_i64, |sum, wanted| {
        let kibibytes: i64 = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            if key == *wanted { value.trim().strip_suffix("kB")?.trim().parse().ok() } else { None }
        })?;
        sum.checked_add(kibibytes.checked_mul(1024)?)
    })
}

/// Smallest alignment: a cache line, and the widest vector registers.
const MIN_ALIGNMENT: usize = 64;

/// Largest alignment: that of the largest huge pages.
const MAX_ALIGNMENT: usize = 1 << 30;

/// Size in bytes from which a mapping of its own costs less than clearing memory before it is
/// written.
#[cfg(target_os = "linux")]
const MAPPED_BYTES: usize = 1 << 20;

/// Size in bytes from which huge pages are used: alignment wastes at most half of it, and only
/// address space.
#[cfg(target_os = "linux")]
const HUGE_BYTES: usize = 4 << 20;

/// Usual size of a huge page, on x86-64 and on arm64 with 4 KiB pages.
#[cfg(target_os = "linux")]
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Size in bytes from which the cost of reading `/proc/meminfo` is negligible.
const CERTAIN_BYTES: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn allocate(size: u64, alignment: u64) -> Box<dyn Memory> {
        SystemAllocator.allocate(&AllocRequest { size, alignment, scope: None }).unwrap()
    }

    fn refusal(request: &AllocRequest<'_>) -> ErrorKind {
        SystemAllocator.allocate(request).err().unwrap().kind()
    }

    fn contents(memory: &dyn Memory) -> Vec<u8> {
        let mut out = vec![1; memory.len() as usize];
        // SAFETY: the whole memory, which nothing else uses.
        unsafe { memory.copy_to_host(0, &mut out).unwrap() };
        out
    }

    #[test]
    fn memory_is_zeroed_and_aligned_on_every_path() {
        for size in [0, 1, 63, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (4 << 20) - 1, 4 << 20, (8 << 20) + 12345] {
            for alignment in [0, 1, 64, 128, 4096, 65536, 4 << 20] {
                let memory = allocate(size, alignment);
                assert_eq!(memory.len(), size);
                let address = memory.host().unwrap().as_ptr().addr() as u64;
                assert_eq!(address % alignment.max(64), 0, "{size} {alignment}");
                assert!(contents(&*memory).iter().all(|byte| *byte == 0), "{size} {alignment}");
                if size > 0 {
                    // SAFETY: the last byte, which nothing else uses.
                    unsafe { memory.copy_from_host(size - 1, &[7]).unwrap() };
                    assert_eq!(contents(&*memory).last(), Some(&7));
                }
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn large_memory_begins_on_a_huge_page() {
        let memory = allocate(5 << 20, 0);
        assert_eq!(memory.host().unwrap().as_ptr().addr() % HUGE_PAGE_BYTES, 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn large_memory_goes_back_when_it_is_dropped() {
        // More address space in total than there is, unless each allocation is returned.
        for _ in 0..1 << 12 {
            drop(allocate(1 << 29, 1 << 30));
        }
    }

    #[test]
    fn too_large_allocations_are_an_error_and_do_not_abort() {
        for size in [u64::MAX, i64::MAX as u64 + 1, i64::MAX as u64, i64::MAX as u64 - 4096, 1 << 62, 1 << 47, 1 << 45]
        {
            for alignment in [0, 1 << 30] {
                let error = SystemAllocator.allocate(&AllocRequest { size, alignment, scope: None }).err().unwrap();
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{size} {alignment}");
                assert!(error.message().contains(&size.to_string()));
            }
        }
    }

    #[test]
    fn impossible_alignments_are_refused() {
        for alignment in [3, 65, 1 << 31, 1 << 63, u64::MAX] {
            assert_eq!(refusal(&AllocRequest { alignment, ..AllocRequest::new(8) }), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn unknown_scopes_are_refused_by_name() {
        for scope in [None, Some(""), Some("global"), Some("host")] {
            assert!(SystemAllocator.allocate(&AllocRequest { scope, ..AllocRequest::new(8) }).is_ok());
        }
        let request = AllocRequest { scope: Some("texture"), ..AllocRequest::new(8) };
        let error = SystemAllocator.allocate(&request).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("texture") && error.message().contains("global"));
    }

    #[test]
    fn another_allocator_can_replace_the_system_allocator() {
        #[derive(Default)]
        struct Counting(AtomicU64, Arc<AtomicU64>);

        struct Counted(Box<dyn Any + Send + Sync>, Arc<AtomicU64>);

        impl Drop for Counted {
            fn drop(&mut self) {
                assert!(self.0.is::<Box<dyn Memory>>());
                self.1.fetch_add(1, Ordering::Relaxed);
            }
        }

        impl CpuAllocator for Counting {
            fn allocate(&self, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
                self.0.fetch_add(request.size, Ordering::Relaxed);
                let inner = SystemAllocator.allocate(request)?;
                let start = inner.host().unwrap();
                let owner = Box::new(Counted(Box::new(inner), self.1.clone()));
                // SAFETY: the memory lives in the owner.
                Ok(Box::new(unsafe { HostMemory::new(start, request.size as usize, owner) }))
            }
        }

        let counting = Arc::new(Counting::default());
        let cpu = CpuDevice::with_allocator(counting.clone());
        let memory = cpu.allocate(0, &AllocRequest::new(100)).unwrap();
        assert!(memory.as_any().downcast_ref::<HostMemory>().unwrap().owner().is::<Counted>());
        assert_eq!(counting.0.load(Ordering::Relaxed), 100);
        assert_eq!(counting.1.load(Ordering::Relaxed), 0);
        drop(memory);
        assert_eq!(counting.1.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn there_is_one_cpu() {
        let cpu = CpuDevice::default();
        assert_eq!(cpu.attribute(1, DeviceAttribute::Exists).unwrap(), Value::Bool(false));
        for error in [
            cpu.attribute(1, DeviceAttribute::Name).err(),
            cpu.allocate(-1, &AllocRequest::new(1)).err(),
            cpu.create_stream(1).err(),
            cpu.default_stream(i32::MAX).err(),
        ] {
            assert_eq!(error.unwrap().kind(), ErrorKind::DeviceUnavailable);
        }
    }

    #[test]
    fn unknown_attributes_are_null() {
        let cpu = CpuDevice::default();
        let of = |attribute| cpu.attribute(0, attribute).unwrap();
        assert!(matches!(of(DeviceAttribute::Name), Value::Str(name) if !name.is_empty()));
        assert!(matches!(of(DeviceAttribute::ComputeUnits), Value::Int(units) if units > 0));
        assert_eq!(of(DeviceAttribute::MaxAlignment), Value::Int(1 << 30));
        assert_eq!(of(DeviceAttribute::WarpSize), Value::Null);
        if cfg!(target_os = "linux") {
            let (Value::Int(total), Value::Int(available)) =
                (of(DeviceAttribute::TotalMemory), of(DeviceAttribute::AvailableMemory))
            else {
                panic!("no memory sizes");
            };
            assert!(0 < available && available <= total);
        }
    }

    #[test]
    fn a_stream_waits_for_the_other_device() {
        struct Slow(AtomicU64);

        impl Stream for Slow {
            fn device(&self) -> Device {
                Device::cuda(0)
            }

            fn synchronize(&self) -> Result<()> {
                self.0.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }

            fn wait_for(&self, _: &dyn Stream) -> Result<()> {
                Ok(())
            }

            fn as_any(&self) -> &dyn Any {
                self
            }
        }

        let slow = Slow(AtomicU64::new(0));
        let stream = CpuDevice::default().create_stream(0).unwrap();
        stream.wait_for(&slow).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(stream.device(), Device::cpu());
        assert_eq!(slow.0.load(Ordering::Relaxed), 1);
    }
}
