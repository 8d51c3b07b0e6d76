// Streams, each a thread with a queue, and events.
#include "core.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace null_gpu {

struct Stream {
  const int device, priority;
  const unsigned flags;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool busy = false, started = false, destroyed = false;
  CUgraph graph = nullptr;  // that is captured

  Stream(int device, unsigned flags, int priority) : device(device), priority(priority), flags(flags) {}

  void add(std::function<void()> work) {
    Lock lock(mutex);
    if (!started) std::thread(&Stream::run, this).detach();
    started = true;
    queue.push_back(std::move(work));
    changed.notify_all();
  }

  void run() {
    set_current_device(device);
    Lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return destroyed || !queue.empty(); });
      if (queue.empty()) break;
      auto work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      if (!error_of(device)) work();  // a context with an error does nothing more
      work = nullptr;
      lock.lock();
      busy = false;
      changed.notify_all();
    }
    lock.unlock();
    delete this;
  }

  // Work already in the queue is done first, as CUDA has it.
  void destroy() {
    Lock lock(mutex);
    destroyed = true;
    changed.notify_all();
    if (started) return;
    lock.unlock();
    delete this;
  }

  bool idle() {
    Lock lock(mutex);
    return queue.empty() && !busy;
  }

  // Waits for the queue, or for an error of the device, after which nothing ends that waits for it.
  void wait() {
    Lock lock(mutex);
    auto ended = [&] { return (queue.empty() && !busy) || error_of(device); };
    while (!changed.wait_for(lock, std::chrono::milliseconds(20), ended)) continue;
  }
};

struct Mark {  // one recording of an event
  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point time;

  explicit Mark(int device) : device(device) {}

  void set() {
    Lock lock(mutex);
    done = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }

  bool wait() {
    Lock lock(mutex);
    auto ended = [&] { return done || error_of(device); };
    while (!changed.wait_for(lock, std::chrono::milliseconds(20), ended)) continue;
    return done;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> last;
};

static std::mutex mutex;
static std::set<Stream *> streams;

static Stream *make_stream(unsigned flags, int priority) {
  auto *stream = new Stream(current_device(), flags, priority);
  Lock lock(mutex);
  streams.insert(stream);
  return stream;
}

// Handles 0, 1 and 2 are CUDA's default streams.
CUstream stream_or_default(CUstream stream) {
  static Stream *standard[MOST_DEVICES];
  if (reinterpret_cast<uintptr_t>(stream) > 2) return stream;
  static std::mutex mutex;
  Lock lock(mutex);
  Stream *&mine = standard[current_device()];
  if (!mine) mine = make_stream(0, 0);
  return reinterpret_cast<CUstream>(mine);
}

static Stream *get(CUstream stream) { return reinterpret_cast<Stream *>(stream_or_default(stream)); }
int device_of(CUstream stream) { return get(stream)->device; }
bool capturing(CUstream stream) { return get(stream)->graph; }

CUresult enqueue(CUstream handle, std::function<void()> work) {
  Stream *stream = get(handle);
  if (stream->graph)
    capture(stream->graph, std::move(work));
  else
    stream->add(std::move(work));
  return error_of(stream->device);
}

CUresult synchronize(CUstream stream) {
  get(stream)->wait();
  return error_of(get(stream)->device);
}

static std::shared_ptr<Mark> last_mark(CUevent handle) {
  auto *event = reinterpret_cast<Event *>(handle);
  Lock lock(event->mutex);
  return event->last;
}

}  // namespace null_gpu

using namespace null_gpu;

extern "C" {

CUresult cuCtxSynchronize() {
  std::vector<Stream *> mine;
  {
    Lock lock(mutex);
    for (Stream *stream : streams)
      if (stream->device == current_device()) mine.push_back(stream);
  }
  for (Stream *stream : mine) stream->wait();
  return error_of(current_device());
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<CUstream>(make_stream(flags, priority));
  return error_of(current_device());
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult cuStreamDestroy(CUstream handle) {
  auto *stream = reinterpret_cast<Stream *>(handle);
  {
    Lock lock(mutex);
    streams.erase(stream);
  }
  stream->destroy();
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  COUNT;
  return synchronize(stream);
}

CUresult cuStreamQuery(CUstream stream) {
  if (CUresult error = error_of(device_of(stream))) return error;
  return get(stream)->idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamGetPriority(CUstream stream, int *priority) {
  *priority = get(stream)->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
  *flags = get(stream)->flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  *context = context_of(get(stream)->device);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = get(stream)->graph ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                CUgraph *graph, const CUgraphNode **dependencies,
                                const CUgraphEdgeData **edges, size_t *n) {
  if (id) *id = 1;
  if (graph) *graph = get(stream)->graph;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cuStreamIsCapturing(stream, status);
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *,
                                     const CUgraphEdgeData *, size_t, CUstreamCaptureMode) {
  get(stream)->graph = graph;
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  return cuGraphCreate(&get(stream)->graph, 0);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  *graph = get(stream)->graph;
  get(stream)->graph = nullptr;
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  return enqueue(stream, [=] { function(data); });
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *data, unsigned) {
  return enqueue(stream, [=] { function(stream, CUDA_SUCCESS, data); });
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr p, cuuint32_t value, unsigned) {
  return enqueue(stream, [=] { *reinterpret_cast<volatile cuuint32_t *>(p) = value; });
}

CUresult cuEventCreate(CUevent *event, unsigned) {
  *event = reinterpret_cast<CUevent>(new Event);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  delete reinterpret_cast<Event *>(event);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
  auto mark = std::make_shared<Mark>(device_of(stream));
  auto *event = reinterpret_cast<Event *>(handle);
  {
    Lock lock(event->mutex);
    event->last = mark;
  }
  if (capturing(stream)) return mark->set(), CUDA_SUCCESS;
  return enqueue(stream, [mark] { mark->set(); });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  return cuEventRecord(event, stream);
}

CUresult cuEventSynchronize(CUevent event) {
  auto mark = last_mark(event);
  if (!mark) return CUDA_SUCCESS;
  mark->wait();
  return error_of(mark->device);
}

CUresult cuEventQuery(CUevent event) {
  auto mark = last_mark(event);
  if (!mark) return CUDA_SUCCESS;
  if (CUresult error = error_of(mark->device)) return error;
  Lock lock(mark->mutex);
  return mark->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
  auto first = last_mark(from), last = last_mark(to);
  if (!first || !last || !first->wait() || !last->wait())
    return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  auto mark = last_mark(event);
  if (!mark || capturing(stream)) return CUDA_SUCCESS;
  return enqueue(stream, [mark] { mark->wait(); });
}
}
