// Ranks in child processes.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "child.hpp"
#include "model.hpp"

namespace handoff {

using process_test::Child;
using process_test::from_hex;
using process_test::to_hex;

inline std::string list(const std::vector<std::int32_t>& slots) {
  std::string text;
  for (auto s : slots) text += (text.empty() ? "" : ",") + std::to_string(s);
  return text;
}

inline std::unique_ptr<Child> start_rank(const std::string& name, const Model& model,
                                         const std::string& times = "usual") {
  std::vector<std::string> command = {RANK_PROGRAM, name, times};
  for (const auto& word : model.words()) command.push_back(word);
  auto child = std::make_unique<Child>(command);
  EXPECT_EQ(child->line(), "ready");
  return child;
}

// An engine of one or two pipeline stages, a child process each.
struct RemoteEngine {
  RemoteEngine(const std::string& name, Model model, std::uint32_t stages,
               const std::string& times = "usual") {
    model.stages = stages;
    std::string all;
    for (model.stage = 0; model.stage < stages; ++model.stage) {
      ranks.push_back(start_rank(name + std::to_string(model.stage), model, times));
      all += " " + ranks.back()->ask("agentmeta");
    }
    for (std::size_t rank = 0; stages > 1 && rank < stages; ++rank) {
      EXPECT_EQ(ranks[rank]->ask("engine " + std::to_string(rank) + all), "ok");
    }
    metadata = ranks[0]->ask("meta");
  }

  // The answer of every rank must be this.
  void all(const std::string& command, const std::string& answer) {
    for (auto& rank : ranks) EXPECT_EQ(rank->ask(command), answer) << command;
  }

  std::vector<std::unique_ptr<Child>> ranks;
  std::string metadata;  // hex
};

}  // namespace handoff
