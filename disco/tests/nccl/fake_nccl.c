/* A stand-in for NCCL, for tests on machines without a GPU. Ranks are threads of one process, and "device" memory is the process's own.
 *
 * It keeps NCCL's interface and the rules that its guide gives to callers, and counts who breaks them (fake_violations): a call on a communicator whose last call is still
 * in progress, a collective that differs between ranks, a communicator used after its end.
 *
 * Nothing happens by itself: a stream gets on when it is queried, and a communicator when it is asked how it is. Reductions fold in the order of ranks and round once, as
 * the host backend's do, so that one model serves for both.
 *
 * With -DON_CUDA its streams and its memory are those of the stand-in for CUDA's driver that rpc-core's tests have, which is loaded already.
 *
 * Then FAKE_NCCL_MEMORY in the environment is the number of bytes that a communicator takes from its device at its first
 * collective, and FAKE_NCCL_FULL the number of communicators of the process that find no memory when they are made.
 *
 * FAKE_NCCL_HANG in the environment is the number of a collective that the last rank of the first group never begins.
 *
 * Compile with -DVERSION=code for the version to be, without the functions that came later.
 */

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef ON_CUDA
#include <dlfcn.h>
#endif

#ifndef VERSION
#define VERSION 23203
#endif

#define MAX_RANKS 16
/* How many collectives ranks may be apart. */
#define MAX_AHEAD 4096
/* How often a communicator says that a call is in progress, at least. */
#define POLLS 2

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, TRANSFERS };

typedef struct { char bytes[128]; } Id;

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} Config;

/* What a rank has brought to a collective. */
typedef struct {
    int there, kind, dtype, op, root;
    size_t count;
    char *input;
} Part;

typedef struct Message {
    char *bytes;
    size_t len;
    struct Message *next;
} Message;

typedef struct World {
    Id id;
    int size, joined, gone, finalized;
    /* By the number of the collective modulo MAX_AHEAD, and the rank. */
    Part (*parts)[MAX_RANKS];
    /* By the same number: how many ranks are through with it. */
    int through[MAX_AHEAD];
    Message *boxes[MAX_RANKS][MAX_RANKS];
    int splits[MAX_RANKS], colors[64][MAX_RANKS], keys[64][MAX_RANKS];
    struct World *next;
} World;

typedef struct {
    int is_send, peer;
    const char *from;
    char *to;
    size_t len;
} Transfer;

struct Stream;

typedef struct {
    World *world;
    int rank, polls, error, is_joining, is_finalizing, is_splitting, is_blocking, is_dead;
    int collectives;
    void **place;
    /* Where its memory on the device is, if it has some, and what the last error was. */
    uint64_t memory;
    const char *last_error;
} Comm;

typedef struct Op {
    Comm *comm;
    int number, is_posted;
    /* Whether its addresses are those of the processor already. */
    int is_resolved;
    Part part;
    char *output;
    Transfer *transfers;
    int transfer_count;
    struct Op *next;
} Op;

typedef struct Stream {
    Op *first;
    int is_held;
    /* How many operations it has been given, and how many of them are done. */
    long given, done;
} Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static World *worlds;
static Stream *streams[256];
static int stream_count, ids, violations, live, aborts, hanging_aborts, full;
static int fail_rank = -1, fail_code, hang_rank = -1, abort_hang_rank = -1, init_fail_rank = -1, init_fail_code;
static _Thread_local int group_depth, group_count;
static _Thread_local Transfer group[2 * MAX_RANKS];
static _Thread_local Comm *group_comm;
static _Thread_local Stream *group_stream;

/* What tests steer and see. */

void *fake_stream(void) {
    pthread_mutex_lock(&lock);
    Stream *stream = calloc(1, sizeof *stream);
    streams[stream_count++] = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

/* While a stream is held, it has work that does not end. */
void fake_hold(void *stream, int held) {
    pthread_mutex_lock(&lock);
    ((Stream *)stream)->is_held = held;
    pthread_mutex_unlock(&lock);
}

static void set(int *first, int value, int *second, int other) {
    pthread_mutex_lock(&lock);
    *first = value;
    *second = other;
    pthread_mutex_unlock(&lock);
}

static int nothing;

/* The next operation of that rank makes its communicator fail with the code. */
void fake_fail(int rank, int code) { set(&fail_rank, rank, &fail_code, code); }
/* That rank cannot join, and the library says so with the code. */
void fake_fail_init(int rank, int code) { set(&init_fail_rank, rank, &init_fail_code, code); }
/* Operations of that rank never begin. */
void fake_hang(int rank, int unused) { set(&hang_rank, rank, &nothing, unused); }
/* An abort of that rank does not come back. */
void fake_hang_abort(int rank, int unused) { set(&abort_hang_rank, rank, &nothing, unused); }
int fake_violations(void) { return violations; }
int fake_live(void) { return live; }
int fake_aborts(void) { return aborts; }
int fake_hanging_aborts(void) { return __atomic_load_n(&hanging_aborts, __ATOMIC_ACQUIRE); }

/* Ends the process where a test does what the stand-in cannot. */
static void give_up(const char *why) {
    fprintf(stderr, "fake NCCL: %s\n", why);
    abort();
}

static int violation(const char *what) {
    fprintf(stderr, "fake NCCL: %s\n", what);
    violations++;
    return INVALID_USAGE;
}

/* Reductions. */

static size_t width(int dtype) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[dtype];
}

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float same_float(float value) { return value; }
static double same_double(double value) { return value; }

static float from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    uint32_t wide = (uint32_t)(bits & 0x8000) << 16;
    float value, sign = wide ? -1.0f : 1.0f;
    if (exponent == 0) return sign * (float)fraction / 16777216.0f;
    wide |= (uint32_t)(exponent == 31 ? 255 : exponent + 112) << 23 | (uint32_t)fraction << 13;
    memcpy(&value, &wide, 4);
    return value;
}

/* To the nearest, ties to even. */
static uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        /* Below the normal numbers, in steps of 2^-24: adding 0.5 leaves those in the lowest bits. */
        float shifted;
        memcpy(&shifted, &bits, 4);
        shifted += 0.5f;
        memcpy(&bits, &shifted, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

#define FLOAT_FOLD(type, wide, load, store)                                                                     \
    for (size_t at = 0; at < count; at++) {                                                                     \
        wide folded = 0;                                                                                        \
        for (int rank = 0; rank < ranks; rank++) {                                                              \
            type element;                                                                                       \
            memcpy(&element, inputs[rank] + at * sizeof(type), sizeof(type));                                   \
            wide value = load(element);                                                                         \
            if (rank == 0) folded = value;                                                                      \
            else if (op == 0 || op == 4) folded = folded + value;                                               \
            else if (op == 1) folded = folded * value;                                                          \
            else if (op == 2) folded = folded != folded || folded > value ? folded : value;                     \
            else folded = folded != folded || folded < value ? folded : value;                                  \
        }                                                                                                       \
        if (op == 4) folded = folded / (wide)ranks;                                                             \
        type result = store(folded);                                                                            \
        memcpy(output + at * sizeof(type), &result, sizeof(type));                                              \
    }

#define INTEGER_FOLD(type, widest)                                                                              \
    for (size_t at = 0; at < count; at++) {                                                                     \
        type folded = 0;                                                                                        \
        for (int rank = 0; rank < ranks; rank++) {                                                              \
            type value;                                                                                         \
            memcpy(&value, inputs[rank] + at * sizeof(type), sizeof(type));                                     \
            if (rank == 0) folded = value;                                                                      \
            else if (op == 0 || op == 4) folded = (type)(folded + value);                                       \
            else if (op == 1) folded = (type)(folded * value);                                                  \
            else if (op == 2) folded = folded > value ? folded : value;                                         \
            else folded = folded < value ? folded : value;                                                      \
        }                                                                                                       \
        if (op == 4) folded = (type)((widest)folded / (widest)ranks);                                           \
        memcpy(output + at * sizeof(type), &folded, sizeof(type));                                              \
    }

static void fold(int dtype, int op, const char **inputs, int ranks, size_t count, char *output) {
    switch (dtype) {
    case 0: INTEGER_FOLD(int8_t, long long) break;
    case 2: INTEGER_FOLD(int32_t, long long) break;
    case 3: INTEGER_FOLD(uint32_t, unsigned long long) break;
    case 4: INTEGER_FOLD(int64_t, long long) break;
    case 5: INTEGER_FOLD(uint64_t, unsigned long long) break;
    case 6: FLOAT_FOLD(uint16_t, float, from_half, to_half) break;
    case 7: FLOAT_FOLD(float, float, same_float, same_float) break;
    case 8: FLOAT_FOLD(double, double, same_double, same_double) break;
    case 9: FLOAT_FOLD(uint16_t, float, from_bf16, to_bf16) break;
    /* Bytes; and 8-bit floats, which no test looks into. */
    default: INTEGER_FOLD(uint8_t, unsigned long long) break;
    }
}

/* Operations. */

static size_t input_len(const Part *part, int rank, int size) {
    size_t bytes = part->count * width(part->dtype);
    switch (part->kind) {
    case BROADCAST: return part->root == rank ? bytes : 0;
    case SCATTER: return part->root == rank ? bytes * size : 0;
    case REDUCE_SCATTER: case ALL_TO_ALL: return bytes * size;
    default: return bytes;
    }
}

/* Hands over what this rank brings, unless an earlier collective has the place still. */
static void post(Op *op) {
    World *world = op->comm->world;
    int rank = op->comm->rank;
    Part *part = &world->parts[op->number % MAX_AHEAD][rank];
    if (op->part.kind != TRANSFERS && part->there) return;
    op->is_posted = 1;
    for (int at = 0; at < op->transfer_count; at++) {
        Transfer *transfer = &op->transfers[at];
        if (!transfer->is_send) continue;
        Message *message = calloc(1, sizeof *message), **end = &world->boxes[rank][transfer->peer];
        message->bytes = malloc(transfer->len + 1);
        message->len = transfer->len;
        memcpy(message->bytes, transfer->from, transfer->len);
        while (*end) end = &(*end)->next;
        *end = message;
    }
    if (op->part.kind == TRANSFERS) return;
    size_t len = input_len(&op->part, rank, world->size);
    *part = op->part;
    part->there = 1;
    part->input = malloc(len + 1);
    memcpy(part->input, op->part.input, len);
}

/* Whether the operation has done all that it has to. */
static int advance(Op *op) {
    World *world = op->comm->world;
    int own = op->comm->rank;
    if (own == hang_rank) return 0;
    const char *hang = getenv("FAKE_NCCL_HANG");
    if (hang && !world->next && own == world->size - 1 && op->part.kind != TRANSFERS && op->number == atoi(hang)) return 0;
    if (!op->is_posted) post(op);
    if (!op->is_posted) return 0;
    if (op->part.kind == TRANSFERS) {
        for (int at = 0; at < op->transfer_count; at++) {
            Transfer *transfer = &op->transfers[at];
            if (transfer->is_send) continue;
            Message **box = &world->boxes[transfer->peer][own], *message = *box;
            if (!message) return 0;
            if (message->len != transfer->len) violation("the ends of a transfer differ");
            else memcpy(transfer->to, message->bytes, message->len);
            *box = message->next;
            free(message->bytes);
            free(message);
            *transfer = op->transfers[--op->transfer_count];
            at--;
        }
        return 1;
    }
    int place = op->number % MAX_AHEAD;
    Part *parts = world->parts[place];
    const char *inputs[MAX_RANKS];
    for (int rank = 0; rank < world->size; rank++) {
        if (!parts[rank].there) return 0;
        Part *one = &parts[rank], *mine = &op->part;
        if (one->kind != mine->kind || one->dtype != mine->dtype || one->op != mine->op || one->root != mine->root || one->count != mine->count)
            violation("ranks are in different collectives");
        inputs[rank] = one->input;
    }
    size_t bytes = op->part.count * width(op->part.dtype);
    switch (op->part.kind) {
    case ALL_REDUCE:
        fold(op->part.dtype, op->part.op, inputs, world->size, op->part.count, op->output);
        break;
    case REDUCE_SCATTER:
        for (int rank = 0; rank < world->size; rank++) inputs[rank] += own * bytes;
        fold(op->part.dtype, op->part.op, inputs, world->size, op->part.count, op->output);
        break;
    case BROADCAST: memcpy(op->output, inputs[op->part.root], bytes); break;
    case SCATTER: memcpy(op->output, inputs[op->part.root] + own * bytes, bytes); break;
    case GATHER:
        if (own != op->part.root) break;
        /* fall through */
    case ALL_GATHER:
        for (int rank = 0; rank < world->size; rank++) memcpy(op->output + rank * bytes, inputs[rank], bytes);
        break;
    case ALL_TO_ALL:
        for (int rank = 0; rank < world->size; rank++) memcpy(op->output + rank * bytes, inputs[rank] + own * bytes, bytes);
        break;
    }
    if (++world->through[place] == world->size) {
        for (int rank = 0; rank < world->size; rank++) free(parts[rank].input);
        memset(parts, 0, sizeof *world->parts);
        world->through[place] = 0;
    }
    return 1;
}

#ifdef ON_CUDA
static void *driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW), *found = library ? dlsym(library, name) : NULL;
    if (!found) give_up("the stand-in for CUDA's driver is not loaded, or is another");
    return found;
}

/* Where the processor finds an address of a device. */
static char *here(const char *address) {
    char *(*resolve)(uint64_t, size_t) = (char *(*)(uint64_t, size_t))driver("fake_resolve");
    char *found = resolve((uint64_t)address, 1);
    if (address && !found) violation("an address that no device has");
    return found;
}

/* Called by the driver when the stream has come so far, until it is done. */
static int run_on_cuda(void *pointer) {
    Op *op = pointer;
    pthread_mutex_lock(&lock);
    /* Once, also for an operation that hangs before it is posted. */
    if (!op->is_resolved) {
        op->is_resolved = 1;
        op->part.input = here(op->part.input);
        op->output = here(op->output);
        for (int at = 0; at < op->transfer_count; at++) {
            op->transfers[at].from = here(op->transfers[at].from);
            op->transfers[at].to = here(op->transfers[at].to);
        }
    }
    int is_done = op->comm->is_dead || advance(op);
    pthread_mutex_unlock(&lock);
    return is_done;
}
#endif

/* Whether everything on the stream is done. */
int fake_query(void *pointer) {
    Stream *stream = pointer;
    pthread_mutex_lock(&lock);
    while (stream->first && !stream->is_held) {
        Op *op = stream->first;
        if (!advance(op)) break;
        stream->first = op->next;
        stream->done++;
        free(op->transfers);
        free(op);
    }
    int is_done = !stream->first && !stream->is_held;
    pthread_mutex_unlock(&lock);
    return is_done;
}

/* The point behind all that the stream has been given. */
long fake_mark(void *pointer) {
    pthread_mutex_lock(&lock);
    long given = ((Stream *)pointer)->given;
    pthread_mutex_unlock(&lock);
    return given;
}

/* Whether the stream has come to such a point. What holds it is in front of everything. */
int fake_reached(void *pointer, long mark) {
    Stream *stream = pointer;
    fake_query(pointer);
    pthread_mutex_lock(&lock);
    int is_reached = !stream->is_held && stream->done >= mark;
    pthread_mutex_unlock(&lock);
    return is_reached;
}

/* Whether a call may come now; the lock is held. */
static int usable(Comm *comm) {
    if (!comm || comm->is_dead) return violation("a communicator is used after its end");
    if (comm->polls || comm->is_joining || comm->is_splitting || comm->is_finalizing) return violation("a call comes while another is in progress");
    return SUCCESS;
}

#ifdef ON_CUDA
/* Takes memory from the device at the first collective. The driver's lock comes before ours. */
static void connect_ranks(Comm *comm) {
    const char *bytes = getenv("FAKE_NCCL_MEMORY");
    if (!bytes || comm->memory) return;
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))driver("cuMemAlloc_v2");
    if (!allocate(&comm->memory, strtoull(bytes, NULL, 0))) return;
    comm->error = CUDA_ERROR;
    comm->last_error = "Cuda failure 2 'out of memory'";
}

static size_t output_len(const Part *part, int rank, int size) {
    size_t bytes = part->count * width(part->dtype);
    switch (part->kind) {
    case TRANSFERS: return 0;
    case GATHER: return part->root == rank ? bytes * size : 0;
    case ALL_GATHER: case ALL_TO_ALL: return bytes * size;
    default: return bytes;
    }
}
#endif

static int enqueue(Comm *comm, Stream *stream, Op model) {
#ifdef ON_CUDA
    connect_ranks(comm);
#endif
    pthread_mutex_lock(&lock);
    int result = usable(comm);
    Op *op = NULL;
    if (result == SUCCESS) {
        op = malloc(sizeof *op);
        *op = model;
        op->comm = comm;
        op->number = model.part.kind == TRANSFERS ? 0 : comm->collectives++;
#ifndef ON_CUDA
        Op **end = &stream->first;
        while (*end) end = &(*end)->next;
        *end = op;
        stream->given++;
#endif
        comm->polls = comm->is_blocking ? 0 : POLLS;
        if (comm->rank == fail_rank) comm->error = fail_code;
        result = comm->is_blocking ? SUCCESS : IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
#ifdef ON_CUDA
    /* Its lock comes before ours. */
    typedef void (*Submit)(void *, int (*)(void *), void *, uint64_t, size_t);
    size_t written = op ? output_len(&op->part, comm->rank, comm->world->size) : 0;
    if (op) ((Submit)driver("fake_submit_writing"))(stream, run_on_cuda, op, (uint64_t)op->output, written);
#endif
    return result;
}

static int collective(int kind, const void *input, void *output, size_t count, int dtype, int op, int root, Comm *comm, void *stream) {
    Op model = {.part = {.kind = kind, .dtype = dtype, .op = op, .root = root, .count = count, .input = (char *)input}, .output = output};
    return enqueue(comm, stream, model);
}

static int transfers(Comm *comm, Stream *stream, const Transfer *all, int count) {
    Op model = {.part = {.kind = TRANSFERS}, .transfers = malloc(sizeof *all * (count + 1)), .transfer_count = count};
    memcpy(model.transfers, all, sizeof *all * count);
    return enqueue(comm, stream, model);
}

static int transfer(Transfer one, Comm *comm, Stream *stream) {
    if (!group_depth) return transfers(comm, stream, &one, 1);
    if (group_count == 2 * MAX_RANKS) give_up("more transfers in a group than it has room for");
    if (group_count && group_comm != comm) give_up("a group with several communicators");
    group[group_count++] = one;
    group_comm = comm;
    group_stream = stream;
    return SUCCESS;
}

int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int op, void *comm, void *stream) {
    return collective(ALL_REDUCE, in, out, count, dtype, op, 0, comm, stream);
}
int ncclReduceScatter(const void *in, void *out, size_t count, int dtype, int op, void *comm, void *stream) {
    return collective(REDUCE_SCATTER, in, out, count, dtype, op, 0, comm, stream);
}
int ncclAllGather(const void *in, void *out, size_t count, int dtype, void *comm, void *stream) {
    return collective(ALL_GATHER, in, out, count, dtype, 0, 0, comm, stream);
}
int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream) {
    return collective(BROADCAST, in, out, count, dtype, 0, root, comm, stream);
}
#if VERSION >= 22800
int ncclAlltoAll(const void *in, void *out, size_t count, int dtype, void *comm, void *stream) {
    if (in == out) return violation("ncclAlltoAll in place");
    return collective(ALL_TO_ALL, in, out, count, dtype, 0, 0, comm, stream);
}
int ncclGather(const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream) {
    return collective(GATHER, in, out, count, dtype, 0, root, comm, stream);
}
int ncclScatter(const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream) {
    return collective(SCATTER, in, out, count, dtype, 0, root, comm, stream);
}
#endif
int ncclSend(const void *from, size_t count, int dtype, int peer, void *comm, void *stream) {
    Transfer one = {.is_send = 1, .peer = peer, .from = from, .len = count * width(dtype)};
    return transfer(one, comm, stream);
}
int ncclRecv(void *to, size_t count, int dtype, int peer, void *comm, void *stream) {
    Transfer one = {.peer = peer, .to = to, .len = count * width(dtype)};
    return transfer(one, comm, stream);
}
int ncclGroupStart(void) {
    group_depth++;
    return SUCCESS;
}
int ncclGroupEnd(void) {
    int count = group_count;
    if (--group_depth || !count) return SUCCESS;
    group_count = 0;
    return transfers(group_comm, group_stream, group, count);
}

/* Communicators. */

static Comm *new_comm(World *world, int rank) {
    Comm *comm = calloc(1, sizeof *comm);
    comm->world = world;
    comm->rank = rank;
    comm->polls = POLLS;
    world->joined++;
    live++;
    return comm;
}

static World *find_world(const Id *id, int size) {
    World *world = worlds;
    while (world && memcmp(&world->id, id, sizeof *id)) world = world->next;
    if (!world) {
        world = calloc(1, sizeof *world);
        world->id = *id;
        world->size = size;
        world->parts = calloc(MAX_AHEAD, sizeof *world->parts);
        world->next = worlds;
        worlds = world;
    }
    return world;
}

int ncclGetVersion(int *version) { *version = VERSION; return SUCCESS; }

int ncclGetUniqueId(Id *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0x5a, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "fake %d of %d", ++ids, (int)getpid());
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

const char *ncclGetErrorString(int code) {
    static const char *texts[] = {"no error", "CUDA error", "system error", "internal error", "invalid argument", "invalid usage", "remote error", "in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(void *comm) {
    const char *text = comm ? ((Comm *)comm)->last_error : NULL;
    return text ? text : "as the test wants it\n";
}

int ncclCommInitRankConfig(void **place, int size, Id id, int rank, Config *config) {
    *place = NULL;
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size < 24 || config->version > VERSION || size > MAX_RANKS || rank >= size) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    int result = IN_PROGRESS;
    if (rank == init_fail_rank) {
        result = init_fail_code;
    } else {
        Comm *comm = new_comm(find_world(&id, size), rank);
        comm->is_joining = 1;
        const char *wanted = getenv("FAKE_NCCL_FULL");
        if (wanted && full++ < atoi(wanted)) {
            comm->error = CUDA_ERROR;
            comm->last_error = "Cuda failure 2 'out of memory'";
        }
        *place = comm;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* A communicator whose calls block until they are enqueued. */
int ncclCommInitRank(void **place, int size, Id id, int rank) {
    *place = NULL;
    if (size > MAX_RANKS || rank >= size) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    Comm *comm = new_comm(find_world(&id, size), rank);
    comm->is_blocking = 1;
    comm->polls = 0;
    while (comm->world->joined < size) {
        pthread_mutex_unlock(&lock);
        sched_yield();
        pthread_mutex_lock(&lock);
    }
    *place = comm;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

#if VERSION >= 21800
int ncclCommSplit(void *pointer, int color, int key, void **place, Config *config) {
    Comm *comm = pointer;
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size < 48) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    int result = usable(comm);
    if (result == SUCCESS) {
        int round = comm->world->splits[comm->rank]++;
        comm->world->colors[round][comm->rank] = color;
        comm->world->keys[round][comm->rank] = key;
        comm->is_splitting = 1;
        comm->place = place;
        comm->polls = POLLS;
        result = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
#endif

/* All ranks have come to the split: the communicator of this one is made. */
static void split(Comm *comm) {
    World *world = comm->world;
    int round = world->splits[comm->rank] - 1, rank = 0, size = 0;
    int color = world->colors[round][comm->rank], key = world->keys[round][comm->rank];
    for (int other = 0; other < world->size; other++) {
        if (world->colors[round][other] != color) continue;
        int other_key = world->keys[round][other];
        rank += other_key < key || (other_key == key && other < comm->rank);
        size++;
    }
    Id id = world->id;
    snprintf(id.bytes + 64, 60, "split %d color %d", round, color);
    *comm->place = new_comm(find_world(&id, size), rank);
}

int ncclCommGetAsyncError(void *pointer, int *state) {
    Comm *comm = pointer;
    pthread_mutex_lock(&lock);
    if (comm->is_dead) violation("a communicator is asked after its end");
    World *world = comm->world;
    *state = IN_PROGRESS;
    int waits = 0;
    if (comm->is_joining) waits = world->joined < world->size;
    if (comm->is_finalizing) waits = world->finalized + world->gone < world->size;
    for (int rank = 0; comm->is_splitting && rank < world->size; rank++) waits |= world->splits[rank] < world->splits[comm->rank];
    if (comm->polls) {
        comm->polls--;
    } else if (!waits) {
        if (comm->is_splitting) split(comm);
        comm->is_joining = comm->is_splitting = 0;
        *state = comm->error;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommFinalize(void *pointer) {
    Comm *comm = pointer;
    pthread_mutex_lock(&lock);
    int result = usable(comm);
    if (result == SUCCESS) {
        comm->is_finalizing = 1;
        comm->polls = POLLS;
        comm->world->finalized++;
        result = IN_PROGRESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* The lock is held. Communicators stay in memory, to see who uses them after their end. */
static void end(Comm *comm) {
    if (comm->is_dead) violation("a communicator ends twice");
    comm->is_dead = 1;
    comm->world->gone += !comm->is_finalizing;
    live--;
    for (int at = 0; at < stream_count; at++) {
        for (Op **op = &streams[at]->first; *op;) {
            if ((*op)->comm != comm) { op = &(*op)->next; continue; }
            *op = (*op)->next;
            streams[at]->done++;
        }
    }
}

int ncclCommDestroy(void *pointer) {
    Comm *comm = pointer;
    pthread_mutex_lock(&lock);
    if (!comm->is_blocking && (!comm->is_finalizing || comm->polls || comm->world->finalized + comm->world->gone < comm->world->size))
        violation("a communicator is destroyed before it is finalized");
    end(comm);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int ncclCommAbort(void *pointer) {
    Comm *comm = pointer;
    pthread_mutex_lock(&lock);
    int hangs = comm->rank == abort_hang_rank;
    if (!hangs) {
        end(comm);
        aborts++;
    }
    pthread_mutex_unlock(&lock);
    if (hangs) __atomic_add_fetch(&hanging_aborts, 1, __ATOMIC_RELEASE);
    while (hangs) pause();
    return SUCCESS;
}

int ncclCommCount(void *comm, int *count) { *count = ((Comm *)comm)->world->size; return SUCCESS; }
int ncclCommUserRank(void *comm, int *rank) { *rank = ((Comm *)comm)->rank; return SUCCESS; }

