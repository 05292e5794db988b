//! Tensors in foreign code: borrowed as `DLTensor`, shared as tensor objects, and taken over from
//! foreign code.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::abi::{self, DlTensor, ManagedTensor, slice_of};
use super::api::Api;
use super::call_frame;
use super::object::Ref;
use super::taking_lock::TakingGuard;
use rpc_core::dlpack::{self, DataType, Device, DeviceType, dense_strides};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::Context;
use rpc_core::tensor::{Layout, Storage, Tensor};

/// Description of a tensor that foreign code borrows for one call.
pub(super) struct BorrowedTensor {
    tensor: DlTensor,
    _dimensions: Dimensions,
}

impl BorrowedTensor {
    /// Describes a tensor, which must be borrowed for as long as foreign code uses it. Nothing is
    /// copied.
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

/// Shape and strides that a description points to; they may be moved.
struct Dimensions {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

/// Describes a tensor. The description is valid for as long as the returned dimensions. The data
/// pointer is that of the first element: much compiled code supports no other offset.
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

/// Creates a tensor object over the same storage. It keeps the memory alive while foreign code
/// holds it, and borrows nothing.
pub(super) fn share(api: &'static Api, tensor: &Tensor) -> Result<Ref> {
    let managed = manage(tensor)?;
    // SAFETY: it is complete.
    unsafe { api.tensor(managed) }
}

/// Creates a managed tensor over the same storage, which its owner must delete.
///
/// # Errors
///
/// As [`BorrowedTensor::new`].
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

/// Allocation of [`manage`]. The part that foreign code sees comes first.
#[repr(C)]
struct Managed {
    managed: ManagedTensor,
    _dimensions: Dimensions,
    storage: Arc<Storage>,
}

/// # Safety
///
/// `managed` is from [`manage`], and is no longer in use.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: it was created by leaking such a box.
    drop(unsafe { Box::from_raw(managed.cast::<Managed>()) });
}

/// Storages that foreign code shares, by their address: a tensor that comes back is recognised by
/// its address, so that no two storages have the same bytes.
static SHARED: Mutex<SharedStorages> = Mutex::new(SharedStorages { storages: BTreeMap::new(), swept: 0 });

fn shared() -> MutexGuard<'static, SharedStorages> {
    SHARED.lock()
}

struct SharedStorages {
    /// Shared storages, including those that are gone, until they are removed.
    storages: BTreeMap<usize, Weak<Storage>>,
    /// Number of storages after the last removal.
    swept: usize,
}

impl SharedStorages {
    fn note(&mut self, storage: &Arc<Storage>) {
        let Some(address) = storage.memory().device_address() else { return };
        self.storages.insert(address.addr().get(), Arc::downgrade(storage));
        if self.storages.len() > 2 * self.swept + 64 {
            self.storages.retain(|_, storage| storage.strong_count() > 0);
            self.swept = self.storages.len();
        }
    }

    /// Returns the storages that may overlap the bytes from `start` to `end`: the nearest one
    /// below, and all within. The caller must examine and drop them without the lock: the last
    /// reference to one may be among them, and freeing it may call this again.
    fn around(&self, start: usize, end: usize) -> Vec<Arc<Storage>> {
        // A storage that is gone hides none below it: live storages do not overlap.
        let below = self.storages.range(..=start).rev().find_map(|(_, storage)| storage.upgrade());
        let within = self.storages.range(start..end).filter_map(|(_, storage)| storage.upgrade());
        below.into_iter().chain(within).collect()
    }
}

/// Returns the address of the storage, if it has bytes on that device.
fn start_of(storage: &Storage, device: Device) -> Option<usize> {
    let start = storage.memory().device_address()?.addr().get();
    (storage.device() == device && !storage.is_empty()).then_some(start)
}

fn lies_in(storage: &Storage, device: Device, address: usize) -> bool {
    let offset = start_of(storage, device).and_then(|start| address.checked_sub(start));
    offset.is_some_and(|offset| (offset as u64) < storage.len())
}

/// Checked contents of a `DLTensor`.
struct Described<'a> {
    device: Device,
    dtype: DataType,
    shape: &'a [i64],
    strides: Option<&'a [i64]>,
    /// Address of the first element.
    address: *mut u8,
    /// Bytes from there to the end of the last element.
    extent: u64,
}

impl<'a> Described<'a> {
    /// # Safety
    ///
    /// The data that `tensor` points to are valid for as long as it is borrowed.
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
            return Err(RpcError::invalid_argument("a tensor has no memory"));
        }
        Ok(Self { device: tensor.device.into(), dtype, shape, strides, address, extent })
    }

    /// Returns the session's tensor with these bytes, if they lie in a storage that foreign code
    /// was given or has given. Leaves the storages that it has looked at in `examined`: the last
    /// reference to one may be among them.
    fn recognise(&self, examined: &mut Vec<Arc<Storage>>) -> Option<Result<Tensor>> {
        if self.extent == 0 {
            return None;
        }
        let address = self.address.addr();
        let lent = || {
            let frame = call_frame::current()?;
            frame.storages.iter().find(|storage| lies_in(storage, self.device, address)).cloned()
        };
        let end = address.saturating_add(self.extent as usize);
        let touches = |storage: &Arc<Storage>| {
            let begins_within = start_of(storage, self.device).is_some_and(|start| (address..end).contains(&start));
            begins_within || lies_in(storage, self.device, address)
        };
        let storage = lent().or_else(|| {
            *examined = shared().around(address, end);
            examined.iter().find(|storage| touches(storage)).cloned()
        })?;
        let start = start_of(&storage, self.device)?;
        if address < start || (end - start) as u64 > storage.len() {
            return Some(Err(overlaps()));
        }
        let strides = self.strides.map(<[i64]>::to_vec);
        Some(Tensor::new(storage, (address - start) as u64, self.shape, strides, self.dtype))
    }
}

/// Error for a tensor that would give a second access to the bytes of another one.
fn overlaps() -> RpcError {
    RpcError::unsupported(
        "foreign code returned a tensor that overlaps another one of the session and reaches beyond it: release \
         that one first, or have the larger one returned first",
    )
}

/// Returns the tensor of a tensor object: the session's own if it lies in one of its storages, and
/// otherwise one over the object's memory, which counts against the session's from now on.
///
/// The lock under which tensors are taken over is not held while anything is freed that foreign
/// code allocated: its deleter may call in here, or wait for a thread that does.
pub(super) fn take(context: &Context, object: Ref) -> Result<Tensor> {
    // Declared before the lock, so that what they hold is freed after it is released.
    let object = Arc::new(object);
    let mut examined = Vec::new();
    let Some(tensor) = object.tensor() else { return Err(RpcError::internal("an object that is no tensor")) };
    // SAFETY: a tensor object keeps its data alive.
    let described = unsafe { Described::read(tensor)? };
    let Some(start) = NonNull::new(described.address).filter(|_| described.extent > 0) else {
        return context.allocate(described.device, described.dtype, described.shape);
    };
    // A tensor that two threads are given at once is taken over once.
    let _one_at_a_time = TakingGuard::lock();
    if let Some(known) = described.recognise(&mut examined) {
        return known;
    }
    let Described { device, dtype, shape, strides, extent, .. } = described;
    let (shape, strides) = (shape.to_vec(), strides.map(<[i64]>::to_vec));
    let api = context.devices().get(device)?;
    // SAFETY: the object owns these bytes, and lives until the memory is dropped. Modules are
    // documented not to access them from now on, except in calls with the tensor.
    let memory = unsafe { api.adopt(device.index, start, extent as usize, Box::new(object.clone()))? };
    let layout = Layout { byte_offset: 0, shape: &shape, strides: strides.as_deref(), dtype };
    let tensor = context.adopt(device, memory, layout)?;
    shared().note(tensor.storage());
    Ok(tensor)
}

/// Returns the tensor of a borrowed `DLTensor`: the session's own if it lies in one of its
/// storages, and otherwise a copy, since nothing would keep it alive.
///
/// # Safety
///
/// The data that `tensor` points to are valid.
pub(super) unsafe fn copy(context: &Context, tensor: &DlTensor) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    let described = unsafe { Described::read(tensor)? };
    if let Some(known) = described.recognise(&mut Vec::new()) {
        return known;
    }
    if described.device.kind != DeviceType::CPU {
        let device = described.device;
        return Err(RpcError::unsupported(format!(
            "foreign code passed its own tensor on {device} as a DLTensor: it must pass a tensor object"
        )));
    }
    let copy = context.allocate(described.device, described.dtype, described.shape)?;
    if described.extent > 0 {
        // SAFETY: the computed extent of the elements.
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
    // Strided tensors have elements of whole bytes, which `strided_extent` has checked.
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
