/* Functions in plain C against TVM-FFI's C interface alone, for the tests of modules. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))
#define FUNCTION(name) \
  EXPORT int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

static int fail(const char *kind, const char *message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

static const DLTensor *tensor(const TVMFFIAny *arg) {
  if (arg->type_index == kTVMFFIDLTensorPtr) return arg->v_ptr;
  if (arg->type_index == kTVMFFITensor) return (const DLTensor *)((const char *)arg->v_obj + sizeof(TVMFFIObject));
  return NULL;
}

static void give_int(TVMFFIAny *result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

/* Nothing at all, for measurements. */
FUNCTION(empty) { return 0; }

/* The same, for the thread of the lane. */
FUNCTION(empty_blocking) { return 0; }

FUNCTION(rpc_inline) {
  const char names[] = "empty, calls_inline";
  TVMFFIByteArray array = {names, sizeof names - 1};
  return TVMFFIStringFromByteArray(&array, result);
}

/* The first argument called with the others, from a function that promises not to block. */
FUNCTION(calls_inline) { return TVMFFIFunctionCall(args[0].v_obj, (TVMFFIAny *)args + 1, count - 1, result); }

/* y = factor * x, of dense tensors of float32 in host memory. */
FUNCTION(scale) {
  if (count != 3) return fail("TypeError", "scale takes x, y and a factor");
  const DLTensor *x = tensor(&args[0]), *y = tensor(&args[1]);
  if (!x || !y || args[2].type_index != kTVMFFIFloat) return fail("TypeError", "scale takes two tensors and a float");
  if (x->dtype.code != kDLFloat || x->dtype.bits != 32 || y->dtype.code != kDLFloat || y->dtype.bits != 32)
    return fail("TypeError", "scale takes tensors of float32");
  if (x->device.device_type != kDLCPU || y->device.device_type != kDLCPU)
    return fail("ValueError", "scale works in host memory");
  int64_t elements = 1, others = 1;
  for (int i = 0; i < x->ndim; ++i) elements *= x->shape[i];
  for (int i = 0; i < y->ndim; ++i) others *= y->shape[i];
  if (elements != others) return fail("ValueError", "x and y differ in size");
  const float *from = (const float *)((const char *)x->data + x->byte_offset);
  float *to = (float *)((char *)y->data + y->byte_offset);
  for (int64_t i = 0; i < elements; ++i) to[i] = (float)args[2].v_float64 * from[i];
  return 0;
}

/* The address of the first element, and of what is behind it. */
FUNCTION(address) {
  const DLTensor *x = tensor(&args[0]);
  if (!x) return fail("TypeError", "address takes a tensor");
  give_int(result, (int64_t)(intptr_t)x->data + (int64_t)x->byte_offset);
  return 0;
}

/* The type index of an argument. */
FUNCTION(type_index) {
  give_int(result, args[0].type_index);
  return 0;
}

/* An address, which is nobody else's business. */
FUNCTION(pointer) {
  static int place;
  result->type_index = kTVMFFIOpaquePtr;
  result->zero_padding = 0;
  result->v_ptr = &place;
  return 0;
}

FUNCTION(same_pointer) {
  TVMFFIAny own;
  __tvm_ffi_pointer(NULL, NULL, 0, &own);
  result->type_index = kTVMFFIBool;
  result->zero_padding = 0;
  result->v_int64 = args[0].type_index == kTVMFFIOpaquePtr && args[0].v_ptr == own.v_ptr;
  return 0;
}

FUNCTION(fails_silently) { return -1; }
FUNCTION(fails_of_memory) { return fail("MemoryError", "there is none"); }
FUNCTION(segfaults) { *(volatile int *)8 = 1; return 0; }
FUNCTION(aborts) { abort(); }
FUNCTION(exits) { exit(7); }
FUNCTION(never_returns) { for (volatile int64_t i = 0;; ++i) {} }

/* Takes memory until there is none, and touches it. */
FUNCTION(eats_memory) {
  for (;;) {
    char *piece = malloc(16 << 20);
    if (!piece) abort();
    memset(piece, 1, 16 << 20);
  }
}

/* Overflows the stack, unless the compiler sees through it. */
static int64_t deeper(volatile int64_t *above) {
  volatile int64_t here[64];
  here[0] = above[0] + 1;
  return here[0] < 0 ? 0 : deeper(here) + here[1];
}
FUNCTION(overflows_the_stack) {
  volatile int64_t zero[1] = {0};
  give_int(result, deeper(zero));
  return 0;
}

/* A function that is held beyond the call, and called by the next one. */
static TVMFFIObjectHandle kept;
FUNCTION(keep) {
  if (args[0].type_index != kTVMFFIFunction) return fail("TypeError", "keep takes a function");
  TVMFFIObjectIncRef(args[0].v_obj);
  if (kept) TVMFFIObjectDecRef(kept);
  kept = args[0].v_obj;
  return 0;
}
FUNCTION(call_kept) {
  if (!kept) return fail("RuntimeError", "nothing is kept");
  return TVMFFIFunctionCall(kept, (TVMFFIAny *)args, count, result);
}
FUNCTION(forget_kept) {
  if (kept) TVMFFIObjectDecRef(kept);
  kept = NULL;
  return 0;
}
