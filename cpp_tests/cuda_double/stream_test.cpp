// Order within a stream, between streams, the default streams.
#include "fixture.hpp"

#include <atomic>

namespace {

using Streams = Double;

TEST_F(Streams, WorkIsExecutedInOrder) {
  kvf_cuda_double_delay(0, 300);
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr a = filled(64, 0);
  for (int round = 1; round <= 50; ++round) {
    CU_OK(cuMemsetD8Async(a, static_cast<unsigned char>(round), 64, stream));
  }
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(50, byte_at(a));
}

TEST_F(Streams, CallsReturnBeforeTheWorkIsDone) {
  const CUdeviceptr a = filled(64, 1), b = filled(64, 2);
  const CUstream stream = held_stream();
  CU_OK(cuMemcpyDtoDAsync_v2(b, a, 64, stream));
  EXPECT_EQ(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
  linger();
  EXPECT_EQ(2, byte_at(b));
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(1, byte_at(b));
  CU_OK(cuStreamQuery(stream));
}

// What the whole double is for: a consumer that does not wait for the producer reads old bytes.
TEST_F(Streams, AMissingWaitShowsAsWrongBytes) {
  const CUdeviceptr source = filled(64, 1), target = filled(64, 0);
  const CUstream producer = held_stream();
  CUstream consumer = nullptr;
  CU_OK(cuStreamCreate(&consumer, CU_STREAM_NON_BLOCKING));
  CU_OK(cuMemsetD8Async(source, 42, 64, producer));
  CU_OK(cuMemcpyDtoDAsync_v2(target, source, 64, consumer));
  CU_OK(cuStreamSynchronize(consumer));
  EXPECT_EQ(1, byte_at(target));

  CUevent ready = nullptr;
  CU_OK(cuEventCreate(&ready, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventRecord(ready, producer));
  CU_OK(cuStreamWaitEvent(consumer, ready, 0));
  CU_OK(cuMemcpyDtoDAsync_v2(target, source, 64, consumer));
  linger();
  EXPECT_EQ(1, byte_at(target));
  CU_OK(kvf_cuda_double_release(producer));
  CU_OK(cuStreamSynchronize(consumer));
  EXPECT_EQ(42, byte_at(target));
}

// The same without a gate: the random delays alone find it in some of many rounds.
TEST_F(Streams, DelaysAloneFindAMissingWait) {
  kvf_cuda_double_delay(0, 500);
  CUstream producer = nullptr, consumer = nullptr;
  CU_OK(cuStreamCreate(&producer, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamCreate(&consumer, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr source = filled(64, 0), target = filled(64, 0);
  int wrong = 0;
  for (int round = 1; round <= 50; ++round) {
    CU_OK(cuMemsetD8Async(source, static_cast<unsigned char>(round), 64, producer));
    CU_OK(cuMemcpyDtoDAsync_v2(target, source, 64, consumer));
    CU_OK(cuCtxSynchronize());
    wrong += byte_at(target) != round;
  }
  EXPECT_GT(wrong, 0);
}

TEST_F(Streams, TheLegacyStreamWaitsForBlockingStreams) {
  const CUdeviceptr a = filled(64, 1), b = filled(64, 0);
  const CUstream blocking = held_stream(CU_STREAM_DEFAULT);
  CU_OK(cuMemsetD8Async(a, 2, 64, blocking));
  CU_OK(cuMemcpyDtoDAsync_v2(b, a, 64, nullptr));
  linger();
  EXPECT_EQ(0, byte_at(b));
  EXPECT_EQ(CUDA_ERROR_NOT_READY, cuStreamQuery(CU_STREAM_LEGACY));
  CU_OK(kvf_cuda_double_release(blocking));
  CU_OK(cuStreamSynchronize(nullptr));
  EXPECT_EQ(2, byte_at(b));
}

TEST_F(Streams, BlockingStreamsWaitForTheLegacyStream) {
  const CUdeviceptr a = filled(64, 1), b = filled(64, 0), c = filled(64, 0);
  CUstream blocking = nullptr, free_running = nullptr;
  CU_OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
  CU_OK(cuStreamCreate(&free_running, CU_STREAM_NON_BLOCKING));
  CU_OK(kvf_cuda_double_hold(nullptr));
  CU_OK(cuMemsetD8Async(a, 2, 64, nullptr));
  CU_OK(cuMemcpyDtoDAsync_v2(b, a, 64, blocking));
  CU_OK(cuMemcpyDtoDAsync_v2(c, a, 64, free_running));
  CU_OK(cuStreamSynchronize(free_running));
  EXPECT_EQ(1, byte_at(c)) << "a non-blocking stream must not wait for the legacy stream";
  linger();
  EXPECT_EQ(0, byte_at(b));
  CU_OK(kvf_cuda_double_release(nullptr));
  CU_OK(cuStreamSynchronize(blocking));
  EXPECT_EQ(2, byte_at(b));
}

TEST_F(Streams, EachThreadHasADefaultStream) {
  const CUdeviceptr a = filled(64, 0), b = filled(64, 0);
  CU_OK(kvf_cuda_double_hold(CU_STREAM_PER_THREAD));
  CU_OK(cuMemsetD8Async(a, 1, 64, CU_STREAM_PER_THREAD));
  std::thread([&] {
    CU_OK(cuCtxSetCurrent(context));
    CU_OK(cuMemsetD8Async(b, 1, 64, CU_STREAM_PER_THREAD));
    CU_OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  }).join();
  EXPECT_EQ(1, byte_at(b));
  EXPECT_EQ(0, byte_at(a));
  // It is a blocking stream: the legacy one waits for it.
  CU_OK(cuMemsetD8Async(b, 2, 64, nullptr));
  linger();
  EXPECT_EQ(1, byte_at(b));
  CU_OK(kvf_cuda_double_release(CU_STREAM_PER_THREAD));
  CU_OK(cuStreamSynchronize(nullptr));
  EXPECT_EQ(2, byte_at(b));
}

TEST_F(Streams, HostFunctionsRunInOrderAndMayNotCallTheDriver) {
  struct Seen {
    CUdeviceptr a;
    int byte;
    CUresult inside;
  } seen{filled(64, 1), 0, 0};
  const CUstream stream = held_stream();
  CU_OK(cuMemsetD8Async(seen.a, 5, 64, stream));
  CU_OK(cuLaunchHostFunc(
      stream,
      [](void* data) {
        auto* s = static_cast<Seen*>(data);
        unsigned char byte = 0;
        kvf_cuda_double_peek(&byte, s->a, 1);
        s->byte = byte;
        CUcontext current;
        s->inside = cuCtxGetCurrent(&current);
      },
      &seen));
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(5, seen.byte);
  EXPECT_EQ(CUDA_ERROR_NOT_PERMITTED, seen.inside);
  EXPECT_EQ(1u, books().violations);
  EXPECT_EQ(1u, books().host_functions);
}

TEST_F(Streams, WaitsForAValue) {
  void* pinned = nullptr;
  CU_OK(cuMemHostAlloc(&pinned, 64, 0));
  auto* word = static_cast<std::atomic<uint32_t>*>(pinned);
  *word = 0;
  const auto address = reinterpret_cast<CUdeviceptr>(pinned);
  const CUdeviceptr a = filled(64, 0);
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CU_OK(cuStreamWaitValue32_v2(stream, address, 3, CU_STREAM_WAIT_VALUE_GEQ));
  CU_OK(cuMemsetD8Async(a, 1, 64, stream));
  *word = 2;
  linger();
  EXPECT_EQ(0, byte_at(a));
  *word = 4;
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(1, byte_at(a));

  CU_OK(cuStreamWriteValue32_v2(stream, address, 7, 0));
  CU_OK(cuStreamWaitValue32_v2(stream, address, 7, CU_STREAM_WAIT_VALUE_EQ));
  CU_OK(cuStreamWaitValue32_v2(stream, address, 4, CU_STREAM_WAIT_VALUE_AND));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(7u, word->load());

  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32_v2(stream, address + 2, 1, 0));
  uint32_t unpinned = 0;
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE,
            cuStreamWaitValue32_v2(stream, reinterpret_cast<CUdeviceptr>(&unpinned), 1, 0));

  CU_OK(cuStreamWaitValue32_v2(stream, address, 100, CU_STREAM_WAIT_VALUE_GEQ));
  CU_OK(cuStreamDestroy_v2(stream));
  EXPECT_EQ(1u, books().unresolved_waits);
  *word = 100;
  CU_OK(cuCtxSynchronize());
}

TEST_F(Streams, DestroyReturnsAtOnceAndTheWorkStillHappens) {
  kvf_cuda_double_delay(5000, 5000);
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const CUdeviceptr a = filled(64, 0);
  CU_OK(cuMemsetD8Async(a, 1, 64, stream));
  CU_OK(cuStreamDestroy_v2(stream));
  EXPECT_EQ(0u, books().streams);
  EXPECT_EQ(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(1, byte_at(a));
}

TEST_F(Streams, SayWhenTheyAreCaptured) {
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  int status = -1;
  CU_OK(cuStreamIsCapturing(stream, &status));
  EXPECT_EQ(int{CU_STREAM_CAPTURE_STATUS_NONE}, status);
  CU_OK(kvf_cuda_double_capture(stream, 1));
  CU_OK(cuStreamIsCapturing(stream, &status));
  EXPECT_EQ(int{CU_STREAM_CAPTURE_STATUS_ACTIVE}, status);
  EXPECT_EQ(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, cuStreamIsCapturing(nullptr, &status));
  EXPECT_EQ(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
  EXPECT_EQ(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(stream));
  CU_OK(kvf_cuda_double_capture(stream, 0));
  CU_OK(cuStreamSynchronize(stream));
}

TEST_F(Streams, KnowTheirContext) {
  CUstream stream = nullptr;
  CU_OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUcontext of = nullptr;
  CU_OK(cuStreamGetCtx(CU_STREAM_LEGACY, &of));
  EXPECT_EQ(context, of);
  CU_OK(cuCtxSetCurrent(nullptr));
  of = nullptr;
  CU_OK(cuStreamGetCtx(stream, &of));
  EXPECT_EQ(context, of);
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuStreamGetCtx(CU_STREAM_LEGACY, &of));
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuStreamSynchronize(stream));
}

}  // namespace
