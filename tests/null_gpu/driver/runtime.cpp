// libcudart: the runtime over the driver.
#include "core.h"

#include <driver_types.h>

#include <cstring>

using namespace null_gpu;

static const char *KERNEL = "kernel of the runtime";
static thread_local CUstream configured = nullptr;  // between <<<..>>> and the launch

static int launch_kernel(CUstream stream) {
  count("launches of the runtime");
  return launch(KERNEL, stream);
}

extern "C" {

int cudaRuntimeGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
int cudaGetDeviceCount(int *n) { return cuDeviceGetCount(n); }

int cudaGetDevice(int *device) {
  *device = current_device();
  return cudaSuccess;
}

int cudaSetDevice(int device) {
  set_current_device(device);
  return cudaSuccess;
}

int cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  const Model &model = model_of(physical(device));
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, name_of(physical(device)).c_str());
  properties->major = model.major;
  properties->minor = model.minor;
  properties->multiProcessorCount = model.multiprocessors;
  properties->totalGlobalMem = memory_of(physical(device));
  properties->l2CacheSize = model.l2;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  return cudaSuccess;
}

int cudaDeviceGetAttribute(int *value, int name, int device) {
  return cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(name), device);
}

int cudaGetLastError() { return cudaSuccess; }
int cudaPeekAtLastError() { return cudaSuccess; }

const char *cudaGetErrorName(int error) {
  const char *name;
  cuGetErrorName(static_cast<CUresult>(error), &name);
  return name;
}

const char *cudaGetErrorString(int error) {
  const char *text;
  cuGetErrorString(static_cast<CUresult>(error), &text);
  return text;
}

int cudaMalloc(void **p, size_t bytes) {
  *p = allocate(bytes, current_device());
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

int cudaFree(void *p) { return release(p); }
int cudaMemGetInfo(size_t *free, size_t *total) { return cuMemGetInfo(free, total); }

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, CUstream stream) {
  return copy(to, from, bytes, stream);
}

int cudaMemcpy(void *to, const void *from, size_t bytes, int) {
  if (CUresult error = copy(to, from, bytes, nullptr)) return error;
  return synchronize(nullptr);
}

int cudaMemsetAsync(void *p, int value, size_t bytes, CUstream stream) {
  return cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(p), value, bytes, stream);
}

int cudaDeviceSynchronize() { return cuCtxSynchronize(); }
int cudaStreamCreate(CUstream *stream) { return cuStreamCreate(stream, 0); }
int cudaStreamCreateWithFlags(CUstream *stream, unsigned flags) { return cuStreamCreate(stream, flags); }
int cudaStreamDestroy(CUstream stream) { return cuStreamDestroy(stream); }
int cudaStreamSynchronize(CUstream stream) { return synchronize(stream); }
int cudaStreamWaitEvent(CUstream stream, CUevent event, unsigned) { return cuStreamWaitEvent(stream, event, 0); }
int cudaStreamEndCapture(CUstream stream, CUgraph *graph) { return cuStreamEndCapture(stream, graph); }

int cudaStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  return cuStreamCreateWithPriority(stream, flags, priority);
}

int cudaStreamBeginCapture(CUstream stream, int) {
  return cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
}

int cudaStreamIsCapturing(CUstream stream, int *status) {
  *status = capturing(stream);
  return cudaSuccess;
}

int cudaEventCreate(CUevent *event) { return cuEventCreate(event, 0); }
int cudaEventCreateWithFlags(CUevent *event, unsigned) { return cuEventCreate(event, 0); }
int cudaEventRecord(CUevent event, CUstream stream) { return cuEventRecord(event, stream); }
int cudaEventSynchronize(CUevent event) { return cuEventSynchronize(event); }
int cudaEventDestroy(CUevent event) { return cuEventDestroy(event); }

int cudaGraphCreate(CUgraph *graph, unsigned) { return cuGraphCreate(graph, 0); }
int cudaGraphDestroy(CUgraph graph) { return cuGraphDestroy(graph); }
int cudaGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *n) { return cuGraphGetNodes(graph, nodes, n); }

int cudaGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *n) {
  return cuGraphGetNodes(graph, nodes, n);
}

int cudaGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long) {
  return cuGraphInstantiateWithFlags(executable, graph, 0);
}

int cudaGetFuncBySymbol(CUfunction *function, const void *) {
  *function = function_named(KERNEL);
  return cudaSuccess;
}

// CUB, which sorts, chooses its kernels by the version of an empty one.
int cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  const Model &model = model_of(physical(current_device()));
  memset(attributes, 0, sizeof *attributes);
  attributes->ptxVersion = attributes->binaryVersion = 10 * model.major + model.minor;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

// Transformer Engine's quantizations ask for more shared memory than a kernel has without it.
int cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) {
  *n = 2;
  return cudaSuccess;
}

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long, int *result) {
  CUdriverProcAddressQueryResult found;
  cuGetProcAddress(name, function, CUDA_VERSION, 0, &found);
  if (result) *result = *function ? 0 : 1;
  return cudaSuccess;
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, int *result) {
  return cudaGetDriverEntryPoint(name, function, 0, result);
}

void **__cudaRegisterFatBinary(void *) { return static_cast<void **>(opaque_handle()); }

unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream stream) { return configured = stream, 0; }

int __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, CUstream *stream) {
  *stream = configured;
  return cudaSuccess;
}

int __cudaGetKernel(CUfunction *kernel, const void *) {
  *kernel = nullptr;
  return cudaSuccess;
}

int __cudaLaunchKernel(CUfunction, dim3, dim3, void **, size_t, CUstream stream) { return launch_kernel(stream); }

int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, CUstream stream) { return launch_kernel(stream); }

int cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *, void **) {
  return launch_kernel(config->stream);
}
}
