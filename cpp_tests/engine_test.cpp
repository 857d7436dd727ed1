// kvf_engine: how ranks find together.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "side.hpp"

using namespace kvferry_test;

namespace {

kvf_engine* const kUntouched = reinterpret_cast<kvf_engine*>(0x1234);

// Rank `rank` of two, each with two of four heads; the second has the longer metadata.
struct Rank {
  explicit Rank(uint32_t rank)
      : agent(config(rank == 0 ? "zero" : "the-rank-with-the-long-name")),
        pool(agent.host_pool(Cache::bytes)) {
    auto groups = Cache::groups(pool);
    groups.pop_back();  // the state is not sharded here
    for (auto& view : groups[0].views) {
      view.shards = 2;
      view.shard = rank;
    }
    kvferry::Coordinates at;
    at.global_rank = at.tp_rank = rank;
    at.tp_size = 2;
    agent.set_layout(groups, at);
  }
  kvferry::Agent agent;
  kvferry::Pool pool;
};

// An all-gather over threads of this process.
class Gather {
 public:
  explicit Gather(size_t world) : parts_(world) {}

  void run(size_t rank, const void* mine, void* all, size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto* first = static_cast<const uint8_t*>(mine);
    parts_[rank].assign(first, first + bytes);
    const size_t round = round_;
    if (++arrived_ == parts_.size()) {
      whole_.clear();
      for (const auto& part : parts_) whole_.insert(whole_.end(), part.begin(), part.end());
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    std::memcpy(all, whole_.data(), whole_.size());
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<kvferry::Bytes> parts_;
  kvferry::Bytes whole_;
  size_t arrived_ = 0, round_ = 0;
};

TEST(Engine, EveryBadDescriptionIsRefused) {
  Rank zero(0), one(1);
  const kvferry::Bytes first = zero.agent.metadata(), second = one.agent.metadata();
  kvf_engine* out = kUntouched;
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    kvf_bytes ranks[2] = {{first.data(), first.size()}, {second.data(), second.size()}};
    kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
    desc.world = 2;
    desc.ranks = ranks;
    desc.num_ranks = 2;
    change(desc, ranks);
    EXPECT_REFUSED(kvf_engine_create(zero.agent.c(), &desc, &out), with, saying);
    EXPECT_EQ(out, kUntouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  refused(KVF_ERR_ABI_MISMATCH, "desc.struct_size", [](auto& d, auto) { d.struct_size = 0; });
  refused(KVF_ERR_ABI_MISMATCH, "elem_size of desc.ranks is 0",
          [](auto& d, auto) { d.ranks_elem_size = 0; });
  refused(argument, "desc.reserved", [](auto& d, auto) { d.reserved = 1; });
  refused(KVF_ERR_OUT_OF_RANGE, "desc.rank is 2 of 2", [](auto& d, auto) { d.rank = 2; });
  refused(KVF_ERR_OUT_OF_RANGE, "desc.world is", [](auto& d, auto) { d.world = 1u << 30; });
  refused(argument, "2 elements for 3 ranks", [](auto& d, auto) { d.world = 3; });
  refused(argument, "0 elements for 2 ranks", [](auto& d, auto) { d.num_ranks = 0; });
  refused(argument, "desc.ranks is NULL", [](auto& d, auto) { d.ranks = nullptr; });
  refused(argument, "desc.ranks[1] is NULL", [](auto&, auto r) { r[1].data = nullptr; });
  refused(argument, "desc.ranks[0] has 0 bytes", [](auto&, auto r) { r[0].bytes = 0; });
  refused(argument, "metadata", [](auto&, auto r) { r[1].bytes -= 1; });
  refused(argument, "both exchange and ranks", [](auto& d, auto) {
    d.exchange = [](void*, const void*, void*, size_t) -> int32_t { return 0; };
  });
  refused(KVF_ERR_DUPLICATE, "rank", [](auto&, auto r) { r[1] = r[0]; });

  kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
  EXPECT_REFUSED(kvf_engine_create(zero.agent.c(), nullptr, &out), argument, "desc is NULL");
  EXPECT_REFUSED(kvf_engine_create(zero.agent.c(), &desc, nullptr), argument, "engine is NULL");
  // Alone it has half of the heads.
  EXPECT_REFUSED(kvf_engine_create(zero.agent.c(), &desc, &out), argument, "holds heads 2..4");
  kvferry::Agent bare;
  EXPECT_REFUSED(kvf_engine_create(bare.c(), &desc, &out), KVF_ERR_STATE, "kvf_agent_set_layout");
  EXPECT_REFUSED(kvf_peer_add(zero.agent.c(), first.data(), first.size(), 0,
                              reinterpret_cast<kvf_peer**>(&out)),
                 KVF_ERR_STATE, "engine");
  EXPECT_EQ(out, kUntouched);
}

TEST(Engine, OwnMetadataMustBeAmongTheRanks) {
  Rank zero(0), one(1), stranger(0);
  try {
    stranger.agent.engine(0, {zero.agent.metadata(), one.agent.metadata()});
    FAIL();
  } catch (const kvferry::Error& error) {
    EXPECT_EQ(error.status(), KVF_ERR_INVALID_ARGUMENT) << error.what();
  }
}

TEST(Engine, RanksGivenMakeTheSameEngineOnEveryRank) {
  Rank zero(0), one(1);
  const std::vector<kvferry::Bytes> ranks{zero.agent.metadata(), one.agent.metadata()};
  const auto first = zero.agent.engine(0, ranks), second = one.agent.engine(1, ranks);
  EXPECT_EQ(first.metadata(), second.metadata());

  kvf_engine* out = kUntouched;
  kvf_bytes given[2] = {{ranks[0].data(), ranks[0].size()}, {ranks[1].data(), ranks[1].size()}};
  kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
  desc.world = 2;
  desc.ranks = given;
  desc.num_ranks = 2;
  EXPECT_REFUSED(kvf_engine_create(zero.agent.c(), &desc, &out), KVF_ERR_STATE, "once");
  EXPECT_EQ(out, kUntouched);
}

TEST(Engine, RanksFindTogetherThroughTheExchange) {
  Rank ranks[2] = {Rank(0), Rank(1)};
  Gather gather(2);
  kvferry::Bytes metadata[2];
  std::vector<size_t> sizes[2];
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto& agent = ranks[rank].agent;
      const auto engine =
          agent.engine(2, rank, [&](const void* mine, void* all, size_t bytes) {
            sizes[rank].push_back(bytes);
            EXPECT_EQ(kvf_agent_drain(agent.c(), 0), KVF_ERR_REENTRANT);
            gather.run(rank, mine, all, bytes);
          });
      metadata[rank] = engine.metadata();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(metadata[0].empty());
  EXPECT_EQ(metadata[0], metadata[1]);
  const std::vector<size_t> promised{8, ranks[1].agent.metadata().size()};
  EXPECT_EQ(sizes[0], promised) << "equal contributions, padded to the longest";
  EXPECT_EQ(sizes[1], promised);
}

TEST(Engine, AFailedExchangeFailsTheCallAndCanBeRepeated) {
  Side side("one");
  Rank rank(0);
  kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
  desc.world = 2;
  desc.exchange = [](void*, const void*, void*, size_t) -> int32_t { return 42; };
  kvf_engine* out = kUntouched;
  EXPECT_REFUSED(kvf_engine_create(rank.agent.c(), &desc, &out), KVF_ERR_GROUP_LOST, "42");
  desc.exchange = [](void*, const void*, void* all, size_t bytes) -> int32_t {
    std::memset(all, 0, 2 * bytes);
    return 0;
  };
  EXPECT_REFUSED(kvf_engine_create(rank.agent.c(), &desc, &out), KVF_ERR_PROTOCOL, "rank 0");
  EXPECT_EQ(out, kUntouched);

  struct Thrown {};
  EXPECT_THROW(rank.agent.engine(2, 0, [](const void*, void*, size_t) { throw Thrown(); }), Thrown);

  Rank one(1);
  const std::vector<kvferry::Bytes> both{rank.agent.metadata(), one.agent.metadata()};
  EXPECT_FALSE(rank.agent.engine(0, both).metadata().empty());
}

TEST(Engine, MetadataIsGivenWholeOrNotAtAll) {
  Side side("one");
  const kvferry::Bytes whole = side.engine.metadata();
  kvferry::Bytes buf(whole.size(), 0xee);
  size_t needed = 0;
  EXPECT_REFUSED(kvf_engine_metadata(side.engine.c(), buf.data(), 1, &needed),
                 KVF_ERR_OUT_OF_RANGE, "buf has 1 bytes");
  EXPECT_EQ(needed, whole.size());
  EXPECT_EQ(buf, kvferry::Bytes(whole.size(), 0xee));
  EXPECT_REFUSED(kvf_engine_metadata(side.engine.c(), nullptr, 1, nullptr),
                 KVF_ERR_INVALID_ARGUMENT, "buf is NULL");
  // The engine's handle may go: the agent stays what it is.
  EXPECT_EQ(side.engine.destroy(), KVF_OK);
  Side other("two");
  EXPECT_EQ(side.agent.add_peer(other.engine.metadata()).wait(kLong), KVF_OK);
}

}  // namespace
