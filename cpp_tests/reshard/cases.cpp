// The table of shapes. The first part follows the published transceiver tests (their grids, layers,
// heads and prompt lengths); the second has what only the layout language can say.
#include <algorithm>

#include "shape.hpp"

namespace reshard {
namespace {

using Stages = std::vector<std::vector<std::uint32_t>>;

std::vector<std::uint32_t> layers(std::uint32_t n, std::uint32_t from = 0, std::uint32_t step = 1) {
  std::vector<std::uint32_t> all;
  for (std::uint32_t i = 0; i < n; ++i) all.push_back(from + i * step);
  return all;
}
// Stages of these many layers each.
Stages uneven(const std::vector<std::uint32_t>& counts) {
  Stages stages;
  std::uint32_t at = 0;
  for (std::uint32_t n : counts) {
    stages.push_back(layers(n, at));
    at += n;
  }
  return stages;
}
Stages even(std::uint32_t n, std::uint32_t stages = 1) {
  return uneven(std::vector<std::uint32_t>(stages, n / stages));
}
// Layers dealt to the stages by turns.
Stages dealt(std::uint32_t n, std::uint32_t stages) {
  Stages all;
  for (std::uint32_t s = 0; s < stages; ++s) all.push_back(layers(n / stages, s, stages));
  return all;
}
Stages backwards(Stages stages) {
  for (auto& stage : stages) std::reverse(stage.begin(), stage.end());
  return stages;
}

std::vector<Role> kv(std::uint32_t heads, std::uint32_t bytes, std::uint32_t bits) {
  return {{KVF_ROLE_KEY, bits, heads, bytes, {}}, {KVF_ROLE_VALUE, bits, heads, bytes, {}}};
}
std::vector<Role> fp8_with_scale(std::uint32_t heads) {
  auto roles = kv(heads, 16, 8);
  roles.push_back({KVF_ROLE_SCALE, 32, heads, 4, {}});
  return roles;
}
std::vector<Role> fp4_with_scale(std::uint32_t heads) {
  auto roles = kv(heads, 12, 4);
  roles.push_back({KVF_ROLE_SCALE, 8, heads, 3, {}});
  return roles;
}
const std::vector<Role> latent = {{KVF_ROLE_LATENT, 16, 1, 36, {}}};
const std::vector<Role> latent_with_index = {{KVF_ROLE_LATENT, 16, 1, 36, {}},
                                             {KVF_ROLE_INDEX_KEY, 8, 1, 13, {}}};
// Mamba-2: convolution channels packed as x | B | C, and the recurrent state.
const std::vector<Role> mamba = {
    {KVF_ROLE_CONV, 16, 0, 8, {{"x", 16}, {"B", 8}, {"C", 8}}},
    {KVF_ROLE_RECURRENT, 32, 8, 40, {}}};

Group paged(std::vector<std::uint32_t> of, std::vector<Role> roles, std::uint32_t src_window = 0,
            std::uint32_t dst_window = 0) {
  Group group;
  group.layers = std::move(of);
  group.roles = std::move(roles);
  group.window[0] = src_window;
  group.window[1] = dst_window;
  return group;
}
Group window(std::vector<std::uint32_t> of, std::vector<Role> roles, std::uint32_t tokens) {
  return paged(std::move(of), std::move(roles), tokens, tokens);
}
Group state(std::vector<std::uint32_t> of, std::vector<Role> roles) {
  Group group = paged(std::move(of), std::move(roles));
  group.state = true;
  return group;
}

// Changes to a side, read from left to right.
struct S : Side {
  S(std::uint32_t tensor_parallel, Stages of) {
    tp = tensor_parallel;
    stages = std::move(of);
  }
  S& block(std::uint32_t tokens) { return tokens_per_block = tokens, *this; }
  S& as(Form f) { return form = f, *this; }
  S& context(std::uint32_t n) { return cp = n, *this; }
  S& data(std::uint32_t n) { return dp = n, *this; }
  S& own() { return own_memory = true, *this; }
  S& live() { return live_tables = true, *this; }
  S& sections_turned() { return sections_backwards = true, *this; }
};

// The published cases' prompts, and every length that has failed somewhere.
const std::vector<Request> published = {{30}, {10}, {60}, {80}};
const std::vector<Request> published_dp = {{60}, {30}, {60}, {10}};
const std::vector<Request> lengths = {{1},  {7},  {8},  {9},  {10}, {20}, {23},
                                      {24}, {25}, {30}, {32}, {33}, {60}, {80}};
// Prefix hits: none, one block, all but the tail, everything.
const std::vector<Request> skips = {{80, 0}, {80, 32}, {73, 64}, {64, 64}, {25, 0}, {33, 32}};
// The destination wants less than there is.
const std::vector<Request> partial = {{80, 0, 41}, {64, 32, 33}, {33, 0, 32}, {60, 0, 1}};

constexpr auto alone = Place::alone;
constexpr auto sides = Place::sides;
constexpr auto together = Place::together;

std::vector<Shape> make() {
  std::vector<Shape> all;
  const auto add = [&](std::string name, std::vector<Group> groups, Side src, Side dst,
                       std::vector<Request> requests, Place place, bool push = false) {
    all.push_back({std::move(name), std::move(groups), {std::move(src), std::move(dst)},
                   std::move(requests), place, push});
  };

  // {1,2} x {1,2} -> {1,2} x {1,2}: 4 layers, 4 heads, FP32 and INT8 by turns.
  for (std::uint32_t i = 0; i < 16; ++i) {
    const std::uint32_t stp = 1 + (i >> 3 & 1), spp = 1 + (i >> 2 & 1), dtp = 1 + (i >> 1 & 1),
                        dpp = 1 + (i & 1);
    const bool fp32 = (stp + spp + dtp + dpp) % 2 == 0;
    const auto tag = [](std::uint32_t tp, std::uint32_t pp) {
      return "Tp" + std::to_string(tp) + "Pp" + std::to_string(pp);
    };
    add("Grid" + tag(stp, spp) + "To" + tag(dtp, dpp),
        {paged(layers(4), fp32 ? kv(4, 16, 32) : kv(4, 4, 8))}, S(stp, even(4, spp)),
        S(dtp, even(4, dpp)), published, i % 4 == 3 ? alone : i % 4 == 1 ? together : sides);
  }
  add("WindowTp1ToTp1", {paged(layers(3, 0, 2), kv(4, 16, 32)), window(layers(2, 1, 2), kv(4, 16, 32), 32)},
      S(1, even(5)), S(1, even(5)), published, alone);
  add("WindowTp4ToPp4", {paged(layers(4, 0, 2), kv(4, 8, 8)), window(layers(4, 1, 2), kv(4, 8, 8), 24)},
      S(4, even(8)).as(Form::trtllm), S(1, even(8, 4)).as(Form::trtllm), published, alone);
  add("UnevenPp4ToPp4", {paged(layers(10), kv(4, 8, 16))}, S(1, uneven({3, 3, 2, 2})),
      S(1, uneven({3, 3, 2, 2})), published, alone);
  add("UnevenTp4ToPp4", {paged(layers(10), kv(4, 8, 16))}, S(4, even(10)),
      S(1, uneven({3, 3, 2, 2})), published, alone);
  add("SixteenHeadsPp2ToPp1", {paged(layers(16), kv(16, 4, 16))}, S(1, even(16, 2)), S(1, even(16)),
      published, alone);
  add("SixteenHeadsPp2ToPp4", {paged(layers(16), kv(16, 4, 16))}, S(1, even(16, 2)),
      S(1, even(16, 4)), published, alone);

  add("MlaTp2ToTp1", {paged(layers(4), latent)}, S(2, even(4)), S(1, even(4)), published, alone);
  add("MlaTp1ToTp2", {paged(layers(4), latent)}, S(1, even(4)), S(2, even(4)), published, sides);
  add("MlaTp4Pp2ToTp2Pp2", {paged(layers(4), latent)}, S(4, even(4, 2)), S(2, even(4, 2)),
      published, sides);
  add("MlaTp2Pp2ToTp4Pp2", {paged(layers(4), latent)}, S(2, even(4, 2)), S(4, even(4, 2)),
      published, sides);
  add("MlaTp2ToPp2", {paged(layers(4), latent)}, S(2, even(4)), S(1, even(4, 2)), published, alone);
  add("MlaIndexTp4ToPp4", {paged(layers(10), latent_with_index)}, S(4, even(10)),
      S(1, uneven({3, 3, 2, 2})), published, alone);
  add("MlaToCp2", {paged(layers(4), latent)}, S(1, even(4)).block(8),
      S(1, even(4)).block(8).context(2), published, alone);
  add("MlaTp2ToCp4", {paged(layers(4), latent)}, S(2, even(4)).block(8),
      S(1, even(4)).block(8).context(4), published, alone);
  add("MlaIndexTp2ToPp2Cp2", {paged(layers(4), latent_with_index)}, S(2, even(4)).block(8),
      S(1, even(4, 2)).block(8).context(2), published, alone);

  add("DpContextOnly", {paged(layers(4), kv(4, 8, 16))}, S(1, even(4)).data(4), S(2, even(4)),
      published_dp, alone);
  add("DpGenerationOnly", {paged(layers(4), kv(4, 8, 16))}, S(4, even(4)), S(1, even(4)).data(2),
      published_dp, alone);
  add("DpBoth", {paged(layers(4), kv(4, 8, 16))}, S(2, even(4)).data(2), S(1, even(4)).data(2),
      published_dp, alone);
  add("DpBothPp2", {paged(layers(4), kv(4, 8, 16))}, S(2, even(4, 2)).data(2),
      S(1, even(4, 2)).data(3), {{60}, {30}, {60}, {10}, {25}, {33}}, sides);
  add("MlaDpContextOnly", {paged(layers(4), latent)}, S(1, even(4)).data(4), S(2, even(4)),
      published_dp, sides);
  add("MlaDpGenerationOnly", {paged(layers(4), latent)}, S(4, even(4)), S(1, even(4)).data(2),
      published_dp, sides);
  add("MlaDpBoth", {paged(layers(4), latent_with_index)}, S(1, even(4)).data(4),
      S(1, even(4)).data(2), published_dp, alone);

  add("OneHeadTp4ToTp1", {paged(layers(4), kv(1, 8, 16))}, S(4, even(4)), S(1, even(4)), published,
      alone);
  add("TwoHeadsTp4ToTp2", {paged(layers(4), kv(2, 8, 16))}, S(4, even(4)), S(2, even(4)), published,
      alone);
  add("TwoHeadsTp1ToTp4", {paged(layers(4), kv(2, 8, 16))}, S(1, even(4)), S(4, even(4)), published,
      sides);
  add("TwoHeadsTp4ToTp4", {paged(layers(4), kv(2, 8, 16))}, S(4, even(4)), S(4, even(4)), published,
      alone);
  add("OneHeadTp2ToTp4Pp2", {paged(layers(4), kv(1, 8, 16))}, S(2, even(4)), S(4, even(4, 2)),
      published, sides);
  add("TwoHeadsUnevenPp4ToTp4", {paged(layers(5), kv(2, 8, 16))}, S(1, uneven({2, 1, 1, 1})),
      S(4, even(5)), published, alone);

  // Every prompt length, both block sizes below and above it.
  add("LengthsTp2ToTp1", {paged(layers(2), kv(2, 8, 16))}, S(2, even(2)), S(1, even(2)), lengths,
      alone);
  add("LengthsBlocks8To32", {paged(layers(2), kv(2, 8, 16))}, S(1, even(2)).block(8),
      S(2, even(2)).block(32), lengths, sides);
  add("LengthsBlocks32To8", {paged(layers(2), kv(2, 8, 16))}, S(2, even(2)).block(32),
      S(1, even(2)).block(8), lengths, sides);
  add("LengthsWindow", {window(layers(2), kv(2, 8, 16), 20)}, S(2, even(2)).block(8).live(),
      S(1, even(2)).block(8), lengths, together);

  // Ranges.
  add("PrefixSkips", {paged(layers(2), kv(4, 8, 16))}, S(2, even(2)), S(4, even(2)), skips, sides);
  add("PrefixSkipsPp2Blocks4To16", {paged(layers(2), kv(4, 8, 16))}, S(1, even(2)).block(4),
      S(2, even(2, 2)), skips, alone);
  add("PrefixSkipsBlocks64To8", {paged(layers(2), kv(4, 8, 16))}, S(4, even(2)).block(64),
      S(1, even(2)).block(8), skips, sides);
  add("WantsLessThanPublished", {paged(layers(2), kv(4, 8, 16))}, S(2, even(2)), S(1, even(2)),
      partial, sides);
  add("BlocksOfOneToken", {paged(layers(2), kv(4, 8, 16))}, S(2, even(2)).block(1),
      S(1, even(2)).block(4), {{9, 0}, {10, 4}, {7, 4}, {1, 0}}, sides);

  // Orders of tensors.
  const std::vector<Group> full = {paged(layers(4), kv(4, 16, 16))};
  add("NhdToHnd", full, S(2, even(4)), S(1, even(4)).as(Form::hnd), skips, alone);
  add("HndToNhd", full, S(1, even(4)).as(Form::hnd), S(2, even(4)), skips, sides);
  add("MegatronToTrtllm", full, S(2, even(4, 2)).as(Form::megatron), S(1, even(4)).as(Form::trtllm),
      skips, sides);
  add("TrtllmToMegatron", full, S(2, even(4)).as(Form::trtllm), S(4, even(4)).as(Form::megatron),
      skips, sides);
  add("OldTrtllmToFlash", full, S(1, even(4)).as(Form::trtllm_old), S(2, even(4)).as(Form::flash),
      skips, sides);
  add("FlashToPerLayer", full, S(4, even(4)).as(Form::flash), S(2, even(4)).as(Form::per_layer),
      skips, sides);
  add("PerLayerToOldTrtllm", full, S(1, even(4)).as(Form::per_layer),
      S(2, even(4)).as(Form::trtllm_old), skips, together);
  add("PaddedToHnd", full, S(2, even(4)).as(Form::padded), S(1, even(4)).as(Form::hnd), skips,
      sides);
  add("MegatronToPaddedBlocks32To16", full, S(1, even(4)).as(Form::megatron).block(32),
      S(2, even(4)).as(Form::padded), skips, together);

  // Heads, layers and stages that do not divide each other.
  add("SixHeadsTp3ToTp2", {paged(layers(2), kv(6, 8, 16))}, S(3, even(2)), S(2, even(2)), skips,
      alone);
  add("SixHeadsTp2ToTp3Hnd", {paged(layers(2), kv(6, 8, 16))}, S(2, even(2)).as(Form::hnd),
      S(3, even(2)), skips, sides);
  add("UnevenPp3ToPp2", {paged(layers(7), kv(2, 8, 16))}, S(1, uneven({3, 3, 1})),
      S(1, uneven({2, 5})), skips, alone);
  add("DealtLayersToContiguous", {paged(layers(6), kv(2, 8, 16))}, S(1, dealt(6, 2)),
      S(2, even(6, 2)), skips, sides);
  add("LayersBackwards", {paged(layers(6), kv(2, 8, 16))},
      S(2, backwards(even(6, 2))).as(Form::megatron), S(1, dealt(6, 3)), skips, sides);

  // Context parallelism.
  add("Cp2ToCp1", {paged(layers(2), kv(2, 8, 16))}, S(1, even(2)).context(2), S(1, even(2)), skips,
      alone);
  add("Cp1ToCp2Blocks8To16", {paged(layers(2), kv(2, 8, 16))}, S(1, even(2)).block(8),
      S(1, even(2)).context(2), skips, sides);
  add("Cp4ToCp2", {paged(layers(2), kv(2, 8, 16))}, S(1, even(2)).context(4).block(8),
      S(1, even(2)).context(2).block(8), skips, alone);
  add("Cp2ToCp3Tp2", {paged(layers(2), kv(2, 8, 16))}, S(1, even(2)).context(2).block(8),
      S(2, even(2)).context(3).block(8), skips, sides);

  // Windows.
  add("WindowLiveTables", {window(layers(2), kv(4, 8, 16), 40)}, S(2, even(2)).live(),
      S(1, even(2)).live(), published, sides);
  add("WindowFullToLiveBlocks32To8", {window(layers(2), kv(4, 8, 16), 24)},
      S(1, even(2)).block(32), S(2, even(2)).block(8).live(), published, sides);
  add("WindowLiveToFullBlocks8To32", {window(layers(2), kv(4, 8, 16), 24)},
      S(2, even(2)).block(8).live(), S(1, even(2)).block(32), published, alone);
  add("WindowNarrowerAtDestination", {paged(layers(2), kv(4, 8, 16), 40, 20)}, S(1, even(2)),
      S(2, even(2)), published, sides);
  add("WindowOnlyAtDestination", {paged(layers(2), kv(4, 8, 16), 0, 20)}, S(2, even(2)),
      S(1, even(2)).live(), skips, sides);
  add("WindowLiveCp2", {window(layers(2), kv(2, 8, 16), 24)}, S(1, even(2)).block(8).context(2).live(),
      S(1, even(2)).block(8).live(), published, sides);

  // Quantised, fused and opaque views.
  add("Fp8WithScales", {paged(layers(2), fp8_with_scale(4))}, S(2, even(2)),
      S(1, even(2)).as(Form::hnd), skips, alone);
  add("Fp4WithScales", {paged(layers(2), fp4_with_scale(4))}, S(1, even(2)).as(Form::per_layer),
      S(4, even(2)), skips, sides);
  add("FusedKeyValue", {paged(layers(2), {{KVF_ROLE_KEY_VALUE, 16, 4, 32, {}}})}, S(4, even(2)),
      S(2, even(2)).as(Form::hnd), skips, sides);
  add("OpaqueReplicaBesideShards",
      {paged(layers(2), {{KVF_ROLE_KEY, 16, 4, 8, {}}, {KVF_ROLE_OPAQUE, 8, 1, 5, {}}})},
      S(2, even(2)), S(4, even(2)), skips, sides);
  {
    Group index = paged(layers(2, 1, 2), {{KVF_ROLE_INDEX_KEY, 8, 1, 13, {}}});
    index.block_scale = 2;
    add("IndexGroupWithLongerBlocks", {paged(layers(4), latent), index}, S(2, even(4, 2)),
        S(1, even(4)), skips, sides);
  }

  // Recurrent states and hybrid models.
  add("MambaTp2ToTp1", {state(layers(3), mamba)}, S(2, even(3)), S(1, even(3)), published, alone);
  add("MambaTp1ToTp4SectionsTurned", {state(layers(3), mamba)}, S(1, even(3)).as(Form::megatron),
      S(4, even(3)).sections_turned(), published, sides);
  add("MambaTp4ToTp2SlotMajor", {state(layers(4), mamba)}, S(4, even(4)).as(Form::trtllm),
      S(2, even(4, 2)).sections_turned(), published, sides);
  const std::vector<Group> hybrid = {paged({3, 7}, kv(2, 8, 16)),
                                     window({1, 5}, kv(4, 8, 16), 24),
                                     state({0, 2, 4, 6}, mamba)};
  add("HybridTp2Pp2ToTp1", hybrid, S(2, even(8, 2)), S(1, even(8)), published, alone);
  add("HybridTp1ToPp4", hybrid, S(1, even(8)), S(1, even(8, 4)).as(Form::hnd), published, alone);
  add("HybridStageWithoutAttention", hybrid, S(1, uneven({1, 2, 5})).as(Form::megatron),
      S(2, uneven({3, 5})), skips, sides);
  add("HybridTp4ToTp2DpDealt", hybrid, S(4, even(8)).as(Form::flash), S(2, dealt(8, 2)).data(2),
      skips, sides);
  add("HybridCp2ToCp1", {paged({1, 3}, kv(2, 8, 16)), state({0, 2}, mamba)},
      S(1, even(4)).context(2), S(2, even(4)), skips, sides);

  // The engine's own memory: another data path.
  add("OwnMemoryTp2ToTp1", full, S(2, even(4)).own(), S(1, even(4)), skips, alone);
  add("OwnMemoryPerLayerToHnd", full, S(1, even(4)).as(Form::per_layer).own(),
      S(2, even(4)).as(Form::hnd).own(), skips, sides);
  add("OwnMemoryHybrid", hybrid, S(2, even(8, 2)).own(), S(1, even(8)).own(), published, sides);

  // Pushes: the destination offers, every source rank answers.
  add("PushTp2ToTp1", full, S(2, even(4)), S(1, even(4)), skips, alone, true);
  add("PushPp2ToTp2", full, S(1, even(4, 2)), S(2, even(4)).as(Form::hnd), skips, sides, true);
  add("PushHybridPp2ToPp1", hybrid, S(1, even(8, 2)), S(1, even(8)), published, sides, true);
  return all;
}

}  // namespace

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = make();
  return all;
}

}  // namespace reshard
