// Memory: a device's is the host's, reserved and not touched until something is copied to it.
#include "core.h"

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <vector>

namespace null_gpu {

static const size_t GRANULARITY = 2u << 20;

struct Allocation {
  size_t bytes;
  CUmemorytype type;
  int device;
};
struct Block {  // of virtual memory management: counted when created, mapped once
  size_t bytes;
  int device;
};

static std::mutex mutex;
static std::map<uintptr_t, Allocation> allocations;  // by first address
static std::map<std::pair<int, size_t>, std::vector<CUdeviceptr>> pools;  // what was freed, by device and size
static std::atomic<size_t> used[MOST_DEVICES];

static size_t total(int device) { return memory_of(physical(device)); }

// What a context takes of the device's memory.
static size_t context_bytes(int device) { return std::min<size_t>(600 << 20, total(device) / 32); }

static bool take(size_t bytes, int device) {
  const FaultSettings *less = fault(Fault::MEMORY, device);
  size_t limit = less ? less->bytes : total(device) - context_bytes(device);
  size_t before = used[device].fetch_add(bytes);
  if (before + bytes <= limit) return true;
  used[device] -= bytes;
  return false;
}

static uintptr_t reserve(size_t bytes, int protection) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *p = mmap(nullptr, bytes, protection, flags, -1, 0);
  return p == MAP_FAILED ? 0 : reinterpret_cast<uintptr_t>(p);
}

static void *allocate(size_t bytes, CUmemorytype type, int device) {
  bytes = bytes ? bytes : 1;
  if (type == CU_MEMORYTYPE_DEVICE && !take(bytes, device)) return nullptr;
  uintptr_t p = reserve(bytes, PROT_READ | PROT_WRITE);
  Lock lock(mutex);
  if (p) allocations[p] = {bytes, type, device};
  return reinterpret_cast<void *>(p);
}

void *allocate(size_t bytes, int device) { return allocate(bytes, CU_MEMORYTYPE_DEVICE, device); }

CUresult release(void *p) {
  if (!p) return CUDA_SUCCESS;
  Lock lock(mutex);
  auto found = allocations.find(reinterpret_cast<uintptr_t>(p));
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  Allocation &allocation = found->second;
  if (allocation.type == CU_MEMORYTYPE_DEVICE) used[allocation.device] -= allocation.bytes;
  munmap(p, allocation.bytes);
  allocations.erase(found);
  return CUDA_SUCCESS;
}

// Allocates from a device's pool: what was freed last of that size, so that a stream which allocates the same in each
// step gets the same addresses; else more memory.
static CUdeviceptr allocate_pooled(size_t bytes, int device) {
  Lock lock(mutex);
  auto &freed = pools[{device, bytes}];
  if (freed.empty()) {
    lock.unlock();
    return reinterpret_cast<CUdeviceptr>(allocate(bytes, device));
  }
  if (!take(bytes, device)) return 0;
  CUdeviceptr p = freed.back();
  freed.pop_back();
  return p;
}

// Returns memory to its device's pool, at once: the next to get it uses it behind the caller's work, in the same stream.
static CUresult release_pooled(CUdeviceptr p) {
  Lock lock(mutex);
  auto found = allocations.find(p);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  auto &[bytes, type, device] = found->second;
  used[device] -= bytes;
  pools[{device, bytes}].push_back(p);
  return CUDA_SUCCESS;
}

// The allocation that holds an address, and its first address; null for none. The caller holds the mutex.
static const Allocation *find(uintptr_t p, uintptr_t *base) {
  auto next = allocations.upper_bound(p);
  if (next == allocations.begin()) return nullptr;
  auto &[first, allocation] = *--next;
  if (p >= first + allocation.bytes) return nullptr;
  *base = first;
  return &allocation;
}

static CUresult pointer_attribute(void *value, CUpointer_attribute name, CUdeviceptr p) {
  Lock lock(mutex);
  uintptr_t base = 0;
  const Allocation *allocation = find(p, &base);
  if (name == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
    *static_cast<unsigned *>(value) = allocation && allocation->type == CU_MEMORYTYPE_UNIFIED;
    return CUDA_SUCCESS;
  }
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  switch (name) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return *static_cast<unsigned *>(value) = allocation->type, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return *static_cast<int *>(value) = allocation->device, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return *static_cast<CUcontext *>(value) = context_of(allocation->device), CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return *static_cast<CUdeviceptr *>(value) = p, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return *static_cast<CUdeviceptr *>(value) = base, CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return *static_cast<size_t *>(value) = allocation->bytes, CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

CUresult cuMemGetInfo(size_t *free, size_t *all) {
  int device = current_device();
  *all = total(device);
  *free = *all - std::min(*all, context_bytes(device) + used[device]);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *p, size_t bytes) {
  *p = reinterpret_cast<CUdeviceptr>(allocate(bytes, current_device()));
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocManaged(CUdeviceptr *p, size_t bytes, unsigned) {
  *p = reinterpret_cast<CUdeviceptr>(allocate(bytes, CU_MEMORYTYPE_UNIFIED, current_device()));
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostAlloc(void **p, size_t bytes, unsigned) {
  *p = allocate(bytes, CU_MEMORYTYPE_HOST, current_device());
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocHost(void **p, size_t bytes) { return cuMemHostAlloc(p, bytes, 0); }
CUresult cuMemFree(CUdeviceptr p) { return release(reinterpret_cast<void *>(p)); }
CUresult cuMemFreeHost(void *p) { return release(p); }

CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *p, unsigned) {
  *device = reinterpret_cast<CUdeviceptr>(p);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
  Lock lock(mutex);
  uintptr_t first = 0;
  const Allocation *allocation = find(p, &first);
  if (!allocation) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = first;
  if (bytes) *bytes = allocation->bytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute name, CUdeviceptr p) {
  return pointer_attribute(value, name, p);
}

CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *names, void **values, CUdeviceptr p) {
  for (unsigned i = 0; i < n; i++) pointer_attribute(values[i], names[i], p);
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *, void *) {
  return CUDA_ERROR_INVALID_VALUE;
}

// Pools, one for each device, in which XLA's allocator `cuda_async` has its memory. What was freed is kept.

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  *pool = reinterpret_cast<CUmemoryPool>(static_cast<uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t bytes, CUmemoryPool pool, CUstream) {
  *p = allocate_pooled(bytes, reinterpret_cast<uintptr_t>(pool) - 1);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) { return release_pooled(p); }

// Virtual memory management.

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *,
                                       CUmemAllocationGranularity_flags) {
  *granularity = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p,
                     unsigned long long) {
  if (!take(bytes, p->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Block{bytes, p->location.id});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto *block = reinterpret_cast<Block *>(handle);
  used[block->device] -= block->bytes;
  delete block;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long) {
  alignment = std::max(alignment, GRANULARITY);
  uintptr_t first = reserve(bytes + alignment, PROT_NONE);
  *p = (first + alignment - 1) / alignment * alignment;
  return first ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  munmap(reinterpret_cast<void *>(p), bytes);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  auto *block = reinterpret_cast<Block *>(handle);
  mprotect(reinterpret_cast<void *>(p), bytes, PROT_READ | PROT_WRITE);
  Lock lock(mutex);
  allocations[p] = {bytes, CU_MEMORYTYPE_DEVICE, block->device};
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  mmap(reinterpret_cast<void *>(p), bytes, PROT_NONE, flags, -1, 0);
  Lock lock(mutex);
  allocations.erase(p);
  return CUDA_SUCCESS;
}

CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *,
                                   CUmulticastGranularity_flags) {
  *granularity = GRANULARITY;
  return CUDA_SUCCESS;
}
}
