// Devices, the driver's version, texts of errors, entry points by name.
#include "call.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

using namespace cuda_double;

namespace {

bool valid(CUdevice device) { return device >= 0 && device < state().device_count; }

struct Text {
  CUresult error;
  const char* name;
  const char* text;
};

const Text kTexts[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Text* text_of(CUresult error) {
  for (const Text& text : kTexts) {
    if (text.error == error) return &text;
  }
  return nullptr;
}

int attribute(int which, CUdevice device) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 2;  // small grids: the host executes them
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: return state().rdma_supported;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: return state().rdma_flush;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: return state().rdma_ordering;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + device;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    default: return 0;
  }
}

}  // namespace

extern "C" {

KVF_DOUBLE_EXPORT CUresult cuDriverGetVersion(int* version) {
  KVF_CALL(Nothing);
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = state().version;
  return CUDA_SUCCESS;
}

// NULL and CUDA_ERROR_INVALID_VALUE for a number that is unknown (cuGetErrorName, cuGetErrorString).
KVF_DOUBLE_EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Text* found = text_of(error);
  *text = found != nullptr ? found->name : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KVF_DOUBLE_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Text* found = text_of(error);
  *text = found != nullptr ? found->text : nullptr;
  return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGetCount(int* count) {
  KVF_CALL(Init);
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = state().device_count;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  KVF_CALL(Init);
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGetName(char* name, int len, CUdevice device) {
  KVF_CALL(Init);
  if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(len), "TEST DOUBLE %d", device);
  return CUDA_SUCCESS;
}

// The same in every process: that is how processes know that they mean one device.
KVF_DOUBLE_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  KVF_CALL(Init);
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid, 0x5a, sizeof *uuid);
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return cuDeviceGetUuid(uuid, device);
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGetPCIBusId(char* id, int len, CUdevice device) {
  KVF_CALL(Init);
  if (id == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(id, static_cast<size_t>(len), "0000:%02x:00.0", 0x10 + device);
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  KVF_CALL(Init);
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = size_t{16} << 30;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuDeviceGetAttribute(int* value, int which, CUdevice device) {
  KVF_CALL(Init);
  if (value == nullptr || which <= 0 || which > 200) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute(which, device);
  return CUDA_SUCCESS;
}

// Whether kernels on the one device reach memory of the other (cuDeviceCanAccessPeer); a device is
// not its own peer.
KVF_DOUBLE_EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  KVF_CALL(Init);
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device) || !valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && state().peers ? 1 : 0;
  return CUDA_SUCCESS;
}

// Asked by the name without _v2 (cuGetProcAddress). Status 0 found, 1 not found.
KVF_DOUBLE_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int,
                                               uint64_t flags, int* status) {
  KVF_CALL(Nothing);
  if (symbol == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  static void* const self = [] {
    Dl_info info{};
    return dladdr(reinterpret_cast<void*>(&cuDriverGetVersion), &info) != 0
               ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
               : nullptr;
  }();
  *function = nullptr;
  const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
  for (const char* version : {"_v2", ""}) {
    const std::string name = std::string(symbol) + version;
    if (self != nullptr && per_thread) *function = dlsym(self, (name + "_ptsz").c_str());
    if (self != nullptr && *function == nullptr) *function = dlsym(self, name.c_str());
    if (*function != nullptr) break;
  }
  if (status != nullptr) *status = *function != nullptr ? 0 : 1;
  return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
