//! Tensors, as foreign code sees them: lent as `DLTensor`, shared as tensor objects, and taken over.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::abi::{self, DlTensor, ManagedTensor};
use super::api::Api;
use super::frame;
use super::object::{Ref, slice_of};
use rpc_core::dlpack::{self, DataType, Device, DeviceType, dense_strides};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::Context;
use rpc_core::tensor::{Layout, Storage, Tensor};

/// A description of a tensor that is lent to foreign code for one call.
pub(super) struct Lent {
    tensor: DlTensor,
    _dimensions: Dimensions,
}

impl Lent {
    /// The tensor must be borrowed for as long as it is lent. Nothing is copied.
    ///
    /// # Errors
    ///
    /// The tensor's device has no addresses.
    pub(super) fn new(tensor: &Tensor) -> Result<Box<Self>> {
        let (_dimensions, tensor) = describe(tensor)?;
        Ok(Box::new(Self { tensor, _dimensions }))
    }

    pub(super) fn pointer(&self) -> *mut c_void {
        (&raw const self.tensor).cast_mut().cast()
    }
}

/// What the pointers of a description point to, wherever this moves.
struct Dimensions {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

/// The description of a tensor, good for as long as the dimensions beside it. The first element is where the data begin: much
/// compiled code takes no other offset.
fn describe(tensor: &Tensor) -> Result<(Dimensions, DlTensor)> {
    let start = match tensor.storage().memory().device_address() {
        Some(start) => start.as_ptr(),
        None if tensor.storage().is_empty() => ptr::null_mut(),
        None => {
            let device = tensor.device();
            return Err(RpcError::unsupported(format!(
                "a tensor on {device} has no address that foreign code could use"
            )));
        }
    };
    let shape: Box<[i64]> = tensor.shape().into();
    let strides = tensor.strides().map_or_else(|| dense_strides(&shape), <[i64]>::to_vec).into_boxed_slice();
    let mut dimensions = Dimensions { shape, strides };
    let description = DlTensor {
        // A null pointer is that of a storage without bytes, where every offset is 0.
        data: start.wrapping_add(tensor.byte_offset() as usize).cast(),
        device: tensor.device().into(),
        // No tensor has more dimensions than `MAX_DIMENSIONS`.
        ndim: dimensions.shape.len() as i32,
        dtype: tensor.dtype().into(),
        shape: dimensions.shape.as_mut_ptr(),
        strides: dimensions.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    Ok((dimensions, description))
}

/// A tensor object over the same storage. It keeps the memory for as long as foreign code holds it, and borrows nothing.
pub(super) fn share(api: &'static Api, tensor: &Tensor) -> Result<Ref> {
    let managed = manage(tensor)?;
    // SAFETY: it is whole.
    unsafe { api.tensor(managed) }
}

/// The same as a tensor that whoever has it must delete.
///
/// # Errors
///
/// As [`Lent::new`].
pub(super) fn manage(tensor: &Tensor) -> Result<NonNull<ManagedTensor>> {
    let (_dimensions, description) = describe(tensor)?;
    let storage = tensor.storage().clone();
    shared().note(&storage);
    let managed = Box::new(Managed {
        managed: ManagedTensor {
            version: abi::DLPACK_VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete),
            flags: 0,
            tensor: description,
        },
        _dimensions,
        storage,
    });
    Ok(NonNull::from(Box::leak(managed)).cast())
}

/// What [`manage`] makes. The part that foreign code sees comes first.
#[repr(C)]
struct Managed {
    managed: ManagedTensor,
    _dimensions: Dimensions,
    storage: Arc<Storage>,
}

/// # Safety
///
/// `managed` is from [`manage`], and nobody uses it any more.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: it was made by leaking such a box.
    drop(unsafe { Box::from_raw(managed.cast::<Managed>()) });
}

/// The storages that foreign code shares, by their address: a tensor that comes back is known by where it lies, so that no
/// two storages are the same bytes.
static SHARED: Mutex<Shared> = Mutex::new(Shared { storages: BTreeMap::new(), swept: 0 });

fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock()
}

struct Shared {
    /// Also those that are gone, until they are swept out.
    storages: BTreeMap<usize, Weak<Storage>>,
    /// How many there were after that was done last.
    swept: usize,
}

impl Shared {
    fn note(&mut self, storage: &Arc<Storage>) {
        let Some(address) = storage.memory().device_address() else { return };
        self.storages.insert(address.addr().get(), Arc::downgrade(storage));
        if self.storages.len() > 2 * self.swept + 64 {
            self.storages.retain(|_, storage| storage.strong_count() > 0);
            self.swept = self.storages.len();
        }
    }

    /// Those that may lie around the bytes from `start` to `end`: the nearest one below, and all within. To be looked at, and
    /// let go of, without the lock: the last reference to one may be among them, and freeing it may come back here.
    fn around(&self, start: usize, end: usize) -> Vec<Arc<Storage>> {
        // One that is gone hides nothing below it: storages do not overlap while they are alive.
        let below = self.storages.range(..=start).rev().find_map(|(_, storage)| storage.upgrade());
        let within = self.storages.range(start..end).filter_map(|(_, storage)| storage.upgrade());
        below.into_iter().chain(within).collect()
    }
}

/// Where the storage begins, if it has bytes on that device.
fn start_of(storage: &Storage, device: Device) -> Option<usize> {
    let start = storage.memory().device_address()?.addr().get();
    (storage.device() == device && !storage.is_empty()).then_some(start)
}

fn lies_in(storage: &Storage, device: Device, address: usize) -> bool {
    let offset = start_of(storage, device).and_then(|start| address.checked_sub(start));
    offset.is_some_and(|offset| (offset as u64) < storage.len())
}

/// What a `DLTensor` says.
struct Described<'a> {
    device: Device,
    dtype: DataType,
    shape: &'a [i64],
    strides: Option<&'a [i64]>,
    /// Of the first element.
    address: *mut u8,
    /// In bytes, from there to the end of the last one.
    extent: u64,
}

impl<'a> Described<'a> {
    /// # Safety
    ///
    /// What `tensor` points to is there for as long as it is borrowed.
    unsafe fn read(tensor: &'a DlTensor) -> Result<Self> {
        let dtype = DataType::from(tensor.dtype);
        let rank = usize::try_from(tensor.ndim).ok().filter(|rank| *rank <= rpc_core::tensor::MAX_DIMENSIONS);
        let rank =
            rank.ok_or_else(|| RpcError::invalid_argument(format!("a tensor with {} dimensions", tensor.ndim)))?;
        // SAFETY: the caller's promise.
        let (shape, strides) = unsafe {
            (slice_of(tensor.shape, rank), (!tensor.strides.is_null()).then(|| slice_of(tensor.strides, rank)))
        };
        let dense = dlpack::dense_size(shape, dtype)?;
        let extent = match strides {
            Some(strides) if strides != dense_strides(shape) => dlpack::strided_extent(shape, strides, dtype)?,
            _ => dense,
        };
        let address = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        if extent > 0 && (tensor.data.is_null() || isize::try_from(extent).is_err()) {
            return Err(RpcError::invalid_argument("a tensor without memory"));
        }
        Ok(Self { device: tensor.device.into(), dtype, shape, strides, address, extent })
    }

    /// The tensor of a session that this is, if it lies in a storage that foreign code was given or has given.
    fn recognise(&self) -> Option<Result<Tensor>> {
        if self.extent == 0 {
            return None;
        }
        let address = self.address.addr();
        let lent = || {
            let frame = frame::current()?;
            frame.storages.iter().find(|storage| lies_in(storage, self.device, address)).cloned()
        };
        let end = address.saturating_add(self.extent as usize);
        let touches = |storage: &Arc<Storage>| {
            let begins_within = start_of(storage, self.device).is_some_and(|start| (address..end).contains(&start));
            begins_within || lies_in(storage, self.device, address)
        };
        let storage = lent().or_else(|| {
            let around = shared().around(address, end);
            around.into_iter().find(touches)
        })?;
        let start = start_of(&storage, self.device)?;
        if address < start || (end - start) as u64 > storage.len() {
            return Some(Err(overlaps()));
        }
        let strides = self.strides.map(<[i64]>::to_vec);
        Some(Tensor::new(storage, (address - start) as u64, self.shape, strides, self.dtype))
    }
}

/// The error of a tensor that would be a second way to the bytes of another one.
fn overlaps() -> RpcError {
    RpcError::unsupported(
        "foreign code gives a tensor that overlaps another one which the session has, and reaches beyond it: let go of that one \
         first, or have the larger one returned first",
    )
}

/// The tensor of a tensor object: the session's own if it lies in one of its storages, and else one over the object's memory,
/// which counts against the session's from now on.
pub(super) fn take(context: &Context, object: Ref) -> Result<Tensor> {
    let Some(tensor) = object.tensor() else { return Err(RpcError::internal("an object that is no tensor")) };
    // SAFETY: a tensor object has what it describes.
    let described = unsafe { Described::read(tensor)? };
    // What two threads are given at once is taken over once.
    static TAKING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = TAKING.lock();
    if let Some(known) = described.recognise() {
        return known;
    }
    let Described { device, dtype, shape, strides, address, extent } = described;
    let Some(start) = NonNull::new(address).filter(|_| extent > 0) else {
        return context.allocate(device, dtype, shape);
    };
    let (shape, strides) = (shape.to_vec(), strides.map(<[i64]>::to_vec));
    let api = context.devices().get(device)?;
    // SAFETY: the object owns these bytes, and lives until the memory is dropped. That the code which made them leaves them
    // alone from now on, but where it is called with the tensor, is what modules are told to do.
    let memory = unsafe { api.adopt(device.index, start, extent as usize, Box::new(object))? };
    let layout = Layout { byte_offset: 0, shape: &shape, strides: strides.as_deref(), dtype };
    let tensor = context.adopt(device, memory, layout)?;
    shared().note(tensor.storage());
    Ok(tensor)
}

/// The tensor of a `DLTensor` that foreign code lends: the session's own if it lies in one of its storages, and else a copy,
/// since nothing would keep it.
///
/// # Safety
///
/// What `tensor` points to is there.
pub(super) unsafe fn copy(context: &Context, tensor: &DlTensor) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    let described = unsafe { Described::read(tensor)? };
    if let Some(known) = described.recognise() {
        return known;
    }
    if described.device.kind != DeviceType::CPU {
        let device = described.device;
        return Err(RpcError::unsupported(format!(
            "foreign code lends a tensor on {device} that it has allocated itself: it has to pass a tensor object"
        )));
    }
    let copy = context.allocate(described.device, described.dtype, described.shape)?;
    if described.extent > 0 {
        // SAFETY: as far as the elements reach, which has been computed.
        let bytes = unsafe { slice_of(described.address.cast_const(), described.extent as usize) };
        gather(bytes, &described, copy.write()?.bytes_mut()?);
    }
    Ok(copy)
}

/// Writes the elements of `bytes` one behind the other.
fn gather(bytes: &[u8], described: &Described<'_>, into: &mut [u8]) {
    let strides = match described.strides {
        Some(strides) if strides != dense_strides(described.shape) => strides,
        _ => return into.copy_from_slice(&bytes[..into.len()]),
    };
    // Strided tensors have elements of whole bytes, which `strided_extent` has seen to.
    let size = described.dtype.bits_per_element() as usize / 8;
    let mut index = vec![0; described.shape.len()];
    for element in into.chunks_exact_mut(size) {
        let at: i64 = index.iter().zip(strides).map(|(index, stride)| index * stride).sum();
        element.copy_from_slice(&bytes[at as usize * size..][..size]);
        for (index, dimension) in index.iter_mut().zip(described.shape).rev() {
            *index += 1;
            if *index < *dimension {
                break;
            }
            *index = 0;
        }
    }
}
