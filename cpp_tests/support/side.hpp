// One rank with a small cache: what most suites need twice.
#pragma once

#include <gtest/gtest.h>
#include <kvferry.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "test_memory.hpp"

// A call must be refused with this status and a text that says this.
#define EXPECT_REFUSED(call, status, saying)                                             \
  do {                                                                                   \
    const kvf_status got_ = (call);                                                      \
    const std::string text_ = kvferry::last_error();                                     \
    EXPECT_EQ(got_, status) << kvf_status_name(got_) << ": " << text_;                   \
    EXPECT_NE(text_.find(saying), std::string::npos)                                     \
        << "\"" << (saying) << "\" is not in \"" << text_ << "\"";                       \
  } while (false)

namespace kvferry_test {

// Whether a CUDA driver is there: a real one, or the double.
inline bool has_cuda() { return kvf_cuda_info(nullptr, 0, nullptr) == KVF_OK; }

// How a pointer that is no stream is refused.
inline std::pair<kvf_status, const char*> no_stream() {
  if (has_cuda()) return {KVF_ERR_INVALID_ARGUMENT, "is no stream"};
  return {KVF_ERR_UNSUPPORTED, "desc.stream: no CUDA driver"};
}

using namespace std::chrono_literals;

// Longer than anything here takes; a hang is the watchdog's.
constexpr auto kLong = 20s;

// Group 0: keys and values of 3 layers, blocks of 4 tokens, 2 heads of 32 bytes, 16 slots.
// Group 1: a recurrent state of 64 bytes in each of 2 layers, 4 slots.
struct Cache {
  static constexpr std::uint32_t slots = 16, tokens = 4, heads = 2, head_bytes = 32, layers = 3;
  static constexpr std::uint32_t token = heads * head_bytes, layer = tokens * token,
                                 block = layers * layer, view = slots * block;
  static constexpr std::uint32_t states = 4, state = 2 * 64;
  static constexpr std::uint32_t bytes = 2 * view + states * state;

  static std::vector<kvferry::Group> groups(const kvferry::Pool& pool) {
    kvferry::View key;
    key.role = KVF_ROLE_KEY;
    key.heads = heads;
    key.bytes_per_head = head_bytes;
    key.slots = slots;
    key.tensors = {pool.at(0)};
    key.slot_stride = block;
    key.layer_stride = layer;
    key.token_stride = token;
    key.head_stride = head_bytes;
    kvferry::View value = key;
    value.role = KVF_ROLE_VALUE;
    value.tensors = {pool.at(view)};
    kvferry::Group paged;
    paged.tokens_per_block = tokens;
    paged.layers = {0, 1, 2};
    paged.views = {key, value};

    kvferry::View recurrent;
    recurrent.role = KVF_ROLE_RECURRENT;
    recurrent.bytes_per_head = 64;
    recurrent.slots = states;
    recurrent.tensors = {pool.at(2 * view)};
    recurrent.slot_stride = state;
    recurrent.layer_stride = 64;
    recurrent.head_stride = 64;
    kvferry::Group state_group;
    state_group.kind = KVF_GROUP_STATE;
    state_group.layers = {3, 4};
    state_group.views = {recurrent};
    return {paged, state_group};
  }
};

inline kvferry::AgentConfig config(const std::string& name) {
  kvferry::AgentConfig config;
  config.name = name;
  config.fingerprint = "test";
  return config;
}

struct Side {
  explicit Side(const std::string& name, MemoryKind kind = MemoryKind::Pool)
      : Side(config(name), kind) {}
  Side(const kvferry::AgentConfig& config, MemoryKind kind)
      : agent(config), memory(agent, kind, Cache::bytes) {
    agent.set_layout(Cache::groups(memory.pool()));
    engine = agent.engine();
  }

  // First the agent, so that no copy is under way in memory that is freed: a device does not forgive.
  ~Side() { (void)!agent.destroy(kLong); }
  Side(const Side&) = delete;

  // A block of a view (0 keys, 1 values).
  std::vector<std::uint8_t> block(int view, int slot) const {
    return memory.read(static_cast<std::size_t>(view) * Cache::view +
                           static_cast<std::size_t>(slot) * Cache::block,
                       Cache::block);
  }
  std::vector<std::uint8_t> state(int slot) const {
    return memory.read(2 * Cache::view + static_cast<std::size_t>(slot) * Cache::state,
                       Cache::state);
  }

  kvferry::Agent agent;
  TestMemory memory;
  kvferry::Engine engine;
};

// A source with a filled cache, an empty destination, and the source as its peer, ready.
struct Pair {
  explicit Pair(MemoryKind kind = MemoryKind::Pool) : Pair(config("source"), config("sink"), kind) {}
  Pair(const kvferry::AgentConfig& from, const kvferry::AgentConfig& to, MemoryKind kind)
      : source(from, kind), sink(to, kind) {
    source.memory.fill(1);
    peer = sink.agent.add_peer(source.engine.metadata(), 77);
    kvferry::check(peer.wait(kLong));
  }

  kvferry::Publication publish(std::uint64_t request, const std::vector<std::int32_t>& slots,
                               std::uint64_t token_end) {
    return source.agent.publish(kvferry::key(request), 0, slots, token_end);
  }

  Side source, sink;
  kvferry::Peer peer;
};

inline const std::vector<std::uint8_t>& zeros(std::size_t bytes) {
  static const std::vector<std::uint8_t> block(Cache::block, 0), state(Cache::state, 0);
  return bytes == Cache::block ? block : state;
}

}  // namespace kvferry_test
