// Gets of and into device memory, on UCX's own module for CUDA and the double of the driver. There is no card
// here: the library with fault points lets UCX answer them in software (ucx_gets_in_software).
#include "gpu.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
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
constexpr char kSoftware[] = "ucx_gets_in_software:on";

// An agent in another process. Deviations are for this one, unless they are named.
std::unique_ptr<Child> started(const char* name, std::uint64_t block, ProcessKind memory,
                               const std::string& faults = kSoftware) {
  const std::string ours = std::getenv("KVF_FAULT");
  setenv("KVF_FAULT", faults.c_str(), 1);
  auto child = std::make_unique<Child>(std::vector<std::string>{
      AGENT_PROGRAM, name, std::to_string(block), "9", "1", process_test::word(memory)});
  setenv("KVF_FAULT", ours.c_str(), 1);
  EXPECT_EQ(child->line(), "ready");
  return child;
}

void arm(const std::string& faults) {
  using Fault = kvf_status (*)(const char*);
  const auto set = reinterpret_cast<Fault>(dlsym(RTLD_DEFAULT, "kvf_testing_fault"));
  ASSERT_NE(set, nullptr) << "no faults in this build";
  ASSERT_EQ(set(faults.c_str()), KVF_OK);
}

// A source in another process and a reader here.
struct Two {
  Two(ProcessKind theirs, ProcessKind ours,
      const std::function<void(kvferry::Agent&)>& before = nullptr) {
    source = started("source", kBlock, theirs);
    EXPECT_EQ(source->ask("fill 7"), "ok");
    here = std::make_unique<process_test::Cache>(process_test::quick("sink"),
                                                 process_test::Shape{kBlock, 9, 1, ours});
    if (before) before(here->agent);
    meet();
  }
  void meet() {
    peer = here->agent.add_peer(process_test::from_hex(source->ask("meta")));
    EXPECT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
  }
  kvferry::Bytes publish() {
    return process_test::from_hex(source->ask("publish 1 4 6,0,4,2"));
  }
  kvferry::Transfer pull() { return pull(publish()); }
  kvferry::Transfer pull(const kvferry::Bytes& ticket) {
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

// The source's processor, which answers the gets here, does nothing more; then the transfer is cancelled or the
// source dies. What the card has written until then is flushed before the slots are somebody else's.
class DeviceGetsCutOff : public testing::TestWithParam<bool> {
 protected:
  // The status that the transfer ends with.
  static kvf_status cut_off(Two& two, kvferry::Transfer& transfer) {
    const auto ticket = two.publish();
    EXPECT_EQ(two.source->ask("hold 1"), "ok");
    transfer = two.pull(ticket);
    EXPECT_TRUE(eventually([&] { return two.source->ask("pending") != "0"; }));
    EXPECT_EQ(transfer.query().outcome, KVF_OUTCOME_PENDING);
    if (GetParam()) {
      transfer.cancel();
    } else {
      two.source->kill(SIGKILL);
    }
    return transfer.wait(kLong);
  }
  // Of a source that is gone UCX may know before the control link does.
  static bool expected(kvf_status status) {
    return GetParam() ? status == KVF_ERR_CANCELLED
                      : status == KVF_ERR_TRANSFER || status == KVF_ERR_PEER_LOST;
  }
};

TEST_P(DeviceGetsCutOff, IsFlushedBeforeItIsSafe) {
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, 0, 1);
  Two two(ProcessKind::device, ProcessKind::device);
  ASSERT_TRUE(two.says("gets, of device memory too")) << two.peer.text();
  const auto before = calls("cuFlushGPUDirectRDMAWrites");
  kvferry::Transfer transfer;
  EXPECT_TRUE(expected(cut_off(two, transfer))) << transfer.error_text();
  ASSERT_TRUE(safe_soon(transfer));
  EXPECT_GT(calls("cuFlushGPUDirectRDMAWrites"), before);
}

TEST_P(DeviceGetsCutOff, IsNeverSafeIfTheFlushFails) {
  OF_DOUBLE(kvf_cuda_double_gpu_direct)(1, 0, 1);
  Two two(ProcessKind::device, ProcessKind::device);
  ASSERT_TRUE(two.says("gets, of device memory too")) << two.peer.text();
  ASSERT_EQ(OF_DOUBLE(kvf_cuda_double_fail)("cuFlushGPUDirectRDMAWrites=999"), 0);
  const auto before = calls("cuFlushGPUDirectRDMAWrites");
  kvferry::Transfer transfer;
  EXPECT_TRUE(expected(cut_off(two, transfer))) << transfer.error_text();
  ASSERT_TRUE(eventually([&] { return calls("cuFlushGPUDirectRDMAWrites") > before; }));
  linger();
  EXPECT_EQ(transfer.query().memory_safe, 0u);
}

INSTANTIATE_TEST_SUITE_P(By, DeviceGetsCutOff, testing::Bool(),
                         [](const auto& info) { return info.param ? "Cancel" : "Death"; });

// UCX registers what a caller does not wait for any more all the same.
TEST(DeviceGetsLate, TheMemoryToTryWithStaysWhereUcxHasIt) {
  const auto before = books();
  {
    arm(kSoftware + std::string(",ucx_registers_late:on"));
    Two two(ProcessKind::device, ProcessKind::device);
    EXPECT_TRUE(two.says("messages, through pinned memory for device pools: ")) << two.peer.text();
    EXPECT_TRUE(two.says("did not answer")) << two.peer.text();
    arm(kSoftware);
    two.source = started("another", kBlock, ProcessKind::device);
    EXPECT_EQ(two.source->ask("fill 7"), "ok");
    two.meet();
    EXPECT_TRUE(two.says("gets, of device memory too")) << two.peer.text();
    auto transfer = two.pull();
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    two.expect_arrived();
  }
  EXPECT_EQ(books().allocations, before.allocations);
  EXPECT_EQ(books().violations, 0u);
}

// Whether an agent of this process has a UCX.
bool has_ucx() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "kvf-source-ucx") return true;
  }
  return false;
}

// The reader dies while its gets write its device memory. The source's processor, which no card would have
// asked, has answered them by then: UCX ends its process for one that it cannot answer any more (docs/ucx.md).
TEST(DeviceGetsReaderDies, TheSourceEndsThePublicationAndServesTheNext) {
  constexpr std::uint64_t block = 4096, bytes = 2 * 4 * block;
  const auto before = books();
  {
    process_test::Cache source(process_test::quick("source"),
                               process_test::Shape{block, 9, 1, ProcessKind::device});
    source.fill(7);
    const auto connect = [&](Child& reader) {
      EXPECT_EQ(reader.ask("peer " + process_test::to_hex(source.engine.metadata())), "KVF_OK");
      const auto text = reader.ask("peerstate 0");
      EXPECT_NE(text.find("gets, of device memory too"), std::string::npos) << text;
    };
    const Ints slots{6, 0, 4, 2};
    const auto publish = [&](std::uint64_t key) {
      kvferry::Offer offer;
      offer.key = kvferry::key(key);
      offer.groups = {kvferry::published(0, slots, 0, 4)};
      return source.agent.publish(offer);
    };
    const auto import = [](const kvferry::Publication& publication) {
      return "import " + process_test::to_hex(publication.ticket()) + " 1,3,5,7 0 20000";
    };

    auto victim = started("victim", block, ProcessKind::device);
    connect(*victim);
    ASSERT_EQ(victim->ask("hold 1"), "ok");
    const auto copied = books().copied_bytes;
    auto lost = publish(1);
    ASSERT_EQ(victim->ask(import(lost)), "0");
    ASSERT_TRUE(eventually([&] { return victim->ask("pending") != "0"; }));
    ASSERT_TRUE(eventually([&] { return books().copied_bytes - copied >= bytes; }));
    auto next = started("next", block, ProcessKind::device);
    connect(*next);  // answered by the source's UCX after all that came before
    victim->kill(SIGKILL);
    victim->reap();
    EXPECT_EQ(lost.wait(kLong), KVF_ERR_PEER_LOST);

    auto served = publish(2);
    ASSERT_EQ(next->ask(import(served)), "0");
    EXPECT_EQ(next->ask("wait 0 20000"), "KVF_OK safe") << next->ask("state 0");
    for (int i = 0; i < 4; ++i) {
      const auto into = std::to_string(2 * i + 1), from = std::to_string(slots[i]);
      EXPECT_EQ(next->ask("differs " + into + " 7 " + from), "same");
    }
    EXPECT_EQ(served.wait(kLong), KVF_OK);

    const auto metrics = source.agent.metrics_text();
    for (const char* none : {"leases", "running_operations", "quarantined_transfers"}) {
      const auto line = std::string("\nkvferry_") + none + "{agent=\"source\"} 0\n";
      EXPECT_NE(metrics.find(line), std::string::npos) << line << metrics;
    }
    // The victim's card may still read the pool, for all that is known.
    EXPECT_TRUE(has_ucx());
    EXPECT_EQ(source.unregister(kLong), KVF_OK);
    EXPECT_TRUE(eventually([] { return !has_ucx(); }));
  }
  const auto after = books();
  EXPECT_EQ(after.pending_work, 0u);
  EXPECT_EQ(after.streams, before.streams);
  EXPECT_EQ(after.events, before.events);
  EXPECT_EQ(after.allocations, before.allocations);
  EXPECT_EQ(after.pinned_allocations, before.pinned_allocations);
  EXPECT_EQ(after.pinned_registrations, before.pinned_registrations);
  EXPECT_EQ(after.violations, 0u);
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
