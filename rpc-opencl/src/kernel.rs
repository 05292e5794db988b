//! Kernels: their parameters and their launch.

use std::ffi::{CString, c_void};
use std::ptr;

use opencl3::command_queue::enqueue_nd_range_kernel;
use opencl3::device::{CL_DEVICE_EXTENSIONS, CL_DEVICE_LOCAL_MEM_SIZE, CL_DEVICE_MAX_WORK_ITEM_SIZES};
use opencl3::error_codes::CL_INVALID_KERNEL_NAME;
use opencl3::kernel::{
    CL_KERNEL_ARG_ADDRESS_QUALIFIER, CL_KERNEL_ARG_NAME, CL_KERNEL_ARG_TYPE_NAME, CL_KERNEL_LOCAL_MEM_SIZE,
    CL_KERNEL_NUM_ARGS, CL_KERNEL_WORK_GROUP_SIZE, create_kernel, get_kernel_arg_data, get_kernel_data,
    get_kernel_work_group_data, set_kernel_arg,
};
use opencl3::types::{cl_kernel, cl_mem};
use parking_lot::Mutex;

use crate::device_list::{number, text};
use crate::event::Event;
use crate::handle::{BufferHandle, KernelHandle};
use crate::loaded_program::LoadedProgram;
use crate::memory::OpenClMemory;
use crate::opened_device::OpenedDevice;
use crate::parameter::{Argument, Parameter};
use crate::stream::OpenClStream;
use crate::stream_order;
use rpc_core::device::Memory;
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{LocalValue, Object};
use rpc_core::tensor::Tensor;
use rpc_core::value::Value;

/// A kernel on one device.
pub(super) struct Kernel {
    device: &'static OpenedDevice,
    /// Locked from its first argument to its launch: arguments are state of OpenCL's kernel.
    raw: Mutex<KernelHandle>,
    pub(super) parameters: Vec<Parameter>,
    /// Largest number of work-items in a group, limited by the kernel's registers.
    max_group: u64,
    /// Largest number of work-items of a group in each dimension.
    max_local: Vec<u64>,
    /// Bytes of local memory that a group has for the arguments.
    free_local: u64,
}

/// Numbers of work-items in up to three dimensions.
#[derive(Debug, PartialEq, Eq)]
struct Extent(Vec<usize>);

impl Kernel {
    /// Looks up a kernel of a program by its name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](rpc_core::ErrorKind::NotFound); `Unsupported` for a kernel with a
    /// parameter that clients cannot give; errors of the device.
    pub(super) fn find(program: &LoadedProgram, name: &str) -> Result<Self> {
        let (device, listed) = (program.device, program.device.listed);
        listed.check_not_lost()?;
        let absent = || RpcError::not_found("the module has no such kernel");
        let symbol = CString::new(name).map_err(|_| absent())?;
        let created = create_kernel(program.raw(), &symbol);
        if created == Err(CL_INVALID_KERNEL_NAME) {
            return Err(absent());
        }
        let raw = KernelHandle::new(listed.check("clCreateKernel", created)?);
        let count = listed.check("clGetKernelInfo", get_kernel_data(raw.raw(), CL_KERNEL_NUM_ARGS))?;
        let count = number(&count).unwrap_or(0) as u32;
        let has_half = listed.text(CL_DEVICE_EXTENSIONS).split_whitespace().any(|name| name == "cl_khr_fp16");
        let parameters = (0..count).map(|index| parameter(raw.raw(), index, has_half)).collect::<Result<_>>()?;
        let max_group = get_kernel_work_group_data(raw.raw(), listed.id(), CL_KERNEL_WORK_GROUP_SIZE);
        let max_group = max_group.ok().and_then(|bytes| number(&bytes)).unwrap_or(u64::MAX);
        // None of the kernel's arguments is set, so this is what it declares itself.
        let own_local = get_kernel_work_group_data(raw.raw(), listed.id(), CL_KERNEL_LOCAL_MEM_SIZE);
        let own_local = own_local.ok().and_then(|bytes| number(&bytes)).unwrap_or(0);
        let local_memory = listed.number(CL_DEVICE_LOCAL_MEM_SIZE).unwrap_or(0);
        let free_local = local_memory.saturating_sub(own_local);
        let sizes = listed.property(CL_DEVICE_MAX_WORK_ITEM_SIZES);
        let max_local = sizes.chunks_exact(size_of::<usize>()).filter_map(number).collect();
        Ok(Self { device, raw: Mutex::new(raw), parameters, max_group, max_local, free_local })
    }

    /// Starts the kernel on a stream of its device, or on the default one. `args` are the numbers
    /// of work-items in all and in a group, and the kernel's own parameters. Returns once the
    /// kernel has been submitted. If the processor reaches the memory of one of the tensors,
    /// returns once the kernel is done.
    ///
    /// The caller holds the borrows of all tensors until then. Their memory cannot be reused before
    /// the kernel is done, because the pool follows the order of the streams.
    pub(super) fn launch(&self, stream: Option<&OpenClStream>, args: &[LocalValue]) -> Result<()> {
        let [global, local, values @ ..] = args else {
            return Err(RpcError::invalid_argument(
                "expected the global size, the local size or null, and the parameters",
            ));
        };
        let (global, local) = self.extents(global, local)?;
        if values.len() != self.parameters.len() {
            let (wanted, given) = (self.parameters.len(), values.len());
            return Err(RpcError::invalid_argument(format!("expected {wanted} parameters, got {given}")));
        }
        let mut memories = Vec::new();
        let mut arguments = Vec::new();
        for (index, (parameter, value)) in self.parameters.iter().zip(values).enumerate() {
            let argument = parameter.argument(value).and_then(|argument| {
                if let Argument::Tensor(tensor) = &argument {
                    memories.push(self.own_memory(tensor)?);
                }
                Ok(argument)
            });
            arguments.push(argument.map_err(|error| error.context(format_args!("parameter {index}")))?);
        }

        self.check_local_memory(&arguments)?;

        let listed = self.device.listed;
        listed.check_not_lost()?;
        let stream = stream.filter(|stream| ptr::eq(stream.listed(), listed));
        let stream = stream.unwrap_or(&self.device.default_stream);
        stream_order::in_order(self.device, stream, &memories, || {
            let kernel = self.raw.lock();
            let mut parts = Vec::new();
            for (index, argument) in arguments.iter().enumerate() {
                self.set(kernel.raw(), index as u32, argument, &mut parts)
                    .map_err(|error| error.context(format_args!("parameter {index}")))?;
            }
            let local = local.as_ref().map_or(ptr::null(), |local| local.0.as_ptr());
            let (queue, dimensions) = (stream.raw(), global.0.len() as u32);
            // SAFETY: the queue and the kernel are alive, all of its arguments have been set under
            // the lock, and the numbers have as many dimensions. The driver keeps the buffers until
            // the kernel is done.
            let launched = unsafe {
                let (offset, global) = (ptr::null(), global.0.as_ptr());
                enqueue_nd_range_kernel(queue, kernel.raw(), dimensions, offset, global, local, 0, ptr::null())
            };
            drop(kernel);
            let end = stream.note(Event::of(listed, "clEnqueueNDRangeKernel", launched)?);
            stream.note_kernel(&end);
            Ok(end)
        })
    }

    /// Returns the device of the kernel.
    pub(super) fn device(&self) -> Device {
        self.device.listed.as_device()
    }

    /// Sets an argument. Buffers that are made for it are added to `parts`, which lives until the
    /// kernel has been submitted.
    fn set(&self, kernel: cl_kernel, index: u32, argument: &Argument<'_>, parts: &mut Vec<BufferHandle>) -> Result<()> {
        let set = |bytes: &[u8]| {
            // SAFETY: the driver reads as many bytes as it is given, if they are as many as the
            // parameter has. They are a number, a vector or a struct: `find` has refused kernels
            // with objects of the driver.
            unsafe { set_kernel_arg(kernel, index, bytes.len(), bytes.as_ptr().cast()) }
        };
        let set_buffer = |buffer: cl_mem| {
            let value: *const cl_mem = &raw const buffer;
            // SAFETY: as above; the buffer, if there is one, is alive.
            unsafe { set_kernel_arg(kernel, index, size_of::<cl_mem>(), value.cast::<c_void>()) }
        };
        let outcome = match argument {
            Argument::Tensor(tensor) => set_buffer(buffer_of(tensor, parts)?),
            Argument::Null => set_buffer(ptr::null_mut()),
            // SAFETY: local memory has a size and no value.
            Argument::Local(bytes) => unsafe { set_kernel_arg(kernel, index, *bytes, ptr::null()) },
            Argument::Bytes(bytes) => set(bytes),
        };
        self.device.listed.check("clSetKernelArg", outcome)
    }

    /// Checks that a group has the local memory that the arguments ask for.
    fn check_local_memory(&self, arguments: &[Argument<'_>]) -> Result<()> {
        let bytes = arguments.iter().map(|argument| match argument {
            Argument::Local(bytes) => *bytes as u64,
            _ => 0,
        });
        let asked = bytes.fold(0_u64, u64::saturating_add);
        if asked <= self.free_local {
            return Ok(());
        }
        let text = format!("{asked} bytes of local memory were asked for, and a group has {}", self.free_local);
        Err(RpcError::invalid_argument(text))
    }

    /// Returns the memory of a tensor, which must be on the kernel's device and dense.
    fn own_memory<'a>(&self, tensor: &'a Tensor) -> Result<&'a OpenClMemory> {
        if !tensor.is_dense() {
            return Err(RpcError::invalid_argument(
                "expected a densely packed tensor, since a kernel does not see strides",
            ));
        }
        let memory = memory(tensor)?;
        if ptr::eq(memory.opened(), self.device) {
            Ok(memory)
        } else {
            let (device, own) = (memory.device(), self.device());
            Err(RpcError::invalid_argument(format!("the tensor is on {device}, but others are on {own}")))
        }
    }

    fn extents(&self, global: &LocalValue, local: &LocalValue) -> Result<(Extent, Option<Extent>)> {
        let global = extent("global size", global)?;
        if matches!(local, Value::Null) {
            return Ok((global, None));
        }
        let local = extent("local size", local)?;
        if local.0.len() != global.0.len() {
            return Err(RpcError::invalid_argument(
                "the global and the local size have different numbers of dimensions",
            ));
        }
        for (dimension, (all, group)) in global.0.iter().zip(&local.0).enumerate() {
            if let Some(most) = self.max_local.get(dimension).filter(|most| *group as u64 > **most) {
                let text = format!("dimension {dimension} of the local size is {group}, above {most}");
                return Err(RpcError::invalid_argument(text));
            }
            if !all.is_multiple_of(*group) {
                let text = format!(
                    "dimension {dimension} of the global size is {all}, not a multiple of the local one, {group}"
                );
                return Err(RpcError::invalid_argument(text));
            }
        }
        let group = local.0.iter().try_fold(1_u64, |product, count| product.checked_mul(*count as u64));
        if group.is_none_or(|group| group > self.max_group) {
            let text = format!("a group of {:?} work-items exceeds the kernel's limit of {}", local.0, self.max_group);
            return Err(RpcError::invalid_argument(text));
        }
        Ok((global, Some(local)))
    }
}

/// Returns the memory of a tensor on an OpenCL device.
pub(super) fn memory(tensor: &Tensor) -> Result<&OpenClMemory> {
    let memory = tensor.storage().memory().as_any().downcast_ref();
    memory.ok_or_else(|| {
        let (expected, got) = (DeviceType::OPENCL, tensor.device());
        RpcError::invalid_argument(format!("expected a tensor on {expected}, got one on {got}"))
    })
}

/// Returns the buffer of a tensor; null if it has no elements. One that is made for it is added to
/// `parts`.
fn buffer_of(tensor: &Tensor, parts: &mut Vec<BufferHandle>) -> Result<cl_mem> {
    let memory = memory(tensor)?;
    if tensor.size_bytes() == 0 || memory.is_empty() {
        return Ok(ptr::null_mut());
    }
    if tensor.byte_offset() == 0 {
        return Ok(memory.raw());
    }
    let part = memory.part(tensor.byte_offset(), tensor.size_bytes())?;
    let raw = part.raw();
    parts.push(part);
    Ok(raw)
}

/// Returns the description of a parameter.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`](rpc_core::ErrorKind::Unsupported), if the driver has none, or if the
/// parameter takes something else than memory and values.
fn parameter(kernel: cl_kernel, index: u32, has_half: bool) -> Result<Parameter> {
    let about = |property| get_kernel_arg_data(kernel, index, property).ok();
    let name = about(CL_KERNEL_ARG_NAME).map(|name| text(&name)).unwrap_or_default();
    let address = about(CL_KERNEL_ARG_ADDRESS_QUALIFIER).and_then(|address| number(&address));
    let type_name = about(CL_KERNEL_ARG_TYPE_NAME).map(|name| text(&name)).filter(|name| !name.is_empty());
    let described = match address.zip(type_name) {
        Some((address, type_name)) => Parameter::new(address as u32, &type_name, has_half),
        None => Err(RpcError::unsupported("the driver does not describe it")),
    };
    described.map_err(|error| error.context(format_args!("parameter {index} '{name}'")))
}

fn extent(name: &str, value: &LocalValue) -> Result<Extent> {
    let wanted = match value {
        Value::Int(count) => std::slice::from_ref(count),
        Value::Shape(shape) if (1..=3).contains(&shape.len()) => shape,
        Value::Object(Object::Tensor(tensor)) => {
            let text = format!("expected the {name} first, got a tensor of {:?}", tensor.shape());
            return Err(RpcError::invalid_argument(text));
        }
        _ => {
            let given = value.type_name();
            let text = format!("expected the {name} as a shape of one to three dimensions, or an int, got {given}");
            return Err(RpcError::invalid_argument(text));
        }
    };
    let count = |(dimension, count): (usize, &i64)| {
        usize::try_from(*count).ok().filter(|count| *count > 0).ok_or_else(|| {
            RpcError::invalid_argument(format!("dimension {dimension} of the {name} is {count}, not 1 or more"))
        })
    };
    wanted.iter().enumerate().map(count).collect::<Result<_>>().map(Extent)
}
