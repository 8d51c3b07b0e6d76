// libnvidia-ml: names, links and clocks of the devices, all of them, as NVML does not know CUDA_VISIBLE_DEVICES.
#include "core.h"

#include <cstdio>

using namespace null_gpu;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };
static const unsigned NVLINK_COUNT = 91;  // NVML_FI_DEV_NVLINK_LINK_COUNT

struct FieldValue {  // nvmlFieldValue_t
  unsigned id, scope;
  long long timestamp, latency;
  int type, status;
  unsigned long long value;
};

static int index_of(void *device) { return static_cast<int>(reinterpret_cast<uintptr_t>(device)) - 1; }

static int handle_of(unsigned index, void **device) {
  *device = reinterpret_cast<void *>(static_cast<uintptr_t>(index + 1));
  return SUCCESS;
}

extern "C" {

const char *nvmlErrorString(int error) { return error == GPU_IS_LOST ? "GPU is lost" : "NVML status"; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = physical_devices(), SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return handle_of(index, device); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *, unsigned *generation) { return *generation = 5, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(void *, unsigned *lanes) { return *lanes = 16, SUCCESS; }
int nvmlDeviceGetNvLinkCapability(void *, unsigned, int, unsigned *can) { return *can = 1, SUCCESS; }
int nvmlDeviceGetGpuFabricInfo(void *, void *) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return NOT_SUPPORTED; }
int nvmlDeviceGetMigMode(void *, unsigned *now, unsigned *pending) { return *now = *pending = 0, SUCCESS; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  unsigned domain, bus = 0x10;
  sscanf(id, "%x:%x", &domain, &bus);
  return handle_of(bus - 0x10, device);
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) {
  *active = static_cast<int>(link) < model_of(index_of(device)).nvlinks;
  return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "%s", name_of(index_of(device)).c_str());
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "590.0.0");
  return SUCCESS;
}

int nvmlDeviceGetFieldValues(void *device, int n, FieldValue *fields) {
  for (FieldValue *field = fields; field < fields + n; field++) {
    field->type = 1;
    field->status = SUCCESS;
    field->value = field->id == NVLINK_COUNT ? model_of(index_of(device)).nvlinks : 1;
  }
  return SUCCESS;
}
}
