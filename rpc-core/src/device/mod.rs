//! Devices: the traits that sessions use to allocate memory, copy and synchronise on a device.
//!
//! A [`DeviceApi`] serves all devices of one kind, creates [`Memory`] and [`Stream`]s, and answers
//! [`DeviceAttribute`] queries. [`Devices`] is the set that a session offers; it always contains
//! [`cpu`].

pub mod cpu;
pub(crate) mod target;
pub(crate) mod virtual_device;

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;
use std::sync::Arc;

use crate::dlpack::{Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::value::Value;

pub use cpu::{CpuAllocator, CpuDevice, HostMemory, SystemAllocator};
pub use target::Target;
pub use virtual_device::{DeviceDescription, GLOBAL, VirtualDevice, VirtualDeviceBuilder};

macro_rules! attributes {
    ($($(#[$doc:meta])* $attribute:ident = $code:literal $name:literal;)*) => {
        /// Attribute of a device.
        ///
        /// The numbers up to 16 are those of TVM's `DeviceAttrKind`
        /// (`include/tvm/runtime/device_api.h`), so that they mean the same in its dialect; ours
        /// begin at 1000. An attribute that a device does not have is [`Value::Null`], never an
        /// error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum DeviceAttribute {
            $($(#[$doc])* $attribute = $code,)*
        }

        impl DeviceAttribute {
            /// All attributes that this version knows, by number.
            pub const ALL: &[Self] = &[$(Self::$attribute,)*];

            /// Returns the attribute with this number, if this version knows it.
            pub const fn from_code(code: u16) -> Option<Self> {
                match code {
                    $($code => Some(Self::$attribute),)*
                    _ => None,
                }
            }

            /// Returns the stable lower-case name, as used on command lines and in JSON output.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$attribute => $name,)*
                }
            }
        }
    };
}

attributes! {
    /// True if the device exists: a bool, never null.
    Exists = 0 "exists";
    /// Largest number of threads of one block: an int.
    MaxThreadsPerBlock = 1 "max_threads_per_block";
    /// Threads that run in lockstep: an int.
    WarpSize = 2 "warp_size";
    /// Largest shared memory of one block, in bytes: an int.
    MaxSharedMemoryPerBlock = 3 "max_shared_memory_per_block";
    /// Compute capability, such as `9.0`: a str.
    ComputeVersion = 4 "compute_version";
    /// Vendor's name of the device: a str.
    Name = 5 "name";
    /// Highest clock rate in kHz: an int.
    MaxClockRate = 6 "max_clock_rate";
    /// Processors that run independently, CPU cores or multiprocessors: an int.
    ComputeUnits = 7 "compute_units";
    /// Largest number of threads of one block in each dimension: a shape.
    MaxThreadDimensions = 8 "max_thread_dimensions";
    /// Registers of one block: an int.
    MaxRegistersPerBlock = 9 "max_registers_per_block";
    /// Architecture of an AMD GPU, such as `gfx90a`: a str.
    GcnArch = 10 "gcn_arch";
    /// Version of the API that drives the device, in the vendor's counting: an int.
    ApiVersion = 11 "api_version";
    /// Version of the driver: a str.
    DriverVersion = 12 "driver_version";
    /// Size of the L2 cache in bytes: an int.
    L2CacheSize = 13 "l2_cache_size";
    /// Size of the memory in bytes: an int.
    TotalMemory = 14 "total_memory";
    /// Memory in bytes that can be allocated now: an int.
    AvailableMemory = 15 "available_memory";
    /// Alignment of the rows of an image in bytes: an int.
    ImagePitchAlignment = 16 "image_pitch_alignment";
    /// Largest alignment of an allocation, in bytes: an int.
    MaxAlignment = 1000 "max_alignment";
    /// Target of code for the device, in the text form of [`Target`]: a str.
    Target = 1001 "target";
    /// Memory scopes of allocations besides `global`: a list of strs.
    MemoryScopes = 1002 "memory_scopes";
}

impl DeviceAttribute {
    /// Returns the attribute's number on the wire.
    pub const fn code(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for DeviceAttribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DeviceAttribute {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|attribute| attribute.name() == text).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|attribute| attribute.name()).collect();
            RpcError::invalid_argument(format!("no device attribute '{text}'; there are {}", known.join(", ")))
        })
    }
}

/// Properties of an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocRequest<'a> {
    /// Size in bytes; zero is allowed.
    pub size: u64,
    /// Alignment in bytes, a power of two; zero leaves it to the device. The device may align more
    /// strictly.
    pub alignment: u64,
    /// Memory scope of the device; `None` and `"global"` are its ordinary memory.
    pub scope: Option<&'a str>,
}

impl AllocRequest<'_> {
    /// Returns a request for `size` bytes of ordinary memory with the device's default alignment.
    pub const fn new(size: u64) -> Self {
        Self { size, alignment: 0, scope: None }
    }
}

/// Interface to all devices of one kind.
///
/// A session calls it from any thread, and from several at once. Every call may block for as long
/// as the device takes, so it is never made on a thread that reads frames. An index out of range is
/// [`ErrorKind::DeviceUnavailable`], except for [`DeviceAttribute::Exists`]. A failure after which
/// the device cannot be used is [`ErrorKind::DeviceLost`].
///
/// There is no `free`: memory is freed when its [`Memory`] is dropped, after all work of streams
/// that uses it.
pub trait DeviceApi: Send + Sync {
    /// Returns the device kind; always the same.
    fn kind(&self) -> DeviceType;

    /// Returns the number of devices; their indices are `0..count`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] if the kind cannot be used here; the message gives the
    /// reason.
    fn count(&self) -> Result<i32>;

    /// Returns the value of `attribute`, of its documented type, or null if the device does not
    /// have it. The value contains no objects. [`DeviceAttribute::Exists`] of an index out of range
    /// is false, not an error.
    ///
    /// # Errors
    ///
    /// The index is out of range, for any other attribute.
    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value>;

    /// Allocates memory that reads as zeros.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], for every size that is too large; [`ErrorKind::InvalidArgument`]
    /// for an alignment that is not a power of two or too large; [`ErrorKind::Unsupported`] for a
    /// scope that the device lacks.
    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>>;

    /// Creates a stream, whose work has an order of its own.
    ///
    /// # Errors
    ///
    /// The device has no more streams, or is lost.
    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>>;

    /// Returns the stream for work that names none; the same one at each call.
    ///
    /// # Errors
    ///
    /// The device is lost.
    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>>;

    /// Wraps memory of the device `index` that other code has allocated: the `len` bytes at
    /// `address`, which live until `owner` is dropped. `owner` is dropped after the returned
    /// memory, behind all work that was submitted to the device by then.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`], which is the default.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped the bytes can be read and written by the device, and, if they are
    /// host memory, from any thread. They are initialised, at most `isize::MAX`, and accessed only
    /// under a borrow.
    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        let _ = (address, len, owner);
        let device = Device::new(self.kind(), index);
        Err(RpcError::unsupported(format!("{device} cannot use memory that it has not allocated")))
    }

    /// Copies `len` bytes between two memories of this kind, or between one of this kind and host
    /// memory, behind all work that was submitted to the default stream. Returns when the bytes are
    /// there. Within one memory the ranges may overlap; the destination then holds the source's
    /// former content.
    ///
    /// [`Borrow::copy_from`](crate::tensor::Borrow::copy_from) is the safe way to call it.
    ///
    /// # Errors
    ///
    /// The device failed. The destination is unspecified then.
    ///
    /// # Safety
    ///
    /// Both ranges lie within their memories. Until this returns, nothing else writes to the source
    /// or accesses the destination.
    unsafe fn copy(
        &self,
        from: &dyn Memory,
        from_offset: u64,
        to: &dyn Memory,
        to_offset: u64,
        len: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promises are the same.
        unsafe { copy_by_host(from, from_offset, to, to_offset, len) }
    }
}

/// Callback that is called once with the result of a [stream's](Stream::when_done) work. It must
/// not block or panic.
pub type WhenDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Queue of work on one device: submitted work runs in order, at some later time.
pub trait Stream: Send + Sync {
    /// Returns the device of the stream.
    fn device(&self) -> Device;

    /// Waits until all work submitted so far is done.
    ///
    /// # Errors
    ///
    /// The error of that work, or [`ErrorKind::DeviceLost`].
    fn synchronize(&self) -> Result<()>;

    /// Calls `done` when all work submitted so far is done, with the result that
    /// [`synchronize`](Self::synchronize) would return, without occupying a thread until then.
    /// `done` may be called before this returns, and otherwise on a thread that the device needs
    /// for other callbacks, too.
    ///
    /// # Errors
    ///
    /// `done` itself, uncalled, if the device does not support this, which is the default. Use
    /// `synchronize` then.
    fn when_done(&self, done: WhenDone) -> Result<(), WhenDone> {
        Err(done)
    }

    /// Lets work submitted to this stream from now on begin after the work submitted to `other` so
    /// far. It may block until then, if the device has no better way. `other` may belong to another
    /// device.
    ///
    /// # Errors
    ///
    /// Either device is lost.
    fn wait_for(&self, other: &dyn Stream) -> Result<()>;

    /// Returns the stream's handle for the device's libraries, such as a `CUstream`, and makes its
    /// device the calling thread's current one, if there is such a notion. The handle is valid
    /// until the stream is dropped. `None`, the default, if work on the device needs no stream.
    ///
    /// # Errors
    ///
    /// The device is lost.
    fn library_handle(&self) -> Result<Option<NonNull<c_void>>> {
        Ok(None)
    }

    /// Returns the concrete type, for the device's own functions.
    fn as_any(&self) -> &dyn Any;
}

/// A piece of a device's memory, freed on drop.
///
/// It does not track its users; [`Storage`](crate::tensor::Storage) does. So reading and writing
/// are unsafe here and safe there.
///
/// # Safety
///
/// `len` and `host` never change. If `host` is a pointer, then `len` is at most `isize::MAX`, and
/// until the memory is dropped the pointer is valid for reads and writes of `len` bytes, all
/// initialised and aligned as requested, and only its users (through this trait, or that pointer)
/// access them. It may be used from any thread.
pub unsafe trait Memory: Send + Sync {
    /// Returns the size in bytes.
    fn len(&self) -> u64;

    /// Returns true if the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the bytes, if the processor can access them.
    fn host(&self) -> Option<NonNull<u8>>;

    /// Returns the address of the bytes on the device, for its own functions and libraries; for
    /// host memory that is [`host`](Self::host). It is valid until the memory is dropped, and never
    /// changes.
    fn device_address(&self) -> Option<NonNull<u8>> {
        self.host()
    }

    /// Writes `data` at `offset`. Returns when `data` is no longer needed and readers will see it.
    ///
    /// # Errors
    ///
    /// The device failed. The range is unspecified then.
    ///
    /// # Safety
    ///
    /// The range lies within the memory, and nothing else accesses it until this returns.
    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    ///
    /// The device failed. `out` is unspecified then.
    ///
    /// # Safety
    ///
    /// The range lies within the memory, and nothing writes to it until this returns.
    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Returns the concrete type, for the device's own functions.
    fn as_any(&self) -> &dyn Any;
}

/// Devices that a session offers, by kind.
///
/// A missing kind can carry the reason, so that the error for `cuda` says that the driver was not
/// found, and not only that there is no such device.
#[derive(Clone)]
pub struct Devices {
    kinds: BTreeMap<DeviceType, Result<Arc<dyn DeviceApi>, String>>,
}

impl Devices {
    /// Returns a set with only `cpu`, with the [`SystemAllocator`].
    pub fn new() -> Self {
        Self { kinds: BTreeMap::new() }.with(Arc::new(CpuDevice::default()))
    }

    /// Adds `api`, replacing any other of its kind. For example, this gives `cpu` another
    /// allocator.
    #[must_use]
    pub fn with(mut self, api: Arc<dyn DeviceApi>) -> Self {
        self.kinds.insert(api.kind(), Ok(api));
        self
    }

    /// Records the reason why `kind` is not offered.
    #[must_use]
    pub fn absent(mut self, kind: DeviceType, reason: impl Into<String>) -> Self {
        self.kinds.insert(kind, Err(reason.into()));
        self
    }

    /// Returns the API that serves `device`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] with the reason, if the kind is not offered or the index is
    /// out of range.
    pub fn get(&self, device: Device) -> Result<&Arc<dyn DeviceApi>> {
        let api = self.kind(device.kind)?;
        let count = api.count()?;
        if (0..count).contains(&device.index) { Ok(api) } else { Err(out_of_range(device, count)) }
    }

    /// Returns the API for the devices of `kind`, even if there are none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] with the reason, if the kind is not offered.
    pub fn kind(&self, kind: DeviceType) -> Result<&Arc<dyn DeviceApi>> {
        let unavailable = |reason: &str| RpcError::new(ErrorKind::DeviceUnavailable, format!("no {kind}: {reason}"));
        match self.kinds.get(&kind) {
            Some(Ok(api)) => Ok(api),
            Some(Err(reason)) => Err(unavailable(reason)),
            None => Err(unavailable("this session does not offer it")),
        }
    }

    /// Returns the value of `attribute` of `device`. [`DeviceAttribute::Exists`] is answered for
    /// every device, existing or not.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] for any other attribute of a device that does not exist.
    pub fn attribute(&self, device: Device, attribute: DeviceAttribute) -> Result<Value> {
        match self.get(device) {
            Ok(api) => api.attribute(device.index, attribute),
            Err(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(false)),
            Err(error) => Err(error),
        }
    }

    /// Returns descriptions of the devices of all kinds, for matching constraints. A device that
    /// fails to describe itself counts as one of its type without further properties. Drivers may
    /// take long.
    pub fn describe(&self) -> impl Iterator<Item = DeviceDescription> {
        let of_kind = move |(kind, api): (DeviceType, Result<&Arc<dyn DeviceApi>, &str>)| {
            let count = api.map_or(0, |api| api.count().unwrap_or(0));
            (0..count).map(move |index| self.describe_one(Device::new(kind, index)))
        };
        self.iter().flat_map(of_kind)
    }

    fn describe_one(&self, device: Device) -> DeviceDescription {
        let attribute = |attribute| self.attribute(device, attribute);
        let described = attribute(DeviceAttribute::Target)
            .and_then(|target| Ok((target, attribute(DeviceAttribute::MemoryScopes)?)))
            .and_then(|(target, scopes)| DeviceDescription::from_attributes(device, target, scopes));
        described.unwrap_or_else(|error| {
            tracing::warn!(%device, %error, "a device did not report its target and memory scopes");
            DeviceDescription { device, target: Target::of_device(device.kind), memory_scopes: Vec::new() }
        })
    }

    /// Returns a device that satisfies a constraint: `preferred` if it does, otherwise the first
    /// one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`], with a list of the devices.
    pub fn choose(&self, wanted: &VirtualDevice, preferred: Device) -> Result<Device> {
        // An empty constraint needs no question to the driver.
        if wanted.is_fully_unconstrained()
            || (self.get(preferred).is_ok() && self.describe_one(preferred).satisfies(wanted))
        {
            return Ok(preferred);
        }
        let found = self.describe().find(|device| device.satisfies(wanted));
        found.map(|device| device.device).ok_or_else(|| {
            let devices = self.describe().map(|device| device.to_string()).collect::<Vec<_>>().join(", ");
            RpcError::new(ErrorKind::DeviceUnavailable, format!("no device is {wanted}; there are {devices}"))
        })
    }

    /// Returns every kind that is offered or known to be absent, by number, with its API or the
    /// reason.
    pub fn iter(&self) -> impl Iterator<Item = (DeviceType, Result<&Arc<dyn DeviceApi>, &str>)> {
        self.kinds.iter().map(|(kind, api)| (*kind, api.as_ref().map_err(String::as_str)))
    }
}

impl Default for Devices {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(kind, api)| (kind.to_string(), api.map(|api| api.count())))).finish()
    }
}

/// Returns the error for a device index that is out of range, for implementations of [`DeviceApi`].
pub fn out_of_range(device: Device, count: i32) -> RpcError {
    RpcError::new(ErrorKind::DeviceUnavailable, format!("no {device}: there are {count} devices of that kind"))
}

/// Copies between two memories, each of which is host memory or can be copied to and from it: the
/// default of [`DeviceApi::copy`], and the slow path of devices that have a faster one for their
/// own memory.
///
/// # Errors
///
/// Those of the two memories' own copies.
///
/// # Safety
///
/// As [`DeviceApi::copy`].
pub unsafe fn copy_by_host(
    from: &dyn Memory,
    from_offset: u64,
    to: &dyn Memory,
    to_offset: u64,
    len: u64,
) -> Result<()> {
    match (from.host(), to.host()) {
        (Some(source), Some(target)) => {
            // SAFETY: `Memory` promises valid pointers; the caller promises that the ranges lie
            // within them and that nothing else interferes; offsets of host memory fit `usize`.
            // `copy` allows overlap.
            unsafe {
                source.add(from_offset as usize).copy_to(target.add(to_offset as usize), len as usize);
            }
            Ok(())
        }
        (Some(source), None) => {
            // SAFETY: as above. The slice is only read, and not written: `to` is another memory.
            unsafe {
                let data = std::slice::from_raw_parts(source.add(from_offset as usize).as_ptr(), len as usize);
                to.copy_from_host(to_offset, data)
            }
        }
        (None, Some(target)) => {
            // SAFETY: as above. Nothing else accesses the destination, so that the slice is
            // exclusive.
            unsafe {
                let out = std::slice::from_raw_parts_mut(target.add(to_offset as usize).as_ptr(), len as usize);
                from.copy_to_host(from_offset, out)
            }
        }
        (None, None) => {
            let mut bounce = vec![0; len.min(BOUNCE_BYTES) as usize];
            // If the destination overlaps the source's end, the end has to be copied first.
            let backwards = std::ptr::addr_eq(from, to) && to_offset > from_offset;
            let mut done = 0;
            while done < len {
                let step = (len - done).min(BOUNCE_BYTES);
                let at = if backwards { len - done - step } else { done };
                let chunk = &mut bounce[..step as usize];
                // SAFETY: a part of each range, under the caller's promises.
                unsafe {
                    from.copy_to_host(from_offset + at, chunk)?;
                    to.copy_from_host(to_offset + at, chunk)?;
                }
                done += step;
            }
            Ok(())
        }
    }
}

/// Bytes of the bounce buffer: large enough to keep a bus busy, small enough to allocate.
const BOUNCE_BYTES: u64 = 1 << 20;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Memory that the processor cannot access, like that of a GPU.
    pub(crate) struct Remote(Mutex<Vec<u8>>);

    impl Remote {
        pub(crate) fn new(bytes: impl Into<Vec<u8>>) -> Self {
            Self(Mutex::new(bytes.into()))
        }
    }

    // SAFETY: there is no host pointer, and the length never changes.
    unsafe impl Memory for Remote {
        fn len(&self) -> u64 {
            self.0.lock().unwrap().len() as u64
        }

        fn host(&self) -> Option<NonNull<u8>> {
            None
        }

        unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
            self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }

        unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
            out.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..out.len()]);
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn contents(memory: &dyn Memory) -> Vec<u8> {
        let mut out = vec![0; memory.len() as usize];
        // SAFETY: the whole memory, which nothing else uses.
        unsafe { memory.copy_to_host(0, &mut out).unwrap() };
        out
    }

    #[test]
    fn attributes_keep_their_numbers_and_names() {
        for attribute in DeviceAttribute::ALL {
            assert_eq!(DeviceAttribute::from_code(attribute.code()), Some(*attribute));
            assert_eq!(attribute.name().parse::<DeviceAttribute>().unwrap(), *attribute);
        }
        assert_eq!(DeviceAttribute::ComputeUnits.code(), 7);
        assert_eq!(DeviceAttribute::AvailableMemory.code(), 15);
        assert_eq!(DeviceAttribute::from_code(999), None);
        assert!("wings".parse::<DeviceAttribute>().unwrap_err().message().contains("warp_size"));
    }

    #[test]
    fn the_error_for_an_absent_kind_gives_the_reason() {
        let devices = Devices::new().absent(DeviceType::CUDA, "libcuda.so.1 was not found");
        assert!(devices.get(Device::cpu()).is_ok());
        let error = devices.get(Device::cuda(0)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().contains("libcuda.so.1 was not found"));
        let error = devices.get(Device::new(DeviceType::METAL, 0)).err().unwrap();
        assert_eq!(error.message(), "no metal: this session does not offer it");
        for index in [1, -1] {
            let error = devices.get(Device::new(DeviceType::CPU, index)).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        }
        let kinds: Vec<_> = devices.iter().map(|(kind, api)| (kind, api.err())).collect();
        assert_eq!(kinds, [(DeviceType::CPU, None), (DeviceType::CUDA, Some("libcuda.so.1 was not found"))]);
    }

    #[test]
    fn existence_is_answered_for_every_device() {
        let devices = Devices::new().absent(DeviceType::CUDA, "no driver");
        let exists = |device| devices.attribute(device, DeviceAttribute::Exists).unwrap();
        assert_eq!(exists(Device::cpu()), Value::Bool(true));
        assert_eq!(exists(Device::new(DeviceType::CPU, 7)), Value::Bool(false));
        assert_eq!(exists(Device::cuda(0)), Value::Bool(false));
        assert!(devices.attribute(Device::cuda(0), DeviceAttribute::Name).is_err());
    }

    #[test]
    fn copies_pass_between_host_and_device_in_all_directions() {
        let cpu = CpuDevice::default();
        let host = cpu.allocate(0, &AllocRequest::new(8)).unwrap();
        let other = cpu.allocate(0, &AllocRequest::new(8)).unwrap();
        let device = Remote::new([1, 2, 3, 4, 5, 6, 7, 8]);
        let second = Remote::new([0; 8]);
        // SAFETY: all ranges lie within 8 bytes, and nothing else uses the memories.
        unsafe {
            cpu.copy(&device, 2, &*host, 1, 4).unwrap();
            cpu.copy(&*host, 0, &*other, 2, 6).unwrap();
            cpu.copy(&*other, 0, &device, 0, 8).unwrap();
            cpu.copy(&device, 3, &second, 0, 5).unwrap();
        }
        assert_eq!(contents(&*host), [0, 3, 4, 5, 6, 0, 0, 0]);
        assert_eq!(contents(&device), [0, 0, 0, 3, 4, 5, 6, 0]);
        assert_eq!(contents(&second), [3, 4, 5, 6, 0, 0, 0, 0]);
    }

    #[test]
    fn overlapping_copies_keep_what_the_source_held() {
        let len = 3 * BOUNCE_BYTES as usize + 5;
        let pattern: Vec<u8> = (0..len).map(|byte| (byte % 251) as u8).collect();
        let shift = 1000;
        for (from, to) in [(0, shift), (shift, 0)] {
            let memory = Remote::new(pattern.clone());
            // SAFETY: both ranges end within the memory, which nothing else uses.
            unsafe { copy_by_host(&memory, from as u64, &memory, to as u64, (len - shift) as u64).unwrap() };
            assert_eq!(contents(&memory)[to..][..len - shift], pattern[from..][..len - shift]);
        }
    }

    #[test]
    fn the_preferred_device_is_chosen_if_it_satisfies_the_constraint_and_else_the_first() {
        let devices = Devices::new().absent(DeviceType::CUDA, "no driver");
        assert_eq!(devices.describe().map(|device| device.device).collect::<Vec<_>>(), [Device::cpu()]);
        let choose = |wanted: &str, preferred| devices.choose(&wanted.parse().unwrap(), preferred);
        // Without a constraint the preferred device is not examined.
        assert_eq!(choose("*", Device::cuda(3)).unwrap(), Device::cuda(3));
        assert_eq!(choose("cpu,target=llvm", Device::cuda(3)).unwrap(), Device::cpu());
        let error = choose("cuda", Device::cpu()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceUnavailable);
        assert!(error.message().starts_with("no device is cuda; there are cpu:0 'llvm -mtriple="), "{error}");
    }
}
