/* The CUDA calls that torch makes, answered on a machine without a GPU.
 *
 * A device's memory is the host's, zero at first. A kernel is not run: launching one ends the process, so that nothing
 * is taken for computed that was not (tests/stand_in/arithmetic.py computes on the CPU before torch would launch any).
 * Copies are made at once. What is asynchronous are the receives of nccl.c alone: an event is over when those are that
 * its stream had begun when it was recorded, and who waits for an event stands still until then.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "pending.h"

enum { DEVICES = 8, MOST_STREAMS = 4096, PROCESSORS = 108, MAJOR = 8, SHARED_BYTES = 48 << 10, OPTIN_BYTES = 163 << 10 };
static const size_t MEMORY = 80ull << 30;
static __thread int current;

/* Devices. */

cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *told, int device) {
  memset(told, 0, sizeof *told);
  strcpy(told->name, "stand-in");
  told->major = MAJOR;
  told->multiProcessorCount = PROCESSORS;
  told->totalGlobalMem = MEMORY;
  told->warpSize = 32;
  told->maxThreadsPerBlock = 1024;
  told->maxThreadsPerMultiProcessor = 2048;
  told->maxBlocksPerMultiProcessor = 32;
  told->regsPerBlock = told->regsPerMultiprocessor = 64 << 10;
  told->sharedMemPerBlock = SHARED_BYTES;
  told->sharedMemPerBlockOptin = told->sharedMemPerMultiprocessor = OPTIN_BYTES;
  told->maxThreadsDim[0] = told->maxThreadsDim[1] = 1024;
  told->maxThreadsDim[2] = 64;
  told->maxGridSize[0] = 0x7fffffff;
  told->maxGridSize[1] = told->maxGridSize[2] = 65535;
  told->unifiedAddressing = told->concurrentKernels = 1;
  told->pciBusID = device + 1;
  told->uuid.bytes[0] = (char)(device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_BYTES; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = OPTIN_BYTES; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  *least = 0;
  *most = -5;
  return cudaSuccess;
}

/* Memory. */

cudaError_t cudaMalloc(void **at, size_t size) {
  *at = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *at == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = MEMORY; return cudaSuccess; }
cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) { *at = calloc(1, size ? size : 1); return cudaSuccess; }
cudaError_t cudaFreeHost(void *at) { free(at); return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
  memset(at, value, size);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *told, const void *at) {
  memset(told, 0, sizeof *told);
  told->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

/* Streams and events. */

struct event {
  double at_ms;
  int count;
  struct pending *before[MOST_PENDING];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pending *begun[MOST_STREAMS][MOST_PENDING];
static int counts[MOST_STREAMS];

static int place(void *stream) { return (int)((size_t)stream % MOST_STREAMS); }

static int only_unfinished(struct pending **them, int count) {
  int kept = 0;
  for (int i = 0; i < count; i++)
    if (!them[i]->is_over) them[kept++] = them[i];
  return kept;
}

void begin(void *stream, struct pending *what) {
  int at = place(stream);
  pthread_mutex_lock(&lock);
  counts[at] = only_unfinished(begun[at], counts[at]);
  if (counts[at] == MOST_PENDING) give_up("a stream waits for too many messages");
  begun[at][counts[at]++] = what;
  pthread_mutex_unlock(&lock);
}

static void record(struct event *event, void *stream) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  event->at_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  pthread_mutex_lock(&lock);
  int at = place(stream);
  memcpy(event->before, begun[at], counts[at] * sizeof *event->before);
  event->count = only_unfinished(event->before, counts[at]);
  pthread_mutex_unlock(&lock);
}

static int is_over(struct event *event) { return only_unfinished(event->before, event->count) == 0; }

static void wait_for(struct event *event) {
  while (!is_over(event)) usleep(50);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  static size_t last = 100; /* beyond the numbers that CUDA itself gives to default streams */
  *stream = (cudaStream_t)__sync_add_and_fetch(&last, 1);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(struct event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  record((struct event *)event, stream);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return is_over((struct event *)event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { wait_for((struct event *)event); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return cudaEventSynchronize(event);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  struct event *first = (struct event *)from, *last = (struct event *)to;
  if (first->at_ms == 0 || last->at_ms == 0) return cudaErrorInvalidResourceHandle;
  *ms = (float)(last->at_ms - first->at_ms);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  struct event *here = calloc(1, sizeof *here);
  record(here, stream);
  wait_for(here);
  free(here);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  struct event *here = calloc(1, sizeof *here);
  record(here, stream);
  cudaError_t found = cudaEventQuery((cudaEvent_t)here);
  free(here);
  return found;
}
cudaError_t cudaDeviceSynchronize(void) {
  for (size_t at = 0; at < MOST_STREAMS; at++)
    if (counts[at]) cudaStreamSynchronize((cudaStream_t)at);
  return cudaSuccess;
}

/* Kernels: none is run. */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  give_up("a kernel was launched, and nothing would compute it");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **args) {
  give_up("a kernel was launched, and nothing would compute it");
}
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in"; }
const char *cudaGetErrorName(cudaError_t error) { return "standIn"; }

/* The driver, as far as autograd asks it whether a device is in use. */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
