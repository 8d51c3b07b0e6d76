// Copies and fills of memory, on streams.
#include "core.h"

#include <sys/mman.h>

#include <cstring>

namespace null_gpu {

static const size_t MOST_STILL = 2u << 20;

void copy_with_host(void *to, const void *from, size_t bytes) {
  if (!still() || bytes <= MOST_STILL) memmove(to, from, bytes);
}

CUresult copy(void *to, const void *from, size_t bytes, CUstream stream) {
  return enqueue(stream, [=] { copy_with_host(to, from, bytes); });
}

void copy_within(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  count("copies of device " + std::to_string(current_device()));
  if (!still()) memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
}

static void show(Copy::Kind kind, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Copy copy{kind, reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes};
  show(nullptr, &copy, stream);
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  show(Copy::WITHIN, to, from, bytes, stream);
  return enqueue(stream, [=] { copy_within(to, from, bytes); });
}

static CUresult copy_now(void *to, const void *from, size_t bytes) {
  if (CUresult error = copy(to, from, bytes, nullptr)) return error;
  return synchronize(nullptr);
}

void zero(CUdeviceptr p, size_t bytes) {
  count("fills of device " + std::to_string(current_device()));
  const uintptr_t page = 4096;
  uintptr_t first = (p + page - 1) / page * page, last = (p + bytes) / page * page;
  auto at = [](uintptr_t address) { return reinterpret_cast<void *>(address); };
  if (first >= last || madvise(at(first), last - first, MADV_DONTNEED)) {
    memset(at(p), 0, bytes);
    return;
  }
  memset(at(p), 0, first - p);
  memset(at(last), 0, p + bytes - last);
}

// Memory is filled with zeros whatever the pattern: no kernel would overwrite the values that autotuning fills in.
static CUresult fill(CUdeviceptr p, size_t bytes, CUstream stream) {
  return enqueue(stream, [=] { zero(p, bytes); });
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  COUNT;
  show(Copy::TO_DEVICE, to, reinterpret_cast<CUdeviceptr>(from), bytes, stream);
  enqueue(stream, [=] { move(current_device(), "host_gb_s", bytes); });
  return copy(reinterpret_cast<void *>(to), from, bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  COUNT;
  show(Copy::TO_HOST, reinterpret_cast<CUdeviceptr>(to), from, bytes, stream);
  return copy(to, reinterpret_cast<void *>(from), bytes, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  COUNT;
  return copy(to, from, bytes, stream);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  COUNT;
  return copy(to, from, bytes, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                           CUstream stream) {
  COUNT;
  return copy(to, from, bytes, stream);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return cuMemcpy(to, from, bytes); }

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
  return copy_now(reinterpret_cast<void *>(to), from, bytes);
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
  return copy_now(to, reinterpret_cast<void *>(from), bytes);
}

CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char, size_t n, CUstream stream) {
  return fill(p, n, stream);
}

CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short, size_t n, CUstream stream) {
  return fill(p, 2 * n, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr p, unsigned, size_t n, CUstream stream) {
  return fill(p, 4 * n, stream);
}

CUresult cuMemsetD8(CUdeviceptr p, unsigned char, size_t n) {
  if (CUresult error = fill(p, n, nullptr)) return error;
  return synchronize(nullptr);
}

CUresult cuMemsetD32(CUdeviceptr p, unsigned, size_t n) {
  if (CUresult error = fill(p, 4 * n, nullptr)) return error;
  return synchronize(nullptr);
}
}
