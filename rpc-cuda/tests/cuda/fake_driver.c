/* A driver for the tests: libcuda's functions as far as rpc-core calls them, on the processor.
 *
 * It is strict where a GPU is lenient, and lazy where a GPU is quick. What is submitted to a stream runs only when somebody
 * waits for it (or asks, one piece at a time), so that an order that was left to chance goes wrong every time: a buffer that
 * is reused too early, memory that is freed too early. Addresses of devices are none of the processor's, and every access is
 * checked against the blocks that are allocated.
 *
 * Pinned memory is guarded: while submitted work will write to it, the processor may not touch it, and while submitted work
 * will read it, the processor may not write to it. An access that may not be is counted as a violation, and goes on.
 *
 * Environment: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY (bytes of each device, 1 GiB), FAKE_CUDA_INIT (what cuInit returns),
 * FAKE_CUDA_OVERHEAD (bytes that a stream, a module and cuBLAS take of a device, 0), FAKE_CUDA_COMPUTE_MODE (of all devices,
 * by CUDA's numbers; 3 is that of a device which another process has taken), FAKE_CUDA_PEERS (0: no device reaches another).
 * Build with -DOLD_DRIVER for that of CUDA 12.2, which lacks later functions and refuses later PTX, and with
 * -DANCIENT_DRIVER for one that is too old.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217, INVALID_PTX = 218, UNSUPPORTED_PTX_VERSION = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704, LAUNCH_FAILED = 719, UNKNOWN = 999, FAR_FUTURE = 987654,
};

#ifdef OLD_DRIVER
#define DRIVER_VERSION 12020
#else
#define DRIVER_VERSION 12040
#endif
/* CUDA 12.x comes with PTX 8.x. */
#define PTX_MINOR (DRIVER_VERSION % 1000 / 10)

#define MAX_DEVICES 8
#define PAGE ((uint64_t)4096)
#define EXPORT __attribute__((visibility("default")))

typedef struct Context { int device; } Context;
typedef struct Stream Stream;
/* A point in a stream. Never freed: who waits for it may come late. */
typedef struct Mark { Stream *stream; int done; } Mark;
typedef struct Event { Mark *last; int alive; } Event;
typedef struct Block { struct Block *next; uint64_t address; size_t size; char *bytes; int device; } Block;
typedef struct Kernel { const char *name; int count; size_t sizes[12]; } Kernel;
typedef struct Module { int device; char *image; } Module;
typedef struct Function { Module *module; const Kernel *kernel; struct Function *next; unsigned max_shared; } Function;

typedef struct Op {
    struct Op *next;
    enum { FILL, COPY, RECORD, WAIT, LAUNCH, HOST, OTHER } kind;
    uint64_t to, from;
    size_t size;
    int value;
    char *staged; /* what a pageable source held when the copy was submitted */
    Mark *mark;
    const Kernel *kernel;
    Module *module;
    unsigned threads;
    uint64_t args[12];
    void (*host)(void *); /* a function of the caller's */
    int (*other)(void *); /* work of another library: whether it is done; it writes to `to` */
    void *other_arg;
} Op;

struct Stream { Stream *next; int device, alive; Op *first, **last; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Context contexts[MAX_DEVICES];
static int sticky[MAX_DEVICES], device_count = -1, fail_next;
static size_t used[MAX_DEVICES], capacity, overhead;
static Block *device_blocks, *host_blocks;
static Stream *streams;
static Function *functions;
static uint64_t next_address = 0x700000000000;
static uint64_t violations, driver_allocations, peer_copies, direct_copies, host_waits, inits, device_waits;
static int compute_mode, has_peers, reaches[MAX_DEVICES][MAX_DEVICES];
/* Calls that wait for the driver's lock. */
static uint64_t waiting;
/* While this is set, cuMemFree keeps the driver's lock until it returns true. */
static int (*free_until)(void *);
static void *free_arg;
static struct sigaction former_action;
static __thread Context *current;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

static void violation(const char *what) {
    violations++;
    fprintf(stderr, "fake driver: %s\n", what);
}

static void lock(void) {
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&mutex);
    __atomic_sub_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
}

#define ENTER() \
    lock(); \
    int result = device_count < 0 ? NOT_INITIALIZED : !current ? INVALID_CONTEXT : sticky[current->device]; \
    if (!result) { result = fail_next; fail_next = 0; } \
    if (result) goto out;
#define LEAVE() out: pthread_mutex_unlock(&mutex); return result;

/* ---- memory ---- */

static Block *find(Block *blocks, uint64_t address, size_t size) {
    for (Block *block = blocks; block; block = block->next)
        if (address >= block->address && size <= block->size && address - block->address <= block->size - size)
            return block;
    return NULL;
}

/* ---- the guard of pinned memory ---- */

static int overlaps(uint64_t a, size_t a_size, Block *block) {
    return a < block->address + block->size && block->address < a + a_size;
}

/* Lets the processor use those pages of a pinned block that overlap the range as `protection` says. */
static void protect(Block *block, uint64_t address, size_t size, int protection) {
    uint64_t end = block->address + block->size, to = address + size < end ? address + size : end;
    uint64_t from = (address > block->address ? address : block->address) & ~(PAGE - 1);
    to = (to + PAGE - 1) & ~(PAGE - 1);
    if (mprotect((void *)from, to - from, protection)) abort();
}

static void guard_block(Block *block) {
    protect(block, block->address, block->size, PROT_READ | PROT_WRITE);
    for (int writes = 0; writes < 2; writes++)
        for (Stream *stream = streams; stream; stream = stream->next)
            for (Op *op = stream->first; op; op = op->next) {
                int reads_it = op->kind == COPY && !op->staged && overlaps(op->from, op->size, block);
                int writes_it = (op->kind == FILL || op->kind == COPY || op->kind == OTHER) && overlaps(op->to, op->size, block);
                if (!writes && reads_it) protect(block, op->from, op->size, PROT_READ);
                if (writes && writes_it) protect(block, op->to, op->size, PROT_NONE);
                /* A kernel may do anything with what it is given. */
                for (int i = 0; writes && op->kind == LAUNCH && i < op->kernel->count; i++)
                    if (overlaps(op->args[i], 1, block)) protect(block, block->address, block->size, PROT_NONE);
            }
}

static int concerns(const Op *op, Block *block) {
    int uses = (op->size && overlaps(op->to, op->size, block)) || (op->kind == COPY && op->from && overlaps(op->from, op->size, block));
    for (int i = 0; op->kind == LAUNCH && i < op->kernel->count; i++) uses |= overlaps(op->args[i], 1, block);
    return uses;
}

/* Guards the pinned blocks that an operation uses, or opens them for it. */
static void guard(const Op *op, int is_open) {
    for (Block *block = host_blocks; block; block = block->next) {
        if (!concerns(op, block)) continue;
        if (is_open) protect(block, block->address, block->size, PROT_READ | PROT_WRITE);
        else guard_block(block);
    }
}

/* The processor has touched what is guarded, or there is another reason. The stack of signals has no room for fprintf. */
static void on_fault(int signal_number, siginfo_t *info, void *context) {
    static const char WHAT[] = "fake driver: the processor uses pinned memory that the device is not done with\n";
    pthread_mutex_lock(&mutex);
    Block *block = find(host_blocks, (uint64_t)info->si_addr & ~(PAGE - 1), 1);
    if (block) {
        violations++;
        if (write(2, WHAT, sizeof WHAT - 1) < 0) abort();
        protect(block, block->address, block->size, PROT_READ | PROT_WRITE);
    }
    pthread_mutex_unlock(&mutex);
    if (block) return;
    if (former_action.sa_flags & SA_SIGINFO && former_action.sa_sigaction) former_action.sa_sigaction(signal_number, info, context);
    else signal(signal_number, SIG_DFL);
}

/* Where an address of a device lies for the processor; NULL if that is nowhere. Pinned memory has one address for both. */
static char *resolve(uint64_t address, size_t size) {
    Block *block = find(device_blocks, address, size);
    if (!block) block = find(host_blocks, address, size);
    return block ? block->bytes + (address - block->address) : NULL;
}

static void check_unused(Block *block) {
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Op *op = stream->first; op; op = op->next) {
            int uses = (op->kind == FILL || op->kind == COPY || op->kind == OTHER)
                && (overlaps(op->to, op->size, block) || (!op->staged && op->from && overlaps(op->from, op->size, block)));
            for (int i = 0; op->kind == LAUNCH && i < op->kernel->count; i++)
                uses |= op->args[i] >= block->address && op->args[i] < block->address + block->size;
            if (uses) violation("memory is freed that submitted work still uses");
        }
}

static int release(Block **list, uint64_t address) {
    for (Block **link = list; *link; link = &(*link)->next)
        if ((*link)->address == address) {
            Block *block = *link;
            check_unused(block);
            *link = block->next;
            if (block->device >= 0) used[block->device] -= block->size;
            if (block->device >= 0) free(block->bytes);
            else munmap(block->bytes, (block->size + PAGE - 1) & ~(PAGE - 1));
            free(block);
            return SUCCESS;
        }
    violation("memory is freed that was not allocated");
    return INVALID_VALUE;
}

/* ---- kernels ---- */

static const Kernel KERNELS[] = {
    { "vector_add", 4, { 8, 8, 8, 4 } },
    { "trap", 1, { 8 } },
    { "widths", 7, { 8, 1, 2, 4, 8, 4, 8 } },
    { "record", 2, { 8, 24 } },
    { "nothing", 0, { 0 } },
};

static int run_kernel(Op *op) {
    if (!strcmp(op->kernel->name, "vector_add")) {
        uint32_t count = (uint32_t)op->args[3];
        float *a = (float *)resolve(op->args[0], 4 * (size_t)count), *b = (float *)resolve(op->args[1], 4 * (size_t)count);
        float *sum = (float *)resolve(op->args[2], 4 * (size_t)count);
        if (!a || !b || !sum) return ILLEGAL_ADDRESS;
        for (uint32_t i = 0; i < count && i < op->threads; i++) sum[i] = a[i] + b[i];
    } else if (!strcmp(op->kernel->name, "trap")) {
        return resolve(op->args[0], 4) ? LAUNCH_FAILED : ILLEGAL_ADDRESS;
    } else if (!strcmp(op->kernel->name, "widths")) {
        char *out = resolve(op->args[0], 27);
        if (!out) return ILLEGAL_ADDRESS;
        for (int i = 1; i < 7; i++) { memcpy(out, &op->args[i], op->kernel->sizes[i]); out += op->kernel->sizes[i]; }
    } else if (!strcmp(op->kernel->name, "record")) {
        char *out = resolve(op->args[0], 24);
        if (!out) return ILLEGAL_ADDRESS;
        memcpy(out, &op->args[1], 24);
    }
    return SUCCESS;
}

/* ---- streams ---- */

static void run_until(Stream *stream, Mark *mark);

/* Whether it is done. */
static int run_one(Stream *stream) {
    Op *op = stream->first;
    int code = SUCCESS;
    if (op->kind == OTHER) {
        guard(op, 1);
        int is_done = op->other(op->other_arg);
        guard(op, 0);
        if (!is_done) return 0;
    }
    if (op->kind == WAIT && op->mark) run_until(op->mark->stream, op->mark);
    guard(op, 1);
    if (!sticky[stream->device]) switch (op->kind) {
    case FILL: {
        char *to = resolve(op->to, op->size);
        if (to) memset(to, op->value, op->size); else code = ILLEGAL_ADDRESS;
        break;
    }
    case COPY: {
        char *to = resolve(op->to, op->size), *from = op->staged ? op->staged : resolve(op->from, op->size);
        if (!to || !from) { code = ILLEGAL_ADDRESS; break; }
        if (to < from + op->size && from < to + op->size) {
            violation("a copy overlaps itself");
            memset(to, 0xee, op->size);
        } else memcpy(to, from, op->size);
        break;
    }
    case LAUNCH: code = run_kernel(op); break;
    case HOST: op->host(op->other_arg); break;
    case RECORD: case WAIT: case OTHER: break;
    }
    if (op->kind == RECORD) op->mark->done = 1;
    if (code) sticky[stream->device] = code;
    stream->first = op->next;
    if (!stream->first) stream->last = &stream->first;
    guard(op, 0);
    free(op->staged);
    free(op);
    return 1;
}

/* All of the stream, or up to a point in it. */
static void run_until(Stream *stream, Mark *mark) {
    while (stream->first && !(mark && mark->done)) {
        if (run_one(stream)) continue;
        /* It takes others, on other threads. */
        pthread_mutex_unlock(&mutex);
        sched_yield();
        lock();
    }
}

static Op *submit(Stream *stream, int kind) {
    Op *op = calloc(1, sizeof *op);
    op->kind = kind;
    *stream->last = op;
    stream->last = &op->next;
    return op;
}

/* A GPU's driver waits for all work of the device when memory is freed. This one only counts that, and tells of work that still uses the memory. */
static void wait_for_device(void) {
    device_waits++;
}

static int usable(Stream *stream) {
    if (stream && stream->alive && stream->device == current->device) return 1;
    violation("a stream is used that is destroyed or of another context");
    return 0;
}

/* ---- what the driver exports ---- */

EXPORT int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    inits++;
    int result = (int)number("FAKE_CUDA_INIT", 0);
    if (result) return result;
    pthread_mutex_lock(&mutex);
    device_count = (int)number("FAKE_CUDA_DEVICES", 2);
    capacity = number("FAKE_CUDA_MEMORY", (size_t)1 << 30);
    overhead = number("FAKE_CUDA_OVERHEAD", 0);
    compute_mode = (int)number("FAKE_CUDA_COMPUTE_MODE", 0);
    has_peers = (int)number("FAKE_CUDA_PEERS", 1);
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };
    if (inits == 1) sigaction(SIGSEGV, &action, &former_action);
    for (int i = 0; i < MAX_DEVICES; i++) contexts[i].device = i;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return SUCCESS; }

static const struct { int code; const char *name, *text; } TEXTS[] = {
    { INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
    { OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
    { DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable" },
    { UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain." },
    { UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error" },
    { 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
    { INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed" },
    { NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found" },
    { ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
    { LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure" },
};

static int text_of(int code, const char **text, int name) {
    for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++)
        if (TEXTS[i].code == code) { *text = name ? TEXTS[i].name : TEXTS[i].text; return SUCCESS; }
    *text = NULL;
    return INVALID_VALUE;
}

EXPORT int cuGetErrorName(int code, const char **text) { return text_of(code, text, 1); }
EXPORT int cuGetErrorString(int code, const char **text) { return text_of(code, text, 0); }

EXPORT int cuDeviceGetCount(int *count) { *count = device_count; return device_count < 0 ? NOT_INITIALIZED : SUCCESS; }

EXPORT int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int len, int device) {
    snprintf(name, (size_t)len, "Fake GPU %d", device);
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int KNOWN[][2] = { { 1, 1024 }, { 2, 1024 }, { 3, 512 }, { 4, 64 }, { 5, 2147483647 }, { 6, 65535 }, { 7, 65535 },
        { 8, 49152 }, { 10, 32 }, { 12, 65536 }, { 13, 1980000 }, { 16, 132 }, { 38, 52428800 }, { 41, 1 }, { 51, 32 },
        { 75, 9 }, { 76, 0 }, { 97, 232448 } };
    /* The places on the PCI bus: 3b:00 and, with FAKE_PCI_SHIFT as another choice of devices would have it, later. */
    if (attribute == 33) {
        const char *shift = getenv("FAKE_PCI_SHIFT");
        *value = 0x3b + device + (shift ? atoi(shift) : 0);
        return SUCCESS;
    }
    if (attribute == 34 || attribute == 50) { *value = 0; return SUCCESS; }
    /* CU_DEVICE_ATTRIBUTE_COMPUTE_MODE. */
    if (attribute == 20) { *value = compute_mode; return SUCCESS; }
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
        if (KNOWN[i][0] == attribute) { *value = KNOWN[i][1]; return SUCCESS; }
    return INVALID_VALUE;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = capacity; return SUCCESS; }

EXPORT int cuDevicePrimaryCtxRetain(Context **context, int device) {
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    /* Prohibited, and exclusive to another process: the codes that the driver has for them. */
    if (compute_mode == 2) return UNKNOWN;
    if (compute_mode == 3) return DEVICE_UNAVAILABLE;
    *context = &contexts[device];
    return SUCCESS;
}

EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    if (device < 0 || device >= device_count || peer < 0 || peer >= device_count) return INVALID_DEVICE;
    *can = has_peers && device != peer;
    return SUCCESS;
}

EXPORT int cuCtxEnablePeerAccess(Context *peer, unsigned flags) {
    ENTER()
    int *access = &reaches[current->device][peer->device];
    if (flags || peer == current) result = INVALID_VALUE;
    else if (!has_peers) result = PEER_ACCESS_UNSUPPORTED;
    else if (*access) result = PEER_ACCESS_ALREADY_ENABLED;
    else *access = 1;
    LEAVE()
}

EXPORT int cuCtxSetCurrent(Context *context) { current = context; return SUCCESS; }

EXPORT int cuCtxGetCurrent(Context **context) { *context = current; return SUCCESS; }

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t size) {
    ENTER()
    driver_allocations++;
    if (size > capacity - used[current->device]) { result = OUT_OF_MEMORY; goto out; }
    Block *block = calloc(1, sizeof *block);
    *block = (Block){ device_blocks, next_address, size, malloc(size), current->device };
    memset(block->bytes, 0xa5, size);
    /* Blocks do not touch, so that what reaches beyond one is noticed. */
    next_address += (size + 0xffffff) & ~(uint64_t)0xfffff;
    used[current->device] += size;
    device_blocks = block;
    *address = block->address;
    LEAVE()
}

EXPORT int cuMemFree_v2(uint64_t address) {
    ENTER()
    wait_for_device();
    while (free_until && !free_until(free_arg)) usleep(100);
    free_until = NULL;
    result = release(&device_blocks, address);
    LEAVE()
}

EXPORT int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    ENTER()
    (void)flags;
    driver_allocations++;
    Block *block = calloc(1, sizeof *block);
    char *bytes = mmap(NULL, (size + PAGE - 1) & ~(PAGE - 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) abort();
    memset(bytes, 0x5a, size);
    *block = (Block){ host_blocks, (uint64_t)bytes, size, bytes, -1 };
    host_blocks = block;
    *address = bytes;
    LEAVE()
}

EXPORT int cuMemFreeHost(void *address) {
    ENTER()
    wait_for_device();
    result = release(&host_blocks, (uint64_t)address);
    LEAVE()
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER()
    *free_bytes = capacity - used[current->device];
    *total = capacity;
    LEAVE()
}

EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, Stream *stream) {
    ENTER()
    if (!usable(stream)) { result = INVALID_HANDLE; goto out; }
    Op *op = submit(stream, FILL);
    op->to = to, op->value = value, op->size = size;
    guard(op, 0);
    LEAVE()
}

static int copy(uint64_t to, uint64_t from, size_t size, Stream *stream) {
    if (!usable(stream)) return INVALID_HANDLE;
    Op *op = submit(stream, COPY);
    op->to = to, op->from = from, op->size = size;
    guard(op, 0);
    return SUCCESS;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, Stream *stream) {
    ENTER()
    result = copy(to, (uint64_t)from, size, stream);
    if (!result && !find(host_blocks, (uint64_t)from, size)) violation("a copy from memory that is not pinned");
    LEAVE()
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, Stream *stream) {
    ENTER()
    result = copy((uint64_t)to, from, size, stream);
    if (!result && !find(host_blocks, (uint64_t)to, size)) violation("a copy to memory that is not pinned");
    LEAVE()
}

/* Behind all work of the device, as what is on the null stream is. Host memory need not be pinned. */
static int copy_now(char *to, const char *from, size_t size) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == current->device) run_until(stream, NULL);
    if (!to || !from) return INVALID_VALUE;
    if (!sticky[current->device]) memcpy(to, from, size);
    return sticky[current->device];
}

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    ENTER()
    result = copy_now(resolve(to, size), from, size);
    LEAVE()
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    ENTER()
    result = copy_now(to, resolve(from, size), size);
    LEAVE()
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, Stream *stream) {
    ENTER()
    result = copy(to, from, size, stream);
    LEAVE()
}

EXPORT int cuMemcpyPeerAsync(uint64_t to, Context *to_context, uint64_t from, Context *from_context, size_t size, Stream *stream) {
    ENTER()
    Block *target = find(device_blocks, to, size), *source = find(device_blocks, from, size);
    if (!target || !source || target->device != to_context->device || source->device != from_context->device) {
        result = INVALID_VALUE;
        goto out;
    }
    peer_copies++;
    direct_copies += (uint64_t)reaches[source->device][target->device];
    result = copy(to, from, size, stream);
    LEAVE()
}

EXPORT int cuStreamCreate(Stream **stream, unsigned flags) {
    ENTER()
    (void)flags;
    if (overhead > capacity - used[current->device]) { result = OUT_OF_MEMORY; goto out; }
    used[current->device] += overhead;
    *stream = calloc(1, sizeof **stream);
    **stream = (Stream){ streams, current->device, 1, NULL, NULL };
    (*stream)->last = &(*stream)->first;
    streams = *stream;
    LEAVE()
}

EXPORT int cuStreamDestroy_v2(Stream *stream) {
    ENTER()
    if (!usable(stream)) { result = INVALID_HANDLE; goto out; }
    stream->alive = 0;
    used[stream->device] -= overhead;
    LEAVE()
}

EXPORT int cuStreamQuery(Stream *stream) {
    ENTER()
    if (!usable(stream)) { result = INVALID_HANDLE; goto out; }
    if (stream->first) {
        run_one(stream);
        result = sticky[current->device] ? sticky[current->device] : NOT_READY;
    }
    LEAVE()
}

EXPORT int cuStreamSynchronize(Stream *stream) {
    ENTER()
    if (!usable(stream)) { result = INVALID_HANDLE; goto out; }
    host_waits++;
    run_until(stream, NULL);
    result = sticky[current->device];
    LEAVE()
}

EXPORT int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    ENTER()
    if (!usable(stream) || flags || !event->alive) { result = INVALID_HANDLE; goto out; }
    Op *op = submit(stream, WAIT);
    op->mark = event->last;
    LEAVE()
}

EXPORT int cuEventCreate(Event **event, unsigned flags) {
    ENTER()
    /* CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING. */
    if (flags != 3) violation("an event that takes the time, or that nobody can wait for asleep");
    *event = calloc(1, sizeof **event);
    (*event)->alive = 1;
    LEAVE()
}

EXPORT int cuEventDestroy_v2(Event *event) {
    ENTER()
    if (!event->alive) violation("an event is destroyed twice");
    event->alive = 0;
    LEAVE()
}

EXPORT int cuEventRecord(Event *event, Stream *stream) {
    ENTER()
    if (!usable(stream) || !event->alive) { result = INVALID_HANDLE; goto out; }
    event->last = calloc(1, sizeof *event->last);
    event->last->stream = stream;
    submit(stream, RECORD)->mark = event->last;
    LEAVE()
}

EXPORT int cuEventQuery(Event *event) {
    ENTER()
    if (event->last && !event->last->done) {
        run_one(event->last->stream);
        result = sticky[current->device] ? sticky[current->device] : NOT_READY;
    }
    LEAVE()
}

EXPORT int cuEventSynchronize(Event *event) {
    ENTER()
    host_waits++;
    if (event->last) run_until(event->last->stream, event->last);
    result = sticky[current->device];
    LEAVE()
}

#ifndef ANCIENT_DRIVER
EXPORT int cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *arg) {
    ENTER()
    if (!usable(stream)) { result = INVALID_HANDLE; goto out; }
    Op *op = submit(stream, HOST);
    op->host = function, op->other_arg = arg;
    LEAVE()
}
#endif

EXPORT int cuModuleLoadDataEx(Module **module, const void *image, unsigned count, int *options, void **values) {
    ENTER()
    if (strstr(image, "not ptx")) {
        /* CU_JIT_ERROR_LOG_BUFFER is 5, its size in bytes 6. */
        for (unsigned i = 0; i < count; i++)
            if (options[i] == 5) strcpy(values[i], "ptxas application ptx input, line 1; fatal : Parsing error near 'not'");
        result = INVALID_PTX;
        goto out;
    }
    const char *version = strstr(image, ".version 8.");
    if (version && atoi(version + strlen(".version 8.")) > PTX_MINOR) { result = UNSUPPORTED_PTX_VERSION; goto out; }
    if (overhead > capacity - used[current->device]) { result = OUT_OF_MEMORY; goto out; }
    used[current->device] += overhead;
    *module = calloc(1, sizeof **module);
    **module = (Module){ current->device, strdup(image) };
    LEAVE()
}

EXPORT int cuModuleUnload(Module *module) {
    ENTER()
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Op *op = stream->first; op; op = op->next)
            if (op->module == module) violation("a module is unloaded that may still run");
    for (Function *function = functions; function; function = function->next)
        if (function->module == module) function->module = NULL;
    used[module->device] -= overhead;
    free(module->image);
    free(module);
    LEAVE()
}

/* One for a kernel of a module, whoever asks for it. */
static Function *function(Module *module, const Kernel *kernel) {
    for (Function *found = functions; found; found = found->next)
        if (found->module == module && found->kernel == kernel) return found;
    Function *found = calloc(1, sizeof *found);
    *found = (Function){ module, kernel, functions, 48 << 10 };
    return functions = found;
}

EXPORT int cuModuleGetFunction(Function **found, Module *module, const char *name) {
    ENTER()
    result = NOT_FOUND;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i].name, name) && strstr(module->image, name)) {
            *found = function(module, &KERNELS[i]);
            result = SUCCESS;
        }
    LEAVE()
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, Function *function) {
    (void)function;
    *value = attribute == 0 ? 512 : 0;
    return SUCCESS;
}

EXPORT int cuFuncSetAttribute(Function *function, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > 232448) return INVALID_VALUE;
    function->max_shared = (unsigned)value;
    return SUCCESS;
}

EXPORT int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared, Stream *stream, void **params, void **extra) {
    ENTER()
    if (!usable(stream) || !function->module || function->module->device != current->device || extra) { result = INVALID_HANDLE; goto out; }
    if (bx * by * bz > 512 || !gx || !gy || !gz || shared > function->max_shared) { result = INVALID_VALUE; goto out; }
    Op *op = submit(stream, LAUNCH);
    op->kernel = function->kernel;
    op->module = function->module;
    op->threads = gx * gy * gz * bx * by * bz;
    for (int i = 0; i < op->kernel->count; i++) memcpy(&op->args[i], params[i], op->kernel->sizes[i]);
    guard(op, 0);
    LEAVE()
}

#ifndef OLD_DRIVER
EXPORT int cuFuncGetParamInfo(Function *function, size_t index, size_t *offset, size_t *size) {
    if (index >= (size_t)function->kernel->count) return INVALID_VALUE;
    *offset = 0;
    *size = function->kernel->sizes[index];
    return SUCCESS;
}

static unsigned enumerate(Module *module, Function **found, unsigned room) {
    unsigned count = 0;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strstr(module->image, KERNELS[i].name)) {
            if (found && count < room) found[count] = function(module, &KERNELS[i]);
            count++;
        }
    return count;
}

EXPORT int cuModuleGetFunctionCount(unsigned *count, Module *module) {
    *count = enumerate(module, NULL, 0);
    return SUCCESS;
}

EXPORT int cuModuleEnumerateFunctions(Function **found, unsigned room, Module *module) {
    enumerate(module, found, room);
    return SUCCESS;
}

EXPORT int cuFuncGetName(const char **name, Function *function) { *name = function->kernel->name; return SUCCESS; }
#endif

/* ---- what the tests ask ---- */

EXPORT uint64_t fake_violations(void) { return violations; }
/* Those so far, which are forgotten. */
EXPORT uint64_t fake_take_violations(void) { return __atomic_exchange_n(&violations, 0, __ATOMIC_SEQ_CST); }
EXPORT uint64_t fake_driver_allocations(void) { return driver_allocations; }
EXPORT uint64_t fake_peer_copies(void) { return peer_copies; }
/* Those between devices that reach each other. */
EXPORT uint64_t fake_direct_copies(void) { return direct_copies; }
EXPORT uint64_t fake_inits(void) { return inits; }
EXPORT uint64_t fake_host_waits(void) { return host_waits; }
/* How often a call has waited for all work of a device. */
EXPORT uint64_t fake_device_waits(void) { return device_waits; }
EXPORT void fake_fail(int device, int code) { sticky[device] = code; }
/* The next call that needs a context, and no other. */
EXPORT void fake_fail_next(int code) { fail_next = code; }
EXPORT char *fake_resolve(uint64_t address, size_t size) { return resolve(address, size); }

/* Runs all that was submitted, on streams that are destroyed, too. */
EXPORT uint64_t fake_run_all(void) {
    pthread_mutex_lock(&mutex);
    for (Stream *stream = streams; stream; stream = stream->next) run_until(stream, NULL);
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* Submits work of another library, which is called until it is done, and which writes to these bytes. */
EXPORT void fake_submit_writing(Stream *stream, int (*other)(void *), void *arg, uint64_t to, size_t size) {
    pthread_mutex_lock(&mutex);
    Op *op = submit(stream, OTHER);
    op->other = other, op->other_arg = arg;
    op->to = to, op->size = size;
    guard(op, 0);
    pthread_mutex_unlock(&mutex);
}

/* Submits such work without memory. */
EXPORT void fake_submit_other(Stream *stream, int (*other)(void *), void *arg) { fake_submit_writing(stream, other, arg, 0, 0); }

/* Lets the next cuMemFree keep the driver's lock until a function returns true, as the driver does that waits for the device. */
EXPORT void fake_hold_free(int (*until)(void *), void *arg) {
    pthread_mutex_lock(&mutex);
    free_until = until, free_arg = arg;
    pthread_mutex_unlock(&mutex);
}

/* How many calls wait for the driver's lock. */
EXPORT uint64_t fake_waiting(void) { return __atomic_load_n(&waiting, __ATOMIC_SEQ_CST); }

/* How many pieces of work wait in a stream. */
EXPORT uint64_t fake_pending(Stream *stream) {
    uint64_t count = 0;
    pthread_mutex_lock(&mutex);
    for (Op *op = stream->first; op; op = op->next) count++;
    pthread_mutex_unlock(&mutex);
    return count;
}
