// The ranks of a communicator: how they meet, exchange what they ask for, and combine values.
#include "clique.h"

#include "core.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace null_gpu {

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FP8_E4M3, FP8_E5M2 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM };

struct Locked {
  Clique *clique;
  explicit Locked(Clique *clique) : clique(clique) { pthread_mutex_lock(&clique->mutex); }
  ~Locked() { pthread_mutex_unlock(&clique->mutex); }

  template <typename Condition>
  void wait(Condition done) {
    while (!done() && !clique->aborted) pthread_cond_wait(&clique->changed, &clique->mutex);
  }
};

static void initialize(Clique *clique, int size) {
  pthread_mutexattr_t mutex;
  pthread_mutexattr_init(&mutex);
  pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&clique->mutex, &mutex);
  pthread_condattr_t condition;
  pthread_condattr_init(&condition);
  pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&clique->changed, &condition);
  clique->size = size;
}

// The first to create the file initializes it under another name, so that it appears whole.
static int open_file(const std::string &name, int size) {
  std::string path = "/dev/shm/null_gpu_" + name, made = path + "." + std::to_string(gettid());
  int file = open(made.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (ftruncate(file, sizeof(Clique))) perror("null GPU: shared memory");
  void *p = mmap(nullptr, sizeof(Clique), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  initialize(static_cast<Clique *>(p), size);
  munmap(p, sizeof(Clique));
  if (link(made.c_str(), path.c_str())) {
    close(file);
    file = open(path.c_str(), O_RDWR);
  }
  unlink(made.c_str());
  return file;
}

Clique *join(const std::string &name, int size, int rank) {
  if (size > MOST_RANKS) {
    fprintf(stderr, "null GPU: %d ranks, at most %d\n", size, MOST_RANKS);
    abort();
  }
  int file = open_file(name, size);
  void *p = mmap(nullptr, sizeof(Clique), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto *clique = static_cast<Clique *>(p);
  clique->nodes[rank] = setting("SLURM_NODEID", 0);
  Locked locked(clique);
  if (++clique->joined == size) unlink(("/dev/shm/null_gpu_" + name).c_str());
  return clique;
}

const char *link_of(const Clique *clique, int rank, int peer) {
  bool inside = true;
  for (int other = 0; other < clique->size; other++)
    if (peer < 0 || other == peer) inside &= clique->nodes[other] == clique->nodes[rank];
  return inside ? "nvlink_gb_s" : "network_gb_s";
}

void leave(Clique *clique) { munmap(clique, sizeof(Clique)); }

void abort_clique(Clique *clique) {
  Locked locked(clique);
  clique->aborted = true;
  pthread_cond_broadcast(&clique->changed);
}

bool barrier(Clique *clique) {
  Locked locked(clique);
  long round = clique->round;
  if (++clique->arrived == clique->size) {
    clique->arrived = 0;
    clique->round++;
    pthread_cond_broadcast(&clique->changed);
  }
  locked.wait([&] { return clique->round != round; });
  return !clique->aborted;
}

size_t width_of(int type) {
  switch (type) {
    case INT8:
    case UINT8:
    case FP8_E4M3:
    case FP8_E5M2:
      return 1;
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case INT32:
    case UINT32:
    case FLOAT32:
      return 4;
    default:
      return 8;
  }
}

static void read_from(const Request &request, size_t offset, void *to, size_t bytes) {
  void *from = reinterpret_cast<void *>(request.send + offset);
  if (request.process == getpid()) {
    memcpy(to, from, bytes);
    return;
  }
  for (size_t done = 0; done < bytes;) {
    iovec mine{static_cast<char *>(to) + done, bytes - done}, theirs{static_cast<char *>(from) + done, bytes - done};
    ssize_t n = process_vm_readv(request.process, &mine, 1, &theirs, 1, 0);
    if (n <= 0) {
      perror("null GPU: reading another process's memory");
      return;
    }
    done += n;
  }
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <typename Value>
static Value combine(Value a, Value b, int reduction) {
  switch (reduction) {
    case PRODUCT:
      return a * b;
    case MAXIMUM:
      return a > b ? a : b;
    case MINIMUM:
      return a < b ? a : b;
    default:
      return a + b;
  }
}

// Combines `count` elements from `first` of all ranks, as `Sum`s.
template <typename Value, typename Sum = Value>
static std::vector<Sum> combined(Clique *clique, size_t first, const Request &request) {
  std::vector<Sum> sums(request.count);
  std::vector<Value> theirs(request.count);
  for (int rank = 0; rank < clique->size; rank++) {
    read_from(clique->requests[rank], first * sizeof(Value), theirs.data(), request.count * sizeof(Value));
    for (size_t n = 0; n < request.count; n++)
      sums[n] = rank ? combine<Sum>(sums[n], theirs[n], request.reduction) : static_cast<Sum>(theirs[n]);
  }
  return sums;
}

template <typename Value>
static std::vector<char> bytes_of(const std::vector<Value> &values) {
  auto *first = reinterpret_cast<const char *>(values.data());
  return {first, first + values.size() * sizeof(Value)};
}

static std::vector<char> reduce(Clique *clique, size_t first, const Request &request) {
  switch (request.type) {
    case INT8:
      return bytes_of(combined<int8_t>(clique, first, request));
    case UINT8:
      return bytes_of(combined<uint8_t>(clique, first, request));
    case INT32:
      return bytes_of(combined<int32_t>(clique, first, request));
    case UINT32:
      return bytes_of(combined<uint32_t>(clique, first, request));
    case INT64:
      return bytes_of(combined<int64_t>(clique, first, request));
    case UINT64:
      return bytes_of(combined<uint64_t>(clique, first, request));
    case FLOAT32:
      return bytes_of(combined<float>(clique, first, request));
    case FLOAT64:
      return bytes_of(combined<double>(clique, first, request));
    case BFLOAT16: {
      std::vector<uint16_t> rounded;
      for (float sum : combined<Bfloat16, float>(clique, first, request)) {
        uint32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        rounded.push_back((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      }
      return bytes_of(rounded);
    }
    default:
      count("NCCL reductions of a type without arithmetic");
      return std::vector<char>(request.count * width_of(request.type));
  }
}

// What this rank receives.
static std::vector<char> received(Clique *clique, int rank, Kind kind, const Request &request) {
  size_t bytes = request.count * width_of(request.type);
  if (kind == Kind::ALL_REDUCE) return reduce(clique, 0, request);
  if (kind == Kind::REDUCE_SCATTER) return reduce(clique, request.count * rank, request);
  std::vector<char> data(kind == Kind::BROADCAST ? bytes : bytes * clique->size);
  if (kind == Kind::BROADCAST) return read_from(clique->requests[request.root], 0, data.data(), bytes), data;
  for (int from = 0; from < clique->size; from++) {
    size_t offset = kind == Kind::ALL_TO_ALL ? rank * bytes : 0;
    read_from(clique->requests[from], offset, &data[from * bytes], bytes);
  }
  return data;
}

void run_collective(Clique *clique, int rank, Kind kind, const Request &request, void *receive) {
  clique->requests[rank] = request;
  if (!barrier(clique)) return;
  for (int other = 0; other < clique->size; other++) {
    const Request &theirs = clique->requests[other];
    if (theirs.count == request.count && theirs.type == request.type) continue;
    fprintf(stderr, "null GPU: ranks %d and %d disagree on a collective\n", rank, other);
    abort();
  }
  size_t bytes = request.count * width_of(request.type);
  bool to_each = kind == Kind::ALL_GATHER || kind == Kind::REDUCE_SCATTER || kind == Kind::ALL_TO_ALL;
  move(current_device(), link_of(clique, rank, -1), bytes * (to_each ? clique->size - 1 : 1));
  std::vector<char> data;
  if (!still()) data = received(clique, rank, kind, request);
  if (!barrier(clique)) return;
  memcpy(receive, data.data(), data.size());
  barrier(clique);
}

void post_send(Clique *clique, int from, int to, const Request &request) {
  Mailbox &box = clique->mailboxes[from][to];
  Locked locked(clique);
  locked.wait([&] { return box.posted - box.taken < MOST_PENDING; });
  box.requests[box.posted++ % MOST_PENDING] = request;
  pthread_cond_broadcast(&clique->changed);
}

void take_receive(Clique *clique, int from, int to, void *receive, size_t bytes) {
  Mailbox &box = clique->mailboxes[from][to];
  Locked locked(clique);
  locked.wait([&] { return box.posted != box.taken; });
  if (clique->aborted) return;
  if (!still()) read_from(box.requests[box.taken % MOST_PENDING], 0, receive, bytes);
  box.taken++;
  pthread_cond_broadcast(&clique->changed);
}

void wait_for_sends(Clique *clique, int from, int to) {
  Mailbox &box = clique->mailboxes[from][to];
  Locked locked(clique);
  locked.wait([&] { return box.posted == box.taken; });
}

}  // namespace null_gpu
