// The memory of the soak's ranks: paged keys and values and a recurrent state, and content that
// tells its version and its slot. Everything is written and compared in whole words.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kvferry.hpp>
#include <vector>

namespace soak {

using namespace std::chrono_literals;

constexpr std::uint32_t kTokens = 4, kHeads = 2, kHeadBytes = 512, kLayers = 2;
constexpr std::uint64_t kLayerBytes = std::uint64_t{kTokens} * kHeads * kHeadBytes;
constexpr std::uint64_t kBlockBytes = kLayers * kLayerBytes;  // of a view
constexpr std::uint64_t kStateBytes = 1024;
constexpr std::uint32_t kBlocks = 1600, kStates = 64;
constexpr std::uint64_t kPoolBytes = 2 * kBlocks * kBlockBytes + kStates * kStateBytes;

// What a slot holds: the words of this version of this slot of some source.
struct Content {
  std::uint64_t version = 0;
  std::uint32_t slot = 0;
};

class Store {
 public:
  explicit Store(const kvferry::AgentConfig& config) : agent(config), pool(agent.host_pool(kPoolBytes)) {
    base_ = reinterpret_cast<std::uint8_t*>(pool.data());
    kvferry::View key;
    key.role = KVF_ROLE_KEY;
    key.heads = kHeads;
    key.bytes_per_head = key.head_stride = kHeadBytes;
    key.token_stride = std::uint64_t{kHeads} * kHeadBytes;
    key.layer_stride = kLayerBytes;
    key.slot_stride = kBlockBytes;
    key.slots = kBlocks;
    key.tensors = {pool.at(0)};
    kvferry::View value = key;
    value.role = KVF_ROLE_VALUE;
    value.tensors = {pool.at(kBlocks * kBlockBytes)};
    kvferry::Group paged;
    paged.tokens_per_block = kTokens;
    paged.layers = {0, 2};
    paged.views = {key, value};
    kvferry::View state;
    state.role = KVF_ROLE_RECURRENT;
    state.bytes_per_head = state.head_stride = state.slot_stride = kStateBytes;
    state.slots = kStates;
    state.tensors = {pool.at(2 * kBlocks * kBlockBytes)};
    kvferry::Group recurrent;
    recurrent.kind = KVF_GROUP_STATE;
    recurrent.layers = {1};
    recurrent.views = {state};
    agent.set_layout({paged, recurrent});
    engine = agent.engine();
  }

  void fill_block(std::uint32_t slot, Content content) {
    for (std::uint32_t view = 0; view < 2; ++view) fill(block(view, slot), kBlockBytes, view, content);
  }
  void fill_state(std::uint32_t slot, Content content) {
    fill(state(slot), kStateBytes, 2, content);
  }
  // Bytes (in words of 8) that are not the content's, or not the rest's from token `tokens` on.
  std::uint64_t wrong_in_block(std::uint32_t slot, Content content, std::uint32_t tokens = kTokens,
                               Content rest = {}) const {
    std::uint64_t count = 0;
    const std::uint64_t moved = std::uint64_t{tokens} * kHeads * kHeadBytes;
    for (std::uint32_t view = 0; view < 2; ++view) {
      for (std::uint64_t at = 0; at < kBlockBytes; at += kLayerBytes) {
        count += wrong(block(view, slot), at, at + moved, view, content);
        count += wrong(block(view, slot), at + moved, at + kLayerBytes, view, rest);
      }
    }
    return count;
  }
  std::uint64_t wrong_in_state(std::uint32_t slot, Content content) const {
    return wrong(state(slot), 0, kStateBytes, 2, content);
  }

  kvferry::Agent agent;
  kvferry::Pool pool;
  kvferry::Engine engine;

 private:
  std::uint8_t* block(std::uint32_t view, std::uint32_t slot) const {
    return base_ + (std::uint64_t{view} * kBlocks + slot) * kBlockBytes;
  }
  std::uint8_t* state(std::uint32_t slot) const {
    return base_ + 2 * kBlocks * kBlockBytes + slot * kStateBytes;
  }
  static std::uint64_t first_word(std::uint32_t view, Content content) {
    std::uint64_t x = content.version * 0x9e3779b97f4a7c15ULL + (std::uint64_t{content.slot} << 8) + view;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }
  static void fill(std::uint8_t* at, std::uint64_t bytes, std::uint32_t view, Content content) {
    std::uint64_t word = first_word(view, content);
    for (std::uint64_t i = 0; i < bytes; i += 8, word += kStep) {
      std::memcpy(at + i, &word, 8);
    }
  }
  static std::uint64_t wrong(const std::uint8_t* at, std::uint64_t begin, std::uint64_t end,
                             std::uint32_t view, Content content) {
    std::uint64_t word = first_word(view, content) + begin / 8 * kStep, count = 0;
    for (std::uint64_t i = begin; i < end; i += 8, word += kStep) {
      std::uint64_t found = 0;
      std::memcpy(&found, at + i, 8);
      count += found != word;
    }
    return 8 * count;
  }

  static constexpr std::uint64_t kStep = 0xd1342543de82ef95ULL;

  std::uint8_t* base_ = nullptr;
};

inline kvferry::AgentConfig configure(const std::string& name) {
  kvferry::AgentConfig config;
  config.name = name;
  config.fingerprint = "soak";
  config.lease = 10s;
  config.transfer = 30s;
  if (std::getenv("KVF_TEST_LOG") != nullptr) {
    config.log_level = KVF_LOG_DEBUG;
    config.log = [name](std::uint32_t level, const char* text) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
      std::fprintf(stderr, "%lld %s %u %s\n", static_cast<long long>(us), name.c_str(), level, text);
    };
  }
  return config;
}

}  // namespace soak
