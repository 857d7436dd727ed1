#include "tiny_cache.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

namespace disagg::tiny {

namespace {

constexpr std::uint32_t kCacheTokens = 4096;  // room of a paged group
constexpr std::uint32_t kStateSlots = 16;

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error("tiny engine: " + text); }

// Lays out the axes of a paged group in the given order and returns the pool's bytes.
std::uint64_t place_paged(Group& group, CacheOrder order, std::uint32_t pool) {
  const std::uint64_t tokens = group.tokens_per_block, layers = group.layers.size();
  View& key = group.views[0];
  View& value = group.views[1];
  const std::uint64_t d = key.bytes_per_head, heads = key.heads, slots = key.slots;
  std::uint64_t role_stride = 0;
  for (View* v : {&key, &value}) {
    switch (order) {
      case CacheOrder::block_major:
        v->token_stride = d;
        v->head_stride = tokens * d;
        role_stride = heads * v->head_stride;
        v->layer_stride = 2 * role_stride;
        v->slot_stride = layers * v->layer_stride;
        break;
      case CacheOrder::layer_major:
        v->head_stride = d;
        v->token_stride = heads * d;
        v->slot_stride = tokens * v->token_stride;
        role_stride = slots * v->slot_stride;
        v->layer_stride = 0;  // a tensor per layer
        break;
      case CacheOrder::role_major:
        v->head_stride = d;
        v->token_stride = heads * d;
        v->slot_stride = tokens * v->token_stride;
        v->layer_stride = slots * v->slot_stride;
        role_stride = layers * v->layer_stride;
        break;
    }
  }
  const bool tensor_per_layer = order == CacheOrder::layer_major;
  for (std::uint64_t l = 0; l < (tensor_per_layer ? layers : 1); ++l) {
    key.tensors.push_back({pool, l * 2 * role_stride});
    value.tensors.push_back({pool, l * 2 * role_stride + role_stride});
  }
  return 2 * slots * layers * tokens * heads * d;
}

// [layer][slot][head][dim][dim], 32-bit floats.
std::uint64_t place_state(Group& group, std::uint32_t pool) {
  View& v = group.views[0];
  v.head_stride = v.bytes_per_head;
  v.slot_stride = v.heads * v.head_stride;
  v.layer_stride = v.slots * v.slot_stride;
  v.tensors.push_back({pool, 0});
  return group.layers.size() * v.layer_stride;
}

}  // namespace

Shard make_shard(const EngineOptions& o) {
  if (o.tokens_per_block == 0 || kCacheTokens % o.tokens_per_block != 0)
    fail("tokens per block must divide " + std::to_string(kCacheTokens));
  if (o.tp_size == 0 || kHeads % o.tp_size != 0 || o.tp_rank >= o.tp_size)
    fail(std::to_string(kHeads) + " heads cannot be split over " + std::to_string(o.tp_size) + " ranks");
  std::vector<std::uint32_t> stages = o.stage_layers;
  if (stages.empty()) stages = {kLayers};
  if (std::accumulate(stages.begin(), stages.end(), 0u) != kLayers || o.pp_rank >= stages.size())
    fail("pipeline stages must hold " + std::to_string(kLayers) + " layers together");
  if (o.tp_size * stages.size() > 1 && !o.ranks) fail("several ranks need a RankGroup");
  Shard s;
  s.layer_begin = std::accumulate(stages.begin(), stages.begin() + o.pp_rank, 0u);
  s.layer_end = s.layer_begin + stages[o.pp_rank];
  s.head_begin = kHeads / o.tp_size * o.tp_rank;
  s.head_end = s.head_begin + kHeads / o.tp_size;
  return s;
}

Cache describe(const EngineOptions& o, const Shard& shard) {
  Cache c;
  c.fingerprint = std::string("kvferry-tiny-1 seed ") + std::to_string(kSeed) + (o.hybrid ? " hybrid" : "");
  c.tp_rank = o.tp_rank;
  c.tp_size = o.tp_size;
  c.pp_rank = o.pp_rank;
  c.pp_size = std::max<std::uint32_t>(1, static_cast<std::uint32_t>(o.stage_layers.size()));
  c.rank = o.pp_rank * o.tp_size + o.tp_rank;
  std::vector<LayerKind> kinds = {LayerKind::full};
  if (o.hybrid) kinds = {LayerKind::full, LayerKind::window, LayerKind::recurrent};
  for (const LayerKind kind : kinds) {
    Group g;
    g.paged = kind != LayerKind::recurrent;
    g.tokens_per_block = g.paged ? o.tokens_per_block : 0;
    g.window = kind == LayerKind::window ? kWindow : 0;
    for (std::uint32_t l = shard.layer_begin; l < shard.layer_end; ++l)
      if (layer_kind(l, o.hybrid) == kind) g.layers.push_back(l);
    View v;
    v.heads = shard.head_end - shard.head_begin;
    v.shards = o.tp_size;
    v.shard = o.tp_rank;
    const auto pool = static_cast<std::uint32_t>(c.pools.size());
    if (g.paged) {
      v.element_bits = 16;
      v.bytes_per_head = kHeadDim * 2;
      v.slots = kCacheTokens / o.tokens_per_block;
      v.role = Role::key;
      g.views.push_back(v);
      v.role = Role::value;
      g.views.push_back(v);
      c.pools.push_back(place_paged(g, o.order, pool));
    } else {
      v.element_bits = 32;
      v.bytes_per_head = kHeadDim * kHeadDim * 4;
      v.slots = kStateSlots;
      v.role = Role::recurrent;
      g.views.push_back(v);
      c.pools.push_back(place_state(g, pool));
    }
    c.groups.push_back(std::move(g));
  }
  return c;
}

PagedCache::PagedCache(const EngineOptions& options, const Shard& shard)
    : cache_(describe(options, shard)), group_of_(kLayers, 0), local_layer_(kLayers, -1) {
  // Slots are handed out in a scattered order, as in an engine that has run for a while.
  std::mt19937 numbers(7 + cache_.rank);
  for (std::uint32_t g = 0; g < cache_.groups.size(); ++g) {
    const Group& group = cache_.groups[g];
    for (std::size_t l = 0; l < group.layers.size(); ++l) {
      group_of_[group.layers[l]] = g;
      local_layer_[group.layers[l]] = static_cast<std::int32_t>(l);
    }
    std::deque<std::uint32_t> free(group.views[0].slots);
    std::iota(free.begin(), free.end(), 0u);
    for (std::size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[numbers() % i]);
    unused_.push_back(std::move(free));
    sharers_.emplace_back();
  }
}

void PagedCache::bind(const std::vector<std::byte*>& pools) {
  if (pools.size() != cache_.pools.size()) fail("wrong number of pools");
  pools_ = pools;
}

Sequence& PagedCache::create(SequenceId id) {
  const auto [it, fresh] = sequences_.try_emplace(id);
  if (!fresh) fail("sequence " + std::to_string(id) + " exists already");
  it->second.tables.resize(cache_.groups.size());
  return it->second;
}

Sequence& PagedCache::at(SequenceId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) fail("no sequence " + std::to_string(id));
  return it->second;
}

void PagedCache::free(SequenceId id) {
  Sequence& s = at(id);
  for (std::uint32_t g = 0; g < s.tables.size(); ++g)
    for (const std::uint32_t block : s.tables[g].blocks) release(g, block);
  sequences_.erase(id);
}

void PagedCache::release(std::uint32_t group, std::uint32_t block) {
  const auto shared = sharers_[group].find(block);
  if (shared == sharers_[group].end()) {
    unused_[group].push_back(block);
  } else if (--shared->second == 0) {
    sharers_[group].erase(shared);
  }
}

void PagedCache::share(Sequence& s, const Sequence& with, std::uint64_t tokens) {
  for (std::uint32_t g = 0; g < s.tables.size(); ++g) {
    const Group& group = cache_.groups[g];
    if (!group.paged || group.window) continue;
    const std::uint64_t blocks = tokens / group.tokens_per_block;
    if (blocks > with.tables[g].blocks.size()) fail("a prefix is longer than the sequence it is of");
    for (std::uint64_t b = 0; b < blocks; ++b) {
      s.tables[g].blocks.push_back(with.tables[g].blocks[b]);
      ++sharers_[g][with.tables[g].blocks[b]];
    }
  }
}

void PagedCache::grow(Sequence& s, std::uint64_t tokens, bool skip_window) {
  s.tokens = tokens;
  for (std::uint32_t g = 0; g < s.tables.size(); ++g) {
    const Group& group = cache_.groups[g];
    BlockTable& table = s.tables[g];
    const std::uint64_t tpb = group.tokens_per_block;
    if (skip_window && group.window && table.blocks.empty() && tokens + 1 > group.window)
      table.first = static_cast<std::uint32_t>((tokens + 1 - group.window) / tpb);
    const std::uint64_t end = group.paged ? (tokens + tpb - 1) / tpb : 1;
    while (table.first + table.blocks.size() < end) {
      if (unused_[g].empty()) fail("the cache is full");
      table.blocks.push_back(unused_[g].front());
      unused_[g].pop_front();
    }
  }
}

void PagedCache::trim(Sequence& s) {
  for (std::uint32_t g = 0; g < s.tables.size(); ++g) {
    const Group& group = cache_.groups[g];
    BlockTable& table = s.tables[g];
    // The next token, at position s.tokens, attends to the last `window` positions, itself included.
    while (group.window && !table.blocks.empty() &&
           (table.first + 1) * std::uint64_t{group.tokens_per_block} + group.window <= s.tokens + 1) {
      release(g, table.blocks.front());
      table.blocks.pop_front();
      ++table.first;
    }
  }
}

SequenceSlots PagedCache::slots(const Sequence& s) const {
  SequenceSlots all;
  for (std::uint32_t g = 0; g < s.tables.size(); ++g) {
    GroupSlots slots;
    slots.group = g;
    slots.paged = cache_.groups[g].paged;
    slots.slots.assign(s.tables[g].blocks.begin(), s.tables[g].blocks.end());
    slots.token_begin = first_token(s, g);
    slots.token_end = s.tokens;
    all.push_back(std::move(slots));
  }
  return all;
}

std::uint64_t PagedCache::first_token(const Sequence& s, std::uint32_t group) const {
  return std::uint64_t{s.tables[group].first} * cache_.groups[group].tokens_per_block;
}

std::byte* PagedCache::address(const Sequence& s, std::uint32_t layer, Role role, std::uint64_t token,
                               std::uint32_t local_head) const {
  const std::uint32_t g = group_of_[layer];
  const Group& group = cache_.groups[g];
  const View& v = group.views[role == Role::value ? 1 : 0];
  const auto local = static_cast<std::uint64_t>(local_layer_[layer]);
  const BlockTable& table = s.tables[g];
  const std::uint64_t slot = table.blocks[group.paged ? token / group.tokens_per_block - table.first : 0];
  const std::uint64_t in_block = group.paged ? token % group.tokens_per_block : 0;
  const bool tensor_per_layer = v.layer_stride == 0 && v.tensors.size() > 1;
  const Tensor& t = v.tensors[tensor_per_layer ? local : 0];
  return pools_[t.pool] + t.offset + slot * v.slot_stride + (tensor_per_layer ? 0 : local * v.layer_stride) +
         in_block * v.token_stride + local_head * v.head_stride;
}

}  // namespace disagg::tiny
