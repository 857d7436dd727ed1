// Events: what is captured, and when.
#include "fixture.hpp"

namespace {

using Events = Double;

TEST_F(Events, AnEventNeverRecordedIsComplete) {
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventQuery(event));
  CU_OK(cuEventSynchronize(event));
  const CUstream stream = held_stream();
  CU_OK(cuStreamWaitEvent(stream, event, 0));
  CU_OK(cuStreamQuery(stream));
  CU_OK(cuEventDestroy_v2(event));
  EXPECT_EQ(0u, books().events);
  EXPECT_EQ(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
}

TEST_F(Events, CompletesWithTheWorkBeforeIt) {
  const CUdeviceptr a = filled(64, 0);
  const CUstream stream = held_stream();
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuMemsetD8Async(a, 1, 64, stream));
  CU_OK(cuEventRecord(event, stream));
  EXPECT_EQ(CUDA_ERROR_NOT_READY, cuEventQuery(event));
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuEventSynchronize(event));
  EXPECT_EQ(1, byte_at(a));
  CU_OK(cuEventQuery(event));
}

// A wait means the recording that was the latest when it was asked for.
TEST_F(Events, LaterRecordingsDoNotMatterToAWait) {
  const CUstream first = held_stream(), second = held_stream();
  CUstream waiting = nullptr;
  CU_OK(cuStreamCreate(&waiting, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr a = filled(64, 0);
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventRecord(event, first));
  CU_OK(cuStreamWaitEvent(waiting, event, 0));
  CU_OK(cuEventRecord(event, second));
  CU_OK(cuMemsetD8Async(a, 1, 64, waiting));
  CU_OK(kvf_cuda_double_release(first));
  CU_OK(cuStreamSynchronize(waiting));
  EXPECT_EQ(1, byte_at(a));
  EXPECT_EQ(CUDA_ERROR_NOT_READY, cuEventQuery(event));
  CU_OK(kvf_cuda_double_release(second));
  CU_OK(cuEventSynchronize(event));
}

TEST_F(Events, MayBeDestroyedBeforeTheyComplete) {
  const CUstream stream = held_stream();
  CUstream waiting = nullptr;
  CU_OK(cuStreamCreate(&waiting, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr a = filled(64, 0);
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuMemsetD8Async(a, 1, 64, stream));
  CU_OK(cuEventRecord(event, stream));
  CU_OK(cuStreamWaitEvent(waiting, event, 0));
  CU_OK(cuEventDestroy_v2(event));
  CU_OK(cuMemsetD8Async(a, 2, 64, waiting));
  linger();
  EXPECT_EQ(0, byte_at(a));
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuStreamSynchronize(waiting));
  EXPECT_EQ(2, byte_at(a));
}

TEST_F(Events, EventAndStreamMustShareTheContext) {
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUcontext other = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, stream));
  // A wait may cross contexts.
  CU_OK(cuEventRecord(event, nullptr));
  CU_OK(cuStreamWaitEvent(stream, event, 0));
  CU_OK(cuCtxDestroy_v2(other));
}

TEST_F(Events, InterprocessNeedsDisabledTiming) {
  CUevent event = nullptr;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&event, CU_EVENT_INTERPROCESS));
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CUipcEventHandle handle;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuIpcGetEventHandle(&handle, event));
}

}  // namespace
