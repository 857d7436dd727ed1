// SPDX-License-Identifier: Apache-2.0
// Scenarios about fixed costs: one small block, begin, status, idleness.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "bare.hpp"
#include "bench.hpp"
#include "measure.hpp"
#include "source.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t small_block = 4096;

void add_percentiles(Json& result, const std::string& name, const std::vector<double>& seconds) {
  result[name + "p50_us"] = percentile(seconds, 0.5) * 1e6;
  result[name + "p99_us"] = percentile(seconds, 0.99) * 1e6;
}

// Waits on the event fd until the transfer's event has been taken.
void take_end(Destination& destination, int fd, const Transfer& transfer) {
  for (;;) {
    pollfd wanted{fd, POLLIN, 0};
    if (poll(&wanted, 1, 10'000) != 1) throw std::runtime_error("no event within 10 s");
    kvf_event events[8];
    std::size_t n = 0;
    check(kvf_agent_take_events(destination.side().agent().c(), events, sizeof(kvf_event), 8, &n));
    for (std::size_t i = 0; i < n; ++i) {
      if (events[i].kind != KVF_EVENT_TRANSFER_ENDED) continue;
      if (events[i].status != KVF_OK) {
        throw Error(static_cast<kvf_status>(events[i].status), transfer.error_text());
      }
      return;
    }
  }
}

}  // namespace

void run_latency(const Options& options, Child& child) {
  const std::uint64_t block = options.block_size != 0 ? options.block_size : small_block;
  constexpr std::size_t at_once = 100;
  const std::size_t turns = 1 + (options.rounds + at_once - 1) / at_once;
  AnySource source(options, child, options.setup(block, 1));
  Destination destination(options.setup(block, 1), source.metadata());
  Blocks random((options.pool_mib << 20) / block);
  Team alone(1);
  const auto bare = source.limit(alone);
  const int fd = destination.side().agent().event_fd();
  std::vector<double> polled, waited, through_fd, limit;
  wait_for_quiet(options.quiet_s);
  // All ways take turns of a hundred; the first turn of each is not counted.
  for (std::size_t turn = 0; turn < turns; ++turn) {
    for (auto* times : {&polled, &waited, &through_fd, &limit}) {
      Slots slots;
      for (std::size_t i = 0; i < at_once; ++i) slots.push_back(random.pick(1).front());
      const bool is_limit = times == &limit;
      const std::vector<Bytes> tickets = is_limit ? std::vector<Bytes>{} : source.publish_each(slots);
      let_spinners_sleep(options);
      for (std::size_t i = 0; i < at_once; ++i) {
        if (turn == 0) destination.clear(1);
        const double begin = now();
        if (is_limit) {
          bare->move(0, {slots[i]}, {0}, destination.side().data());
        } else {
          const Transfer transfer = destination.pull(tickets[i], 1);
          if (times == &through_fd) {
            take_end(destination, fd, transfer);
          } else if (times == &waited) {
            if (transfer.wait(10s) != KVF_OK) throw Error(transfer.poll(), transfer.error_text());
          } else {
            kvf_status status = KVF_IN_PROGRESS;
            while ((status = transfer.poll()) == KVF_IN_PROGRESS) {
            }
            if (status != KVF_OK) throw Error(status, transfer.error_text());
          }
          const double end = now();
          if (turn > 0) times->push_back(end - begin);
          if (times != &through_fd) take_end(destination, fd, transfer);
        }
        if (is_limit && turn > 0) times->push_back(now() - begin);
        if (turn == 0) destination.compare({slots[i]});
      }
      if (!is_limit) source.settle();
    }
  }
  Json result{{"case", "latency"},
              {"block_size", block},
              {"blocks", 1},
              {"memory", options.memory},
              {"transport", destination.peer().query().transport},
              {"threads", options.threads},
              {"spin_us", options.spin_us},
              {"limit", bare->ways().front()},
              {"rounds", polled.size()}};
  add_percentiles(result, "", polled);
  add_percentiles(result, "wait_", waited);
  add_percentiles(result, "event_fd_", through_fd);
  add_percentiles(result, "limit_", limit);
  report(options, result);
}

void run_begin(const Options& options, Child& child) {
  const std::uint64_t block = options.block_size != 0 ? options.block_size : small_block;
  const std::uint64_t blocks = options.blocks != 0 ? options.blocks : 4096;
  const std::uint32_t rounds = std::max(options.repeats, 50u);
  AnySource source(options, child, options.setup(block, blocks));
  Destination destination(options.setup(block, blocks), source.metadata());
  Blocks random((options.pool_mib << 20) / block);
  std::vector<double> inside;
  wait_for_quiet(options.quiet_s);
  for (std::uint32_t round = 0; round <= rounds; ++round) {
    const Bytes ticket = source.publish(random.pick(blocks));
    const double begin = now();
    const Transfer transfer = destination.pull(ticket, blocks);
    const double taken = now() - begin;
    if (round != 0) inside.push_back(taken);
    transfer.finish(60s);
    source.settle();
    (void)destination.side().agent().take_events();
  }
  Json result{{"case", "begin"},
              {"block_size", block},
              {"blocks", blocks},
              {"memory", options.memory},
              {"rounds", rounds},
              {"peer_ms", std::chrono::duration<double, std::milli>(destination.peer_time()).count()},
              {"layout_ms",
               std::chrono::duration<double, std::milli>(destination.side().layout_time()).count()},
              {"min_us", percentile(inside, 0) * 1e6}};
  add_percentiles(result, "", inside);
  report(options, result);
}

void run_status(const Options& options, Child& child) {
  const Setup setup = options.setup(small_block, 1);
  AnySource source(options, child, setup);
  Destination destination(setup, source.metadata());
  const Transfer ended = destination.pull(source.publish({0}), 1);
  ended.finish(10s);
  source.settle();
  (void)destination.side().agent().take_events();
  kvf_agent* agent = destination.side().agent().c();
  constexpr int at_once = 10'000;
  std::vector<double> polls, takes;
  wait_for_quiet(options.quiet_s);
  for (int round = 0; round < 100; ++round) {
    double begin = now();
    for (int i = 0; i < at_once; ++i) {
      if (ended.poll() != KVF_OK) throw std::runtime_error("an ended transfer is not OK any more");
    }
    polls.push_back((now() - begin) / at_once * 1e9);
    begin = now();
    for (int i = 0; i < at_once; ++i) {
      kvf_event event;
      std::size_t n = 0;
      check(kvf_agent_take_events(agent, &event, sizeof event, 1, &n));
      if (n != 0) throw std::runtime_error("an event came while nothing was in flight");
    }
    takes.push_back((now() - begin) / at_once * 1e9);
  }
  report(options, {{"case", "status"},
                   {"transfer_poll_ns", percentile(polls, 0.5)},
                   {"take_events_ns", percentile(takes, 0.5)},
                   {"calls", 100 * at_once}});
}

void run_idle(const Options& options, Child& child) {
  const Setup setup = options.setup(small_block, 1);
  AnySource source(options, child, setup);
  Destination destination(setup, source.metadata());
  destination.pull(source.publish({0}), 1).finish(10s);  // everything has been used once
  source.settle();
  (void)destination.side().agent().take_events();
  std::this_thread::sleep_for(1s);
  const pid_t processes[] = {source.pid(), getpid()};
  Usage before[2], after[2];
  for (int i = 0; i < 2; ++i) before[i] = usage(processes[i]);
  const double begin = now();
  std::this_thread::sleep_for(std::chrono::duration<double>(options.idle_s));
  for (int i = 0; i < 2; ++i) after[i] = usage(processes[i]);
  const double seconds = now() - begin;
  Json result{{"case", "idle"}, {"seconds", seconds}};
  double cpu = 0, wakeups = 0;
  const char* names[] = {"source_", "destination_"};
  for (int i = 0; i < 2; ++i) {
    const double ms = after[i].cpu_ms - before[i].cpu_ms;
    const auto woken = static_cast<double>(after[i].wakeups - before[i].wakeups) / seconds;
    result[std::string(names[i]) + "cpu_ms"] = ms;
    result[std::string(names[i]) + "wakeups_per_s"] = woken;
    cpu += ms;
    wakeups += woken;
  }
  result["cpu_ms"] = cpu;
  result["wakeups_per_s"] = wakeups;
  report(options, result);
}

}  // namespace kvferry::tools
