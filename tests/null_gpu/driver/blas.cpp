// libcublas, libcublasLt, libcufft and libcusparse: descriptors keep their attributes, there is one algorithm, and
// products are launches.
#include "core.h"

#include <cstring>
#include <map>
#include <string>

using namespace null_gpu;

static const int MAJOR = 13, MINOR = 10;

struct Descriptor {
  std::map<int, std::string> attributes;

  template <typename Value>
  void put(int name, Value value) {
    attributes[name] = std::string(reinterpret_cast<const char *>(&value), sizeof value);
  }
};

static int set(void *descriptor, int name, const void *value, size_t bytes) {
  static_cast<Descriptor *>(descriptor)->attributes[name].assign(static_cast<const char *>(value), bytes);
  return 0;
}

static int get(void *descriptor, int name, void *value, size_t bytes, size_t *written) {
  std::string kept = static_cast<Descriptor *>(descriptor)->attributes[name];
  kept.resize(std::max(bytes, kept.size()));
  if (value) memcpy(value, kept.data(), bytes);
  if (written) *written = bytes;
  return 0;
}

static int destroy(void *descriptor) {
  delete static_cast<Descriptor *>(descriptor);
  return 0;
}

static int property(int which, int *value) {
  *value = which == 0 ? MAJOR : which == 1 ? MINOR : 0;
  return 0;
}

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

extern "C" {

int cublasCreate_v2(void **handle) { return *handle = opaque_handle(), 0; }
int cublasGetProperty(int which, int *value) { return property(which, value); }
int cublasGetVersion_v2(void *, int *version) { return *version = 10000 * MAJOR + 100 * MINOR, 0; }
int cublasGetMathMode(void *, int *mode) { return *mode = 0, 0; }
int cublasGetStream_v2(void *, void **stream) { return *stream = nullptr, 0; }
const char *cublasGetStatusString(int) { return "cuBLAS status"; }
const char *cublasGetStatusName(int) { return "CUBLAS_STATUS"; }

int cublasLtCreate(void **handle) { return *handle = opaque_handle(), 0; }
size_t cublasLtGetVersion() { return 10000 * MAJOR + 100 * MINOR; }
size_t cublasLtGetCudartVersion() { return CUDA_VERSION; }
int cublasLtGetProperty(int which, int *value) { return property(which, value); }
const char *cublasLtGetStatusString(int) { return "cuBLASLt status"; }
const char *cublasLtGetStatusName(int) { return "CUBLASLT_STATUS"; }

int cublasLtMatmulDescCreate(void **handle, int compute, int scale) {
  auto *descriptor = new Descriptor;
  descriptor->put(0, compute);
  descriptor->put(1, scale);
  *handle = descriptor;
  return 0;
}

int cublasLtMatrixLayoutCreate(void **handle, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  auto *layout = new Descriptor;
  layout->put(0, type);
  layout->put(1, int{0});  // column-major
  layout->put(2, rows);
  layout->put(3, columns);
  layout->put(4, leading);
  layout->put(5, int{1});      // batch
  layout->put(6, int64_t{0});  // stride between products
  *handle = layout;
  return 0;
}

int cublasLtMatmulPreferenceCreate(void **preference) { return *preference = new Descriptor, 0; }
int cublasLtMatmulDescDestroy(void *descriptor) { return destroy(descriptor); }
int cublasLtMatrixLayoutDestroy(void *layout) { return destroy(layout); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return destroy(preference); }
int cublasLtMatmulDescSetAttribute(void *d, int name, const void *v, size_t n) { return set(d, name, v, n); }
int cublasLtMatrixLayoutSetAttribute(void *d, int name, const void *v, size_t n) { return set(d, name, v, n); }
int cublasLtMatmulPreferenceSetAttribute(void *d, int name, const void *v, size_t n) { return set(d, name, v, n); }

int cublasLtMatmulDescGetAttribute(void *d, int name, void *value, size_t bytes, size_t *written) {
  return get(d, name, value, bytes, written);
}

int cublasLtMatrixLayoutGetAttribute(void *d, int name, void *value, size_t bytes, size_t *written) {
  return get(d, name, value, bytes, written);
}

int cublasLtMatmulPreferenceGetAttribute(void *d, int name, void *value, size_t bytes, size_t *written) {
  return get(d, name, value, bytes, written);
}

int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int wanted,
                                   Heuristic *result, int *found) {
  memset(result, 0, sizeof *result);
  result->algorithm[0] = 1;
  result->waves = 1;
  *found = wanted > 0;
  return 0;
}

int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *, const void *,
                   const void *, void *, void *, void *, const void *, void *, size_t, CUstream stream) {
  COUNT;
  return launch("nvjet_gemm", stream) ? 13 : 0;  // CUBLAS_STATUS_EXECUTION_FAILED
}

int cufftGetVersion(int *version) { return *version = 12500, 0; }
int cusparseCreate(void **handle) { return *handle = opaque_handle(), 0; }
int cusparseGetVersion(void *, int *version) { return *version = 12900, 0; }

int cufftGetProperty(int which, int *value) { return *value = which == 0 ? 12 : which == 1 ? 5 : 0, 0; }
int cusparseGetProperty(int which, int *value) { return *value = which == 0 ? 12 : which == 1 ? 9 : 0, 0; }
}
