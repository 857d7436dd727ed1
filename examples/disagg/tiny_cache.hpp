// The tiny engine's cache: block allocator, block tables and the addresses of their bytes.
#pragma once

#include "engine.hpp"
#include "tiny_model.hpp"

#include <deque>
#include <map>

namespace disagg::tiny {

// The share of the model that this rank holds.
struct Shard {
  std::uint32_t layer_begin = 0, layer_end = kLayers;
  std::uint32_t head_begin = 0, head_end = kHeads;

  bool owns(std::uint32_t layer) const { return layer >= layer_begin && layer < layer_end; }
};

// Throws std::runtime_error if the sizes do not fit the model.
Shard make_shard(const EngineOptions& options);
Cache describe(const EngineOptions& options, const Shard& shard);

// A sequence's blocks in one group; blocks before `first` have left the window.
struct BlockTable {
  std::uint32_t first = 0;
  std::deque<std::uint32_t> blocks;
};

struct Sequence {
  std::uint64_t tokens = 0;
  std::vector<BlockTable> tables;  // per group; of a state group: one block, the slot
};

class PagedCache {
 public:
  PagedCache(const EngineOptions& options, const Shard& shard);

  const Cache& description() const { return cache_; }
  void bind(const std::vector<std::byte*>& pools);

  Sequence& create(SequenceId id);
  Sequence& at(SequenceId id);
  void free(SequenceId id);

  // Lets an empty sequence begin with the whole blocks of another one's first tokens, where a group
  // keeps all of them (no window, no state).
  void share(Sequence& sequence, const Sequence& with, std::uint64_t tokens);
  // Makes room for tokens up to `tokens`. With `skip_window`, blocks that a window has already left
  // behind get no slot.
  void grow(Sequence& sequence, std::uint64_t tokens, bool skip_window);
  // Frees blocks that no later token will look at.
  void trim(Sequence& sequence);
  SequenceSlots slots(const Sequence& sequence) const;

  // The group of a layer, and the layer's index in it on this rank (-1 = not held here).
  std::uint32_t group_of(std::uint32_t layer) const { return group_of_[layer]; }
  std::int32_t local_layer(std::uint32_t layer) const { return local_layer_[layer]; }
  // First token held in a group.
  std::uint64_t first_token(const Sequence& sequence, std::uint32_t group) const;
  std::byte* address(const Sequence& sequence, std::uint32_t layer, Role role, std::uint64_t token,
                     std::uint32_t local_head) const;

 private:
  void release(std::uint32_t group, std::uint32_t block);

  Cache cache_;
  std::vector<std::byte*> pools_;
  std::vector<std::uint32_t> group_of_;
  std::vector<std::int32_t> local_layer_;
  std::vector<std::deque<std::uint32_t>> unused_;  // per group
  std::vector<std::map<std::uint32_t, std::uint32_t>> sharers_;  // per group: block, users beyond the first
  std::map<SequenceId, Sequence> sequences_;
};

}  // namespace disagg::tiny
