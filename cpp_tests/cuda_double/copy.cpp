// Copies and sets (section "Memory Management").
#include "call.hpp"

#include <cstring>

using namespace cuda_double;

namespace {

Work copy_work(const Place& to, const Place& from, size_t bytes) {
  return {Work::Kind::Transfer,
          [=] {
            for (const Place* place : {&to, &from}) {
              const CUresult there = still_there(*place, "a copy");
              if (there != CUDA_SUCCESS) return there;
            }
            std::memmove(to.host, from.host, bytes);
            ++state().copies;
            state().copied_bytes += bytes;
            return CUDA_SUCCESS + 0;
          },
          {}};
}

CUresult copy(const Call& call, CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream handle,
              bool wait) {
  std::shared_ptr<Stream> stream;
  CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (bytes == 0) return CUDA_SUCCESS;
  Place to, from;
  if (dst == 0 || src == 0) return CUDA_ERROR_INVALID_VALUE;
  found = find_place(dst, bytes, to);
  if (found == CUDA_SUCCESS) found = find_place(src, bytes, from);
  if (found != CUDA_SUCCESS) return found;
  if (to.range && to.range->read_only) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t number = enqueue(stream, copy_work(to, from, bytes));
  // Copies to pageable memory return when they are done; pageable sources are read before the call
  // returns (section "API synchronization behavior").
  const bool pageable = !to.range || !from.range;
  if (pageable && !wait) ++state().pageable_copies;
  return pageable || wait ? wait_for(stream, number) : CUDA_SUCCESS;
}

bool device(CUdeviceptr pointer) {
  const auto range = find_range(pointer);
  return range != nullptr;  // device memory, or pinned host memory through its device address
}

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

CUresult set(const Call& call, CUdeviceptr dst, unsigned char value, size_t bytes, CUstream handle,
             bool wait) {
  std::shared_ptr<Stream> stream;
  CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (bytes == 0) return CUDA_SUCCESS;
  Place to;
  found = find_place(dst, bytes, to);
  if (found != CUDA_SUCCESS) return found;
  if (!to.range) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t number = enqueue(stream, {Work::Kind::Transfer,
                                           [=] {
                                             const CUresult there = still_there(to, "a memset");
                                             if (there != CUDA_SUCCESS) return there;
                                             std::memset(to.host, value, bytes);
                                             return CUDA_SUCCESS + 0;
                                           },
                                           {}});
  return wait ? wait_for(stream, number) : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

KVF_DOUBLE_EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  KVF_CALL(Context);
  return copy(call, dst, src, bytes, CU_STREAM_LEGACY, true);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                                         CUstream stream) {
  KVF_CALL(Context);
  return copy(call, dst, src, bytes, stream, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, size_t bytes) {
  KVF_CALL(Context);
  if (!device(dst)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, dst, address(src), bytes, CU_STREAM_LEGACY, true);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, size_t bytes) {
  KVF_CALL(Context);
  if (!device(src)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, address(dst), src, bytes, CU_STREAM_LEGACY, true);
}

// The host does not wait for copies within the device (section "API synchronization behavior").
KVF_DOUBLE_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  KVF_CALL(Context);
  if (!device(dst) || !device(src)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, dst, src, bytes, CU_STREAM_LEGACY, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t bytes,
                                                CUstream stream) {
  KVF_CALL(Context);
  if (!device(dst)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, dst, address(src), bytes, stream, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t bytes,
                                                CUstream stream) {
  KVF_CALL(Context);
  if (!device(src)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, address(dst), src, bytes, stream, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                                                CUstream stream) {
  KVF_CALL(Context);
  if (!device(dst) || !device(src)) return CUDA_ERROR_INVALID_VALUE;
  return copy(call, dst, src, bytes, stream, false);
}

// Works with and without peer access; the contexts say where the memory is (cuMemcpyPeerAsync).
KVF_DOUBLE_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context,
                                             CUdeviceptr src, CUcontext src_context, size_t bytes,
                                             CUstream stream) {
  KVF_CALL(Context);
  const auto to = find_range(dst), from = find_range(src);
  if (!to || !from || !to->on_device() || !from->on_device()) return CUDA_ERROR_INVALID_VALUE;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto& [context, range] : {std::pair{dst_context, to}, std::pair{src_context, from}}) {
      const auto found = state().contexts.find(context);
      if (found == state().contexts.end()) return CUDA_ERROR_INVALID_CONTEXT;
      if (found->second->device != range->device) return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return copy(call, dst, src, bytes, stream, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t bytes) {
  KVF_CALL(Context);
  return set(call, dst, value, bytes, CU_STREAM_LEGACY, true);
}

KVF_DOUBLE_EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t bytes,
                                           CUstream stream) {
  KVF_CALL(Context);
  return set(call, dst, value, bytes, stream, false);
}

}  // extern "C"
