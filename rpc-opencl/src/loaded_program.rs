//! A program of kernels on one device.

use std::ptr;

use opencl3::program::{
    CL_PROGRAM_BINARIES, CL_PROGRAM_BINARY_SIZES, CL_PROGRAM_BUILD_LOG, CL_PROGRAM_KERNEL_NAMES, build_program,
    create_program_with_binary, create_program_with_source, get_program_build_data, get_program_data, get_program_info,
};
use opencl3::types::cl_program;

use crate::device_list::text;
use crate::handle::ProgramHandle;
use crate::opened_device::OpenedDevice;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// Code of a program.
pub(super) enum ProgramCode {
    /// Text in OpenCL C.
    Source(String),
    /// Result of the driver of one device for a source.
    Binary(Vec<u8>),
}

/// A program that has been built for one device.
pub(super) struct LoadedProgram {
    pub(super) device: &'static OpenedDevice,
    handle: ProgramHandle,
}

impl LoadedProgram {
    /// Builds the code for a device.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] with the compiler's log, and errors of the device.
    pub(super) fn new(device: &'static OpenedDevice, code: &ProgramCode) -> Result<Self> {
        let listed = device.listed;
        listed.check_not_lost()?;
        let raw = match code {
            ProgramCode::Source(source) => {
                // The length 0 would mean a text that ends at a zero.
                if source.is_empty() {
                    return Err(RpcError::invalid_argument("the source is empty"));
                }
                let created = create_program_with_source(device.context(), &[source]);
                listed.check("clCreateProgramWithSource", created)?
            }
            ProgramCode::Binary(binary) if binary.is_empty() => {
                return Err(RpcError::invalid_argument("the binary is empty"));
            }
            ProgramCode::Binary(binary) => {
                // SAFETY: there is one device and one binary, which the driver copies.
                let created = unsafe { create_program_with_binary(device.context(), &[listed.id()], &[binary]) };
                listed
                    .check("clCreateProgramWithBinary", created)
                    .map_err(|error| error.context("the file is no binary of this device's driver"))?
            }
        };
        let program = Self { device, handle: ProgramHandle::new(raw) };
        // Without the option the driver would not describe the parameters of kernels.
        let built = build_program(raw, &[listed.id()], c"-cl-kernel-arg-info", None, ptr::null_mut());
        listed.check("clBuildProgram", built).map_err(|error| program.explain(error))?;
        Ok(program)
    }

    pub(super) fn raw(&self) -> cl_program {
        self.handle.raw()
    }

    /// Returns the names of the kernels.
    pub(super) fn kernel_names(&self) -> Result<Vec<String>> {
        let names = get_program_data(self.raw(), CL_PROGRAM_KERNEL_NAMES);
        let names = text(&self.device.listed.check("clGetProgramInfo", names)?);
        Ok(names.split(';').filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }

    /// Returns what the driver has made of the source, for this driver and device.
    pub(super) fn binary(&self) -> Result<Vec<u8>> {
        let found = get_program_info(self.raw(), CL_PROGRAM_BINARIES);
        let binaries = self.device.listed.check("clGetProgramInfo", found)?.to_vec_vec_uchar();
        let binary = binaries.into_iter().next().filter(|binary| !binary.is_empty());
        binary.ok_or_else(|| RpcError::unsupported(format!("{} has no binaries", self.device.listed.as_device())))
    }

    /// Returns the size in bytes of what the driver has made of the code; 0 if it does not tell.
    pub(super) fn size(&self) -> u64 {
        let found = get_program_info(self.raw(), CL_PROGRAM_BINARY_SIZES).ok();
        found.map_or(0, |sizes| sizes.to_vec_size().into_iter().map(|size| size as u64).sum())
    }

    /// Adds the compiler's log to the error of a build.
    fn explain(&self, error: RpcError) -> RpcError {
        if error.kind() == ErrorKind::DeviceLost {
            return error;
        }
        let log = get_program_build_data(self.raw(), self.device.listed.id(), CL_PROGRAM_BUILD_LOG);
        let log = text(&log.unwrap_or_default());
        let log = shortened(&log);
        if log.is_empty() { error } else { error.context(log) }
    }
}

/// Returns the beginning of a log: the first errors are those that matter.
fn shortened(log: &str) -> &str {
    let mut end = log.len().min(MAX_LOG_BYTES);
    while !log.is_char_boundary(end) {
        end -= 1;
    }
    &log[..end]
}

/// Largest part of a compiler's log that an error has, in bytes.
const MAX_LOG_BYTES: usize = 8 << 10;
