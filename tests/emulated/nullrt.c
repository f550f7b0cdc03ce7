// A CUDA runtime without a GPU: memory is the host's, copies are memcpy, kernels do nothing. For exercising host code.
#define _GNU_SOURCE
#include "driver_types.h"
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
typedef int E;
static __thread int dev = 0;
static int count(void) {
    const char *s = getenv("NULLGPU_COUNT");
    return s ? atoi(s) : 1;
}
static size_t total(void) {
    const char *s = getenv("NULLGPU_GIB");
    return (size_t)(s ? atoi(s) : 80) << 30;
}
static int capability(int minor) { // "9.0"
    const char *s = getenv("NULLGPU_CAPABILITY");
    s = s ? s : "9.0";
    return minor ? (strchr(s, '.') ? atoi(strchr(s, '.') + 1) : 0) : atoi(s);
}
static size_t used = 0, pinned = 0;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
long nullgpu_launches = 0, nullgpu_h2d = 0, nullgpu_d2h = 0, nullgpu_syncs = 0;
// A planned fault, NULLGPU_FAIL=ERROR,CALLS[,ATTEMPT]: from so many calls on that give the GPU work (that ask for memory
// for error 2, out of memory), counted in the worker of that attempt (any process without one), each call gives the
// error, as of a context that is lost. Error 2 is no loss: only what asks for memory fails.
enum { OUT_OF_MEMORY = 2 };
static int planned = -1; // unknown; 0: nothing is
static long remaining = 0;
static volatile int lost = 0;
static void plan(void) {
    const char *s = getenv("NULLGPU_FAIL"), *attempt = getenv("PHALANX_ATTEMPT");
    int error = 0, only = -1;
    long calls = 0;
    planned = 0;
    if (s && sscanf(s, "%d,%ld,%d", &error, &calls, &only) >= 2 && (only < 0 || (attempt && atoi(attempt) == only))) {
        planned = error;
        remaining = calls;
    }
}
void nullgpu_fail(int error, long calls) { // plans one from now on, in place of what the environment says
    planned = error;
    remaining = calls;
}
static int due(int memory) {
    if (planned < 0)
        plan();
    if (!planned || (planned == OUT_OF_MEMORY) != memory)
        return 0;
    return __sync_fetch_and_sub(&remaining, 1) <= 0;
}
static void context_lost(void);
static E work(void) { // a call that gives the GPU something to do
    if (!lost && due(0)) {
        lost = planned;
        context_lost();
    }
    return lost;
}
// CUDA graphs: what a thread asks while it captures is recorded, and done each time that the graph is launched. Waiting
// for the GPU, or a copy from or to memory that is not pinned, is an error meanwhile, as on a real one.
enum { UNSUPPORTED = 900, LAUNCH = 0, PRODUCT, TRITON, COPY, SET };
typedef struct {
    int what;
    void *to;
    const void *from;
    size_t n;
    int value;
} Node;
typedef struct {
    Node *nodes;
    size_t n, room;
    int parts; // the graph, and each of what was instantiated from it
} Graph;
static __thread Graph *capturing = 0;
static __thread void *captured_stream = 0;
long nullgpu_graphs = 0, nullgpu_replayed = 0;
static int record(Node node) {
    Graph *g = capturing;
    if (!g)
        return 0;
    if (g->n == g->room)
        g->nodes = realloc(g->nodes, (g->room = 2 * g->room + 64) * sizeof(Node));
    g->nodes[g->n++] = node;
    return 1;
}
int nullgpu_record_triton(void) { return record((Node){TRITON}); } // for libcuda
typedef struct {
    char *p;
    size_t n;
    int kind;
} Block; // 1 host, 2 device, 3 the caller's, registered, 4 addresses of the device
static Block blocks[1 << 16];
static int nblocks = 0;
static void note(char *p, size_t n, int kind) {
    pthread_mutex_lock(&mu);
    for (int i = 0;; i++) {
        if (i == nblocks)
            nblocks++;
        if (!blocks[i].p) {
            blocks[i] = (Block){p, n, kind};
            break;
        }
    }
    if (kind != 4)
        *(kind == 2 ? &used : &pinned) += n;
    pthread_mutex_unlock(&mu);
}
static void *take(size_t n, int kind) {
    char *p = mmap(0, n ? n : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return 0;
    note(p, n, kind);
    return p;
}
static E drop(void *p) {
    if (!p)
        return 0;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nblocks; i++)
        if (blocks[i].p == p) {
            if (blocks[i].kind < 3)
                munmap(p, blocks[i].n ? blocks[i].n : 1);
            if (blocks[i].kind != 4)
                *(blocks[i].kind == 2 ? &used : &pinned) -= blocks[i].n;
            blocks[i].p = 0;
            break;
        }
    pthread_mutex_unlock(&mu);
    return 0;
}
static int kind_of(const void *q) {
    int k = 0;
    pthread_mutex_lock(&mu);
    for (int i = 0; i < nblocks; i++)
        if (blocks[i].p && (char *)q >= blocks[i].p && (char *)q < blocks[i].p + blocks[i].n) {
            k = blocks[i].kind == 4 ? 2 : blocks[i].kind;
            break;
        }
    pthread_mutex_unlock(&mu);
    return k;
}
void nullgpu_reserve(void *p, size_t n) { n ? note(p, n, 4) : drop(p); } // for libcuda; n = 0: free again
E nullgpu_use(long n) { // as cudaMalloc and cudaFree account for it
    if (n > 0 && (used + n > total() || due(1)))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&mu);
    used += n;
    pthread_mutex_unlock(&mu);
    return 0;
}
E cudaGetDeviceCount(int *n) {
    *n = count();
    return 0;
}
E cudaGetDevice(int *d) {
    *d = dev;
    return 0;
}
E cudaSetDevice(int d) {
    if (d < 0 || d >= count())
        return 101;
    dev = d;
    return 0;
}
static void fill(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    const char *name = getenv("NULLGPU_NAME");
    strncpy(p->name, name ? name : "NVIDIA H100 80GB HBM3", sizeof p->name - 1);
    p->totalGlobalMem = total();
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = capability(0);
    p->minor = capability(1);
    p->multiProcessorCount = 132;
    p->l2CacheSize = 50 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlockOptin = 232448;
    p->maxBlocksPerMultiProcessor = 32;
    p->cooperativeLaunch = 1;
    p->unifiedAddressing = 1;
    p->asyncEngineCount = 3;
    p->memoryPoolsSupported = 1;
    p->hostRegisterSupported = 1;
    p->clusterLaunch = 1;
    p->streamPrioritiesSupported = 1;
    for (int i = 0; i < 16; i++)
        p->uuid.bytes[i] = i + 1 + d;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    fill(p, d);
    return 0;
}
E cudaDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
    case 16:
        *v = 132;
        break;
    case 97:
        *v = 232448;
        break;
    case 8:
        *v = 49152;
        break;
    case 81:
        *v = 233472;
        break;
    case 75:
        *v = capability(0);
        break;
    case 76:
        *v = capability(1);
        break;
    case 1:
        *v = 1024;
        break;
    case 10:
        *v = 32;
        break;
    case 12:
        *v = 65536;
        break;
    case 39:
        *v = 2048;
        break;
    case 38:
        *v = 50 << 20;
        break;
    case 13:
        *v = 1980000;
        break;
    case 36:
        *v = 2619000;
        break;
    case 37:
        *v = 5120;
        break;
    case 88:
        *v = 0;
        break;
    case 2:
        *v = 1024;
        break;
    case 3:
        *v = 1024;
        break;
    case 4:
        *v = 64;
        break;
    case 5:
        *v = 2147483647;
        break;
    case 6:
    case 7:
        *v = 65535;
        break;
    case 106:
        *v = 32;
        break;
    default:
        *v = 1;
    }
    return 0;
}
E cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:%02x:00.0", d + 1);
    return 0;
}
E cudaDeviceGetStreamPriorityRange(int *a, int *b) {
    if (a)
        *a = 0;
    if (b)
        *b = -5;
    return 0;
}
E cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
E cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
E cudaDeviceCanAccessPeer(int *v, int a, int b) {
    *v = 1;
    return 0;
}
E cudaDeviceEnablePeerAccess(int a, unsigned b) { return 0; }
E cudaDeviceGetDefaultMemPool(void **p, int d) {
    *p = (void *)1;
    return 0;
}
typedef struct {
    struct timespec t;
    void *stream; // of the last record, and the place of that in its queue
    long at;
    int asked;
} Ev;
// With NULLGPU_DELAY copies between pinned memory and the GPU, and events, are done as late as CUDA allows: when something
// waits for them. Each stream is a queue; what is computed, on the host (`nullgpu_compute`), waits for its own stream
// alone. So a wait that is missing, or memory that is used again too early, shows in the numbers. Without it what a
// stream is given is done at once, but for what comes behind a collective of nullnccl.c, which waits for its peers.
enum { WAIT = 100, RECORD, COLLECTIVE };
enum { NOT_READY = 600, PATIENCE = 3 };
typedef struct {
    int what;
    void *to;
    const void *from;
    size_t n;
    int value;
    void *stream; // that WAIT waits for, up to `at`
    long at;
    volatile int *done; // of a COLLECTIVE, which ends by itself
} Late;
typedef struct {
    void *id;
    Late *ops;
    long first, end, room; // numbers of the ops: ops[number - base]
    long base;
} Queue;
static Queue queues[256];
static int nqueues = 0;
static pthread_mutex_t late = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER; // a collective has, or the context is lost
long nullgpu_late = 0;
static volatile int communicates = 0; // nullnccl.c has a communicator
static int delays(void) {
    static int known = -1;
    if (known < 0)
        known = getenv("NULLGPU_DELAY") != 0;
    return known;
}
static int queues_up(void) { return delays() || communicates; }
static Queue *queue_of(void *stream) {
    for (int i = 0; i < nqueues; i++)
        if (queues[i].id == stream)
            return &queues[i];
    if (nqueues == 256)
        abort();
    queues[nqueues].id = stream;
    return &queues[nqueues++];
}
static int drain(void *stream, long end) { // do what the stream has before `end`: whether nothing holds it up
    Queue *q = queue_of(stream);
    while (q->first < end && q->first < q->end) {
        Late op = q->ops[q->first - q->base];
        if (op.what == WAIT && !drain(op.stream, op.at))
            return 0;
        if (op.what == COLLECTIVE && !*op.done)
            return 0;
        if (op.what == COPY)
            memmove(op.to, op.from, op.n);
        else if (op.what == SET)
            memset(op.to, op.value, op.n);
        if (op.what == COPY && op.value) // a copy of what was pageable
            free((void *)op.from);
        q->first++;
    }
    return 1;
}
static void finish(void *stream, long end) { // wait for what the stream has before `end`, or until the context is lost
    pthread_mutex_lock(&late);
    while (!drain(stream, end) && !lost)
        pthread_cond_wait(&ended, &late);
    pthread_mutex_unlock(&late);
}
static void finish_all(void) {
    for (int i = 0; queues_up() && i < nqueues; i++)
        finish(queues[i].id, LONG_MAX);
}
static int is_done(void *stream, long end) {
    pthread_mutex_lock(&late);
    if (!delays())
        drain(stream, end);
    Queue *q = queue_of(stream);
    int done = q->first >= (end < q->end ? end : q->end);
    pthread_mutex_unlock(&late);
    return done;
}
static long later(void *stream, Late op) { // the number behind it
    pthread_mutex_lock(&late);
    Queue *q = queue_of(stream);
    if (q->first == q->end)
        q->base = q->first;
    if (q->end - q->base == q->room)
        q->ops = realloc(q->ops, (q->room = 2 * q->room + 64) * sizeof(Late));
    q->ops[q->end++ - q->base] = op;
    nullgpu_late += op.what == COPY || op.what == SET;
    long end = q->end;
    if (!delays())
        drain(stream, LONG_MAX);
    pthread_mutex_unlock(&late);
    return end;
}
void nullgpu_compute(void *stream) { // something is computed on it now
    if (queues_up())
        finish(stream, LONG_MAX);
}
// For nullnccl.c: a collective is given to a stream, may begin once it is `nullgpu_due`, and ends by `nullgpu_ended`.
long nullgpu_collective(void *stream, volatile int *done) {
    communicates = 1;
    return later(stream, (Late){COLLECTIVE, .done = done}) - 1;
}
int nullgpu_due(void *stream, long at, int late_enough) { // what comes before it on its stream is done
    pthread_mutex_lock(&late);
    int due = !lost && (delays() && !late_enough ? queue_of(stream)->first >= at : drain(stream, at));
    pthread_mutex_unlock(&late);
    return due;
}
void nullgpu_ended(volatile int *done) {
    pthread_mutex_lock(&late);
    *done = 1;
    for (int i = 0; !delays() && i < nqueues; i++)
        drain(queues[i].id, LONG_MAX);
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&late);
}
int nullgpu_device(void) { return dev; }
static void context_lost(void) { // who waits for the GPU gets its error
    pthread_mutex_lock(&late);
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&late);
}
static void dawdle(void) { // a background thread that waits does so for long, so the main one is ahead of it
    if (delays() && gettid() != getpid())
        usleep(500000);
}
static void move(void *d, const void *s, size_t n, void *stream) {
    if (!queues_up())
        memmove(d, s, n);
    else if (!kind_of(d)) { // to pageable memory: done when the call returns
        nullgpu_compute(stream);
        memmove(d, s, n);
    } else if (!kind_of(s)) { // from it: read when the call returns
        void *own = malloc(n);
        memcpy(own, s, n);
        later(stream, (Late){COPY, d, own, n, 1});
    } else
        later(stream, (Late){COPY, d, s, n});
}
E cudaDeviceSynchronize(void) {
    finish_all();
    if (capturing)
        return UNSUPPORTED;
    nullgpu_syncs++;
    return lost;
}
E cudaEventCreate(void **e) {
    *e = calloc(1, sizeof(Ev));
    return 0;
}
E cudaEventCreateWithFlags(void **e, unsigned f) { return cudaEventCreate(e); }
E cudaEventDestroy(void *e) {
    free(e);
    return 0;
}
E cudaEventRecord(void *e, void *s) {
    Ev *event = e;
    clock_gettime(CLOCK_MONOTONIC, &event->t);
    if (queues_up() && !capturing) {
        event->stream = s;
        event->at = later(s, (Late){RECORD});
        event->asked = 0;
    }
    return lost;
}
E cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return cudaEventRecord(e, s); }
E cudaEventQuery(void *e) {
    Ev *event = e;
    if (event->at && !is_done(event->stream, event->at)) {
        if (lost)
            return lost;
        pthread_mutex_lock(&late);
        int done = event->asked++ >= PATIENCE && drain(event->stream, event->at);
        pthread_mutex_unlock(&late);
        return done ? 0 : NOT_READY;
    }
    return lost;
}
E cudaEventSynchronize(void *e) {
    dawdle();
    if (((Ev *)e)->at)
        finish(((Ev *)e)->stream, ((Ev *)e)->at);
    if (capturing)
        return UNSUPPORTED;
    nullgpu_syncs++;
    return lost;
}
E cudaEventElapsedTime(float *ms, void *a, void *b) {
    Ev *x = a, *y = b;
    *ms = (y->t.tv_sec - x->t.tv_sec) * 1e3f + (y->t.tv_nsec - x->t.tv_nsec) / 1e6f;
    return 0;
}
static long ids = 16;
E cudaStreamCreate(void **s) {
    *s = (void *)(__sync_add_and_fetch(&ids, 16));
    return 0;
}
E cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return cudaStreamCreate(s); }
E cudaStreamDestroy(void *s) { return 0; }
E cudaStreamGetPriority(void *s, int *p) {
    *p = 0;
    return 0;
}
E cudaStreamQuery(void *s) {
    if (queues_up()) {
        pthread_mutex_lock(&late);
        int done = drain(s, LONG_MAX);
        pthread_mutex_unlock(&late);
        if (!done && !lost)
            return NOT_READY;
    }
    return lost;
}
E cudaStreamSynchronize(void *s) {
    dawdle();
    nullgpu_compute(s);
    if (capturing)
        return UNSUPPORTED;
    nullgpu_syncs++;
    return lost;
}
E cudaStreamWaitEvent(void *s, void *e, unsigned f) {
    if (queues_up() && !capturing && ((Ev *)e)->at)
        later(s, (Late){WAIT, .stream = ((Ev *)e)->stream, .at = ((Ev *)e)->at});
    return lost;
}
E cudaStreamIsCapturing(void *s, int *v) {
    *v = capturing && s == captured_stream;
    return 0;
}
E cudaStreamGetCaptureInfo(void *s, int *v, unsigned long long *id, void **g, void *d, void *e, size_t *n) {
    *v = capturing && s == captured_stream;
    if (id)
        *id = *v ? (unsigned long long)capturing : 0;
    if (g)
        *g = *v ? capturing : 0;
    if (n)
        *n = 0;
    return 0;
}
E cudaThreadExchangeStreamCaptureMode(int *m) { return 0; }
E cudaStreamBeginCapture(void *s, int m) {
    if (capturing)
        return UNSUPPORTED;
    capturing = calloc(1, sizeof(Graph));
    capturing->parts = 1;
    captured_stream = s;
    return 0;
}
E cudaStreamEndCapture(void *s, Graph **g) {
    if (!capturing || s != captured_stream)
        return UNSUPPORTED;
    *g = capturing;
    capturing = 0;
    return 0;
}
E cudaGraphDebugDotPrint() { return 0; }
E cudaGraphDestroy(Graph *g) {
    if (!__sync_sub_and_fetch(&g->parts, 1)) {
        free(g->nodes);
        free(g);
    }
    return 0;
}
E cudaGraphExecDestroy(Graph *g) { return cudaGraphDestroy(g); }
E cudaGraphGetNodes(Graph *g, void *nodes, size_t *n) {
    *n = g->n;
    return 0;
}
E cudaGraphInstantiateWithFlags(Graph **e, Graph *g, unsigned long long f) {
    __sync_add_and_fetch(&g->parts, 1);
    *e = g;
    return 0;
}
E cudaGraphInstantiate(Graph **e, Graph *g, unsigned long long f) { return cudaGraphInstantiateWithFlags(e, g, f); }
E cudaGraphLaunch(Graph *g, void *s) {
    nullgpu_compute(s);
    nullgpu_graphs++;
    for (size_t i = 0; i < g->n; i++) {
        Node *node = g->nodes + i;
        if (node->what == COPY)
            memmove(node->to, node->from, node->n);
        else if (node->what == SET)
            memset(node->to, node->value, node->n);
        else
            nullgpu_replayed++;
    }
    return work();
}
E cudaGraphNodeGetDependencies() { return 0; }
E cudaMalloc(void **p, size_t n) {
    if (lost)
        return lost;
    if (used + n > total() || due(1))
        return OUT_OF_MEMORY;
    *p = take(n, 2);
    return *p ? 0 : 2;
}
E cudaMallocAsync(void **p, size_t n, void *s) { return cudaMalloc(p, n); }
E cudaFree(void *p) {
    finish_all();
    return drop(p);
}
E cudaFreeAsync(void *p, void *s) { return drop(p); }
E cudaHostAlloc(void **p, size_t n, unsigned f) {
    *p = take(n, 1);
    return *p ? 0 : 2;
}
E cudaFreeHost(void *p) {
    finish_all();
    return drop(p);
}
E cudaHostRegister(void *p, size_t n, unsigned f) {
    note(p, n, 3);
    return 0;
}
E cudaHostUnregister(void *p) { return cudaFreeHost(p); }
E cudaMemGetInfo(size_t *f, size_t *t) {
    *t = total();
    *f = total() - used;
    return 0;
}
E cudaMemcpy(void *d, const void *s, size_t n, int k) {
    if (capturing)
        return UNSUPPORTED;
    finish_all();
    memmove(d, s, n);
    nullgpu_syncs++;
    if (k == 1)
        nullgpu_h2d++;
    if (k == 2)
        nullgpu_d2h++;
    return work();
}
E cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *st) {
    if (capturing && (!kind_of(d) || !kind_of(s)))
        return UNSUPPORTED;
    if (record((Node){COPY, d, s, n}))
        return 0;
    move(d, s, n, st);
    if (k == 1)
        nullgpu_h2d++;
    if (k == 2)
        nullgpu_d2h++;
    return work();
}
E cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, void *st) {
    move(d, s, n, st);
    return 0;
}
E cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int k, void *st) {
    for (size_t i = 0; i < h; i++)
        move((char *)d + i * dp, (char *)s + i * sp, w, st);
    return 0;
}
E cudaMemcpyToSymbol() { return 0; }
E cudaGetSymbolAddress(void **p, const void *s) {
    static char buf[1 << 20];
    *p = buf;
    return 0;
}
E cudaMemset(void *p, int v, size_t n) {
    finish_all();
    memset(p, v, n);
    return 0;
}
E cudaMemsetAsync(void *p, int v, size_t n, void *s) {
    if (record((Node){SET, p, 0, n, v}))
        return 0;
    if (queues_up())
        later(s, (Late){SET, p, 0, n, v});
    else
        memset(p, v, n);
    return 0;
}
E cudaMemPoolGetAttribute() { return 0; }
E cudaMemPoolSetAccess() { return 0; }
E cudaMemPoolSetAttribute() { return 0; }
E cudaMemPoolTrimTo() { return 0; }
E cudaIpcCloseMemHandle() { return 0; }
E cudaIpcGetEventHandle() { return 0; }
E cudaIpcGetMemHandle() { return 0; }
E cudaIpcOpenEventHandle() { return 801; }
E cudaIpcOpenMemHandle() { return 801; }
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    int k = kind_of(p);
    a->type = k == 2 ? 2 : k ? 1 : 0;
    a->device = dev;
    a->devicePointer = k ? (void *)p : 0;
    a->hostPointer = k == 1 || k == 3 ? (void *)p : 0;
    return 0;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = 90;
    a->ptxVersion = 90;
    a->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
E cudaFuncSetAttribute() { return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
    *n = 2;
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) {
    *n = 2;
    return 0;
}
const char *cudaGetErrorName(int e) { return e ? "cudaErrorNullGpu" : "cudaSuccess"; }
const char *cudaGetErrorString(int e) {
    switch (e) {
    case 0:
        return "no error";
    case OUT_OF_MEMORY:
        return "out of memory";
    case 46:
        return "CUDA-capable device(s) is/are busy or unavailable";
    case 101:
        return "invalid device ordinal";
    case 214:
        return "uncorrectable ECC error encountered";
    case 220:
        return "uncorrectable NVLink error detected during the execution";
    case 700:
        return "an illegal memory access was encountered";
    case 719:
        return "unspecified launch failure";
    default:
        return "null gpu error";
    }
}
E cudaGetLastError(void) { return lost; }
E cudaPeekAtLastError(void) { return lost; }
E cudaProfilerStart() { return 0; }
E cudaProfilerStop() { return 0; }
E cudaLaunchKernel() {
    if (record((Node){LAUNCH}))
        return 0;
    nullgpu_launches++;
    return work();
}
E cudaLaunchKernelExC() {
    if (record((Node){LAUNCH}))
        return 0;
    nullgpu_launches++;
    return work();
}
E cudaLaunchCooperativeKernel() {
    if (record((Node){LAUNCH}))
        return 0;
    nullgpu_launches++;
    return work();
}
E __cudaLaunchKernel() {
    if (record((Node){LAUNCH}))
        return 0;
    nullgpu_launches++;
    return work();
}
E __cudaGetKernel(void **k, const void *f) {
    *k = (void *)f;
    return 0;
}
char __cudaInitModule(void **h) { return 1; }
E cudaLaunchHostFunc(void *s, void (*f)(void *), void *d) {
    nullgpu_compute(s);
    f(d);
    return 0;
}
E cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *d, unsigned fl) {
    nullgpu_compute(s);
    f(s, 0, d);
    return 0;
}
static int generic() { return 0; }
E cudaGetDriverEntryPointByVersion(const char *sym, void **fn, unsigned v, unsigned long long fl, int *st) {
    void *h = dlopen("libcuda.so.1", RTLD_NOW);
    void *f = h ? dlsym(h, sym) : 0;
    *fn = f ? f : (void *)generic;
    if (st)
        *st = 0;
    return 0;
}
// cuBLAS
#define Z(n)                                                                                                           \
    E n() { return 0; }
E cublasCreate_v2(void **h) {
    *h = malloc(64);
    return 0;
}
Z(cublasDestroy_v2)
Z(cublasSetStream_v2) Z(cublasSetWorkspace_v2) Z(cublasSetMathMode) Z(cublasSetPointerMode_v2) E
    cublasGetMathMode(void *h, int *m) {
    *m = 0;
    return 0;
}
E cublasGetPointerMode_v2(void *h, int *m) {
    *m = 0;
    return 0;
}
long nullgpu_gemms = 0;
#define G(n)                                                                                                           \
    E n() {                                                                                                            \
        if (record((Node){PRODUCT}))                                                                                   \
            return 0;                                                                                                  \
        nullgpu_gemms++;                                                                                               \
        return work() ? 13 : 0;                                                                                        \
    }
G(cublasGemmEx)
G(cublasGemmStridedBatchedEx) G(cublasSgemm_v2) G(cublasSgemmEx) G(cublasSgemmStridedBatched) G(cublasDgemm_v2)
    G(cublasDgemmStridedBatched) G(cublasSgemv_v2) G(cublasDgemv_v2) G(cublasSdot_v2) G(cublasDdot_v2) G(cublasDotEx)
        G(cublasLtMatmul) size_t cublasLtGetVersion(void) {
    return 130100;
}
E cublasLtMatmulDescCreate(void **d) {
    *d = calloc(1, 512);
    return 0;
}
Z(cublasLtMatmulDescDestroy) Z(cublasLtMatmulDescSetAttribute) E cublasLtMatmulPreferenceCreate(void **d) {
    *d = calloc(1, 512);
    return 0;
}
Z(cublasLtMatmulPreferenceDestroy) Z(cublasLtMatmulPreferenceSetAttribute) E cublasLtMatrixLayoutCreate(void **d) {
    *d = calloc(1, 512);
    return 0;
}
Z(cublasLtMatrixLayoutDestroy)
Z(cublasLtMatrixLayoutSetAttribute) E cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c,
                                                                     void *d, void *p, int n, void *r, int *got) {
    *got = 1;
    return 0;
}
E cublasGetSmCountTarget(void *h, int *n) {
    *n = 132;
    return 0;
}
Z(cublasSetSmCountTarget) Z(cublasLtCreate) Z(cublasLtDestroy) __attribute__((destructor)) static void bye(void) {
    if (getenv("NULLGPU_STATS"))
        fprintf(stderr, "[nullgpu %d] launches %ld gemms %ld h2d %ld d2h %ld syncs %ld used %zu MB\n", (int)getpid(),
                nullgpu_launches, nullgpu_gemms, nullgpu_h2d, nullgpu_d2h, nullgpu_syncs, used >> 20);
}
E nullgpu_count(int what) {
    long *a[] = {&nullgpu_launches, &nullgpu_gemms, &nullgpu_h2d,   &nullgpu_d2h,
                 &nullgpu_syncs,    &nullgpu_graphs, &nullgpu_replayed};
    return (int)*a[what];
}
long nullgpu_used(void) { return (long)used; }
long nullgpu_pinned(void) { return (long)pinned; }

E cudaStreamGetDevice(void *s, int *d) {
    *d = dev;
    return 0;
}
E cudaStreamGetId(void *s, unsigned long long *i) {
    *i = (unsigned long long)s;
    return 0;
}
E cudaHostGetDevicePointer(void **d, void *h, unsigned f) {
    *d = h;
    return 0;
}
E cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
E cudaStreamCreateWithFlags(void **s, unsigned f) { return cudaStreamCreate(s); }
E cudaGetDriverEntryPoint(const char *s, void **f, unsigned long long fl, int *st) {
    return cudaGetDriverEntryPointByVersion(s, f, 13000, fl, st);
}
