// The processes that hold a shape's ranks, and the walk through two rounds of its requests.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "child.hpp"
#include "shape.hpp"

namespace reshard {

using process_test::Child;

inline std::string name_of(std::size_t side, std::uint32_t rank) {
  return std::to_string(side) + ":" + std::to_string(rank);
}

// The processes of a shape and what they are asked.
class Processes {
 public:
  // `requests`: the ranks use the request level.
  Processes(const Shape& shape, bool requests) : shape_(shape) {
    std::vector<std::string> command{RANK_PROGRAM, shape.name};
    if (requests) command.emplace_back("requests");
    fixed_ = command.size();
    for (std::size_t side = 0; side < 2; ++side) {
      for (std::uint32_t rank = 0; rank < shape.sides[side].ranks(); ++rank) {
        command.push_back(name_of(side, rank));
        if (shape.place == Place::alone) start(command);
      }
      if (shape.place == Place::sides) start(command);
    }
    if (shape.place == Place::together) start(command);
    for (auto& child : children_) {
      const auto line = child->line();
      if (line != "ready") throw std::runtime_error(line);
    }
  }

  std::size_t count() const { return children_.size(); }
  // Every process works at once; the answers in order, those that are not empty.
  std::vector<std::string> ask(const std::string& command) {
    for (auto& child : children_) child->send(command);
    std::vector<std::string> answers;
    for (auto& child : children_) {
      const auto line = child->line();
      if (line.rfind("error", 0) == 0) throw std::runtime_error(command.substr(0, 20) + ": " + line);
      if (!line.empty()) answers.push_back(line);
    }
    return answers;
  }
  std::string list(const std::string& command) {
    std::string all;
    for (const auto& answer : ask(command)) all += (all.empty() ? "" : ",") + answer;
    return all;
  }

  // Both engines, and each side that needs to know the other one.
  void connect() {
    std::string engines[2];
    for (std::size_t side = 0; side < 2; ++side) {
      const std::string number = std::to_string(side);
      const auto answers = ask("engine " + number + " " + list("meta " + number));
      if (answers.empty()) throw std::runtime_error("no engine");
      for (const auto& answer : answers) EXPECT_EQ(answer, answers[0]) << "one engine, one blob";
      engines[side] = answers[0];
    }
    (void)ask("peer 1 " + engines[0]);
    if (shape_.push) (void)ask("peer 0 " + engines[1]);
  }
  void move(std::size_t q) {
    const std::string request = std::to_string(q);
    if (shape_.push) {
      (void)ask("push " + request + " " + list("receive " + request));
      return;
    }
    const auto tickets = split(list("publish " + request));
    // Any source rank's ticket serves all of them.
    std::size_t began = 0;
    for (const auto& n : ask("import " + request + " " + tickets.at(q % tickets.size()))) {
      began += std::stoul(n);
    }
    const Side& to = shape_.sides[1];
    EXPECT_EQ(began, to.ranks() / to.dp);
  }

 private:
  void start(std::vector<std::string>& command) {
    children_.push_back(std::make_unique<Child>(command));
    command.resize(fixed_);
  }
  static std::vector<std::string> split(const std::string& list) {
    std::vector<std::string> items(1);
    for (char c : list) {
      if (c == ',') {
        items.emplace_back();
      } else {
        items.back() += c;
      }
    }
    return items;
  }

  const Shape& shape_;
  std::size_t fixed_ = 0;  // words of the command before the ranks
  std::vector<std::unique_ptr<Child>> children_;
};

// Two rounds of a shape, so that peers, templates and slots are used again: every byte of every
// destination is compared, also those that must stay.
inline void every_byte_arrives(const Shape& s, bool requests) {
  Processes processes(s, requests);
  processes.connect();
  for (int round = 0; round < 2; ++round) {
    (void)processes.ask("round " + std::to_string(round));
    for (std::size_t q = 0; q < s.requests.size(); ++q) processes.move(q);
    std::uint64_t counted = 0, bytes = 0;
    for (const auto& answer : processes.ask("finish")) counted += std::stoull(answer);
    for (const auto& answer : processes.ask("check")) {
      EXPECT_EQ(answer.rfind("differs", 0), std::string::npos) << "round " << round << ": " << answer;
      if (answer.rfind("differs", 0) == std::string::npos) bytes += std::stoull(answer);
    }
    EXPECT_GT(bytes, 0u) << "nothing was compared";
    EXPECT_EQ(counted, bytes) << "bytes are counted once per byte that is written";
    (void)processes.ask("release");
  }
}

}  // namespace reshard
