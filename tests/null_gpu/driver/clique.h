// The ranks of one communicator, in this process and others: a file in shared memory holds what each of them asks for,
// and they read each other's buffers where they are (process_vm_readv).
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace null_gpu {

enum class Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL };

// What one rank asks of a collective: `count` elements of an NCCL `type` at `send`, combined by `reduction`.
struct Request {
  uintptr_t send;
  size_t count;
  int type, reduction, root;
  pid_t process;
};

static const int MOST_RANKS = 64, MOST_PENDING = 128;

// Sends from one rank to another that wait for their receive, in order: a ring.
struct Mailbox {
  std::atomic<uint32_t> posted, taken;
  Request requests[MOST_PENDING];
};

struct Clique {
  int size;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int joined, arrived;
  long round;
  bool aborted;
  int nodes[MOST_RANKS];  // of the ranks
  Request requests[MOST_RANKS];
  Mailbox mailboxes[MOST_RANKS][MOST_RANKS];  // [from][to]
};

// Maps the clique of that name, made by whoever comes first.
Clique *join(const std::string &name, int size, int rank);
const char *link_of(const Clique *clique, int rank, int peer);  // between two ranks, or of one (-1) with all
void leave(Clique *clique);
void abort_clique(Clique *clique);

// Returns once all ranks have called it; false if the clique was aborted.
bool barrier(Clique *clique);

// Takes part in a collective; `receive` is written once all ranks have read what they need.
void run_collective(Clique *clique, int rank, Kind kind, const Request &request, void *receive);

void post_send(Clique *clique, int from, int to, const Request &request);
void take_receive(Clique *clique, int from, int to, void *receive, size_t bytes);
void wait_for_sends(Clique *clique, int from, int to);  // until all are taken

size_t width_of(int type);  // bytes of an element

}  // namespace null_gpu
