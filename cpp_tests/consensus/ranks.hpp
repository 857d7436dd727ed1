// The engine under test: 8 child processes, and the peer engine in the test's own process.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include "child.hpp"
#include "holder.hpp"

namespace consensus {

using process_test::Child;

struct Ranks {
  Ranks(bool context, std::chrono::milliseconds silence, std::uint32_t seed = 1)
      : context(context), other(configure("other", silence), 1, 0) {
    other.engine = other.agent.engine();
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      child[rank] = std::make_unique<Child>(std::vector<std::string>{
          CONSENSUS_RANK, std::to_string(rank), context ? "context" : "generation",
          std::to_string(silence.count()), std::to_string(seed)});
    }
    std::string all;
    for (auto& c : child) {
      EXPECT_EQ(c->line(), "ready");
      all += " " + c->ask("agentmeta");
    }
    // The leader last, so that the others meet one that has no engine yet.
    for (std::uint32_t rank = world; rank-- > 0;) {
      EXPECT_EQ(child[rank]->ask("engine" + all), "ok");
    }
    if (context) {
      peer = other.agent.add_peer(from_hex(child[0]->ask("meta")));
      kvferry::check(peer.wait(30s));
    } else {
      tell("peer " + to_hex(other.engine.metadata()), kvf_status_name(KVF_OK));
    }
  }
  // Ranks that are stopped would not notice the end of their input.
  ~Ranks() {
    for (auto& c : child) c->kill(SIGKILL);
  }

  // The same command to all living ranks; all must give this answer.
  void tell(const std::string& command, const std::string& answer) {
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if (alive[rank]) child[rank]->send(command);
    }
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      if (!alive[rank]) continue;
      EXPECT_EQ(child[rank]->line(), answer) << "rank " << rank;
    }
  }
  void start(std::chrono::milliseconds limit) {
    for (std::uint32_t rank = world; rank-- > 0;) {
      EXPECT_EQ(child[rank]->ask("transceiver " + std::to_string(limit.count())), "ok");
    }
  }
  void stop(std::uint32_t rank, int signal) {
    child[rank]->kill(signal);
    alive[rank] = false;
  }

  // Generation: what the peer engine offers under a key.
  std::string offer(std::uint64_t key) {
    const std::vector<std::int32_t> slot = {static_cast<std::int32_t>(key % slots)};
    offered.push_back(other.agent.publish(kvferry::key(key), 0, slot, tokens));
    return to_hex(offered.back().ticket());
  }
  static std::string begin_line(std::uint64_t key, const std::string& ticket) {
    return "begin " + std::to_string(key) + " " + std::to_string(key % slots) + " " + ticket;
  }
  // Begins a request on some ranks.
  void begin(std::uint64_t key, const std::vector<std::uint32_t>& on) {
    if (tickets.count(key) == 0) tickets[key] = offer(key);
    for (auto rank : on) {
      EXPECT_EQ(child[rank]->ask(begin_line(key, tickets[key])), "ok") << "rank " << rank;
    }
  }
  // Waits until a request's part on a rank has ended.
  void await(std::uint32_t rank, std::uint64_t key) {
    const auto until = std::chrono::steady_clock::now() + 20s;
    const std::string command = "record " + std::to_string(key);
    while (child[rank]->ask(command) != kvf_status_name(KVF_OK)) {
      ASSERT_LT(std::chrono::steady_clock::now(), until) << "rank " << rank << " key " << key;
      std::this_thread::sleep_for(5ms);
    }
  }

  // One iteration of the engine: the leader's status call, then the same results on all others.
  std::string iterate(int at_least, std::chrono::milliseconds timeout) {
    const std::string results = lead(at_least, timeout);
    follow(results);
    return results;
  }
  // The iteration after the leader's event fd fired: no status call asks in vain.
  std::string next() {
    if (child[0]->ask("readable 20000") != "yes") return "nothing in time";
    return iterate(0, 0ms);
  }
  // The leader's part; its decision travels.
  std::string lead(int at_least, std::chrono::milliseconds timeout) {
    std::istringstream in(child[0]->ask("status " + std::to_string(at_least) + " " +
                                        std::to_string(timeout.count())));
    std::string results;
    in >> decision >> results;
    return results;
  }
  void follow(const std::string& results) {
    if (decision == "-") return;
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      if (!alive[rank]) continue;
      EXPECT_EQ(child[rank]->ask("apply " + decision), results) << "rank " << rank;
    }
  }

  bool context;
  Holder other;
  kvferry::Peer peer;
  std::array<std::unique_ptr<Child>, world> child;
  std::array<bool, world> alive{true, true, true, true, true, true, true, true};
  std::map<std::uint64_t, std::string> tickets;
  std::vector<kvferry::Publication> offered;
  std::string decision = "-";
};

// A line of a rank's results.
inline std::string ended(std::uint64_t key, kvf_status cause, bool safe, std::uint32_t rank) {
  return std::to_string(key) + ":ended:" + std::to_string(KVF_OUTCOME_FAILED) + ":" +
         kvf_status_name(cause) + ":" + (safe ? "1:" : "0:") + std::to_string(rank);
}
inline std::string succeeded(std::uint64_t key) {
  return std::to_string(key) + ":ended:" + std::to_string(KVF_OUTCOME_DONE) + ":" +
         kvf_status_name(KVF_OK) + ":1:-";
}

}  // namespace consensus
