// Streams: each has a thread that executes its work in order.
#include "call.hpp"

#include <pthread.h>

#include <chrono>

using namespace cuda_double;

namespace cuda_double {
namespace {

// One piece of work, outside every lock. A failed context executes nothing more.
void execute(Stream& stream, Work& work) {
  Context& context = *stream.context;
  const bool marker = work.kind == Work::Kind::Marker;
  if (context.failed != CUDA_SUCCESS && !marker) return;
  if (work.kind == Work::Kind::Transfer || work.kind == Work::Kind::HostFunction) delay();
  CUresult result = work.kind == Work::Kind::Transfer ? injected("work") : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) result = work.run();
  if (result != CUDA_SUCCESS) fail(context, result);
}

void run(const std::shared_ptr<Stream>& stream) {
  State& all = state();
  std::unique_lock<std::mutex> lock(all.progress);
  for (;;) {
    all.progressed.wait(lock, [&] {
      return (!stream->queue.empty() && !stream->held && !all.all_held) || (stream->queue.empty() && stream->closing);
    });
    if (stream->queue.empty()) break;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (const auto& [other, number] : work.after) {
      all.progressed.wait(lock, [&other = other, number = number] { return other->completed >= number; });
    }
    stream->waiting_for_value = work.kind == Work::Kind::Wait;
    lock.unlock();
    execute(*stream, work);
    work = Work();  // what it holds is let go before it counts as executed
    lock.lock();
    stream->waiting_for_value = false;
    ++stream->completed;
    all.progressed.notify_all();
  }
  stream->running = false;
}

void start(const std::shared_ptr<Stream>& stream) {  // with State::progress held
  if (stream->running) return;
  stream->running = true;
  std::thread([stream] {
    pthread_setname_np(pthread_self(), "cuda-double");  // what counts threads leaves them out
    run(stream);
  }).detach();
}

}  // namespace

std::shared_ptr<Stream> new_stream(const std::shared_ptr<Context>& context, bool blocking,
                                   bool special) {
  auto stream = std::make_shared<Stream>();
  stream->context = context;
  stream->blocking = blocking;
  stream->special = special;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& every = state().all_streams;
  for (size_t i = 0; i < every.size();) {  // those that are gone
    if (every[i].expired()) {
      every[i] = every.back();
      every.pop_back();
    } else {
      ++i;
    }
  }
  every.push_back(stream);
  if (!special) {
    stream->handle = state().fresh_handle<CUstream>();
    state().streams[stream->handle] = stream;
  }
  return stream;
}

CUresult find_stream(CUstream handle, const std::shared_ptr<Context>& current,
                     std::shared_ptr<Stream>& stream) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    std::unique_lock<std::mutex> lock(state().mutex);
    if (!current->legacy) {
      lock.unlock();
      auto made = new_stream(current, true, true);
      lock.lock();
      if (!current->legacy) current->legacy = made;
    }
    stream = current->legacy;
  } else if (handle == CU_STREAM_PER_THREAD) {
    // One for each thread and context, and a blocking stream (section "Stream synchronization
    // behavior").
    std::unique_lock<std::mutex> lock(state().mutex);
    const auto id = std::this_thread::get_id();
    if (current->per_thread.count(id) == 0) {
      lock.unlock();
      auto made = new_stream(current, true, true);
      lock.lock();
      current->per_thread[id] = made;
    }
    stream = current->per_thread[id];
  } else {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().streams.find(handle);
    if (found == state().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    stream = found->second;
  }
  return stream->context->failed;
}

uint64_t enqueue(const std::shared_ptr<Stream>& stream, Work work) {
  std::shared_ptr<Stream> legacy;
  std::vector<std::shared_ptr<Stream>> others;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    legacy = stream->context->legacy;
    if (stream == legacy) {
      for (const auto& weak : state().all_streams) {
        auto other = weak.lock();
        if (other && other != stream && other->blocking && other->context == stream->context) {
          others.push_back(std::move(other));
        }
      }
    }
  }
  // The legacy default stream waits for all blocking streams of its context, and they wait for it;
  // non-blocking ones do neither (section "Stream synchronization behavior").
  if (legacy && legacy != stream && stream->blocking) others.push_back(legacy);
  std::lock_guard<std::mutex> lock(state().progress);
  for (auto& other : others) {
    if (other->completed < other->enqueued) work.after.emplace_back(other, other->enqueued);
  }
  stream->queue.push_back(std::move(work));
  const uint64_t number = ++stream->enqueued;
  start(stream);
  state().progressed.notify_all();
  return number;
}

CUresult wait_for(const std::shared_ptr<Stream>& stream, uint64_t number) {
  std::unique_lock<std::mutex> lock(state().progress);
  state().progressed.wait(lock, [&] { return stream->completed >= number; });
  return stream->context->failed;
}

void close_stream(const std::shared_ptr<Stream>& stream) {
  std::lock_guard<std::mutex> lock(state().progress);
  bool waits = stream->waiting_for_value;
  for (const auto& work : stream->queue) waits = waits || work.kind == Work::Kind::Wait;
  if (waits) ++state().unresolved_waits;
  stream->closing = true;
  stream->held = false;
  state().progressed.notify_all();
}

CUresult synchronize(const std::shared_ptr<Context>& context) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto& weak : state().all_streams) {
      auto stream = weak.lock();
      if (stream && stream->context == context) streams.push_back(std::move(stream));
    }
  }
  for (const auto& stream : streams) {
    uint64_t number = 0;
    {
      std::lock_guard<std::mutex> lock(state().progress);
      number = stream->enqueued;
    }
    wait_for(stream, number);
  }
  return context->failed;
}

namespace {

CUresult create(const std::shared_ptr<Context>& context, CUstream* stream, unsigned int flags) {
  if (stream == nullptr || (flags & ~1u) != 0) return CUDA_ERROR_INVALID_VALUE;
  *stream = new_stream(context, (flags & CU_STREAM_NON_BLOCKING) == 0, false)->handle;
  return CUDA_SUCCESS;
}

bool holds(uint32_t now, uint32_t value, unsigned int flags) {
  // CUstreamWaitValue_flags.
  switch (flags & ~static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH)) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<int32_t>(now - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return now == value;
    case CU_STREAM_WAIT_VALUE_AND: return (now & value) != 0;
    default: return ~(now | value) != 0;
  }
}

// Real hardware would wait for ever; so long is a bug of the test.
constexpr auto kLongestWait = std::chrono::seconds(120);

CUresult wait_value(const Place& place, const Context& context, uint32_t value, unsigned int flags) {
  auto* word = reinterpret_cast<std::atomic<uint32_t>*>(place.host);
  const auto begin = std::chrono::steady_clock::now();
  for (auto pause = std::chrono::microseconds(10);; pause = std::min(pause * 2, std::chrono::microseconds(500))) {
    const CUresult there = still_there(place, "cuStreamWaitValue32");
    if (there != CUDA_SUCCESS) return there;
    if (holds(word->load(std::memory_order_acquire), value, flags)) return CUDA_SUCCESS;
    if (context.failed != CUDA_SUCCESS) return CUDA_SUCCESS;
    if (std::chrono::steady_clock::now() - begin > kLongestWait) {
      violation("cuStreamWaitValue32 has waited for two minutes");
      return CUDA_ERROR_LAUNCH_TIMEOUT;
    }
    std::this_thread::sleep_for(pause);
  }
}

// A word of device memory or of pinned host memory (cuStreamWaitValue32).
CUresult find_word(CUdeviceptr address, Place& place) {
  if (address % 4 != 0 || address == 0) return CUDA_ERROR_INVALID_VALUE;
  const CUresult found = find_place(address, 4, place);
  if (found != CUDA_SUCCESS) return found;
  return place.range ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace
}  // namespace cuda_double

extern "C" {

KVF_DOUBLE_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  KVF_CALL(Context);
  return create(call.context, stream, flags);
}

KVF_DOUBLE_EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  KVF_CALL(Context);
  return create(call.context, stream, flags);
}

// Returns at once; work that is still there is done all the same (cuStreamDestroy).
KVF_DOUBLE_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  KVF_CALL(FailedContext);
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().streams.find(handle);
    if (found == state().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    stream = found->second;
    state().streams.erase(found);
  }
  close_stream(stream);
  return stream->context->failed;
}

KVF_DOUBLE_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (stream->capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream == call.context->legacy) return wait_for(stream, enqueue(stream, {Work::Kind::Marker, [] { return 0; }, {}}));
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(state().progress);
    number = stream->enqueued;
  }
  return wait_for(stream, number);
}

// CUDA_ERROR_NOT_READY until all work is done (cuStreamQuery); for the legacy stream that includes
// what it would wait for.
KVF_DOUBLE_EXPORT CUresult cuStreamQuery(CUstream handle) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (stream->capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  std::vector<std::shared_ptr<Stream>> streams{stream};
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (stream == call.context->legacy) {
      for (const auto& weak : state().all_streams) {
        auto other = weak.lock();
        if (other && other->blocking && other->context == call.context) streams.push_back(other);
      }
    }
  }
  std::lock_guard<std::mutex> lock(state().progress);
  for (const auto& each : streams) {
    if (each->completed < each->enqueued) return CUDA_ERROR_NOT_READY;
  }
  return stream->context->failed;
}

// The context that the stream was made in; of a default stream the current one, and without it
// CUDA_ERROR_INVALID_CONTEXT (cuStreamGetCtx).
KVF_DOUBLE_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  KVF_CALL(Init);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto special = reinterpret_cast<uintptr_t>(handle) <= 2;
  if (special) {
    Call current("cuStreamGetCtx:current", Needs::FailedContext);
    if (current.result != CUDA_SUCCESS) return current.result;
    *context = current.context->handle;
    return CUDA_SUCCESS;
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().streams.find(handle);
  if (found == state().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *context = found->second->context->handle;
  return CUDA_SUCCESS;
}

// A captured stream can be neither queried nor waited for (guide, "Prohibited and Unhandled
// Operations"). The legacy stream cannot be asked while a blocking one is captured:
// CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (cuStreamIsCapturing).
KVF_DOUBLE_EXPORT CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS || status == nullptr) return found != 0 ? found : CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (stream == call.context->legacy) {
    for (const auto& weak : state().all_streams) {
      const auto other = weak.lock();
      if (other && other->blocking && other->capturing && other->context == call.context) {
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
      }
    }
  }
  *status = stream->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS || flags == nullptr) return found != 0 ? found : CUDA_ERROR_INVALID_VALUE;
  *flags = stream->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
  return CUDA_SUCCESS;
}

namespace {

CUresult enqueue_wait(const Call& call, CUstream handle, CUdeviceptr address, uint32_t value,
                      unsigned int flags) {
  std::shared_ptr<Stream> stream;
  CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  Place place;
  found = find_word(address, place);
  if (found != CUDA_SUCCESS) return found;
  const auto context = stream->context;
  enqueue(stream, {Work::Kind::Wait,
                   [=] { return wait_value(place, *context, value, flags); },
                   {}});
  return CUDA_SUCCESS;
}

}  // namespace

KVF_DOUBLE_EXPORT CUresult cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address,
                                                  cuuint32_t value, unsigned int flags) {
  KVF_CALL(Context);
  return enqueue_wait(call, handle, address, value, flags);
}

// The first form of the same, which every driver since CUDA 8 has.
KVF_DOUBLE_EXPORT CUresult cuStreamWaitValue32(CUstream handle, CUdeviceptr address,
                                               cuuint32_t value, unsigned int flags) {
  KVF_CALL(Context);
  return enqueue_wait(call, handle, address, value, flags);
}

// The write comes after everything enqueued before, with a fence unless told otherwise
// (cuStreamWriteValue32).
KVF_DOUBLE_EXPORT CUresult cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address,
                                                   cuuint32_t value, unsigned int flags) {
  KVF_CALL(Context);
  if ((flags & ~1u) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  Place place;
  found = find_word(address, place);
  if (found != CUDA_SUCCESS) return found;
  enqueue(stream, {Work::Kind::Transfer,
                   [=] {
                     const CUresult there = still_there(place, "cuStreamWriteValue32");
                     if (there != CUDA_SUCCESS) return there;
                     reinterpret_cast<std::atomic<uint32_t>*>(place.host)->store(value);
                     return CUDA_SUCCESS + 0;
                   },
                   {}});
  return CUDA_SUCCESS;
}

// Called in the stream's order, and never in a context that has failed (cuLaunchHostFunc).
KVF_DOUBLE_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user_data) {
  KVF_CALL(Context);
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  enqueue(stream, {Work::Kind::HostFunction,
                   [=] {
                     in_host_function() = true;
                     function(user_data);
                     in_host_function() = false;
                     ++state().host_functions;
                     return CUDA_SUCCESS + 0;
                   },
                   {}});
  return CUDA_SUCCESS;
}

namespace {

// A stream for the control functions: also one of a failed context.
CUresult any_stream(CUstream handle, std::shared_ptr<Stream>& stream) {
  const auto current = context_stack().empty() ? nullptr : context_stack().back();
  if (!current && reinterpret_cast<uintptr_t>(handle) <= 2) return CUDA_ERROR_INVALID_CONTEXT;
  find_stream(handle, current, stream);
  return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult hold(CUstream handle, bool held) {
  std::shared_ptr<Stream> stream;
  const CUresult found = any_stream(handle, stream);
  if (found != CUDA_SUCCESS) return found;
  std::lock_guard<std::mutex> lock(state().progress);
  stream->held = held;
  state().progressed.notify_all();
  return CUDA_SUCCESS;
}

}  // namespace

KVF_DOUBLE_EXPORT CUresult kvf_cuda_double_hold(CUstream handle) { return hold(handle, true); }

KVF_DOUBLE_EXPORT CUresult kvf_cuda_double_release(CUstream handle) { return hold(handle, false); }

KVF_DOUBLE_EXPORT void kvf_cuda_double_hold_all(int held) {
  std::lock_guard<std::mutex> lock(state().progress);
  state().all_held = held != 0;
  state().progressed.notify_all();
}

KVF_DOUBLE_EXPORT CUresult kvf_cuda_double_capture(CUstream handle, int capturing) {
  std::shared_ptr<Stream> stream;
  const CUresult found = any_stream(handle, stream);
  if (found == CUDA_SUCCESS) stream->capturing = capturing != 0;
  return found;
}

}  // extern "C"
