// A library of OpenCL whose kernels fail behind the call that submits them: their events say so, once. All other
// calls find the library that this one is linked to.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

typedef int cl_int;
typedef unsigned int cl_uint;

enum { CL_COMPLETE = 0, CL_OUT_OF_RESOURCES = -5, CL_EVENT_COMMAND_EXECUTION_STATUS = 0x11D3 };

static void *failing;

cl_int clEnqueueNDRangeKernel(
    void *queue, void *kernel, cl_uint dimensions, const size_t *offset, const size_t *global, const size_t *local,
    cl_uint count, void *const *list, void **event
) {
    cl_int (*next)(void *, void *, cl_uint, const size_t *, const size_t *, const size_t *, cl_uint, void *const *, void **) =
        dlsym(RTLD_NEXT, "clEnqueueNDRangeKernel");
    cl_int result = next(queue, kernel, dimensions, offset, global, local, count, list, event);
    failing = *event;
    return result;
}

cl_int clGetEventInfo(void *event, cl_uint property, size_t size, void *value, size_t *size_of_value) {
    cl_int (*next)(void *, cl_uint, size_t, void *, size_t *) = dlsym(RTLD_NEXT, "clGetEventInfo");
    cl_int result = next(event, property, size, value, size_of_value);
    if (event == failing && property == CL_EVENT_COMMAND_EXECUTION_STATUS && value && *(cl_int *)value == CL_COMPLETE) {
        *(cl_int *)value = CL_OUT_OF_RESOURCES;
        failing = NULL;
    }
    return result;
}
