// A library of global functions, for servers that are started with it.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("tests.triple", [](int64_t x) { return 3 * x; })
      .def("tests.greet", [](tvm::ffi::String name) { return tvm::ffi::String("hello ") + name; });
}
