// libnccl: collectives and sends on the streams they are given, between devices of one process or of several.
#include "clique.h"
#include "core.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <mutex>
#include <vector>

using namespace null_gpu;

struct Communicator {
  Clique *clique;
  std::string name;
  int rank, device;
  long splits = 0;
  long issued = 0, ended = 0;  // collectives
  std::mutex mutex{};
  std::condition_variable changed{};
};

struct UniqueId {
  char text[128];
};

struct PeerTransfer {  // of a group: all sends are posted before a receive waits
  Communicator *communicator;
  bool send;
  Request request;
  void *receive;
  int peer;
  CUstream stream;
};

static thread_local int group_depth = 0;
static thread_local std::vector<PeerTransfer> group;
static thread_local std::set<CUstream> launched;  // streams on which the group has a kernel

static Communicator *communicator(void *handle) { return static_cast<Communicator *>(handle); }

static int initialize(void **handle, const std::string &name, int size, int rank) {
  *handle = new Communicator{join(name, size, rank), name, rank, current_device()};
  return 0;
}

// Fails or hangs as the settings say; 0 if the call goes on.
static int check(Communicator *c, CUstream stream) {
  int error = nccl_error(c->device);
  if (error < 0) return enqueue(stream, [] { for (;;) pause(); }), 0;
  return error;
}

static void count_bytes(const char *name, size_t bytes) {
  count(name);
  count(std::string(name) + " bytes", bytes);
}

// NCCL launches one kernel for all calls of a group.
static CUresult launch_once(const std::string &kernel, CUstream stream) {
  if (group_depth && !launched.insert(stream).second) return CUDA_SUCCESS;
  return launch(kernel.c_str(), stream);
}

// Collectives of a communicator run in the order in which they are issued, also on several streams, as NCCL's do.
static void run_in_order(Communicator *c, long number, Kind kind, const Request &request, void *receive) {
  std::unique_lock<std::mutex> lock(c->mutex);
  c->changed.wait(lock, [&] { return c->ended == number; });
  lock.unlock();
  run_collective(c->clique, c->rank, kind, request, receive);
  lock.lock();
  c->ended++;
  c->changed.notify_all();
}

static int collective(const char *name, Kind kind, const void *send, void *receive, size_t n, int type,
                      int reduction, int root, void *handle, CUstream stream) {
  Communicator *c = communicator(handle);
  if (int error = check(c, stream)) return error;
  if (launch_once("ncclDevKernel_" + std::string(name + 4), stream)) return 1;  // ncclUnhandledCudaError
  Request request{reinterpret_cast<uintptr_t>(send), n, type, reduction, root, getpid()};
  enqueue(stream, [=, number = c->issued++] {
    count_bytes(name, n * width_of(type));
    run_in_order(c, number, kind, request, receive);
  });
  return 0;
}

static void exchange(const std::vector<PeerTransfer> &transfers) {
  for (const PeerTransfer &t : transfers)
    if (t.send)
      move(t.communicator->device, link_of(t.communicator->clique, t.communicator->rank, t.peer),
           t.request.count * width_of(t.request.type));
  for (const PeerTransfer &t : transfers)
    if (t.send) post_send(t.communicator->clique, t.communicator->rank, t.peer, t.request);
  for (const PeerTransfer &t : transfers) {
    size_t bytes = t.request.count * width_of(t.request.type);
    count_bytes(t.send ? "ncclSend" : "ncclRecv", bytes);
    if (!t.send) take_receive(t.communicator->clique, t.peer, t.communicator->rank, t.receive, bytes);
  }
  for (const PeerTransfer &t : transfers)
    if (t.send) wait_for_sends(t.communicator->clique, t.communicator->rank, t.peer);
}

static int end_group() {
  std::map<CUstream, std::vector<PeerTransfer>> by_stream;
  for (const PeerTransfer &t : group) by_stream[t.stream].push_back(t);
  group.clear();
  launched.clear();
  for (auto &[stream, transfers] : by_stream) {
    if (launch("ncclDevKernel_SendRecv", stream)) return 1;
    enqueue(stream, [transfers = transfers] { exchange(transfers); });
  }
  return 0;
}

static int transfer(bool send, const void *from, void *to, size_t n, int type, int peer, void *handle,
                    CUstream stream) {
  Communicator *c = communicator(handle);
  if (int error = check(c, stream)) return error;
  Request request{reinterpret_cast<uintptr_t>(from), n, type, 0, 0, getpid()};
  group.push_back({c, send, request, to, peer, stream});
  return group_depth ? 0 : end_group();
}

extern "C" {

int ncclGetVersion(int *version) { return *version = 23203, 0; }
int ncclCommCount(void *handle, int *n) { return *n = communicator(handle)->clique->size, 0; }
int ncclCommUserRank(void *handle, int *rank) { return *rank = communicator(handle)->rank, 0; }
int ncclCommCuDevice(void *handle, int *device) { return *device = communicator(handle)->device, 0; }
int ncclCommGetAsyncError(void *, int *error) { return *error = 0, 0; }
int ncclDevCommCreate(void *, void *, void *) { return 5; }  // ncclInvalidUsage: no device communicators
int ncclGroupStart() { return group_depth++, 0; }
int ncclGroupEnd() { return --group_depth ? 0 : end_group(); }
const char *ncclGetLastError(void *) { return ""; }

const char *ncclGetErrorString(int error) {
  switch (error) {
    case 1:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case 2:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case 6:
      return "remote process exited or there was a network error";
    default:
      return "no error";
  }
}

int ncclGetUniqueId(UniqueId *id) {
  static std::atomic<long> made{0};
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "%d_%ld_%ld", getpid(), static_cast<long>(time(nullptr)), ++made);
  return 0;
}

int ncclCommInitRank(void **handle, int size, UniqueId id, int rank) {
  return initialize(handle, id.text, size, rank);
}

int ncclCommInitRankConfig(void **handle, int size, UniqueId id, int rank, void *) {
  return initialize(handle, id.text, size, rank);
}

int ncclCommInitRankScalable(void **handle, int size, int rank, int, UniqueId *ids, void *) {
  return initialize(handle, ids[0].text, size, rank);
}

// Ranks exchange colors and keys between two barriers.
int ncclCommSplit(void *handle, int color, int key, void **made, void *) {
  Communicator *c = communicator(handle);
  barrier(c->clique);
  c->clique->requests[c->rank] = {0, static_cast<size_t>(key), color, 0, 0, getpid()};
  barrier(c->clique);
  int size = 0, rank = 0;
  for (int other = 0; other < c->clique->size; other++) {
    const Request &theirs = c->clique->requests[other];
    if (theirs.type != color) continue;
    size++;
    int their_key = theirs.count;
    rank += their_key < key || (their_key == key && other < c->rank);
  }
  barrier(c->clique);
  std::string name = c->name + "_" + std::to_string(c->splits++) + "_" + std::to_string(color);
  *made = nullptr;
  return color < 0 ? 0 : initialize(made, name, size, rank);
}

int ncclCommDestroy(void *handle) {
  leave(communicator(handle)->clique);
  delete communicator(handle);
  return 0;
}

int ncclCommAbort(void *handle) {
  abort_clique(communicator(handle)->clique);
  return 0;
}

int ncclCommRegister(void *, void *, size_t, void **registration) { return *registration = opaque_handle(), 0; }
int ncclCommWindowRegister(void *, void *, size_t, void **window, int) { return *window = opaque_handle(), 0; }
int ncclMemFree(void *p) { return release(p); }

int ncclMemAlloc(void **p, size_t bytes) {
  *p = allocate(bytes, current_device());
  return *p ? 0 : 1;
}

int ncclRedOpCreatePreMulSum(int *operation, void *, int, int, void *) { return *operation = 0, 0; }

int ncclAllReduce(const void *from, void *to, size_t n, int type, int reduction, void *c, CUstream stream) {
  return collective(__func__, Kind::ALL_REDUCE, from, to, n, type, reduction, 0, c, stream);
}

int ncclReduceScatter(const void *from, void *to, size_t n, int type, int reduction, void *c, CUstream stream) {
  return collective(__func__, Kind::REDUCE_SCATTER, from, to, n, type, reduction, 0, c, stream);
}

int ncclAllGather(const void *from, void *to, size_t n, int type, void *c, CUstream stream) {
  return collective(__func__, Kind::ALL_GATHER, from, to, n, type, 0, 0, c, stream);
}

int ncclAlltoAll(const void *from, void *to, size_t n, int type, void *c, CUstream stream) {
  return collective(__func__, Kind::ALL_TO_ALL, from, to, n, type, 0, 0, c, stream);
}

int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *c, CUstream stream) {
  return collective(__func__, Kind::BROADCAST, from, to, n, type, 0, root, c, stream);
}

int ncclSend(const void *from, size_t n, int type, int peer, void *c, CUstream stream) {
  return transfer(true, from, nullptr, n, type, peer, c, stream);
}

int ncclRecv(void *to, size_t n, int type, int peer, void *c, CUstream stream) {
  return transfer(false, nullptr, to, n, type, peer, c, stream);
}
}
