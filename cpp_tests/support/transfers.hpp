// What the suites of transfers share.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "side.hpp"

namespace kvferry_test {

using Ints = std::vector<std::int32_t>;

// Blocks 3, 9 with 8 tokens, and state 2.
inline kvferry::Offer blocks_and_state() {
  static const Ints slots{3, 9};
  kvferry::Offer offer;
  offer.key = kvferry::key(4, 2);
  offer.groups = {kvferry::published(0, slots, 0, 8)};
  offer.states = {{1, 2, 8}};
  offer.aux = {1, 2, 3};
  return offer;
}

// The outcome may come before the last copy has stopped.
inline bool safe_soon(const kvferry::Transfer& transfer) {
  const auto until = std::chrono::steady_clock::now() + kLong;
  while (transfer.query().memory_safe == 0) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

// Both blocks of a ticket into blocks 5 and 6; for tests to break.
struct PullDescription {
  explicit PullDescription(const Pair& pair, const kvferry::Bytes& ticket) {
    desc.peer = pair.peer.c();
    desc.ticket = ticket.data();
    desc.ticket_bytes = ticket.size();
    desc.slots = slots;
    desc.num_slots = 2;
    desc.token_end = 8;
  }
  PullDescription(const PullDescription&) = delete;
  int32_t slots[2] = {5, 6};
  kvf_pull_desc desc = KVF_PULL_DESC_INIT;
};

// A pair whose source knows the sink as well.
struct PushPair : Pair {
  explicit PushPair(MemoryKind kind = MemoryKind::Pool) : Pair(kind) {
    back = source.agent.add_peer(sink.engine.metadata());
    kvferry::check(back.wait(kLong));
  }
  kvferry::Peer back;
};

}  // namespace kvferry_test
