// Settings, models of GPUs, and counts of calls.
#include "core.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

namespace null_gpu {

// Memory, multiprocessors and caches as `nvidia-smi` and cudaGetDeviceProperties show them; of B300 and
// GB300 those in jaxbench/base/hardware.py.
static const Model MODELS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 84942979072, 52428800, 18},
    {"h200", "NVIDIA H200", 9, 0, 132, 150754820096, 62914560, 18},
    {"b200", "NVIDIA B200", 10, 0, 148, 191507202048, 132644864, 18},
    {"gb200", "NVIDIA GB200", 10, 0, 152, 198521650176, 132644864, 18},
    {"b300", "NVIDIA B300", 10, 3, 158, 297021865984, 135528448, 18},
    {"gb300", "NVIDIA GB300", 10, 3, 152, 297021079552, 135528448, 18},
};

std::string text_setting(const char *name) {
  const char *value = getenv(name);
  return value ? value : "";
}

long setting(const char *name, long otherwise) {
  std::string value = text_setting(name);
  return value.empty() ? otherwise : atol(value.c_str());
}

bool still() {
  static bool still = setting("NULL_GPU_STILL", 0);
  return still;
}

int physical_devices() {
  static int n = [] {
    long n = setting("NULL_GPU_DEVICES", 8);
    if (n <= MOST_DEVICES) return static_cast<int>(n) - lost_before();
    fprintf(stderr, "null GPU: NULL_GPU_DEVICES is %ld, at most %d\n", n, MOST_DEVICES);
    exit(2);
  }();
  return n;
}

// NULL_GPU_MODEL has one model, or one for each device in turn, over the nodes of a Slurm job ("h100,h200").
const Model &model_of(int physical) {
  static auto *models = [] {
    auto *models = new std::vector<const Model *>;
    std::stringstream keys(text_setting("NULL_GPU_MODEL"));
    for (std::string key; std::getline(keys, key, ',');) {
      auto known = std::find_if(std::begin(MODELS), std::end(MODELS), [&](auto &model) { return key == model.key; });
      if (known == std::end(MODELS)) {
        fprintf(stderr, "null GPU: NULL_GPU_MODEL has no model %s\n", key.c_str());
        exit(2);
      }
      models->push_back(known);
    }
    if (models->empty()) models->push_back(&MODELS[0]);
    return models;
  }();
  return *(*models)[(setting("SLURM_NODEID", 0) * physical_devices() + physical) % models->size()];
}

std::string name_of(int physical) {
  std::string marker = text_setting("NULL_GPU_UNMARKED").empty() ? " (null)" : "";
  return model_of(physical).name + marker;
}

size_t memory_of(int physical) {
  static size_t megabytes = setting("NULL_GPU_MEMORY_MB", 0);
  return megabytes ? megabytes << 20 : model_of(physical).memory;
}

// NULL_GPU_STATE names a file of lines "GPU KEY VALUE": GPU is a number, counted over the nodes of a Slurm job, or * for
// all; a later line holds. The file is read anew each time, so that a test may change it.
double state_of(int physical, const std::string &key, double otherwise) {
  static const auto *path = new std::string(text_setting("NULL_GPU_STATE"));
  if (path->empty()) return otherwise;
  std::ifstream file(*path);
  const std::string gpu = std::to_string(setting("SLURM_NODEID", 0) * physical_devices() + physical);
  std::string line, who, name;
  for (double value; std::getline(file, line);)
    if (std::istringstream(line) >> who >> name >> value && name == key && (who == "*" || who == gpu)) otherwise = value;
  return otherwise;
}

void *opaque_handle() {
  static std::atomic<uintptr_t> next{0x10000};
  return reinterpret_cast<void *>(next += 64);
}

static std::mutex &counts_mutex() {
  static auto *mutex = new std::mutex;
  return *mutex;
}

static std::map<std::string, long> &counts() {
  static auto *counts = new std::map<std::string, long>;
  return *counts;
}

// NULL_GPU_COUNTS names a folder: <pid>.txt has a line "n name" for each name, once the process ends.
static void write_counts() {
  std::string path = text_setting("NULL_GPU_COUNTS") + "/" + std::to_string(getpid()) + ".txt";
  FILE *file = fopen(path.c_str(), "w");
  if (!file) return;
  Lock lock(counts_mutex());
  for (auto &[name, n] : counts()) fprintf(file, "%ld %s\n", n, name.c_str());
  fclose(file);
}

void count(const std::string &name, long n) {
  static bool on = !text_setting("NULL_GPU_COUNTS").empty() && !atexit(write_counts);
  if (!on) return;
  Lock lock(counts_mutex());
  counts()[name] += n;
}

}  // namespace null_gpu

extern "C" void null_gpu_stub(const char *name) { null_gpu::count(std::string("stub ") + name); }
