// The matrix of handoffs: no, a partial and a full prefix hit, without and with recurrent state,
// from one source rank and from two pipeline stages, pulled and pushed. For each: what was
// submitted, what was moved, every byte of the destination, and that each source was released.
#include "ranks.hpp"
#include "times.hpp"

using namespace handoff;

namespace {

enum class Hit { none, partial, full };
enum class Way { pull, push };

struct Case {
  Way way;
  Hit hit;
  bool state;
  std::uint32_t stages;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  const char* hit[] = {"NoHit", "PartialHit", "FullHit"};
  return std::string(c.way == Way::pull ? "Pull" : "Push") + "_" + hit[static_cast<int>(c.hit)] +
         (c.state ? "_State" : "_NoState") + (c.stages == 1 ? "_Flat" : "_PerStage");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Way way : {Way::pull, Way::push}) {
    for (Hit hit : {Hit::none, Hit::partial, Hit::full}) {
      for (bool state : {false, true}) {
        for (std::uint32_t stages : {1u, 2u}) all.push_back({way, hit, state, stages});
      }
    }
  }
  return all;
}

constexpr std::uint64_t kPrompt = 12;                  // tokens: 3 whole blocks
const std::vector<std::int32_t> kFrom = {7, 2, 11};    // the source's blocks
const std::vector<std::int32_t> kTo = {4, 9, 1};       // cached and imported ones
const std::vector<std::int32_t> kContinuation = {10};  // for the first decode steps
constexpr std::int32_t kStateFrom = 3, kStateTo = 1;
constexpr std::uint32_t kSeed = 7;

class Matrix : public ::testing::TestWithParam<Case> {
 protected:
  std::uint64_t skip() const {
    switch (GetParam().hit) {
      case Hit::none: return 0;
      case Hit::partial: return 8;
      default: return kPrompt;
    }
  }
  std::size_t blocks_moved() const { return (kPrompt - skip()) / Model::tokens; }

  // A transfer to us, and what ends the sources' side of it.
  kvferry::Transfer begin(Rank& here, const kvferry::Peer& peer, RemoteEngine& source) {
    const std::vector<kvf_import_group> groups = {kvferry::wanted(0, kTo, skip(), kPrompt)};
    std::vector<kvf_import_state> states;
    if (GetParam().state) states = {{1, kStateTo, kPrompt}, {2, kStateTo, kPrompt}};
    std::vector<kvf_slot_ref> owned;
    for (auto slot : kContinuation) owned.push_back({0, slot});
    const std::string what = std::to_string(kPrompt) + " " + list(kFrom) + " " +
                             std::to_string(GetParam().state ? kStateFrom : -1) + " ";
    if (GetParam().way == Way::push) {
      kvferry::Receive receive;
      receive.key = kvferry::key(1);
      receive.groups = groups;
      receive.states = states;
      receive.owned_only = owned;
      auto transfer = here.agent.receive_begin(receive);
      const auto offer = to_hex(transfer.offer());
      source.all("push here " + offer + " " + what + "20000", "0");
      return transfer;
    }
    std::string ticket;  // one rank's ticket is enough: the others are asked
    for (auto& rank : source.ranks) {
      const auto answer = rank->ask("publish 1 " + what + "20000 20000");
      if (ticket.empty()) ticket = answer;
    }
    kvferry::Import import;
    import.groups = groups;
    import.states = states;
    import.owned_only = owned;
    return here.agent.import_begin(peer, from_hex(ticket), import);
  }

  void hand_over(std::uint32_t head_bytes) {
    SCOPED_TRACE(std::to_string(head_bytes) + " bytes per head");
    Model model;
    model.head_bytes = head_bytes;
    model.state = GetParam().state;
    RemoteEngine source("source", model, GetParam().stages);
    source.all("fill " + std::to_string(kSeed), "ok");
    model.block_major = true;  // another order of the same bytes
    Rank here(configure("here", "usual"), model);
    here.fill(99);
    auto image = here.snapshot();
    auto peer = here.agent.add_peer(from_hex(source.metadata));
    ASSERT_EQ(peer.wait(20s), KVF_OK) << peer.text();
    source.all("peer here " + to_hex(here.engine.metadata()), "KVF_OK");

    auto transfer = begin(here, peer, source);
    ASSERT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();

    // What was submitted: the blocks if any are missing, each state whatever the blocks need.
    const auto info = transfer.query();
    EXPECT_EQ(info.submitted, (blocks_moved() > 0 ? 1u : 0u) + (model.state ? 2u : 0u));
    EXPECT_EQ(info.memory_safe, 1u);
    ASSERT_EQ(info.parts.size(), model.state ? 3u : 1u);
    const std::uint64_t block = 3 * 2 * model.block_bytes();  // layers, views
    EXPECT_EQ(info.parts[0].bytes, blocks_moved() * block);
    EXPECT_EQ(info.parts[0].kind, static_cast<std::uint32_t>(KVF_GROUP_PAGED));
    EXPECT_EQ(info.parts[0].state, static_cast<std::uint32_t>(
                                       blocks_moved() > 0 ? KVF_PART_DONE : KVF_PART_NOT_NEEDED));
    std::uint64_t bytes = info.parts[0].bytes;
    for (std::size_t part = 1; part < info.parts.size(); ++part) {
      const auto& view = here.views()[part + 1];
      EXPECT_EQ(info.parts[part].bytes, view.bytes * view.layers.size());
      EXPECT_EQ(info.parts[part].kind, static_cast<std::uint32_t>(KVF_GROUP_STATE));
      EXPECT_EQ(info.parts[part].state, static_cast<std::uint32_t>(KVF_PART_DONE));
      EXPECT_EQ(info.parts[part].cause, KVF_OK);
      bytes += info.parts[part].bytes;
    }
    EXPECT_EQ(info.bytes, bytes);
    EXPECT_EQ(info.bytes_total, bytes);

    // Every byte: cached, continuation and foreign blocks as before, the others as the source's.
    for (std::size_t i = skip() / Model::tokens; i < kTo.size(); ++i) {
      for (std::uint32_t view : {kKey, kValue}) {
        here.write(image.data(), kSeed, view, static_cast<std::uint32_t>(kFrom[i]),
                   static_cast<std::uint32_t>(kTo[i]));
      }
    }
    if (model.state) {
      for (std::uint32_t view : {kConv, kRecurrent}) {
        here.write(image.data(), kSeed, view, kStateFrom, kStateTo);
      }
    }
    EXPECT_EQ(here.differs(image), "");

    // Every source is released, whatever was moved.
    if (GetParam().way == Way::pull) {
      source.all("published 1 20000", "KVF_OK");
    } else {
      source.all("wait 0 20000", "KVF_OK safe");
    }
  }
};

TEST_P(Matrix, Lesson25_HandsOver) {
  hand_over(32);    // copied inside the call where that is possible
  hand_over(2048);  // by kvferry's threads
}

INSTANTIATE_TEST_SUITE_P(Handoff, Matrix, ::testing::ValuesIn(cases()), case_name);

}  // namespace
