// SPDX-License-Identifier: Apache-2.0
// Scenario device: two agents of this process with memory of one GPU, against one copy of as many
// bytes.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <numeric>
#include <stdexcept>

#include "bench.hpp"
#include "device.hpp"
#include "measure.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

// Blocks of tokens with heads. The destination keeps tokens first or heads first.
struct DeviceCase {
  std::string name;
  std::uint64_t tokens, heads, head_bytes, blocks;
  bool heads_first;

  std::uint64_t block_bytes() const { return tokens * heads * head_bytes; }
};

std::vector<DeviceCase> cases(const Options& options) {
  constexpr std::uint64_t kib = 1 << 10, mib = 1 << 20;
  std::vector<DeviceCase> all{
      {"4 KiB x 4096", 1, 1, 4 * kib, 4096, false},  {"16 KiB x 2048", 1, 1, 16 * kib, 2048, false},
      {"64 KiB x 1024", 1, 1, 64 * kib, 1024, false}, {"256 KiB x 512", 1, 1, 256 * kib, 512, false},
      {"1 MiB x 256", 1, 1, mib, 256, false},         {"256 MiB x 1", 1, 1, 256 * mib, 1, false},
      {"256 B runs, NHD to HND, 64 KiB x 1024", 32, 8, 256, 1024, true}};
  if (options.block_size != 0) {
    all = {{std::to_string(options.block_size) + " B", 1, 1, options.block_size, 256, false},
           {"64 B runs, NHD to HND", options.block_size / 512, 8, 64, 256, true}};
  }
  if (options.blocks != 0) {
    for (DeviceCase& c : all) c.blocks = options.blocks;
  }
  return all;
}

// An agent with one pool on the device.
class DeviceSide {
 public:
  DeviceSide(const Driver& driver, const Options& options, const DeviceCase& c, std::uint64_t slots,
             bool heads_first, const char* name)
      : memory_(driver, slots * c.block_bytes()) {
    AgentConfig config;
    config.name = name;
    config.transports = "inproc";
    config.workers = options.threads;
    config.fingerprint = "kvferry-tools";
    agent_ = Agent(config);
    pool_ = agent_.register_device_memory(memory_.pointer(), memory_.bytes());
    View view;
    view.role = KVF_ROLE_KEY;
    view.heads = static_cast<std::uint32_t>(c.heads);
    view.bytes_per_head = c.head_bytes;
    view.slots = static_cast<std::uint32_t>(slots);
    view.tensors = {pool_.at(0)};
    view.slot_stride = c.block_bytes();
    view.layer_stride = memory_.bytes();
    view.token_stride = heads_first ? c.head_bytes : c.heads * c.head_bytes;
    view.head_stride = heads_first ? c.tokens * c.head_bytes : c.head_bytes;
    Group group;
    group.tokens_per_block = static_cast<std::uint32_t>(c.tokens);
    group.layers = {0};
    group.views = {view};
    agent_.set_layout({group});
    engine_ = agent_.engine();
  }

  Agent& agent() noexcept { return agent_; }
  const Engine& engine() const noexcept { return engine_; }
  const DeviceMemory& memory() const noexcept { return memory_; }

 private:
  DeviceMemory memory_;  // freed after the agent is gone
  Agent agent_;
  Pool pool_;
  Engine engine_;
};

void fill(const Driver& driver, const DeviceMemory& memory) {
  std::vector<std::uint64_t> words(memory.bytes() / 8);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = pattern(i * 8);
  driver.upload(memory.base(), words.data(), memory.bytes());
}

void compare(const DeviceCase& c, const std::vector<std::int32_t>& slots, const DeviceMemory& target) {
  const std::vector<std::byte> got = target.read();
  for (std::size_t block = 0; block < slots.size(); ++block) {
    for (std::uint64_t token = 0; token < c.tokens; ++token) {
      for (std::uint64_t head = 0; head < c.heads; ++head) {
        const std::uint64_t from = static_cast<std::uint64_t>(slots[block]) * c.block_bytes() +
                                   (token * c.heads + head) * c.head_bytes;
        const std::uint64_t to = block * c.block_bytes() + (c.heads_first ? head * c.tokens + token : token * c.heads + head) * c.head_bytes;
        for (std::uint64_t i = 0; i < c.head_bytes; i += 8) {
          std::uint64_t word = 0;
          std::memcpy(&word, got.data() + to + i, sizeof word);
          if (word != pattern(from + i)) {
            throw std::runtime_error("wrong data: " + c.name + ", block " + std::to_string(block) + ", token " +
                                     std::to_string(token) + ", head " + std::to_string(head));
          }
        }
      }
    }
  }
}

Json run_case(const Driver& driver, const Options& options, const DeviceCase& c) {
  const std::uint64_t slots = std::max(options.pool_mib * (1 << 20) / c.block_bytes(), c.blocks);
  DeviceSide source(driver, options, c, slots, false, "source");
  DeviceSide target(driver, options, c, c.blocks, c.heads_first, "dest");
  fill(driver, source.memory());
  const Peer peer = target.agent().add_peer(source.engine().metadata());
  if (const kvf_status status = peer.wait(30s); status != KVF_OK) throw Error(status, peer.text());
  Blocks random(slots);
  std::vector<std::int32_t> to(c.blocks);
  std::iota(to.begin(), to.end(), 0);
  const std::uint64_t bytes = c.blocks * c.block_bytes();
  std::vector<double> whole, inside, limit;
  std::string transport;
  for (std::uint32_t repetition = 0; repetition <= options.repeats; ++repetition) {
    const std::vector<std::int32_t> from = random.pick(c.blocks);
    const double copy_begin = now();
    driver.copy(target.memory().base(), source.memory().base(), bytes);
    const double copied = now() - copy_begin;
    auto offer = source.agent().publish(key(repetition + 1), 0, from, c.blocks * c.tokens);
    const Bytes ticket = offer.ticket();
    const double begin = now();
    const Transfer transfer = target.agent().pull_begin(peer, ticket, 0, to);
    const double begun = now();
    const kvf_status status = transfer.wait(60s);
    const double end = now();
    if (status != KVF_OK) throw Error(status, transfer.error_text());
    if (offer.wait(30s) != KVF_OK) throw std::runtime_error("the publication did not end well");
    (void)target.agent().take_events();
    (void)source.agent().take_events();
    if (repetition == 0) {
      transport = transfer.query().transport;
      compare(c, from, target.memory());
      continue;
    }
    limit.push_back(copied);
    inside.push_back(begun - begin);
    whole.push_back(end - begin);
  }
  const double p50 = percentile(whole, 0.5), limit_p50 = percentile(limit, 0.5);
  const double all = static_cast<double>(bytes);
  return {{"case", c.name},
          {"block_size", c.block_bytes()},
          {"blocks", c.blocks},
          {"gbps", all / p50 / 1e9},
          {"limit_gbps", all / limit_p50 / 1e9},
          {"ratio", limit_p50 / p50},
          {"p50_us", p50 * 1e6},
          {"p99_us", percentile(whole, 0.99) * 1e6},
          {"begin_p50_us", percentile(inside, 0.5) * 1e6},
          {"limit", "one cuMemcpyDtoDAsync"},
          {"transport", transport},
          {"memory", "device"},
          {"driver", driver.text()},
          {"test_double", driver.is_double()},
          {"repeats", options.repeats},
          {"noisy", 0},
          {"compared", true}};
}

}  // namespace

void run_device(const Options& options, Child&) {
  const Driver driver;
  std::cerr << driver.text() << "\n";
  if (driver.is_double()) {
    std::cerr << "THIS IS A TEST DOUBLE OF THE DRIVER: ITS TIMES MEAN NOTHING\n";
  }
  for (const DeviceCase& c : cases(options)) report(options, run_case(driver, options, c));
}

}  // namespace kvferry::tools
