// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "channel.hpp"
#include "pair.hpp"

namespace kvferry::tools {

// The command line. 0 and "" are "not given".
struct Options {
  std::string scenario = "transfer";
  std::string transport = "shm";
  std::string memory = "pool";
  std::uint64_t block_size = 0;
  std::uint64_t blocks = 0;
  std::uint32_t threads = 2;
  std::uint32_t repeats = 9;
  std::uint32_t rounds = 1000;
  std::uint64_t pool_mib = 1024;
  std::uint64_t spin_us = 0;
  std::uint32_t regions = 10'000;
  bool scattered = false;
  bool step = false;
  double quiet_s = 1;
  double idle_s = 10;
  std::uint64_t pending = 10'000;
  std::vector<std::uint32_t> pin_source, pin_destination;
  bool json = false;

  Setup setup(std::uint64_t block, std::uint64_t room_blocks) const;
};

// Who looks before it sleeps (--spin-us) holds a CPU for that long after its turn: lets it pass.
void let_spinners_sleep(const Options& options);

// Prints one result: with --json as one line of JSON, otherwise for people.
void report(const Options& options, const Json& result);

// Random different blocks of a pool.
class Blocks {
 public:
  explicit Blocks(std::uint64_t slots);
  // Throws if the pool has fewer.
  std::vector<std::int32_t> pick(std::uint64_t count);

 private:
  std::vector<std::int32_t> all_;
  std::mt19937_64 random_{1};  // every run reads the same places in the same order
};

// What --scenario names. Each prints through report(); failures throw.
struct Scenario {
  const char* name;
  const char* what;
  void (*run)(const Options& options, Child& source);
};
void run_transfer(const Options& options, Child& source);
void run_latency(const Options& options, Child& source);
void run_begin(const Options& options, Child& source);
void run_status(const Options& options, Child& source);
void run_idle(const Options& options, Child& source);
void run_idle_loop(const Options& options, Child& source);
void run_registration(const Options& options, Child& source);
void run_pending(const Options& options, Child& source);
void run_device(const Options& options, Child& source);

}  // namespace kvferry::tools
