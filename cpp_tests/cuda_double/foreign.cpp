// What other libraries in the process want of the driver: UCX's module for CUDA links these. kvferry calls
// none of them but cuFlushGPUDirectRDMAWrites. Where the reference allows an answer without the thing
// itself, that is the answer.
#include "call.hpp"

using namespace cuda_double;

// With -fvisibility=hidden and no header that names them.
#define KVF_FOREIGN(name, parameters)         \
  KVF_DOUBLE_EXPORT CUresult name parameters; \
  KVF_DOUBLE_EXPORT CUresult name parameters

// A device without what is asked for (CUresult, CUDA_ERROR_NOT_SUPPORTED).
#define KVF_NOT_SUPPORTED(name, parameters) \
  KVF_FOREIGN(name, parameters) {           \
    KVF_CALL(Init);                         \
    return CUDA_ERROR_NOT_SUPPORTED;        \
  }

extern "C" {

// "Unique for the lifetime of the process"; NULL is the current context (cuCtxGetId).
KVF_DOUBLE_EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  KVF_CALL(Init);
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr) {
    if (context_stack().empty()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    handle = context_stack().back()->handle;
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().contexts.count(handle) == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *id = reinterpret_cast<uintptr_t>(handle);  // handles are never used again here
  return CUDA_SUCCESS;
}

// Called in the stream's order (cuStreamAddCallback).
KVF_DOUBLE_EXPORT CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback,
                                               void* user_data, unsigned int flags) {
  KVF_CALL(Context);
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  enqueue(stream, {Work::Kind::HostFunction,
                   [=] {
                     in_host_function() = true;
                     callback(handle, CUDA_SUCCESS, user_data);
                     in_host_function() = false;
                     return CUDA_SUCCESS + 0;
                   },
                   {}});
  return CUDA_SUCCESS;
}

// What a card has written to the current context's device is visible to `scope` (100 the owner, 200 all
// devices) when it returns; `target` 0 is the only one (cuFlushGPUDirectRDMAWrites). Only where
// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS has the bit of the host.
KVF_DOUBLE_EXPORT CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
  KVF_CALL(Context);
  if (target != 0 || (scope != 100 && scope != 200)) return CUDA_ERROR_INVALID_VALUE;
  return (state().rdma_flush & 1) != 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

KVF_DOUBLE_EXPORT void kvf_cuda_double_gpu_direct(int supported, int ordering, int flush) {
  state().rdma_supported = supported;
  state().rdma_ordering = ordering;
  state().rdma_flush = flush;
}

// No address here was mapped by cuMemMap (cuMemRetainAllocationHandle), and none is managed
// (cuMemRangeGetAttribute).
KVF_FOREIGN(cuMemRetainAllocationHandle, (unsigned long long*, void*)) {
  KVF_CALL(Init);
  return CUDA_ERROR_INVALID_VALUE;
}
KVF_FOREIGN(cuMemRangeGetAttribute, (void*, size_t, int, CUdeviceptr, size_t)) {
  KVF_CALL(Init);
  return CUDA_ERROR_INVALID_VALUE;
}

// No virtual memory management, no managed memory, and no memory pools for other processes.
KVF_NOT_SUPPORTED(cuMemAllocManaged, (CUdeviceptr*, size_t, unsigned int))
KVF_NOT_SUPPORTED(cuMemAddressReserve,
                  (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))
KVF_NOT_SUPPORTED(cuMemAddressFree, (CUdeviceptr, size_t))
KVF_NOT_SUPPORTED(cuMemCreate, (unsigned long long*, size_t, const void*, unsigned long long))
KVF_NOT_SUPPORTED(cuMemRelease, (unsigned long long))
KVF_NOT_SUPPORTED(cuMemMap,
                  (CUdeviceptr, size_t, size_t, unsigned long long, unsigned long long))
KVF_NOT_SUPPORTED(cuMemUnmap, (CUdeviceptr, size_t))
KVF_NOT_SUPPORTED(cuMemSetAccess, (CUdeviceptr, size_t, const void*, size_t))
KVF_NOT_SUPPORTED(cuMemGetAllocationGranularity, (size_t*, const void*, int))
KVF_NOT_SUPPORTED(cuMemGetAllocationPropertiesFromHandle, (void*, unsigned long long))
KVF_NOT_SUPPORTED(cuMemExportToShareableHandle, (void*, unsigned long long, int, unsigned long long))
KVF_NOT_SUPPORTED(cuMemImportFromShareableHandle, (unsigned long long*, void*, int))
KVF_NOT_SUPPORTED(cuMemPoolDestroy, (void*))
KVF_NOT_SUPPORTED(cuMemPoolSetAccess, (void*, const void*, size_t))
KVF_NOT_SUPPORTED(cuMemPoolExportPointer, (void*, CUdeviceptr))
KVF_NOT_SUPPORTED(cuMemPoolImportPointer, (CUdeviceptr*, void*, void*))
KVF_NOT_SUPPORTED(cuMemPoolExportToShareableHandle, (void*, void*, int, unsigned long long))
KVF_NOT_SUPPORTED(cuMemPoolImportFromShareableHandle, (void**, void*, int, unsigned long long))

}  // extern "C"
