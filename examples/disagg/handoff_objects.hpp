// What handoff.cpp and service.cpp share: the engine's words turned into kvferry's.
#pragma once

#include "handoff.hpp"

#include <kvferry.hpp>

#include <map>
#include <utility>

namespace disagg {

// kvferry speaks of bytes, the messages between the processes of strings.
inline kvferry::Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string text(const kvferry::Bytes& raw) { return {raw.begin(), raw.end()}; }

// The layout in kvferry's words: nothing is computed here, every stride is the engine's own.
inline kvferry::View view_of(const View& from, const std::vector<kvferry::Pool>& pools) {
  kvferry::View to;
  to.role = static_cast<std::uint32_t>(from.role);
  to.element_bits = from.element_bits;
  to.heads = from.heads;
  to.bytes_per_head = from.bytes_per_head;
  to.slots = from.slots;
  to.shards = from.shards;
  to.shard = from.shard;
  for (const Tensor& t : from.tensors) to.tensors.push_back(pools[t.pool].at(t.offset));
  to.slot_stride = from.slot_stride;
  to.layer_stride = from.layer_stride;
  to.token_stride = from.token_stride;
  to.head_stride = from.head_stride;
  return to;
}

// A sequence's slots in kvferry's words, which both sides use.
struct Slots {
  std::vector<std::vector<std::int32_t>> lists;  // what `paged` points to
  std::vector<kvf_published_group> paged;
  std::vector<kvf_published_state> states;
  std::vector<std::uint64_t> skips;  // of `paged`: tokens below are at the destination already

  Slots(const Cache& cache, const SequenceSlots& held) {
    for (const GroupSlots& g : held) {
      const Group& group = cache.groups[g.group];
      if (group.layers.empty()) continue;  // another pipeline stage has them
      if (!g.paged) {
        states.push_back({g.group, static_cast<std::int32_t>(g.slots.at(0)), g.token_end});
        continue;
      }
      lists.emplace_back(g.slots.begin(), g.slots.end());
      paged.push_back(kvferry::published(g.group, lists.back(), g.token_begin, g.token_end));
      // A sliding window's table begins with the first block that is still held.
      paged.back().first_ordinal = g.token_begin / group.tokens_per_block;
      skips.push_back(g.skip > g.token_begin ? g.skip : g.token_begin);
    }
  }

  // What the destination asks for.
  kvferry::Import import() const {
    kvferry::Import wanted;
    for (std::size_t i = 0; i < paged.size(); ++i) {
      const kvf_published_group& p = paged[i];
      wanted.groups.push_back({p.group, 0, p.slots, p.num_slots, p.first_ordinal, skips[i], p.token_end});
    }
    for (const kvf_published_state& s : states) wanted.states.push_back({s.group, s.slot, s.as_of_token});
    return wanted;
  }
};

struct Handoff::Objects {
  Objects(const std::string& name, const Cache& described) : cache(described), agent(config(name, described)) {}
  static kvferry::AgentConfig config(const std::string& name, const Cache& cache) {
    kvferry::AgentConfig c;
    c.name = name;
    c.fingerprint = cache.fingerprint;
    return c;
  }

  Cache cache;
  kvferry::Agent agent;
  std::vector<kvferry::Pool> pools;
  kvferry::Engine engine;
  kvferry::Peer peer;
  std::map<std::pair<std::uint64_t, std::uint32_t>, kvferry::Publication> publications;
};

}  // namespace disagg
