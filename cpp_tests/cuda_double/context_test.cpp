// Contexts: the stack, the primary one, a failed one.
#include "fixture.hpp"

namespace {

using Contexts = Double;

TEST(Contextless, NothingWorksBeforeInit) {
  CUcontext context = nullptr;
  int count = 0;
  EXPECT_EQ(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
  EXPECT_EQ(CUDA_ERROR_NOT_INITIALIZED, cuCtxGetCurrent(&context));
  CU_OK(cuInit(0));
  CU_OK(cuDeviceGetCount(&count));
  EXPECT_EQ(1, count);
  CU_OK(cuCtxGetCurrent(&context));
  EXPECT_EQ(nullptr, context);
  CUdeviceptr a = 0;
  CUstream stream = nullptr;
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&a, 1));
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuStreamCreate(&stream, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent_v2(&context));
}

TEST_F(Contexts, EachThreadHasAStack) {
  CUcontext other = nullptr, current = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  EXPECT_EQ(2u, kvf_cuda_double_stack_depth());
  CU_OK(cuCtxPushCurrent_v2(context));
  CU_OK(cuCtxGetCurrent(&current));
  EXPECT_EQ(context, current);
  std::thread([] {
    CUcontext mine = nullptr;
    CU_OK(cuCtxGetCurrent(&mine));
    EXPECT_EQ(nullptr, mine);
  }).join();
  CU_OK(cuCtxPopCurrent_v2(&current));
  EXPECT_EQ(context, current);
  CU_OK(cuCtxGetCurrent(&current));
  EXPECT_EQ(other, current);
  CU_OK(cuCtxDestroy_v2(other));  // current: popped too
  CU_OK(cuCtxGetCurrent(&current));
  EXPECT_EQ(context, current);
  EXPECT_EQ(1u, kvf_cuda_double_stack_depth());
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuCtxPushCurrent_v2(other));
  EXPECT_EQ(0u, books().contexts);
}

TEST_F(Contexts, DestroyingTakesEverythingAlong) {
  CUcontext other = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CU_OK(cuStreamCreate(&stream, 0));
  CU_OK(cuEventCreate(&event, 0));
  filled(100, 1);
  CU_OK(cuCtxDestroy_v2(other));
  EXPECT_EQ(0u, books().streams);
  EXPECT_EQ(0u, books().events);
  EXPECT_EQ(0u, books().allocations);
}

TEST_F(Contexts, ThePrimaryOneIsCounted) {
  CUcontext again = nullptr;
  CU_OK(cuDevicePrimaryCtxRetain(&again, 0));
  EXPECT_EQ(context, again);
  EXPECT_EQ(2u, books().primary_retains);
  CU_OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT_EQ(1u, books().primary_retains);
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy_v2(context));
  EXPECT_EQ(CUDA_ERROR_INVALID_DEVICE, cuDevicePrimaryCtxRetain(&again, 1));
}

// After a fault every call answers with it; what is destroyed counts as destroyed all the same.
TEST_F(Contexts, AFailedContextStaysFailed) {
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  const CUdeviceptr a = filled(64, 1);
  int called = 0;
  CU_OK(kvf_cuda_double_hold(stream));
  CU_OK(cuMemsetD8Async(a, 2, 64, stream));
  CU_OK(cuEventRecord(event, stream));
  CU_OK(cuLaunchHostFunc(stream, [](void* n) { ++*static_cast<int*>(n); }, &called));
  CU_OK(kvf_cuda_double_fail("work:1=700"));
  CU_OK(kvf_cuda_double_release(stream));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamQuery(stream));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventQuery(event));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  EXPECT_EQ(0, called) << "no host function after an error";
  EXPECT_EQ(1, byte_at(a));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuEventDestroy_v2(event));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamDestroy_v2(stream));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemFree_v2(a));
  EXPECT_EQ(0u, books().events + books().streams + books().allocations);
  // Another context of the process is not touched by the books' rule.
  CUcontext other = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CU_OK(cuCtxSynchronize());
  CU_OK(cuCtxDestroy_v2(other));
}

}  // namespace
