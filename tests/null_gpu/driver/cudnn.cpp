// libcudnn: graphs are built and finalized, there is one engine, and execution is a launch.
#include "core.h"

#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

using namespace null_gpu;

struct Values {
  int64_t n;
  std::string bytes;
};

struct Descriptor {
  std::map<int, Values> attributes;
};

static size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    default:
      return 4;
  }
}

// An attribute that nobody set: one engine, one configuration, no notes; else one value, zero.
static Values standard(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type) {
  static const char PLAN[] = "{\"null GPU\":1}";
  const int64_t one = 1;
  switch (name) {
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      return {1, std::string(reinterpret_cast<const char *>(&one), sizeof one)};
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
      return {0, ""};
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION:
      return {sizeof PLAN, std::string(PLAN, sizeof PLAN)};
    default:  // descriptors are the caller's own, which are left as they are
      return {1, type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? "" : std::string(size_of(type), 0)};
  }
}

static thread_local CUstream last_stream;

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDA_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t) { return "cuDNN status"; }
void cudnnGetLastErrorString(char *text, size_t size) { memset(text, 0, std::min<size_t>(size, 1)); }

cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int *value) {
  *value = which == 0 ? CUDNN_MAJOR : which == 1 ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  *handle = static_cast<cudnnHandle_t>(opaque_handle());
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t stream) {
  last_stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t *stream) {
  *stream = last_stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *descriptor) {
  *descriptor = new Descriptor;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  delete static_cast<Descriptor *>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  COUNT;
  return launch("cudnn_graph", last_stream) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n, const void *values) {
  size_t bytes = values ? n * size_of(type) : 0;
  auto &attributes = static_cast<Descriptor *>(descriptor)->attributes;
  attributes[name] = {n, std::string(static_cast<const char *>(values), bytes)};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t *n, void *values) {
  auto &attributes = static_cast<Descriptor *>(descriptor)->attributes;
  auto known = attributes.find(name);
  Values kept = known == attributes.end() ? standard(name, type) : known->second;
  if (n) *n = kept.n;
  if (values) memcpy(values, kept.bytes.data(), std::min(kept.bytes.size(), room * size_of(type)));
  return CUDNN_STATUS_SUCCESS;
}
}
