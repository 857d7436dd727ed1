#include "handoff_objects.hpp"

#include <stdexcept>
#include <thread>
#include <utility>

namespace disagg {

Handoff::Handoff(const std::string& name, const Cache& cache) : objects_(std::make_unique<Objects>(name, cache)) {
  Objects& o = *objects_;
  for (const std::uint64_t size : cache.pools)
    o.pools.push_back(o.agent.host_pool(size == 0 ? 1 : size));  // a stage may hold no layer of a group
  std::vector<kvferry::Group> groups;
  for (const Group& from : cache.groups) {
    kvferry::Group to;
    to.kind = from.paged ? KVF_GROUP_PAGED : KVF_GROUP_STATE;
    to.tokens_per_block = from.tokens_per_block;
    to.window = from.window;
    to.layers = from.layers;
    for (const View& v : from.views) to.views.push_back(view_of(v, o.pools));
    groups.push_back(std::move(to));
  }
  kvferry::Coordinates at;
  at.global_rank = cache.rank;
  at.tp_rank = cache.tp_rank;
  at.tp_size = cache.tp_size;
  at.pp_rank = cache.pp_rank;
  at.pp_size = cache.pp_size;
  o.agent.set_layout(groups, at);
}

Handoff::~Handoff() = default;

std::vector<std::byte*> Handoff::pools() const {
  std::vector<std::byte*> memory;
  for (const kvferry::Pool& pool : objects_->pools) memory.push_back(pool.data());
  return memory;
}

std::string Handoff::metadata() const { return text(objects_->agent.metadata()); }

void Handoff::join(const std::vector<std::string>& all_ranks) {
  std::vector<kvferry::Bytes> ranks;
  for (const std::string& r : all_ranks) ranks.push_back(bytes(r));
  objects_->engine = objects_->agent.engine(objects_->cache.rank, ranks);
}

std::string Handoff::engine_metadata() const { return text(objects_->engine.metadata()); }

std::string PrefillSide::publish(const Key& key, const SequenceSlots& held) {
  Objects& o = *objects_;
  const Slots slots(o.cache, held);
  kvferry::Offer offer;
  offer.key = kvferry::key(key.request, key.attempt);
  offer.groups = slots.paged;
  offer.states = slots.states;
  kvferry::Publication publication = o.agent.publish(offer);
  std::string ticket = text(publication.ticket());
  o.publications[{key.request, key.attempt}] = std::move(publication);
  return ticket;
}

std::string PrefillSide::wait_ended(const Key& key, std::chrono::nanoseconds timeout) {
  const auto it = objects_->publications.find({key.request, key.attempt});
  if (it == objects_->publications.end()) throw std::runtime_error("nothing was published under this key");
  const kvferry::Publication publication = std::move(it->second);
  objects_->publications.erase(it);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const kvf_status status = publication.wait(timeout);
  if (status == KVF_TIMED_OUT) throw std::runtime_error("the reader has not finished in time");
  // How it ended is one thing, whether the slots may be reused another.
  kvf_publication_info info = publication.query();
  while (!info.memory_safe) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("a reader may still be reading");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    info = publication.query();
  }
  if (status != KVF_OK) return std::string("ended with ") + kvf_status_name(status);
  return "read by " + std::to_string(info.readers_done) + " of " + std::to_string(info.readers_expected) +
         ", slots free again";
}

DecodeSide::Path DecodeSide::connect(const std::string& engine_metadata, std::chrono::nanoseconds timeout) {
  Objects& o = *objects_;
  o.peer = o.agent.add_peer(bytes(engine_metadata));
  if (kvferry::check(o.peer.wait(timeout)) != KVF_OK)
    throw std::runtime_error("the prefill side cannot be reached: " + o.peer.text());
  return {o.peer.query().transport, o.peer.text()};
}

TransferReport DecodeSide::pull(const Key&, const std::vector<std::string>& tickets, const SequenceSlots& wanted,
                                std::chrono::nanoseconds timeout) {
  Objects& o = *objects_;
  const Slots slots(o.cache, wanted);
  kvferry::Import import = slots.import();
  import.deadline = timeout;
  // The ticket of one rank is enough: kvferry asks the others for what it needs from them.
  const kvferry::Transfer transfer = o.agent.import_begin(o.peer, bytes(tickets.at(0)), import);
  // A scheduler would poll or watch the agent's event fd here; this program has nothing else to do.
  const kvf_status status = transfer.wait(timeout + std::chrono::seconds(1));
  const kvferry::TransferInfo info = transfer.query();
  TransferReport report;
  report.ok = status == KVF_OK;
  report.bytes = info.bytes;
  report.seconds = 1e-9 * static_cast<double>(info.elapsed_ns);
  report.transport = info.transport;
  if (!report.ok) report.error = std::string(kvf_status_name(status)) + ": " + transfer.error_text();
  return report;
}

}  // namespace disagg
