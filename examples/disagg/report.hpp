// What the demo found, as a table for people or as JSON for programs.
#pragma once

#include "engine.hpp"
#include "messages.hpp"

#include <string>
#include <vector>

namespace disagg {

struct Run {
  std::string name;
  bool must_be_equal = true;  // false: a negative control
  std::vector<Token> tokens;
  bool equal = false;
  std::size_t first_difference = 0;
  std::uint64_t bytes_moved = 0;
  bool accepted = true;  // the engine took the cache

  bool as_it_should() const { return equal == must_be_equal; }
};

struct Report {
  std::string engine, context_shape, generation_shape, context_pids, generation_pids;
  std::uint64_t prompt_tokens = 0, blocks = 0, bytes = 0;
  std::string transport, why;
  double prefill_seconds = 0, publish_seconds = 0, transfer_seconds = 0, resume_seconds = 0;
  double first_token_seconds = 0;  // from the start of the publication to the first decoded token
  double token_seconds = 0;        // each later token
  std::string publication_ended;
  std::vector<Token> expected;
  std::string text;  // of the expected tokens, if the engine speaks
  std::vector<Run> runs;

  double gigabytes_per_second() const { return transfer_seconds > 0 ? 1e-9 * static_cast<double>(bytes) / transfer_seconds : 0; }
  bool passed() const;
};

std::string as_table(const Report& report);
std::string as_json(const Report& report);

}  // namespace disagg
