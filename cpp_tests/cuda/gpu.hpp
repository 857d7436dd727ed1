// What the suites of device memory and streams share: the double, streams of the engine, and how a
// test looks at device memory without waiting for any stream.
#pragma once

#include <gtest/gtest.h>
#include <kvferry.hpp>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "side.hpp"
#include "transfers.hpp"

namespace kvferry_test {

template <typename Function>
Function* of_double(const char* name) {
  auto* function = Cuda::get().find<Function>(name);
  if (function == nullptr) throw std::runtime_error("this suite needs the double of the driver");
  return function;
}
#define OF_DOUBLE(name) ::kvferry_test::of_double<decltype(name)>(#name)

// The engine's stream.
class Stream {
 public:
  explicit Stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    Cuda::get().enter();
    Cuda::check(Cuda::get().stream_create(&stream_, flags), "cuStreamCreate");
  }
  Stream(const Stream&) = delete;
  ~Stream() {
    release();
    Cuda::get().enter();
    (void)Cuda::get().stream_synchronize(stream_);
    (void)Cuda::get().stream_destroy(stream_);
  }
  CUstream raw() const { return stream_; }
  void* c() const { return stream_; }

  // Nothing enqueued is executed until release().
  void hold() {
    Cuda::check(OF_DOUBLE(kvf_cuda_double_hold)(stream_), "hold");
    held_ = true;
  }
  void release() {
    if (held_) (void)OF_DOUBLE(kvf_cuda_double_release)(stream_);
    held_ = false;
  }
  // Enqueues a write of one value.
  void set(CUdeviceptr at, std::uint8_t value, std::size_t bytes) {
    Cuda::get().enter();
    Cuda::check(Cuda::get().set_async(at, value, bytes, stream_), "cuMemsetD8Async");
  }
  void synchronize() {
    Cuda::get().enter();
    Cuda::check(Cuda::get().stream_synchronize(stream_), "cuStreamSynchronize");
  }
  bool idle() {
    Cuda::get().enter();
    return Cuda::get().stream_query(stream_) == CUDA_SUCCESS;
  }

 private:
  CUstream stream_ = nullptr;
  bool held_ = false;
};

// Device memory now, whatever the streams do.
inline std::vector<std::uint8_t> peek(CUdeviceptr at, std::size_t bytes) {
  std::vector<std::uint8_t> data(bytes);
  Cuda::check(OF_DOUBLE(kvf_cuda_double_peek)(data.data(), at, bytes), "peek");
  return data;
}

inline std::vector<std::uint8_t> bytes_of(std::uint8_t value, std::size_t bytes) {
  return std::vector<std::uint8_t>(bytes, value);
}

// Long enough for work that must not be executed to show itself.
inline void linger() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

template <typename Condition>
bool eventually(Condition condition, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A device pair, and where its slots are.
struct Gpu : Pair {
  Gpu() : Pair(MemoryKind::Device) {}
  Gpu(const kvferry::AgentConfig& from, const kvferry::AgentConfig& to)
      : Pair(from, to, MemoryKind::Device) {}

  static CUdeviceptr base(const Side& side) {
    return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(side.memory.pool().data()));
  }
  // A block of the keys.
  static CUdeviceptr block(const Side& side, int slot) {
    return base(side) + static_cast<CUdeviceptr>(slot) * Cache::block;
  }

  kvferry::Publication publish_behind(const Stream& stream, std::uint64_t request,
                                      const Ints& slots, std::uint64_t end) {
    kvferry::Offer offer;
    offer.key = kvferry::key(request);
    offer.groups = {kvferry::published(0, slots, 0, end)};
    offer.stream = stream.c();
    return source.agent.publish(offer);
  }
  kvferry::Transfer pull_behind(void* stream, const kvferry::Bytes& ticket, const Ints& slots,
                                std::chrono::nanoseconds deadline = kLong) {
    kvferry::Import import;
    import.groups = {kvferry::wanted(0, slots, 0, KVF_TOKEN_END_ALL)};
    import.stream = stream;
    import.deadline = deadline;
    return sink.agent.import_begin(peer, ticket, import);
  }
};

}  // namespace kvferry_test
