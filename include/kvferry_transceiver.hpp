// SPDX-License-Identifier: Apache-2.0
// kvferry for C++17, request level: CacheTransceiver, under the method names that users of
// TensorRT-LLM's class know. Header-only, no logic, no ABI of its own; a method without a comment is
// its C function. docs/transceiver.md says what each call means, docs/mirrors.md what differs from
// TensorRT-LLM's. Conventions (errors, ownership, threads) are kvferry.hpp's.
#pragma once

#include <kvferry.hpp>

#include <optional>

namespace kvferry {

// All-gather inside a group of a domain's ranks (KVF_EXCHANGE_TENSOR, KVF_EXCHANGE_PIPELINE): fill
// `all` with every member's `bytes` bytes, in the same order on every member. What it throws comes
// out of the status call, which has then committed nothing.
using GroupExchange = std::function<void(std::uint32_t group, const void* mine, void* all,
                                         std::size_t bytes)>;

// kvf_transceiver_config. Zero is the default.
struct CacheTransceiverConfig {
  std::uint32_t direction = KVF_DIRECTION_PULL;
  // TensorRT-LLM's kv_transfer_sender_future_timeout_ms, kv_transfer_poll_interval_ms,
  // kv_transfer_timeout_ms.
  Nanoseconds context_poll{0}, generation_poll{0}, transfer{0};
  Nanoseconds cancel_memory{0};
  std::uint32_t consensus = KVF_CONSENSUS_NONE;
  std::uint64_t domain = 0;
  std::uint32_t world = 0, rank = 0;
  Nanoseconds context_limit{0}, generation_limit{0};
  std::uint32_t tensor_ranks = 0, pipeline_ranks = 0;
  bool wait_before_exchange = false;
  GroupExchange exchange;
  std::uint32_t records = 0;
};

// kvf_receive_request. Direction push: without a ticket.
struct ReceiveRequest {
  kvf_key key = KVF_KEY_INIT;
  const Peer* peer = nullptr;
  Bytes ticket;
  Import what;
};

// What a status call or apply() tells.
struct TransferStatuses {
  // KVF_OK: as many as asked for, or all; KVF_TIMED_OUT, KVF_INTERRUPTED: fewer.
  kvf_status status = KVF_OK;
  std::vector<kvf_request_result> results;
  // Call again (with atLeast 0): not all results fitted.
  bool more = false;
  // Leader of a voting domain: broadcast this to the followers' apply(), unless it is empty.
  Bytes decision;

  // Keys of the requests that were reported as ended, by outcome.
  std::vector<kvf_key> completed() const { return ended(KVF_OUTCOME_DONE, true); }
  std::vector<kvf_key> unsuccessful() const { return ended(KVF_OUTCOME_DONE, false); }

 private:
  std::vector<kvf_key> ended(std::uint32_t outcome, bool equal) const {
    std::vector<kvf_key> keys;
    for (const kvf_request_result& result : results) {
      if (result.kind == KVF_RESULT_ENDED && (result.outcome == outcome) == equal) {
        keys.push_back(result.key);
      }
    }
    return keys;
  }
};

// kvf_transceiver. Destroying it cancels what is in flight and detaches.
class CacheTransceiver {
 public:
  // Results per call; `more` says that others wait.
  static constexpr std::size_t max_results = 64;

  // kvf_transceiver_create().
  CacheTransceiver(const Agent& agent, const Engine& engine,
                   const CacheTransceiverConfig& config = {})
      : exchange_(config.exchange ? std::make_unique<GroupExchange>(config.exchange) : nullptr) {
    kvf_transceiver_config c = KVF_TRANSCEIVER_CONFIG_INIT;
    c.direction = config.direction;
    c.context_poll_ns = detail::ns(config.context_poll);
    c.generation_poll_ns = detail::ns(config.generation_poll);
    c.transfer_ns = detail::ns(config.transfer);
    c.cancel_memory_ns = detail::ns(config.cancel_memory);
    c.consensus = config.consensus;
    c.domain = config.domain;
    c.world = config.world;
    c.rank = config.rank;
    c.context_limit_ns = detail::ns(config.context_limit);
    c.generation_limit_ns = detail::ns(config.generation_limit);
    c.tensor_ranks = config.tensor_ranks;
    c.pipeline_ranks = config.pipeline_ranks;
    c.wait_before_exchange = config.wait_before_exchange ? 1 : 0;
    c.records = config.records;
    if (exchange_) {
      c.exchange = &CacheTransceiver::on_exchange;
      c.exchange_arg = exchange_.get();
    }
    handle_ = make<Owner>(kvf_transceiver_create, agent.c(), engine.c(), &c);
  }
  CacheTransceiver(CacheTransceiver&&) noexcept = default;
  // The old transceiver ends before its exchange does.
  CacheTransceiver& operator=(CacheTransceiver&& other) noexcept {
    handle_ = std::move(other.handle_);
    exchange_ = std::move(other.exchange_);
    return *this;
  }

  kvf_transceiver* c() const noexcept { return handle_.get(); }

  // -- requests ----------------------------------------------------------------------------

  // Gives the ticket, which travels to the generation side with the request.
  Bytes respondAndSendAsync(const Offer& offer) {
    const kvf_publish_desc request = detail::publish_desc(offer);
    Bytes bytes(most_tickets);
    std::size_t needed = 0;
    const kvf_status status = kvf_transceiver_respond_and_send_async(
        c(), &request, bytes.data(), bytes.size(), &needed);
    if (status == KVF_ERR_OUT_OF_RANGE && needed > bytes.size()) {
      return ticket(offer.key);  // in flight, only the buffer was too small
    }
    check(status);
    bytes.resize(needed);
    return bytes;
  }
  // kvf_transceiver_push_async(): answers the offer of a generation rank (direction push).
  void respondAndSendAsync(const Peer& peer, const Bytes& offer, const Push& what) {
    const kvf_push_desc request = detail::push_desc(peer, offer, what);
    check(kvf_transceiver_push_async(c(), &request));
  }
  // Direction push: the bytes of a receive in flight, for the context side.
  Bytes offer(kvf_key key) const {
    return detail::collect<Bytes>([&](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transceiver_offer(c(), key, buf, cap, needed);
    });
  }
  // KVF_ERR_UNSUPPORTED for now.
  void respondAndSendLayerWise() {
    check(kvf_transceiver_respond_and_send_layer_wise(c(), nullptr));
  }
  // KVF_ERR_UNSUPPORTED for now.
  void prepareContextRequests(const std::vector<kvf_key>& keys) {
    check(kvf_transceiver_prepare_context_requests(c(), keys.data(), keys.size()));
  }
  void requestAndReceiveAsync(const ReceiveRequest& request) {
    const kvf_receive_request r = receive_request(request);
    check(kvf_transceiver_request_and_receive_async(c(), &r));
  }
  // Gives how it ended, whatever the outcome; throws when it could not begin.
  kvf_request_result requestAndReceiveSync(const ReceiveRequest& request) {
    const kvf_receive_request r = receive_request(request);
    kvf_request_result result = KVF_REQUEST_RESULT_INIT;
    const kvf_status status =
        kvf_transceiver_request_and_receive_sync(c(), &r, &result, sizeof(result));
    if (result.kind != KVF_RESULT_ENDED) check(status);
    return result;
  }
  // The ticket of a context request in flight.
  Bytes ticket(kvf_key key) const {
    return detail::collect<Bytes>([&](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transceiver_ticket(c(), key, buf, cap, needed);
    });
  }

  // -- status ------------------------------------------------------------------------------

  // nullopt = all in flight, 0 = only sweep; without a time-out, the configured one.
  TransferStatuses checkContextTransferStatus(
      std::optional<int> atLeast = std::nullopt,
      std::optional<Nanoseconds> timeout = std::nullopt) {
    return status(kvf_transceiver_check_context_transfer_status, atLeast, timeout);
  }
  TransferStatuses checkGenTransferStatus(std::optional<int> atLeast = std::nullopt,
                                          std::optional<Nanoseconds> timeout = std::nullopt) {
    return status(kvf_transceiver_check_gen_transfer_status, atLeast, timeout);
  }
  bool checkGenTransferComplete() const {
    return check(kvf_transceiver_check_gen_transfer_complete(c())) == KVF_OK;
  }
  // Follower of a voting domain. Empty bytes fetch what did not fit before.
  TransferStatuses apply(const Bytes& decision) {
    kvf_request_result results[max_results];
    TransferStatuses out;
    std::size_t n = 0;
    std::uint32_t more = 0;
    out.status = check(kvf_transceiver_apply(c(), decision.data(), decision.size(), results,
                                             sizeof(results[0]), max_results, &n, &more));
    out.results.assign(results, results + n);
    out.more = more != 0;
    return out;
  }

  // -- cancel and observation --------------------------------------------------------------

  // True: no memory of the request is in use. False: its result will say when.
  bool cancelRequest(kvf_key key) { return check(kvf_transceiver_cancel(c(), key)) == KVF_OK; }
  bool hasInflightTransfer(kvf_key key) const {
    return check(kvf_transceiver_has_inflight(c(), key)) == KVF_IN_PROGRESS;
  }
  kvf_request_record record(kvf_key key) const {
    kvf_request_record record = KVF_REQUEST_RECORD_INIT;
    check(kvf_transceiver_record(c(), key, &record));
    return record;
  }
  // kvf_transceiver_records_text(): KVF_RECORDS_JSON_LINES or KVF_RECORDS_CSV.
  std::string records(std::uint32_t format = KVF_RECORDS_JSON_LINES) const {
    return detail::growing_text([&](char* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transceiver_records_text(c(), format, buf, cap, needed);
    });
  }
  // The bytes that the publisher attached.
  Bytes aux(kvf_key key) const {
    return detail::collect<Bytes>([&](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transceiver_aux(c(), key, buf, cap, needed);
    });
  }
  std::string errorText(kvf_key key) const {
    return detail::collect_text([&](char* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transceiver_error_text(c(), key, buf, cap, needed);
    });
  }
  // For poll() and epoll; readable while a status call has a result to give.
  int event_fd() const {
    int fd = -1;
    check(kvf_transceiver_event_fd(c(), &fd));
    return fd;
  }

  // -- waits and the end -------------------------------------------------------------------

  void interrupt() { check(kvf_transceiver_interrupt(c())); }
  // False: the time-out passed.
  bool drain(Nanoseconds timeout) {
    return check(kvf_transceiver_drain(c(), detail::ns(timeout))) == KVF_OK;
  }
  void shutdown(Nanoseconds timeout) {
    check(kvf_transceiver_shutdown(c(), detail::ns(timeout)));
  }

 private:
  using Owner = Handle<kvf_transceiver, kvf_transceiver_destroy>;

  // Bytes that a ticket of some thousand blocks fits into.
  static constexpr std::size_t most_tickets = 16384;

  // What the exchange of this thread's status call threw.
  static std::exception_ptr& thrown() {
    thread_local std::exception_ptr exception;
    return exception;
  }
  static std::int32_t on_exchange(void* arg, std::uint32_t group, const void* mine, void* all,
                                  std::size_t bytes) noexcept {
    try {
      (*static_cast<GroupExchange*>(arg))(group, mine, all, bytes);
      return 0;
    } catch (...) {
      thrown() = std::current_exception();
      return 1;
    }
  }

  template <class Call>
  TransferStatuses status(Call call, std::optional<int> at_least,
                          std::optional<Nanoseconds> timeout) {
    kvf_request_result results[max_results];
    std::uint8_t decision[KVF_DECISION_HEAD_BYTES + max_results * KVF_DECISION_RESULT_BYTES];
    TransferStatuses out;
    std::size_t n = 0, bytes = 0;
    std::uint32_t more = 0;
    const std::uint32_t wanted =
        at_least ? static_cast<std::uint32_t>(*at_least < 0 ? 0 : *at_least) : KVF_WAIT_ALL;
    out.status = call(c(), wanted, timeout ? detail::ns(*timeout) : KVF_TIMEOUT_CONFIGURED,
                      results, sizeof(results[0]), max_results, &n, &more, decision,
                      sizeof(decision), &bytes);
    if (out.status < 0) {
      if (auto exception = std::exchange(thrown(), nullptr)) std::rethrow_exception(exception);
      throw Error(out.status);
    }
    out.results.assign(results, results + n);
    out.more = more != 0;
    out.decision.assign(decision, decision + bytes);
    return out;
  }

  static kvf_receive_request receive_request(const ReceiveRequest& request) {
    kvf_receive_request r = KVF_RECEIVE_REQUEST_INIT;
    r.key = request.key;
    r.peer = request.peer ? request.peer->c() : nullptr;
    r.ticket = request.ticket.data();
    r.ticket_bytes = request.ticket.size();
    detail::want(r, request.what);
    return r;
  }

  // Declared first: the transceiver ends before what its exchange needs.
  std::unique_ptr<GroupExchange> exchange_;
  Owner handle_;
};

}  // namespace kvferry
