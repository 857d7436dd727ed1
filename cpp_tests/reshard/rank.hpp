// One rank of a shape: its agent, its memory, and what must lie in it. Where a byte belongs is
// computed here from the shape alone (parallel sizes, orders, tables); kvferry gets the layout and
// the tables and must come to the same bytes.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <kvferry_transceiver.hpp>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include "cache.hpp"
#include "shape.hpp"

namespace reshard {

// Longer than anything here takes, shorter than the watchdog.
constexpr auto kLongest = std::chrono::seconds(25);

inline std::uint64_t mix(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Coordinates of one head's bytes in the model; the same on every rank that holds them.
struct Spot {
  std::uint64_t request, group, layer, token, role, section, head;

  std::uint64_t seed() const {
    std::uint64_t h = 0x6b7666;
    for (std::uint64_t part : {request, group, layer, token, role, section, head}) {
      h = mix(h ^ mix(part + 1)) * 31 + part;
    }
    return h;
  }
  std::string text() const {
    std::ostringstream out;
    out << "request " << request << " group " << group << " layer " << layer << " token " << token
        << " role " << role << " section " << section << " head " << head;
    return out.str();
  }
};

// Byte `at` of a head.
inline std::uint8_t value(std::uint64_t seed, std::uint64_t at) {
  return static_cast<std::uint8_t>(mix(seed + at / 8) >> (8 * (at % 8)));
}

class Rank {
 public:
  // `requests`: moves by the request level, not by the agent level.
  Rank(const Shape& shape, std::size_t side, std::uint32_t index, bool requests)
      : shape_(shape),
        requests_(requests),
        side_(side),
        s_(shape.sides[side]),
        tp_(index % s_.tp),
        cp_(index / s_.tp % s_.cp),
        pp_(index / s_.tp / s_.cp % s_.pp()),
        dp_(index / s_.tp / s_.cp / s_.pp()),
        index_(index),
        agent_(config(side, index)) {
    for (std::size_t g = 0; g < shape.groups.size(); ++g) add_group(g);
    for (std::uint64_t bytes : pool_bytes_) {
      bytes_.push_back(memory(bytes));
    }
    for (auto& group : groups_) {
      for (std::size_t v = 0; v < group.desc.views.size(); ++v) {
        auto& view = group.desc.views[v];
        const auto& at = group.views[v];
        for (std::uint64_t base : at.bases) view.tensors.push_back(pools_[at.pool].at(base));
      }
      descs_.push_back(group.desc);
    }
    kvferry::Coordinates at;
    at.global_rank = 100 * static_cast<std::uint32_t>(side) + index;
    at.tp_rank = tp_;
    at.tp_size = s_.tp;
    at.pp_rank = pp_;
    at.pp_size = s_.pp();
    at.cp_rank = cp_;
    at.cp_size = s_.cp;
    at.dp_rank = dp_;
    at.dp_size = s_.dp;
    agent_.set_layout(descs_, at);
  }
  Rank(const Rank&) = delete;
  ~Rank() {
    transceiver_.reset();
    transfers_.clear();
    publications_.clear();
    (void)!agent_.destroy(kLongest);
    for (auto [at, bytes] : mapped_) munmap(at, bytes);
  }

  bool serves(std::size_t request) const { return shape_.dp_of(side_, request) == dp_; }
  kvferry::Bytes metadata() const { return agent_.metadata(); }
  kvferry::Bytes engine(const std::vector<kvferry::Bytes>& ranks) {
    engine_ = agent_.engine(index_, ranks);
    if (requests_) transceiver_.emplace(agent_, engine_);
    return engine_.metadata();
  }
  void peer(const kvferry::Bytes& metadata) {
    peer_ = agent_.add_peer(metadata);
    const auto status = peer_.wait(kLongest);
    if (status != KVF_OK) {
      throw std::runtime_error(std::string(kvf_status_name(status)) + ": " + peer_.text());
    }
  }

  // New tables and new bytes: what the source holds, or what must stay at the destination.
  void begin_round(std::uint32_t round) {
    round_ = round;
    for (std::size_t g = 0; g < groups_.size(); ++g) deal_slots(g);
    for (std::size_t p = 0; p < bytes_.size(); ++p) {
      const auto image = before(p);
      std::memcpy(bytes_[p], image.data(), image.size());
    }
    if (side_ == 0) each_held([&](std::size_t p, std::uint64_t at, std::uint8_t b, const Spot&) {
      bytes_[p][at] = b;
    });
    for (auto& mirror : mirrors_) mirror->up();
  }

  kvferry::Bytes publish(std::size_t q) {
    kvferry::Offer offer;
    offer.key = key(q);
    publish_groups(q, offer.groups, offer.states);
    if (transceiver_) {
      begun_.push_back(offer.key);
      return transceiver_->respondAndSendAsync(offer);
    }
    publications_.push_back(agent_.publish(offer));
    return publications_.back().ticket();
  }
  void import(std::size_t q, const kvferry::Bytes& ticket) {
    kvferry::Import want;
    import_groups(q, want.groups, want.states, want.owned_only);
    if (transceiver_) {
      kvferry::ReceiveRequest request;
      request.key = key(q);
      request.peer = &peer_;
      request.ticket = ticket;
      request.what = want;
      begun_.push_back(request.key);
      return transceiver_->requestAndReceiveAsync(request);
    }
    transfers_.push_back(agent_.import_begin(peer_, ticket, want));
  }
  kvferry::Bytes receive(std::size_t q) {
    kvferry::Receive want;
    want.key = key(q);
    import_groups(q, want.groups, want.states, want.owned_only);
    transfers_.push_back(agent_.receive_begin(want));
    return transfers_.back().offer();
  }
  void push(std::size_t q, const kvferry::Bytes& offer) {
    kvferry::Push give;
    publish_groups(q, give.groups, give.states);
    transfers_.push_back(agent_.push_begin(peer_, offer, give));
  }
  // Waits for everything that was begun; the bytes that came, as the transfers count them.
  std::uint64_t finish() {
    if (transceiver_) return side_ == 1 ? finish_requests() : 0;
    std::uint64_t bytes = 0;
    for (auto& transfer : transfers_) {
      const auto status = transfer.wait(kLongest);
      if (status != KVF_OK) {
        throw std::runtime_error(std::string(kvf_status_name(status)) + ": " +
                                 transfer.error_text());
      }
      const auto info = transfer.query();
      if (info.memory_safe == 0) throw std::runtime_error("done but not safe");
      std::uint64_t parts = 0;
      for (const auto& part : info.parts) parts += part.bytes;
      if (side_ == 1 && (info.bytes != info.bytes_total || parts != info.bytes)) {
        throw std::runtime_error("done with " + std::to_string(info.bytes) + " of " +
                                 std::to_string(info.bytes_total) + " bytes, in the parts " +
                                 std::to_string(parts));
      }
      bytes += info.bytes;
    }
    transfers_.clear();
    return bytes;
  }
  // Takes the offers back and waits until their slots may be reused.
  void release() {
    if (transceiver_) release_requests();
    for (auto& publication : publications_) {
      publication.release();
      (void)!publication.wait(kLongest);
      if (publication.query().memory_safe == 0) throw std::runtime_error("released but not safe");
    }
    publications_.clear();
  }

  // The first byte of this destination that is not what it must be, or "".
  std::string check() const {
    for (auto& mirror : mirrors_) mirror->down();
    std::vector<std::vector<std::uint8_t>> expected;
    for (std::size_t p = 0; p < bytes_.size(); ++p) expected.push_back(before(p));
    each_wanted([&](std::size_t p, std::uint64_t at, std::uint8_t b, const Spot&) {
      expected[p][at] = b;
    });
    for (std::size_t p = 0; p < bytes_.size(); ++p) {
      for (std::uint64_t at = 0; at < expected[p].size(); ++at) {
        if (bytes_[p][at] == expected[p][at]) continue;
        std::string where = "which must stay as it was";
        each_wanted([&](std::size_t wp, std::uint64_t w, std::uint8_t, const Spot& place) {
          if (wp == p && w == at) where = place.text();
        });
        return "rank " + std::to_string(index_) + " pool " + std::to_string(p) + " byte " +
               std::to_string(at) + " is " + std::to_string(bytes_[p][at]) + ", not " +
               std::to_string(expected[p][at]) + ": " + where;
      }
    }
    return "";
  }
  // Bytes that the round's requests bring to this rank.
  std::uint64_t moved() const {
    std::uint64_t n = 0;
    each_wanted([&](std::size_t, std::uint64_t, std::uint8_t, const Spot&) { ++n; });
    return n;
  }

 private:
  // Takes results until every receive of the round was reported, once and as a success.
  std::uint64_t finish_requests() {
    std::uint64_t bytes = 0;
    std::vector<kvf_key> open = std::exchange(begun_, {});
    while (!open.empty()) {
      const auto ended = transceiver_->checkGenTransferStatus(1, kLongest);
      if (ended.results.empty()) throw std::runtime_error("a receive was not reported");
      for (const kvf_request_result& result : ended.results) {
        close(open, result);
        if (result.outcome != KVF_OUTCOME_DONE || result.memory_safe == 0) {
          throw std::runtime_error("request " + std::to_string(result.key.request) + " ended as " +
                                   std::to_string(result.outcome) + ": " +
                                   transceiver_->errorText(result.key));
        }
        bytes += result.bytes;
      }
    }
    if (!transceiver_->checkGenTransferComplete()) throw std::runtime_error("not complete");
    return bytes;
  }
  // Publications that no reader needs are cancelled; all must end and be safe.
  void release_requests() {
    std::vector<kvf_key> open = std::exchange(begun_, {});
    for (const kvf_key key : open) (void)transceiver_->cancelRequest(key);
    while (!open.empty()) {
      const auto ended = transceiver_->checkContextTransferStatus(1, kLongest);
      if (ended.results.empty()) throw std::runtime_error("a publication was not reported");
      for (const kvf_request_result& result : ended.results) {
        close(open, result);
        const bool known =
            result.outcome == KVF_OUTCOME_DONE || result.outcome == KVF_OUTCOME_CANCELLED;
        if (!known || result.memory_safe == 0) {
          throw std::runtime_error("a context request ended as " + std::to_string(result.outcome));
        }
      }
    }
  }
  static void close(std::vector<kvf_key>& open, const kvf_request_result& result) {
    const auto same = [&](kvf_key key) {
      return key.request == result.key.request && key.attempt == result.key.attempt;
    };
    const auto at = std::find_if(open.begin(), open.end(), same);
    if (result.kind != KVF_RESULT_ENDED || at == open.end()) {
      throw std::runtime_error("a result that nobody waits for");
    }
    open.erase(at);
  }

  using Write = std::function<void(std::size_t pool, std::uint64_t at, std::uint8_t byte,
                                   const Spot& place)>;

  // Where the heads of a view are: in the model, and in memory.
  struct ViewAt {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> heads;  // (section, global head)
    std::size_t pool = 0;
    std::vector<std::uint64_t> bases;  // one, or one per layer
    std::uint64_t slot = 0, layer = 0, token = 0, head = 0;
  };
  struct GroupAt {
    kvferry::Group desc;
    std::vector<ViewAt> views;
    std::uint32_t slots = 0;
    std::uint64_t tokens = 1;  // per block
    std::vector<std::vector<std::int32_t>> tables;  // of each request, in the form it is given in
    std::vector<std::uint64_t> first;               // and the ordinal that it starts with
    std::vector<std::map<std::uint64_t, std::int32_t>> blocks;  // ordinal -> slot
    std::int32_t spare = 0;
  };

  static kvferry::AgentConfig config(std::size_t side, std::uint32_t index) {
    auto config = process_test::quick((side == 0 ? "source" : "sink") + std::to_string(index));
    config.workers = 1;
    return config;
  }

  kvf_key key(std::size_t q) const {
    return kvferry::key(1000 + q, round_);
  }

  std::uint8_t* memory(std::uint64_t bytes) {
    if (!s_.own_memory && kvferry_test::on_device()) {
      mirrors_.push_back(std::make_unique<kvferry_test::Mirror>(bytes));
      auto& mirror = *mirrors_.back();
      pools_.push_back(agent_.register_device_memory(mirror.device(), bytes));
      return mirror.host();
    }
    if (!s_.own_memory) {
      pools_.push_back(agent_.host_pool(bytes));
      return reinterpret_cast<std::uint8_t*>(pools_.back().data());
    }
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("mmap");
    mapped_.emplace_back(at, bytes);
    pools_.push_back(agent_.register_memory(at, bytes));
    return static_cast<std::uint8_t*>(at);
  }

  // Every group's blocks of all requests, and three that stay free.
  std::uint32_t slots_of(const GroupAt& group, bool state) const {
    std::uint64_t n = 3;
    for (const Request& r : shape_.requests) {
      n += state ? 1 : (r.tokens + group.tokens - 1) / group.tokens;
    }
    return static_cast<std::uint32_t>(n);
  }

  void add_group(std::size_t g) {
    const Group& model = shape_.groups[g];
    GroupAt at;
    at.desc.kind = model.state ? KVF_GROUP_STATE : KVF_GROUP_PAGED;
    if (!model.state) {
      at.tokens = s_.tokens_per_block * model.block_scale;
      at.desc.tokens_per_block = static_cast<std::uint32_t>(at.tokens);
      at.desc.window = model.window[side_];
      at.desc.ordinal_offset = cp_;
      at.desc.ordinal_stride = s_.cp;
    }
    at.slots = slots_of(at, model.state);
    for (std::uint32_t layer : s_.stages[pp_]) {
      if (std::count(model.layers.begin(), model.layers.end(), layer) != 0) {
        at.desc.layers.push_back(layer);
      }
    }
    for (const Role& role : model.roles) {
      kvferry::View view;
      view.role = role.role;
      view.element_bits = role.bits;
      view.bytes_per_head = role.bytes;
      view.slots = at.slots;
      ViewAt where;
      if (role.sections.empty()) {
        view.shards = std::min(s_.tp, role.heads);
        const std::uint32_t copies = s_.tp / view.shards;
        view.heads = role.heads / view.shards;
        view.shard = tp_ / copies;
        // A state is held by every rank of context parallelism, blocks are not.
        view.replicas = copies * (model.state ? s_.cp : 1);
        view.replica = tp_ % copies + (model.state ? cp_ * copies : 0);
        for (std::uint32_t h = 0; h < view.heads; ++h) {
          where.heads.emplace_back(0, view.shard * view.heads + h);
        }
      } else {
        view.shards = s_.tp;
        view.shard = tp_;
        view.sections = role.sections;
        if (s_.sections_backwards) std::reverse(view.sections.begin(), view.sections.end());
        view.heads = 0;
        for (const auto& section : view.sections) {
          const std::uint32_t mine = section.total / s_.tp;
          const std::uint64_t name = static_cast<std::uint64_t>(section.name[0]);
          for (std::uint32_t h = 0; h < mine; ++h) where.heads.emplace_back(name, tp_ * mine + h);
          view.heads += mine;
        }
        view.replicas = model.state ? s_.cp : 1;
        view.replica = model.state ? cp_ : 0;
      }
      at.desc.views.push_back(view);
      at.views.push_back(where);
    }
    if (at.desc.layers.empty()) {
      at.desc.views.clear();
      at.views.clear();
    } else {
      arrange(at);
    }
    groups_.push_back(std::move(at));
  }

  // Gives a group's views their places, in the order of the side's form.
  void arrange(GroupAt& group) {
    const std::uint64_t layers = group.desc.layers.size(), slots = group.slots, tokens = group.tokens;
    const std::size_t views = group.views.size();
    const bool hnd =
        s_.form == Form::hnd || s_.form == Form::trtllm || s_.form == Form::trtllm_old;
    const std::uint64_t pad = s_.form == Form::padded ? 4 : 0;
    std::vector<std::uint64_t> block(views), before(views);
    std::uint64_t together = 0;
    for (std::size_t v = 0; v < views; ++v) {
      ViewAt& at = group.views[v];
      const std::uint64_t bytes = group.desc.views[v].bytes_per_head + pad;
      const std::uint64_t heads = at.heads.size();
      at.head = hnd ? tokens * bytes : bytes;
      at.token = hnd ? bytes : heads * bytes + 2 * pad;
      block[v] = (hnd ? heads * at.head : tokens * at.token) + 4 * pad;
      before[v] = together;
      together += block[v];
    }
    for (std::size_t v = 0; v < views; ++v) {
      ViewAt& at = group.views[v];
      switch (s_.form) {
        case Form::megatron:
          at.slot = block[v];
          at.layer = slots * block[v];
          at.bases = {take(0, layers * slots * block[v])};
          break;
        case Form::trtllm:
        case Form::trtllm_old: {
          const std::uint64_t base =
              v == 0 ? take(0, slots * layers * together) : group.views[0].bases[0];
          const bool old = s_.form == Form::trtllm_old;
          at.slot = layers * together;
          at.layer = old ? block[v] : together;
          at.bases = {base + (old ? layers : 1) * before[v]};
          break;
        }
        case Form::flash:
          at.slot = together;
          for (std::uint64_t l = 0; l < layers; ++l) {
            const std::uint64_t base = v == 0 ? take(0, slots * together) : group.views[0].bases[l];
            at.bases.push_back(base + before[v]);
          }
          break;
        case Form::per_layer:
          at.slot = block[v];
          at.pool = v % 2;
          for (std::uint64_t l = 0; l < layers; ++l) {
            at.bases.push_back(take(at.pool, slots * block[v]));
            (void)take(at.pool, 64 + 16 * l);
          }
          break;
        case Form::nhd:
        case Form::hnd:
        case Form::padded:
          at.slot = block[v];
          for (std::uint64_t l = 0; l < layers; ++l) {
            at.bases.push_back(take(0, slots * block[v]));
          }
          break;
      }
      auto& view = group.desc.views[v];
      view.slot_stride = at.slot;
      view.layer_stride = at.bases.size() == 1 ? at.layer : 0;
      view.token_stride = group.desc.kind == KVF_GROUP_STATE ? 0 : at.token;
      view.head_stride = at.head;
    }
  }

  std::uint64_t take(std::size_t pool, std::uint64_t bytes) {
    if (pool_bytes_.size() <= pool) pool_bytes_.resize(pool + 1);
    const std::uint64_t at = pool_bytes_[pool];
    pool_bytes_[pool] += bytes;
    return at;
  }

  // What a pool holds before anything is moved: at the source what must never be read.
  std::vector<std::uint8_t> before(std::size_t p) const {
    std::vector<std::uint8_t> image(pool_bytes_[p]);
    const std::uint64_t seed = mix(0xca7a + side_ * 977 + index_ * 31 + round_ * 7 + p);
    for (std::uint64_t at = 0; at < image.size(); ++at) image[at] = value(seed, at);
    return image;
  }

  // Slots in runs of three, in any order, different on every rank.
  void deal_slots(std::size_t g) {
    GroupAt& group = groups_[g];
    const Group& model = shape_.groups[g];
    std::mt19937_64 random(mix(side_ * 1009 + index_ * 101 + g * 11 + round_));
    std::vector<std::int32_t> runs((group.slots + 2) / 3), free;
    std::iota(runs.begin(), runs.end(), 0);
    std::shuffle(runs.begin(), runs.end(), random);
    for (std::int32_t run : runs) {
      for (std::int32_t s = 3 * run; s < std::min<std::int64_t>(3 * run + 3, group.slots); ++s) {
        free.push_back(s);
      }
    }
    auto next = free.begin();
    group.tables.assign(shape_.requests.size(), {});
    group.first.assign(shape_.requests.size(), 0);
    group.blocks.assign(shape_.requests.size(), {});
    for (std::size_t q = 0; q < shape_.requests.size(); ++q) {
      if (model.state) {
        group.blocks[q][0] = *next;
        group.tables[q] = {*next++};
        continue;
      }
      const std::uint64_t end = side_ == 0 ? shape_.requests[q].tokens : shape_.requests[q].end();
      const std::uint64_t live = live_from(model.window[side_], end) / group.tokens;
      if (s_.live_tables) group.first[q] = live;
      for (std::uint64_t o = cp_; o * group.tokens < end; o += s_.cp) {
        if (o >= live) group.blocks[q][o] = *next;
        if (o >= live || !s_.live_tables) group.tables[q].push_back(o >= live ? *next++ : -1);
      }
    }
    group.spare = *next;
  }

  static std::uint64_t live_from(std::uint64_t window, std::uint64_t end) {
    return window != 0 && end > window ? end - window : 0;
  }

  // Tokens of a request that move in a group: [from, to).
  std::pair<std::uint64_t, std::uint64_t> wanted(std::size_t q, std::size_t g) const {
    const Request& r = shape_.requests[q];
    const Group& model = shape_.groups[g];
    if (skip(q, g) >= r.end()) return {0, 0};
    const std::uint64_t fine =
        std::min(shape_.sides[0].tokens_per_block, shape_.sides[1].tokens_per_block) *
        std::uint64_t{model.block_scale};
    const std::uint64_t from = std::max<std::uint64_t>(skip(q, g), live_from(model.window[1], r.end()));
    return {from / fine * fine, r.end()};
  }
  // A multiple of the group's blocks, or everything.
  std::uint64_t skip(std::size_t q, std::size_t g) const {
    const Request& r = shape_.requests[q];
    const std::uint64_t block =
        shape_.sides[1].tokens_per_block * std::uint64_t{shape_.groups[g].block_scale};
    return r.skip >= r.end() ? r.end() : r.skip / block * block;
  }

  // Calls `write` for every byte of tokens [from, to) of a request that this rank has a block for.
  void each_byte(std::size_t q, std::size_t g, std::uint64_t from, std::uint64_t to,
                 const Write& write) const {
    const GroupAt& group = groups_[g];
    for (std::uint64_t token = from; token < to; ++token) {
      const auto block = group.blocks[q].find(token / group.tokens);
      if (block == group.blocks[q].end()) continue;
      for (std::size_t l = 0; l < group.desc.layers.size(); ++l) {
        for (std::size_t v = 0; v < group.views.size(); ++v) {
          const ViewAt& at = group.views[v];
          const std::uint64_t base = at.bases.size() == 1 ? at.bases[0] + l * at.layer : at.bases[l];
          const std::uint64_t start = base + static_cast<std::uint64_t>(block->second) * at.slot +
                                      token % group.tokens * at.token;
          for (std::size_t h = 0; h < at.heads.size(); ++h) {
            const Spot place{1000 * round_ + q,        g, group.desc.layers[l], token,
                               group.desc.views[v].role, at.heads[h].first,
                               at.heads[h].second};
            const std::uint64_t seed = place.seed();
            for (std::uint64_t i = 0; i < group.desc.views[v].bytes_per_head; ++i) {
              write(at.pool, start + h * at.head + i, value(seed, i), place);
            }
          }
        }
      }
    }
  }
  void each_held(const Write& write) const {
    for (std::size_t q = 0; q < shape_.requests.size(); ++q) {
      for (std::size_t g = 0; serves(q) && g < groups_.size(); ++g) {
        const bool state = shape_.groups[g].state;
        each_byte(q, g, 0, state ? 1 : shape_.requests[q].tokens, write);
      }
    }
  }
  void each_wanted(const Write& write) const {
    for (std::size_t q = 0; q < shape_.requests.size(); ++q) {
      for (std::size_t g = 0; serves(q) && g < groups_.size(); ++g) {
        const auto [from, to] = shape_.groups[g].state ? std::pair<std::uint64_t, std::uint64_t>{0, 1}
                                                       : wanted(q, g);
        each_byte(q, g, from, to, write);
      }
    }
  }

  void publish_groups(std::size_t q, std::vector<kvf_published_group>& groups,
                      std::vector<kvf_published_state>& states) const {
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const GroupAt& group = groups_[g];
      const std::uint64_t tokens = shape_.requests[q].tokens;
      if (shape_.groups[g].state) {
        states.push_back({g, group.tables[q][0], tokens});
        continue;
      }
      auto given = kvferry::published(g, group.tables[q],
                                      live_from(shape_.groups[g].window[0], tokens), tokens);
      given.first_ordinal = group.first[q];
      groups.push_back(given);
    }
  }
  void import_groups(std::size_t q, std::vector<kvf_import_group>& groups,
                     std::vector<kvf_import_state>& states,
                     std::vector<kvf_slot_ref>& owned_only) const {
    const Request& r = shape_.requests[q];
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const GroupAt& group = groups_[g];
      if (shape_.groups[g].state) {
        states.push_back({g, group.tables[q][0], q % 2 == 0 ? r.tokens : KVF_AS_OF_ANY});
        continue;
      }
      const bool all = r.wanted == 0 && q % 2 == 0 && skip(q, g) < r.end();
      auto want = kvferry::wanted(g, group.tables[q], skip(q, g),
                                  all ? KVF_TOKEN_END_ALL : std::uint64_t{r.end()});
      want.first_ordinal = group.first[q];
      groups.push_back(want);
      if (!group.desc.layers.empty()) owned_only.push_back({g, group.spare});
    }
  }

  const Shape& shape_;
  const bool requests_;
  const std::size_t side_;
  const Side& s_;
  const std::uint32_t tp_, cp_, pp_, dp_, index_;
  std::uint32_t round_ = 0;
  std::vector<GroupAt> groups_;
  std::vector<std::uint64_t> pool_bytes_;
  std::vector<std::uint8_t*> bytes_;
  std::vector<std::pair<void*, std::uint64_t>> mapped_;
  std::vector<std::unique_ptr<kvferry_test::Mirror>> mirrors_;
  kvferry::Agent agent_;
  std::vector<kvferry::Pool> pools_;
  std::vector<kvferry::Group> descs_;
  kvferry::Engine engine_;
  kvferry::Peer peer_;
  std::vector<kvferry::Publication> publications_;
  std::vector<kvferry::Transfer> transfers_;
  std::optional<kvferry::CacheTransceiver> transceiver_;
  std::vector<kvf_key> begun_;  // of the round
};

}  // namespace reshard
