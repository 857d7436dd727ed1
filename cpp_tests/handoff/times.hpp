// Deadlines of the handoff tests' agents.
#pragma once

#include "cache.hpp"

namespace handoff {

// "usual": as all process tests. "short": for tests that wait until a stopped side is given up.
inline kvferry::AgentConfig configure(const std::string& name, const std::string& times) {
  using namespace std::chrono_literals;
  auto config = process_test::quick(name);
  if (times == "short") {
    config.peer_silence = 1500ms;
    config.heartbeat = 250ms;
    config.lease = 1500ms;
  }
  return config;
}

}  // namespace handoff
