#include "service.hpp"

#include "handoff_objects.hpp"

#include <kvferry_transceiver.hpp>

#include <cstring>
#include <optional>
#include <stdexcept>

namespace disagg {

struct RequestSide::Requests {
  std::optional<kvferry::CacheTransceiver> transceiver;
};

namespace {

const char* word(std::uint32_t outcome) {
  switch (outcome) {
    case KVF_OUTCOME_DONE: return "done";
    case KVF_OUTCOME_CANCELLED: return "cancelled";
    case KVF_OUTCOME_CANCELLED_BY_PEER: return "cancelled by peer";
    case KVF_OUTCOME_EXPIRED: return "expired";
    case KVF_OUTCOME_DECLINED: return "declined";
    default: return "failed";
  }
}

std::vector<Ended> lines(const kvferry::TransferStatuses& statuses) {
  std::vector<Ended> all;
  for (const kvf_request_result& r : statuses.results) {
    Ended e;
    e.key = {r.key.request, r.key.attempt};
    e.ended = r.kind == KVF_RESULT_ENDED;
    e.done = r.outcome == KVF_OUTCOME_DONE;
    e.outcome = word(r.outcome);
    e.memory_safe = r.memory_safe != 0 || r.kind == KVF_RESULT_MEMORY_SAFE;
    e.bytes = r.bytes;
    e.seconds = 1e-9 * static_cast<double>(r.elapsed_ns);
    all.push_back(std::move(e));
  }
  return all;
}

kvf_key key_of(const Key& key) { return kvferry::key(key.request, key.attempt); }

}  // namespace

RequestSide::RequestSide(const std::string& name, const Cache& cache)
    : Handoff(name, cache), requests_(std::make_unique<Requests>()) {}

RequestSide::~RequestSide() = default;

void RequestSide::open() { requests_->transceiver.emplace(objects_->agent, objects_->engine); }

std::string RequestSide::connect(const std::string& engine_metadata, std::chrono::nanoseconds timeout) {
  Objects& o = *objects_;
  o.peer = o.agent.add_peer(bytes(engine_metadata));
  if (kvferry::check(o.peer.wait(timeout)) != KVF_OK)
    throw std::runtime_error("the prefill side cannot be reached: " + o.peer.text());
  return o.peer.text();
}

std::string RequestSide::send(const Key& key, const SequenceSlots& held, Token first) {
  const Slots slots(objects_->cache, held);
  kvferry::Offer offer;
  offer.key = key_of(key);
  offer.groups = slots.paged;
  offer.states = slots.states;
  offer.aux.resize(sizeof first);
  std::memcpy(offer.aux.data(), &first, sizeof first);
  return text(requests_->transceiver->respondAndSendAsync(offer));
}

std::vector<Ended> RequestSide::sent(int at_least, std::chrono::nanoseconds timeout) {
  return lines(requests_->transceiver->checkContextTransferStatus(at_least, timeout));
}

void RequestSide::receive(const Key& key, const std::string& ticket, const SequenceSlots& wanted) {
  const Slots slots(objects_->cache, wanted);
  kvferry::ReceiveRequest request;
  request.key = key_of(key);
  request.peer = &objects_->peer;
  request.ticket = bytes(ticket);
  request.what = slots.import();
  requests_->transceiver->requestAndReceiveAsync(request);
}

std::vector<Ended> RequestSide::received(int at_least, std::chrono::nanoseconds timeout) {
  return lines(requests_->transceiver->checkGenTransferStatus(at_least, timeout));
}

Token RequestSide::first_token(const Key& key) const {
  const kvferry::Bytes aux = requests_->transceiver->aux(key_of(key));
  Token token = 0;
  if (aux.size() != sizeof token) throw std::runtime_error("the first token did not come along");
  std::memcpy(&token, aux.data(), sizeof token);
  return token;
}

void RequestSide::cancel(const Key& key) { (void)requests_->transceiver->cancelRequest(key_of(key)); }

int RequestSide::descriptor() const { return requests_->transceiver->event_fd(); }

void RequestSide::interrupt() { requests_->transceiver->interrupt(); }

std::string RequestSide::metrics() const { return objects_->agent.metrics_text(); }

std::string RequestSide::records() const { return requests_->transceiver->records(KVF_RECORDS_CSV); }

}  // namespace disagg
