// What other libraries want of the driver, and a card's writes.
#include "fixture.hpp"

#include <dlfcn.h>

namespace {

using Foreign = Double;

// cuFlushGPUDirectRDMAWrites: a current context, the one target, two scopes, and a device that can.
TEST_F(Foreign, ACardsWritesAreFlushedWhereTheDeviceSaysSo) {
  CU_OK(cuFlushGPUDirectRDMAWrites(0, 100));
  CU_OK(cuFlushGPUDirectRDMAWrites(0, 200));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuFlushGPUDirectRDMAWrites(1, 100));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuFlushGPUDirectRDMAWrites(0, 300));
  kvf_cuda_double_gpu_direct(1, 100, 0);
  EXPECT_EQ(CUDA_ERROR_NOT_SUPPORTED, cuFlushGPUDirectRDMAWrites(0, 200));
  int value = 0;
  CU_OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, 0));
  EXPECT_EQ(100, value);
  CU_OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, 0));
  EXPECT_EQ(0, value);
  CU_OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 0));
  EXPECT_EQ(1, value);
  CU_OK(cuCtxSetCurrent(nullptr));
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuFlushGPUDirectRDMAWrites(0, 100));
}

TEST_F(Foreign, AContextHasANumberOfItsOwn) {
  unsigned long long mine = 0, current = 0, others = 0;
  CU_OK(cuCtxGetId(context, &mine));
  CU_OK(cuCtxGetId(nullptr, &current));
  EXPECT_EQ(mine, current);
  CUcontext other = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuCtxGetId(other, &others));
  EXPECT_NE(mine, others);
  CU_OK(cuCtxDestroy_v2(other));
  EXPECT_EQ(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxGetId(other, &others));
}

TEST_F(Foreign, ACallbackComesInTheStreamsOrder) {
  const CUstream stream = held_stream();
  const CUdeviceptr a = filled(1, 1);
  CU_OK(cuMemsetD8Async(a, 5, 1, stream));
  struct Seen {
    CUdeviceptr a;
    int byte = 0, status = -1;
  } seen{a};
  CU_OK(cuStreamAddCallback(
      stream,
      [](CUstream, CUresult status, void* data) {
        auto* s = static_cast<Seen*>(data);
        unsigned char byte = 0;
        kvf_cuda_double_peek(&byte, s->a, 1);
        s->byte = byte;
        s->status = status;
      },
      &seen, 0));
  linger();
  EXPECT_EQ(-1, seen.status);
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(5, seen.byte);
  EXPECT_EQ(CUDA_SUCCESS, seen.status);
  CU_OK(cuStreamDestroy_v2(stream));
  CU_OK(cuMemFree_v2(a));
}

// CUDA 11.2 has none of it.
TEST_F(Foreign, AnOlderDriverCannotFlush) {
  void* old = dlopen(DOUBLE_DIR "/old/libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  ASSERT_NE(nullptr, old) << dlerror();
  EXPECT_EQ(nullptr, dlsym(old, "cuFlushGPUDirectRDMAWrites"));
}

}  // namespace
