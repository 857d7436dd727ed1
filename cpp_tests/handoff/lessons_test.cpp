// What went wrong for others: one test for each public bug report that concerns us, by its number
// in docs/lessons.md. Tests of this kind that stand elsewhere carry their number too.
#include <poll.h>

#include <fstream>

#include "duo.hpp"

using namespace handoff;

namespace {

std::size_t kvferry_maps() {
  std::ifstream in("/proc/self/maps");
  std::size_t n = 0;
  for (std::string line; std::getline(in, line);) n += line.find("memfd:kvferry") != std::string::npos;
  return n;
}

// The first event of a kind, within 10 s.
bool await_event(kvferry::Agent& agent, std::uint32_t kind, kvf_event& found) {
  const auto until = Clock::now() + 10s;
  while (Clock::now() < until) {
    pollfd p{agent.event_fd(), POLLIN, 0};
    ::poll(&p, 1, 1000);
    for (const auto& event : agent.take_events()) {
      if (event.kind == kind) {
        found = event;
        return true;
      }
    }
  }
  return false;
}

TEST(Lessons, Lesson01_AFullPrefixHitReleasesTheSource) {
  Duo duo;
  const auto ticket = duo.publish(1, {1, 2});
  auto transfer = duo.pull(ticket, {5, 6}, 8);
  EXPECT_EQ(transfer.poll(), KVF_OK) << "born complete";
  EXPECT_EQ(transfer.query().submitted, 0u);
  EXPECT_EQ(duo.published(1), "KVF_OK");
}

TEST(Lessons, Lesson02_AnAbortedReceiveOfADeadSourceGivesItsSlotsBack) {
  Duo duo(large(), 1, "short");
  const auto ticket = duo.publish(1, {1});
  kvferry::Receive what;
  what.key = kvferry::key(2);
  const std::vector<std::int32_t> to = {3};
  what.groups = {kvferry::wanted(0, to, 0, 4)};
  auto queued = duo.here.agent.receive_begin(what);
  duo.rank().kill(SIGKILL);
  duo.rank().reap();
  auto pulled = duo.pull(ticket, {4});
  const auto status = pulled.wait(10s);
  EXPECT_TRUE(status == KVF_OK || status == KVF_ERR_PEER_LOST) << name_of(status);
  queued.cancel();
  EXPECT_EQ(queued.wait(10s), KVF_ERR_CANCELLED);
  ASSERT_TRUE(eventually([&] { return pulled.query().memory_safe && queued.query().memory_safe; }));
  const std::vector<std::int32_t> both = {3, 4};
  EXPECT_NO_THROW((void)duo.here.agent.publish(kvferry::key(3), 0, both, 8));
}

TEST(Lessons, Lesson03_ANoticeNamesTheSourcesPublicationAndNotOurTransfer) {
  Duo duo;
  for (int i = 0; i < 5; ++i) {  // our ids run ahead of the source's
    kvferry::Receive what;
    what.key = kvferry::key(50);
    const std::vector<std::int32_t> to = {8 + i};
    what.groups = {kvferry::wanted(0, to, 0, 4)};
    duo.here.agent.receive_begin(what).cancel();
  }
  std::vector<kvferry::Bytes> tickets;
  for (std::uint64_t key = 1; key <= 3; ++key) {
    tickets.push_back(duo.publish(key, {static_cast<std::int32_t>(key)}));
  }
  auto transfer = duo.pull(tickets[1], {5});
  EXPECT_EQ(transfer.wait(20s), KVF_OK);
  EXPECT_EQ(duo.published(2), "KVF_OK");
  EXPECT_EQ(duo.published(1, 0), "KVF_TIMED_OUT");
  EXPECT_EQ(duo.published(3, 0), "KVF_TIMED_OUT");
}

// A source here and engines of readers in child processes.
struct Readers {
  Readers() : here(configure("source", "usual"), Model{}) { here.fill(7); }
  RemoteEngine engine(const std::string& name, std::uint32_t stages) {
    RemoteEngine readers(name, Model{}, stages);
    readers.all("peer source " + to_hex(here.engine.metadata()), "KVF_OK");
    return readers;
  }
  kvferry::Publication publish(std::uint64_t key) {
    return here.agent.publish(kvferry::key(key), 0, slots, 8);
  }
  void read(Child& reader, const kvferry::Publication& publication) {
    const auto n = reader.ask("import source " + to_hex(publication.ticket()) + " 5,6 0 -1 20000");
    EXPECT_EQ(reader.ask("wait " + n + " 20000"), "KVF_OK safe");
    EXPECT_EQ(reader.ask("compare 7 1,2 5,6"), "same");
  }
  Rank here;
  const std::vector<std::int32_t> slots = {1, 2};
};

TEST(Lessons, Lesson04_APublicationWaitsForEveryReaderOfThePlan) {
  Readers source;
  auto readers = source.engine("reader", 2);
  auto publication = source.publish(1);
  source.read(*readers.ranks[1], publication);
  ASSERT_TRUE(eventually([&] { return publication.query().readers_done == 1; }));
  EXPECT_EQ(publication.query().readers_expected, 2u);
  EXPECT_EQ(publication.wait(200ms), KVF_TIMED_OUT) << "released on the first of two readers";
  source.read(*readers.ranks[0], publication);
  EXPECT_EQ(publication.wait(20s), KVF_OK);
}

TEST(Lessons, Lesson05_NothingWaitsWithoutADeadline) {
  Duo duo({}, 2);
  const auto ticket = duo.publish(1, {1, 2}, "20000 20000");  // rank 1 never publishes
  auto pulled = duo.pull(ticket, {5, 6}, 0, 400ms);
  kvferry::Receive what;
  what.key = kvferry::key(2);
  const std::vector<std::int32_t> to = {7};
  what.groups = {kvferry::wanted(0, to, 0, 4)};
  what.deadline = 400ms;
  auto received = duo.here.agent.receive_begin(what);  // nobody pushes
  EXPECT_EQ(pulled.wait(10s), KVF_ERR_DEADLINE) << pulled.error_text();
  EXPECT_EQ(received.wait(10s), KVF_ERR_DEADLINE);
  ASSERT_TRUE(eventually([&] { return pulled.query().memory_safe && received.query().memory_safe; }));
  EXPECT_EQ(duo.published(1), "KVF_ERR_DEADLINE") << "the source hears of the reader's failure";
}

TEST(Lessons, Lesson06_14_ACopyInManyPiecesEndsOnce) {
  Duo duo(large());
  const auto slots = first(9);
  const auto ticket = duo.publish(1, slots);
  auto transfer = duo.pull(ticket, slots);
  EXPECT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  EXPECT_EQ(duo.published(1), "KVF_OK");
  std::this_thread::sleep_for(50ms);
  int ends = 0;
  for (const auto& event : duo.here.agent.take_events()) {
    ends += event.kind == KVF_EVENT_TRANSFER_ENDED || event.kind == KVF_EVENT_MEMORY_SAFE;
  }
  EXPECT_EQ(ends, 1);
  for (auto slot : slots) EXPECT_EQ(duo.differs(slot, slot), "");
}

TEST(Lessons, Lesson07_ATicketThatIsNeverUsedHoldsNothing) {
  Duo duo;
  const auto ticket = duo.publish(1, {1});
  EXPECT_NE(duo.rank().ask("receive 8 1 0 4 -1 100").find("SLOT_BUSY"), std::string::npos);
  duo.here.agent.decline(duo.peer, ticket, KVF_ERR_CANCELLED);
  EXPECT_EQ(duo.published(1), "KVF_ERR_DECLINED");
  EXPECT_EQ(duo.rank().ask("receive 8 1 0 4 -1 100").find("SLOT_BUSY"), std::string::npos);
}

TEST(Lessons, Lesson08_ACancelInMidCopyIsAStateUntilTheMemoryIsQuiet) {
  Model model = large();
  model.head_bytes *= 8;
  // A device has all of it under way: a cancel waits for that, and the bytes arrive.
  const bool device = kvferry_test::on_device();
  Duo duo(model);
  const auto slots = first(9);
  bool cancelled = false;
  for (std::uint64_t key = 1; key <= 200 && !cancelled; ++key) {
    auto transfer = duo.pull(duo.publish(key, slots), slots);
    const auto begun = [&] {
      const auto info = transfer.query();
      return info.bytes > 0 || (device && info.submitted != 0);
    };
    while (transfer.poll() == KVF_IN_PROGRESS && !begun()) {
      std::this_thread::yield();
    }
    transfer.cancel();
    const auto status = transfer.wait(20s);
    ASSERT_TRUE(status == KVF_OK || status == KVF_ERR_CANCELLED) << name_of(status);
    ASSERT_TRUE(eventually([&] { return transfer.query().memory_safe == 1; }));
    const auto info = transfer.query();
    EXPECT_EQ(duo.published(key),
              status == KVF_ERR_CANCELLED ? "KVF_ERR_CANCELLED_BY_PEER" : "KVF_OK");
    // One that came behind the last piece is tried again.
    cancelled = status == KVF_ERR_CANCELLED && (device || info.bytes < info.bytes_total);
    if (cancelled) {
      EXPECT_TRUE(device || info.bytes > 0);
      EXPECT_EQ(info.parts[0].state, static_cast<std::uint32_t>(KVF_PART_FAILED));
    }
  }
  EXPECT_TRUE(cancelled) << "no cancel came in mid-copy";
  auto again = duo.pull(duo.publish(99, slots), slots);
  EXPECT_EQ(again.wait(20s), KVF_OK);
  for (auto slot : slots) EXPECT_EQ(duo.differs(slot, slot), "");
}

TEST(Lessons, Lesson09_ADeadPeersMemoryIsUnmappedAtOnce) {
  const auto none = kvferry_maps();
  Duo duo;
  // A side's lease table, and its pool where that is host memory.
  const bool device = process_test::is_device(MemoryKind::pool);
  const auto side = device ? 1u : 2u;
  const auto ours = none + side;
  EXPECT_EQ(kvferry_maps(), ours + side);
  if (device) {
    EXPECT_EQ(kvferry_test::books().ipc_mappings, 1u);
  }
  duo.rank().kill(SIGKILL);
  duo.rank().reap();
  EXPECT_TRUE(eventually([&] { return kvferry_maps() == ours; }, 2000ms)) << kvferry_maps();
  if (device) {
    EXPECT_TRUE(eventually([&] { return kvferry_test::books().ipc_mappings == 0; }, 2000ms));
  }
}

TEST(Lessons, Lesson10_17_23_ReclaimingNeedsNoCallAndNoNewWork) {
  Rank here(configure("here", "usual"), Model{});
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  const std::vector<std::int32_t> slots = {1};
  offer.groups = {kvferry::published(0, slots, 0, 4)};
  offer.claim = 200ms;
  offer.user_data = 77;
  auto publication = here.agent.publish(offer);
  pollfd p{here.agent.event_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&p, 1, 10000), 1);  // not one call in between
  const auto events = here.agent.take_events();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, static_cast<std::uint32_t>(KVF_EVENT_PUBLICATION_ENDED));
  EXPECT_EQ(events[0].status, KVF_ERR_EXPIRED);
  EXPECT_EQ(events[0].user_data, 77u);
}

TEST(Lessons, Lesson12_AnEngineCanDrainAndForceWhatIsLeft) {
  Model model;
  model.memory = MemoryKind::own;
  Rank here(configure("here", "usual"), model);
  const std::vector<std::int32_t> slots = {1};
  auto publication = here.agent.publish(kvferry::key(1), 0, slots, 4);
  EXPECT_EQ(refused([&] { here.agent.drain(100ms); }), KVF_ERR_DEADLINE);
  EXPECT_NE(kvferry::last_error().find("1 publications"), std::string::npos)
      << kvferry::last_error();
  publication.release();
  EXPECT_EQ(publication.wait(10s), KVF_ERR_CANCELLED);
  EXPECT_NO_THROW(here.agent.drain(10s));
}

TEST(Lessons, Lesson13_EqualRanksOfTwoEnginesAreTwoReaders) {
  Readers source;
  auto two = source.engine("two", 2), one = source.engine("one", 1);
  auto publication = source.publish(1);
  source.read(*two.ranks[1], publication);  // rank 0 of this engine is still expected
  source.read(*one.ranks[0], publication);  // and is not this rank 0
  EXPECT_EQ(publication.wait(200ms), KVF_TIMED_OUT);
  source.read(*two.ranks[0], publication);
  EXPECT_EQ(publication.wait(20s), KVF_OK);
}

TEST(Lessons, Lesson15_ANoticeIsToldUntilItIsHeard) {
  Duo duo;
  const auto ticket = duo.publish(1, {1, 2});
  duo.rank().kill(SIGSTOP);
  auto transfer = duo.pull(ticket, {5, 6});  // its memory can be read all the same
  EXPECT_EQ(transfer.wait(2s), KVF_OK) << transfer.error_text();
  std::this_thread::sleep_for(300ms);
  duo.rank().kill(SIGCONT);
  EXPECT_EQ(duo.published(1), "KVF_OK");
  EXPECT_EQ(duo.differs(1, 5) + duo.differs(2, 6), "");
}

TEST(Lessons, Lesson16_BothSidesOfAPushHaveTheirTimeOut) {
  Readers source;
  auto readers = source.engine("reader", 1);
  auto& reader = *readers.ranks[0];
  auto peer = source.here.agent.add_peer(from_hex(readers.metadata));
  ASSERT_EQ(peer.wait(20s), KVF_OK) << peer.text();
  const auto alone = reader.ask("receive 1 5 0 4 -1 400");  // nobody pushes
  EXPECT_EQ(reader.ask("wait " + alone.substr(0, alone.find(' ')) + " 10000"),
            "KVF_ERR_DEADLINE safe");
  const auto answer = reader.ask("receive 2 6 0 4 -1 20000");
  reader.kill(SIGSTOP);  // nobody fetches
  ASSERT_EQ(reader.halted(10s), process_test::Child::State::stopped);
  kvferry::Push push;
  const std::vector<std::int32_t> slots = {1};
  push.groups = {kvferry::published(0, slots, 0, 4)};
  push.deadline = 400ms;
  auto transfer =
      source.here.agent.push_begin(peer, from_hex(answer.substr(answer.find(' ') + 1)), push);
  const auto status = transfer.wait(2s);
  EXPECT_TRUE(status == KVF_ERR_EXPIRED || status == KVF_ERR_DEADLINE) << name_of(status);
  EXPECT_EQ(transfer.query().memory_safe, 1u);
  reader.kill(SIGCONT);
}

TEST(Lessons, Lesson18_WhatIsPublishedStaysAndASendersEndReachesTheReceiver) {
  // Long enough that a word through a pipe comes in mid-copy, also on two busy cores.
  Model model = large();
  model.head_bytes *= 8;
  Duo duo(model);
  const auto slots = first(9);
  bool told = false;
  for (std::uint64_t key = 1; key <= 200 && !told; ++key) {
    kvferry::Receive what;
    what.key = kvferry::key(key);
    what.groups = {kvferry::wanted(0, slots, 0, 36)};
    auto receive = duo.here.agent.receive_begin(what);
    const auto push = duo.rank().ask("push here " + to_hex(receive.offer()) + " 36 " +
                                     list(slots) + " -1 20000");
    while (receive.poll() == KVF_IN_PROGRESS && receive.query().bytes == 0) {
      std::this_thread::yield();
    }
    EXPECT_EQ(duo.rank().ask("cancel " + push), "ok");
    const auto status = receive.wait(5s);
    ASSERT_TRUE(status == KVF_OK || status == KVF_ERR_CANCELLED_BY_PEER ||
                status == KVF_ERR_EXPIRED)
        << name_of(status);
    told = status != KVF_OK;
    ASSERT_TRUE(eventually([&] { return receive.query().memory_safe == 1; }));
    ASSERT_NE(duo.rank().ask("wait " + push + " 10000"), "KVF_TIMED_OUT unsafe");
  }
  EXPECT_TRUE(told) << "no cancel came in mid-copy";
}

TEST(Lessons, Lesson19_26_APeerThatDoesNotAnswerIsAnErrorAfterItsRetries) {
  auto source = start_rank("source", Model{});
  const auto metadata = from_hex(source->ask("meta"));
  auto config = configure("here", "short");
  config.connect = 1s;
  Rank here(config, Model{});
  const auto ticket = from_hex(source->ask("publish 1 4 1 -1 20000 20000"));
  source->kill(SIGSTOP);  // the kernel still accepts connections for it
  auto peer = here.agent.add_peer(metadata);
  const std::vector<std::int32_t> to = {2};
  auto waiting = here.agent.pull_begin(peer, ticket, 0, to);
  EXPECT_EQ(peer.wait(10s), KVF_ERR_PEER_UNREACHABLE) << peer.text();
  EXPECT_EQ(waiting.wait(10s), KVF_ERR_PEER_UNREACHABLE) << waiting.error_text();
  EXPECT_NE(waiting.error_text().find("source"), std::string::npos) << waiting.error_text();
  source->kill(SIGCONT);
}

TEST(Lessons, Lesson21_61_ATransferWithoutADeadlineHasTheAgents) {
  auto config = configure("here", "usual");
  config.transfer = 400ms;
  RemoteEngine source("source", Model{}, 2);
  Rank here(config, Model{});
  auto peer = here.agent.add_peer(from_hex(source.metadata));
  ASSERT_EQ(peer.wait(20s), KVF_OK);
  const auto ticket = from_hex(source.ranks[0]->ask("publish 1 4 1 -1 20000 20000"));
  const std::vector<std::int32_t> to = {2};
  EXPECT_EQ(here.agent.pull_begin(peer, ticket, 0, to).wait(10s), KVF_ERR_DEADLINE);
}

TEST(Lessons, Lesson22_ARequestThatWaitsStallsNoOther) {
  Duo duo({}, 2);
  const auto early = duo.publish(1, {1});  // rank 1 is not ready with it
  auto waiting = duo.pull(early, {5});
  for (std::uint64_t key = 2; key <= 10; ++key) {
    const auto ticket = duo.publish(key, {2});
    EXPECT_NE(duo.rank(1).ask("publish " + std::to_string(key) + " 4 2 -1 20000 20000"), "");
    auto transfer = duo.pull(ticket, {6});
    ASSERT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  }
  EXPECT_EQ(waiting.poll(), KVF_IN_PROGRESS);
  EXPECT_NE(duo.rank(1).ask("publish 1 4 1 -1 20000 20000"), "");
  EXPECT_EQ(waiting.wait(20s), KVF_OK) << waiting.error_text();
  EXPECT_EQ(duo.differs(1, 5) + duo.differs(2, 6), "");
}

TEST(Lessons, Lesson24_ManyThreadsHandOverAtOnce) {
  Rank source(configure("source", "usual"), Model{}), here(configure("here", "usual"), Model{});
  source.fill(7);
  auto peer = here.agent.add_peer(source.engine.metadata());
  ASSERT_EQ(peer.wait(20s), KVF_OK);
  std::vector<std::thread> threads;
  for (std::int32_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<std::int32_t> from = {t}, to = {15 - t};
      for (std::uint64_t i = 0; i < 100; ++i) {
        auto publication = source.agent.publish(
            kvferry::key(static_cast<std::uint64_t>(t), static_cast<std::uint32_t>(i)), 0, from, 4);
        auto transfer = here.agent.pull_begin(peer, publication.ticket(), 0, to);
        EXPECT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
        EXPECT_EQ(publication.wait(20s), KVF_OK);
      }
      EXPECT_EQ(here.slot_differs(7, kKey, static_cast<std::uint32_t>(t),
                                  static_cast<std::uint32_t>(15 - t)),
                "");
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Lessons, Lesson27_37_BytesThatAreNotAttestedAreNoSuccess) {
  Duo duo;
  const auto released = duo.publish(1, {1});
  EXPECT_EQ(duo.rank().ask("release 1"), "ok");
  EXPECT_EQ(duo.published(1), "KVF_ERR_CANCELLED");
  auto transfer = duo.pull(released, {5});
  EXPECT_EQ(transfer.wait(10s), KVF_ERR_EXPIRED);
  EXPECT_EQ(transfer.query().outcome, static_cast<std::uint32_t>(KVF_OUTCOME_EXPIRED));
  EXPECT_NE(transfer.error_text(), "");
  // One failed part fails the import: nobody may use the others' bytes.
  Model hybrid;
  hybrid.state = true;
  Duo two(hybrid, 2);
  const auto ticket = from_hex(two.rank(0).ask("publish 1 4 1 2 20000 20000"));
  EXPECT_NE(two.rank(1).ask("publish 1 4 1 2 20000 20000"), "");
  EXPECT_EQ(two.rank(1).ask("release 1"), "ok");
  EXPECT_EQ(two.rank(1).ask("published 1 10000"), "KVF_ERR_CANCELLED");
  kvferry::Import what;
  const std::vector<std::int32_t> to = {5};
  what.groups = {kvferry::wanted(0, to)};
  what.states = {{1, 1, KVF_AS_OF_ANY}, {2, 1, KVF_AS_OF_ANY}};
  what.deadline = 500ms;
  auto import = two.here.agent.import_begin(two.peer, ticket, what);
  EXPECT_NE(import.wait(10s), KVF_OK);
  EXPECT_NE(two.rank(0).ask("published 1 10000"), "KVF_OK");
}

TEST(Lessons, Lesson28_ASkippedPrefixPairsTheSameTokensOnBothWays) {
  Duo duo;
  const std::vector<std::int32_t> from = {3, 1, 7}, to = {10, 12, 11};
  std::uint64_t key = 0;
  for (std::uint64_t skip : {0, 4, 8, 12}) {
    for (bool push : {false, true}) {
      SCOPED_TRACE((push ? "push " : "pull ") + std::to_string(skip));
      duo.here.fill(99);
      auto image = duo.here.snapshot();
      ++key;
      kvferry::Transfer transfer;
      if (push) {
        kvferry::Receive what;
        what.key = kvferry::key(key);
        what.groups = {kvferry::wanted(0, to, skip, 12)};
        transfer = duo.here.agent.receive_begin(what);
        const auto answer = duo.rank().ask("push here " + to_hex(transfer.offer()) + " 12 " +
                                           list(from) + " -1 20000");
        EXPECT_EQ(answer.find("error"), std::string::npos) << answer;
      } else {
        transfer = duo.pull(duo.publish(key, from), to, skip);
      }
      ASSERT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
      for (std::size_t i = skip / 4; i < to.size(); ++i) {
        for (std::uint32_t view : {kKey, kValue}) {
          duo.here.write(image.data(), 7, view, static_cast<std::uint32_t>(from[i]),
                         static_cast<std::uint32_t>(to[i]));
        }
      }
      EXPECT_EQ(duo.here.differs(image), "");
    }
  }
}

TEST(Lessons, Lesson29_30_34_OnlyTheLayoutSaysWhereBytesLie) {
  // Four views of different lengths in one pool, [layer][slot] there and [slot][layer] here.
  Model there, ours;
  there.state = ours.state = ours.block_major = true;
  Duo duo(there, ours);
  auto image = duo.here.snapshot();
  const auto ticket = from_hex(duo.rank().ask("publish 1 8 1,2 3 20000 20000"));
  kvferry::Import what;
  const std::vector<std::int32_t> to = {9, 4};
  what.groups = {kvferry::wanted(0, to)};
  what.states = {{1, 0, 8}, {2, 2, 8}};
  auto transfer = duo.here.agent.import_begin(duo.peer, ticket, what);
  ASSERT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  for (std::uint32_t view : {kKey, kValue}) {
    duo.here.write(image.data(), 7, view, 1, 9);
    duo.here.write(image.data(), 7, view, 2, 4);
  }
  duo.here.write(image.data(), 7, kConv, 3, 0);
  duo.here.write(image.data(), 7, kRecurrent, 3, 2);
  EXPECT_EQ(duo.here.differs(image), "");
}

// An agent with keys, and with their scales if it has any.
struct Quantised {
  Quantised(const std::string& name, bool scales)
      : agent(configure(name, "usual")), pool(agent.host_pool(8192)) {
    kvferry::View key;
    key.role = KVF_ROLE_KEY;
    key.element_bits = 8;
    key.bytes_per_head = key.head_stride = key.token_stride = key.layer_stride = 64;
    key.slot_stride = 64;
    key.slots = 8;
    key.tensors = {pool.at(0)};
    kvferry::View scale = key;
    scale.role = KVF_ROLE_SCALE;
    scale.element_bits = 32;
    scale.bytes_per_head = scale.head_stride = scale.token_stride = scale.layer_stride = 4;
    scale.slot_stride = 4;
    scale.tensors = {pool.at(4096)};
    kvferry::Group group;
    group.tokens_per_block = 1;
    group.layers = {0};
    group.views = {key};
    if (scales) group.views.push_back(scale);
    agent.set_layout({group});
    engine = agent.engine();
  }
  std::uint8_t* data() { return reinterpret_cast<std::uint8_t*>(pool.data()); }
  kvferry::Agent agent;
  kvferry::Pool pool;
  kvferry::Engine engine;
};

TEST(Lessons, Lesson33_ScalesAndStatesBelongToTheHandoff) {
  Quantised source("source", true), here("here", true), without("without", false);
  EXPECT_EQ(refused([&] { (void)without.agent.add_peer(source.engine.metadata()); }),
            KVF_ERR_INCOMPATIBLE)
      << "keys without their scales";
  auto peer = here.agent.add_peer(source.engine.metadata());
  ASSERT_EQ(peer.wait(20s), KVF_OK);
  for (int i = 0; i < 8192; ++i) source.data()[i] = static_cast<std::uint8_t>(i % 251 + 1);
  const std::vector<std::int32_t> from = {2}, to = {5};
  auto publication = source.agent.publish(kvferry::key(1), 0, from, 1);
  auto transfer = here.agent.pull_begin(peer, publication.ticket(), 0, to);
  ASSERT_EQ(transfer.wait(20s), KVF_OK);
  EXPECT_EQ(transfer.query().bytes, 68u);
  EXPECT_EQ(std::memcmp(here.data() + 5 * 64, source.data() + 2 * 64, 64), 0);
  EXPECT_EQ(std::memcmp(here.data() + 4096 + 5 * 4, source.data() + 4096 + 2 * 4, 4), 0);
  // A state that was not published cannot be imported, and one of another token neither.
  Model hybrid;
  hybrid.state = true;
  Duo duo(hybrid);
  const auto ticket = from_hex(duo.rank().ask("publish 1 8 1,2 3 20000 20000"));
  const auto bare = from_hex(duo.rank().ask("publish 2 8 1,2 -1 20000 20000"));
  kvferry::Import what;
  what.states = {{1, 1, 4}};
  EXPECT_EQ(refused([&] { (void)duo.here.agent.import_begin(duo.peer, ticket, what); }),
            KVF_ERR_INCOMPATIBLE);
  what.states = {{1, 1, KVF_AS_OF_ANY}};
  EXPECT_EQ(refused([&] { (void)duo.here.agent.import_begin(duo.peer, bare, what); }),
            KVF_ERR_NOT_FOUND);
}

TEST(Lessons, Lesson38_AnOldTicketNeverGivesTheNextPromptsBlocks) {
  Duo duo;
  const auto old = duo.publish(1, {1});
  EXPECT_EQ(duo.rank().ask("release 1"), "ok");
  EXPECT_EQ(duo.published(1), "KVF_ERR_CANCELLED");
  EXPECT_EQ(duo.rank().ask("fill 9"), "ok");
  const auto fresh = duo.publish(1, {1});  // the same request, attempt and slot
  EXPECT_EQ(duo.pull(old, {5}).wait(10s), KVF_ERR_EXPIRED);
  EXPECT_EQ(duo.published(1, 0), "KVF_TIMED_OUT") << "the old ticket ended the new publication";
  EXPECT_EQ(duo.pull(fresh, {6}).wait(10s), KVF_OK);
  EXPECT_EQ(duo.differs(1, 6, 9), "");
}

TEST(Lessons, Lesson42_MemoryThatNoTransportReachesIsRefusedWhenItIsRegistered) {
  kvferry::Agent agent;
  kvf_pool_desc desc = KVF_POOL_DESC_INIT;
  char memory[64];
  desc.base = memory;
  desc.bytes = sizeof memory;
  desc.memory_kind = KVF_MEMORY_DEVICE;
  kvf_pool* pool = nullptr;
  const bool cuda = kvf_cuda_info(nullptr, 0, nullptr) == KVF_OK;
  EXPECT_EQ(kvf_pool_register(agent.c(), &desc, &pool),
            cuda ? KVF_ERR_INVALID_ARGUMENT : KVF_ERR_UNSUPPORTED);
  EXPECT_EQ(pool, nullptr);
}

TEST(Lessons, Lesson44_MoreBlocksThanWerePublishedIsAnError) {
  Duo duo;
  const auto before = duo.here.snapshot();
  const auto ticket = duo.publish(1, {1, 2});
  const std::vector<std::int32_t> three = {5, 6, 7};
  const auto wants = [&](std::uint64_t end) {
    return refused([&] {
      (void)duo.here.agent.pull_begin(duo.peer, ticket, 0, three, 0, end);
    });
  };
  EXPECT_EQ(wants(12), KVF_ERR_OUT_OF_RANGE);
  EXPECT_NE(kvferry::last_error().find("0..12"), std::string::npos) << kvferry::last_error();
  EXPECT_EQ(duo.here.differs(before), "");
  EXPECT_EQ(duo.pull(ticket, {5, 6}).wait(10s), KVF_OK);
}

TEST(Lessons, Lesson45_AnOutcomeStaysWithItsHandle) {
  Duo duo;
  auto transfer = duo.pull(duo.publish(1, {1}), {5});
  EXPECT_EQ(transfer.wait(10s), KVF_OK);
  EXPECT_EQ(duo.published(1), "KVF_OK");
  (void)duo.here.agent.take_events();
  duo.rank().kill(SIGKILL);
  duo.rank().reap();
  ASSERT_TRUE(eventually([&] { return duo.peer.query().status == KVF_ERR_PEER_LOST; }));
  EXPECT_EQ(transfer.poll(), KVF_OK);
  const auto info = transfer.query();
  EXPECT_EQ(info.bytes, 6 * duo.model.block_bytes());
  EXPECT_EQ(info.parts[0].state, static_cast<std::uint32_t>(KVF_PART_DONE));
}

TEST(Lessons, Lesson46_AFailedTransferFailsNothingElse) {
  Duo duo;
  RemoteEngine other("other", Model{}, 1);
  other.all("fill 8", "ok");
  auto peer = duo.here.agent.add_peer(from_hex(other.metadata));
  ASSERT_EQ(peer.wait(20s), KVF_OK);
  const auto lost = duo.publish(1, {1});
  duo.rank().kill(SIGKILL);
  duo.rank().reap();
  ASSERT_TRUE(eventually([&] { return duo.peer.query().status == KVF_ERR_PEER_LOST; }));
  EXPECT_EQ(duo.pull(lost, {5}).wait(10s), KVF_ERR_PEER_LOST);
  const auto ticket = from_hex(other.ranks[0]->ask("publish 1 4 2 -1 20000 20000"));
  const std::vector<std::int32_t> to = {5};
  EXPECT_EQ(duo.here.agent.pull_begin(peer, ticket, 0, to).wait(10s), KVF_OK);
  EXPECT_EQ(duo.differs(2, 5, 8), "");
}

TEST(Lessons, Lesson47_ASourceThatLeavesInMidCopyIsAnErrorAndNoCrash) {
  for (int round = 0; round < 5; ++round) {
    Duo duo(large());
    const auto slots = first(9);
    auto transfer = duo.pull(duo.publish(1, slots), slots);
    while (transfer.poll() == KVF_IN_PROGRESS && transfer.query().bytes == 0) {
      std::this_thread::yield();
    }
    duo.rank().close_input();  // it destroys its agent, unmaps its pool and exits
    const auto status = transfer.wait(20s);
    EXPECT_TRUE(status == KVF_OK || status == KVF_ERR_PEER_LOST ||
                status == KVF_ERR_CANCELLED_BY_PEER || status == KVF_ERR_EXPIRED)
        << name_of(status) << " " << transfer.error_text();
    ASSERT_TRUE(eventually([&] { return transfer.query().memory_safe == 1; }));
    if (status == KVF_OK) {
      for (auto slot : slots) EXPECT_EQ(duo.differs(slot, slot), "");
    }
  }
}

TEST(Lessons, Lesson48_MetadataIsComparedBeforeItIsDecoded) {
  Rank here(configure("here", "usual"), Model{});
  auto config = configure("other", "usual");
  config.fingerprint = "another model";
  Rank other(config, Model{});
  EXPECT_EQ(refused([&] { (void)here.agent.add_peer(other.engine.metadata()); }),
            KVF_ERR_INCOMPATIBLE);
  EXPECT_NE(kvferry::last_error().find("another model"), std::string::npos)
      << kvferry::last_error();
  Rank like(configure("like", "usual"), Model{});
  auto newer = like.engine.metadata();
  newer[4] = 200;                                          // the major version
  for (auto at = newer.size() / 2; at < newer.size(); ++at) newer[at] = 0xff;  // and no longer ours
  EXPECT_EQ(refused([&] { (void)here.agent.add_peer(newer); }), KVF_ERR_ABI_MISMATCH);
}

TEST(Lessons, Lesson49_50_53_NoAddressOutsideOfAPoolIsEverUsed) {
  kvferry::Agent agent(configure("here", "usual"));
  auto pool = agent.host_pool(4096);
  kvferry::View key;
  key.role = KVF_ROLE_KEY;
  key.heads = 2;
  key.bytes_per_head = key.head_stride = 64;
  key.token_stride = key.layer_stride = key.slot_stride = 128;
  key.slots = 32;
  key.replicas = 2;  // more ranks than heads: both hold the same ones
  key.replica = 1;
  key.tensors = {pool.at(1)};  // the last slot ends one byte behind the pool
  kvferry::Group group;
  group.tokens_per_block = 1;
  group.layers = {0};
  group.views = {key};
  EXPECT_EQ(refused([&] { agent.set_layout({group}); }), KVF_ERR_OUT_OF_RANGE);
  group.views[0].tensors = {pool.at(0)};
  agent.set_layout({group});
  // Slots and tokens are checked too, and memory that was taken back is not used any more.
  Duo duo;
  const auto ticket = duo.publish(1, {1});
  EXPECT_EQ(refused([&] { (void)duo.pull(ticket, {16}); }), KVF_ERR_OUT_OF_RANGE);
  duo.here.unregister();
  EXPECT_EQ(refused([&] { (void)duo.pull(ticket, {5}); }), KVF_ERR_STATE);
}

TEST(Lessons, Lesson51_EveryPoolSaysHowItCanBeRead) {
  Duo mapped;
  const char* how = process_test::is_device(MemoryKind::pool) ? "cuda_ipc: same host"
                                                              : "of its 1 pools 1 mapped";
  EXPECT_NE(mapped.peer.text().find(how), std::string::npos)
      << mapped.peer.text();
  Model model;
  model.memory = MemoryKind::own;
  Duo own(model);
  EXPECT_NE(own.peer.text().find("1 read by process_vm_readv"), std::string::npos)
      << own.peer.text();
}

TEST(Lessons, Lesson54_ASilentPeerIsToldAndMayComeBack) {
  Duo duo({}, 1, "short");
  (void)duo.here.agent.take_events();
  duo.rank().kill(SIGSTOP);
  kvf_event event;
  ASSERT_TRUE(await_event(duo.here.agent, KVF_EVENT_PEER_LOST, event));
  EXPECT_EQ(event.status, KVF_ERR_PEER_LOST);
  duo.rank().kill(SIGCONT);
  duo.connect();
  EXPECT_EQ(duo.pull(duo.publish(1, {1}), {5}).wait(10s), KVF_OK);
  EXPECT_EQ(duo.differs(1, 5), "");
}

TEST(Lessons, Lesson56_AFailureNamesPeerAndReason) {
  Model model = large();
  model.memory = MemoryKind::own;
  Duo duo(model);
  const auto slots = first(9);
  const auto ticket = duo.publish(1, slots);
  duo.rank().kill(SIGKILL);
  duo.rank().reap();
  auto transfer = duo.pull(ticket, slots);
  const auto status = transfer.wait(10s);
  EXPECT_TRUE(status == KVF_ERR_PEER_LOST || status == KVF_ERR_TRANSFER) << name_of(status);
  const auto text = transfer.error_text();
  EXPECT_TRUE(text.find("process") != std::string::npos || text.find("source0") != std::string::npos)
      << text;
  ASSERT_TRUE(eventually([&] { return duo.peer.query().status == KVF_ERR_PEER_LOST; }));
  EXPECT_NE(duo.peer.text().find("source0"), std::string::npos) << duo.peer.text();
}

TEST(Lessons, Lesson57_BytesTimeAndPathAreReported) {
  Duo duo;
  auto transfer = duo.pull(duo.publish(1, {1, 2}), {5, 6}, 4);
  ASSERT_EQ(transfer.wait(10s), KVF_OK);
  const auto info = transfer.query();
  EXPECT_EQ(info.bytes, 6 * duo.model.block_bytes());
  EXPECT_EQ(info.bytes_total, info.bytes);
  EXPECT_GT(info.elapsed_ns, 0u);
  EXPECT_STREQ(info.transport, process_test::is_device(MemoryKind::pool) ? "cuda_ipc" : "shm");
}

TEST(Lessons, Lesson59_AgentsShareNoNamePortOrState) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int i = 0; i < 8; ++i) {
    ranks.push_back(std::make_unique<Rank>(configure("same name", "usual"), Model{}));
    ranks.back()->fill(static_cast<std::uint32_t>(i));
  }
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    auto peer = ranks[0]->agent.add_peer(ranks[i]->engine.metadata());
    ASSERT_EQ(peer.wait(20s), KVF_OK) << peer.text();
    const std::vector<std::int32_t> from = {1}, to = {static_cast<std::int32_t>(i)};
    auto publication = ranks[i]->agent.publish(kvferry::key(1), 0, from, 4);
    EXPECT_EQ(ranks[0]->agent.pull_begin(peer, publication.ticket(), 0, to).wait(20s), KVF_OK);
    const auto n = static_cast<std::uint32_t>(i);
    EXPECT_EQ(ranks[0]->slot_differs(n, kKey, 1, n), "");
  }
}

TEST(Lessons, Lesson60_AnAgentThatLeavesTellsItsPeersAtOnce) {
  Rank here(configure("here", "usual"), Model{});
  auto leaving = std::make_unique<Rank>(configure("leaving", "usual"), Model{});
  auto peer = here.agent.add_peer(leaving->engine.metadata());
  ASSERT_EQ(peer.wait(20s), KVF_OK);
  (void)here.agent.take_events();
  const auto started = Clock::now();
  leaving.reset();  // this process lives on: no death notice, and no silence yet
  kvf_event event;
  ASSERT_TRUE(await_event(here.agent, KVF_EVENT_PEER_LOST, event));
  EXPECT_LT(Clock::now() - started, 2s);
  EXPECT_NE(peer.text().find("shut down"), std::string::npos) << peer.text();
}

}  // namespace
