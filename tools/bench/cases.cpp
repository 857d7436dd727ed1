// SPDX-License-Identifier: Apache-2.0
// Scenario transfer: kvferry beside the best bare loop, alternating.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>

#include "bare.hpp"
#include "bench.hpp"
#include "measure.hpp"
#include "source.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

struct Case {
  std::uint64_t block_size, blocks;
};

std::vector<Case> cases(const Options& options) {
  constexpr std::uint64_t kib = 1 << 10, mib = 1 << 20;
  std::vector<Case> all{{4 * kib, 4096},  {16 * kib, 2048}, {64 * kib, 1024},
                        {256 * kib, 512}, {mib, 256},       {256 * mib, 1}};
  if (options.block_size != 0) {
    const auto known = std::find_if(all.begin(), all.end(), [&](const Case& c) {
      return c.block_size == options.block_size;
    });
    all = {known != all.end() ? *known : Case{options.block_size, 256}};
  }
  if (options.blocks != 0) {
    for (Case& c : all) c.blocks = options.blocks;
  }
  return all;
}

std::string name(const Case& c) {
  std::ostringstream text;
  if (c.block_size % (1 << 20) == 0) {
    text << c.block_size / (1 << 20) << " MiB";
  } else if (c.block_size % (1 << 10) == 0) {
    text << c.block_size / (1 << 10) << " KiB";
  } else {
    text << c.block_size << " B";
  }
  text << " x " << c.blocks;
  return text.str();
}

struct Times {
  std::vector<double> kvferry;
  std::vector<std::vector<double>> bare;  // one list for each way
  unsigned noisy = 0;
  Json first;  // what kvferry says of its first transfer
};

// The first repetition of each is compared byte for byte and not counted. The order is random, so
// that nobody always finds the caches as the same neighbour left them; every one gets fresh random
// blocks.
Times alternate(const Options& options, const Case& c, AnySource& source, Bare& bare,
                Destination& destination) {
  Blocks random(options.pool_mib * (1 << 20) / c.block_size);
  Blocks places(options.scattered ? options.pool_mib * (1 << 20) / c.block_size : c.blocks);
  Slots to(c.blocks);
  std::iota(to.begin(), to.end(), 0);
  const std::size_t ways = bare.ways().size();
  Times times;
  times.bare.resize(ways);
  std::byte* base = destination.side().data();
  std::vector<std::size_t> order(ways + 1);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 shuffler(1);
  for (std::uint32_t repetition = 0; repetition <= options.repeats; ++repetition) {
    const bool first = repetition == 0;
    std::string line;
    if (options.step && !std::getline(std::cin, line)) throw std::runtime_error("--step: no more");
    Json seconds = Json::object();
    if (!wait_for_quiet(options.quiet_s) && !first) ++times.noisy;
    std::shuffle(order.begin(), order.end(), shuffler);
    for (const std::size_t who : order) {
      const std::vector<std::int32_t> slots = random.pick(c.blocks);
      if (options.scattered) to = places.pick(c.blocks);
      if (first) destination.clear(to);
      let_spinners_sleep(options);
      double taken = 0;
      if (who < ways) {
        const double begin = now();
        bare.move(who, slots, to, base);
        taken = now() - begin;
        if (!first) times.bare[who].push_back(taken);
      } else {
        const Bytes ticket = source.publish(slots);
        const double begin = now();
        const Transfer transfer = destination.pull(ticket, to);
        const kvf_status status = transfer.wait(60s);
        taken = now() - begin;
        if (status != KVF_OK) throw Error(status, transfer.error_text());
        if (!first) times.kvferry.push_back(taken);
        const TransferInfo info = transfer.query();
        if (first) {
          times.first = {{"transport", std::string(info.transport)}, {"bytes", info.bytes}};
        }
        source.settle();
        (void)destination.side().agent().take_events();
      }
      if (first) destination.compare(slots, to);
      seconds[who < ways ? bare.ways()[who] : "kvferry"] = taken;
    }
    if (options.step) {
      const Json done{{"case", name(c)}, {"repetition", repetition}, {"seconds", seconds}};
      std::cout << done.dump() << std::endl;
    }
  }
  return times;
}

Json summary(const Options& options, const Case& c, const Times& times,
             const std::vector<std::string>& ways) {
  const double bytes = static_cast<double>(c.block_size * c.blocks);
  const auto gbps = [&](const std::vector<double>& seconds) {
    return bytes / percentile(seconds, 0.5) / 1e9;
  };
  std::size_t best = 0;
  Json all = Json::object();
  for (std::size_t way = 0; way < ways.size(); ++way) {
    all[ways[way]] = gbps(times.bare[way]);
    if (percentile(times.bare[way], 0.5) < percentile(times.bare[best], 0.5)) best = way;
  }
  // Of each repetition by itself, so that a slow moment of the machine meets both.
  std::vector<double> ratios;
  for (std::size_t i = 0; i < times.kvferry.size(); ++i) {
    ratios.push_back(times.bare[best][i] / times.kvferry[i]);
  }
  return {{"case", name(c)},
          {"block_size", c.block_size},
          {"blocks", c.blocks},
          {"gbps", gbps(times.kvferry)},
          {"limit_gbps", gbps(times.bare[best])},
          {"ratio", percentile(ratios, 0.5)},
          {"p50_us", percentile(times.kvferry, 0.5) * 1e6},
          {"p99_us", percentile(times.kvferry, 0.99) * 1e6},
          {"min_us", percentile(times.kvferry, 0) * 1e6},
          {"limit_min_us", percentile(times.bare[best], 0) * 1e6},
          {"limit", ways[best]},
          {"bare_gbps", all},
          {"transport", times.first["transport"]},
          {"memory", options.memory},
          {"threads", options.threads},
          {"spin_us", options.spin_us},
          {"scattered", options.scattered},
          {"repeats", options.repeats},
          {"noisy", times.noisy},
          {"compared", times.first["bytes"] == c.block_size * c.blocks}};
}

}  // namespace

void run_transfer(const Options& options, Child& child) {
  Team team(options.threads);
  for (const Case& c : cases(options)) {
    Setup setup = options.setup(c.block_size, c.blocks);
    if (options.scattered) setup.room_bytes = setup.pool_bytes;
    AnySource source(options, child, setup);
    Destination destination(setup, source.metadata());
    const auto bare = source.limit(team);
    const Times times = alternate(options, c, source, *bare, destination);
    report(options, summary(options, c, times, bare->ways()));
  }
}

}  // namespace kvferry::tools
