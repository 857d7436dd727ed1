// What the disaggregation example asks of an inference engine. Two engines stand behind it: a tiny
// transformer (no download) and llama.cpp with a real model.
//
// An engine says which cache memory it wants and how the bytes lie in it; the memory itself is given
// from outside (from a kvferry pool), and the engine never learns how the bytes travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace disagg {

using Token = std::int32_t;
using SequenceId = std::uint64_t;

// The numbers are those of the C ABI.
enum class Role : std::uint32_t { key = 1, value = 2, recurrent = 8, opaque = 9 };

// Where a tensor starts: bytes from the start of one of the engine's pools.
struct Tensor {
  std::uint32_t pool = 0;
  std::uint64_t offset = 0;
};

// One role's bytes in a group. The `bytes_per_head` contiguous bytes of one head lie at
//   tensor + slot * slot_stride + layer * layer_stride + token * token_stride + head * head_stride
// (no layer term if there is one tensor per layer).
struct View {
  Role role = Role::opaque;
  std::uint32_t element_bits = 8;
  std::uint32_t heads = 1;
  std::uint64_t bytes_per_head = 0;
  std::uint32_t shards = 1;
  std::uint32_t shard = 0;
  std::vector<Tensor> tensors;
  std::uint32_t slots = 0;
  std::uint64_t slot_stride = 0;
  std::uint64_t layer_stride = 0;
  std::uint64_t token_stride = 0;
  std::uint64_t head_stride = 0;
};

// Layers that share one block table (paged) or one state slot.
struct Group {
  bool paged = true;
  std::uint32_t tokens_per_block = 1;  // paged only
  std::uint32_t window = 0;            // paged only: live tokens of a sliding window, 0 = all
  std::vector<std::uint32_t> layers;   // global ids
  std::vector<View> views;
};

struct Cache {
  std::string fingerprint;  // model, revision and number format
  std::vector<std::uint64_t> pools;  // bytes of each pool the engine wants
  std::vector<Group> groups;
  std::uint32_t rank = 0, tp_rank = 0, tp_size = 1, pp_rank = 0, pp_size = 1;
};

// The slots in which a sequence's cache lies, one entry per group of `Cache::groups`.
struct GroupSlots {
  std::uint32_t group = 0;
  bool paged = true;
  std::vector<std::uint32_t> slots;  // state: exactly one
  std::uint64_t token_begin = 0;     // paged: tokens held in `slots`; a window starts late
  std::uint64_t token_end = 0;       // state: the token count it stands for
  std::uint64_t skip = 0;            // destination: tokens below it are in `slots` already
};
using SequenceSlots = std::vector<GroupSlots>;

// What the destination must know to make room; travels with the ticket.
struct SequenceShape {
  std::uint64_t tokens = 0;       // tokens in the cache
  std::uint64_t image_bytes = 0;  // opaque engines only: size of the sequence's image
};

// Tokens that a sequence here shares with one that is to come: its first blocks are used by both.
struct SharedPrefix {
  SequenceId sequence = 0;
  std::uint64_t tokens = 0;  // 0 = nothing is shared
};

// One rank of one engine. Not thread-safe, errors are exceptions (std::runtime_error).
class Engine {
 public:
  virtual ~Engine() = default;

  virtual std::string description() const = 0;
  virtual const Cache& cache() const = 0;
  // Gives the cache memory, one pointer per entry of `Cache::pools`; must outlive the engine's use.
  virtual void bind(const std::vector<std::byte*>& pools) = 0;

  virtual std::vector<Token> tokenize(const std::string& text) const = 0;
  virtual std::string text(const std::vector<Token>& tokens) const = 0;
  // A prompt of about 950 tokens.
  virtual std::string default_prompt() const = 0;

  // Runs a prompt into a new sequence and returns the first greedy token after it.
  virtual Token prefill(SequenceId id, const std::vector<Token>& prompt) = 0;
  // Writes what is not there yet into the cache memory and names the slots. They stay unchanged
  // until `free` or `decode` of the same sequence.
  virtual SequenceSlots export_slots(SequenceId id, SequenceShape* shape) = 0;

  // Takes slots for a sequence that comes from elsewhere. Whole blocks of the prefix are not taken
  // again: they are the other sequence's, and `GroupSlots::skip` says how far they go. Groups (and
  // engines) that cannot share are given whole.
  virtual SequenceSlots reserve(SequenceId id, const SequenceShape& shape, const SharedPrefix& prefix) = 0;
  SequenceSlots reserve(SequenceId id, const SequenceShape& shape) { return reserve(id, shape, {}); }
  // The reserved slots are filled: the sequence can be decoded. False if the engine itself can see
  // that the bytes are not a cache; the sequence is then empty, at the same position.
  virtual bool resume(SequenceId id) = 0;

  // Appends a token and returns the next greedy one.
  virtual Token decode(SequenceId id, Token token) = 0;
  virtual void free(SequenceId id) = 0;

  // A cached byte and the bits whose flip must show in the tokens (for the negative control).
  struct Fault {
    std::byte* byte;
    std::byte mask;
  };
  virtual Fault fault(SequenceId id) = 0;
};

// How the ranks of one engine combine what each computed (an all-gather, by any means the engine
// likes: this is not kvferry's business).
class RankGroup {
 public:
  virtual ~RankGroup() = default;
  // This rank computed `whole[begin, end)`; on return `whole` holds every rank's part.
  virtual void share(double* whole, std::size_t size, std::size_t begin, std::size_t end) = 0;
};

// Orders of a paged cache's axes, after the engines known for them.
enum class CacheOrder {
  block_major,   // [block][layer][k,v][head][token][dim]       as TensorRT-LLM
  layer_major,   // per layer: [k,v][block][token][head][dim]   as vLLM (NHD), one tensor per layer
  role_major,    // [k,v][layer][block][token][head][dim]       as Megatron-LM
};

struct EngineOptions {
  std::string name = "tiny";
  std::string model;  // llama.cpp only: the GGUF file
  // The rest is for the tiny engine only.
  bool hybrid = false;  // sliding-window and recurrent-state layers between the others
  std::uint32_t tokens_per_block = 16;
  CacheOrder order = CacheOrder::block_major;
  std::uint32_t tp_size = 1, tp_rank = 0;
  std::vector<std::uint32_t> stage_layers;  // pipeline stages; empty = one stage
  std::uint32_t pp_rank = 0;
  RankGroup* ranks = nullptr;  // needed if there is more than one rank
};

std::unique_ptr<Engine> make_engine(const EngineOptions& options);
std::unique_ptr<Engine> make_tiny_engine(const EngineOptions& options);
// Throws if the example was built without llama.cpp.
std::unique_ptr<Engine> make_llama_engine(const EngineOptions& options);

}  // namespace disagg
