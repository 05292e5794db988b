//! Compiled modules and libraries with the ABI of [TVM-FFI](https://github.com/apache/tvm-ffi):
//! from TVM, TileLang and the CuTe DSL, or from C and C++ compiled against its headers.

mod abi;
mod allocator;
mod api;
mod arguments;
mod bindings;
mod call_frame;
mod callback;
mod elf;
mod failure;
mod function;
mod lane_stream;
mod libraries;
mod loader;
mod locate_library;
mod module;
mod object;
mod options;
mod signature;
mod taking_lock;
mod tensor;
mod value;

pub use loader::TvmFfi;
pub use options::TvmFfiOptions;
