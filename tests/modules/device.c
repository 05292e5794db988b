/* Functions that work on a CUDA device, by the driver of the process, on the stream of their caller. */
#include <dlfcn.h>
#include <stdint.h>
#include <tvm/ffi/extra/c_env_api.h>

#define EXPORT __attribute__((visibility("default")))
#define FUNCTION(name) \
  EXPORT int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

static int fail(const char *message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

/* Submits a fill of bytes on the device of a tensor, and does not wait for it. */
static int submit_fill(const DLTensor *like, uint64_t to, int64_t value, int64_t bytes) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  int (*fill)(uint64_t, unsigned char, size_t, void *) =
      driver ? (int (*)(uint64_t, unsigned char, size_t, void *))dlsym(driver, "cuMemsetD8Async") : NULL;
  if (!fill) return fail("there is no driver");
  void *stream = TVMFFIEnvGetStream(like->device.device_type, like->device.device_id);
  return fill(to, (unsigned char)value, (size_t)bytes, stream) ? fail("the driver refuses to fill") : 0;
}

/* Fills a tensor of bytes with a value; with a function behind that, calls it with the tensor. */
FUNCTION(fill) {
  const DLTensor *x = args[0].type_index == kTVMFFIDLTensorPtr ? args[0].v_ptr : NULL;
  if (!x || x->ndim != 1) return fail("fill takes a tensor of bytes");
  if (submit_fill(x, (uint64_t)x->data + x->byte_offset, args[1].v_int64, x->shape[0])) return -1;
  return count > 2 ? TVMFFIFunctionCall(args[2].v_obj, (TVMFFIAny *)args, 1, result) : 0;
}

/* Fills memory that there is not, on the device of a tensor. */
FUNCTION(trap) {
  const DLTensor *x = args[0].type_index == kTVMFFIDLTensorPtr ? args[0].v_ptr : NULL;
  return x ? submit_fill(x, 16, 0, 16) : fail("trap takes a tensor");
}
