/* A cuBLAS for the tests, on the fake driver: one product, computed at once, in the order of its stream. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

typedef char *(*Resolve)(uint64_t, uint64_t);
typedef int (*Synchronize)(void *);

static void *stream;

static void *find(const char *name) {
    return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
}

/* Memory of the device, as much as the driver's own objects take; 0 if it has no more. */
static uint64_t take(void) {
    const char *bytes = getenv("FAKE_CUDA_OVERHEAD");
    uint64_t address = 1;
    if (bytes && ((int (*)(uint64_t *, size_t))find("cuMemAlloc_v2"))(&address, strtoull(bytes, NULL, 0))) return 0;
    return address;
}

EXPORT int cublasCreate_v2(void **handle) { *handle = &stream; return take() ? 0 : 3; }
EXPORT int cublasSetStream_v2(void *handle, void *given) { (void)handle; stream = given; return 0; }
EXPORT const char *cublasGetStatusString(int status) { (void)status; return "the product is not supported"; }

typedef union { uint32_t bits; float value; } Single;

/* CUDA_R_32F is 0, CUDA_R_16F 2, CUDA_R_16BF 14. */
static float load(const void *from, int type, int64_t at) {
    if (type == 0) return ((const float *)from)[at];
    uint32_t bits = ((const uint16_t *)from)[at];
    /* bfloat16 is the upper half of a float. A half has a shorter exponent, which begins 112 higher. */
    Single wide = { type == 14 ? bits << 16 : (bits & 0x7fff) << 13 };
    if (type == 14) return wide.value;
    return bits & 0x8000 ? -wide.value * 0x1p112f : wide.value * 0x1p112f;
}

/* Cuts off what the type has no room for. */
static void store(void *to, int type, int64_t at, float value) {
    Single single = { .value = value };
    if (type == 0) ((float *)to)[at] = value;
    if (type == 14) ((uint16_t *)to)[at] = (uint16_t)(single.bits >> 16);
    if (type != 2) return;
    Single narrow = { .value = value * 0x1p-112f };
    ((uint16_t *)to)[at] = (uint16_t)((single.bits >> 16 & 0x8000) | (narrow.bits & 0x7fffffff) >> 13);
}

EXPORT int cublasGemmEx(void *handle, int transa, int transb, int m, int n, int k, const void *alpha, uint64_t a, int a_type,
    int lda, uint64_t b, int b_type, int ldb, const void *beta, uint64_t c, int c_type, int ldc, int compute, int algorithm) {
    (void)handle, (void)alpha, (void)beta, (void)algorithm;
    if (transa || transb || compute != 68 || a_type != b_type || a_type != c_type || (a_type != 0 && a_type != 2 && a_type != 14)) return 15;
    Resolve resolve = (Resolve)find("fake_resolve");
    ((Synchronize)find("cuStreamSynchronize"))(stream);
    uint64_t workspace = take();
    if (!workspace) return 3;
    if (workspace > 1) ((int (*)(uint64_t))find("cuMemFree_v2"))(workspace);
    int64_t size = a_type == 0 ? 4 : 2;
    const char *left = resolve(a, (uint64_t)(size * lda * k)), *right = resolve(b, (uint64_t)(size * ldb * n));
    char *out = resolve(c, (uint64_t)(size * ldc * n));
    if (!left || !right || !out) return 7;
    for (int64_t column = 0; column < n; column++)
        for (int64_t row = 0; row < m; row++) {
            float sum = 0;
            for (int64_t i = 0; i < k; i++) sum += load(left, a_type, i * lda + row) * load(right, b_type, column * ldb + i);
            store(out, c_type, column * ldc + row, sum);
        }
    return 0;
}
