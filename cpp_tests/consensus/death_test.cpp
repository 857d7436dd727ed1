// Votes of 8 ranks in processes of their own, while one of them is killed or stopped at each step.
#include "ranks.hpp"

namespace consensus {
namespace {

constexpr std::uint32_t leader = 0, victim = 3, slow = 5;
constexpr auto long_time = 20s;

std::vector<std::uint32_t> all_but(std::uint32_t without = world) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    if (rank != without) ranks.push_back(rank);
  }
  return ranks;
}

// Killed ranks are noticed by their process's end, stopped ones by their silence.
class Death : public ::testing::TestWithParam<int> {
 protected:
  Death() : ranks(false, GetParam() == SIGSTOP ? 3000ms : 10000ms) { ranks.start(60s); }

  void end(std::uint32_t rank) { ranks.stop(rank, GetParam()); }
  std::string next() { return ranks.next(); }
  // What a stopped rank tells when it goes on: the others gave it up, so what was undecided there
  // fails, and nothing hangs.
  void revive(std::uint32_t rank, const std::string& results) {
    if (GetParam() != SIGSTOP) return;
    ranks.child[rank]->kill(SIGCONT);
    ASSERT_EQ(ranks.child[rank]->ask("readable 15000"), "yes");
    const std::string answer = ranks.child[rank]->ask("status 0 0");
    EXPECT_EQ(answer.substr(answer.find(' ') + 1), results);
  }
  void all_readable_but(std::uint32_t without) {
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      if (rank == without) continue;
      EXPECT_EQ(ranks.child[rank]->ask("readable 15000"), "yes") << "rank " << rank;
    }
  }

  Ranks ranks;
};

// The rank knows the request and has not voted: it fails with that rank named; then it is quiet on
// all others. What comes later fails at once.
TEST_P(Death, BeforeItsVote) {
  ranks.begin(1, all_but());
  EXPECT_EQ(next(), succeeded(1));
  ranks.begin(2, all_but(victim));
  for (auto rank : all_but(victim)) ranks.await(rank, 2);
  end(victim);
  EXPECT_EQ(next(), ended(2, KVF_ERR_PEER_LOST, true, victim));
  ranks.begin(3, all_but(victim));
  EXPECT_EQ(ranks.iterate(0, 0ms).substr(0, 8), "3:ended:");
  // It never began request 2, so there is nothing that fails; a new request is refused.
  if (GetParam() != SIGSTOP) return;
  ranks.child[victim]->kill(SIGCONT);
  std::string refused;
  for (int i = 0; i < 200 && refused.find("GROUP_LOST") == std::string::npos; ++i) {
    refused = ranks.child[victim]->ask(Ranks::begin_line(100 + i, ranks.offer(100 + i)));
    std::this_thread::sleep_for(50ms);
  }
  EXPECT_EQ(refused.substr(0, 18), "KVF_ERR_GROUP_LOST");
}

// What it has voted on goes on: the last rank's vote comes after the death.
TEST_P(Death, AfterItsVote) {
  ranks.begin(1, all_but(slow));
  ranks.begin(2, all_but(victim));
  for (auto rank : all_but(slow)) ranks.await(rank, 1);
  for (auto rank : all_but(victim)) ranks.await(rank, 2);
  std::this_thread::sleep_for(100ms); // the vote is on its way
  end(victim);
  EXPECT_EQ(next(), ended(2, KVF_ERR_PEER_LOST, true, victim));
  ranks.begin(1, {slow});
  EXPECT_EQ(next(), succeeded(1));
  revive(victim, ended(1, KVF_ERR_GROUP_LOST, true, leader));
}

// The decision was taken; this rank never sees it.
TEST_P(Death, WhileTheDecisionTravels) {
  ranks.begin(1, all_but());
  ranks.begin(2, all_but(victim));
  const std::string results = ranks.lead(1, long_time);
  EXPECT_EQ(results, succeeded(1));
  const std::string travelling = ranks.decision;
  end(victim);
  ranks.follow(results);
  EXPECT_EQ(next(), ended(2, KVF_ERR_PEER_LOST, true, victim));
  if (GetParam() != SIGSTOP) return;
  // It goes on: what was decided stands there too.
  ranks.child[victim]->kill(SIGCONT);
  EXPECT_EQ(ranks.child[victim]->ask("apply " + travelling), succeeded(1));
}

// The OUTCOME is known, RECLAIM waits for this rank's quiet.
TEST_P(Death, BetweenOutcomeAndReclaim) {
  ranks.begin(1, all_but(victim));
  for (auto rank : all_but(victim)) ranks.await(rank, 1);
  ranks.child[2]->ask("cancel 1");
  const std::string results = ranks.lead(1, long_time);
  EXPECT_EQ(results, "1:ended:" + std::to_string(KVF_OUTCOME_CANCELLED) + ":KVF_ERR_CANCELLED:0:2");
  const std::string travelling = ranks.decision;
  end(victim);
  ranks.follow(results);
  EXPECT_EQ(next(), "1:safe:" + std::to_string(KVF_OUTCOME_CANCELLED) + ":KVF_ERR_CANCELLED:1:2");
}

// The leader dies before anything is decided: all fail with it named, new ones are refused.
TEST_P(Death, OfTheLeaderBeforeTheVotes) {
  ranks.begin(1, all_but(slow));
  ranks.begin(2, {1, 2});
  for (auto rank : all_but(slow)) ranks.await(rank, 1);
  end(leader);
  all_readable_but(slow);
  const std::string later = Ranks::begin_line(3, ranks.offer(3));
  for (auto rank : all_but(slow)) {
    if (rank == leader) continue;
    std::string lost = ended(1, KVF_ERR_GROUP_LOST, true, leader);
    if (rank <= 2) lost += "," + ended(2, KVF_ERR_GROUP_LOST, true, leader);
    EXPECT_EQ(ranks.child[rank]->ask("status 2 0"), "- " + lost) << "rank " << rank;
    EXPECT_EQ(ranks.child[rank]->ask(later).substr(0, 18), "KVF_ERR_GROUP_LOST");
  }
}

// The leader dies while its decision travels: what was decided stands wherever the bytes come,
// before or after the loss was noticed; the rest fails.
TEST_P(Death, OfTheLeaderWhileItsDecisionTravels) {
  ranks.begin(1, all_but());
  const std::string results = ranks.lead(1, long_time);
  ASSERT_EQ(results, succeeded(1));
  ranks.begin(2, all_but(slow));
  const auto apply = "apply " + ranks.decision;
  for (std::uint32_t rank : {1, 2, 3}) EXPECT_EQ(ranks.child[rank]->ask(apply), results);
  end(leader);
  for (std::uint32_t rank : {4, 6, 7}) {
    EXPECT_EQ(ranks.child[rank]->ask("readable 15000"), "yes") << "rank " << rank;
    EXPECT_EQ(ranks.child[rank]->ask(apply), results) << "rank " << rank;
  }
  for (std::uint32_t rank : {1, 2, 3, 4, 6, 7}) {
    EXPECT_EQ(ranks.child[rank]->ask("readable 15000"), "yes") << "rank " << rank;
    EXPECT_EQ(ranks.child[rank]->ask("status 1 0"), "- " + ended(2, KVF_ERR_GROUP_LOST, true, leader));
  }
  if (GetParam() != SIGSTOP) return;
  // The leader that goes on finds that it was given up.
  ranks.child[leader]->kill(SIGCONT);
  std::istringstream in(ranks.child[leader]->ask("status 1 15000"));
  std::string decision, lost;
  in >> decision >> lost;
  // Its own memory may be safe already or not.
  const auto expected =
      "2:ended:" + std::to_string(KVF_OUTCOME_FAILED) + ":KVF_ERR_PEER_LOST:";
  EXPECT_EQ(lost.substr(0, expected.size()), expected);
}

INSTANTIATE_TEST_SUITE_P(, Death, ::testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& test) { return test.param == SIGKILL ? "Killed" : "Stopped"; });

// A rank that lives and never takes the request: it fails at its limit with that rank named,
// although nobody makes a status call; others go on.
TEST(Lag, IsNoticedAtTheLimitWithoutAStatusCall) {
  Ranks ranks(false, 10000ms);
  ranks.start(1500ms);
  const auto begun = std::chrono::steady_clock::now();
  ranks.begin(1, all_but(slow));
  ranks.begin(2, all_but());
  for (auto rank : all_but()) ranks.await(rank, 2);
  EXPECT_EQ(ranks.iterate(1, 1000ms), succeeded(2));
  EXPECT_EQ(ranks.child[leader]->ask("readable 0"), "no");
  EXPECT_EQ(ranks.child[leader]->ask("readable 10000"), "yes");
  EXPECT_GE(std::chrono::steady_clock::now() - begun, 1500ms);
  EXPECT_EQ(ranks.next(), ended(1, KVF_ERR_DEADLINE, false, slow));
  EXPECT_EQ(ranks.next(), "1:safe:" + std::to_string(KVF_OUTCOME_FAILED) +
                                          ":KVF_ERR_DEADLINE:1:" + std::to_string(slow));
  const std::string late = Ranks::begin_line(1, ranks.tickets[1]);
  EXPECT_EQ(ranks.child[slow]->ask(late).substr(0, 13), "KVF_ERR_STATE");
}

// Votes that are cast before the leader listens are kept for it.
TEST(Votes, ComeBeforeTheLeaderListens) {
  Ranks ranks(false, 10000ms);
  for (std::uint32_t rank = 1; rank < world; ++rank) {
    EXPECT_EQ(ranks.child[rank]->ask("transceiver 60000"), "ok");
  }
  for (std::uint64_t key = 1; key <= 5; ++key) ranks.begin(key, all_but(leader));
  for (auto rank : all_but(leader)) ranks.await(rank, 5);
  EXPECT_EQ(ranks.child[leader]->ask("transceiver 60000"), "ok");
  std::string results;
  for (std::uint64_t key = 1; key <= 5; ++key) {
    ranks.begin(key, {leader});
    ranks.await(leader, key);
    EXPECT_EQ(ranks.iterate(1, long_time), succeeded(key));
  }
}

// Context ranks: the reader's part of a killed rank fails, its request with that rank named.
TEST(ContextDeath, FailsWhatTheRankHadNotSent) {
  Ranks ranks(true, 10000ms);
  ranks.start(60s);
  std::string tickets[3];
  for (std::uint64_t key = 1; key <= 2; ++key) {
    for (auto rank : all_but()) {
      const std::string ticket = ranks.child[rank]->ask(Ranks::begin_line(key, "-"));
      if (rank == leader) tickets[key] = ticket;
    }
  }
  const std::vector<std::int32_t> slot = {9};
  kvferry::Import what;
  what.groups = {kvferry::wanted(0, slot)};
  auto first = ranks.other.agent.import_begin(ranks.peer, from_hex(tickets[1]), what);
  EXPECT_EQ(first.wait(20s), KVF_OK);
  EXPECT_EQ(ranks.iterate(1, long_time), succeeded(1));
  ranks.stop(victim, SIGKILL);
  EXPECT_EQ(ranks.lead(1, long_time), ended(2, KVF_ERR_PEER_LOST, false, victim));
  ranks.follow(ended(2, KVF_ERR_PEER_LOST, false, victim));
  EXPECT_EQ(ranks.next(), "2:safe:" + std::to_string(KVF_OUTCOME_FAILED) +
                                          ":KVF_ERR_PEER_LOST:1:" + std::to_string(victim));
}

}  // namespace
}  // namespace consensus
