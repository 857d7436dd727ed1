// Parts of the contract that need two processes and a little time: tickets that wait, tickets that
// are declined, late notices, drain, simultaneous connects, restarts at one address.
#include <netinet/in.h>
#include <sys/socket.h>

#include "duo.hpp"

using namespace handoff;

namespace {

TEST(Ticket, AHeldTicketOutlivesClaimAndLease) {
  Duo duo;
  const auto held = duo.publish(1, {1, 2}, "800 800"), left = duo.publish(2, {3}, "800 800");
  for (int i = 0; i < 12; ++i) {
    duo.here.agent.hold(duo.peer, held);
    std::this_thread::sleep_for(200ms);
  }
  EXPECT_EQ(duo.published(2, 0), "KVF_ERR_EXPIRED");
  EXPECT_EQ(duo.published(1, 0), "KVF_TIMED_OUT") << "a queued request's ticket was dropped";
  auto transfer = duo.pull(held, {5, 6});
  EXPECT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  EXPECT_EQ(duo.differs(1, 5) + duo.differs(2, 6), "");
  EXPECT_EQ(duo.published(1), "KVF_OK");
  EXPECT_EQ(duo.pull(left, {7}).wait(20s), KVF_ERR_EXPIRED);
}

TEST(Ticket, AHeldTicketThatIsHeldNoMoreExpires) {
  Duo duo;
  const auto ticket = duo.publish(1, {1}, "10000 500");
  duo.here.agent.hold(duo.peer, ticket);  // counts as the first contact: from now on the lease
  EXPECT_EQ(duo.published(1), "KVF_ERR_EXPIRED");
}

TEST(Ticket, DeclineEndsThePublicationsOfAllSourceRanks) {
  Duo duo({}, 2);
  std::string ticket;
  for (auto& rank : duo.source.ranks) {
    const auto answer = rank->ask("publish 1 8 1,2 -1 20000 20000");
    if (ticket.empty()) ticket = answer;  // that of rank 0 only
  }
  duo.here.agent.decline(duo.peer, from_hex(ticket), KVF_ERR_LIMIT);
  duo.source.all("published 1 20000", "KVF_ERR_DECLINED");
}

TEST(Slots, InSeveralPublicationsAreBusyUntilTheLastEnds) {
  Duo duo;
  std::vector<kvferry::Bytes> tickets;
  for (std::uint64_t key = 1; key <= 3; ++key) tickets.push_back(duo.publish(key, {1, 2}));
  const auto busy = [&] {  // may the source write its slot 2?
    return duo.rank().ask("receive 9 2 0 4 -1 20000").find("KVF_ERR_SLOT_BUSY") !=
           std::string::npos;
  };
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    EXPECT_TRUE(busy()) << "after " << i << " ends";
    auto transfer = duo.pull(tickets[i], {static_cast<std::int32_t>(3 + 2 * i),
                                          static_cast<std::int32_t>(4 + 2 * i)});
    EXPECT_EQ(transfer.wait(20s), KVF_OK);
    EXPECT_EQ(duo.published(i + 1), "KVF_OK");
    EXPECT_EQ(duo.differs(1, static_cast<std::int32_t>(3 + 2 * i)), "");
  }
  EXPECT_FALSE(busy());
}

TEST(PrefixTag, AMismatchIsRefusedBeforeAByteMoves) {
  Duo duo;
  const auto ticket = duo.publish(1, {1, 2}, "20000 20000 4711");
  const auto before = duo.here.snapshot();
  kvferry::Import what;
  const std::vector<std::int32_t> to = {5, 6};
  what.groups = {kvferry::wanted(0, to, 4)};
  what.prefix_tag = 4712;
  EXPECT_EQ(refused([&] { (void)duo.here.agent.import_begin(duo.peer, ticket, what); }),
            KVF_ERR_PREFIX_MISMATCH);
  EXPECT_NE(kvferry::last_error().find("0x1268"), std::string::npos) << kvferry::last_error();
  EXPECT_EQ(duo.here.differs(before), "");
  EXPECT_EQ(duo.published(1, 0), "KVF_TIMED_OUT");
  what.prefix_tag = 4711;
  EXPECT_EQ(duo.here.agent.import_begin(duo.peer, ticket, what).wait(20s), KVF_OK);
  EXPECT_EQ(duo.differs(2, 6), "");
}

TEST(PrefixTag, AMismatchFailsBothSidesOfAPush) {
  Duo duo;
  const auto before = duo.here.snapshot();
  kvferry::Receive what;
  what.key = kvferry::key(1);
  const std::vector<std::int32_t> to = {5, 6};
  what.groups = {kvferry::wanted(0, to, 4, 8)};
  what.prefix_tag = 1;
  auto receive = duo.here.agent.receive_begin(what);
  const auto offer = to_hex(receive.offer());
  EXPECT_EQ(duo.rank().ask("push here " + offer + " 8 1,2 -1 20000 2"), "0");
  EXPECT_EQ(duo.rank().ask("wait 0 20000"), "KVF_ERR_PREFIX_MISMATCH safe");
  EXPECT_EQ(receive.wait(20s), KVF_ERR_PREFIX_MISMATCH) << receive.error_text();
  EXPECT_EQ(receive.query().memory_safe, 1u);
  EXPECT_EQ(duo.here.differs(before), "");
}

// A receive whose sender is known waits for nobody else, and not for somebody who is gone.
kvferry::Receive wanted_by_push(const std::vector<std::int32_t>& to) {
  kvferry::Receive what;
  what.key = kvferry::key(1);
  what.groups = {kvferry::wanted(0, to, 0, 8)};
  what.deadline = 60s;
  return what;
}

TEST(Receive, FailsWhenItsSenderDies) {
  Duo duo;
  const std::vector<std::int32_t> to = {5, 6};
  auto known = duo.here.agent.receive_begin(wanted_by_push(to), &duo.peer);
  const std::vector<std::int32_t> other = {7, 8};
  auto unknown = duo.here.agent.receive_begin(wanted_by_push(other));
  EXPECT_EQ(known.poll(), KVF_IN_PROGRESS);
  duo.rank().kill(SIGKILL);
  EXPECT_EQ(known.wait(20s), KVF_ERR_PEER_LOST);
  EXPECT_NE(known.error_text().find("source"), std::string::npos) << known.error_text();
  EXPECT_EQ(known.query().memory_safe, 1u);
  EXPECT_EQ(unknown.poll(), KVF_IN_PROGRESS) << "somebody else may push";
  // Its slots are free, and a sender that is gone already is noticed too.
  auto late = duo.here.agent.receive_begin(wanted_by_push(to), &duo.peer);
  EXPECT_EQ(late.wait(20s), KVF_ERR_PEER_LOST);
}

TEST(Receive, TakesNoPushOfAnotherEngine) {
  Duo duo;
  RemoteEngine other("other", Model{}, 1);
  other.all("fill 9", "ok");
  other.all("peer here " + to_hex(duo.here.engine.metadata()), "KVF_OK");
  const std::vector<std::int32_t> to = {5, 6};
  auto receive = duo.here.agent.receive_begin(wanted_by_push(to), &duo.peer);
  const auto offer = to_hex(receive.offer());
  EXPECT_EQ(other.ranks[0]->ask("push here " + offer + " 8 1,2 -1 20000 0"), "0");
  EXPECT_EQ(other.ranks[0]->ask("wait 0 20000"), "KVF_ERR_INVALID_ARGUMENT safe");
  EXPECT_EQ(receive.poll(), KVF_IN_PROGRESS);
  EXPECT_EQ(duo.rank().ask("push here " + offer + " 8 1,2 -1 20000 0"), "0");
  EXPECT_EQ(receive.wait(20s), KVF_OK) << receive.error_text();
  EXPECT_EQ(duo.differs(1, 5), "");
  EXPECT_EQ(duo.differs(2, 6), "");
}

TEST(Notices, Lesson43_LateRepeatedAndUnknownOnesChangeNothing) {
  Duo duo;
  const auto done = duo.publish(1, {1});
  EXPECT_EQ(duo.pull(done, {5}).wait(20s), KVF_OK);
  EXPECT_EQ(duo.published(1), "KVF_OK");
  const auto released = duo.publish(2, {2}), live = duo.publish(3, {3});
  EXPECT_EQ(duo.rank().ask("release 2"), "ok");
  EXPECT_EQ(duo.published(2), "KVF_ERR_CANCELLED");
  for (int i = 0; i < 3; ++i) {
    for (const auto* late : {&done, &released}) {
      duo.here.agent.hold(duo.peer, *late);
      duo.here.agent.decline(duo.peer, *late, KVF_ERR_LIMIT);
    }
  }
  // A publication of the same key is another one: its epoch differs.
  const auto again = duo.publish(1, {4});
  duo.here.agent.decline(duo.peer, done, KVF_ERR_LIMIT);
  EXPECT_EQ(duo.pull(again, {6}).wait(20s), KVF_OK);
  EXPECT_EQ(duo.differs(4, 6), "");
  EXPECT_EQ(duo.published(1), "KVF_OK");
  EXPECT_EQ(duo.published(3, 0), "KVF_TIMED_OUT");
  EXPECT_EQ(duo.pull(live, {7}).wait(20s), KVF_OK);
  EXPECT_EQ(duo.published(3), "KVF_OK");
}

TEST(Release, IsIdempotentAndTheFirstEndStands) {
  Duo duo;
  (void)duo.publish(1, {1});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(duo.rank().ask("release 1"), "ok");
  EXPECT_EQ(duo.published(1), "KVF_ERR_CANCELLED");
  const auto ticket = duo.publish(2, {1});
  EXPECT_EQ(duo.pull(ticket, {5}).wait(20s), KVF_OK);
  EXPECT_EQ(duo.published(2), "KVF_OK");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(duo.rank().ask("release 2"), "ok");
  EXPECT_EQ(duo.published(2), "KVF_OK");
}

TEST(Release, InMidCopyIsToldAndTheMemoryIsQuiet) {
  // Long enough that a word through a pipe comes in mid-copy, also on two busy cores.
  Model model = large();
  model.head_bytes *= 8;
  Duo duo(model);
  const auto slots = first(9);
  int told = 0;
  for (std::uint64_t key = 1; key <= 40 && told == 0; ++key) {
    SCOPED_TRACE(key);
    const auto seed = static_cast<std::uint32_t>(6 + key);
    EXPECT_EQ(duo.rank().ask("fill " + std::to_string(seed)), "ok");
    const auto ticket = duo.publish(key, slots);
    auto transfer = duo.pull(ticket, slots);
    while (transfer.poll() == KVF_IN_PROGRESS && transfer.query().bytes == 0) {
      std::this_thread::yield();
    }
    EXPECT_EQ(duo.rank().ask("release " + std::to_string(key)), "ok");
    const auto status = transfer.wait(20s);
    ASSERT_TRUE(eventually([&] { return transfer.query().memory_safe == 1; }));
    // The source's slots are its own again.
    ASSERT_NE(duo.published(key), "KVF_TIMED_OUT");
    if (status == KVF_OK) {
      for (auto slot : slots) EXPECT_EQ(duo.differs(slot, slot, seed), "");
      continue;
    }
    ++told;
    EXPECT_TRUE(status == KVF_ERR_EXPIRED || status == KVF_ERR_CANCELLED_BY_PEER)
        << name_of(status);
    const auto quiet = duo.here.snapshot();
    EXPECT_EQ(duo.rank().ask("fill 99"), "ok");
    EXPECT_EQ(duo.here.differs(quiet), "");
    EXPECT_EQ(duo.here.agent.quarantine().size(), 0u);
  }
  EXPECT_GT(told, 0) << "no release came in mid-copy";
}

TEST(Drain, Lesson47_RefusesNewWorkAndLetsReadersFinish) {
  Duo duo;
  const auto ticket = duo.publish(1, {1, 2});
  EXPECT_EQ(duo.rank().ask("drain 100"), "KVF_ERR_DEADLINE");
  EXPECT_NE(duo.rank().ask("publish 2 4 3 -1 1000 1000").find("KVF_ERR_SHUTDOWN"),
            std::string::npos);
  duo.rank().send("drain 20000");
  auto transfer = duo.pull(ticket, {5, 6});
  EXPECT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  EXPECT_EQ(duo.differs(1, 5) + duo.differs(2, 6), "");
  EXPECT_EQ(duo.rank().line(), "KVF_OK");
}

TEST(Connect, Lesson20_FromBothSidesAtOnceGivesOneLinkThatWorks) {
  const Model model;
  auto left = start_rank("left", model);
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(round);
    auto right = start_rank("right", model);
    EXPECT_EQ(left->ask("fill 1"), "ok");
    EXPECT_EQ(right->ask("fill 2"), "ok");
    const auto from_left = "peer left " + left->ask("meta"),
               from_right = "peer right " + right->ask("meta");
    left->send(from_right);
    right->send(from_left);
    EXPECT_EQ(left->line(), "KVF_OK");
    EXPECT_EQ(right->line(), "KVF_OK");
    // Both directions.
    const auto key = std::to_string(round);
    const auto there = left->ask("publish " + key + " 4 1 -1 20000 20000"),
               back = right->ask("publish " + key + " 4 2 -1 20000 20000");
    const auto at_right = right->ask("import left " + there + " 3 0 -1 20000"),
               at_left = left->ask("import right " + back + " 4 0 -1 20000");
    EXPECT_EQ(right->ask("wait " + at_right + " 20000"), "KVF_OK safe");
    EXPECT_EQ(left->ask("wait " + at_left + " 20000"), "KVF_OK safe");
    EXPECT_EQ(right->ask("compare 1 1 3"), "same");
    EXPECT_EQ(left->ask("compare 2 2 4"), "same");
    EXPECT_EQ(left->ask("published " + key + " 20000"), "KVF_OK");
    EXPECT_EQ(right->ask("published " + key + " 20000"), "KVF_OK");
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

// A port that is free now.
std::uint16_t free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
  close(fd);
  return ntohs(at.sin_port);
}

TEST(Restart, Lesson41_AtTheSameNameAndAddressIsAnotherPeer) {
  const auto listen = "127.0.0.1:" + std::to_string(free_port());
  const Model model;
  Rank here(configure("here", "usual"), model);
  setenv("KVF_TEST_LISTEN", listen.c_str(), 1);
  auto source = start_rank("source", model);
  const auto old_metadata = from_hex(source->ask("meta"));
  EXPECT_EQ(source->ask("fill 1"), "ok");
  auto old_peer = here.agent.add_peer(old_metadata);
  ASSERT_EQ(old_peer.wait(20s), KVF_OK) << old_peer.text();
  const auto old_ticket = from_hex(source->ask("publish 1 4 2 -1 20000 20000"));

  source->kill(SIGKILL);
  source->reap();
  source = start_rank("source", model);
  unsetenv("KVF_TEST_LISTEN");
  EXPECT_EQ(source->ask("fill 2"), "ok");
  const auto metadata = from_hex(source->ask("meta"));
  EXPECT_NE(metadata, old_metadata);
  const auto ticket = from_hex(source->ask("publish 1 4 2 -1 20000 20000"));

  // What belonged to the old one is lost, also for somebody who adds it only now.
  ASSERT_TRUE(eventually([&] { return old_peer.query().status == KVF_ERR_PEER_LOST; }));
  const std::vector<std::int32_t> to = {3};
  EXPECT_EQ(here.agent.pull_begin(old_peer, old_ticket, 0, to).wait(20s), KVF_ERR_PEER_LOST);
  auto late = here.agent.add_peer(old_metadata);
  const auto status = late.wait(20s);
  EXPECT_TRUE(status == KVF_ERR_PEER_LOST || status == KVF_ERR_PEER_UNREACHABLE)
      << name_of(status) << " " << late.text();

  // The new one is served, and never with the old one's tickets.
  auto peer = here.agent.add_peer(metadata);
  ASSERT_EQ(peer.wait(20s), KVF_OK) << peer.text();
  EXPECT_EQ(refused([&] { (void)here.agent.pull_begin(peer, old_ticket, 0, to); }),
            KVF_ERR_INVALID_ARGUMENT);
  auto transfer = here.agent.pull_begin(peer, ticket, 0, to);
  EXPECT_EQ(transfer.wait(20s), KVF_OK) << transfer.error_text();
  EXPECT_EQ(here.slot_differs(2, kKey, 2, 3) + here.slot_differs(2, kValue, 2, 3), "");
  EXPECT_EQ(source->ask("published 1 20000"), "KVF_OK");
}

}  // namespace
