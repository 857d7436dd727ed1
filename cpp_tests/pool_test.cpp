// kvf_pool: kvferry's own pools, registered memory, and when either may be freed.
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

#include "side.hpp"

using namespace kvferry_test;

namespace {

kvf_pool* const kUntouched = reinterpret_cast<kvf_pool*>(0x1234);

TEST(Pool, EveryBadConfigIsRefused) {
  kvferry::Agent agent;
  kvf_pool* pool = kUntouched;
  kvf_host_pool_config config = KVF_HOST_POOL_CONFIG_INIT;
  const auto create = [&](const kvf_host_pool_config& c) {
    return kvf_host_pool_create(agent.c(), &c, &pool);
  };
  EXPECT_REFUSED(kvf_host_pool_create(agent.c(), nullptr, &pool), KVF_ERR_INVALID_ARGUMENT,
                 "config is NULL");
  EXPECT_REFUSED(kvf_host_pool_create(agent.c(), &config, nullptr), KVF_ERR_INVALID_ARGUMENT,
                 "pool is NULL");
  EXPECT_REFUSED(create(config), KVF_ERR_INVALID_ARGUMENT, "config.bytes is 0");
  config.bytes = 4096;
  config.page_size = 12345;
  EXPECT_REFUSED(create(config), KVF_ERR_INVALID_ARGUMENT, "12345");
  config.page_size = 0;
  config.abi_version = 0;
  EXPECT_REFUSED(create(config), KVF_ERR_ABI_MISMATCH, "config.abi_version is 0");
  config = KVF_HOST_POOL_CONFIG_INIT;
  config.bytes = uint64_t{1} << 50;
  EXPECT_REFUSED(create(config), KVF_ERR_NO_MEMORY, "");
  config.bytes = UINT64_MAX;
  const kvf_status status = create(config);
  EXPECT_TRUE(status == KVF_ERR_NO_MEMORY || status == KVF_ERR_INVALID_ARGUMENT ||
              status == KVF_ERR_OUT_OF_RANGE)
      << kvf_status_name(status);
  EXPECT_EQ(pool, kUntouched);
}

TEST(Pool, EveryBadDescriptionOfOwnMemoryIsRefused) {
  kvferry::Agent agent;
  alignas(4096) static char memory[8192];
  kvf_pool* pool = kUntouched;
  kvf_pool_desc desc = KVF_POOL_DESC_INIT;
  const auto create = [&](const kvf_pool_desc& d) {
    return kvf_pool_register(agent.c(), &d, &pool);
  };
  EXPECT_REFUSED(kvf_pool_register(agent.c(), nullptr, &pool), KVF_ERR_INVALID_ARGUMENT,
                 "desc is NULL");
  EXPECT_REFUSED(kvf_pool_register(agent.c(), &desc, nullptr), KVF_ERR_INVALID_ARGUMENT,
                 "pool is NULL");
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.base is NULL");
  desc.base = memory;
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.bytes is 0");
  desc.bytes = UINT64_MAX;
  EXPECT_REFUSED(create(desc), KVF_ERR_OUT_OF_RANGE, "end of the address space");
  desc.bytes = sizeof memory;
  desc.memory_kind = KVF_MEMORY_DEVICE;
  if (has_cuda()) {
    EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "no memory of the CUDA driver");
    desc.device = 1000;
    EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "device 1000 does not exist");
    desc.device = 0;
  } else {
    EXPECT_REFUSED(create(desc), KVF_ERR_UNSUPPORTED, "no CUDA driver");
  }
  desc.flags = KVF_POOL_PINNED;
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.flags");
  desc.flags = 0;
  desc.memory_kind = 2;
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.memory_kind 2");
  desc.memory_kind = KVF_MEMORY_HOST;
  desc.device = 1;
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.device");
  desc.device = 0;
  desc.flags = 2;
  EXPECT_REFUSED(create(desc), KVF_ERR_INVALID_ARGUMENT, "desc.flags is 0x2");
  desc.flags = 0;
  desc.struct_size = 4;
  EXPECT_REFUSED(create(desc), KVF_ERR_ABI_MISMATCH, "desc.struct_size is 4");
  EXPECT_EQ(pool, kUntouched);

  desc.struct_size = sizeof desc;
  ASSERT_EQ(create(desc), KVF_OK);
  kvf_pool* twice = kUntouched;
  desc.base = memory + 4096;
  desc.bytes = 1;
  EXPECT_REFUSED(kvf_pool_register(agent.c(), &desc, &twice), KVF_ERR_DUPLICATE, "overlap pool");
  EXPECT_EQ(twice, kUntouched);
  EXPECT_EQ(kvf_pool_destroy(pool), KVF_OK);
  EXPECT_EQ(kvf_pool_register(agent.c(), &desc, &twice), KVF_OK) << "free again";
  EXPECT_EQ(kvf_pool_destroy(twice), KVF_OK);
}

TEST(Pool, FunctionsNameTheirBadArguments) {
  kvferry::Agent agent;
  kvferry::Pool pool = agent.host_pool(4096);
  uint64_t bytes = 7;
  EXPECT_REFUSED(kvf_pool_memory(pool.c(), nullptr, &bytes), KVF_ERR_INVALID_ARGUMENT,
                 "base is NULL");
  EXPECT_EQ(bytes, 7u);
  EXPECT_REFUSED(kvf_pool_id(pool.c(), nullptr), KVF_ERR_INVALID_ARGUMENT, "id is NULL");
  EXPECT_REFUSED(kvf_pool_query(pool.c(), nullptr), KVF_ERR_INVALID_ARGUMENT, "info is NULL");
  kvf_pool_info info = KVF_POOL_INFO_INIT;
  info.struct_size = 0;
  info.id = 99;
  EXPECT_REFUSED(kvf_pool_query(pool.c(), &info), KVF_ERR_ABI_MISMATCH, "info.struct_size is 0");
  EXPECT_EQ(info.id, 99u);
}

TEST(Pool, MemoryOfAPoolIsThereAndZero) {
  kvferry::Agent agent;
  for (uint64_t bytes : {uint64_t{1}, uint64_t{4096}, uint64_t{1000001}}) {
    kvferry::Pool pool = agent.host_pool(bytes);
    EXPECT_EQ(pool.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pool.data()) % 4096, 0u);
    for (uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(pool.data()[i], std::byte{0}) << i;
    pool.data()[bytes - 1] = std::byte{7};
  }
}

TEST(Pool, IdsDifferAndAreThoseOfTheQuery) {
  kvferry::Agent agent;
  kvferry::Pool first = agent.host_pool(4096), second = agent.host_pool(4096);
  EXPECT_NE(first.id(), second.id());
  EXPECT_EQ(first.query().id, first.id());
  EXPECT_EQ(first.query().status, KVF_ERR_BUSY) << "registered";
}

TEST(Pool, NumaNodeZeroHasItsOwnNumber) {
  kvferry::Agent agent;
  EXPECT_EQ(agent.host_pool(4096, KVF_NUMA_NODE_0).size(), 4096u);
  kvf_host_pool_config config = KVF_HOST_POOL_CONFIG_INIT;
  config.bytes = 4096;
  config.numa_node = 900;
  kvf_pool* pool = kUntouched;
  EXPECT_REFUSED(kvf_host_pool_create(agent.c(), &config, &pool), KVF_ERR_INVALID_ARGUMENT, "900");
  EXPECT_EQ(pool, kUntouched);
}

// Waits for the event that tells about a pool.
kvf_event released(kvferry::Agent& agent) {
  for (;;) {
    for (const kvf_event& event : agent.take_events()) {
      if (event.kind == KVF_EVENT_POOL_RELEASED) return event;
    }
    std::this_thread::sleep_for(1ms);
  }
}

class PoolOf : public testing::TestWithParam<MemoryKind> {};
INSTANTIATE_TEST_SUITE_P(Memory, PoolOf, testing::Values(MemoryKind::Pool, MemoryKind::Own),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(PoolOf, IsReleasedWhenItsLastUserHasEnded) {
  Side side("one", GetParam());
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  kvferry::Pool& pool = side.memory.pool();
  pool.unregister_begin(kLong);
  EXPECT_EQ(pool.query().status, KVF_IN_PROGRESS);
  EXPECT_REFUSED(kvf_pool_unregister_begin(pool.c(), 0), KVF_ERR_STATE, "already");
  try {
    side.agent.publish(kvferry::key(2), 0, std::vector<int32_t>{4}, 4);
    FAIL() << "a pool that is taken back serves nothing new";
  } catch (const kvferry::Error& error) {
    EXPECT_EQ(error.status(), KVF_ERR_STATE) << error.what();
  }
  publication.release();
  const kvf_event event = released(side.agent);
  EXPECT_EQ(event.status, KVF_OK);
  EXPECT_EQ(event.object, pool.id());
  EXPECT_EQ(pool.query().status, KVF_OK);
}

TEST_P(PoolOf, IsNotReleasedAtTheDeadlineWhileItIsUsed) {
  Side side("one", GetParam());
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  kvferry::Pool& pool = side.memory.pool();
  pool.unregister_begin(20ms);
  EXPECT_EQ(released(side.agent).status, KVF_ERR_DEADLINE);
  EXPECT_EQ(pool.query().status, KVF_ERR_BUSY) << "registered as before";
  auto second = side.agent.publish(kvferry::key(2), 0, std::vector<int32_t>{4}, 4);
  publication.release();
  second.release();
  pool.unregister_begin(kLong);
  EXPECT_EQ(released(side.agent).status, KVF_OK);
}

TEST_P(PoolOf, MayBeDestroyedWhileItIsUsed) {
  Side side("one", GetParam());
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  const uint32_t id = side.memory.pool().id();
  EXPECT_EQ(side.memory.pool().destroy(), KVF_IN_PROGRESS);
  publication.release();
  const kvf_event event = released(side.agent);
  EXPECT_EQ(event.status, KVF_OK);
  EXPECT_EQ(event.object, id);
}

}  // namespace
