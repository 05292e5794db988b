//! Kernels: their parameters and their launch.

use std::ffi::{CString, c_int, c_uint};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute_enum as Limit, CUfunc_st, CUfunction_attribute_enum as Attribute, cudaError_enum as Code,
};

use crate::arguments::{self, Arguments};
use crate::gpu::Gpu;
use crate::handle::Handle;
use crate::loaded_module::LoadedModule;
use crate::memory::CudaMemory;
use crate::module_image::ModuleImage;
use crate::opened_gpu::OpenedGpu;
use crate::ptx_signature;
use crate::stream::CudaStream;
use crate::stream_order;
use rpc_core::dlpack::Device;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::{LocalValue, Object};
use rpc_core::value::Value;

/// A kernel on one GPU.
pub(super) struct Kernel {
    gpu: &'static OpenedGpu,
    raw: Handle<CUfunc_st>,
    /// Sizes of the parameters in bytes, if the driver reports them or the module is PTX.
    pub(super) sizes: Option<Vec<usize>>,
    /// True if the driver reports the sizes.
    are_reported: bool,
    /// Largest number of threads in a block, limited by the kernel's registers.
    max_threads: c_int,
    /// Keeps the code loaded.
    module: Arc<LoadedModule>,
}

/// Size of a grid or block in three dimensions.
#[derive(Clone, Copy)]
struct Extent([c_uint; 3]);

impl Kernel {
    /// Looks up a kernel of a module, which was loaded from `image`, by its name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](rpc_core::ErrorKind::NotFound), and errors of the device.
    pub(super) fn find(module: &Arc<LoadedModule>, name: &str, image: &ModuleImage) -> Result<Self> {
        module.gpu.enter()?;
        let gpu = module.gpu.context.gpu;
        let absent = || RpcError::not_found("the module has no such kernel");
        let symbol = CString::new(name).map_err(|_| absent())?;
        let mut raw = ptr::null_mut();
        // SAFETY: there is room for the handle, the module is loaded, and the name ends with a
        // zero.
        let outcome = unsafe { gpu.driver.module_get_function(&raw mut raw, module.raw.0, symbol.as_ptr()) };
        if outcome.is(Code::CUDA_ERROR_NOT_FOUND) {
            return Err(absent());
        }
        gpu.check(outcome)?;
        let mut max_threads = 0;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as u32;
        // SAFETY: there is room for the number.
        gpu.check(unsafe { gpu.driver.func_get_attribute(&raw mut max_threads, attribute, raw) })?;
        let reported = parameter_sizes(gpu, raw)?;
        let are_reported = reported.is_some();
        let sizes = reported.or_else(|| ptx_signature::parameter_sizes(image.ptx()?, name));
        Ok(Self { gpu: module.gpu, raw: Handle(raw), sizes, are_reported, max_threads, module: module.clone() })
    }

    /// Starts the kernel on a stream of its device, or on the default one. `args` are the grid, the
    /// block, the bytes of dynamic shared memory, and the kernel's own parameters. Returns once the
    /// kernel has been submitted. If one of the tensors is in pinned memory, which the processor
    /// may read next, returns once the kernel is done.
    ///
    /// The caller holds the borrows of all tensors until then. Their memory cannot be reused before
    /// the kernel is done, because pools follow the order of the streams.
    pub(super) fn launch(&self, stream: Option<&CudaStream>, args: &[LocalValue]) -> Result<()> {
        let [grid, block, shared_bytes, values @ ..] = args else {
            return Err(RpcError::invalid_argument("expected grid, block, bytes of shared memory, and the parameters"));
        };
        let grid = self.extent("grid", grid, &GRID_LIMITS)?;
        let block = self.extent("block", block, &BLOCK_LIMITS)?;
        let threads: u64 = block.0.iter().map(|count| u64::from(*count)).product();
        if threads > self.max_threads as u64 {
            let most = self.max_threads;
            let text = format!("a block of {threads} threads exceeds the kernel's limit of {most}");
            return Err(RpcError::invalid_argument(text));
        }
        let shared_bytes = match shared_bytes {
            Value::Int(bytes) => c_uint::try_from(*bytes).ok().filter(|bytes| *bytes <= c_int::MAX as c_uint),
            _ => None,
        };
        let shared_bytes = shared_bytes
            .ok_or_else(|| RpcError::invalid_argument("expected the bytes of shared memory as an int of 0 or more"))?;
        let mut packed = Arguments::pack(values, self.sizes.as_deref(), self.are_reported)?;
        let mut memories = Vec::new();
        for (index, memory) in self.memories(values) {
            let memory = memory?;
            memories.push(memory);
            let (device, own) = (memory.device(), self.device());
            if device != own {
                return Err(RpcError::invalid_argument(format!(
                    "parameter {index}: the tensor is on {device}, but others are on {own}"
                )));
            }
        }

        self.gpu.enter()?;
        let gpu = self.gpu.context.gpu;
        self.module.allow_shared(self.raw, shared_bytes)?;
        let mut pointers = packed.pointers();
        let (Extent([grid_x, grid_y, grid_z]), Extent([block_x, block_y, block_z])) = (grid, block);
        let stream = stream.filter(|stream| ptr::eq(stream.gpu(), gpu)).unwrap_or(&self.gpu.default_stream);
        let (function, raw) = (self.raw.0, stream.handle().0);
        let (params, extra) = (pointers.as_mut_ptr(), ptr::null_mut());
        stream_order::in_order(self.gpu, stream, &memories, || {
            // SAFETY: the kernel's module is loaded. The driver copies the parameters before it
            // returns: as many as the kernel has, each of its own size. `Arguments` contains as
            // many, or more than any kernel can have.
            let outcome = unsafe {
                gpu.driver.launch_kernel(
                    function,
                    grid_x,
                    grid_y,
                    grid_z,
                    block_x,
                    block_y,
                    block_z,
                    shared_bytes,
                    raw,
                    params,
                    extra,
                )
            };
            gpu.check(outcome)
        })
    }

    /// Returns the device of the kernel.
    pub(super) fn device(&self) -> Device {
        self.gpu.context.gpu.as_device()
    }

    /// Returns the memories of the tensors among the parameters, with their positions.
    fn memories<'a>(
        &self,
        values: &'a [LocalValue],
    ) -> impl Iterator<Item = (usize, Result<&'a CudaMemory>)> + use<'a> {
        values.iter().enumerate().filter_map(|(index, value)| match value {
            Value::Object(Object::Tensor(tensor)) => Some((index, arguments::memory(tensor))),
            _ => None,
        })
    }

    fn extent(&self, name: &str, value: &LocalValue, limits: &[Limit; 3]) -> Result<Extent> {
        let wanted = match value {
            Value::Int(count) => std::slice::from_ref(count),
            Value::Shape(shape) if (1..=3).contains(&shape.len()) => shape,
            _ => {
                let given = value.type_name();
                let message =
                    format!("expected the {name} as a shape of one to three dimensions, or an int, got {given}");
                return Err(RpcError::invalid_argument(message));
            }
        };
        let mut extent = [1; 3];
        for (dimension, count) in wanted.iter().enumerate() {
            let most = self.gpu.context.gpu.attribute(limits[dimension])?;
            extent[dimension] = c_uint::try_from(*count)
                .ok()
                .filter(|count| (1..=most as c_uint).contains(count))
                .ok_or_else(|| {
                    RpcError::invalid_argument(format!(
                        "dimension {dimension} of the {name} is {count}, not in 1..={most}"
                    ))
                })?;
        }
        Ok(Extent(extent))
    }
}

/// Returns the sizes of a kernel's parameters in bytes; `None` if the driver does not report them.
fn parameter_sizes(gpu: &Gpu, function: *mut CUfunc_st) -> Result<Option<Vec<usize>>> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: there is room for both numbers, and an index behind the last one is an error.
        let outcome = unsafe { gpu.driver.func_get_param_info(function, sizes.len(), &raw mut offset, &raw mut size) };
        match outcome {
            None => return Ok(None),
            Some(outcome) if outcome.is(Code::CUDA_ERROR_INVALID_VALUE) => return Ok(Some(sizes)),
            Some(outcome) => gpu.check(outcome)?,
        }
        sizes.push(size);
    }
}

const GRID_LIMITS: [Limit; 3] = [
    Limit::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    Limit::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
    Limit::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
];

const BLOCK_LIMITS: [Limit; 3] = [
    Limit::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    Limit::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
    Limit::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
];
