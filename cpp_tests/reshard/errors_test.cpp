// What does not fit is refused through the C interface with one exact text: what is wrong, where,
// and both numbers. The planner's own table of errors is in tests/plan_errors.rs.
#include <functional>
#include <memory>

#include "side.hpp"

using namespace kvferry_test;

namespace {

using Groups = std::vector<kvferry::Group>;
using Change = std::function<void(Groups&)>;

constexpr std::uint32_t kSlots = 8, kTokens = 4, kHead = 32;

// Stage `pp` of a model with 4 attention heads and a convolution: group 0 has layers 2 pp and
// 2 pp + 1, group 1 layer 10 + pp.
Groups groups(const kvferry::Pool& pool, std::uint32_t tp, std::uint32_t tp_size, std::uint32_t pp) {
  const std::uint32_t heads = 4 / tp_size;
  kvferry::View key;
  key.role = KVF_ROLE_KEY;
  key.heads = heads;
  key.bytes_per_head = kHead;
  key.slots = kSlots;
  key.shards = tp_size;
  key.shard = tp;
  key.head_stride = kHead;
  key.token_stride = heads * kHead;
  key.layer_stride = kTokens * key.token_stride;
  key.slot_stride = 2 * key.layer_stride;
  key.tensors = {pool.at(0)};
  kvferry::View value = key;
  value.role = KVF_ROLE_VALUE;
  value.tensors = {pool.at(kSlots * key.slot_stride)};
  kvferry::Group paged;
  paged.tokens_per_block = kTokens;
  paged.layers = {2 * pp, 2 * pp + 1};
  paged.views = {key, value};

  kvferry::View conv;
  conv.role = KVF_ROLE_CONV;
  conv.sections = {{"x", 8}, {"B", 4}};
  conv.heads = 12 / tp_size;
  conv.bytes_per_head = 8;
  conv.slots = 2;
  conv.shards = tp_size;
  conv.shard = tp;
  conv.head_stride = 8;
  conv.slot_stride = conv.heads * 8;
  conv.tensors = {pool.at(2 * kSlots * key.slot_stride)};
  kvferry::Group state;
  state.kind = KVF_GROUP_STATE;
  state.layers = {10 + pp};
  state.views = {conv};
  return {paged, state};
}

constexpr std::uint64_t kPoolBytes = 2 * kSlots * 2 * kTokens * 4 * kHead + 2 * 12 * 8;

struct Rank {
  Rank(const kvferry::AgentConfig& config, std::uint32_t global, std::uint32_t dp)
      : agent(config), pool(agent.host_pool(kPoolBytes)) {
    at.global_rank = global;
    at.dp_rank = dp;
  }
  kvferry::Agent agent;
  kvferry::Pool pool;
  kvferry::Coordinates at;
};

// An engine of tp_size ranks in each of `stages` stages; the ranks exist, the engine is made by
// join().
struct Ranks {
  Ranks(const std::string& name, std::uint32_t tp_size, std::uint32_t stages, const Change& change,
        const std::string& fingerprint = "test", std::uint32_t dps = 1) {
    for (std::uint32_t i = 0; i < tp_size * stages * dps; ++i) {
      auto with = config(name + std::to_string(i));
      with.fingerprint = fingerprint;
      ranks.push_back(std::make_unique<Rank>(with, i, i / tp_size / stages));
      auto& rank = *ranks.back();
      auto of = groups(rank.pool, i % tp_size, tp_size, i / tp_size % stages);
      if (change) change(of);
      rank.agent.set_layout(of, rank.at);
    }
  }
  // Makes the engine of those ranks on one of them.
  kvf_status join(const std::vector<std::size_t>& members, std::size_t on = 0) {
    std::vector<kvferry::Bytes> metadata;
    for (std::size_t m : members) metadata.push_back(ranks[m]->agent.metadata());
    std::vector<kvf_bytes> all;
    for (const auto& m : metadata) all.push_back({m.data(), m.size()});
    kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
    desc.world = static_cast<std::uint32_t>(all.size());
    desc.ranks = all.data();
    desc.num_ranks = all.size();
    desc.rank = static_cast<std::uint32_t>(on);
    kvf_engine* made = nullptr;
    const auto status = kvf_engine_create(ranks[members[on]]->agent.c(), &desc, &made);
    if (status == KVF_OK) engine = kvferry::Engine(kvferry::Engine::Owner(made));
    return status;
  }
  void join() {
    std::vector<std::size_t> members(ranks.size());
    for (std::size_t i = 0; i < members.size(); ++i) members[i] = i;
    for (std::size_t i : members) kvferry::check(join(members, i));
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  kvferry::Engine engine;
};

void expect(kvf_status got, kvf_status status, const std::string& text) {
  EXPECT_STREQ(kvf_status_name(got), kvf_status_name(status)) << kvferry::last_error();
  EXPECT_EQ(kvferry::last_error(), text);
}

// How texts about two engines begin.
#define FITS "the peer engine (source) and this one (destination): "

// Group 0's views, of every rank.
Change views(const std::function<void(kvferry::View&)>& change) {
  return [change](Groups& g) {
    for (auto& view : g[0].views) change(view);
  };
}

TEST(GoldenErrors, Layouts) {
  struct Case {
    const char* text;
    kvf_status status;
    Change change;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  const Case cases[] = {
      {"group 0: a paged group has 0 tokens per block; at least 1 is needed", argument,
       [](Groups& g) { g[0].tokens_per_block = 0; }},
      {"group 0: layer 1 is listed twice", KVF_ERR_DUPLICATE, [](Groups& g) { g[0].layers = {1, 1}; }},
      {"group 0: ordinals start at 2 with stride 2; the offset must be below the stride (all "
       "blocks: 0 and 1)",
       argument,
       [](Groups& g) {
         g[0].ordinal_offset = 2;
         g[0].ordinal_stride = 2;
       }},
      {"group 1: a state group has ordinals with stride 2; a state is one slot and belongs to "
       "ordinal 0",
       argument, [](Groups& g) { g[1].ordinal_stride = 2; }},
      {"group 0: 2 layers but no view; a group with layers has at least one", argument,
       [](Groups& g) { g[0].views.clear(); }},
      {"group 0: two views have the role key", KVF_ERR_DUPLICATE,
       [](Groups& g) { g[0].views[1].role = KVF_ROLE_KEY; }},
      {"group 0, view value: heads is 0; at least 1 is needed", argument,
       [](Groups& g) { g[0].views[1].heads = 0; }},
      {"group 0, view key: elements have 3 bits; 4 to 32 are known", argument,
       [](Groups& g) { g[0].views[0].element_bits = 3; }},
      {"group 0, view key: shard 2 of 2; the index must be below the count", argument,
       [](Groups& g) { g[0].views[0].shard = 2; }},
      {"group 0, view key: replica 3 of 2; the index must be below the count", argument,
       [](Groups& g) {
         g[0].views[0].replicas = 2;
         g[0].views[0].replica = 3;
       }},
      {"group 0, view key: 3 tensors for 2 layers; one for all or one per layer is needed",
       argument, [](Groups& g) { g[0].views[0].tensors.resize(3, g[0].views[0].tensors[0]); }},
      {"group 1, view conv: section B has 5 channels, which 2 shards do not divide", argument,
       [](Groups& g) { g[1].views[0].sections[1].total = 5; }},
      {"group 1, view conv: heads is 6 but the sections give 8 channels for each of 2 shards",
       argument, [](Groups& g) { g[1].views[0].sections[1].total = 8; }},
      {"group 0, view key: the token stride is 63 bytes but what lies inside it (up to the head) "
       "takes 64; 4 tokens would overlap",
       argument, [](Groups& g) { g[0].views[0].token_stride = 63; }},
      {"group 0, view key (from byte 0) and group 0, view value (from byte 64) share bytes in pool "
       "1",
       argument, [](Groups& g) { g[0].views[1].tensors[0].offset = 64; }},
      {"group 0, view key: layer 0: needs bytes 0..511744 of pool 1, which has 16576", KVF_ERR_OUT_OF_RANGE, [](Groups& g) { g[0].views[0].slots = 1000; }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Rank rank(config("rank"), 0, 0);
    auto of = groups(rank.pool, 0, 2, 0);
    c.change(of);
    const kvferry::Layout layout(of, rank.at);
    expect(kvf_agent_set_layout(rank.agent.c(), layout.c()), c.status, c.text);
  }
}

TEST(GoldenErrors, EnginesThatLackARank) {
  struct Case {
    const char* text;
    kvf_status status;
    std::uint32_t tp, pp, dps;
    std::vector<std::size_t> members;
    Change change;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  int calls = 0;
  const auto second = [&calls](const Change& change) {
    return [&calls, change](Groups& g) {
      if (++calls % 2 == 0) change(g);
    };
  };
  const Case cases[] = {
      {"the engine is incomplete: no rank of dp index 0 holds heads 2..4 (shard 1) of "
       "layers 0..2 (group 0, view key); 3 more gaps", argument, 2, 1, 1, {0}, nullptr},
      {"the engine is incomplete: no rank of dp index 0 holds heads 2..4 (shard 1) of "
       "layers 2..4 (group 0, view key); 3 more gaps", argument, 2, 2, 1, {0, 1, 2}, nullptr},
      {"the engine is incomplete: no rank of dp index 1 holds heads 0..4 (shard 0) of "
       "layers 2..4 (group 0, view key); 3 more gaps", argument, 1, 2, 2, {0, 1, 2}, nullptr},
      {"the engine is incomplete: no rank of dp index 0 holds heads 0..4 (shard 0) of "
       "layers 0..2 (group 0, view key, block ordinals 1, 3, ...); 1 more gaps", argument, 1, 1, 1, {0}, [](Groups& g) { g[0].ordinal_stride = 2; }},
      {"group 0, view key, layer 0, shard 0 of 1: rank 0 says there are 2 replicas, "
       "but no rank is replica 1", argument, 1, 1, 1, {0}, views([](kvferry::View& v) { v.replicas = 2; })},
      {"two ranks of one engine contradict each other: group 0, view key: element "
       "bits: rank 0 has 16, rank 1 has 8; they must be equal", argument, 2, 1, 1, {0, 1},
       second(views([](kvferry::View& v) { v.element_bits = 8; }))},
      {"two ranks of one engine contradict each other: group 0: tokens per block: rank "
       "0 has 4, rank 1 has 2; they must be equal", argument, 2, 1, 1, {0, 1}, second([](Groups& g) { g[0].tokens_per_block = 2; })},
      {"rank 0 lists 2 groups and rank 1 lists 1; a rank without layers of a group "
       "lists it empty", argument, 2, 1, 1, {0, 1}, second([](Groups& g) { g.pop_back(); })},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    calls = 0;
    Ranks ranks("r", c.tp, c.pp, c.change, "test", c.dps);
    expect(ranks.join(c.members), c.status, c.text);
  }
}

TEST(GoldenErrors, PairsThatDoNotFit) {
  struct Case {
    const char* text;
    std::uint32_t tp, pp;
    Change change;
    const char* fingerprint = "test";
  };
  const Case cases[] = {
      {FITS "fingerprint: source model B, destination test; they must be equal", 1, 2, nullptr, "model B"},
      {FITS "group 0, view key: element bits: source 8, destination 16; they must be equal", 1, 2, views([](kvferry::View& v) { v.element_bits = 8; })},
      {FITS "group 0, view key: bytes per head: source 16, destination 32; they must be "
       "equal", 1, 2, views([](kvferry::View& v) { v.bytes_per_head = 16; })},
      {FITS "group 0, view key: total heads: source 2, destination 4; they must be equal", 1, 2, views([](kvferry::View& v) { v.heads = 2; })},
      {FITS "group 0, view key: total heads: source 2, destination 4; they must be equal", 2, 2, views([](kvferry::View& v) { v.heads = 1; })},
      {FITS "group 0: layers: source 0..2, destination 0..4; the source lacks 2..4, the "
       "destination lacks nothing: is a pipeline stage missing?", 1, 1, nullptr},
      {FITS "group 0: layers: source 0..6, destination 0..4; the source lacks nothing, the "
       "destination lacks 4..6: is a pipeline stage missing?", 1, 3, nullptr},
      {FITS "group 0: view roles: source key, destination key value; they must be equal", 1, 2, [](Groups& g) { g[0].views.pop_back(); }},
      {FITS "group 0: view roles: source key latent, destination key value; they must be "
       "equal", 1, 2, [](Groups& g) { g[0].views[1].role = KVF_ROLE_LATENT; }},
      {FITS "number of layer groups: source 1, destination 2; they must be equal", 1, 2, [](Groups& g) { g.pop_back(); }},
      {FITS "group 1: kind: source paged, destination state; they must be equal", 1, 2,
       [](Groups& g) {
         g[1].kind = KVF_GROUP_PAGED;
         g[1].tokens_per_block = 1;
         g[1].views[0].token_stride = g[1].views[0].slot_stride;
       }},
      {"group 0: tokens per block: source 3, destination 4; one must divide the other", 1, 2, [](Groups& g) { g[0].tokens_per_block = 3; }},
      {FITS "group 1, view conv: sections: source C:4 x:8, destination B:4 x:8; they must "
       "be equal", 1, 2, [](Groups& g) { g[1].views[0].sections[1].name = "C"; }},
      {FITS "group 1, view conv: sections: source B:8 x:4, destination B:4 x:8; they must "
       "be equal", 1, 2, [](Groups& g) { g[1].views[0].sections = {{"x", 4}, {"B", 8}}; }},
  };
  Ranks here("here", 2, 2, nullptr);
  here.join();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Ranks there("there", c.tp, c.pp, c.change, c.fingerprint);
    there.join();
    const auto metadata = there.engine.metadata();
    kvf_peer* out = reinterpret_cast<kvf_peer*>(0x1234);
    expect(kvf_peer_add(here.ranks[0]->agent.c(), metadata.data(), metadata.size(), 0, &out),
           KVF_ERR_INCOMPATIBLE, c.text);
    EXPECT_EQ(out, reinterpret_cast<kvf_peer*>(0x1234));
  }
}

// A window may be narrower at the destination, and then goes one way only.
TEST(GoldenErrors, AWindowGoesOneWay) {
  Ranks wide("wide", 1, 1, [](Groups& g) { g[0].window = 12; });
  Ranks narrow("narrow", 1, 1, [](Groups& g) { g[0].window = 8; });
  wide.join();
  narrow.join();
  auto into_narrow = narrow.ranks[0]->agent.add_peer(wide.engine.metadata());
  EXPECT_EQ(into_narrow.wait(kLong), KVF_OK);
  auto into_wide = wide.ranks[0]->agent.add_peer(narrow.engine.metadata());
  EXPECT_EQ(into_wide.wait(kLong), KVF_OK) << "for pushes";
  auto publication = narrow.ranks[0]->agent.publish(kvferry::key(1), 0, std::vector<int32_t>{1}, 4);
  try {
    (void)wide.ranks[0]->agent.pull_begin(into_wide, publication.ticket(), 0, std::vector<int32_t>{1});
    FAIL();
  } catch (const kvferry::Error& error) {
    expect(error.status(), KVF_ERR_INCOMPATIBLE,
           "group 0: window: source 8, destination 12; the source keeps fewer live tokens than the "
           "destination needs");
  }
}

TEST(GoldenErrors, TablesAndRanges) {
  Ranks from("from", 2, 1, nullptr), to("to", 1, 1, nullptr);
  from.join();
  to.join();
  auto& agent = to.ranks[0]->agent;
  auto peer = agent.add_peer(from.engine.metadata());
  ASSERT_EQ(peer.wait(kLong), KVF_OK);
  struct Case {
    const char* text;
    kvf_status status;
    std::vector<std::int32_t> slots;
    std::uint64_t skip, end;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT, range = KVF_ERR_OUT_OF_RANGE;
  const Case cases[] = {
      {"group 0: destination rank 0: the table has 2 entries; owned block ordinals 0..3 need exactly 3", argument, {1, 2}, 0, 12},
      {"group 0: destination rank 0: the table has 4 entries; owned block ordinals 0..3 need exactly 3", argument, {1, 2, 3, 4}, 0, 12},
      {"group 0: destination table entry 1 (block ordinal 1) is -1, but its tokens are to be moved", argument, {1, -1, 3}, 0, 12},
      {"group 0: source table entry 3 (block ordinal 3) is -1, but its tokens are to be moved", argument, {1, 2, 3, 4}, 0, 16},
      {"group 0: destination rank 0: entries 0 and 2 of the table are both slot 1", KVF_ERR_DUPLICATE, {1, 2, 1}, 0, 12},
      {"slot 8 of group 0, which has 8 slots", range, {1, 2, 8}, 0, 12},
      {"group 0: skip_token 3 is not a multiple of the destination's 4 tokens per block", argument, {1, 2, 3}, 3, 12},
      {"group 0: cannot skip 16 of 12 tokens", range, {1, 2, 3}, 16, 12},
      {"group 0: cannot skip 20 of 16 tokens", range, {1, 2, 3, 4}, 20, KVF_TOKEN_END_ALL},
      {"group 0: tokens 0..20 are wanted, source rank 0 published 0..16", range, {1, 2, 3, 4, 5}, 0, 20},
  };
  const std::vector<std::int32_t> source{4, 5, 6, -1};
  auto publication = from.ranks[0]->agent.publish(kvferry::key(7), 0, source, 16);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    const auto ticket = publication.ticket();
    kvf_pull_desc desc = KVF_PULL_DESC_INIT;
    desc.peer = peer.c();
    desc.ticket = ticket.data();
    desc.ticket_bytes = ticket.size();
    desc.slots = c.slots.data();
    desc.num_slots = c.slots.size();
    desc.skip_token = c.skip;
    desc.token_end = c.end;
    kvf_transfer* out = nullptr;
    expect(kvf_pull_begin(agent.c(), &desc, &out), c.status, c.text);
    EXPECT_EQ(out, nullptr);
  }
}

}  // namespace
