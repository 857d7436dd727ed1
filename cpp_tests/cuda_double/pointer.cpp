// What the driver says about an address (section "Unified Addressing").
#include "call.hpp"

#include <cstring>

using namespace cuda_double;

namespace {

// One attribute into its own type; false when the driver has nothing to say.
bool attribute(void* data, int which, CUdeviceptr pointer, const Range& range) {
  const auto put = [data](auto value) {
    std::memcpy(data, &value, sizeof value);
    return true;
  };
  const bool device = range.on_device();
  switch (which) {
    // Memory of a pool belongs to no context, as that of cuMemCreate.
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(device && !range.exportable ? CUcontext{} : range.context->handle);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(device ? unsigned{CU_MEMORYTYPE_DEVICE} : unsigned{CU_MEMORYTYPE_HOST});
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return put(pointer);
    // Device memory has none.
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      return !device && put(reinterpret_cast<void*>(pointer));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: return put(0u);
    // Unlike addresses never used again.
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: return put(static_cast<unsigned long long>(range.id));
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return put(0u);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return put(range.device);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: return put(range.exportable ? 1u : 0u);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return put(range.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return put(range.bytes);
    case CU_POINTER_ATTRIBUTE_MAPPED: return put(1u);
    default: return false;
  }
}

// Size of an attribute that says nothing.
size_t size_of(int which) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED: return 4;
    default: return 8;
  }
}

}  // namespace

extern "C" {

// CUDA_ERROR_INVALID_VALUE for memory that the driver does not know (cuPointerGetAttribute). Needs no
// current context.
KVF_DOUBLE_EXPORT CUresult cuPointerGetAttribute(void* data, int which, CUdeviceptr pointer) {
  KVF_CALL(Init);
  const auto range = find_range(pointer);
  if (data == nullptr || !range || !attribute(data, which, pointer, *range)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// Unknown memory is no error here: everything is 0, the device ordinal -2
// (cuPointerGetAttributes).
KVF_DOUBLE_EXPORT CUresult cuPointerGetAttributes(unsigned int count, int* which, void** data,
                                                  CUdeviceptr pointer) {
  KVF_CALL(Init);
  if (which == nullptr || data == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto range = find_range(pointer);
  for (unsigned i = 0; i < count; ++i) {
    if (range && attribute(data[i], which[i], pointer, *range)) continue;
    std::memset(data[i], 0, size_of(which[i]));
    if (!range && which[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      const int none = -2;
      std::memcpy(data[i], &none, sizeof none);
    }
  }
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuPointerSetAttribute(const void* value, int which, CUdeviceptr pointer) {
  KVF_CALL(Init);
  const auto range = find_range(pointer);
  if (value == nullptr || which != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !range || !range->on_device()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
