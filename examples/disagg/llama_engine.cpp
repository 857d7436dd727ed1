// llama.cpp as an engine. It offers a sequence's cache only as one opaque image, so that is what
// travels: the image is written straight into a kvferry pool, cut into slots of equal size, and read
// straight from the destination's pool. A "token" of this layout is one slot of the image.
#include "engine.hpp"

#ifdef DISAGG_WITH_LLAMA

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>

namespace disagg {

namespace {

constexpr std::uint32_t kContext = 4096;
constexpr std::uint64_t kSlotBytes = 64 * 1024;
constexpr std::uint32_t kSlots = 1024;  // 64 MiB
constexpr int kThreads = 1;             // fixed: another number may round differently; and on a busy
                                        // machine llama.cpp's spinning threads wait for each other

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error("llama.cpp: " + text); }

struct Sequence {
  std::uint32_t first = 0, count = 0;  // slots, neighbours
  std::uint64_t tokens = 0, image_bytes = 0;
};

class LlamaEngine final : public Engine {
 public:
  explicit LlamaEngine(const EngineOptions& options) {
    if (options.model.empty()) fail("no model file given");
    if (options.tp_size > 1 || options.stage_layers.size() > 1) fail("runs on one rank only");
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_.reset(llama_model_load_from_file(options.model.c_str(), model_params));
    if (!model_) fail("cannot load " + options.model);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = kContext;
    params.n_batch = 2048;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = kThreads;
    context_.reset(llama_init_from_model(model_.get(), params));
    if (!context_) fail("cannot make a context");
    vocabulary_ = llama_model_get_vocab(model_.get());

    char text[256] = "";
    llama_model_desc(model_.get(), text, sizeof text);
    description_ = std::string("llama.cpp, ") + text + ", " + std::to_string(llama_model_n_layer(model_.get())) + " layers";
    Group group;
    group.layers = {0};
    View view;
    view.role = Role::opaque;
    view.bytes_per_head = kSlotBytes;
    view.slots = kSlots;
    view.slot_stride = kSlotBytes;
    view.token_stride = kSlotBytes;
    view.head_stride = kSlotBytes;
    view.layer_stride = kSlots * kSlotBytes;
    view.tensors = {{0, 0}};
    group.views = {view};
    cache_.groups = {group};
    cache_.pools = {kSlots * kSlotBytes};
    cache_.fingerprint = "llama.cpp image " + description_ + " " + std::to_string(llama_model_size(model_.get()));
  }

  std::string description() const override { return description_; }
  const Cache& cache() const override { return cache_; }
  void bind(const std::vector<std::byte*>& pools) override { pool_ = reinterpret_cast<std::uint8_t*>(pools.at(0)); }

  std::vector<Token> tokenize(const std::string& text) const override {
    std::vector<Token> tokens(text.size() + 8);
    const int n = llama_tokenize(vocabulary_, text.data(), static_cast<int>(text.size()), tokens.data(),
                                 static_cast<int>(tokens.size()), true, true);
    if (n <= 0) fail("the prompt cannot be tokenized");
    tokens.resize(static_cast<std::size_t>(n));
    return tokens;
  }

  std::string text(const std::vector<Token>& tokens) const override {
    std::string out;
    for (const Token token : tokens) {
      char piece[128];
      const int n = llama_token_to_piece(vocabulary_, token, piece, sizeof piece, 0, false);
      if (n > 0) out.append(piece, static_cast<std::size_t>(n));
    }
    return out;
  }

  std::string default_prompt() const override {
    std::string prompt = "The log of the ferry Kestrel, which carries parcels between two harbours.\n";
    const char* weather[] = {"clear", "windy", "foggy", "rainy", "calm"};
    const char* load[] = {"letters", "apples", "books", "lamps", "clocks", "seeds", "maps"};
    for (int day = 1; day <= 36; ++day)
      prompt += "Day " + std::to_string(day) + ": the sea was " + weather[day % 5] + ", we carried " +
                std::to_string(day * 7 % 31 + 2) + " boxes of " + load[day % 7] + " and came back before dark.\n";
    // An open end: many continuations are nearly as likely, so a wrong cache shows.
    return prompt + "Day 38 was unlike all the days before it. That morning the captain";
  }

  Token prefill(SequenceId id, const std::vector<Token>& prompt) override {
    Sequence& s = create(id);
    if (prompt.empty() || prompt.size() >= kContext) fail("the prompt must have 1 to 4095 tokens");
    activate(id);
    s.tokens = prompt.size();
    std::vector<Token> tokens = prompt;
    return run(tokens.data(), tokens.size(), 0);
  }

  SequenceSlots export_slots(SequenceId id, SequenceShape* shape) override {
    Sequence& s = at(id);
    if (s.count == 0) {
      if (active_ != id) fail("sequence " + std::to_string(id) + " is no longer in the context");
      place(s, llama_state_seq_get_size(context_.get(), 0));
      std::uint8_t* image = pool_ + s.first * kSlotBytes;
      if (llama_state_seq_get_data(context_.get(), image, s.image_bytes, 0) != s.image_bytes)
        fail("the sequence's state has another size than announced");
    }
    *shape = {s.tokens, s.image_bytes};
    return slots(s);
  }

  SequenceSlots reserve(SequenceId id, const SequenceShape& shape, const SharedPrefix&) override {
    Sequence& s = create(id);
    s.tokens = shape.tokens;
    place(s, shape.image_bytes);
    return slots(s);
  }

  bool resume(SequenceId id) override {
    Sequence& s = at(id);
    activate(id);
    return llama_state_seq_set_data(context_.get(), pool_ + s.first * kSlotBytes, s.image_bytes, 0) == s.image_bytes;
  }

  Token decode(SequenceId id, Token token) override {
    Sequence& s = at(id);
    if (active_ != id) fail("one sequence at a time");
    return run(&token, 1, s.tokens++);
  }

  void free(SequenceId id) override {
    at(id);
    sequences_.erase(id);
    if (active_ == id) active_ = 0;
  }

  Fault fault(SequenceId id) override {
    // A trained model forgives much: most single-bit flips tried changed none of the next tokens. What
    // it cannot bridge is a layer of global attention that fails: a not-a-number among its keys makes
    // all its heads useless from then on. A sixteenth into the image lie the keys of such a layer (the
    // second of three) as 16-bit floats; odd addresses are high bytes, since all headers of the image
    // are multiples of 4.
    const Sequence& s = at(id);
    std::uint8_t* high = pool_ + s.first * kSlotBytes + (s.image_bytes / 16 | 1);
    const unsigned mask = (~*high & 0x7cu) | (*high & 3u ? 0u : 2u);
    return {reinterpret_cast<std::byte*>(high), std::byte(mask)};
  }

 private:
  Sequence& create(SequenceId id) {
    if (id == 0) fail("sequence 0 is not a sequence");
    const auto [it, fresh] = sequences_.try_emplace(id);
    if (!fresh) fail("sequence " + std::to_string(id) + " exists already");
    return it->second;
  }
  Sequence& at(SequenceId id) {
    const auto it = sequences_.find(id);
    if (it == sequences_.end()) fail("no sequence " + std::to_string(id));
    return it->second;
  }

  // llama.cpp writes and reads an image in one piece, so its slots must be neighbours: first fit.
  void place(Sequence& s, std::uint64_t bytes) {
    const auto need = static_cast<std::uint32_t>((bytes + kSlotBytes - 1) / kSlotBytes);
    std::map<std::uint32_t, std::uint32_t> taken;
    for (const auto& [id, other] : sequences_)
      if (other.count) taken[other.first] = other.count;
    std::uint32_t first = 0;
    for (const auto& [start, count] : taken) {
      if (first + need <= start) break;
      first = start + count;
    }
    if (bytes == 0 || first + need > kSlots)
      fail("an image of " + std::to_string(bytes) + " bytes does not fit the pool of " + std::to_string(kSlots) +
           " slots of " + std::to_string(kSlotBytes));
    s.first = first;
    s.count = need;
    s.image_bytes = bytes;
  }

  static SequenceSlots slots(const Sequence& s) {
    GroupSlots g;
    for (std::uint32_t i = 0; i < s.count; ++i) g.slots.push_back(s.first + i);
    g.token_end = s.count;
    return {g};
  }

  void activate(SequenceId id) {
    llama_memory_clear(llama_get_memory(context_.get()), true);
    active_ = id;
  }

  Token run(Token* tokens, std::size_t count, std::uint64_t position) {
    const auto n = static_cast<std::int32_t>(count);
    std::unique_ptr<llama_batch, void (*)(llama_batch*)> batch(
        new llama_batch(llama_batch_init(n, 0, 1)), [](llama_batch* b) {
          llama_batch_free(*b);
          delete b;
        });
    for (std::int32_t i = 0; i < n; ++i) {
      batch->token[i] = tokens[i];
      batch->pos[i] = static_cast<llama_pos>(position) + i;
      batch->n_seq_id[i] = 1;
      batch->seq_id[i][0] = 0;
      batch->logits[i] = i == n - 1;
    }
    batch->n_tokens = n;
    if (llama_decode(context_.get(), *batch) != 0) fail("llama_decode failed at position " + std::to_string(position));
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    const int size = llama_vocab_n_tokens(vocabulary_);
    Token best = 0;
    for (Token t = 1; t < size; ++t)
      if (logits[t] > logits[best]) best = t;
    return best;
  }

  template <auto Free>
  struct Deleter {
    template <typename T>
    void operator()(T* p) const {
      Free(p);
    }
  };
  std::unique_ptr<llama_model, Deleter<llama_model_free>> model_;
  std::unique_ptr<llama_context, Deleter<llama_free>> context_;
  const llama_vocab* vocabulary_ = nullptr;
  std::string description_;
  Cache cache_;
  std::uint8_t* pool_ = nullptr;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId active_ = 0;  // the sequence in llama.cpp's own cache
};

}  // namespace

std::unique_ptr<Engine> make_llama_engine(const EngineOptions& options) {
  return std::make_unique<LlamaEngine>(options);
}

}  // namespace disagg

#else

#include <stdexcept>

namespace disagg {

std::unique_ptr<Engine> make_llama_engine(const EngineOptions&) {
  throw std::runtime_error("this build has no llama.cpp; scripts/demo --engine llama.cpp makes one that has");
}

}  // namespace disagg

#endif
