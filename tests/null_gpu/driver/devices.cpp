// The driver's devices, contexts and entry points.
#include "core.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

struct CUctx_st {
  int device;
};

namespace null_gpu {

static const int FIRST_BUS = 0x10;
static thread_local std::vector<CUcontext> contexts;  // the calling thread's stack

static const std::vector<int> &visible() {
  static auto *visible = [] {
    auto *visible = new std::vector<int>;
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    std::stringstream ordinals(value ? value : "");
    for (std::string text; std::getline(ordinals, text, ',');) {
      int n = atoi(text.c_str());
      if (n < 0 || n >= physical_devices()) break;
      visible->push_back(n);
    }
    for (int n = 0; !value && n < physical_devices(); n++) visible->push_back(n);
    return visible;
  }();
  return *visible;
}

int device_count() { return visible().size(); }
int physical(int device) { return visible()[device]; }

CUcontext context_of(int device) {
  static auto *all = [] {
    auto *all = new std::vector<CUctx_st>(device_count());
    for (int n = 0; n < device_count(); n++) (*all)[n].device = n;
    return all;
  }();
  return &(*all)[device];
}

int device_of(CUcontext context) { return context->device; }
static CUcontext current() { return contexts.empty() ? nullptr : contexts.back(); }
int current_device() { return current() ? current()->device : 0; }
void set_current_device(int device) { cuCtxSetCurrent(context_of(device)); }

// Attributes that are alike for all models; those that differ are in cuDeviceGetAttribute.
static const std::map<int, int> ATTRIBUTES = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
};

static int attribute(CUdevice_attribute name, int device) {
  const Model &model = model_of(physical(device));
  switch (name) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return model.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return model.minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return model.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return model.l2;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return FIRST_BUS + physical(device);
    default:
      auto known = ATTRIBUTES.find(name);
      return known == ATTRIBUTES.end() ? 0 : known->second;
  }
}

// The device files that JAX and this project look for appear to exist: stat64, by which Python asks, is intercepted.
static const char *existing(const char *path) {
  return device_count() && !strncmp(path, "/dev/nvidia", 11) ? "/dev/null" : path;
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

int stat64(const char *__restrict path, struct stat64 *__restrict status) {
  static auto next = reinterpret_cast<decltype(&stat64)>(dlsym(RTLD_NEXT, "stat64"));
  return next(existing(path), status);
}

int fstatat64(int folder, const char *__restrict path, struct stat64 *__restrict status, int flags) {
  static auto next = reinterpret_cast<decltype(&fstatat64)>(dlsym(RTLD_NEXT, "fstatat64"));
  return next(folder, existing(path), status, flags);
}

CUresult cuInit(unsigned) {
  COUNT;
  return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n) {
  *n = device_count();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  snprintf(name, size, "%s", name_of(physical(device)).c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
  *bytes = memory_of(physical(device));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  memcpy(uuid->bytes, "null GPU", 8);
  uuid->bytes[15] = physical(device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device) {
  snprintf(id, size, "0000:%02X:00.0", FIRST_BUS + physical(device));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id) {
  unsigned domain, bus = 0;
  sscanf(id, "%x:%x", &domain, &bus);
  for (*device = 0; *device < device_count(); ++*device)
    if (FIRST_BUS + physical(*device) == static_cast<int>(bus)) return CUDA_SUCCESS;
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute name, CUdevice, CUdevice) {
  *value = name != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
  *value = attribute(name, device);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  static const std::map<int, const char *> NAMES = {
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"},
  };
  auto known = NAMES.find(error);
  *name = known == NAMES.end() ? "CUDA_ERROR_INVALID_VALUE" : known->second;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  static const std::map<int, const char *> TEXTS = {
      {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
      {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
      {CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
      {CUDA_ERROR_UNKNOWN, "unknown error"},
  };
  auto known = TEXTS.find(error);
  if (known != TEXTS.end()) return *text = known->second, CUDA_SUCCESS;
  return cuGetErrorName(error, text);
}

CUresult cuGetProcAddress(const char *name, void **function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult *result) {
  *function = nullptr;
  for (const char *suffix : {"_v4", "_v3", "_v2", ""})
    if ((*function = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str()))) break;
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Private tables, which NVIDIA's own runtime asks for, are not imitated.
CUresult cuGetExportTable(const void **table, const CUuuid *) {
  COUNT;
  *table = nullptr;
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (contexts.empty()) contexts.push_back(context);
  contexts.back() = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
  if (context) *context = current();
  if (!contexts.empty()) contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
  *id = 1 + (context ? context : current())->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned *version) {
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}
}
