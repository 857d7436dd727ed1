// Checks what the demo rests on: the tiny engine's tokens do not depend on the cache's layout nor on
// how it is split over ranks, and they do depend on every part of the cached bytes.
#include "engine.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <mutex>
#include <random>
#include <string>
#include <thread>

using namespace disagg;

namespace {

constexpr int kTokens = 32;
int failures = 0;

void check(bool ok, const std::string& what) {
  std::printf("%s  %s\n", ok ? "ok  " : "FAIL", what.c_str());
  if (!ok) ++failures;
}

// An engine with cache memory of its own.
struct Instance {
  explicit Instance(const EngineOptions& options) : engine(make_engine(options)) {
    for (const std::uint64_t bytes : engine->cache().pools) memory.emplace_back(bytes);
    std::vector<std::byte*> pools;
    for (auto& m : memory) pools.push_back(m.data());
    engine->bind(pools);
  }
  std::byte* address(std::uint32_t group, std::size_t view, std::size_t layer, std::uint32_t slot, std::uint64_t token,
                     std::uint32_t head) {
    const View& v = engine->cache().groups[group].views[view];
    const bool per_layer = v.tensors.size() > 1;
    const Tensor& t = v.tensors[per_layer ? layer : 0];
    return memory[t.pool].data() + t.offset + slot * v.slot_stride + (per_layer ? 0 : layer * v.layer_stride) +
           token * v.token_stride + head * v.head_stride;
  }
  std::unique_ptr<Engine> engine;
  std::vector<std::vector<std::byte>> memory;
};

// Copies one rank's share of a sequence, head by head, from the descriptions alone.
std::size_t copy(Instance& from, const SequenceSlots& source, Instance& to, const SequenceSlots& destination) {
  std::size_t bytes = 0;
  for (std::uint32_t g = 0; g < source.size(); ++g) {
    const Group& a = from.engine->cache().groups[g];
    const Group& b = to.engine->cache().groups[g];
    const std::uint64_t begin = b.paged ? destination[g].token_begin : 0, end = b.paged ? destination[g].token_end : 1;
    const std::uint64_t ta = a.paged ? a.tokens_per_block : 1, tb = b.paged ? b.tokens_per_block : 1;
    for (std::size_t v = 0; v < a.views.size(); ++v)
      for (std::size_t la = 0; la < a.layers.size(); ++la)
        for (std::size_t lb = 0; lb < b.layers.size(); ++lb)
          for (std::uint32_t h = 0; a.layers[la] == b.layers[lb] && h < a.views[v].heads; ++h) {
            const std::int64_t hb = std::int64_t{a.views[v].shard} * a.views[v].heads + h -
                                    std::int64_t{b.views[v].shard} * b.views[v].heads;
            if (hb < 0 || hb >= b.views[v].heads) continue;
            for (std::uint64_t t = begin; t < end; ++t) {
              const std::uint64_t fa = a.paged ? source[g].token_begin : 0;
              std::memcpy(to.address(g, v, lb, destination[g].slots.at((t - begin) / tb), t % tb,
                                     static_cast<std::uint32_t>(hb)),
                          from.address(g, v, la, source[g].slots.at((t - fa) / ta), t % ta, h),
                          a.views[v].bytes_per_head);
              bytes += a.views[v].bytes_per_head;
            }
          }
  }
  return bytes;
}

std::vector<Token> generate(Engine& engine, Token token, int count = kTokens) {
  std::vector<Token> out;
  for (int i = 0; i < count; ++i) out.push_back(token = engine.decode(1, token));
  return out;
}

// All ranks in one process, one thread each.
class ThreadRanks {
 public:
  explicit ThreadRanks(int world) : world_(world) {}
  void share(double* whole, std::size_t size, std::size_t begin, std::size_t end) {
    std::unique_lock lock(mutex_);
    sum_.resize(size);
    std::copy(whole + begin, whole + end, sum_.begin() + static_cast<std::ptrdiff_t>(begin));
    wait(lock);
    std::copy(sum_.begin(), sum_.end(), whole);
    wait(lock);
  }

 private:
  void wait(std::unique_lock<std::mutex>& lock) {
    const int round = round_;
    if (++arrived_ == world_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
  }
  int world_, arrived_ = 0, round_ = 0;
  std::vector<double> sum_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

class ThreadRank final : public RankGroup {
 public:
  explicit ThreadRank(ThreadRanks& all) : all_(all) {}
  void share(double* whole, std::size_t size, std::size_t begin, std::size_t end) override {
    all_.share(whole, size, begin, end);
  }

 private:
  ThreadRanks& all_;
};

void one_model(bool hybrid) {
  const std::string name = hybrid ? "hybrid: " : "attention: ";
  EngineOptions options;
  options.hybrid = hybrid;
  Instance source(options);
  const std::vector<Token> prompt = source.engine->tokenize(source.engine->default_prompt());
  const Token first = source.engine->prefill(1, prompt);
  SequenceShape shape;
  const SequenceSlots slots = source.engine->export_slots(1, &shape);

  Instance same(options);
  check(same.engine->prefill(1, prompt) == first, name + "two engines agree");
  const std::vector<Token> expected = generate(*same.engine, first);

  // Other strides, other block size, other slots.
  for (const CacheOrder order : {CacheOrder::layer_major, CacheOrder::role_major, CacheOrder::block_major}) {
    EngineOptions other = options;
    other.order = order;
    other.tokens_per_block = order == CacheOrder::layer_major ? 8 : 16;
    Instance destination(other);
    const SequenceSlots reserved = destination.engine->reserve(1, shape);
    const std::size_t bytes = copy(source, slots, destination, reserved);
    check(destination.engine->resume(1) && generate(*destination.engine, first) == expected,
          name + "tokens equal after moving " + std::to_string(bytes) + " bytes to order " +
              std::to_string(static_cast<int>(order)));
  }

  // One bit of one byte, anywhere in what was moved. The highest mantissa bit or above, so that the
  // change is not lost in a value next to zero.
  std::mt19937 numbers(1);
  const auto pick = [&](std::size_t n) { return static_cast<std::uint32_t>(numbers() % n); };
  int changed = 0;
  constexpr int kTrials = 24;
  const std::vector<Token> beginning(expected.begin(), expected.begin() + 6);
  Instance destination(options);
  for (int trial = 0; trial < kTrials; ++trial) {
    const SequenceSlots reserved = destination.engine->reserve(1, shape);
    copy(source, slots, destination, reserved);
    const std::uint32_t g = pick(slots.size());
    const Group& group = destination.engine->cache().groups[g];
    const std::size_t v = pick(group.views.size());
    const View& view = group.views[v];
    std::uint64_t token = 0, ordinal = 0;
    if (group.paged) {
      // Inside the window: older tokens of its first block are held but no longer looked at.
      const std::uint64_t low = group.window ? shape.tokens + 1 - group.window : 0;
      const std::uint64_t position = low + pick(shape.tokens - low);
      ordinal = (position - reserved[g].token_begin) / group.tokens_per_block;
      token = position % group.tokens_per_block;
    }
    std::byte* head = destination.address(g, v, pick(group.layers.size()), reserved[g].slots[ordinal], token,
                                          pick(view.heads));
    const std::uint64_t element = view.element_bits / 8;
    // Little endian: sign and exponent in the last byte, one exponent bit and the mantissa below.
    head[pick(view.bytes_per_head / element) * element + element - 2] ^= std::byte{0x40};
    changed += generate(*destination.engine, first, 6) != beginning;
    destination.engine->free(1);
  }
  check(changed == kTrials, name + "a flipped mantissa bit changed the tokens in " + std::to_string(changed) + " of " +
                                std::to_string(kTrials) + " trials");

  destination.engine->reserve(1, shape);
  for (auto& m : destination.memory) std::fill(m.begin(), m.end(), std::byte{0xa5});
  check(generate(*destination.engine, first) != expected, name + "without the transfer the tokens differ");

  // Two halves of the heads and an uneven pipeline, then from there to one rank.
  ThreadRanks all(4);
  std::vector<std::unique_ptr<ThreadRank>> members;
  std::vector<std::unique_ptr<Instance>> ranks;
  std::vector<Token> firsts(4);
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < 4; ++r) {
    EngineOptions o = options;
    o.tp_size = 2;
    o.tp_rank = r % 2;
    o.stage_layers = {5, 3};
    o.pp_rank = r / 2;
    members.push_back(std::make_unique<ThreadRank>(all));
    o.ranks = members.back().get();
    ranks.push_back(std::make_unique<Instance>(o));
  }
  for (std::uint32_t r = 0; r < 4; ++r)
    threads.emplace_back([&, r] { firsts[r] = ranks[r]->engine->prefill(1, prompt); });
  for (auto& t : threads) t.join();
  check(firsts == std::vector<Token>(4, first), name + "TP 2 x PP 2 (5 + 3 layers) agrees with one rank");
  Instance whole(options);
  const SequenceSlots reserved = whole.engine->reserve(1, shape);
  for (auto& r : ranks) copy(*r, r->engine->export_slots(1, &shape), whole, reserved);
  check(generate(*whole.engine, first) == expected, name + "tokens equal after joining four ranks' shares");
}

}  // namespace

int main() {
  try {
    one_model(false);
    one_model(true);
  } catch (const std::exception& e) {
    std::printf("FAIL  %s\n", e.what());
    return 1;
  }
  return failures == 0 ? 0 : 1;
}
