// Deadlines of the handoff tests' agents.
#pragma once

#include <cstdlib>

#include "cache.hpp"

namespace handoff {

// KVF_TEST_LISTEN: their address. "usual": as all process tests. "short": for tests that wait until a stopped side is given up.
inline kvferry::AgentConfig configure(const std::string& name, const std::string& times) {
  using namespace std::chrono_literals;
  auto config = process_test::quick(name);
  if (times == "short") {
    config.peer_silence = 1500ms;
    config.heartbeat = 250ms;
    config.lease = 1500ms;
  }
  if (const char* listen = std::getenv("KVF_TEST_LISTEN")) config.listen = listen;
  return config;
}

}  // namespace handoff
