// One rank of a hybrid model: attention layers 0, 2, 4 with a key and a value view (group 0), and,
// if the model has state, layers 1 and 3 with a packed conv state (group 1) and a recurrent state
// (group 2). The model may be cut into two pipeline stages, and the same bytes may lie in another
// order on the other side.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <kvferry.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache.hpp"

namespace handoff {

using process_test::MemoryKind;
using namespace std::chrono_literals;

struct Model {
  static constexpr std::uint32_t tokens = 4, heads = 2, channels = 8;

  std::uint32_t head_bytes = 32;  // of a token's key or value
  std::uint32_t slots = 16, state_slots = 4;
  std::uint32_t stages = 1, stage = 0;
  bool state = false;
  bool block_major = false;  // [slot][layer] and not [layer][slot]
  MemoryKind memory = MemoryKind::pool;

  // "32 16 4 2 1 1 0 pool", for a child's command line.
  std::vector<std::string> words() const {
    return {std::to_string(head_bytes),  std::to_string(slots), std::to_string(state_slots),
            std::to_string(stages),      std::to_string(stage), std::to_string(state),
            std::to_string(block_major), process_test::word(memory)};
  }
  static Model parse(char** words) {
    const auto number = [](const char* word) {
      return static_cast<std::uint32_t>(std::stoul(word));
    };
    Model m;
    m.head_bytes = number(words[0]);
    m.slots = number(words[1]);
    m.state_slots = number(words[2]);
    m.stages = number(words[3]);
    m.stage = number(words[4]);
    m.state = number(words[5]) != 0;
    m.block_major = number(words[6]) != 0;
    m.memory = process_test::memory_kind(words[7]);
    return m;
  }

  std::vector<std::uint32_t> attention_layers() const {
    if (stages == 1) return {0, 2, 4};
    return stage == 0 ? std::vector<std::uint32_t>{0, 2} : std::vector<std::uint32_t>{4};
  }
  std::vector<std::uint32_t> state_layers() const {
    if (stages == 1) return {1, 3};
    return stage == 0 ? std::vector<std::uint32_t>{1} : std::vector<std::uint32_t>{3};
  }
  std::uint64_t block_bytes() const {  // of a layer and view
    return std::uint64_t{tokens} * heads * head_bytes;
  }
};

// Where a view lies: byte `at` of (layer, slot) is at base + layer * layer_stride + ...
struct Placed {
  std::vector<std::uint32_t> layers;
  std::uint64_t base = 0, bytes = 0, slot_stride = 0, layer_stride = 0;
  std::uint32_t slots = 0;
  std::uint64_t end() const { return base + bytes * layers.size() * slots; }
};

enum ViewIndex : std::uint32_t { kKey, kValue, kConv, kRecurrent };

// The byte that the source with this seed holds; `layer` is global, so ranks differ.
inline unsigned char content(std::uint32_t seed, std::uint32_t view, std::uint32_t layer,
                             std::uint32_t slot, std::uint64_t at) {
  return process_test::expected(seed, view * 16 + layer, slot, at);
}

class Rank {
 public:
  Rank(const kvferry::AgentConfig& config, const Model& model) : model_(model), agent(config) {
    place(model.attention_layers(), model.block_bytes(), model.slots);
    place(model.attention_layers(), model.block_bytes(), model.slots);
    if (model.state) {
      place(model.state_layers(), Model::channels * 8, model.state_slots);
      place(model.state_layers(), 2 * 96, model.state_slots);
    }
    if (process_test::is_device(model.memory)) {
      mirror_ = std::make_unique<kvferry_test::Mirror>(bytes());
      base_ = mirror_->host();
      pool_ = agent.register_device_memory(mirror_->device(), bytes());
    } else if (model.memory == MemoryKind::pool) {
      pool_ = agent.host_pool(bytes());
      base_ = reinterpret_cast<unsigned char*>(pool_.data());
    } else {
      void* at = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at == MAP_FAILED) throw std::runtime_error("mmap");
      base_ = static_cast<unsigned char*>(at);
      std::memset(base_, 0, bytes());
      own_ = true;
      pool_ = agent.register_memory(base_, bytes());
    }
    kvferry::Coordinates at;
    at.global_rank = at.pp_rank = model.stage;
    at.pp_size = model.stages;
    agent.set_layout(groups(), at);
    if (model.stages == 1) engine = agent.engine();
  }
  Rank(const Rank&) = delete;
  ~Rank() {
    (void)!agent.destroy(10s);
    if (own_) munmap(base_, bytes());
  }

  const Model& model() const { return model_; }
  std::uint64_t bytes() const { return views_.back().end(); }
  unsigned char* data() {
    fetch();
    return base_;
  }
  const std::vector<Placed>& views() const { return views_; }
  std::uint64_t offset(std::uint32_t view, std::size_t layer, std::uint32_t slot) const {
    const Placed& v = views_[view];
    return v.base + layer * v.layer_stride + slot * v.slot_stride;
  }

  // Takes the pool back.
  void unregister() { pool_.unregister_begin(10s); }

  // As the source with this seed.
  void fill(std::uint32_t seed) {
    for (std::uint32_t v = 0; v < views_.size(); ++v) {
      for (std::uint32_t s = 0; s < views_[v].slots; ++s) write(base_, seed, v, s, s);
    }
    if (mirror_) mirror_->up();
  }
  // Puts what the source with this seed has in its slot `from` at `to` of an image of our memory.
  void write(unsigned char* image, std::uint32_t seed, std::uint32_t view, std::uint32_t from,
             std::uint32_t to) const {
    const Placed& v = views_[view];
    for (std::size_t l = 0; l < v.layers.size(); ++l) {
      unsigned char* at = image + offset(view, l, to);
      for (std::uint64_t i = 0; i < v.bytes; ++i) at[i] = content(seed, view, v.layers[l], from, i);
    }
  }
  // The first byte of our slot `to` that is not the source's in its slot `from`, or "".
  std::string slot_differs(std::uint32_t seed, std::uint32_t view, std::uint32_t from,
                           std::uint32_t to) const {
    fetch();
    const Placed& v = views_[view];
    for (std::size_t l = 0; l < v.layers.size(); ++l) {
      const auto start = offset(view, l, to);
      for (std::uint64_t i = 0; i < v.bytes; ++i) {
        if (base_[start + i] != content(seed, view, v.layers[l], from, i)) return where(start + i);
      }
    }
    return "";
  }
  std::vector<unsigned char> snapshot() const {
    fetch();
    return {base_, base_ + bytes()};
  }
  // The first byte of our memory that is not the image's, or "".
  std::string differs(const std::vector<unsigned char>& image) const {
    fetch();
    for (std::uint64_t i = 0; i < image.size(); ++i) {
      if (base_[i] != image[i]) return where(i);
    }
    return "";
  }
  std::string where(std::uint64_t at) const {
    for (std::size_t v = 0; v < views_.size(); ++v) {
      const Placed& p = views_[v];
      if (at < p.base || at >= p.end()) continue;
      const auto slot = model_.block_major ? (at - p.base) / p.slot_stride
                                           : (at - p.base) % p.layer_stride / p.slot_stride;
      return "view " + std::to_string(v) + " slot " + std::to_string(slot) + " byte " +
             std::to_string(at);
    }
    return "byte " + std::to_string(at);
  }

 private:
  void fetch() const {
    if (mirror_) mirror_->down();
  }

  void place(std::vector<std::uint32_t> layers, std::uint64_t bytes, std::uint32_t slots) {
    Placed v;
    v.base = views_.empty() ? 0 : views_.back().end();
    v.bytes = bytes;
    v.slots = slots;
    v.slot_stride = model_.block_major ? bytes * layers.size() : bytes;
    v.layer_stride = model_.block_major ? bytes : bytes * slots;
    v.layers = std::move(layers);
    views_.push_back(std::move(v));
  }

  kvferry::View view(std::uint32_t index, std::uint32_t role) const {
    kvferry::View view;
    view.role = role;
    view.slots = views_[index].slots;
    view.tensors = {pool_.at(views_[index].base)};
    view.slot_stride = views_[index].slot_stride;
    view.layer_stride = views_[index].layer_stride;
    return view;
  }

  std::vector<kvferry::Group> groups() const {
    kvferry::Group paged;
    paged.tokens_per_block = Model::tokens;
    paged.layers = model_.attention_layers();
    for (auto [index, role] : {std::pair{kKey, KVF_ROLE_KEY}, std::pair{kValue, KVF_ROLE_VALUE}}) {
      kvferry::View v = view(index, static_cast<std::uint32_t>(role));
      v.heads = Model::heads;
      v.bytes_per_head = model_.head_bytes;
      v.head_stride = model_.head_bytes;
      v.token_stride = std::uint64_t{Model::heads} * model_.head_bytes;
      paged.views.push_back(v);
    }
    std::vector<kvferry::Group> all = {paged};
    if (!model_.state) return all;
    kvferry::Group conv;
    conv.kind = KVF_GROUP_STATE;
    conv.layers = model_.state_layers();
    kvferry::View c = view(kConv, KVF_ROLE_CONV);
    c.heads = Model::channels;
    c.bytes_per_head = c.head_stride = 8;
    c.sections = {{"x", 4}, {"B", 2}, {"C", 2}};
    conv.views = {c};
    kvferry::Group recurrent;
    recurrent.kind = KVF_GROUP_STATE;
    recurrent.layers = model_.state_layers();
    kvferry::View r = view(kRecurrent, KVF_ROLE_RECURRENT);
    r.heads = 2;
    r.bytes_per_head = r.head_stride = 96;
    recurrent.views = {r};
    all.push_back(conv);
    all.push_back(recurrent);
    return all;
  }

  Model model_;
  std::vector<Placed> views_;
  std::unique_ptr<kvferry_test::Mirror> mirror_;
  unsigned char* base_ = nullptr;
  bool own_ = false;

 public:
  kvferry::Agent agent;
  kvferry::Engine engine;

 private:
  kvferry::Pool pool_;
};

}  // namespace handoff
