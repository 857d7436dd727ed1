// SPDX-License-Identifier: Apache-2.0
// kvferry-bench: kvferry beside the best that a bare loop does with the same bytes.
#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <kvferry.hpp>
#include <stdexcept>
#include <thread>

#include "bench.hpp"
#include "source.hpp"

namespace kvferry::tools {

namespace {

const Scenario scenarios[] = {
    {"transfer", "the six cases (or the one given), against the best bare copy loop", run_transfer},
    {"latency", "one block of 4 KiB, begin to completion: polled, and through the event fd",
     run_latency},
    {"registration", "cost of registering --regions ranges: the first ones and the last ones",
     run_registration},
    {"begin", "time inside kvf_pull_begin() for 4096 blocks", run_begin},
    {"status", "kvf_transfer_poll() and kvf_agent_take_events() with nothing in flight",
     run_status},
    {"idle", "CPU time and wake-ups of an idle pair of agents", run_idle},
    {"idle-loop", "a context loop in status(1): from a request's arrival to the loop's having it",
     run_idle_loop},
    {"pending", "status sweep and completion with --pending requests in flight", run_pending},
    {"device", "memory of one GPU: scattered blocks and 256-byte runs, against one copy of as many bytes",
     run_device},
};

constexpr const char* footer = R"(
Two processes: this one pulls scattered, random blocks out of the memory of a second one. In each
repetition kvferry and every bare loop take turns on the same memory: the same pages of the source,
the same destination buffer, prefaulted, as many threads (kvferry's workers = the loop's threads),
other random blocks each time. What is compared:
  --memory pool  a pool made by kvferry, against memcpy, streaming stores and prefetching out of the
                 same file, mapped and populated the same way; the fastest loop is the limit
  --memory own   memory of the source's own, against process_vm_readv with 1024 ranges a call
  --transport tcp, unix  against a bare stream: one message names the blocks, the answer is sent
                 gathered, about 1 MiB at a time, and received into place; with --spin-us both sides
                 of both look at their sockets for that long before they sleep
  --transport inproc  both agents in this process, against the copy loops
  --transport ucx  against the bare TCP stream if UCX_TLS names tcp, else process_vm_readv
gbps and limit_gbps are medians (1e9 bytes/s), ratio is the median over the repetitions of limit
time / kvferry time, p50_us and p99_us go from before kvf_pull_begin() to the return of
kvf_transfer_wait(). The first repetition is compared byte for byte and not counted. "noisy" counts
the repetitions that began while other programs kept the machine busy.)";

void pin(const std::vector<std::uint32_t>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const std::uint32_t cpu : cpus) CPU_SET(cpu, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) {
    throw std::runtime_error("pinning to the given CPUs failed: are they all there?");
  }
}

int run(const Options& options) {
  pin(options.pin_source);
  Child source;  // inherits the affinity
  pin(options.pin_destination);
  const auto* scenario = std::find_if(std::begin(scenarios), std::end(scenarios),
                                      [&](const Scenario& s) { return s.name == options.scenario; });
  scenario->run(options, source);
  return 0;
}

}  // namespace

Setup Options::setup(std::uint64_t block, std::uint64_t room_blocks) const {
  Setup setup;
  setup.memory = memory;
  setup.transports = transport;
  setup.block_size = block;
  setup.pool_bytes = pool_mib * (1 << 20) / block * block;
  setup.room_bytes = block * room_blocks;
  setup.workers = threads;
  setup.spin_us = spin_us;
  return setup;
}

void report(const Options& options, const Json& result) {
  if (options.json) {
    std::cout << result.dump() << std::endl;
    return;
  }
  if (!result.contains("ratio")) {
    for (const auto& [name, value] : result.items()) {
      std::cout << name << " " << (value.is_string() ? value.get<std::string>() : value.dump())
                << "  ";
    }
    std::cout << std::endl;
    return;
  }
  static const bool once = [] {
    std::printf("%-18s %8s %8s %6s %10s %10s  %s\n", "case", "GB/s", "limit", "ratio", "p50 us",
                "p99 us", "limit is");
    return true;
  }();
  (void)once;
  std::printf("%-18s %8.2f %8.2f %6.2f %10.1f %10.1f  %s%s\n",
              result["case"].get<std::string>().c_str(), result["gbps"].get<double>(),
              result["limit_gbps"].get<double>(), result["ratio"].get<double>(),
              result["p50_us"].get<double>(), result["p99_us"].get<double>(),
              result["limit"].get<std::string>().c_str(),
              result["noisy"] == 0 ? "" : (", " + result["noisy"].dump() + " noisy").c_str());
  std::fflush(stdout);
}

void let_spinners_sleep(const Options& options) {
  if (options.spin_us > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(2 * options.spin_us + 1000));
  }
}

Blocks::Blocks(std::uint64_t slots) : all_(slots) {
  for (std::size_t i = 0; i < all_.size(); ++i) all_[i] = static_cast<std::int32_t>(i);
}

std::vector<std::int32_t> Blocks::pick(std::uint64_t count) {
  if (count > all_.size()) {
    throw std::runtime_error(std::to_string(count) + " blocks do not fit in a pool of " +
                             std::to_string(all_.size()) + ": choose a larger --pool-mib");
  }
  for (std::size_t i = 0; i < count; ++i) {  // the first steps of a shuffle
    std::swap(all_[i], all_[std::uniform_int_distribution<std::size_t>(i, all_.size() - 1)(random_)]);
  }
  return {all_.begin(), all_.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace kvferry::tools

int main(int argc, char** argv) {
  using namespace kvferry::tools;
  setenv("UCX_LOG_FILE", "stderr", 0);  // standard output is for results
  Options options;
  int child_fd = -1;
  CLI::App app{"Measures kvferry between two processes of this host, beside the best bare loop."};
  app.footer(footer);
  std::vector<std::string> names;
  std::string what = "What to measure:";
  for (const Scenario& s : scenarios) {
    names.emplace_back(s.name);
    what += std::string("\n  ") + s.name + ": " + s.what;
  }
  app.add_option("--scenario", options.scenario, what)
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  app.add_option("--transport", options.transport, "Transport to force")
      ->check(CLI::IsMember({"inproc", "shm", "unix", "tcp", "ucx"}))
      ->capture_default_str();
  app.add_option("--memory", options.memory, "Memory of both sides: pool (kvferry's) or own")
      ->check(CLI::IsMember({"pool", "own"}))
      ->capture_default_str();
  const CLI::Validator multiple(
      [](std::string& text) {
        return std::stoull(text) % 64 == 0 ? "" : std::string("must be a multiple of 64 bytes");
      },
      "");
  app.add_option("--block-size", options.block_size,
                 "Bytes of a block, as in 64KiB; not given: all six cases")
      ->check(multiple & CLI::Range(64ull, 1ull << 32))
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--blocks", options.blocks, "Blocks of one transfer; not given: by block size")
      ->check(CLI::Range(1u, 1u << 24));
  app.add_option("--threads", options.threads, "Copying threads: kvferry's workers and the loop's")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--repeats", options.repeats, "Counted repetitions")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "Counted blocks of the scenario latency, each way")
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  app.add_option("--pool-mib", options.pool_mib, "Memory of the source in MiB")
      ->check(CLI::Range(1ull, 1ull << 30))
      ->capture_default_str();
  app.add_option("--spin-us", options.spin_us,
                 "How long a thread looks at its socket before it sleeps, in us; 0: it blocks")
      ->check(CLI::Range(0u, 1'000'000u))
      ->capture_default_str();
  app.add_flag("--scattered", options.scattered,
               "Scattered blocks in the destination too, in as much memory as the source has");
  app.add_flag("--step", options.step,
               "Scenario transfer: before each repetition wait for a line on standard input, after it "
               "print its times; for programs that let others take turns (implies --json)");
  app.add_option("--regions", options.regions, "Ranges of the scenario registration")
      ->check(CLI::Range(200u, 30000u))
      ->capture_default_str();
  app.add_option("--quiet-s", options.quiet_s,
                 "Longest wait for a quiet moment before each repetition, in seconds")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  app.add_option("--idle-s", options.idle_s, "Length of the scenario idle, in seconds")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_option("--pending", options.pending, "Requests in flight in the scenario pending")
      ->check(CLI::Range(101u, 60000u))
      ->capture_default_str();
  app.add_option("--pin-source", options.pin_source, "CPUs of the source process, as in 0,1")
      ->delimiter(',');
  app.add_option("--pin-destination", options.pin_destination, "CPUs of the pulling process")
      ->delimiter(',');
  app.add_flag("--json", options.json, "One line of JSON for each case");
  app.add_option("--child-fd", child_fd)->group("");  // the second process
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e);
  } catch (const std::exception& e) {  // a number with a unit that no integer holds
    std::cerr << "kvferry-bench: an argument is out of range (" << e.what() << ")\n";
    return 105;
  }
  options.json |= options.step;
  try {
    return child_fd >= 0 ? serve_source(child_fd, stream_hook()) : run(options);
  } catch (const std::exception& e) {
    std::cerr << "kvferry-bench: " << e.what() << "\n";
    return 1;
  }
}
