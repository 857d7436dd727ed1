#include "call.hpp"

#include <unistd.h>

// Variants of the library, made by CMake: KVF_DOUBLE_STUB gives what a toolkit's stub library gives.
#ifndef KVF_DOUBLE_STUB
#define KVF_DOUBLE_STUB 0
#endif
#ifndef KVF_DOUBLE_VERSION
#define KVF_DOUBLE_VERSION 13000
#endif

namespace cuda_double {

State& state() {
  static State* const all = [] {
    auto* made = new State;
    made->version = KVF_DOUBLE_VERSION;
    return made;
  }();
  return *all;
}

void violation(const std::string& text) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().violations.push_back(text);
}

void fail(Context& context, CUresult error) {
  CUresult none = CUDA_SUCCESS;
  context.failed.compare_exchange_strong(none, error);
}

std::vector<std::shared_ptr<Context>>& context_stack() {
  static thread_local std::vector<std::shared_ptr<Context>> stack;
  return stack;
}

bool& in_host_function() {
  static thread_local bool in = false;
  return in;
}

Call::Call(const char* function, Needs needs) {
  if (KVF_DOUBLE_STUB) {
    result = CUDA_ERROR_STUB_LIBRARY;
    return;
  }
  result = injected(function);
  if (result != CUDA_SUCCESS) return;
  // Driver calls are forbidden inside a host function; this error is what the driver may give
  // (cuLaunchHostFunc).
  if (in_host_function()) {
    violation(std::string(function) + " inside a host function");
    result = CUDA_ERROR_NOT_PERMITTED;
    return;
  }
  if (needs == Needs::Nothing) return;
  if (!state().initialised || state().pid != getpid()) {
    result = CUDA_ERROR_NOT_INITIALIZED;
    return;
  }
  if (needs == Needs::Init) return;
  if (context_stack().empty()) {
    result = CUDA_ERROR_INVALID_CONTEXT;
    return;
  }
  context = context_stack().back();
  if (context->destroyed) {
    result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return;
  }
  if (needs == Needs::Context) result = context->failed;
}

}  // namespace cuda_double
