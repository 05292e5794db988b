/* A libtvm_ffi.so of an ABI that is not spoken here. */
#include <tvm/ffi/c_api.h>

__attribute__((visibility("default"))) void TVMFFIGetVersion(TVMFFIVersion *out) {
  out->major = 0;
  out->minor = 9;
  out->patch = 3;
}
