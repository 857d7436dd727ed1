// A source engine in child processes and a destination rank here.
#pragma once

#include <thread>

#include "ranks.hpp"
#include "times.hpp"

namespace handoff {

using Clock = std::chrono::steady_clock;

// Until `done` or the time is over; what `done` says then.
template <class Done>
bool eventually(Done done, std::chrono::milliseconds limit = 10000ms) {
  const auto until = Clock::now() + limit;
  while (!done()) {
    if (Clock::now() > until) return done();
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

inline std::string name_of(std::int32_t status) { return kvf_status_name(status); }

// A call that must throw this.
template <class Call>
kvf_status refused(Call call) {
  try {
    call();
  } catch (const kvferry::Error& e) {
    return e.status();
  }
  return KVF_OK;
}

struct Duo {
  explicit Duo(const Model& m = {}, std::uint32_t stages = 1, const std::string& times = "usual")
      : Duo(m, m, stages, times) {}
  Duo(const Model& m, const Model& ours, std::uint32_t stages = 1,
      const std::string& times = "usual")
      : model(m), source("source", m, stages, times), here(configure("here", times), ours) {
    source.all("fill 7", "ok");
    connect();
  }
  void connect() {
    peer = here.agent.add_peer(from_hex(source.metadata));
    ASSERT_EQ(peer.wait(20s), KVF_OK) << peer.text();
    source.all("peer here " + to_hex(here.engine.metadata()), "KVF_OK");
  }
  Child& rank(std::size_t at = 0) { return *source.ranks[at]; }

  // Rank 0 offers its blocks `slots`, whole.
  kvferry::Bytes publish(std::uint64_t key, const std::vector<std::int32_t>& slots,
                         const std::string& claim_lease = "20000 20000") {
    return from_hex(rank().ask("publish " + std::to_string(key) + " " +
                               std::to_string(slots.size() * Model::tokens) + " " + list(slots) +
                               " -1 " + claim_lease));
  }
  std::string published(std::uint64_t key, int ms = 20000) {
    return rank().ask("published " + std::to_string(key) + " " + std::to_string(ms));
  }
  kvferry::Transfer pull(const kvferry::Bytes& ticket, const std::vector<std::int32_t>& slots,
                         std::uint64_t skip = 0, kvferry::Nanoseconds deadline = 20s) {
    return here.agent.pull_begin(peer, ticket, 0, slots, skip, KVF_TOKEN_END_ALL, deadline);
  }
  // "" if our block `to` is what the source with this seed has in `from`.
  std::string differs(std::int32_t from, std::int32_t to, std::uint32_t seed = 7) const {
    for (std::uint32_t view : {kKey, kValue}) {
      auto text = here.slot_differs(seed, view, static_cast<std::uint32_t>(from),
                                    static_cast<std::uint32_t>(to));
      if (!text.empty()) return text;
    }
    return "";
  }

  Model model;
  RemoteEngine source;
  Rank here;
  kvferry::Peer peer;
};

// 14 MiB of blocks: a copy in several pieces.
inline Model large() {
  Model m;
  m.head_bytes = 32768;
  m.slots = 12;
  return m;
}
inline std::vector<std::int32_t> first(std::int32_t n) {
  std::vector<std::int32_t> slots;
  for (std::int32_t s = 0; s < n; ++s) slots.push_back(s);
  return slots;
}

}  // namespace handoff
