// Contexts (sections "Context Management", "Primary Context Management", "Peer Context Memory Access").
#include "call.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

using namespace cuda_double;

namespace cuda_double {
namespace {

std::shared_ptr<Context> make_context(CUdevice device, bool primary) {  // with State::mutex held
  auto context = std::make_shared<Context>();
  context->handle = state().fresh_handle<CUcontext>();
  context->device = device;
  context->primary = primary;
  state().contexts[context->handle] = context;
  return context;
}

bool valid(CUdevice device) { return device >= 0 && device < state().device_count; }

template <class Table>
void erase_of(Table& table, const std::shared_ptr<Context>& context) {
  for (auto it = table.begin(); it != table.end();) {
    it = it->second->context == context ? table.erase(it) : std::next(it);
  }
}

// What lives in a context goes with it: streams, events, modules, allocations (cuCtxDestroy).
void destroy(const std::shared_ptr<Context>& context) {
  synchronize(context);
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    context->destroyed = true;
    state().contexts.erase(context->handle);
    for (const auto& weak : state().all_streams) {
      auto stream = weak.lock();
      if (stream && stream->context == context) streams.push_back(std::move(stream));
    }
    erase_of(state().streams, context);
    erase_of(state().events, context);
    erase_of(state().modules, context);
    for (auto it = state().ranges.begin(); it != state().ranges.end();) {
      if (it->second->context != context) {
        ++it;
        continue;
      }
      it->second->freed = true;
      it = state().ranges.erase(it);
    }
    context->legacy.reset();
    context->per_thread.clear();
  }
  for (const auto& stream : streams) close_stream(stream);
}

CUresult find_context(CUcontext handle, std::shared_ptr<Context>& context) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().contexts.find(handle);
  if (found == state().contexts.end()) return CUDA_ERROR_INVALID_CONTEXT;
  context = found->second;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cuda_double

extern "C" {

// The first call of a process (section "Initialization"); without a device CUDA_ERROR_NO_DEVICE.
KVF_DOUBLE_EXPORT CUresult cuInit(unsigned int flags) {
  KVF_CALL(Nothing);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!state().initialised) {
    if (const char* count = std::getenv("KVF_CUDA_DOUBLE_DEVICES")) state().device_count = std::atoi(count);
    const char* peers = std::getenv("KVF_CUDA_DOUBLE_PEERS");
    state().peers = peers == nullptr || std::string(peers) != "0";
  }
  if (state().device_count <= 0) return CUDA_ERROR_NO_DEVICE;
  if (state().initialised && state().pid != getpid()) return CUDA_ERROR_NOT_INITIALIZED;  // forked
  state().pid = getpid();
  state().initialised = true;
  return CUDA_SUCCESS;
}

// Made by the first retain, counted by later ones, and never made current
// (cuDevicePrimaryCtxRetain).
KVF_DOUBLE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  KVF_CALL(Init);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& primary = state().primaries[device];
  if (!primary) primary = make_context(device, true);
  ++primary->retains;
  *context = primary->handle;
  return CUDA_SUCCESS;
}

// Reset when the last retain is given back (cuDevicePrimaryCtxRelease).
KVF_DOUBLE_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  KVF_CALL(Init);
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::shared_ptr<Context> last;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().primaries.find(device);
    if (found == state().primaries.end()) return CUDA_ERROR_INVALID_CONTEXT;
    if (--found->second->retains != 0) return CUDA_SUCCESS;
    last = found->second;
    state().primaries.erase(found);
  }
  destroy(last);
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags,
                                                      int* active) {
  KVF_CALL(Init);
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard<std::mutex> lock(state().mutex);
  *flags = 0;
  *active = state().primaries.count(device) != 0 ? 1 : 0;
  return CUDA_SUCCESS;
}

// The new context is current: it is pushed onto the thread's stack (cuCtxCreate).
KVF_DOUBLE_EXPORT CUresult cuCtxCreate_v2(CUcontext* context, unsigned int, CUdevice device) {
  KVF_CALL(Init);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard<std::mutex> lock(state().mutex);
  auto made = make_context(device, false);
  *context = made->handle;
  context_stack().push_back(std::move(made));
  return CUDA_SUCCESS;
}

// Popped from the calling thread's stack when it is on top; other threads keep it, and get
// CUDA_ERROR_CONTEXT_IS_DESTROYED (cuCtxDestroy). A primary context cannot be destroyed so.
KVF_DOUBLE_EXPORT CUresult cuCtxDestroy_v2(CUcontext handle) {
  KVF_CALL(Init);
  std::shared_ptr<Context> context;
  const CUresult found = find_context(handle, context);
  if (found != CUDA_SUCCESS) return found;
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  destroy(context);
  if (!context_stack().empty() && context_stack().back() == context) context_stack().pop_back();
  return CUDA_SUCCESS;
}

// NULL and success without a context (cuCtxGetCurrent).
KVF_DOUBLE_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  KVF_CALL(Init);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = context_stack().empty() ? nullptr : context_stack().back()->handle;
  return CUDA_SUCCESS;
}

// Replaces the top of the stack; NULL pops it, and does nothing to an empty one (cuCtxSetCurrent).
KVF_DOUBLE_EXPORT CUresult cuCtxSetCurrent(CUcontext handle) {
  KVF_CALL(Init);
  auto& stack = context_stack();
  if (handle == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  std::shared_ptr<Context> context;
  const CUresult found = find_context(handle, context);
  if (found != CUDA_SUCCESS) return found;
  if (!stack.empty()) stack.pop_back();
  stack.push_back(std::move(context));
  return CUDA_SUCCESS;
}

// Pushing and popping work with a context that has failed too, so that a stack can be restored.
KVF_DOUBLE_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  KVF_CALL(Init);
  std::shared_ptr<Context> context;
  const CUresult found = find_context(handle, context);
  if (found != CUDA_SUCCESS) return found;
  context_stack().push_back(std::move(context));
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  KVF_CALL(Init);
  if (context_stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context != nullptr) *context = context_stack().back()->handle;
  context_stack().pop_back();
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  KVF_CALL(FailedContext);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = call.context->device;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuCtxSynchronize(void) {
  KVF_CALL(Context);
  return synchronize(call.context);
}

// One way, for the current context; flags are reserved, twice is an error of its own
// (cuCtxEnablePeerAccess).
KVF_DOUBLE_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  KVF_CALL(Context);
  std::shared_ptr<Context> peer;
  const CUresult found = find_context(handle, peer);
  if (found != CUDA_SUCCESS) return found;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (peer == call.context) return CUDA_ERROR_INVALID_CONTEXT;
  if (peer->device == call.context->device || !state().peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  std::lock_guard<std::mutex> lock(state().mutex);
  return call.context->peers.insert(peer->device).second ? CUDA_SUCCESS
                                                         : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

KVF_DOUBLE_EXPORT CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  KVF_CALL(Context);
  std::shared_ptr<Context> peer;
  const CUresult found = find_context(handle, peer);
  if (found != CUDA_SUCCESS) return found;
  std::lock_guard<std::mutex> lock(state().mutex);
  // CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
  return call.context->peers.erase(peer->device) != 0 ? CUDA_SUCCESS : 705;
}

KVF_DOUBLE_EXPORT int kvf_cuda_double_fail_context(CUcontext handle, CUresult error) {
  std::shared_ptr<Context> context;
  const CUresult found = find_context(handle, context);
  if (found == CUDA_SUCCESS) fail(*context, error);
  return found;
}

KVF_DOUBLE_EXPORT size_t kvf_cuda_double_stack_depth(void) { return context_stack().size(); }

}  // extern "C"
