//! Owners of OpenCL's objects, which release them on drop.

use opencl3::command_queue::release_command_queue;
use opencl3::context::context::release_context;
use opencl3::error_codes::error_text;
use opencl3::event::release_event;
use opencl3::kernel::release_kernel;
use opencl3::memory::release_mem_object;
use opencl3::program::release_program;
use opencl3::types::{cl_command_queue, cl_context, cl_event, cl_kernel, cl_mem, cl_program};

macro_rules! owners {
    ($($(#[$doc:meta])* $owner:ident, $raw:ty, $release:path;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub(super) struct $owner($raw);

            impl $owner {
                /// Takes over one reference to the object.
                pub(super) fn new(raw: $raw) -> Self {
                    Self(raw)
                }

                /// Returns the object, which is valid for as long as `self`.
                pub(super) fn raw(&self) -> $raw {
                    self.0
                }
            }

            impl Drop for $owner {
                fn drop(&mut self) {
                    if self.0.is_null() {
                        return;
                    }
                    // SAFETY: the reference is this value's own, and is given up once.
                    if let Err(code) = unsafe { $release(self.0) } {
                        tracing::debug!(error = error_text(code), concat!(stringify!($release), " failed"));
                    }
                }
            }

            // SAFETY: OpenCL's objects may be used from any thread.
            unsafe impl Send for $owner {}
            // SAFETY: all functions but `clSetKernelArg` may be called at the same time; the users
            // of kernels hold a lock.
            unsafe impl Sync for $owner {}
        )*
    };
}

owners! {
    /// A context: the objects of one device.
    ContextHandle, cl_context, release_context;
    /// A queue of commands.
    QueueHandle, cl_command_queue, release_command_queue;
    /// A buffer. The driver keeps its memory until submitted commands that use it are done.
    BufferHandle, cl_mem, release_mem_object;
    /// An event. Its command goes on when it is released.
    EventHandle, cl_event, release_event;
    /// A program.
    ProgramHandle, cl_program, release_program;
    /// A kernel of a program, which it keeps alive.
    KernelHandle, cl_kernel, release_kernel;
}

impl BufferHandle {
    /// Returns a value that owns nothing.
    pub(super) fn none() -> Self {
        Self(std::ptr::null_mut())
    }
}
