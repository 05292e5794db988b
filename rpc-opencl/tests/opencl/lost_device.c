// A library of OpenCL whose device goes when a kernel is launched, as one that is unplugged, and which would
// wait for ever for its work. All other calls find the library that this one is linked to.

#include <stdlib.h>

typedef int cl_int;
typedef unsigned int cl_uint;

enum { CL_DEVICE_NOT_AVAILABLE = -2 };

cl_int clEnqueueNDRangeKernel(
    void *queue, void *kernel, cl_uint dimensions, const unsigned long *offset, const unsigned long *global,
    const unsigned long *local, cl_uint count, void *const *list, void **event
) {
    return CL_DEVICE_NOT_AVAILABLE;
}

cl_int clFinish(void *queue) {
    abort();
}
