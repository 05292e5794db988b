/* A module that needs a symbol which nobody has. */
#include <tvm/ffi/c_api.h>

int nobody_has_this(void);
__attribute__((visibility("default"))) int __tvm_ffi_call(void *self, const TVMFFIAny *args, int32_t count,
                                                          TVMFFIAny *result) {
  return nobody_has_this();
}
