// libcupti: calls subscribers on every launch and records a kernel of 10 us for it. Types as in CUPTI's documentation of
// the callback and activity interfaces, in the fields that are used.
#include "core.h"

#include <time.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <vector>

using namespace null_gpu;

enum { SUCCESS = 0, MAX_LIMIT_REACHED = 12, INSUFFICIENT_PRIVILEGES = 35 };
enum { KIND_KERNEL = 3, KIND_CONCURRENT_KERNEL = 10 };
enum { DOMAINS = 4, CALLBACKS = 2048, DRIVER_API = 1, LAUNCH_KERNEL = 307 };
static const uint64_t KERNEL_NS = 10000;

struct CallbackData {  // CUpti_CallbackData
  int site;            // 0 on entry, 1 on exit
  const char *function;
  const void *parameters;
  void *result;
  const char *symbol;
  CUcontext context;
  uint32_t context_id;
  uint64_t *correlation_data;
  uint32_t correlation;
};

struct LaunchParameters {  // cuLaunchKernel_params
  CUfunction function;
  unsigned grid[3], block[3], shared_bytes;
  CUstream stream;
  void **parameters, **extra;
};

struct __attribute__((packed, aligned(8))) KernelRecord {  // CUpti_ActivityKernel9
  uint32_t kind;
  uint8_t cache_config, shared_config;
  uint16_t registers;
  uint32_t partitioned[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], static_shared, dynamic_shared;
  uint32_t local_per_thread, local_total, correlation;
  int64_t grid_id;
  const char *name;
  uint8_t rest[112];
};

using Callback = void (*)(void *user, int domain, uint32_t id, const void *data);
using RequestBuffer = void (*)(uint8_t **buffer, size_t *size, size_t *records);
using CompleteBuffer = void (*)(CUcontext, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static Callback callback;
static void *callback_user;
static bool enabled[DOMAINS][CALLBACKS], kernels_enabled;
static RequestBuffer request_buffer;
static CompleteBuffer complete_buffer;
static std::mutex mutex;
static std::vector<KernelRecord> records;

static uint64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static uint32_t stream_id(CUstream stream) { return reinterpret_cast<uintptr_t>(stream) >> 4; }

static const char *kept(const char *name) {
  static auto *names = new std::set<std::string>;
  Lock lock(mutex);
  return names->insert(name).first->c_str();
}

static void call_back(const char *name, CUstream stream, int device, uint32_t correlation) {
  LaunchParameters parameters{};
  parameters.stream = stream;
  CUresult result = CUDA_SUCCESS;
  uint64_t data = 0;
  CallbackData call{0, "cuLaunchKernel", &parameters, &result, name, context_of(device), device + 1u, &data,
                    correlation};
  for (call.site = 0; call.site < 2; call.site++) callback(callback_user, DRIVER_API, LAUNCH_KERNEL, &call);
}

static void on_launch(const char *kernel, CUstream stream, int device) {
  static std::atomic<uint32_t> correlations{0};
  if (!callback && !kernels_enabled) return;
  const char *name = kept(kernel);
  uint32_t correlation = ++correlations;
  if (callback && enabled[DRIVER_API][LAUNCH_KERNEL]) call_back(name, stream, device, correlation);
  if (!kernels_enabled) return;
  KernelRecord record{};
  record.kind = KIND_CONCURRENT_KERNEL;
  record.start = nanoseconds();
  record.end = record.start + KERNEL_NS;
  record.device = device;
  record.context = device + 1;
  record.stream = stream_id(stream);
  record.correlation = correlation;
  record.name = name;
  record.registers = 32;
  for (int k = 0; k < 3; k++) record.grid[k] = record.block[k] = 1;
  Lock lock(mutex);
  records.push_back(record);
}

__attribute__((constructor)) static void listen() { observe_launches(on_launch); }

static int refused() { return fault(Fault::CUPTI, 0) ? INSUFFICIENT_PRIVILEGES : SUCCESS; }

static int enable_activity(int kind, bool on) {
  if (kind == KIND_CONCURRENT_KERNEL || kind == KIND_KERNEL) kernels_enabled = on;
  return refused();
}

extern "C" {

int cuptiGetVersion(uint32_t *version) { return *version = 130500, SUCCESS; }
int cuptiGetTimestamp(uint64_t *time) { return *time = nanoseconds(), SUCCESS; }
int cuptiActivityEnable(int kind) { return enable_activity(kind, true); }
int cuptiActivityDisable(int kind) { return enable_activity(kind, false); }
int cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t *n) { return *n = 0, SUCCESS; }
int cuptiGetContextId(CUcontext, uint32_t *id) { return *id = 1 + current_device(), SUCCESS; }
int cuptiGetDeviceId(CUcontext context, uint32_t *device) { return *device = device_of(context), SUCCESS; }

int cuptiGetStreamIdEx(CUcontext, CUstream stream, uint8_t, uint32_t *id) {
  *id = stream_id(stream);
  return SUCCESS;
}

int cuptiGetResultString(int result, const char **text) {
  *text = result == INSUFFICIENT_PRIVILEGES ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" : "CUPTI result";
  return SUCCESS;
}

int cuptiGetErrorMessage(int result, const char **text) { return cuptiGetResultString(result, text); }

int cuptiSubscribe(void **subscriber, Callback function, void *user) {
  *subscriber = opaque_handle();
  callback = function;
  callback_user = user;
  return refused();
}

int cuptiUnsubscribe(void *) {
  callback = nullptr;
  return SUCCESS;
}

int cuptiEnableCallback(uint32_t on, void *, int domain, uint32_t id) {
  if (domain < DOMAINS && id < CALLBACKS) enabled[domain][id] = on;
  return SUCCESS;
}

int cuptiEnableDomain(uint32_t on, void *, int domain) {
  for (uint32_t id = 0; id < CALLBACKS; id++) cuptiEnableCallback(on, nullptr, domain, id);
  return SUCCESS;
}

int cuptiActivityRegisterCallbacks(RequestBuffer request, CompleteBuffer complete) {
  request_buffer = request;
  complete_buffer = complete;
  return SUCCESS;
}

int cuptiActivityFlushAll(uint32_t) {
  std::vector<KernelRecord> ready;
  {
    Lock lock(mutex);
    ready.swap(records);
  }
  for (size_t at = 0; at < ready.size() && request_buffer;) {
    uint8_t *buffer = nullptr;
    size_t size = 0, most = 0;
    request_buffer(&buffer, &size, &most);
    size_t n = std::min(ready.size() - at, size / sizeof(KernelRecord));
    if (!buffer || !n) return MAX_LIMIT_REACHED;
    memcpy(buffer, &ready[at], n * sizeof(KernelRecord));
    at += n;
    complete_buffer(nullptr, 0, buffer, size, n * sizeof(KernelRecord));
  }
  return SUCCESS;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record) {
  uint8_t *next = *record ? *record + sizeof(KernelRecord) : buffer;
  if (next + sizeof(KernelRecord) > buffer + valid) return MAX_LIMIT_REACHED;
  *record = next;
  return SUCCESS;
}
}
