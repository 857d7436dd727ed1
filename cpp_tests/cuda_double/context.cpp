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

// "Destroys and cleans up all resources associated with the context. ... These resources include
// CUDA types such as CUmodule, CUfunction, CUstream, CUevent" (cuCtxDestroy).
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

// "Initializes the driver API and must be called before any other function from the driver API in the
// current process" (section "Initialization"); without a device CUDA_ERROR_NO_DEVICE.
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

// "If the primary context is not yet active it will be created ... Unlike cuCtxCreate(), the newly
// retained context is not pushed onto the stack" (cuDevicePrimaryCtxRetain).
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

// "Releases the primary context interop on the device. A retained context should always be released
// once the user is done using it. The context is automatically reset once the last reference to it
// is released" (cuDevicePrimaryCtxRelease).
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

// "Creates a new CUDA context and associates it with the calling thread. ... The context is created
// with a usage count of 1 and ... pushed onto the stack" (cuCtxCreate).
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

// "If ctx is current to the calling thread then ctx will also be popped from the current thread's
// context stack. If ctx is current to other threads, then ctx will remain current to those threads,
// and attempting to access ctx from those threads will result in the error
// CUDA_ERROR_CONTEXT_IS_DESTROYED" (cuCtxDestroy). A primary context cannot be destroyed so.
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

// "If no context is bound to the calling CPU thread then *pctx is set to NULL and CUDA_SUCCESS is
// returned" (cuCtxGetCurrent).
KVF_DOUBLE_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  KVF_CALL(Init);
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = context_stack().empty() ? nullptr : context_stack().back()->handle;
  return CUDA_SUCCESS;
}

// "If there exists a CUDA context stack on the calling CPU thread, this will replace the top of that
// stack with ctx. If ctx is NULL then this will be equivalent to popping the top of the current CUDA
// context stack (or a no-op if the current CUDA context stack is empty)" (cuCtxSetCurrent).
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

// "Returns CUDA_ERROR_PEER_ACCESS_UNSUPPORTED if cuDeviceCanAccessPeer() indicates that the CUdevice
// of the current context cannot directly access memory from the CUdevice of peerContext.
// CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED if direct access ... has already been enabled.
// CUDA_ERROR_INVALID_CONTEXT if ... peerContext is not valid, or if the current context is
// peerContext. CUDA_ERROR_INVALID_VALUE if Flags is not 0" (cuCtxEnablePeerAccess).
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
