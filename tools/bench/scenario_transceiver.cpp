// SPDX-License-Identifier: Apache-2.0
// Scenarios about the request level: what status calls cost a scheduler loop.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <kvferry_transceiver.hpp>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "bench.hpp"
#include "measure.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t block = 4096, pool_blocks = 64;

// Both engines in this process: the bytes are not what is measured here.
struct Engines {
  Engines() : context(setup(), block * pool_blocks, "context"),
              generation(setup(), block * pool_blocks, "generation"),
              peer(generation.agent().add_peer(context.metadata())) {
    if (const kvf_status status = peer.wait(15s); status != KVF_OK) throw Error(status, peer.text());
    CacheTransceiverConfig config;
    config.context_poll = 1000ms;
    sending.emplace(context.agent(), context.engine(), config);
    receiving.emplace(generation.agent(), generation.engine(), config);
  }
  static Setup setup() {
    Setup setup;
    setup.transports = "inproc";
    setup.block_size = block;
    return setup;
  }
  Bytes publish(std::uint64_t request) {
    const std::int32_t slot = static_cast<std::int32_t>(request % pool_blocks);
    Offer offer;
    offer.key = key(request);
    offer.groups = {published(0, Slots(&slot, 1), 0, 1)};
    return sending->respondAndSendAsync(offer);
  }
  void receive(std::uint64_t request, const Bytes& ticket) {
    const std::int32_t slot = 0;
    ReceiveRequest r;
    r.key = key(request);
    r.peer = &peer;
    r.ticket = ticket;
    r.what.groups = {wanted(0, Slots(&slot, 1))};
    receiving->requestAndReceiveAsync(r);
  }

  Side context, generation;
  Peer peer;
  std::optional<CacheTransceiver> sending, receiving;
};

// Fresh prompts on their way to the loop.
class Arrivals {
 public:
  void push(double at) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(at);
    }
    came_.notify_one();
  }
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    came_.notify_one();
  }
  // Takes what is there; false: nothing will come any more.
  bool take(std::deque<double>& out) {
    const std::lock_guard lock(mutex_);
    out.swap(queue_);
    return !closed_ || !out.empty();
  }
  // The engine's own wait, when it has nothing else to do.
  void wait() {
    std::unique_lock lock(mutex_);
    came_.wait(lock, [this] { return closed_ || !queue_.empty(); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<double> queue_;
  bool closed_ = false;
};

// How a context loop waits while it has no prompt to compute.
enum class Loop {
  own_wait,     // on its queue alone, without kvferry: what a wake-up costs
  status,       // status(1), and its own wait if nothing is in flight; arrivals interrupt
  polled,       // status(1) for up to 1000 ms, arrivals do not interrupt: what others do
};

// Seconds from the arrival of each request to the moment at which the loop has it.
std::vector<double> picked_up(Engines& engines, Loop kind, std::size_t requests, double mean_gap_s,
                              bool in_flight) {
  Arrivals arrivals;
  std::vector<double> delays;
  std::thread loop([&] {
    std::deque<double> fresh;
    for (;;) {
      fresh.clear();
      if (!arrivals.take(fresh)) return;
      const double seen = now();
      for (const double at : fresh) delays.push_back(seen - at);
      if (!fresh.empty()) continue;
      if (kind != Loop::own_wait) (void)engines.sending->checkContextTransferStatus(1, 1000ms);
      // With nothing in flight the call came back at once: then the loop waits by itself.
      if (kind == Loop::own_wait || !in_flight) arrivals.wait();
    }
  });
  std::mt19937_64 random(7);
  std::exponential_distribution<double> gap(1 / mean_gap_s);
  for (std::size_t i = 0; i < requests; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(gap(random)));
    arrivals.push(now());
    if (kind == Loop::status) engines.sending->interrupt();
  }
  arrivals.close();
  engines.sending->interrupt();
  loop.join();
  return delays;
}

void add(Json& result, const std::string& name, const std::vector<double>& seconds) {
  result[name + "_p50_us"] = percentile(seconds, 0.5) * 1e6;
  result[name + "_p99_us"] = percentile(seconds, 0.99) * 1e6;
}

// Nanoseconds of a status sweep that finds nothing.
double sweep_ns(Engines& engines) {
  constexpr int at_once = 1000;
  std::vector<double> rounds;
  for (int round = 0; round < 50; ++round) {
    const double begin = now();
    for (int i = 0; i < at_once; ++i) {
      kvf_request_result results[16];
      std::size_t n = 0;
      std::uint32_t more = 0;
      check(kvf_transceiver_check_context_transfer_status(engines.sending->c(), 0, 0, results,
                                                          sizeof results[0], 16, &n, &more,
                                                          nullptr, 0, nullptr));
      if (n != 0) throw std::runtime_error("a publication that nobody read has ended");
    }
    rounds.push_back((now() - begin) / at_once * 1e9);
  }
  return percentile(rounds, 0.5);
}

// Nanoseconds from the begin of a read to its end as the context side's status call tells it.
double completion_ns(Engines& engines, std::uint64_t& next, std::vector<Bytes>& tickets,
                     std::uint64_t& oldest) {
  std::vector<double> taken;
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t request = oldest++;
    const double begin = now();
    engines.receive(request, tickets[request]);
    const auto ended = engines.sending->checkContextTransferStatus(1, 10s);
    taken.push_back(now() - begin);
    if (ended.completed().size() != 1 || ended.completed()[0].request != request) {
      throw std::runtime_error("another request ended than the one that was read");
    }
    (void)engines.receiving->checkGenTransferStatus(1, 10s);
    tickets.push_back(engines.publish(next++));  // as many pending as before
  }
  return percentile(taken, 0.5) * 1e9;
}

}  // namespace

void run_idle_loop(const Options& options, Child&) {
  Engines engines;
  constexpr std::size_t requests = 2000;
  constexpr double gap_s = 1e-3;
  wait_for_quiet(options.quiet_s);
  Json result{{"case", "idle-loop"}, {"requests", requests}};
  add(result, "own_wait", picked_up(engines, Loop::own_wait, requests, gap_s, false));
  const auto idle = picked_up(engines, Loop::status, requests, gap_s, false);
  add(result, "nothing_in_flight", idle);
  for (std::uint64_t request = 0; request < 100; ++request) engines.publish(request);
  const auto busy = picked_up(engines, Loop::status, requests, gap_s, true);
  add(result, "100_in_flight", busy);
  // The worse of the two, the loop's own wake-up included.
  result["added_latency_p99_us"] = std::max(percentile(idle, 0.99), percentile(busy, 0.99)) * 1e6;
  add(result, "poll_1000ms", picked_up(engines, Loop::polled, options.repeats, 0.7, true));
  report(options, result);
}

void run_pending(const Options& options, Child&) {
  Engines engines;
  std::vector<Bytes> tickets;
  std::uint64_t next = 0, oldest = 0;
  const auto fill = [&](std::uint64_t pending) {
    while (next - oldest < pending) tickets.push_back(engines.publish(next++));
  };
  wait_for_quiet(options.quiet_s);
  fill(100);
  const double few_sweep = sweep_ns(engines);
  const double few = completion_ns(engines, next, tickets, oldest);
  fill(options.pending);
  const double sweep = sweep_ns(engines);
  const double many = completion_ns(engines, next, tickets, oldest);
  report(options, {{"case", "pending"},
                   {"pending", options.pending},
                   {"status_sweep_ns", sweep},
                   {"status_sweep_100_ns", few_sweep},
                   {"completion_ns", many},
                   {"completion_100_ns", few},
                   {"completion_ratio", many / few}});
}

}  // namespace kvferry::tools
