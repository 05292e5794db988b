/* Stands for NVIDIA's management library in tests. It knows the GPUs at 3b:00 and 3c:00 on the PCI bus. With
 * FAKE_NVML it misbehaves: "init" and "gpu" fail there, "old" says that nothing is supported, "wild" tells
 * impossible values, "silent" never answers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, UNKNOWN = 999 };

static int initialised;
static struct gpu { unsigned bus; } gpus[] = { { 0x3b }, { 0x3c } };

static int misbehaves(const char *how) {
    const char *set = getenv("FAKE_NVML");
    return set && !strcmp(set, how);
}

EXPORT int nvmlInit_v2(void) {
    while (misbehaves("silent")) pause();
    if (misbehaves("init")) return UNKNOWN;
    initialised = 1;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code) {
    return code == NOT_FOUND ? "Not\033 Found" : code == UNKNOWN ? "Unknown Error" : NULL;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct gpu **gpu) {
    unsigned domain, bus, device;
    if (!initialised) return UNINITIALIZED;
    if (sscanf(id, "%x:%x:%x.0", &domain, &bus, &device) != 3) return INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++)
        if (!misbehaves("gpu") && !domain && !device && gpus[i].bus == bus) { *gpu = &gpus[i]; return SUCCESS; }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetClockInfo(struct gpu *gpu, unsigned type, unsigned *clock) {
    if (misbehaves("old")) return NOT_SUPPORTED;
    if (type != 1) return INVALID_ARGUMENT;
    *clock = misbehaves("wild") ? 0xffffffff : 1000 + gpu->bus;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(struct gpu *gpu, unsigned long long *total_free_used) {
    if (misbehaves("old")) return NOT_SUPPORTED;
    total_free_used[0] = 1ull << 30;
    total_free_used[2] = misbehaves("wild") ? ~0ull : (unsigned long long)gpu->bus << 20;
    total_free_used[1] = total_free_used[0] - total_free_used[2];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned *gpu_memory) {
    if (misbehaves("old")) return NOT_SUPPORTED;
    gpu_memory[0] = misbehaves("wild") ? 101 : gpu->bus;
    gpu_memory[1] = 0;
    return SUCCESS;
}
