/* A cuBLAS for the tests, on the fake driver: one product, computed at once, in the order of its stream. */

#include <dlfcn.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef char *(*Resolve)(uint64_t, uint64_t);
typedef int (*Synchronize)(void *);

static void *stream;

EXPORT int cublasCreate_v2(void **handle) { *handle = &stream; return 0; }
EXPORT int cublasSetStream_v2(void *handle, void *given) { (void)handle; stream = given; return 0; }
EXPORT const char *cublasGetStatusString(int status) { (void)status; return "the product is not supported"; }

static float load(const void *from, int type, int64_t at) {
    if (type == 0) return ((const float *)from)[at];
    /* bfloat16, the upper half of a float; half precision is not worth the lines. */
    union { uint32_t bits; float value; } wide = { (uint32_t)((const uint16_t *)from)[at] << 16 };
    return wide.value;
}

EXPORT int cublasGemmEx(void *handle, int transa, int transb, int m, int n, int k, const void *alpha, uint64_t a, int a_type,
    int lda, uint64_t b, int b_type, int ldb, const void *beta, uint64_t c, int c_type, int ldc, int compute, int algorithm) {
    (void)handle, (void)alpha, (void)beta, (void)algorithm;
    if (transa || transb || compute != 68 || a_type != b_type || a_type != c_type || (a_type != 0 && a_type != 14)) return 15;
    void *driver = dlopen("libcuda.so", RTLD_NOW);
    Resolve resolve = (Resolve)dlsym(driver, "fake_resolve");
    ((Synchronize)dlsym(driver, "cuStreamSynchronize"))(stream);
    int64_t size = a_type == 0 ? 4 : 2;
    const char *left = resolve(a, (uint64_t)(size * lda * k)), *right = resolve(b, (uint64_t)(size * ldb * n));
    char *out = resolve(c, (uint64_t)(size * ldc * n));
    if (!left || !right || !out) return 7;
    for (int64_t column = 0; column < n; column++)
        for (int64_t row = 0; row < m; row++) {
            union { uint32_t bits; float value; } sum = { 0 };
            for (int64_t i = 0; i < k; i++) sum.value += load(left, a_type, i * lda + row) * load(right, b_type, column * ldb + i);
            if (a_type == 0) ((float *)out)[column * ldc + row] = sum.value;
            else ((uint16_t *)out)[column * ldc + row] = (uint16_t)(sum.bits >> 16);
        }
    return 0;
}
