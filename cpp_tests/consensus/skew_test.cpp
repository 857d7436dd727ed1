// Leader and followers of 8 ranks report the same requests in the same iteration, whatever their
// skew, their cancels and the peer's withdrawals. The test is the engine's schedule broadcast: an
// iteration's decision, new requests and cancels travel together, and up to `window` iterations are
// on their way at once.
#include <deque>
#include <random>

#include "ranks.hpp"

namespace consensus {
namespace {

constexpr std::size_t window = 12;

std::uint64_t iterations() {
  const char* given = std::getenv("KVFERRY_TEST_ITERATIONS");
  return given == nullptr ? 3000 : std::stoull(given);
}

struct Totals {
  std::uint64_t done = 0, other = 0, begun = 0;
};

class Engine {
 public:
  explicit Engine(bool context, std::uint32_t seed) : ranks_(context, 30000ms, seed), random_(seed) {
    ranks_.start(120s);
    for (std::int32_t slot = 0; slot < static_cast<std::int32_t>(slots); ++slot) free_.push_back(slot);
  }

  Totals run(std::uint64_t iterations) {
    for (std::uint64_t i = 0; i < iterations && !::testing::Test::HasFailure(); ++i) step(i, true);
    const auto until = std::chrono::steady_clock::now() + 60s;
    for (std::uint64_t i = iterations; !live_.empty() && !::testing::Test::HasFailure(); ++i) {
      step(i, false);
      if (std::chrono::steady_clock::now() > until) {
        ADD_FAILURE() << live_.size() << " requests never end, the first is " << live_.begin()->first;
      }
    }
    while (!expected_.empty()) compare();
    EXPECT_EQ(totals_.done + totals_.other, totals_.begun);
    return totals_;
  }

 private:
  bool one_in(std::uint32_t n) { return random_() % n == 0; }

  void step(std::uint64_t i, bool more) {
    std::string fresh;
    std::vector<std::uint64_t> keys;
    if (more && !free_.empty() && one_in(2)) {
      const std::uint64_t key = next_key_++;
      live_[key] = free_.front();
      free_.pop_front();
      keys.push_back(key);
      fresh += " begin " + std::to_string(key) + " " + std::to_string(live_[key]) + " ";
      fresh += ranks_.context ? "-" : offer(key);
      ++totals_.begun;
    }
    const auto cancelling = static_cast<std::uint32_t>(random_() % world);
    std::string cancel;
    if (more && !live_.empty() && one_in(16)) {
      cancel = " cancel " + std::to_string(live_.rbegin()->first);
    }
    auto& lead = *ranks_.child[0];
    std::istringstream in(lead.ask("step lead" + fresh + (cancelling == 0 ? cancel : "")));
    std::string decision, results, ticket;
    in >> decision >> results;
    for (auto key : keys) {
      if (in >> ticket) fetch(key, ticket);
    }
    ASSERT_EQ(decision == "-", results == "none") << "iteration " << i << ": " << results;
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      ranks_.child[rank]->send("step " + decision + fresh + (cancelling == rank ? cancel : ""));
    }
    expected_.push_back({i, results});
    if (expected_.size() > window) compare();
    account(results);
    tidy();
  }

  // Every follower must have said what the leader said in that iteration.
  void compare() {
    const auto [i, results] = expected_.front();
    expected_.pop_front();
    for (std::uint32_t rank = 1; rank < world; ++rank) {
      std::istringstream in(ranks_.child[rank]->line());
      std::string decision, got;
      in >> decision >> got;
      ASSERT_EQ(got, results) << "iteration " << i << " rank " << rank;
    }
  }

  void account(const std::string& results) {
    if (results == "none") return;
    std::istringstream in(results);
    for (std::string one; std::getline(in, one, ',');) {
      std::istringstream fields(one);
      std::string key, kind, outcome, cause, safe;
      for (auto* field : {&key, &kind, &outcome, &cause, &safe}) std::getline(fields, *field, ':');
      const auto number = std::stoull(key);
      ASSERT_EQ(live_.count(number), 1u) << one;
      if (kind == "ended") {
        ++(outcome == std::to_string(KVF_OUTCOME_DONE) ? totals_.done : totals_.other);
      }
      if (safe == "1") {
        free_.push_back(live_[number]);
        live_.erase(number);
      }
    }
  }

  // Generation: the peer engine offers; rarely it takes the offer back at once.
  std::string offer(std::uint64_t key) {
    const std::vector<std::int32_t> slot = {live_[key]};
    publications_.push_back(ranks_.other.agent.publish(kvferry::key(key), 0, slot, tokens));
    const std::string ticket = to_hex(publications_.back().ticket());
    if (one_in(24)) publications_.back().release();
    return ticket;
  }

  // Context: the peer engine fetches; rarely it refuses.
  void fetch(std::uint64_t key, const std::string& ticket) {
    const std::vector<std::int32_t> slot = {live_[key]};
    kvferry::Import what;
    what.groups = {kvferry::wanted(0, slot)};
    if (one_in(24)) {
      ranks_.other.agent.decline(ranks_.peer, from_hex(ticket), KVF_ERR_CANCELLED);
      return;
    }
    try {
      transfers_.push_back(ranks_.other.agent.import_begin(ranks_.peer, from_hex(ticket), what));
    } catch (const kvferry::Error& e) {
      if (e.status() != KVF_ERR_SLOT_BUSY) throw;
      ranks_.other.agent.decline(ranks_.peer, from_hex(ticket), KVF_ERR_CANCELLED);
    }
  }

  void tidy() {
    while (publications_.size() > 2 * slots) publications_.pop_front();
    while (transfers_.size() > 2 * slots) transfers_.pop_front();
    (void)ranks_.other.agent.take_events();
  }

  Ranks ranks_;
  std::mt19937 random_;
  std::uint64_t next_key_ = 1;
  std::map<std::uint64_t, std::int32_t> live_;
  std::deque<std::int32_t> free_;
  std::deque<std::pair<std::uint64_t, std::string>> expected_;
  std::deque<kvferry::Publication> publications_;
  std::deque<kvferry::Transfer> transfers_;
  Totals totals_;
};

void run(bool context) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Engine engine(context, seed);
  const std::uint64_t count = iterations();
  const Totals totals = engine.run(count);
  // Not a run in which nothing happened.
  EXPECT_GT(totals.done, count / 8);
  EXPECT_GT(totals.other, count / 200);
}

TEST(Skew, GenerationRanksReportTheSameInTheSameIteration) { run(false); }
TEST(Skew, ContextRanksReportTheSameInTheSameIteration) { run(true); }

}  // namespace
}  // namespace consensus
