// A rank of either engine: one paged group with a key and a value view of 8 heads, of which a rank
// of the engine under test holds one and the peer engine's only rank all.
#pragma once

#include <chrono>
#include <kvferry_transceiver.hpp>
#include <string>

#include "cache.hpp"

namespace consensus {

using namespace std::chrono_literals;
using process_test::from_hex;
using process_test::to_hex;

constexpr std::uint32_t world = 8, slots = 32, tokens = 4, head_bytes = 16;

inline kvferry::AgentConfig configure(const std::string& name, std::chrono::milliseconds silence) {
  kvferry::AgentConfig config = process_test::quick(name);
  config.peer_silence = silence;
  config.heartbeat = silence / 6;
  config.lease = 20s;
  return config;
}

struct Holder {
  // `shards` = 1: all heads.
  Holder(const kvferry::AgentConfig& config, std::uint32_t shards, std::uint32_t shard)
      : agent(config) {
    const std::uint32_t heads = world / shards;
    const std::uint64_t view_bytes = std::uint64_t{slots} * tokens * heads * head_bytes;
    pool = agent.host_pool(2 * view_bytes);
    kvferry::Group group;
    group.tokens_per_block = tokens;
    group.layers = {0};
    for (std::uint32_t v = 0; v < 2; ++v) {
      kvferry::View view;
      view.role = v == 0 ? KVF_ROLE_KEY : KVF_ROLE_VALUE;
      view.heads = heads;
      view.bytes_per_head = view.head_stride = head_bytes;
      view.token_stride = std::uint64_t{heads} * head_bytes;
      view.slot_stride = tokens * view.token_stride;
      view.slots = slots;
      view.shards = shards;
      view.shard = shard;
      view.tensors = {pool.at(v * view_bytes)};
      group.views.push_back(view);
    }
    kvferry::Coordinates at;
    at.global_rank = at.tp_rank = shard;
    at.tp_size = shards;
    agent.set_layout({group}, at);
  }

  kvferry::Agent agent;
  kvferry::Pool pool;
  kvferry::Engine engine;
};

}  // namespace consensus
