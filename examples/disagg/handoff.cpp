#include "handoff.hpp"

#include <kvferry.hpp>

#include <map>
#include <stdexcept>
#include <thread>
#include <utility>

namespace disagg {

namespace {

template <typename T, auto Destroy>
using Handle = kvferry::Handle<T, Destroy>;

// Bytes that the library copies out: asked for their size first.
template <typename T>
std::string bytes_of(kvf_status (*get)(const T*, void*, std::size_t, std::size_t*) noexcept, const T* object) {
  std::size_t size = 0;
  kvferry::check(get(object, nullptr, 0, &size));
  std::string bytes(size, '\0');
  kvferry::check(get(object, bytes.data(), bytes.size(), &size));
  return bytes;
}
template <typename T>
std::string text_of(kvf_status (*get)(const T*, char*, std::size_t, std::size_t*) noexcept, const T* object) {
  char text[1024] = "";
  kvferry::check(get(object, text, sizeof text, nullptr));
  return text;
}

// kvferry's block lists count from the sequence's first block; those before a window are not held.
std::vector<std::int32_t> by_ordinal(const Group& group, const GroupSlots& held) {
  std::vector<std::int32_t> slots(held.token_begin / group.tokens_per_block, -1);
  slots.insert(slots.end(), held.slots.begin(), held.slots.end());
  return slots;
}

kvf_key key_of(const Key& key) { return {key.request, key.attempt, 0}; }

std::uint64_t ns(std::chrono::nanoseconds time) { return static_cast<std::uint64_t>(time.count()); }

}  // namespace

struct Handoff::Objects {
  Cache cache;
  // Destroyed in reverse order: the agent, which uses everything, last.
  struct AgentDestroyer {
    void operator()(kvf_agent* agent) const noexcept { (void)kvf_agent_destroy(agent, 1'000'000'000); }
  };
  std::unique_ptr<kvf_agent, AgentDestroyer> agent;
  std::vector<Handle<kvf_pool, kvf_pool_destroy>> pools;
  std::vector<std::byte*> memory;
  Handle<kvf_engine, kvf_engine_destroy> engine;
  Handle<kvf_peer, kvf_peer_destroy> peer;
  std::map<std::pair<std::uint64_t, std::uint32_t>, Handle<kvf_publication, kvf_publication_destroy>> publications;

  void describe_layout();
};

// The layout in kvferry's words: nothing is computed here, every stride is the engine's own.
void Handoff::Objects::describe_layout() {
  std::vector<std::vector<std::vector<kvf_tensor_desc>>> tensors(cache.groups.size());
  std::vector<std::vector<kvf_view_desc>> views(cache.groups.size());
  std::vector<kvf_group_desc> groups;
  for (std::size_t g = 0; g < cache.groups.size(); ++g) {
    const Group& from = cache.groups[g];
    tensors[g].resize(from.views.size());
    for (std::size_t v = 0; v < from.views.size(); ++v) {
      const View& view = from.views[v];
      for (const Tensor& t : view.tensors) tensors[g][v].push_back({pools[t.pool].get(), t.offset});
      kvf_view_desc to = KVF_VIEW_DESC_INIT;
      to.role = static_cast<std::uint32_t>(view.role);
      to.element_bits = view.element_bits;
      to.heads = view.heads;
      to.slots = view.slots;
      to.bytes_per_head = view.bytes_per_head;
      to.shards = view.shards;
      to.shard = view.shard;
      to.tensors = tensors[g][v].data();
      to.num_tensors = tensors[g][v].size();
      to.slot_stride = view.slot_stride;
      to.layer_stride = view.layer_stride;
      to.token_stride = view.token_stride;
      to.head_stride = view.head_stride;
      views[g].push_back(to);
    }
    kvf_group_desc to = KVF_GROUP_DESC_INIT;
    to.kind = from.paged ? KVF_GROUP_PAGED : KVF_GROUP_STATE;
    to.tokens_per_block = from.tokens_per_block;
    to.window = from.window;
    to.layers = from.layers.data();
    to.num_layers = from.layers.size();
    to.views = views[g].data();
    to.num_views = views[g].size();
    groups.push_back(to);
  }
  kvf_layout_desc desc = KVF_LAYOUT_DESC_INIT;
  desc.global_rank = cache.rank;
  desc.tp_rank = cache.tp_rank;
  desc.tp_size = cache.tp_size;
  desc.pp_rank = cache.pp_rank;
  desc.pp_size = cache.pp_size;
  desc.groups = groups.data();
  desc.num_groups = groups.size();
  const auto layout = kvferry::make<Handle<kvf_layout, kvf_layout_destroy>>(kvf_layout_create, &desc);
  kvferry::check(kvf_agent_set_layout(agent.get(), layout.get()));
}

Handoff::Handoff(const std::string& name, const Cache& cache) : objects_(std::make_unique<Objects>()) {
  Objects& o = *objects_;
  o.cache = cache;
  kvf_agent_config config = KVF_AGENT_CONFIG_INIT;
  config.name = name.c_str();
  config.fingerprint = cache.fingerprint.c_str();
  kvf_agent* agent = nullptr;
  kvferry::check(kvf_agent_create(&config, &agent));
  o.agent.reset(agent);
  for (const std::uint64_t bytes : cache.pools) {
    kvf_host_pool_config pool = KVF_HOST_POOL_CONFIG_INIT;
    pool.bytes = bytes == 0 ? 1 : bytes;  // a pipeline stage may hold no layer of a group
    o.pools.push_back(kvferry::make<Handle<kvf_pool, kvf_pool_destroy>>(kvf_host_pool_create, agent, &pool));
    void* base = nullptr;
    kvferry::check(kvf_pool_memory(o.pools.back().get(), &base, nullptr));
    o.memory.push_back(static_cast<std::byte*>(base));
  }
  o.describe_layout();
}

Handoff::~Handoff() = default;

std::vector<std::byte*> Handoff::pools() const { return objects_->memory; }

std::string Handoff::metadata() const { return bytes_of(kvf_agent_metadata, objects_->agent.get()); }

void Handoff::join(const std::vector<std::string>& all_ranks) {
  std::vector<kvf_bytes> ranks;
  for (const std::string& r : all_ranks) ranks.push_back({r.data(), r.size()});
  kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
  desc.world = static_cast<std::uint32_t>(ranks.size());
  desc.rank = objects_->cache.rank;
  desc.ranks = ranks.data();
  desc.num_ranks = ranks.size();
  objects_->engine =
      kvferry::make<Handle<kvf_engine, kvf_engine_destroy>>(kvf_engine_create, objects_->agent.get(), &desc);
}

std::string Handoff::engine_metadata() const { return bytes_of(kvf_engine_metadata, objects_->engine.get()); }

std::string PrefillSide::publish(const Key& key, const SequenceSlots& held) {
  Objects& o = *objects_;
  std::vector<std::vector<std::int32_t>> slots;
  std::vector<kvf_published_group> groups;
  std::vector<kvf_published_state> states;
  slots.reserve(held.size());
  for (const GroupSlots& g : held) {
    const Group& group = o.cache.groups[g.group];
    if (group.layers.empty()) continue;
    if (g.paged) {
      slots.push_back(by_ordinal(group, g));
      groups.push_back({g.group, 0, slots.back().data(), slots.back().size(), g.token_begin, g.token_end});
    } else {
      states.push_back({g.group, static_cast<std::int32_t>(g.slots.at(0)), g.token_end});
    }
  }
  kvf_publish_desc desc = KVF_PUBLISH_DESC_INIT;
  desc.key = key_of(key);
  desc.groups = groups.data();
  desc.num_groups = groups.size();
  desc.states = states.data();
  desc.num_states = states.size();
  auto& publication = o.publications[{key.request, key.attempt}];
  publication =
      kvferry::make<Handle<kvf_publication, kvf_publication_destroy>>(kvf_publish, o.agent.get(), &desc);
  return bytes_of(kvf_publication_ticket, publication.get());
}

std::string PrefillSide::wait_ended(const Key& key, std::chrono::nanoseconds timeout) {
  const auto it = objects_->publications.find({key.request, key.attempt});
  if (it == objects_->publications.end()) throw std::runtime_error("nothing was published under this key");
  const auto publication = std::move(it->second);
  objects_->publications.erase(it);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const kvf_status status = kvf_publication_wait(publication.get(), ns(timeout));
  if (status == KVF_TIMED_OUT) throw std::runtime_error("the reader has not finished in time");
  // The outcome is one thing, whether the slots may be reused another.
  kvf_publication_info info = KVF_PUBLICATION_INFO_INIT;
  for (;;) {
    kvferry::check(kvf_publication_query(publication.get(), &info));
    if (info.memory_safe) break;
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("a reader may still be reading");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (status != KVF_OK) return std::string("ended with ") + kvf_status_name(status);
  return "read by " + std::to_string(info.readers_done) + " of " + std::to_string(info.readers_expected) +
         ", slots free again";
}

DecodeSide::Path DecodeSide::connect(const std::string& engine_metadata, std::chrono::nanoseconds timeout) {
  Objects& o = *objects_;
  o.peer = kvferry::make<Handle<kvf_peer, kvf_peer_destroy>>(kvf_peer_add, o.agent.get(), engine_metadata.data(),
                                                             engine_metadata.size(), std::uint64_t{0});
  const kvf_status status = kvferry::check(kvf_peer_wait(o.peer.get(), ns(timeout)));
  if (status != KVF_OK) throw std::runtime_error("the prefill side cannot be reached: " + text_of(kvf_peer_text, o.peer.get()));
  kvf_peer_info info = KVF_PEER_INFO_INIT;
  kvferry::check(kvf_peer_query(o.peer.get(), &info));
  return {info.transport, text_of(kvf_peer_text, o.peer.get())};
}

TransferReport DecodeSide::pull(const Key&, const std::vector<std::string>& tickets, const SequenceSlots& wanted,
                                std::chrono::nanoseconds timeout) {
  Objects& o = *objects_;
  std::vector<std::vector<std::int32_t>> slots;
  std::vector<kvf_import_group> groups;
  std::vector<kvf_import_state> states;
  slots.reserve(wanted.size());
  for (const GroupSlots& g : wanted) {
    const Group& group = o.cache.groups[g.group];
    if (group.layers.empty()) continue;
    if (g.paged) {
      slots.push_back(by_ordinal(group, g));
      groups.push_back({g.group, 0, slots.back().data(), slots.back().size(), g.token_begin, g.token_end});
    } else {
      states.push_back({g.group, static_cast<std::int32_t>(g.slots.at(0)), g.token_end});
    }
  }
  // The ticket of one rank is enough: kvferry asks the others for what it needs from them.
  const std::string& ticket = tickets.at(0);
  kvf_import_desc desc = KVF_IMPORT_DESC_INIT;
  desc.peer = o.peer.get();
  desc.ticket = ticket.data();
  desc.ticket_bytes = ticket.size();
  desc.groups = groups.data();
  desc.num_groups = groups.size();
  desc.states = states.data();
  desc.num_states = states.size();
  desc.deadline_ns = ns(timeout);
  const auto transfer =
      kvferry::make<Handle<kvf_transfer, kvf_transfer_destroy>>(kvf_import_begin, o.agent.get(), &desc);
  // A scheduler would poll or watch the agent's event fd here; this program has nothing else to do.
  const kvf_status status = kvf_transfer_wait(transfer.get(), ns(timeout) + 1'000'000'000);
  kvf_transfer_info info = KVF_TRANSFER_INFO_INIT;
  kvferry::check(kvf_transfer_query(transfer.get(), &info, nullptr, sizeof(kvf_part_info), 0));
  TransferReport report;
  report.ok = status == KVF_OK;
  report.bytes = info.bytes;
  report.seconds = 1e-9 * static_cast<double>(info.elapsed_ns);
  report.transport = info.transport;
  if (!report.ok) report.error = std::string(kvf_status_name(status)) + ": " + text_of(kvf_transfer_error_text, transfer.get());
  return report;
}

}  // namespace disagg
