#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
typedef int E;
static int count(void) {
    const char *s = getenv("NULLGPU_COUNT");
    return s ? atoi(s) : 1;
}
E cuInit(unsigned f) { return 0; }
E cuDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
E cuDeviceGetCount(int *n) {
    *n = count();
    return 0;
}
E cuDeviceGet(int *d, int o) {
    *d = o;
    return 0;
}
E cuDeviceGetName(char *s, int n, int d) {
    strncpy(s, "NVIDIA H100 80GB HBM3", n);
    return 0;
}
E cudaDeviceGetAttribute(int *, int, int);
E cuDeviceGetAttribute(int *v, int a, int d) {
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
        *v = 9;
        break;
    case 76:
        *v = 0;
        break;
    case 1:
        *v = 1024;
        break;
    case 10:
        *v = 32;
        break;
    case 12:
    case 82:
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
    default:
        *v = 1;
    }
    return 0;
}
E cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
E cuDevicePrimaryCtxRetain(void **c, int d) {
    *c = (void *)1;
    return 0;
}
E cuCtxGetCurrent(void **c) {
    *c = (void *)1;
    return 0;
}
E cuCtxSetCurrent(void *c) { return 0; }
E cuCtxGetDevice(int *d) {
    *d = 0;
    return 0;
}
E cuCtxGetLimit(size_t *v, int l) {
    *v = 1 << 20;
    return 0;
}
E cuCtxSetLimit() { return 0; }
E cuGetErrorString(int e, const char **s) {
    *s = e ? "null gpu driver error" : "no error";
    return 0;
}
E cuGetErrorName(int e, const char **s) {
    *s = "CUDA_SUCCESS";
    return 0;
}
E cuModuleLoadData(void **m, const void *i) {
    *m = (void *)1;
    return 0;
}
E cuModuleLoadDataEx(void **m) {
    *m = (void *)1;
    return 0;
}
E cuModuleLoad(void **m, const char *f) {
    *m = (void *)1;
    return 0;
}
E cuModuleUnload(void *m) { return 0; }
E cuModuleGetFunction(void **f, void *m, const char *n) {
    *f = (void *)1;
    return 0;
}
E cuFuncGetAttribute(int *v, int a, void *f) {
    switch (a) {
    case 0:
        *v = 1024;
        break;
    case 1:
        *v = 0;
        break;
    case 3:
        *v = 0;
        break;
    case 4:
        *v = 32;
        break;
    default:
        *v = 0;
    }
    return 0;
}
E cuFuncSetAttribute() { return 0; }
E cuFuncSetCacheConfig() { return 0; }
long nullcu_launches = 0;
static int captured(void) { // by the runtime, into a graph
    static int (*record)(void) = 0;
    if (!record)
        record = dlsym(RTLD_DEFAULT, "nullgpu_record_triton");
    return record && record();
}
E cuLaunchKernel() {
    if (!captured())
        nullcu_launches++;
    return 0;
}
E cuLaunchKernelEx() {
    if (!captured())
        nullcu_launches++;
    return 0;
}
E cuLaunchCooperativeKernel() {
    if (!captured())
        nullcu_launches++;
    return 0;
}
E nullcu_count(void) { return (int)nullcu_launches; }
E cuLinkAddData_v2() { return 0; }
E cuLinkComplete() { return 0; }
E cuLinkCreate_v2() { return 0; }
E cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) {
    *n = 2;
    return 0;
}
E cuOccupancyMaxActiveClusters(int *n) {
    *n = 66;
    return 0;
}
E cuPointerGetAttribute(void *data, int a, unsigned long long p) {
    if (a == 3 || a == 0 || a == 9)
        *(unsigned long long *)data = p;
    else
        *(int *)data = 0;
    return 0;
}
E cuTensorMapEncodeTiled() { return 0; }
E cuTensorMapEncodeIm2col() { return 0; }
E cuMemGetInfo_v2(size_t *f, size_t *t) {
    *f = *t = 80ul << 30;
    return 0;
}
E cuStreamSynchronize() { return 0; }
E cuCtxSynchronize() { return 0; }
// Memory of the GPU that is mapped piece by piece, for expandable segments: addresses are the host's, reserved without
// memory behind them; what is made counts as used.
void nullgpu_reserve(void *p, size_t n);
E nullgpu_use(long n);
E cuMemAddressReserve(void **p, size_t n, size_t align, void *at, unsigned long long flags) {
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED)
        return 2;
    nullgpu_reserve(*p, n);
    return 0;
}
E cuMemAddressFree(void *p, size_t n) {
    nullgpu_reserve(p, 0);
    return munmap(p, n) ? 1 : 0;
}
static int cannot_map(const char *call) { // virtual GPUs and WSL2
    const char *s = getenv("NULLGPU_NO_MAPPING");
    return s && !strcmp(s, call);
}
E cuMemCreate(size_t **handle, size_t n, const void *properties, unsigned long long flags) {
    if (cannot_map("cuMemCreate"))
        return 801;
    E error = nullgpu_use(n);
    if (error)
        return error;
    *handle = malloc(sizeof n);
    **handle = n;
    return 0;
}
E cuMemRelease(size_t *handle) {
    nullgpu_use(-(long)*handle);
    free(handle);
    return 0;
}
E cuMemMap(void *p, size_t n, size_t offset, size_t *handle, unsigned long long flags) { return 0; }
E cuMemUnmap(void *p, size_t n) { return madvise(p, n, MADV_DONTNEED) ? 1 : 0; }
E cuMemSetAccess(void *p, size_t n, const void *access, size_t count) {
    return cannot_map("cuMemSetAccess") ? 999 : 0;
}
E cuGetProcAddress_v2(const char *s, void **p) {
    *p = 0;
    return 500;
}
E cuGetExportTable() { return 500; }
