// Events (section "Event Management").
#include "call.hpp"
#include "ipc.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>

using namespace cuda_double;

namespace cuda_double {

Event::~Event() {
  if (shared != nullptr) munmap(shared, kHeader);
  if (fd >= 0) close(fd);
}

namespace {

CUresult find_event(CUevent handle, std::shared_ptr<Event>& event) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().events.find(handle);
  if (found == state().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  event = found->second;
  return CUDA_SUCCESS;
}

// What a wait for the event's latest recording means now; empty when there is nothing to wait for.
std::function<bool()> recorded(const std::shared_ptr<Event>& event) {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (event->shared != nullptr) {
    const uint64_t number = event->shared->recorded;
    if (finished(*event->shared, number)) return {};
    return [event, number] { return finished(*event->shared, number); };
  }
  if (!event->latest || event->latest->done) return {};
  return [record = event->latest] { return record->done.load(); };
}

// Waits until `done`; another process gives no wake-up.
void wait_until(const std::function<bool()>& done, const Event& event) {
  std::unique_lock<std::mutex> lock(state().progress);
  while (!done()) {
    if (event.shared != nullptr) {
      state().progressed.wait_for(lock, std::chrono::microseconds(200));
    } else {
      state().progressed.wait(lock);
    }
  }
}

}  // namespace
}  // namespace cuda_double

extern "C" {

// Events for other processes cannot have timing (CUevent_flags).
KVF_DOUBLE_EXPORT CUresult cuEventCreate(CUevent* handle, unsigned int flags) {
  KVF_CALL(Context);
  const bool shared = (flags & CU_EVENT_INTERPROCESS) != 0;
  if (handle == nullptr || (flags & ~7u) != 0 || (shared && (flags & CU_EVENT_DISABLE_TIMING) == 0)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto event = std::make_shared<Event>();
  event->flags = flags;
  event->context = call.context;
  if (shared) {
    void* header = nullptr;
    event->fd = make_shared(0, &header);
    if (event->fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    event->shared = static_cast<SharedEvent*>(header);
    event->shared->magic = kEventMagic;
    event->shared->nonce = process_nonce();
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  event->handle = *handle = state().fresh_handle<CUevent>();
  state().events[event->handle] = event;
  return CUDA_SUCCESS;
}

// Stands for all work in the stream so far, and replaces an earlier recording. Event and stream must
// be of one context: CUDA_ERROR_INVALID_HANDLE (cuEventRecord). An opened event of another process
// belongs to the context that opened it.
KVF_DOUBLE_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  KVF_CALL(Context);
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  CUresult found = find_event(handle, event);
  if (found == CUDA_SUCCESS) found = find_stream(stream_handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  if (event->shared != nullptr) {
    const uint64_t number = ++event->shared->recorded;
    enqueue(stream, {Work::Kind::Marker,
                     [event, number] {
                       event->shared->done[number % 256] = number;
                       return CUDA_SUCCESS + 0;
                     },
                     {}});
    return CUDA_SUCCESS;
  }
  auto record = std::make_shared<Record>();
  record->context = stream->context;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    event->latest = record;
  }
  enqueue(stream, {Work::Kind::Marker,
                   [record] {
                     record->done = true;
                     return CUDA_SUCCESS + 0;
                   },
                   {}});
  return CUDA_SUCCESS;
}

// CUDA_ERROR_NOT_READY until that work is done; success when never recorded (cuEventQuery).
KVF_DOUBLE_EXPORT CUresult cuEventQuery(CUevent handle) {
  KVF_CALL(Context);
  std::shared_ptr<Event> event;
  const CUresult found = find_event(handle, event);
  if (found != CUDA_SUCCESS) return found;
  if (event->context->failed != CUDA_SUCCESS) return event->context->failed;
  return recorded(event) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuEventSynchronize(CUevent handle) {
  KVF_CALL(Context);
  std::shared_ptr<Event> event;
  const CUresult found = find_event(handle, event);
  if (found != CUDA_SUCCESS) return found;
  if (const auto done = recorded(event)) wait_until(done, *event);
  return event->context->failed;
}

// Does not wait; who waits for the recording still gets it (cuEventDestroy).
KVF_DOUBLE_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  KVF_CALL(FailedContext);
  std::shared_ptr<Event> event;
  const CUresult found = find_event(handle, event);
  if (found != CUDA_SUCCESS) return found;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().events.erase(handle);
  return event->context->failed;
}

// Later work of the stream waits for the recording that is the latest now; contexts and devices may
// differ, and an event never recorded is no wait (cuStreamWaitEvent).
KVF_DOUBLE_EXPORT CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle,
                                             unsigned int flags) {
  KVF_CALL(Context);
  if ((flags & ~1u) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Event> event;
  std::shared_ptr<Stream> stream;
  CUresult found = find_event(handle, event);
  if (found == CUDA_SUCCESS) found = find_stream(stream_handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  const auto done = recorded(event);
  if (!done) return CUDA_SUCCESS;
  enqueue(stream, {Work::Kind::Marker,
                   [done, event] {
                     wait_until(done, *event);
                     return CUDA_SUCCESS + 0;
                   },
                   {}});
  return CUDA_SUCCESS;
}

}  // extern "C"
