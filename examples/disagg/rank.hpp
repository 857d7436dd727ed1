// What the prefill and the decode program have in common: one rank's command line, its place among
// the ranks of its engine, and its life under an orchestrator.
#pragma once

#include "engine.hpp"
#include "handoff.hpp"
#include "messages.hpp"

#include <functional>

namespace disagg {

// Names of cache orders on command lines: "trtllm", "vllm", "megatron".
CacheOrder parse_order(const std::string& name);
// "5,3" -> {5, 3}
std::vector<std::uint32_t> parse_numbers(const std::string& text);

// Ranks joined by sockets, a star around rank 0.
class SocketRanks final : public RankGroup {
 public:
  // Rank 0 has one socket per other rank, in their order; the others have one.
  SocketRanks(bool centre, std::vector<int> sockets) : centre_(centre), sockets_(std::move(sockets)) {}
  void share(double* whole, std::size_t size, std::size_t begin, std::size_t end) override;

 private:
  bool centre_;
  std::vector<int> sockets_;
};

struct RankOptions {
  EngineOptions engine;
  std::vector<int> sockets;  // to the other ranks of this engine
};
// Exits with a text on a bad command line.
RankOptions parse_rank(int argc, char** argv);
// The inverse, for the launcher.
std::vector<std::string> rank_arguments(const RankOptions& options);

// Runs `serve` with the channel to the orchestrator (standard input and output), and reports an
// exception to it. Returns the exit status.
int run_rank(int argc, char** argv, const std::function<void(const RankOptions&, Channel&)>& serve);

// Sends hello, joins the ranks and answers with the engine's metadata.
void introduce(Channel& channel, const Engine& engine, Handoff& handoff);

// Fills every byte that the slots hold and returns how many there are.
std::uint64_t fill(const Cache& cache, const std::vector<std::byte*>& pools, const SequenceSlots& slots,
                   std::byte value);

constexpr std::chrono::minutes kPatience{5};  // for a slow engine; kvferry's own limits are shorter

}  // namespace disagg
