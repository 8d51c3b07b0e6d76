// Faults on purpose: NULL_GPU_FAULT=kind[:key=value[,key=value..]], where GPUs fail.
//
//   illegal_address  illegal memory access in kernel `at`: an error that stays with the context
//   ecc              an uncorrectable memory error in kernel `at`
//   lost             the GPU falls off the bus (XID 79) at kernel `at`; a process that begins once there is
//                    NULL_GPU_ARM has a GPU less
//   hang             kernel `at` never ends
//   slow             kernels take `factor` times NULL_GPU_KERNEL_US
//   memory           allocations end at `bytes`, as if another process had the rest
//   nccl_system, nccl_remote, nccl_hang   the collective `at` returns that error, or never ends
//   cupti            the profiler is refused, as without privileges
//
// Keys: `device` (physical, default 0), `at` (default 1), and `rank` (SLURM_PROCID; default every process). With
// NULL_GPU_ARM, a path, kernels are slow, and kernels and collectives are counted, once there is such a file.
#include "core.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <thread>

namespace null_gpu {

static const std::map<std::string, Fault> KINDS = {
    {"illegal_address", Fault::ILLEGAL_ADDRESS}, {"ecc", Fault::ECC},
    {"lost", Fault::LOST},                       {"hang", Fault::HANG},
    {"slow", Fault::SLOW},                       {"memory", Fault::MEMORY},
    {"nccl_system", Fault::NCCL_SYSTEM},         {"nccl_remote", Fault::NCCL_REMOTE},
    {"nccl_hang", Fault::NCCL_HANG},             {"cupti", Fault::CUPTI},
};

static std::atomic<int> errors[MOST_DEVICES];
static std::atomic<long> kernels[MOST_DEVICES], collectives[MOST_DEVICES];

// The fault of this process, read once; null for none.
static const FaultSettings *configured() {
  static const FaultSettings *settings = []() -> const FaultSettings * {
    std::string text = text_setting("NULL_GPU_FAULT");
    if (text.empty()) return nullptr;
    std::string kind = text.substr(0, text.find(':'));
    if (!KINDS.count(kind)) {
      fprintf(stderr, "null GPU: NULL_GPU_FAULT has no kind %s\n", kind.c_str());
      exit(2);
    }
    std::map<std::string, long> keys = {{"device", 0}, {"at", 1}, {"factor", 3}, {"bytes", 0}};
    std::stringstream pairs(kind.size() < text.size() ? text.substr(kind.size() + 1) : "");
    for (std::string pair; std::getline(pairs, pair, ',');) {
      size_t equals = pair.find('=');
      std::string key = pair.substr(0, equals);
      if (equals == std::string::npos || (!keys.count(key) && key != "rank")) {
        fprintf(stderr, "null GPU: NULL_GPU_FAULT has no key %s\n", key.c_str());
        exit(2);
      }
      keys[key] = atol(pair.c_str() + equals + 1);
    }
    if (keys.count("rank") && keys["rank"] != setting("SLURM_PROCID", 0)) return nullptr;
    return new FaultSettings{KINDS.at(kind), static_cast<int>(keys["device"]), keys["at"], keys["factor"],
                             static_cast<size_t>(keys["bytes"])};
  }();
  return settings;
}

const FaultSettings *fault(Fault kind, int device) {
  const FaultSettings *settings = configured();
  bool here = settings && settings->kind == kind && settings->device == physical(device);
  return here ? settings : nullptr;
}

static bool armed() {
  static const auto *path = new std::string(text_setting("NULL_GPU_ARM"));
  return configured() && (path->empty() || !access(path->c_str(), F_OK));
}

int lost_before() {
  return configured() && configured()->kind == Fault::LOST && !text_setting("NULL_GPU_ARM").empty() && armed();
}

CUresult error_of(int device) { return static_cast<CUresult>(errors[device].load()); }

[[noreturn]] static void wait_forever() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

void run_kernel(int device) {
  static const long otherwise = setting("NULL_GPU_KERNEL_US", 0);
  long microseconds = state_of(physical(device), "kernel_us", otherwise);
  bool begun = armed();
  const FaultSettings *slow = begun ? fault(Fault::SLOW, device) : nullptr;
  if (microseconds) std::this_thread::sleep_for(std::chrono::microseconds(microseconds * (slow ? slow->factor : 1)));
  if (!begun) return;
  long number = ++kernels[device];
  static const std::pair<Fault, CUresult> STICKY[] = {
      {Fault::ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS},
      {Fault::ECC, CUDA_ERROR_ECC_UNCORRECTABLE},
      {Fault::LOST, CUDA_ERROR_UNKNOWN},
  };
  for (auto &[kind, error] : STICKY)
    if (const FaultSettings *f = fault(kind, device); f && f->at == number) errors[device] = error;
  if (const FaultSettings *f = fault(Fault::HANG, device); f && f->at == number) wait_forever();
}

void move(int device, const char *link, size_t bytes) {
  double rate = state_of(physical(device), link, 0);
  if (rate > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<long>(bytes / rate)));
}

int nccl_error(int device) {
  const FaultSettings *settings = configured();
  if (!armed() || settings->device != physical(device)) return 0;
  bool ours = settings->kind == Fault::NCCL_SYSTEM || settings->kind == Fault::NCCL_REMOTE ||
              settings->kind == Fault::NCCL_HANG;
  if (!ours || ++collectives[device] != settings->at) return 0;
  return settings->kind == Fault::NCCL_SYSTEM ? 2 : settings->kind == Fault::NCCL_REMOTE ? 6 : -1;
}

}  // namespace null_gpu
