// Device pools: what is taken for one, what reaches them, and that nothing of ours is left.
#include "gpu.hpp"

#include <csignal>

#include "cache.hpp"
#include "child.hpp"

namespace {

using namespace kvferry_test;

const Ints kFrom{3, 9}, kTo{5, 6};

TEST(DeviceMemory, OnlyTheNamedMemoryOfTheNamedDeviceIsTaken) {
  kvferry::Agent agent;
  DeviceMemory memory(8192);
  kvf_pool* pool = nullptr;
  kvf_pool_desc desc = KVF_POOL_DESC_INIT;
  desc.memory_kind = KVF_MEMORY_DEVICE;
  desc.base = memory.pointer();
  desc.bytes = 8192;
  const auto create = [&] { return kvf_pool_register(agent.c(), &desc, &pool); };
  desc.bytes = 1u << 30;
  EXPECT_REFUSED(create(), KVF_ERR_OUT_OF_RANGE, "leave their allocation");
  desc.bytes = 8192;
  desc.device = 1;
  EXPECT_REFUSED(create(), KVF_ERR_INVALID_ARGUMENT, "device");
  desc.device = 0;
  static char host[4096];
  desc.base = host;
  desc.bytes = sizeof host;
  EXPECT_REFUSED(create(), KVF_ERR_INVALID_ARGUMENT, "no memory of the CUDA driver");
  void* pinned = nullptr;
  Cuda::check(OF_DOUBLE(cuMemHostAlloc)(&pinned, 4096, 0), "cuMemHostAlloc");
  desc.base = pinned;
  EXPECT_REFUSED(create(), KVF_ERR_INVALID_ARGUMENT, "pinned host memory");
  (void)OF_DOUBLE(cuMemFreeHost)(pinned);
  EXPECT_EQ(pool, nullptr);
  // Memory of a pool, and of cuMemCreate, belongs to no context.
  CUdeviceptr pooled = 0;
  Cuda::check(OF_DOUBLE(cuMemAllocAsync)(&pooled, 4096, nullptr), "cuMemAllocAsync");
  desc.base = reinterpret_cast<void*>(static_cast<std::uintptr_t>(pooled));
  EXPECT_REFUSED(create(), KVF_ERR_UNSUPPORTED, "memory of cuMemCreate (VMM) and of a memory pool");
  (void)OF_DOUBLE(cuMemFreeAsync)(pooled, nullptr);
  // Part of an allocation, and device memory that is registered as host memory.
  desc.base = static_cast<char*>(memory.pointer()) + 4096;
  EXPECT_EQ(create(), KVF_OK) << kvferry::last_error();
  EXPECT_EQ(kvf_pool_destroy(pool), KVF_OK);
  desc.memory_kind = KVF_MEMORY_HOST;
  EXPECT_REFUSED(create(), KVF_ERR_INVALID_ARGUMENT, "");
}

TEST(DeviceMemory, PinnedPoolsAreUnpinnedBeforeTheyMayBeFreed) {
  kvferry::Agent agent;
  DeviceMemory memory(4096);
  alignas(4096) static char host[8192];
  kvf_pool_desc desc = KVF_POOL_DESC_INIT;
  desc.base = host;
  desc.bytes = sizeof host;
  desc.flags = KVF_POOL_PINNED;
  kvf_pool *pool = nullptr, *shared = nullptr;
  ASSERT_EQ(kvf_pool_register(agent.c(), &desc, &pool), KVF_OK) << kvferry::last_error();
  EXPECT_EQ(books().pinned_registrations, 1u);
  kvf_host_pool_config config = KVF_HOST_POOL_CONFIG_INIT;
  config.bytes = 4096;
  config.flags = KVF_POOL_PINNED;
  ASSERT_EQ(kvf_host_pool_create(agent.c(), &config, &shared), KVF_OK) << kvferry::last_error();
  EXPECT_EQ(books().pinned_registrations, 2u);
  // The handle stays; the memory may be freed.
  ASSERT_EQ(kvf_pool_unregister_begin(pool, 1'000'000'000), KVF_OK);
  kvf_pool_info info = KVF_POOL_INFO_INIT;
  ASSERT_TRUE(eventually([&] {
    return kvf_pool_query(pool, &info) == KVF_OK && info.status == KVF_OK;
  }));
  EXPECT_EQ(books().pinned_registrations, 1u);
  EXPECT_EQ(kvf_pool_destroy(pool), KVF_OK);
  EXPECT_EQ(kvf_pool_destroy(shared), KVF_OK);
  EXPECT_EQ(books().pinned_registrations, 0u);
}

TEST(DeviceMemory, PinningNeedsAContext) {
  kvferry::Agent agent;
  ASSERT_TRUE(has_cuda());
  kvf_host_pool_config config = KVF_HOST_POOL_CONFIG_INIT;
  config.bytes = 4096;
  config.flags = KVF_POOL_PINNED;
  kvf_pool* pool = nullptr;
  EXPECT_REFUSED(kvf_host_pool_create(agent.c(), &config, &pool), KVF_ERR_STATE, "cudaSetDevice");
}

// Source and destination in one process, in each kind of memory.
class Mixed : public testing::TestWithParam<std::pair<MemoryKind, MemoryKind>> {};
INSTANTIATE_TEST_SUITE_P(
    OneProcess, Mixed,
    testing::Values(std::pair{MemoryKind::Device, MemoryKind::Device},
                    std::pair{MemoryKind::Pool, MemoryKind::Device},
                    std::pair{MemoryKind::Own, MemoryKind::Device},
                    std::pair{MemoryKind::Device, MemoryKind::Pool},
                    std::pair{MemoryKind::Device, MemoryKind::Own}),
    [](const auto& info) { return name_of(info.param.first) + "To" + name_of(info.param.second); });

TEST_P(Mixed, EveryByteArrives) {
  Side source(config("source"), GetParam().first), sink(config("sink"), GetParam().second);
  source.memory.fill(1);
  auto peer = sink.agent.add_peer(source.engine.metadata());
  kvferry::check(peer.wait(kLong));
  const Ints slots{3, 9};
  kvferry::Offer offer = blocks_and_state();
  auto publication = source.agent.publish(offer);
  kvferry::Import import;
  import.groups = {kvferry::wanted(0, kTo, 0, 8)};
  import.states = {{1, 1, 8}};
  auto transfer = sink.agent.import_begin(peer, publication.ticket(), import);
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  for (int view : {0, 1}) {
    EXPECT_EQ(sink.block(view, 5), source.block(view, 3));
    EXPECT_EQ(sink.block(view, 6), source.block(view, 9));
    EXPECT_EQ(sink.block(view, 4), zeros(Cache::block));
  }
  EXPECT_EQ(sink.state(1), source.state(2));
  EXPECT_STREQ(transfer.query().transport, "inproc");
}

// The same between processes.
using process_test::Child;
using ProcessKind = process_test::MemoryKind;

struct Two {
  Two(ProcessKind theirs, ProcessKind ours, std::uint64_t block_bytes = 65536)
      : child({AGENT_PROGRAM, "source", std::to_string(block_bytes), "32", "1",
               process_test::word(theirs)}),
        shape{block_bytes, 32, 1, ours},
        here(process_test::quick("sink"), shape) {
    EXPECT_EQ(child.line(), "ready");
    EXPECT_EQ(child.ask("fill 7"), "ok");
    peer = here.agent.add_peer(process_test::from_hex(child.ask("meta")));
    EXPECT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
  }
  kvferry::Transfer pull(std::uint64_t key) {
    const auto ticket =
        process_test::from_hex(child.ask("publish " + std::to_string(key) + " 2 3,9"));
    return here.agent.pull_begin(peer, ticket, 0, kTo);
  }
  Child child;
  process_test::Shape shape;
  process_test::Cache here;
  kvferry::Peer peer;
};

class Between : public testing::TestWithParam<std::pair<ProcessKind, ProcessKind>> {};
INSTANTIATE_TEST_SUITE_P(
    Processes, Between,
    testing::Values(std::pair{ProcessKind::device, ProcessKind::device},
                    std::pair{ProcessKind::pool, ProcessKind::device},
                    std::pair{ProcessKind::own, ProcessKind::device},
                    std::pair{ProcessKind::device, ProcessKind::pool},
                    std::pair{ProcessKind::device, ProcessKind::own}),
    [](const auto& info) {
      return std::string(process_test::word(info.param.first)) + "_to_" +
             process_test::word(info.param.second);
    });

TEST_P(Between, EveryByteArrives) {
  Two two(GetParam().first, GetParam().second);
  auto transfer = two.pull(1);
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_EQ(two.here.differs(5, 7, 3), "");
  EXPECT_EQ(two.here.differs(6, 7, 9), "");
  EXPECT_TRUE(two.here.untouched(4));
  const bool theirs = GetParam().first == ProcessKind::device;
  const bool ours = GetParam().second == ProcessKind::device;
  // Without device memory of its own a process does not start to use CUDA.
  EXPECT_STREQ(transfer.query().transport, theirs ? ours ? "cuda_ipc" : "unix" : "shm")
      << two.peer.text();
}

TEST(DeviceMemory, WhatCannotBeMappedGoesThroughTheSocket) {
  {
    // The reader's driver refuses the handle.
    OF_DOUBLE(kvf_cuda_double_fail)("cuIpcOpenMemHandle=1");
    Two two(ProcessKind::device, ProcessKind::device);
    OF_DOUBLE(kvf_cuda_double_fail)("");
    auto transfer = two.pull(1);
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    EXPECT_STREQ(transfer.query().transport, "unix");
    EXPECT_NE(two.peer.text().find("cuda_ipc: pool 1: cuIpcOpenMemHandle"), std::string::npos)
        << two.peer.text();
    EXPECT_EQ(two.here.differs(5, 7, 3), "");
  }
  // The source's driver exports nothing.
  setenv("KVF_CUDA_DOUBLE_FAIL", "cuIpcGetMemHandle=801", 1);
  Two two(ProcessKind::device, ProcessKind::device);
  unsetenv("KVF_CUDA_DOUBLE_FAIL");
  auto transfer = two.pull(1);
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_STREQ(transfer.query().transport, "unix");
  EXPECT_NE(two.peer.text().find("the source does not export it"), std::string::npos)
      << two.peer.text();
  EXPECT_EQ(two.here.differs(5, 7, 3), "");
}

// As in host memory: what a transfer reads it must not write.
TEST(DeviceMemory, SourceAndDestinationMustNotOverlap) {
  Side source("source", MemoryKind::Device);
  source.memory.fill(1);
  kvferry::Agent sink(config("sink"));
  auto pool = sink.register_device_memory(source.memory.pool().data(), Cache::bytes);
  sink.set_layout(Cache::groups(pool));
  auto engine = sink.engine();
  auto peer = sink.add_peer(source.engine.metadata());
  ASSERT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
  auto publication = source.agent.publish(kvferry::key(1), 0, kFrom, 8);
  auto same = sink.pull_begin(peer, publication.ticket(), 0, Ints{9, 4});
  EXPECT_EQ(same.wait(kLong), KVF_ERR_TRANSFER);
  EXPECT_NE(same.error_text().find("that it also reads; publish and pull disjoint slots"),
            std::string::npos)
      << same.error_text();
  EXPECT_TRUE(safe_soon(same));
  const auto before = source.block(0, 3);
  auto second = source.agent.publish(kvferry::key(2), 0, kFrom, 8);
  auto other = sink.pull_begin(peer, second.ticket(), 0, kTo);
  EXPECT_EQ(other.wait(kLong), KVF_OK) << other.error_text();
  EXPECT_EQ(source.block(0, 5), before);
  EXPECT_EQ(sink.destroy(kLong), KVF_OK);
}

// Up to 64 MiB are one launch, and what is contiguous is one copy.
TEST(DeviceMemory, LargeTransfersAreFewCalls) {
  OF_DOUBLE(kvf_cuda_double_delay)(0, 0);
  struct Case {
    std::uint64_t block;
    int blocks;
    std::uint64_t launches, copies;
  };
  for (const Case& c : {Case{16384, 1024, 1, 0}, Case{32 << 20, 1, 0, 1}}) {
    process_test::Shape shape{c.block, static_cast<std::uint32_t>(c.blocks), 1,
                              process_test::MemoryKind::device};
    process_test::Cache source(config("source"), shape), sink(config("sink"), shape);
    Ints from, to;
    for (int i = 0; i < c.blocks; ++i) {
      from.push_back(c.blocks - 1 - i);
      to.push_back(i);
    }
    auto peer = sink.agent.add_peer(source.engine.metadata());
    ASSERT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
    auto publication = source.agent.publish(kvferry::key(1), 0, from, from.size());
    const auto before = books();
    auto transfer = sink.agent.pull_begin(peer, publication.ticket(), 0, to);
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    const auto after = books();
    // Keys and values.
    EXPECT_EQ(after.launches - before.launches, c.launches);
    EXPECT_EQ(after.copies - before.copies, c.copies);
  }
}

// The driver refuses a call in the middle of a transfer.
TEST(DeviceMemory, ARefusedCallIsAnErrorAndLosesNothing) {
  Gpu gpu;
  for (const char* fault : {"cuMemcpyAsync:1=1", "cuMemcpyAsync:3=1", "cuLaunchHostFunc:1=1"}) {
    auto publication = gpu.publish(1, kFrom, 8);
    OF_DOUBLE(kvf_cuda_double_fail)(fault);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    EXPECT_EQ(transfer.wait(kLong), KVF_ERR_TRANSFER) << fault;
    EXPECT_NE(transfer.error_text().find("CUDA_ERROR_INVALID_VALUE (1)"), std::string::npos)
        << transfer.error_text();
    EXPECT_TRUE(safe_soon(transfer)) << fault << ": what was enqueued has ended";
    OF_DOUBLE(kvf_cuda_double_fail)("");
    EXPECT_NE(publication.wait(kLong), KVF_TIMED_OUT) << "the source hears of it";
  }
  Stream stream;
  stream.hold();
  kvferry::Offer offer;
  offer.key = kvferry::key(2);
  offer.groups = {kvferry::published(0, kFrom, 0, 8)};
  offer.stream = stream.c();
  for (const char* fault : {"cuEventCreate:1=2", "cuEventRecord:1=1", "cuStreamWaitEvent:1=1",
                            "cuLaunchHostFunc:1=1", "cuCtxPushCurrent:1=201"}) {
    OF_DOUBLE(kvf_cuda_double_fail)(fault);
    EXPECT_THROW((void)gpu.source.agent.publish(offer), kvferry::Error) << fault;
  }
  OF_DOUBLE(kvf_cuda_double_fail)("");
  stream.release();
  auto publication = gpu.source.agent.publish(offer);
  auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_EQ(gpu.sink.block(0, 5), gpu.source.block(0, 3));
}

TEST(DeviceMemory, APoolIsFreeWhenItsReadersHaveUnmappedIt) {
  Two two(ProcessKind::device, ProcessKind::device);
  ASSERT_EQ(two.pull(1).wait(kLong), KVF_OK);
  EXPECT_EQ(books().ipc_mappings, 1u);
  EXPECT_EQ(two.child.ask("unregister 10000"), "KVF_OK");
  EXPECT_EQ(books().ipc_mappings, 0u);
}

TEST(DeviceMemory, APoolIsNotFreeWhileAStoppedReaderHasItMapped) {
  process_test::Shape shape{4096, 32, 1, ProcessKind::device};
  process_test::Cache here(process_test::quick("source"), shape);
  here.fill(7);
  Child reader({AGENT_PROGRAM, "reader", "4096", "32", "1", "device"});
  EXPECT_EQ(reader.line(), "ready");
  EXPECT_EQ(reader.ask("peer " + process_test::to_hex(here.engine.metadata())), "KVF_OK");
  reader.kill(SIGSTOP);
  EXPECT_EQ(reader.halted(5000ms), Child::State::stopped);
  EXPECT_EQ(here.unregister(300ms), KVF_ERR_BUSY) << "it stays registered";
  reader.kill(SIGKILL);
  reader.reap();
  EXPECT_EQ(here.unregister(10s), KVF_OK);
}

TEST(DeviceMemory, AReaderThatLeavesHasUnmappedEverything) {
  process_test::Shape shape{4096, 32, 1, ProcessKind::device};
  process_test::Cache here(process_test::quick("source"), shape);
  Child reader({AGENT_PROGRAM, "reader", "4096", "32", "1", "device"});
  EXPECT_EQ(reader.line(), "ready");
  EXPECT_EQ(reader.ask("peer " + process_test::to_hex(here.engine.metadata())), "KVF_OK");
  EXPECT_EQ(reader.ask("destroy 5000"), "KVF_OK");
  EXPECT_EQ(here.unregister(5s), KVF_OK) << "its process still lives";
}

TEST(DeviceMemory, ADeadPeersMemoryIsUnmapped) {
  Two two(ProcessKind::device, ProcessKind::device, 1 << 20);
  EXPECT_EQ(books().ipc_mappings, 1u);
  OF_DOUBLE(kvf_cuda_double_delay)(20'000, 20'000);
  auto transfer = two.pull(1);
  while (transfer.query().submitted == 0) std::this_thread::sleep_for(1ms);
  two.child.kill(SIGKILL);
  two.child.reap();
  EXPECT_NE(transfer.wait(kLong), KVF_IN_PROGRESS);
  EXPECT_TRUE(safe_soon(transfer));
  EXPECT_TRUE(eventually([&] { return books().ipc_mappings == 0; }));
}

// Everything of kvferry in the double's books.
void expect_nothing_of_ours(const kvf_cuda_double_books& before) {
  const auto now = books();
  EXPECT_EQ(now.ipc_mappings, before.ipc_mappings);
  EXPECT_EQ(now.events, before.events);
  EXPECT_EQ(now.streams, before.streams);
  EXPECT_EQ(now.pinned_registrations, before.pinned_registrations);
  EXPECT_EQ(now.pinned_allocations, before.pinned_allocations);
  EXPECT_EQ(now.modules, before.modules);
  EXPECT_EQ(now.allocations, before.allocations);
  EXPECT_EQ(now.violations, before.violations);
}

TEST(DeviceMemory, AThousandPairsLeaveNothing) {
  OF_DOUBLE(kvf_cuda_double_delay)(0, 0);
  { Stream warm; }
  const auto before = books();
  const char* rounds = std::getenv("KVFERRY_CUDA_ROUNDS");
  for (int i = 0; i < (rounds != nullptr ? std::atoi(rounds) : 1000); ++i) {
    Gpu gpu;
    Stream stream;
    stream.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
    auto publication = gpu.publish_behind(stream, 1, kFrom, 8);
    auto transfer = gpu.pull_behind(stream.c(), publication.ticket(), kTo);
    transfer.stream_wait(stream.c());
    ASSERT_EQ(transfer.wait(kLong), KVF_OK) << i << ": " << transfer.error_text();
    stream.synchronize();
  }
  expect_nothing_of_ours(before);
}

TEST(DeviceMemory, KilledPeersLeaveNothing) {
  process_test::Shape shape{1 << 20, 32, 1, ProcessKind::device};
  { Stream warm; }
  const auto before = books();
  {
    process_test::Cache here(process_test::quick("sink"), shape);
    for (int i = 0; i < 5; ++i) {
      Child child({AGENT_PROGRAM, "source", "1048576", "32", "1", "device"});
      EXPECT_EQ(child.line(), "ready");
      auto peer = here.agent.add_peer(process_test::from_hex(child.ask("meta")));
      ASSERT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
      const auto ticket = process_test::from_hex(child.ask("publish 1 2 3,9"));
      auto transfer = here.agent.pull_begin(peer, ticket, 0, kTo);
      std::this_thread::sleep_for(std::chrono::milliseconds(i));
      child.kill(SIGKILL);
      child.reap();
      EXPECT_NE(transfer.wait(kLong), KVF_IN_PROGRESS);
      EXPECT_TRUE(safe_soon(transfer));
      EXPECT_TRUE(eventually([&] { return books().ipc_mappings == 0; }));
    }
  }
  expect_nothing_of_ours(before);
}

}  // namespace
