// NCCL between emulated GPUs of one machine, over sockets. A collective is given to its stream and computed by a thread of
// its communicator, which stands for the GPU: the host goes on, and what comes behind it on the stream waits (nullrt.c).
// As NCCL does: when a peer's connection breaks (it died), ncclCommGetAsyncError says ncclRemoteError and the collective
// still spins until ncclCommAbort; with NULLNCCL_SILENT, as over NVLink, nothing notices. A stopped peer is waited for;
// a GPU that failed takes part in nothing more. ncclCommFinalize and ncclCommDestroy wait for what was begun.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
typedef int E;
enum { SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS };
enum { SUM, PROD, MAX, MIN, AVG, OPS };
enum { MOST = 64, PATIENCE_US = 3000 };
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE } Kind;
typedef struct {
    Kind kind;
    const char *from;
    char *to;
    size_t count;
    int type, op, peer; // peer: the root, or the other end
    double factor;      // of what is sent, before it is added
} Op;
typedef struct Task {
    Op *ops;
    int n;
    void *stream;
    long at;
    volatile int done;
    struct Task *next;
} Task;
typedef struct {
    int n, rank, device, blocking, splits;
    char name[72];
    int peers[MOST];
    volatile int ready, error, aborted, closing;
    Task *first, **last;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t thread;
    double factors[MOST]; // of operators that multiply first
    int operators;
} Comm;
typedef struct {
    int peer;
    char *data;
    size_t n;
} Piece;
long nullgpu_collective(void *stream, volatile int *done);
int nullgpu_due(void *stream, long at, int late_enough);
void nullgpu_ended(volatile int *done);
int nullgpu_device(void);

static int nap(Comm *c) { // whether to go on waiting
    usleep(200);
    return !c->aborted;
}
static void fail(Comm *c, int error) {
    if (!c->error)
        c->error = error;
}
static void address(struct sockaddr_un *a, socklen_t *length, const char *name, int rank) { // in no file system
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    *length = offsetof(struct sockaddr_un, sun_path) + 1 + sprintf(a->sun_path + 1, "nullnccl.%s.%d", name, rank);
}
static int whole(Comm *c, int fd, void *data, size_t n, int sends) { // a few bytes while connecting
    for (size_t done = 0; done < n;) {
        ssize_t k = sends ? send(fd, (char *)data + done, n - done, MSG_NOSIGNAL) : recv(fd, (char *)data + done, n - done, 0);
        if (k > 0)
            done += k;
        else if (k == 0 || (errno != EAGAIN && errno != EINTR) || !nap(c))
            return 0;
    }
    return 1;
}
static int connect_all(Comm *c) { // to lower ranks; higher ones come
    struct sockaddr_un a;
    socklen_t length;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    address(&a, &length, c->name, c->rank);
    int ok = !bind(listener, (void *)&a, length) && !listen(listener, MOST);
    for (int r = 0; ok && r < c->rank; r++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        address(&a, &length, c->name, r);
        while (connect(fd, (void *)&a, length))
            if (!nap(c)) { // or it has not begun to listen
                ok = 0;
                break;
            }
        c->peers[r] = fd;
        ok = ok && whole(c, fd, &c->rank, sizeof c->rank, 1);
    }
    for (int r = c->rank + 1; ok && r < c->n; r++) {
        int fd, peer = -1;
        while ((fd = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC)) < 0)
            if (!nap(c)) {
                close(listener);
                return 0;
            }
        ok = whole(c, fd, &peer, sizeof peer, 0) && peer > c->rank && peer < c->n;
        if (ok)
            c->peers[peer] = fd;
    }
    close(listener);
    return ok;
}
// Send and receive pieces, side by side; those of a peer in their order. 0 where that was cut short.
static int swap(Comm *c, Piece *out, int nout, Piece *in, int nin) {
    while (1) {
        struct pollfd polled[MOST];
        int sending[MOST], receiving[MOST], peers[MOST], n = 0, open = 0;
        for (int r = 0; r < c->n; r++)
            sending[r] = receiving[r] = -1;
        for (int i = nout - 1; i >= 0; i--)
            if (out[i].n)
                sending[out[i].peer] = i, open++;
        for (int i = nin - 1; i >= 0; i--)
            if (in[i].n)
                receiving[in[i].peer] = i, open++;
        if (!open)
            return 1;
        if (c->aborted)
            return 0;
        int own_out = sending[c->rank], own_in = receiving[c->rank];
        if (own_out >= 0 && own_in >= 0) { // to itself
            Piece *a = out + own_out, *b = in + own_in;
            size_t k = a->n < b->n ? a->n : b->n;
            memmove(b->data, a->data, k);
            a->data += k, b->data += k, a->n -= k, b->n -= k;
            continue;
        }
        for (int r = 0; r < c->n; r++)
            if (r != c->rank && (sending[r] >= 0 || receiving[r] >= 0)) {
                peers[n] = r;
                polled[n++] = (struct pollfd){
                    c->peers[r], (sending[r] >= 0 ? POLLOUT : 0) | (receiving[r] >= 0 ? POLLIN : 0)};
            }
        poll(polled, n, 20);
        for (int i = 0; i < n; i++) {
            int r = peers[i], fd = c->peers[r], lost = 0;
            if (sending[r] >= 0 && polled[i].revents & (POLLOUT | POLLERR | POLLHUP)) {
                Piece *piece = out + sending[r];
                ssize_t done = send(fd, piece->data, piece->n, MSG_NOSIGNAL);
                if (done > 0)
                    piece->data += done, piece->n -= done;
                lost |= done < 0 && errno != EAGAIN && errno != EINTR;
            }
            if (receiving[r] >= 0 && polled[i].revents & (POLLIN | POLLERR | POLLHUP)) {
                Piece *piece = in + receiving[r];
                ssize_t done = recv(fd, piece->data, piece->n, 0);
                if (done > 0)
                    piece->data += done, piece->n -= done;
                lost |= done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR);
            }
            if (lost) {
                if (!getenv("NULLNCCL_SILENT"))
                    fail(c, REMOTE);
                while (nap(c))
                    ;
                return 0;
            }
        }
    }
}
static size_t width(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }
static float of_bf16(uint16_t x) {
    union {
        uint32_t i;
        float f;
    } u = {(uint32_t)x << 16};
    return u.f;
}
static uint16_t to_bf16(float f) { // to nearest, ties to even
    union {
        float f;
        uint32_t i;
    } u = {f};
    return f != f ? 0x7fc0 : (u.i + 0x7fff + (u.i >> 16 & 1)) >> 16;
}
static double get(const char *p, size_t i, int type) {
    switch (type) {
    case 6:
        return ((_Float16 *)p)[i];
    case 7:
        return ((float *)p)[i];
    case 8:
        return ((double *)p)[i];
    default:
        return of_bf16(((uint16_t *)p)[i]);
    }
}
static void put(char *p, size_t i, int type, double x) {
    if (type == 6)
        ((_Float16 *)p)[i] = x;
    else if (type == 7)
        ((float *)p)[i] = x;
    else if (type == 8)
        ((double *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = to_bf16(x);
}
#define COMBINE(x, y, op) ((op) == PROD ? (x) * (y) : (op) == MAX ? ((x) > (y) ? (x) : (y)) : (op) == MIN ? ((x) < (y) ? (x) : (y)) : (x) + (y))
#define INTEGERS(T)                                                                                                    \
    for (size_t i = 0; i < n; i++)                                                                                     \
        ((T *)to)[i] = COMBINE(((T *)to)[i], ((T *)from)[i], op);                                                      \
    break
static void add(char *to, const char *from, size_t n, int type, int op) { // each sum is rounded to the type
    switch (type) {
    case 0:
        INTEGERS(int8_t);
    case 1:
        INTEGERS(uint8_t);
    case 2:
        INTEGERS(int32_t);
    case 3:
        INTEGERS(uint32_t);
    case 4:
        INTEGERS(int64_t);
    case 5:
        INTEGERS(uint64_t);
    case 7:
        INTEGERS(float);
    default:
        for (size_t i = 0; i < n; i++)
            put(to, i, type, COMBINE(get(to, i, type), get(from, i, type), op));
    }
}
static void scale(char *p, size_t n, int type, double factor) {
    for (size_t i = 0; type >= 6 && i < n; i++)
        put(p, i, type, type == 7 ? (float)get(p, i, type) * (float)factor : get(p, i, type) * factor);
}
// A planned end: a signal to this process in the middle of a collective that it takes part in, after so many more.
static volatile int struck = 0;
static volatile long before = 0;
void nullnccl_strike(int number, long calls) {
    before = calls;
    struck = number;
}
static void strike(Comm *c, const Piece *out, int n) { // half of what is sent has left
    Piece halves[MOST];
    for (int i = 0; i < n; i++)
        halves[i] = (Piece){out[i].peer, out[i].data, out[i].peer == c->rank ? 0 : out[i].n / 2};
    swap(c, halves, n, 0, 0);
    raise(struck); // to this thread: else it goes on until another one takes the signal
}
static int p2p(Comm *c, Op *ops, int n) {
    Piece *pieces = calloc(2 * n, sizeof *pieces);
    int nout = 0, nin = 0;
    for (int i = 0; i < n; i++) {
        size_t bytes = ops[i].count * width(ops[i].type);
        if (ops[i].kind == SEND)
            pieces[nout++] = (Piece){ops[i].peer, (char *)ops[i].from, bytes};
        else
            pieces[n + nin++] = (Piece){ops[i].peer, ops[i].to, bytes};
    }
    int ok = swap(c, pieces, nout, pieces + n, nin);
    free(pieces);
    return ok;
}
static int collective(Comm *c, Op *o) { // sums are of ranks in their order, the same bits on all
    size_t n = o->count * width(o->type);
    Piece out[MOST], in[MOST];
    int nout = 0, nin = 0, all = o->kind == ALL_REDUCE || o->kind == REDUCE_SCATTER, ok;
    int adds = all || o->kind == REDUCE, parts = o->kind == REDUCE_SCATTER ? c->n : 1;
    char *own = (char *)o->from, *taken = 0;
    if (adds) {
        own = memcpy(malloc(n * parts + 1), o->from, n * parts);
        if (o->factor != 1)
            scale(own, o->count * parts, o->type, o->factor);
        taken = malloc(n * c->n + 1);
    }
    for (int r = 0; r < c->n; r++) {
        int root = o->peer == r, mine = o->peer == c->rank;
        switch (o->kind) {
        case ALL_REDUCE:
        case REDUCE_SCATTER:
        case ALL_GATHER:
        case ALL_TO_ALL:
            out[nout++] = (Piece){r, own + (parts > 1 || o->kind == ALL_TO_ALL ? r * n : 0), n};
            in[nin++] = (Piece){r, (adds ? taken : o->to) + r * n, n};
            break;
        case REDUCE:
            if (root)
                out[nout++] = (Piece){r, own, n};
            if (mine)
                in[nin++] = (Piece){r, taken + r * n, n};
            break;
        default: // BROADCAST
            if (mine)
                out[nout++] = (Piece){r, own, n};
            if (root)
                in[nin++] = (Piece){r, o->to, n};
        }
    }
    if (struck && __sync_fetch_and_sub(&before, 1) == 0) {
        strike(c, out, nout); // who is continued after a stop has sent this much twice
        struck = 0;
    }
    ok = swap(c, out, nout, in, nin);
    if (ok && adds && (all || o->peer == c->rank)) {
        for (int r = 1; r < c->n; r++)
            add(taken, taken + r * n, o->count, o->type, o->op == AVG ? SUM : o->op);
        if (o->op == AVG)
            scale(taken, o->count, o->type, 1.0 / c->n);
        memcpy(o->to, taken, n);
    }
    if (adds)
        free(own), free(taken);
    return ok;
}
static void *run(void *given) {
    Comm *c = given;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, 0);
    if (!connect_all(c))
        fail(c, REMOTE);
    pthread_mutex_lock(&c->mutex);
    c->ready = 1;
    pthread_cond_broadcast(&c->changed);
    while (1) {
        Task *t = c->first;
        if (!t) {
            if (c->closing || c->aborted)
                break;
            pthread_cond_wait(&c->changed, &c->mutex);
            continue;
        }
        pthread_mutex_unlock(&c->mutex);
        int waited = 0, ok = 1;
        while (t->stream != (void *)-1 && !nullgpu_due(t->stream, t->at, waited >= PATIENCE_US) && nap(c))
            waited += 200;
        for (int i = 0, n; i < t->n && ok && !c->aborted; i += n) {
            for (n = 0; i + n < t->n && t->ops[i + n].kind >= SEND; n++)
                ;
            ok = n ? p2p(c, t->ops + i, n) : collective(c, t->ops + i);
            n += !n;
        }
        pthread_mutex_lock(&c->mutex);
        c->first = t->next;
        if (!c->first)
            c->last = &c->first;
        pthread_cond_broadcast(&c->changed);
        nullgpu_ended(&t->done); // and never freed: a stream may still ask
    }
    pthread_mutex_unlock(&c->mutex);
    return 0;
}
static Task *submit(Comm *c, Op *ops, int n, void *stream) {
    Task *t = calloc(1, sizeof *t);
    t->ops = memcpy(malloc(n * sizeof *ops), ops, n * sizeof *ops);
    t->n = n;
    t->stream = stream;
    pthread_mutex_lock(&c->mutex);
    if (stream != (void *)-1)
        t->at = nullgpu_collective(stream, &t->done);
    if (c->aborted)
        nullgpu_ended(&t->done);
    else {
        *c->last = t;
        c->last = &t->next;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->mutex);
    return t;
}
// ---- groups: what a thread asks between Start and End is one task of each communicator
typedef struct {
    Comm *c;
    void *stream;
    Op op;
} Asked;
static __thread Asked *asked = 0;
static __thread int nasked = 0, depth = 0;
static E ask(Comm *c, void *stream, Op op) {
    if (!c || c->aborted || op.type < 0 || op.type > 11 || op.peer < 0 || op.peer >= c->n)
        return ARGUMENT;
    op.factor = 1;
    if (op.op > AVG && op.kind <= REDUCE_SCATTER)
        op.factor = c->factors[op.op - OPS], op.op = SUM;
    if (!depth) {
        submit(c, &op, 1, stream);
        return c->error;
    }
    asked = realloc(asked, (nasked + 1) * sizeof *asked);
    asked[nasked++] = (Asked){c, stream, op};
    return SUCCESS;
}
E ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}
E ncclGroupEnd(void) {
    if (--depth)
        return SUCCESS;
    Op *ops = malloc((nasked + 1) * sizeof *ops);
    E found = SUCCESS;
    for (int i = 0; i < nasked; i++) {
        Comm *c = asked[i].c;
        int n = 0;
        for (int j = i; c && j < nasked; j++)
            if (asked[j].c == c) {
                ops[n++] = asked[j].op;
                asked[j].c = 0;
            }
        if (n) {
            submit(c, ops, n, asked[i].stream);
            found = found ? found : c->error;
        }
    }
    free(ops);
    nasked = 0;
    return found;
}
E ncclGroupSimulateEnd(void *info) { return ncclGroupEnd(); }
// ---- communicators
typedef struct {
    char b[128];
} Id;
static Comm *begin(int n, int rank, const char *name, int blocking) {
    Comm *c = calloc(1, sizeof *c);
    c->n = n;
    c->rank = rank;
    c->device = nullgpu_device();
    c->blocking = blocking;
    snprintf(c->name, sizeof c->name, "%s", name);
    memset(c->peers, -1, sizeof c->peers);
    c->last = &c->first;
    pthread_mutex_init(&c->mutex, 0);
    pthread_cond_init(&c->changed, 0);
    pthread_create(&c->thread, 0, run, c);
    pthread_mutex_lock(&c->mutex);
    while (blocking && !c->ready)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
    return c;
}
static int waits(const void *config) { // ncclConfig_t: size, magic, version, blocking
    return !config || *(const int *)((const char *)config + 16) != 0;
}
static E begun(Comm *c) { return c->error ? c->error : c->ready ? SUCCESS : IN_PROGRESS; }
E ncclGetVersion(int *v) {
    *v = 22809;
    return SUCCESS;
}
E ncclGetUniqueId(Id *id) {
    unsigned char random[16];
    memset(id, 0, sizeof *id);
    if (getentropy(random, sizeof random))
        return SYSTEM;
    for (int i = 0; i < 16; i++)
        sprintf(id->b + 2 * i, "%02x", random[i]);
    return SUCCESS;
}
const char *ncclGetErrorString(int e) {
    return (const char *[]){"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"}[e];
}
const char *ncclGetLastError(Comm *c) { return c && c->error ? "socketProgress: Connection closed by remote peer" : ""; }
E ncclCommInitRankConfig(Comm **c, int n, Id id, int rank, void *config) {
    if (n > MOST)
        return ARGUMENT;
    *c = begin(n, rank, id.b, waits(config));
    return begun(*c);
}
E ncclCommInitRank(Comm **c, int n, Id id, int rank) { return ncclCommInitRankConfig(c, n, id, rank, 0); }
E ncclCommInitRankScalable(Comm **c, int n, int rank, int nids, Id *ids, void *config) {
    return ncclCommInitRankConfig(c, n, ids[0], rank, config);
}
E ncclCommSplit(Comm *p, int color, int key, Comm **c, void *config) {
    int mine[2] = {color, key}, theirs[MOST][2], n = 0, rank = 0;
    Op op = {ALL_GATHER, (char *)mine, (char *)theirs, 2, 2, SUM, 0, 1};
    Task *t = submit(p, &op, 1, (void *)-1);
    pthread_mutex_lock(&p->mutex);
    while (!t->done && !p->aborted)
        pthread_cond_wait(&p->changed, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
    *c = 0;
    if (p->error || p->aborted)
        return p->error ? p->error : INTERNAL;
    p->splits++;
    if (color < 0)
        return SUCCESS;
    for (int r = 0; r < p->n; r++)
        if (theirs[r][0] == color) {
            n++;
            rank += theirs[r][1] < key || (theirs[r][1] == key && r < p->rank);
        }
    uint64_t hash = 1469598103934665603ull; // FNV-1a
    char name[72];
    for (const char *s = p->name; *s; s++)
        hash = (hash ^ (unsigned char)*s) * 1099511628211ull;
    snprintf(name, sizeof name, "%016llx.%d.%d", (unsigned long long)hash, p->splits, color);
    *c = begin(n, rank, name, waits(config));
    return begun(*c);
}
E ncclCommCount(Comm *c, int *n) {
    *n = c->n;
    return SUCCESS;
}
E ncclCommUserRank(Comm *c, int *rank) {
    *rank = c->rank;
    return SUCCESS;
}
E ncclCommCuDevice(Comm *c, int *device) {
    *device = c->device;
    return SUCCESS;
}
E ncclCommGetAsyncError(Comm *c, int *e) {
    *e = c->error ? c->error : !c->ready || (c->closing && c->first) ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}
static void end(Comm *c) { // what is left of it stays: who has a pointer may ask
    pthread_join(c->thread, 0);
    for (int r = 0; r < c->n; r++)
        if (c->peers[r] >= 0)
            close(c->peers[r]);
}
E ncclCommAbort(Comm *c) {
    pthread_mutex_lock(&c->mutex);
    int already = c->aborted;
    c->aborted = 1;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    if (!already)
        end(c);
    return SUCCESS;
}
E ncclCommFinalize(Comm *c) {
    pthread_mutex_lock(&c->mutex);
    c->closing = 1;
    pthread_cond_broadcast(&c->changed);
    while (c->blocking && c->first && !c->aborted)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
    return c->first ? IN_PROGRESS : SUCCESS;
}
E ncclCommDestroy(Comm *c) {
    pthread_mutex_lock(&c->mutex);
    int already = c->aborted;
    c->closing = 1;
    pthread_cond_broadcast(&c->changed);
    while (c->first && !c->aborted)
        pthread_cond_wait(&c->changed, &c->mutex);
    c->aborted = 1;
    pthread_mutex_unlock(&c->mutex);
    if (!already)
        end(c);
    return SUCCESS;
}
E ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *c) {
    if (c->operators == MOST)
        c->operators = 0; // each is used at once
    c->factors[c->operators] = get(scalar, 0, type);
    *op = OPS + c->operators++;
    return SUCCESS;
}
E ncclRedOpDestroy(int op, Comm *c) { return SUCCESS; }
// ---- what is asked of them
E ncclAllReduce(const void *from, void *to, size_t n, int type, int op, Comm *c, void *stream) {
    return ask(c, stream, (Op){ALL_REDUCE, from, to, n, type, op});
}
E ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, Comm *c, void *stream) {
    return ask(c, stream, (Op){REDUCE, from, to, n, type, op, root});
}
E ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Comm *c, void *stream) {
    return ask(c, stream, (Op){BROADCAST, from, to, n, type, SUM, root});
}
E ncclBcast(void *data, size_t n, int type, int root, Comm *c, void *stream) {
    return ncclBroadcast(data, data, n, type, root, c, stream);
}
E ncclAllGather(const void *from, void *to, size_t n, int type, Comm *c, void *stream) {
    return ask(c, stream, (Op){ALL_GATHER, from, to, n, type});
}
E ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, Comm *c, void *stream) {
    return ask(c, stream, (Op){REDUCE_SCATTER, from, to, n, type, op});
}
E ncclAlltoAll(const void *from, void *to, size_t n, int type, Comm *c, void *stream) {
    return ask(c, stream, (Op){ALL_TO_ALL, from, to, n, type});
}
E ncclSend(const void *from, size_t n, int type, int peer, Comm *c, void *stream) {
    return ask(c, stream, (Op){SEND, from, 0, n, type, SUM, peer});
}
E ncclRecv(void *to, size_t n, int type, int peer, Comm *c, void *stream) {
    return ask(c, stream, (Op){RECEIVE, 0, to, n, type, SUM, peer});
}
// ---- not emulated: several GPUs in a process, smaller communicators, registered memory
E ncclCommInitAll(void) { return USAGE; }
E ncclCommShrink(void) { return USAGE; }
#define NOTHING(name)                                                                                                  \
    E name(void) { return SUCCESS; }
NOTHING(ncclCommRegister)
NOTHING(ncclCommDeregister)
NOTHING(ncclCommWindowRegister)
NOTHING(ncclCommWindowDeregister)
NOTHING(ncclDevCommCreate)
NOTHING(ncclDevCommDestroy)
NOTHING(ncclMemAlloc)
NOTHING(ncclMemFree)
