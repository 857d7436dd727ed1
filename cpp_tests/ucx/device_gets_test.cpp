// Gets of and into device memory, on UCX's own module for CUDA and the double of the driver. There is no card
// here: the library with fault points lets UCX answer them in software (ucx_gets_in_software).
#include "gpu.hpp"

#include <cstdlib>
#include <functional>
#include <memory>
#include <tuple>

#include "cache.hpp"
#include "child.hpp"

namespace {

using namespace kvferry_test;
using process_test::Child;
using ProcessKind = process_test::MemoryKind;

constexpr std::uint64_t kBlock = 16384;

// A source in another process and a reader here.
struct Two {
  Two(ProcessKind theirs, ProcessKind ours,
      const std::function<void(kvferry::Agent&)>& before = nullptr) {
    // Deviations are for this side.
    const std::string faults = std::getenv("KVF_FAULT");
    setenv("KVF_FAULT", "ucx_gets_in_software:on", 1);
    source = std::make_unique<Child>(std::vector<std::string>{
        AGENT_PROGRAM, "source", std::to_string(kBlock), "9", "1", process_test::word(theirs)});
    setenv("KVF_FAULT", faults.c_str(), 1);
    EXPECT_EQ(source->line(), "ready");
    EXPECT_EQ(source->ask("fill 7"), "ok");
    here = std::make_unique<process_test::Cache>(process_test::quick("sink"),
                                                 process_test::Shape{kBlock, 9, 1, ours});
    if (before) before(here->agent);
    peer = here->agent.add_peer(process_test::from_hex(source->ask("meta")));
    EXPECT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
  }
  kvferry::Transfer pull() {
    const auto ticket = process_test::from_hex(source->ask("publish 1 4 6,0,4,2"));
    return here->agent.pull_begin(peer, ticket, 0, Ints{1, 3, 5, 7});
  }
  void expect_arrived() {
    const int from[] = {6, 0, 4, 2}, to[] = {1, 3, 5, 7};
    for (int i = 0; i < 4; ++i) EXPECT_EQ(here->differs(to[i], 7, from[i]), "");
    for (const int other : {0, 2, 4, 6, 8}) EXPECT_TRUE(here->untouched(other)) << other;
  }
  bool says(const char* what) const { return peer.text().find(what) != std::string::npos; }

  std::unique_ptr<Child> source;
  std::unique_ptr<process_test::Cache> here;
  kvferry::Peer peer;
};

std::uint64_t calls(const char* function) { return OF_DOUBLE(kvf_cuda_double_calls)(function); }

class DeviceGets : public testing::TestWithParam<std::tuple<ProcessKind, ProcessKind>> {};

TEST_P(DeviceGets, EveryByteArrivesAndNothingIsStaged) {
  // Without device memory of its own UCX would not look for CUDA; in software it has to.
  setenv("UCX_TLS", "tcp,cuda_copy", 1);
  const auto [theirs, ours] = GetParam();
  const auto before = books();
  {
    Two two(theirs, ours);
    EXPECT_TRUE(two.says("gets, of device memory too")) << two.peer.text();
    for (int i = 0; i < 3; ++i) {
      auto transfer = two.pull();
      ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
      EXPECT_STREQ(transfer.query().transport, "ucx");
      EXPECT_EQ(transfer.query().bytes, 2 * 4 * kBlock);  // keys and values
      EXPECT_EQ(two.source->ask("published 1 10000"), "KVF_OK");
    }
    two.expect_arrived();
    EXPECT_EQ(books().pinned_allocations, before.pinned_allocations);
    EXPECT_EQ(two.source->ask("unregister 10000"), "KVF_OK");
  }
  // Without a context of ours UCX 1.22 tries an allocation of its own, and frees it without one.
  if (ours == ProcessKind::device) {
    EXPECT_EQ(books().allocations, before.allocations);
  }
  EXPECT_EQ(books().violations, 0u);
  EXPECT_EQ(calls("cuCtxPushCurrent"), calls("cuCtxPopCurrent"));
}

INSTANTIATE_TEST_SUITE_P(Between, DeviceGets,
                         testing::Values(std::tuple{ProcessKind::device, ProcessKind::device},
                                         std::tuple{ProcessKind::pool, ProcessKind::device},
                                         std::tuple{ProcessKind::own, ProcessKind::device},
                                         std::tuple{ProcessKind::device, ProcessKind::pool},
                                         std::tuple{ProcessKind::device, ProcessKind::own}),
                         [](const auto& info) {
                           return std::string(process_test::word(std::get<0>(info.param))) + "_to_" +
                                  process_test::word(std::get<1>(info.param));
                         });

// UCX registers memory of the host with every lane that takes it, CUDA's too: the lease table, pools of a layout
// that has both. What it has pinned it gives back.
TEST(DeviceGetsHost, MemoryBesideDevicesIsNotLeftPinned) {
  const auto before = books();
  {
    Gpu gpu;
    ASSERT_NE(gpu.peer.text().find("gets, of device memory too"), std::string::npos)
        << gpu.peer.text();
    auto publication = gpu.publish(1, {3, 9}, 8);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, Ints{5, 6});
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    EXPECT_EQ(gpu.sink.block(0, 5), gpu.source.block(0, 3));
  }
  EXPECT_EQ(books().pinned_registrations, before.pinned_registrations);
  EXPECT_EQ(books().violations, 0u);
}

// Where the device does not order what a card writes, it is flushed before a transfer is done.
TEST(DeviceGetsFlush, IsAskedForWhereTheDeviceNeedsIt) {
  for (const int ordering : {0, 100, 200}) {
    OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, ordering, 1);
    Two two(ProcessKind::device, ProcessKind::device);
    ASSERT_TRUE(two.says("gets, of device memory too")) << two.peer.text();
    const auto before = calls("cuFlushGPUDirectRDMAWrites");
    auto transfer = two.pull();
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    if (ordering < 200) {
      EXPECT_GT(calls("cuFlushGPUDirectRDMAWrites"), before) << ordering;
    } else {
      EXPECT_EQ(calls("cuFlushGPUDirectRDMAWrites"), before);
    }
    two.expect_arrived();
  }
}

TEST(DeviceGetsFlush, IsNotAskedForWhereTheHostIsWritten) {
  setenv("UCX_TLS", "tcp,cuda_copy", 1);
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, 0, 1);
  Two two(ProcessKind::device, ProcessKind::pool);
  const auto before = calls("cuFlushGPUDirectRDMAWrites");
  auto transfer = two.pull();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_EQ(calls("cuFlushGPUDirectRDMAWrites"), before);
  two.expect_arrived();
}

TEST(DeviceGetsFlush, ThatFailsFailsTheTransfer) {
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, 0, 1);
  Two two(ProcessKind::device, ProcessKind::device);
  ASSERT_EQ(OF_DOUBLE(kvf_cuda_double_fail)("cuFlushGPUDirectRDMAWrites=999"), 0);
  auto transfer = two.pull();
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_TRANSFER);
  EXPECT_NE(transfer.error_text().find("cuFlushGPUDirectRDMAWrites"), std::string::npos)
      << transfer.error_text();
  (void)OF_DOUBLE(kvf_cuda_double_fail)(nullptr);
}

// Whatever is missing: messages, with the reason, and the right bytes.
void expect_messages(const char* why,
                     const std::function<void(kvferry::Agent&)>& before = nullptr) {
  const auto pinned = books().pinned_allocations;
  Two two(ProcessKind::device, ProcessKind::device, before);
  EXPECT_TRUE(two.says("messages, through pinned memory for device pools: ")) << two.peer.text();
  EXPECT_TRUE(two.says(why)) << two.peer.text();
  auto transfer = two.pull();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_STREQ(transfer.query().transport, "ucx");
  EXPECT_GT(books().pinned_allocations, pinned);
  two.expect_arrived();
}

TEST(DeviceGetsRefused, ADeviceThatNeitherOrdersNorFlushes) {
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, 0, 0);
  expect_messages("device 0 neither orders what a card writes nor flushes it");
}

TEST(DeviceGetsRefused, ADeviceThatNoCardReaches) {
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(0, 200, 1);
  expect_messages("device 0 has no GPUDirect RDMA");
}

TEST(DeviceGetsRefused, AUcxThatDoesNotKnowCuda) {
  setenv("UCX_TLS", "tcp", 1);
  expect_messages("does not know CUDA memory");
}

TEST(DeviceGetsRefused, PoolsOfTwoContexts) {
  auto& cuda = Cuda::get();
  CUcontext other = nullptr;
  CUdeviceptr memory = 0;
  Cuda::check(cuda.find<CUresult(CUcontext*, unsigned, CUdevice)>("cuCtxCreate_v2")(&other, 0, 0),
              "cuCtxCreate");
  Cuda::check(cuda.alloc(&memory, 4096), "cuMemAlloc");
  kvferry::Pool pool;
  expect_messages("device pools of 2 CUDA contexts", [&](kvferry::Agent& agent) {
    pool = agent.register_device_memory(reinterpret_cast<void*>(memory), 4096);
  });
}

// The source's UCX has no module for CUDA; the reader has no device memory.
TEST(DeviceGetsRefused, ASourceThatDoesNotKnowCuda) {
  setenv("UCX_TLS", "tcp", 1);
  Two two(ProcessKind::device, ProcessKind::pool);
  EXPECT_TRUE(two.says("does not know CUDA memory")) << two.peer.text();
  auto transfer = two.pull();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  two.expect_arrived();
}

// What UCX refuses when it is tried: there is no lane for it here without cuda_copy at the reader.
TEST(DeviceGetsRefused, KeysThatDoNotWorkWhenTheyAreTried) {
  Two two(ProcessKind::device, ProcessKind::pool);
  EXPECT_TRUE(two.says("messages, through pinned memory for device pools: "
                       "the card does not reach device memory: "))
      << two.peer.text();
  auto transfer = two.pull();
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  two.expect_arrived();
}

}  // namespace
