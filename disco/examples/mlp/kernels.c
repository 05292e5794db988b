/* The kernels of the example: a module of TVM-FFI, in C against its headers alone. */
#include <stdint.h>
#include <tvm/ffi/c_api.h>

#define KERNEL(name) \
  __attribute__((visibility("default"))) int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

/* A densely packed matrix of float32 in host memory; NULL if the argument is anything else. */
static const DLTensor *matrix(const TVMFFIAny *arg) {
  if (arg->type_index != kTVMFFIDLTensorPtr) return 0;
  const DLTensor *t = arg->v_ptr;
  int fits = t->device.device_type == kDLCPU && t->dtype.code == kDLFloat && t->dtype.bits == 32 && t->dtype.lanes == 1 &&
             t->ndim == 2 && t->strides[1] == 1 && t->strides[0] == t->shape[1];
  return fits ? t : 0;
}

static int refuse(const char *message) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", message);
  return -1;
}

/* y = x w */
KERNEL(matmul) {
  const DLTensor *x, *w, *y;
  if (count != 3 || !(x = matrix(&args[0])) || !(w = matrix(&args[1])) || !(y = matrix(&args[2])))
    return refuse("matmul takes three dense matrices of float32 in host memory");
  int64_t rows = x->shape[0], inner = x->shape[1], columns = w->shape[1];
  if (w->shape[0] != inner || y->shape[0] != rows || y->shape[1] != columns)
    return refuse("matmul: the shapes of x, w and y do not go together");
  const float *from = x->data, *weights = w->data;
  float *to = y->data;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[i * columns + j] = 0;
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t j = 0; j < columns; ++j) to[i * columns + j] += from[i * inner + k] * weights[k * columns + j];
  }
  return 0;
}

/* x = max(x, 0) */
KERNEL(relu) {
  const DLTensor *x;
  if (count != 1 || !(x = matrix(&args[0]))) return refuse("relu takes a dense matrix of float32 in host memory");
  float *values = x->data;
  for (int64_t i = 0; i < x->shape[0] * x->shape[1]; ++i) values[i] = values[i] > 0 ? values[i] : 0;
  return 0;
}
