// The tiny engine: runs the model of tiny_model.hpp over the cache of tiny_cache.hpp.
#include "tiny_cache.hpp"
#include "tiny_model.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace disagg {

namespace {

using namespace tiny;

// Tokens computed at once during prefill. Bounds the buffers; results do not depend on it.
constexpr std::size_t kChunk = 128;

void store(std::byte* to, const double* head) {
  std::uint16_t bits[kHeadDim];
  for (std::uint32_t d = 0; d < kHeadDim; ++d) bits[d] = to_bf16(head[d]);
  std::memcpy(to, bits, sizeof bits);
}

class TinyEngine final : public Engine {
 public:
  explicit TinyEngine(const EngineOptions& options)
      : hybrid_(options.hybrid), ranks_(options.ranks), shard_(make_shard(options)), cache_(options, shard_),
        weights_(make_weights()) {}

  std::string description() const override {
    return std::string("tiny transformer, 8 layers, 8 heads, bf16 cache") +
           (hybrid_ ? ", sliding-window and recurrent layers" : "");
  }
  const Cache& cache() const override { return cache_.description(); }
  void bind(const std::vector<std::byte*>& pools) override { cache_.bind(pools); }

  std::vector<Token> tokenize(const std::string& text) const override {
    return std::vector<Token>(reinterpret_cast<const unsigned char*>(text.data()),
                              reinterpret_cast<const unsigned char*>(text.data()) + text.size());
  }
  std::string text(const std::vector<Token>&) const override { return {}; }  // noise: the weights are random
  std::string default_prompt() const override {
    std::string prompt;
    for (int i = 1; i <= 17; ++i)
      prompt += "Ship " + std::to_string(i) + " brings the keys and values of every token ashore. ";
    return prompt;
  }

  Token prefill(SequenceId id, const std::vector<Token>& prompt) override {
    if (prompt.empty()) throw std::runtime_error("tiny engine: an empty prompt");
    Sequence& s = cache_.create(id);
    cache_.grow(s, 0, false);
    reset_states(s);
    Token next = 0;
    for (std::size_t begin = 0; begin < prompt.size(); begin += kChunk)
      next = run(s, prompt.data() + begin, std::min(kChunk, prompt.size() - begin));
    return next;
  }

  SequenceSlots export_slots(SequenceId id, SequenceShape* shape) override {
    const Sequence& s = cache_.at(id);
    *shape = {s.tokens, 0};
    return cache_.slots(s);
  }

  using Engine::reserve;
  SequenceSlots reserve(SequenceId id, const SequenceShape& shape, const SharedPrefix& prefix) override {
    Sequence& s = cache_.create(id);
    if (prefix.tokens > 0) cache_.share(s, cache_.at(prefix.sequence), std::min(prefix.tokens, shape.tokens));
    SequenceSlots shared = cache_.slots(s);
    cache_.grow(s, shape.tokens, true);
    SequenceSlots slots = cache_.slots(s);
    for (std::size_t g = 0; g < slots.size(); ++g)
      if (slots[g].paged && !shared[g].slots.empty())
        slots[g].skip = shared[g].slots.size() * cache_.description().groups[g].tokens_per_block;
    return slots;
  }
  bool resume(SequenceId id) override {
    cache_.at(id);
    return true;  // any bytes are a cache
  }

  Token decode(SequenceId id, Token token) override { return run(cache_.at(id), &token, 1); }
  void free(SequenceId id) override { cache_.free(id); }

  Fault fault(SequenceId id) override {
    const Sequence& s = cache_.at(id);
    // A value in the middle of what is held, of the first layer here that has a cache by token.
    for (std::uint32_t l = shard_.layer_begin; l < shard_.layer_end; ++l) {
      if (layer_kind(l, hybrid_) == LayerKind::recurrent) continue;
      const std::uint64_t token = (cache_.first_token(s, cache_.group_of(l)) + s.tokens) / 2;
      return {cache_.address(s, l, Role::value, token, 0), std::byte{0xff}};
    }
    return {cache_.address(s, shard_.layer_begin, Role::recurrent, 0, 0), std::byte{0xff}};
  }

 private:
  // Appends tokens and returns the greedy one after the last.
  Token run(Sequence& s, const Token* tokens, std::size_t count) {
    const std::uint64_t begin = s.tokens;
    cache_.grow(s, begin + count, false);
    std::vector<double> x(count * kHidden);
    for (std::size_t t = 0; t < count; ++t) {
      const double* row = weights_.embedding.data() + (static_cast<std::uint32_t>(tokens[t]) % kVocabulary) * kHidden;
      std::copy(row, row + kHidden, &x[t * kHidden]);
    }
    // [head][token][dim]: what a rank computes is one run of it.
    std::vector<double> heads(kHeads * count * kHeadDim);
    for (std::uint32_t l = 0; l < kLayers; ++l) {
      std::size_t first = 0, last = 0;
      if (shard_.owns(l)) {
        first = shard_.head_begin * count * kHeadDim;
        last = shard_.head_end * count * kHeadDim;
        std::vector<double> n = x;
        for (std::size_t t = 0; t < count; ++t) normalise(&n[t * kHidden], kHidden);
        for (std::uint32_t h = shard_.head_begin; h < shard_.head_end; ++h) {
          double* out = &heads[h * count * kHeadDim];
          if (layer_kind(l, hybrid_) == LayerKind::recurrent)
            recur(s, l, h, n.data(), count, out);
          else
            attention(s, l, h, n.data(), begin, count, out);
        }
      }
      if (ranks_) ranks_->share(heads.data(), heads.size(), first, last);
      // What follows is computed by every rank: cheaper here than a second exchange.
      for (std::size_t t = 0; t < count; ++t) {
        for (std::uint32_t h = 0; h < kHeads; ++h)
          multiply_add(&heads[(h * count + t) * kHeadDim], weights_.layers[l].heads[h].output, kHeadDim, kHidden,
                       &x[t * kHidden]);
        feed_forward(weights_.layers[l], &x[t * kHidden]);
      }
    }
    cache_.trim(s);
    return choose(weights_, &x[(count - 1) * kHidden]);
  }

  void attention(Sequence& s, std::uint32_t layer, std::uint32_t head, const double* n, std::uint64_t begin,
                 std::size_t count, double* out) {
    const HeadWeights& w = weights_.layers[layer].heads[head];
    const std::uint32_t local = head - shard_.head_begin;
    double k[kHeadDim], v[kHeadDim];
    for (std::size_t t = 0; t < count; ++t) {
      multiply(n + t * kHidden, w.key, kHidden, kHeadDim, k);
      multiply(n + t * kHidden, w.value, kHidden, kHeadDim, v);
      rotate(k, begin + t);
      store(cache_.address(s, layer, Role::key, begin + t, local), k);
      store(cache_.address(s, layer, Role::value, begin + t, local), v);
    }
    // Everything is read back from the cache, the tokens of this call included, so that a sequence
    // that continues elsewhere sees the same rounded numbers.
    const std::uint64_t held = cache_.first_token(s, cache_.group_of(layer));
    const std::size_t stride = begin + count - held;
    keys_.resize(stride * kHeadDim);
    values_.resize(stride * kHeadDim);
    scratch_.resize(stride);
    for (std::size_t p = 0; p < stride; ++p) {
      std::uint16_t bits[kHeadDim];
      std::memcpy(bits, cache_.address(s, layer, Role::key, held + p, local), sizeof bits);
      for (std::uint32_t d = 0; d < kHeadDim; ++d) keys_[d * stride + p] = from_bf16(bits[d]);
      std::memcpy(bits, cache_.address(s, layer, Role::value, held + p, local), sizeof bits);
      for (std::uint32_t d = 0; d < kHeadDim; ++d) values_[p * kHeadDim + d] = from_bf16(bits[d]);
    }
    const bool windowed = layer_kind(layer, hybrid_) == LayerKind::window;
    double q[kHeadDim];
    for (std::size_t t = 0; t < count; ++t) {
      multiply(n + t * kHidden, w.query, kHidden, kHeadDim, q);
      rotate(q, begin + t);
      const std::uint64_t end = begin + t + 1;
      const std::uint64_t from = windowed && end > kWindow ? end - kWindow : 0;
      attend(q, keys_.data(), stride, values_.data(), from > held ? from - held : 0, end - held, scratch_.data(),
             out + t * kHeadDim);
    }
  }

  // Linear attention with decay: S = a S + k v^T, out = q S.
  void recur(Sequence& s, std::uint32_t layer, std::uint32_t head, const double* n, std::size_t count, double* out) {
    const HeadWeights& w = weights_.layers[layer].heads[head];
    std::byte* home = cache_.address(s, layer, Role::recurrent, 0, head - shard_.head_begin);
    std::vector<float> state(kHeadDim * kHeadDim);
    std::memcpy(state.data(), home, state.size() * sizeof(float));
    double q[kHeadDim], k[kHeadDim], v[kHeadDim];
    for (std::size_t t = 0; t < count; ++t) {
      multiply(n + t * kHidden, w.query, kHidden, kHeadDim, q);
      multiply(n + t * kHidden, w.key, kHidden, kHeadDim, k);
      multiply(n + t * kHidden, w.value, kHidden, kHeadDim, v);
      double* y = out + t * kHeadDim;
      std::fill(y, y + kHeadDim, 0.0);
      for (std::uint32_t i = 0; i < kHeadDim; ++i) {
        float* row = &state[i * kHeadDim];
        for (std::uint32_t d = 0; d < kHeadDim; ++d) {
          row[d] = static_cast<float>(w.decay * row[d] + k[i] * v[d]);
          y[d] += q[i] * row[d];
        }
      }
      normalise(y, kHeadDim);
    }
    std::memcpy(home, state.data(), state.size() * sizeof(float));
  }

  void reset_states(Sequence& s) {
    for (std::uint32_t l = shard_.layer_begin; l < shard_.layer_end; ++l)
      if (layer_kind(l, hybrid_) == LayerKind::recurrent)
        for (std::uint32_t h = 0; h < shard_.head_end - shard_.head_begin; ++h)
          std::memset(cache_.address(s, l, Role::recurrent, 0, h), 0, kHeadDim * kHeadDim * sizeof(float));
  }

  bool hybrid_;
  RankGroup* ranks_;
  Shard shard_;
  PagedCache cache_;
  Weights weights_;
  std::vector<double> keys_, values_, scratch_;
};

}  // namespace

std::unique_ptr<Engine> make_tiny_engine(const EngineOptions& options) {
  return std::make_unique<TinyEngine>(options);
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options) {
  if (options.name == "tiny") return make_tiny_engine(options);
  if (options.name == "llama.cpp") return make_llama_engine(options);
  throw std::runtime_error("no engine '" + options.name + "' (there are: tiny, llama.cpp)");
}

}  // namespace disagg
