//! Memory of tensors in this process, to and from numpy, torch, jax and all others that speak
//! DLPack.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyDict, PyMemoryView, PyTuple};
use pyo3::{IntoPyObjectExt as _, ffi};
use rpc_core::dlpack::{dense_size, dense_strides};
use rpc_core::{DataTypeCode, Device, DeviceType, TensorView};

use crate::array_memory::ArrayMemory;
use crate::buffer;
use crate::types::DataType;

const CAPSULE: &CStr = c"dltensor";

/// Name of capsules with a [`DlManagedTensorVersioned`].
const VERSIONED_CAPSULE: &CStr = c"dltensor_versioned";

/// Flag of versioned tensors: the memory must not be written to.
const READ_ONLY: u64 = 1;

/// DLPack's `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// DLPack's `DLManagedTensor`.
#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// DLPack's `DLManagedTensorVersioned`, of major version 1.
#[repr(C)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// An array that a user gives: its elements, densely packed.
pub(crate) struct Array {
    pub(crate) dtype: rpc_core::DataType,
    pub(crate) shape: Vec<i64>,
    /// The array's own memory if it is dense, or else a copy.
    pub(crate) bytes: Bytes,
}

/// A tensor of an exporter. It is not taken out of its capsule, whose destructor gives it back: the
/// last user may be a thread that holds locks of a session and must not wait for the interpreter,
/// and for it the capsule is freed later.
struct Exported {
    tensor: NonNull<DlTensor>,
    _capsule: Py<PyCapsule>,
}

// SAFETY: DLPack lets any thread read the tensor, and the capsule may be dropped on any thread.
unsafe impl Send for Exported {}

/// Shape and size of an exported tensor.
struct Layout {
    shape: Vec<i64>,
    dtype: rpc_core::DataType,
    /// Size in bytes of the elements, densely packed.
    len: usize,
    /// Strides in elements; `None` if the tensor is densely packed.
    strides: Option<Vec<i64>>,
}

impl Exported {
    fn of_capsule(capsule: Bound<'_, PyAny>) -> PyResult<Self> {
        let capsule = capsule.cast_into::<PyCapsule>()?;
        // The tensor is the first field of a `DlManagedTensor`.
        let tensor = capsule.pointer_checked(Some(CAPSULE))?.cast();
        Ok(Self { tensor, _capsule: capsule.unbind() })
    }

    /// Takes a capsule of either form by `exporter`, if its memory may be written to.
    fn of_writable_capsule(exporter: &Bound<'_, PyAny>, capsule: Bound<'_, PyAny>) -> PyResult<Self> {
        let is_versioned =
            capsule.cast::<PyCapsule>().is_ok_and(|capsule| capsule.is_valid_checked(Some(VERSIONED_CAPSULE)));
        if !is_versioned {
            return if is_immutable(exporter) {
                Err(cannot_be_written("it is immutable"))
            } else {
                Self::of_capsule(capsule)
            };
        }
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let managed = capsule.pointer_checked(Some(VERSIONED_CAPSULE))?.cast::<DlManagedTensorVersioned>().as_ptr();
        // SAFETY: the capsule keeps a tensor that is alive, and each begins with its version.
        let major = unsafe { (*managed).major };
        if major != 1 {
            return Err(PyValueError::new_err(format!("the array speaks version {major} of DLPack, and not 1")));
        }
        // SAFETY: the fields of version 1.
        let (flags, tensor) = unsafe { ((*managed).flags, &raw mut (*managed).tensor) };
        if flags & READ_ONLY != 0 {
            return Err(cannot_be_written("it is read-only"));
        }
        // SAFETY: a field of what is not null.
        let tensor = unsafe { NonNull::new_unchecked(tensor) };
        Ok(Self { tensor, _capsule: capsule.unbind() })
    }

    fn layout(&self) -> PyResult<Layout> {
        // SAFETY: this owns a tensor that is alive.
        let tensor = unsafe { self.tensor.as_ref() };
        check_on_host(tensor.device_type, tensor.device_id)?;
        let dims =
            usize::try_from(tensor.ndim).map_err(|_| PyValueError::new_err("a negative number of dimensions"))?;
        let dims_of = |pointer: *mut i64| {
            // SAFETY: both arrays have `ndim` elements where they are not null.
            if dims == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(pointer, dims) } }
        };
        let dtype = rpc_core::DataType { code: DataTypeCode(tensor.code), bits: tensor.bits, lanes: tensor.lanes };
        let shape = dims_of(tensor.shape).to_vec();
        let size = |error: rpc_core::RpcError| PyValueError::new_err(error.message().to_owned());
        let len = dense_size(&shape, dtype).map_err(size)? as usize;
        let strides = (!tensor.strides.is_null()).then(|| dims_of(tensor.strides));
        let has_gaps = |strides: &&[i64]| {
            let dense = dense_strides(&shape);
            len > 0 && (0..dims).any(|at| shape[at] != 1 && strides[at] != dense[at])
        };
        let strides = strides.filter(has_gaps).map(<[i64]>::to_vec);
        Ok(Layout { shape, dtype, len, strides })
    }
}

/// Memory of an array of the user, to be written.
pub(crate) struct WritableArray {
    pub(crate) dtype: rpc_core::DataType,
    pub(crate) shape: Vec<i64>,
    exported: Exported,
    len: usize,
}

impl WritableArray {
    /// Takes an object with `__dlpack__`, dense and in host memory, that lets others write.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !object.hasattr(intern!(object.py(), "__dlpack__"))? {
            let class = object.get_type().qualname()?;
            return Err(PyTypeError::new_err(format!(
                "an array with __dlpack__ is wanted, and this is one of {class}"
            )));
        }
        if object.cast::<DenseArray>().is_ok_and(|array| array.get().is_read_only) {
            return Err(cannot_be_written("it is borrowed for reading"));
        }
        check_device(object)?;
        let (py, dlpack) = (object.py(), object.getattr(intern!(object.py(), "__dlpack__"))?);
        // The first version of DLPack has no flag for memory that is read-only.
        let version = PyDict::new(py);
        version.set_item("max_version", (1, 0))?;
        let capsule = match dlpack.call((), Some(&version)) {
            // The exporter is older than the parameter.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => dlpack.call0(),
            capsule => capsule,
        };
        let capsule = capsule.map_err(|error| match error.is_instance_of::<PyBufferError>(py) {
            true => cannot_be_written(error.value(py)),
            false => error,
        })?;
        let exported = Exported::of_writable_capsule(object, capsule)?;
        let Layout { shape, dtype, len, strides } = exported.layout()?;
        match strides {
            None => Ok(Self { dtype, shape, exported, len }),
            Some(_) => Err(PyValueError::new_err("the array is not densely packed in row-major order")),
        }
    }

    /// Returns the memory as bytes that a writer shares: see [`bytes_mut`](Self::bytes_mut).
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Dense { exported: self.exported, len: self.len })
    }

    /// Returns the memory. As for numpy's own functions that release the lock, it is up to the user
    /// that no other thread uses the array meanwhile.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the exporter keeps the memory alive until the deleter is called, and lets others
        // write `len` bytes.
        unsafe {
            let tensor = self.exported.tensor.as_ref();
            std::slice::from_raw_parts_mut(tensor.data.cast::<u8>().add(tensor.byte_offset as usize), self.len)
        }
    }
}

/// Fails for an array that is not in host memory.
fn check_device(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let Ok(device) = object.call_method0("__dlpack_device__") else { return Ok(()) };
    let (kind, index): (i32, i32) = device.extract()?;
    check_on_host(kind, index)
}

/// Fails for memory of a device that is not host memory.
fn check_on_host(kind: i32, index: i32) -> PyResult<()> {
    if [DeviceType::CPU, DeviceType::CUDA_HOST, DeviceType::CUDA_MANAGED].contains(&DeviceType(kind)) {
        return Ok(());
    }
    let device = Device::new(DeviceType(kind), index);
    Err(PyValueError::new_err(format!("the array lies on {device}: move it to the host first (.cpu())")))
}

/// Returns true for an array that nobody may write to, although its capsule, which is of the first
/// version, cannot say so: a read-only buffer, and any array of jax, which exports no other form.
fn is_immutable(object: &Bound<'_, PyAny>) -> bool {
    let module = object.get_type().module().map(|name| name.to_string()).unwrap_or_default();
    if matches!(module.split('.').next(), Some("jax" | "jaxlib")) {
        return true;
    }
    let view = PyMemoryView::from(object);
    view.and_then(|view| view.getattr(intern!(object.py(), "readonly"))?.extract()).unwrap_or(false)
}

fn cannot_be_written(reason: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("the array cannot be written: {reason}"))
}

/// Dense memory of an exporter.
struct Dense {
    exported: Exported,
    len: usize,
}

impl AsRef<[u8]> for Dense {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as for every reader of DLPack, the exporter keeps the memory alive until the
        // deleter is called. That nobody writes meanwhile is up to the user, as for numpy's own
        // functions that release the lock.
        let tensor = unsafe { self.exported.tensor.as_ref() };
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `len` is the size of the dense tensor that begins there.
        unsafe { std::slice::from_raw_parts(tensor.data.cast::<u8>().add(tensor.byte_offset as usize), self.len) }
    }
}

impl Array {
    /// Takes an object with `__dlpack__`, in host memory.
    pub(crate) fn from_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        check_device(object)?;
        let is_buffer_error = |error: &PyErr| error.is_instance_of::<PyBufferError>(object.py());
        let capsule = match object.call_method0("__dlpack__") {
            // numpy exports no read-only arrays to readers that could write.
            Err(error) if is_buffer_error(&error) && object.hasattr("copy")? => {
                object.call_method0("copy")?.call_method0("__dlpack__")
            }
            capsule => capsule,
        };
        let capsule = capsule.map_err(|error| match is_buffer_error(&error) {
            true => PyTypeError::new_err(format!("this array has no form as a tensor: {}", error.value(object.py()))),
            false => error,
        })?;
        Self::from_exported(Exported::of_capsule(capsule)?)
    }

    fn from_exported(exported: Exported) -> PyResult<Self> {
        let Layout { shape, dtype, len, strides } = exported.layout()?;
        // SAFETY: `Exported` owns a tensor that is alive.
        let tensor = unsafe { exported.tensor.as_ref() };
        let bytes = match strides {
            Some(strides) => {
                let element = dtype.bits_per_element();
                if !element.is_multiple_of(8) {
                    return Err(PyValueError::new_err(format!("an array of {dtype} with gaps cannot be copied")));
                }
                let mut dense = Vec::new();
                // Zero strides let a small array have a huge shape.
                dense
                    .try_reserve_exact(len)
                    .map_err(|_| PyMemoryError::new_err(format!("{len} bytes for an array")))?;
                // SAFETY: the exporter vouches for all elements of its shape and strides.
                unsafe {
                    let first = tensor.data.cast::<u8>().add(tensor.byte_offset as usize);
                    gather(first, &shape, &strides, element as usize / 8, &mut dense);
                }
                dense.into()
            }
            None => Bytes::from_owner(Dense { exported, len }),
        };
        Ok(Self { dtype, shape, bytes })
    }

    /// Takes a view of an object with a buffer and without `__dlpack__`, by a copy.
    pub(crate) fn from_buffer(view: &Bound<'_, PyAny>) -> PyResult<Self> {
        let format: String = view.getattr("format")?.extract()?;
        let bits = view.getattr("itemsize")?.extract::<u64>()?.saturating_mul(8);
        let code = match format.trim_start_matches(['@', '=', '<']) {
            "b" | "h" | "i" | "l" | "q" | "n" => DataTypeCode::INT,
            "B" | "H" | "I" | "L" | "Q" | "N" => DataTypeCode::UINT,
            "e" | "f" | "d" => DataTypeCode::FLOAT,
            "?" => DataTypeCode::BOOL,
            other => return Err(PyTypeError::new_err(format!("no data type has the buffer format {other:?}"))),
        };
        let bits = u8::try_from(bits).map_err(|_| PyTypeError::new_err("no data type has elements of this size"))?;
        let shape: Vec<i64> = view.getattr("shape")?.extract()?;
        let bytes = buffer::bytes(view)?;
        Ok(Self { dtype: rpc_core::DataType::new(code, bits), shape, bytes })
    }
}

/// Appends the elements of a strided array in row-major order.
///
/// # Safety
///
/// All elements that `shape` and `strides` (in elements) name from `at` on can be read.
unsafe fn gather(at: *const u8, shape: &[i64], strides: &[i64], element: usize, out: &mut Vec<u8>) {
    let ([len, shape @ ..], [stride, strides @ ..]) = (shape, strides) else {
        // SAFETY: one element lies there.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(at, element) });
        return;
    };
    for index in 0..*len {
        // SAFETY: the caller vouches for it.
        unsafe { gather(at.offset((index * stride) as isize * element as isize), shape, strides, element, out) };
    }
}

/// Memory of a tensor in this process: what array libraries read and write without a copy.
///
/// ``numpy.from_dlpack`` and ``torch.from_dlpack`` take it. The memory lives as long as this or any
/// array made from it.
#[pyclass(frozen, module = "tensor_rpc")]
pub(crate) struct DenseArray {
    owner: Arc<dyn Any + Send + Sync>,
    address: usize,
    len: usize,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    dtype: rpc_core::DataType,
    device: Device,
    /// True if the memory is only borrowed for reading.
    is_read_only: bool,
}

impl DenseArray {
    /// Describes memory that `owner` keeps. `len` is that of the elements, densely packed.
    pub(crate) fn over(
        owner: Arc<dyn Any + Send + Sync>,
        address: usize,
        len: usize,
        shape: Vec<i64>,
        strides: Option<Vec<i64>>,
        dtype: rpc_core::DataType,
        device: Device,
    ) -> Self {
        Self { owner, address, len, shape, strides, dtype, device, is_read_only: false }
    }

    /// Returns what keeps the memory.
    pub(crate) fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// Takes bytes that hold a dense tensor.
    pub(crate) fn new(bytes: BytesMut, shape: Vec<i64>, dtype: rpc_core::DataType) -> Self {
        let owner = Arc::new(ArrayMemory::new(bytes));
        let (address, len) = (owner.as_slice().as_ptr() as usize, owner.as_slice().len());
        Self::over(owner, address, len, shape, None, dtype, Device::cpu())
    }

    /// Takes a tensor of this process, borrowed for reading for as long as an array uses it.
    ///
    /// # Errors
    ///
    /// It is not densely packed in host memory.
    pub(crate) fn of_view(view: TensorView) -> rpc_core::Result<Self> {
        let bytes = view.bytes()?;
        let (address, len) = (bytes.as_ptr() as usize, bytes.len());
        let (shape, dtype) = (view.shape().to_vec(), view.dtype());
        let array = Self::over(Arc::new(view), address, len, shape, None, dtype, Device::cpu());
        Ok(Self { is_read_only: true, ..array })
    }
}

/// Description and memory of an exported tensor.
struct Export {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _owner: Arc<dyn Any + Send + Sync>,
}

/// Frees an exported tensor.
///
/// # Safety
///
/// `managed` is the first field of an [`Export`] that came from a box, and this is called once.
unsafe extern "C" fn free_export(managed: *mut DlManagedTensor) {
    // SAFETY: `manager` is the pointer of the box.
    drop(unsafe { Box::from_raw((*managed).manager.cast::<Export>()) });
}

/// Frees the tensor of a capsule that nobody has taken.
///
/// # Safety
///
/// For capsules that [`DenseArray::__dlpack__`] has made.
unsafe extern "C" fn free_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: a live capsule; those that were taken have another name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, CAPSULE.as_ptr()) == 1 {
            free_export(ffi::PyCapsule_GetPointer(capsule, CAPSULE.as_ptr()).cast());
        }
    }
}

#[pymethods]
impl DenseArray {
    /// Dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Type of the elements.
    #[getter]
    fn dtype(&self) -> DataType {
        DataType(self.dtype)
    }

    /// Copies the elements, densely packed and row-major.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if self.device != Device::cpu() {
            return Err(PyValueError::new_err(format!("the memory lies on {}", self.device)));
        }
        let (first, element) = (self.address as *const u8, self.dtype.bits_per_element() as usize / 8);
        match &self.strides {
            Some(strides) => {
                // The memory is counted already; what a view repeats of it is not.
                if self.session_view().is_some_and(|view| self.len as u64 > view.tensor.storage().len()) {
                    return Err(PyValueError::new_err(format!(
                        "a view of shape {:?} repeats elements: copied, it would have {} bytes, more than its memory",
                        self.shape, self.len
                    )));
                }
                let address = self.address;
                let dense = py.detach(|| {
                    let mut dense = Vec::new();
                    dense.try_reserve_exact(self.len).ok()?;
                    // SAFETY: `owner` keeps the memory of all elements.
                    unsafe { gather(address as *const u8, &self.shape, strides, element, &mut dense) };
                    Some(dense)
                });
                let dense = dense.ok_or_else(|| PyMemoryError::new_err(format!("no memory for {} bytes", self.len)))?;
                Ok(PyBytes::new(py, &dense))
            }
            None if self.len == 0 => Ok(PyBytes::new(py, b"")),
            // SAFETY: `owner` keeps `len` bytes there.
            None => Ok(PyBytes::new(py, unsafe { std::slice::from_raw_parts(first, self.len) })),
        }
    }

    /// Device that holds the memory.
    #[getter]
    fn device(&self) -> crate::types::Device {
        crate::types::Device(self.device)
    }

    /// Returns an array of numpy over the same memory.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("tensor_rpc._arrays")?.getattr("to_numpy")?.call1((slf,))
    }

    /// Returns a tensor of torch over the same memory.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("tensor_rpc._arrays")?.getattr("to_torch")?.call1((slf,))
    }

    /// Copies the elements into nested lists; needs no numpy.
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("tensor_rpc._arrays")?.getattr("to_list")?.call1((slf,))
    }

    /// Description of the memory for numpy, which may write to it.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let kind = match self.dtype.code {
            DataTypeCode::INT => "i",
            DataTypeCode::UINT => "u",
            DataTypeCode::FLOAT => "f",
            DataTypeCode::BOOL => "b",
            DataTypeCode::COMPLEX => "c",
            _ => "",
        };
        let bytes = self.dtype.bits / 8;
        let known = if kind == "c" { 8..=16 } else { 1..=8 };
        let is_known = !kind.is_empty() && self.dtype.lanes == 1 && bytes.is_power_of_two() && known.contains(&bytes);
        if !is_known || self.device != Device::cpu() {
            return Err(pyo3::exceptions::PyAttributeError::new_err(format!(
                "numpy knows no {} on {}",
                self.dtype, self.device
            )));
        }
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        let order = if cfg!(target_endian = "big") { '>' } else { '<' };
        interface.set_item("typestr", format!("{}{kind}{bytes}", if bytes == 1 { '|' } else { order }))?;
        interface.set_item("shape", self.shape(py)?)?;
        // An address of no bytes need not be one, and numpy takes no 0 for one.
        interface.set_item("data", (if self.address == 0 { 1 } else { self.address }, false))?;
        if let Some(strides) = &self.strides {
            let strides: Vec<i64> = strides.iter().map(|stride| stride * i64::from(bytes)).collect();
            interface.set_item("strides", PyTuple::new(py, strides)?)?;
        }
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (self.device.kind.0, self.device.index)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Host memory has no streams, and every reader takes the first version.
        let _ = (stream, max_version);
        let (py, this) = (slf.py(), slf.get());
        if dl_device.is_some_and(|device| device != this.__dlpack_device__()) {
            return Err(PyBufferError::new_err(format!(
                "the memory lies on {}, and is not copied elsewhere",
                this.device
            )));
        }
        if copy == Some(true) {
            let copied = BytesMut::from(this.tobytes(py)?.as_bytes());
            let copied = Bound::new(py, Self::new(copied, this.shape.clone(), this.dtype))?;
            return Self::__dlpack__(&copied, None, None, None, None);
        }
        let strides = this.strides.clone().unwrap_or_else(|| dense_strides(&this.shape));
        let tensor = DlTensor {
            data: this.address as *mut c_void,
            device_type: this.device.kind.0,
            device_id: this.device.index,
            ndim: this.shape.len() as i32,
            code: this.dtype.code.0,
            bits: this.dtype.bits,
            lanes: this.dtype.lanes,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let managed = DlManagedTensor { tensor, manager: std::ptr::null_mut(), deleter: Some(free_export) };
        let export = Box::new(Export { managed, shape: this.shape.clone(), strides, _owner: this.owner.clone() });
        let export = Box::into_raw(export);
        // SAFETY: the box was just made; its fields stay where they are.
        let capsule = unsafe {
            (*export).managed.tensor.shape = (*export).shape.as_mut_ptr();
            (*export).managed.tensor.strides = (*export).strides.as_mut_ptr();
            (*export).managed.manager = export.cast();
            ffi::PyCapsule_New((&raw mut (*export).managed).cast(), CAPSULE.as_ptr(), Some(free_capsule))
        };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.inspect_err(|_| {
            // SAFETY: no capsule has it.
            drop(unsafe { Box::from_raw(export) });
        })
    }

    /// Returns the same memory with unsigned integers as elements, for libraries without the type.
    fn bits(&self) -> Self {
        let dtype = rpc_core::DataType { code: DataTypeCode::UINT, ..self.dtype };
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        Self { owner: self.owner.clone(), shape, strides, dtype, ..*self }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("DenseArray(shape={}, dtype={})", self.shape(py)?.into_bound_py_any(py)?.repr()?, self.dtype))
    }
}
