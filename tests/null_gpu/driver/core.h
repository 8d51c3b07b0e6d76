// What the null libraries share: settings, devices, memory, streams, kernels and faults. `libcuda.so.1`
// defines it; the other libraries link to it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#define COUNT null_gpu::count(__func__)

namespace null_gpu {

using Lock = std::unique_lock<std::mutex>;

static const int MOST_DEVICES = 64;

// A GPU model as the driver and NVML describe it.
struct Model {
  const char *key;   // in NULL_GPU_MODEL
  const char *name;  // the driver's, to which " (null)" is added
  int major, minor, multiprocessors;
  size_t memory;  // bytes
  int l2;         // bytes
  int nvlinks;
};

// settings.cpp
long setting(const char *name, long otherwise);
bool still();  // NULL_GPU_STILL: collectives and copies, but for small ones with the host, leave memory untouched
std::string text_setting(const char *name);
int physical_devices();
const Model &model_of(int physical);
std::string name_of(int physical);
size_t memory_of(int physical);
double state_of(int physical, const std::string &key, double otherwise);  // as the file NULL_GPU_STATE says
void count(const std::string &name, long n = 1);  // for NULL_GPU_COUNTS
void *opaque_handle();

// devices.cpp. A device is an ordinal among those that CUDA_VISIBLE_DEVICES names.
int device_count();
int physical(int device);
int current_device();
void set_current_device(int device);
CUcontext context_of(int device);
int device_of(CUcontext context);

// faults.cpp
enum class Fault { ILLEGAL_ADDRESS, ECC, LOST, HANG, SLOW, MEMORY, NCCL_SYSTEM, NCCL_REMOTE, NCCL_HANG, CUPTI };
struct FaultSettings {
  Fault kind;
  int device;    // physical
  long at;       // the kernel or collective, from 1, that fails
  long factor;   // of SLOW
  size_t bytes;  // of MEMORY
};
const FaultSettings *fault(Fault kind, int device);  // null where no such fault is set for this process
int lost_before();                                   // 1 where a GPU was lost before this process began
CUresult error_of(int device);                       // the context's error, which stays
void run_kernel(int device);                         // on a stream: waits, or fails as NULL_GPU_FAULT says
void move(int device, const char *link, size_t bytes);  // waits as long as NULL_GPU_STATE says, in GB/s by link
int nccl_error(int device);                          // of the collective that is called now, as ncclResult_t

// memory.cpp
void *allocate(size_t bytes, int device);  // null where there is no memory left
CUresult release(void *p);

// copies.cpp
void copy_within(CUdeviceptr to, CUdeviceptr from, size_t bytes);  // a GPU, or between GPUs
void copy_with_host(void *to, const void *from, size_t bytes);
void zero(CUdeviceptr p, size_t bytes);
CUresult copy(void *to, const void *from, size_t bytes, CUstream stream);  // with the host

// streams.cpp
CUstream stream_or_default(CUstream stream);
int device_of(CUstream stream);
bool capturing(CUstream stream);
CUresult enqueue(CUstream stream, std::function<void()> work);  // or adds to the graph that is captured
CUresult synchronize(CUstream stream);

// kernels.cpp
struct Copy {
  enum Kind { TO_DEVICE = 1, TO_HOST = 2, WITHIN = 8 } kind;  // CUpti_ActivityMemcpyKind
  const void *to, *from;
  size_t bytes;
};
using Observer = void (*)(const char *kernel, const Copy *copy, CUstream stream, int device);  // one of the first two
void observe(Observer observer);
void show(const char *kernel, const Copy *copy, CUstream stream);  // to the observer, unless it is captured
void kernel();  // what a launch does on its stream
CUresult launch(const char *name, CUstream stream);
CUfunction function_named(const char *name);

// graphs.cpp
void capture(CUgraph graph, std::function<void()> work);

}  // namespace null_gpu
