// What every driver call does first.
#pragma once

#include "state.hpp"

namespace cuda_double {

enum class Needs {
  Nothing,  // works before cuInit
  Init,
  Context,       // a current one that has not failed
  FailedContext  // a current one, failed or not: destroying is counted all the same
};

// Counts the call, lets it fail when a test asked for it, and finds the current context.
// Before cuInit every call gives CUDA_ERROR_NOT_INITIALIZED, without a current context most give
// CUDA_ERROR_INVALID_CONTEXT (CUresult). A forked child is as if cuInit was never called.
struct Call {
  explicit Call(const char* function, Needs needs = Needs::Context);
  CUresult result = CUDA_SUCCESS;
  std::shared_ptr<Context> context;
};

// The calling thread's stack of contexts, top last (section "Context Management").
std::vector<std::shared_ptr<Context>>& context_stack();

// Set on a stream's thread while it runs a host function.
bool& in_host_function();

}  // namespace cuda_double

// First line of a call with a current context named `call`.
#define KVF_CALL(needs)                                            \
  ::cuda_double::Call call(__func__, ::cuda_double::Needs::needs); \
  if (call.result != CUDA_SUCCESS) return call.result
