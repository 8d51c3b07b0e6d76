// libnvidia-ml: names, links, clocks, power and errors of the devices, all of them, as NVML does not know
// CUDA_VISIBLE_DEVICES. Where NULL_GPU_STATE tells nothing, those of an idle H100 without a fault.
#include "core.h"

#include <chrono>
#include <cstdio>

using namespace null_gpu;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };
// NVML_FI_DEV_ECC_SBE_VOL_TOTAL, NVML_FI_DEV_ECC_DBE_VOL_TOTAL and NVML_FI_DEV_NVLINK_LINK_COUNT
static const unsigned CORRECTED = 3, UNCORRECTED = 4, NVLINK_COUNT = 91;

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

static double told(void *device, const char *key, double otherwise) { return state_of(index_of(device), key, otherwise); }

template <typename Number>
static int tell(void *device, const char *key, double otherwise, Number *value, double unit = 1) {
  double number = told(device, key, otherwise);
  return number < 0 ? NOT_SUPPORTED : (*value = static_cast<Number>(number * unit), SUCCESS);
}

// Seconds since the library was first asked, for what grows at a rate.
static double elapsed() {
  static const auto began = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

using Text = char *;
using Long = unsigned long long;

extern "C" {

int nvmlInitWithFlags(unsigned) { return elapsed(), SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char *nvmlErrorString(int error) { return error == GPU_IS_LOST ? "GPU is lost" : "NVML status"; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = physical_devices(), SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return handle_of(index, device); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *, unsigned *generation) { return *generation = 5, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(void *, unsigned *lanes) { return *lanes = 16, SUCCESS; }
int nvmlDeviceGetNvLinkCapability(void *, unsigned, int, unsigned *can) { return *can = 1, SUCCESS; }
int nvmlDeviceGetGpuFabricInfo(void *, void *) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return NOT_SUPPORTED; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) { return *pending = 0, tell(device, "mig", 0, now); }
int nvmlDeviceGetEccMode(void *device, unsigned *now, unsigned *pending) { return *pending = 1, tell(device, "ecc", 1, now); }
int nvmlDeviceGetMaxPcieLinkWidth(void *, unsigned *lanes) { return *lanes = 16, SUCCESS; }
int nvmlDeviceGetPersistenceMode(void *device, unsigned *on) { return tell(device, "persistence", 1, on); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { return tell(device, "power_limit_w", 700, mw, 1000); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *, unsigned *mw) { return *mw = 700000, SUCCESS; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { return tell(device, "power_w", 120, mw, 1000); }
int nvmlDeviceGetTemperature(void *device, int, unsigned *celsius) { return tell(device, "temperature_c", 35, celsius); }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, Long *bits) { return tell(device, "reasons", 0, bits); }

int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) {
  return kind == 2 ? tell(device, "memory_max_mhz", 2619, mhz) : tell(device, "sm_max_mhz", 1980, mhz);
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) {
  return kind == 2 ? tell(device, "memory_mhz", 2619, mhz) : tell(device, "sm_mhz", 1980, mhz);
}

// Replays, recoveries and wrong checksums, which grow at a rate per second of the first link.
int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, int kind, Long *count) {
  return *count = link || kind ? 0 : told(device, "nvlink_errors_per_s", 0) * elapsed(), SUCCESS;
}

// Heat is policy 1: it holds the clock down for a share of the time. NVML counts in ns.
int nvmlDeviceGetViolationStatus(void *device, int policy, Long *times) {
  times[0] = elapsed() * 1e6;
  return times[1] = policy == 1 ? told(device, "hot_share", 0) * elapsed() * 1e9 : 0, SUCCESS;
}

struct Busy {  // nvmlUtilization_t
  unsigned gpu, memory;
};

int nvmlDeviceGetUtilizationRates(void *device, Busy *busy) { return busy->memory = 0, tell(device, "busy_pct", 100, &busy->gpu); }

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *uncorrected = *failed = 0;
  tell(device, "remap_pending", 0, pending);
  return tell(device, "rows_remapped", 0, corrected);
}

int nvmlDeviceGetP2PStatus(void *a, void *b, int, unsigned *status) {  // 0: OK, 3: not supported by the topology
  return *status = told(a, "nvlinks_down", 0) + told(b, "nvlinks_down", 0) < model_of(index_of(a)).nvlinks ? 0 : 3, SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Long *memory) {  // total, free, used
  memory[0] = memory_of(index_of(device));
  tell(device, "memory_used", 0, memory + 2);
  return memory[1] = memory[0] - memory[2], SUCCESS;
}

int nvmlDeviceGetUUID(void *device, Text uuid, unsigned size) {
  snprintf(uuid, size, "GPU-%08ld-0000-0000-0000-%012d", setting("SLURM_NODEID", 0), index_of(device));
  return SUCCESS;
}

int nvmlDeviceGetSerial(void *device, Text serial, unsigned size) {
  snprintf(serial, size, "%013.0f", told(device, "serial", 1000 * setting("SLURM_NODEID", 0) + index_of(device)));
  return SUCCESS;
}

int nvmlDeviceGetVbiosVersion(void *, Text version, unsigned size) { return snprintf(version, size, "0.0"), SUCCESS; }

struct Pci {  // nvmlPciInfo_t
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char name[32];
};

int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
  *pci = Pci{};
  pci->bus = 0x10 + index_of(device);
  snprintf(pci->name, sizeof pci->name, "00000000:%02X:00.0", pci->bus);
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  unsigned domain, bus = 0x10;
  sscanf(id, "%x:%x", &domain, &bus);
  return handle_of(bus - 0x10, device);
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) {
  *active = static_cast<int>(link) < model_of(index_of(device)).nvlinks - told(device, "nvlinks_down", 0);
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
    field->value = 1;
    if (field->id == NVLINK_COUNT) field->value = model_of(index_of(device)).nvlinks;
    if (field->id == CORRECTED) field->value = told(device, "ecc_corrected", 0);
    if (field->id == UNCORRECTED) field->value = told(device, "ecc_uncorrected", 0);
  }
  return SUCCESS;
}
}
