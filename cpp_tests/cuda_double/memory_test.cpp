// Device memory, pinned memory, what the driver says about addresses.
#include "fixture.hpp"

#include <sys/mman.h>

#include <csignal>

namespace {

using Memory = Double;

TEST_F(Memory, HostAccessFaults) {
  const CUdeviceptr pointer = filled(4096, 7);
  auto* host = reinterpret_cast<volatile char*>(pointer);
  EXPECT_EXIT(host[0] = 1, ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(exit(host[4095]), ::testing::KilledBySignal(SIGSEGV), "");
  CU_OK(cuMemFree_v2(pointer));
  EXPECT_EXIT(exit(host[0]), ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(Memory, CopiesThereAndBack) {
  std::vector<unsigned char> out(100000), back(out.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<unsigned char>(i * 7);
  CUdeviceptr a = 0, b = 0;
  CU_OK(cuMemAlloc_v2(&a, out.size()));
  CU_OK(cuMemAlloc_v2(&b, out.size()));
  CU_OK(cuMemcpyHtoD_v2(a, out.data(), out.size()));
  CU_OK(cuMemcpyDtoD_v2(b, a, out.size()));
  CU_OK(cuMemcpyDtoH_v2(back.data(), b, out.size()));
  EXPECT_EQ(out, back);
  EXPECT_EQ(2u, books().allocations);
  CU_OK(cuMemFree_v2(a));
  CU_OK(cuMemFree_v2(b));
  EXPECT_EQ(0u, books().allocations);
}

TEST_F(Memory, FreshMemoryIsNotZero) {
  CUdeviceptr a = 0;
  CU_OK(cuMemAlloc_v2(&a, 64));
  EXPECT_NE(0, byte_at(a));
}

TEST_F(Memory, CopiesStayInsideTheAllocation) {
  const CUdeviceptr a = filled(1000, 1), b = filled(2000, 2);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemcpyAsync(a + 1, b, 1000, nullptr));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemcpyAsync(b, a, 1001, nullptr));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemsetD8_v2(a, 0, 1001));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(nullptr, 1));
  CUdeviceptr none = 0;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemAlloc_v2(&none, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(a + 1));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemcpyAsync(b, a + 1000, 1, nullptr));
  CU_OK(cuMemFree_v2(a));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemcpyAsync(b, a, 1, nullptr));
}

TEST_F(Memory, AnAddressComesBackWithAnotherIdentity) {
  const CUdeviceptr a = filled(8192, 1);
  unsigned long long before = 0, after = 0;
  CU_OK(cuPointerGetAttribute(&before, CU_POINTER_ATTRIBUTE_BUFFER_ID, a));
  CU_OK(cuMemFree_v2(a));
  const CUdeviceptr b = filled(8192, 1);
  CU_OK(cuPointerGetAttribute(&after, CU_POINTER_ATTRIBUTE_BUFFER_ID, b));
  EXPECT_EQ(a, b);
  EXPECT_NE(before, after);
}

TEST_F(Memory, SaysWhatAnAddressIs) {
  const CUdeviceptr a = filled(10000, 1);
  unsigned type = 0;
  CUcontext of = nullptr;
  int ordinal = -1;
  size_t bytes = 0;
  CUdeviceptr base = 0;
  CU_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a + 9999));
  CU_OK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, a));
  CU_OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a));
  CU_OK(cuMemGetAddressRange_v2(&base, &bytes, a + 5000));
  EXPECT_EQ(unsigned{CU_MEMORYTYPE_DEVICE}, type);
  EXPECT_EQ(context, of);
  EXPECT_EQ(0, ordinal);
  EXPECT_EQ(a, base);
  EXPECT_EQ(10000u, bytes);
  void* host = nullptr;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, a));

  const auto stranger = reinterpret_cast<CUdeviceptr>(&type);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, stranger));
  EXPECT_EQ(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange_v2(&base, &bytes, stranger));
  int which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* data[] = {&type, &ordinal};
  CU_OK(cuPointerGetAttributes(2, which, data, stranger));
  EXPECT_EQ(0u, type);
  EXPECT_EQ(-2, ordinal);
}

TEST_F(Memory, PinsHostMemory) {
  std::vector<char> memory(8192);
  CU_OK(cuMemHostRegister_v2(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE));
  EXPECT_EQ(1u, books().pinned_registrations);
  EXPECT_EQ(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(memory.data() + 10, 10, 0));
  CUdeviceptr device = 0;
  CU_OK(cuMemHostGetDevicePointer_v2(&device, memory.data() + 5, 0));
  EXPECT_EQ(reinterpret_cast<CUdeviceptr>(memory.data() + 5), device);
  unsigned type = 0;
  CU_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device));
  EXPECT_EQ(unsigned{CU_MEMORYTYPE_HOST}, type);
  EXPECT_EQ(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(memory.data() + 10));
  CU_OK(cuMemHostUnregister(memory.data()));
  EXPECT_EQ(0u, books().pinned_registrations);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemHostGetDevicePointer_v2(&device, memory.data(), 0));
  void* hole = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  munmap(hole, 4096);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister_v2(hole, 4096, 0));

  void* pinned = nullptr;
  CU_OK(cuMemHostAlloc(&pinned, 100, CU_MEMHOSTALLOC_PORTABLE));
  std::memset(pinned, 3, 100);
  EXPECT_EQ(1u, books().pinned_allocations);
  CU_OK(cuMemFreeHost(pinned));
  EXPECT_EQ(0u, books().pinned_allocations);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pinned));
}

// An asynchronous copy of pageable memory has happened when the call returns, and is counted.
TEST_F(Memory, PageableCopiesBlock) {
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr a = filled(100, 9);
  char host[100] = {};
  const auto before = books().pageable_copies;
  CU_OK(cuMemcpyDtoHAsync_v2(host, a, 100, stream));
  EXPECT_EQ(9, host[99]);
  EXPECT_EQ(before + 1, books().pageable_copies);
}

// Work that reaches freed memory fails the context, as a fault on the device would.
TEST_F(Memory, UseAfterFreeIsFound) {
  const CUdeviceptr a = filled(100, 1), b = filled(100, 2);
  const CUstream stream = held_stream();
  CU_OK(cuMemcpyDtoDAsync_v2(b, a, 100, stream));
  CU_OK(cuMemFree_v2(a));
  CU_OK(kvf_cuda_double_release(stream));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
  EXPECT_EQ(2, byte_at(b));
  EXPECT_EQ(1u, books().violations);
  EXPECT_NE(std::string::npos, violations().find("freed"));
}

TEST_F(Memory, StreamOrderedMemoryCannotBeExported) {
  CUdeviceptr a = 0;
  CU_OK(cuMemAllocAsync(&a, 100, nullptr));
  unsigned capable = 1;
  CU_OK(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, a));
  EXPECT_EQ(0u, capable);
  CUipcMemHandle handle;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, a));
  CU_OK(cuMemFreeAsync(a, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(0u, books().allocations);
}

}  // namespace
