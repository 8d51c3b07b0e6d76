// libcupti: calls subscribers on every launch and copy, and records 10 us for it. Types as in CUPTI's documentation of
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
enum { KIND_COPY = 1, KIND_KERNEL = 3, KIND_CONCURRENT_KERNEL = 10 };
enum { DOMAINS = 4, CALLBACKS = 2048, DRIVER_API = 1, LAUNCH_KERNEL = 307 };
static const uint64_t EACH_NS = 10000;

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

struct CopyParameters {  // cuMemcpyDtoDAsync_v2_params and those of copies from and to the host
  const void *to, *from;
  size_t bytes;
  CUstream stream;
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

struct __attribute__((packed, aligned(8))) CopyRecord {  // CUpti_ActivityMemcpy5
  uint32_t kind;
  uint8_t copy_kind, from_kind, to_kind, flags;
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
  uint8_t rest[40];
};

union Record {
  KernelRecord kernel;
  CopyRecord copy;
};

using Callback = void (*)(void *user, int domain, uint32_t id, const void *data);
using RequestBuffer = void (*)(uint8_t **buffer, size_t *size, size_t *records);
using CompleteBuffer = void (*)(CUcontext, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static Callback callback;
static void *callback_user;
static bool enabled[DOMAINS][CALLBACKS], kernels_enabled, copies_enabled;
static RequestBuffer request_buffer;
static CompleteBuffer complete_buffer;
static std::mutex mutex;
static std::vector<Record> records;

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

static void call_back(uint32_t id, const char *function, const void *parameters, const char *kernel, int device,
                      uint32_t correlation) {
  if (!callback || !enabled[DRIVER_API][id]) return;
  CUresult result = CUDA_SUCCESS;
  uint64_t data = 0;
  CallbackData call{0, function, parameters, &result, kernel, context_of(device), device + 1u, &data, correlation};
  for (call.site = 0; call.site < 2; call.site++) callback(callback_user, DRIVER_API, id, &call);
}

template <class R>
static R begun(uint32_t kind, CUstream stream, int device, uint32_t correlation) {
  R record{};
  record.kind = kind;
  record.start = nanoseconds();
  record.end = record.start + EACH_NS;
  record.device = device;
  record.context = device + 1;
  record.stream = stream_id(stream);
  record.correlation = correlation;
  return record;
}

static void keep(const Record &record) {
  Lock lock(mutex);
  records.push_back(record);
}

static void on_copy(const Copy &copy, CUstream stream, int device, uint32_t correlation) {
  bool to_device = copy.kind == Copy::TO_DEVICE, to_host = copy.kind == Copy::TO_HOST;
  CopyParameters parameters{copy.to, copy.from, copy.bytes, stream};
  if (to_device)
    call_back(277, "cuMemcpyHtoDAsync_v2", &parameters, nullptr, device, correlation);
  else if (to_host)
    call_back(279, "cuMemcpyDtoHAsync_v2", &parameters, nullptr, device, correlation);
  else
    call_back(281, "cuMemcpyDtoDAsync_v2", &parameters, nullptr, device, correlation);
  if (!copies_enabled) return;
  Record record{};
  record.copy = begun<CopyRecord>(KIND_COPY, stream, device, correlation);
  record.copy.copy_kind = copy.kind;
  record.copy.from_kind = to_device ? 1 : 3;  // pageable, device
  record.copy.to_kind = to_host ? 1 : 3;
  record.copy.bytes = copy.bytes;
  keep(record);
}

static void on_kernel(const char *kernel, CUstream stream, int device, uint32_t correlation) {
  const char *name = kept(kernel);
  LaunchParameters parameters{};
  parameters.stream = stream;
  call_back(LAUNCH_KERNEL, "cuLaunchKernel", &parameters, name, device, correlation);
  if (!kernels_enabled) return;
  Record record{};
  record.kernel = begun<KernelRecord>(KIND_CONCURRENT_KERNEL, stream, device, correlation);
  record.kernel.name = name;
  record.kernel.registers = 32;
  for (int k = 0; k < 3; k++) record.kernel.grid[k] = record.kernel.block[k] = 1;
  keep(record);
}

static void on_work(const char *kernel, const Copy *copy, CUstream stream, int device) {
  static std::atomic<uint32_t> correlations{0};
  if (!callback && !kernels_enabled && !copies_enabled) return;
  uint32_t correlation = ++correlations;
  if (copy)
    on_copy(*copy, stream, device, correlation);
  else
    on_kernel(kernel, stream, device, correlation);
}

__attribute__((constructor)) static void listen() { observe(on_work); }

static int refused() { return fault(Fault::CUPTI, 0) ? INSUFFICIENT_PRIVILEGES : SUCCESS; }

static int enable_activity(int kind, bool on) {
  if (kind == KIND_CONCURRENT_KERNEL || kind == KIND_KERNEL) kernels_enabled = on;
  if (kind == KIND_COPY) copies_enabled = on;
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
  std::vector<Record> ready;
  {
    Lock lock(mutex);
    ready.swap(records);
  }
  for (size_t at = 0; at < ready.size() && request_buffer;) {
    uint8_t *buffer = nullptr;
    size_t size = 0, most = 0;
    request_buffer(&buffer, &size, &most);
    size_t n = std::min(ready.size() - at, size / sizeof(Record));
    if (!buffer || !n) return MAX_LIMIT_REACHED;
    memcpy(buffer, &ready[at], n * sizeof(Record));
    at += n;
    complete_buffer(nullptr, 0, buffer, size, n * sizeof(Record));
  }
  return SUCCESS;
}

int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record) {
  uint8_t *next = *record ? *record + sizeof(Record) : buffer;
  if (next + sizeof(Record) > buffer + valid) return MAX_LIMIT_REACHED;
  *record = next;
  return SUCCESS;
}
}
