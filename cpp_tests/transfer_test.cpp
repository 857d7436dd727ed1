// kvf_transfer: pull, import, receive and push between two agents of one process.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "transfers.hpp"

using namespace kvferry_test;

namespace {

kvf_transfer* const kUntouched = reinterpret_cast<kvf_transfer*>(0x1234);
constexpr uint64_t kTokenBytes = 2 * Cache::layers * Cache::token;  // keys and values

class Transfer : public testing::TestWithParam<MemoryKind> {
 protected:
  // Blocks `from[i]` of the source are blocks `to[i]` of the sink, whole, and every other byte of
  // the sink is still zero.
  void expect_moved(const Pair& pair, const Ints& from, const Ints& to, int state_slot = -1) {
    for (int view = 0; view < 2; ++view) {
      for (int slot = 0; slot < static_cast<int>(Cache::slots); ++slot) {
        const auto at = std::find(to.begin(), to.end(), slot);
        if (at == to.end()) {
          EXPECT_EQ(pair.sink.block(view, slot), zeros(Cache::block)) << view << ", " << slot;
        } else {
          const int source = from[static_cast<size_t>(at - to.begin())];
          EXPECT_EQ(pair.sink.block(view, slot), pair.source.block(view, source))
              << view << ", " << slot;
        }
      }
    }
    for (int slot = 0; slot < static_cast<int>(Cache::states); ++slot) {
      if (slot == state_slot) continue;
      EXPECT_EQ(pair.sink.state(slot), zeros(Cache::state)) << slot;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Memory, Transfer, testing::Values(MemoryKind::Pool, MemoryKind::Own),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Transfer, PullsBlocksWhereverTheyLie) {
  const std::pair<Ints, Ints> cases[] = {
      {{3}, {5}},
      {{0}, {15}},                                      // first to last
      {{15}, {0}},                                      // last to first
      {{4, 5, 6, 7}, {8, 9, 10, 11}},                   // in one run
      {{15, 14, 13, 12, 11}, {0, 1, 2, 3, 4}},          // reversed
      {{9, 2, 14, 5, 0, 7, 11}, {1, 12, 3, 8, 15, 0, 6}},  // scattered
  };
  for (const auto& [from, to] : cases) {
    Pair pair(GetParam());
    auto publication = pair.publish(1, from, from.size() * Cache::tokens);
    auto transfer = pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0, to);
    EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
    EXPECT_EQ(transfer.poll(), KVF_OK);
    expect_moved(pair, from, to);

    const auto info = transfer.query();
    EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_DONE));
    EXPECT_EQ(info.cause, KVF_OK);
    EXPECT_EQ(info.memory_safe, 1u);
    EXPECT_EQ(info.submitted, 1u);
    EXPECT_EQ(info.key.request, 1u);
    EXPECT_EQ(info.bytes, from.size() * Cache::tokens * kTokenBytes);
    EXPECT_EQ(info.bytes_total, info.bytes);
    EXPECT_GT(info.elapsed_ns, 0u);
    EXPECT_STREQ(info.transport, "inproc");
    ASSERT_EQ(info.parts.size(), 1u);
    EXPECT_EQ(info.parts[0].group, 0u);
    EXPECT_EQ(info.parts[0].kind, static_cast<uint32_t>(KVF_GROUP_PAGED));
    EXPECT_EQ(info.parts[0].state, static_cast<uint32_t>(KVF_PART_DONE));
    EXPECT_EQ(info.parts[0].bytes, info.bytes);
    EXPECT_EQ(transfer.error_text(), "");
    EXPECT_EQ(publication.wait(kLong), KVF_OK);
  }
}

TEST_P(Transfer, PullsExactlyTheWantedTokens) {
  Pair pair(GetParam());
  auto publication = pair.publish(1, {3, 9, 4}, 10);  // half of the third block
  auto transfer =
      pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0, Ints{7, 0, 2}, 4, 9);
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_EQ(transfer.query().bytes, 5 * kTokenBytes);
  for (int view = 0; view < 2; ++view) {
    EXPECT_EQ(pair.sink.block(view, 7), zeros(Cache::block)) << "skipped";
    EXPECT_EQ(pair.sink.block(view, 0), pair.source.block(view, 9));
    const auto got = pair.sink.block(view, 2), there = pair.source.block(view, 4);
    for (size_t byte = 0; byte < Cache::block; ++byte) {
      const bool token_eight = byte % Cache::layer < Cache::token;
      EXPECT_EQ(got[byte], token_eight ? there[byte] : 0) << "byte " << byte;
    }
  }
}

TEST_P(Transfer, AFullPrefixHitIsBornCompleteAndTheSourceIsTold) {
  Pair pair(GetParam());
  auto publication = pair.publish(1, {3, 9}, 8);
  auto transfer = pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0, Ints{7, 0}, 8);
  EXPECT_EQ(transfer.poll(), KVF_OK) << transfer.error_text();
  const auto info = transfer.query();
  EXPECT_EQ(info.submitted, 0u);
  EXPECT_EQ(info.bytes_total, 0u);
  EXPECT_STREQ(info.transport, "");
  ASSERT_EQ(info.parts.size(), 1u);
  EXPECT_EQ(info.parts[0].state, static_cast<uint32_t>(KVF_PART_NOT_NEEDED));
  EXPECT_EQ(publication.wait(kLong), KVF_OK);
  expect_moved(pair, {}, {});
}

TEST_P(Transfer, AnImportHasSeveralPartsAndOneOutcome) {
  Pair pair(GetParam());
  auto publication = pair.source.agent.publish(blocks_and_state());
  const Ints slots{5, 6};
  kvferry::Import import;
  import.groups = {kvferry::wanted(0, slots)};
  import.states = {{1, 1, 8}};
  import.owned_only = {{0, 7}, {0, 8}};
  import.user_data = 99;
  auto transfer = pair.sink.agent.import_begin(pair.peer, publication.ticket(), import);
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  expect_moved(pair, {3, 9}, {5, 6}, 1);
  EXPECT_EQ(pair.sink.state(1), pair.source.state(2));

  const auto info = transfer.query();
  EXPECT_EQ(info.key.request, 4u);
  EXPECT_EQ(info.key.attempt, 2u);
  ASSERT_EQ(info.parts.size(), 2u);
  EXPECT_EQ(info.parts[0].bytes, 8 * kTokenBytes);
  EXPECT_EQ(info.parts[1].kind, static_cast<uint32_t>(KVF_GROUP_STATE));
  EXPECT_EQ(info.parts[1].group, 1u);
  EXPECT_EQ(info.parts[1].bytes, Cache::state);
  EXPECT_EQ(info.parts[1].state, static_cast<uint32_t>(KVF_PART_DONE));
  EXPECT_EQ(transfer.aux(), (kvferry::Bytes{1, 2, 3}));

  bool seen = false;
  for (const kvf_event& event : pair.sink.agent.take_events()) {
    if (event.kind != KVF_EVENT_TRANSFER_ENDED) continue;
    EXPECT_FALSE(seen) << "told once";
    seen = true;
    EXPECT_EQ(event.object, info.id);
    EXPECT_EQ(event.user_data, 99u);
    EXPECT_EQ(event.key.request, 4u);
    EXPECT_EQ(event.status, KVF_OK);
  }
  EXPECT_TRUE(seen);
}

TEST_P(Transfer, AStateIsImportedWithoutAnyBlock) {
  Pair pair(GetParam());
  auto publication = pair.source.agent.publish(blocks_and_state());
  const Ints slots{5, 6};
  kvferry::Import import;
  import.groups = {kvferry::wanted(0, slots, 8)};
  import.states = {{1, 0, KVF_AS_OF_ANY}};
  auto transfer = pair.sink.agent.import_begin(pair.peer, publication.ticket(), import);
  EXPECT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  const auto info = transfer.query();
  EXPECT_EQ(info.parts[0].state, static_cast<uint32_t>(KVF_PART_NOT_NEEDED));
  EXPECT_EQ(info.parts[1].state, static_cast<uint32_t>(KVF_PART_DONE));
  EXPECT_EQ(info.bytes, Cache::state);
  expect_moved(pair, {}, {}, 0);
  EXPECT_EQ(pair.sink.state(0), pair.source.state(2));
  EXPECT_EQ(publication.wait(kLong), KVF_OK);
}

// ---- ends ----

// A receive waits for its sender, so it is running for as long as a test likes.
kvferry::Transfer running(Side& side, const Ints& slots, uint64_t user_data = 0,
                          kvferry::Nanoseconds deadline = {}) {
  kvferry::Receive receive;
  receive.key = kvferry::key(8);
  receive.groups = {kvferry::wanted(0, slots, 0, slots.size() * Cache::tokens)};
  receive.user_data = user_data;
  receive.deadline = deadline;
  return side.agent.receive_begin(receive);
}

TEST(TransferEnd, WaitingTimesOutAndTheTransferGoesOn) {
  Side side("one");
  auto transfer = running(side, {3});
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  EXPECT_EQ(transfer.wait(0s), KVF_TIMED_OUT);
  EXPECT_EQ(transfer.wait(5ms), KVF_TIMED_OUT);
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  const auto info = transfer.query();
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_PENDING));
  EXPECT_EQ(info.cause, KVF_IN_PROGRESS);
  EXPECT_EQ(info.memory_safe, 0u);
  EXPECT_EQ(info.elapsed_ns, 0u);
  EXPECT_EQ(info.parts.at(0).state, static_cast<uint32_t>(KVF_PART_IN_PROGRESS));
  EXPECT_THROW(transfer.finish(1ms), kvferry::Error);
}

TEST(TransferEnd, CancelIsIdempotentToldOnceAndFreesTheSlots) {
  Side side("one");
  auto transfer = running(side, {3}, 55);
  transfer.cancel();
  transfer.cancel();
  EXPECT_REFUSED(transfer.wait(kLong), KVF_ERR_CANCELLED, "");
  const auto info = transfer.query();
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_CANCELLED));
  EXPECT_EQ(info.memory_safe, 1u);
  EXPECT_EQ(info.parts.at(0).state, static_cast<uint32_t>(KVF_PART_FAILED));
  EXPECT_EQ(info.parts.at(0).cause, KVF_ERR_CANCELLED);
  EXPECT_NE(transfer.error_text(), "");
  transfer.cancel();
  EXPECT_EQ(transfer.poll(), KVF_ERR_CANCELLED);
  const auto events = side.agent.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, static_cast<uint32_t>(KVF_EVENT_TRANSFER_ENDED));
  EXPECT_EQ(events[0].status, KVF_ERR_CANCELLED);
  EXPECT_EQ(events[0].user_data, 55u);
  auto again = running(side, {3});
  EXPECT_TRUE(side.agent.quarantine().empty());
}

TEST(TransferEnd, CancelAfterTheLastByteChangesNothing) {
  Pair pair;
  auto publication = pair.publish(1, {3}, 4);
  auto transfer = pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0, Ints{5});
  transfer.finish(kLong);
  transfer.cancel();
  EXPECT_EQ(transfer.wait(kLong), KVF_OK);
  EXPECT_EQ(publication.wait(kLong), KVF_OK);
}

TEST(TransferEnd, TheDeadlineEndsIt) {
  Side side("one");
  auto transfer = running(side, {3}, 0, 20ms);
  EXPECT_REFUSED(transfer.wait(kLong), KVF_ERR_DEADLINE, "");
  EXPECT_EQ(transfer.query().outcome, static_cast<uint32_t>(KVF_OUTCOME_EXPIRED));
  EXPECT_TRUE(safe_soon(transfer));
}

TEST(TransferEnd, DestroyingARunningOneFreesItsSlotsAndSaysNothing) {
  Side side("one");
  EXPECT_EQ(running(side, {3}).destroy(), KVF_OK);
  side.agent.drain(kLong);
  EXPECT_TRUE(side.agent.take_events().empty());
  EXPECT_TRUE(side.agent.quarantine().empty());
}

TEST(TransferEnd, ABusySlotNamesItsHolder) {
  Pair pair;
  auto holder = running(pair.sink, {5, 6});
  auto publication = pair.publish(1, {3, 9}, 8);
  const kvferry::Bytes ticket = publication.ticket();
  PullDescription d(pair, ticket);
  kvf_transfer* out = kUntouched;
  EXPECT_REFUSED(kvf_pull_begin(pair.sink.agent.c(), &d.desc, &out), KVF_ERR_SLOT_BUSY,
                 "slot 5 of group 0 is the destination of transfer " +
                     std::to_string(holder.query().id) + " (request 8 attempt 0)");
  EXPECT_EQ(out, kUntouched);
  holder.cancel();
  EXPECT_EQ(holder.wait(kLong), KVF_ERR_CANCELLED);
  ASSERT_EQ(kvf_pull_begin(pair.sink.agent.c(), &d.desc, &out), KVF_OK);
  EXPECT_EQ(kvf_transfer_wait(out, 20'000'000'000), KVF_OK);
  EXPECT_EQ(kvf_transfer_destroy(out), KVF_OK);
}

TEST(TransferEnd, AReleasedOfferIsExpiredAndNeverWrongBytes) {
  Pair pair;
  auto publication = pair.publish(1, {3}, 4);
  const kvferry::Bytes ticket = publication.ticket();
  publication.release();
  EXPECT_EQ(publication.wait(kLong), KVF_ERR_CANCELLED);
  auto transfer = pair.sink.agent.pull_begin(pair.peer, ticket, 0, Ints{5});
  const kvf_status status = transfer.wait(kLong);
  EXPECT_TRUE(status == KVF_ERR_EXPIRED || status == KVF_ERR_CANCELLED_BY_PEER)
      << kvf_status_name(status);
  EXPECT_TRUE(safe_soon(transfer));
}

TEST(TransferEnd, APeersEndFailsWhatItServes) {
  Pair pair;
  const kvferry::Bytes ticket = pair.publish(1, {3}, 4).ticket();
  EXPECT_EQ(pair.source.agent.destroy(kLong), KVF_OK);
  while (pair.peer.query().status == KVF_OK) std::this_thread::sleep_for(1ms);
  auto transfer = pair.sink.agent.pull_begin(pair.peer, ticket, 0, Ints{5});
  EXPECT_REFUSED(transfer.wait(kLong), KVF_ERR_PEER_LOST, "");
  EXPECT_TRUE(safe_soon(transfer));
}

TEST(TransferEnd, ManyThreadsMayLookWaitAndCancelAtOnce) {
  Side side("one");
  for (int round = 0; round < 20; ++round) {
    auto transfer = running(side, {3, 4});
    std::atomic<int> cancelled{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        if (i == 3) transfer.cancel();
        while (transfer.poll() == KVF_IN_PROGRESS) (void)transfer.query();
        if (transfer.wait(kLong) == KVF_ERR_CANCELLED) ++cancelled;
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(cancelled, 4);
    while (transfer.query().memory_safe == 0) std::this_thread::yield();
  }
}

// ---- push ----

TEST_P(Transfer, APushFillsWhatTheReceiverOpened) {
  PushPair pair(GetParam());
  const Ints to{5, 6}, from{3, 9};
  kvferry::Receive receive;
  receive.key = kvferry::key(4);
  receive.groups = {kvferry::wanted(0, to, 4, 8)};
  receive.states = {{1, 1, KVF_AS_OF_ANY}};
  auto in = pair.sink.agent.receive_begin(receive);
  const kvferry::Bytes offer = in.offer();
  EXPECT_FALSE(offer.empty());
  kvferry::Push push;
  push.groups = {kvferry::published(0, from, 0, 8)};
  push.states = {{1, 2, 8}};
  push.aux = {7, 8};
  auto out = pair.source.agent.push_begin(pair.back, offer, push);
  EXPECT_EQ(in.wait(kLong), KVF_OK) << in.error_text();
  EXPECT_EQ(out.wait(kLong), KVF_OK) << out.error_text();
  expect_moved(pair, {9}, {6}, 1);
  EXPECT_EQ(pair.sink.state(1), pair.source.state(2));
  EXPECT_EQ(in.aux(), (kvferry::Bytes{7, 8}));
  EXPECT_EQ(in.query().bytes, 4 * kTokenBytes + Cache::state);
  EXPECT_EQ(out.query().bytes, in.query().bytes);
  EXPECT_EQ(out.query().memory_safe, 1u);
}

TEST(Push, AnImportOfThatDirectionIsAReceive) {
  PushPair pair;
  const Ints to{5, 6}, from{3, 9};
  kvf_import_group group = kvferry::wanted(0, to, 0, 8);
  kvf_import_desc desc = KVF_IMPORT_DESC_INIT;
  desc.direction = KVF_DIRECTION_PUSH;
  desc.key = kvferry::key(4);
  desc.groups = &group;
  desc.num_groups = 1;
  const kvferry::Transfer in(
      kvferry::make<kvferry::Transfer::Owner>(kvf_import_begin, pair.sink.agent.c(), &desc));
  kvferry::Push push;
  push.groups = {kvferry::published(0, from, 0, 8)};
  auto out = pair.source.agent.push_begin(pair.back, in.offer(), push);
  in.finish(kLong);
  out.finish(kLong);
  EXPECT_EQ(pair.sink.block(0, 5), pair.source.block(0, 3));
  EXPECT_EQ(pair.sink.block(1, 6), pair.source.block(1, 9));
}

}  // namespace
