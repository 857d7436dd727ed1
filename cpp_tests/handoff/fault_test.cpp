// Either side dies or stops in every state of a handoff. The fault points are in the library's
// feature `testing`: the agent that reaches one stops itself there, and then itself or the other
// side is killed (kill -9) or stays stopped until it is given up and returns (SIGSTOP, SIGCONT).
//
// Each round: the survivor comes to a truthful end, its memory is safe and changes no more, it
// goes on serving a bystander. At the end nothing of the victims is left in its /proc.
#include <fstream>
#include <thread>

#include "proc.hpp"
#include "ranks.hpp"

using namespace handoff;

namespace {

// On this path (LD_LIBRARY_PATH) the children find the library with fault points.
const int kChildrenUseTheTestingLibrary = setenv("LD_LIBRARY_PATH", TESTING_LIBRARY_DIR, 1);

enum class Victim { self, other };  // who is hit: the side that is at the point, or the other one
enum class Hit { kill, stop };

struct Point {
  const char* name;
  bool reader;  // reached by the reader
};
constexpr Point kPoints[] = {{"claimed", true},      {"mid_copy", true},    {"before_attest", true},
                             {"after_attest", true}, {"before_ack", false}, {"after_revoke", false}};

struct Case {
  Point point;
  Victim victim;
  Hit hit;
  bool reader_dies() const { return point.reader == (victim == Victim::self); }
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::string(c.hit == Hit::kill ? "Kill" : "Stop") +
         (c.reader_dies() ? "Reader_" : "Source_") + c.point.name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Point& point : kPoints) {
    for (Victim victim : {Victim::self, Victim::other}) {
      for (Hit hit : {Hit::kill, Hit::stop}) all.push_back({point, victim, hit});
    }
  }
  return all;
}

// Rounds of a case, over both kinds of memory and both directions.
int rounds() {
  const char* given = std::getenv("KVFERRY_FAULT_ROUNDS");
  return given != nullptr ? std::atoi(given) : 20;
}

// The only transport allowed, if one is named.
std::string transport() {
  const char* named = std::getenv("KVFERRY_TRANSPORTS");
  return named != nullptr ? named : "";
}

struct Resources {
  std::size_t fds = 0, threads = 0, maps = 0;

  explicit Resources(pid_t pid) {
    const std::string proc = "/proc/" + std::to_string(pid);
    fds = kvferry_test::open_files(proc);
    threads = kvferry_test::threads(proc);
    std::ifstream in(proc + "/maps");
    for (std::string line; std::getline(in, line);) {
      if (line.find("memfd:kvferry") != std::string::npos) ++maps;
    }
  }
  // UCX closes connections late, of dead peers after its keep-alive time.
  bool within(const Resources& o) const {
    const std::size_t late = transport() == "ucx" ? 3 : 0;  // fewer than there are rounds
    return fds <= o.fds + late && threads <= o.threads && maps <= o.maps;
  }
  std::string text() const {
    return std::to_string(fds) + " fds, " + std::to_string(threads) + " threads, " +
           std::to_string(maps) + " maps";
  }
};

const std::string kBlocks = "0,1,2,3,4,5";  // 4.5 MiB: several pieces
constexpr int kTokens = 24;

// The survivor, a bystander that it serves all the time, and the victim of the round.
class Group {
 public:
  Group(const Case& c, MemoryKind memory, bool push) : case_(c), push_(push) {
    model_.head_bytes = 16384;
    model_.slots = 8;
    model_.memory = memory;
    survivor_ = start_rank("survivor", model_, "short");
    bystander_ = start_rank("bystander", model_, "short");
    EXPECT_EQ(survivor_->ask("fill 1"), "ok");
    EXPECT_EQ(bystander_->ask("fill 2"), "ok");
    connect("bystander", *bystander_);
    serve_bystander();
  }

  void run(int rounds) {
    const Resources before(survivor_->pid());
    for (int i = 0; i < rounds && !::testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE(std::string("round ") + std::to_string(i) + (push_ ? " push " : " pull ") +
                   (model_.memory == MemoryKind::own ? "own" : "pool"));
      round(static_cast<std::uint32_t>(i));
    }
    if (victim_) {
      victim_->kill(SIGKILL);
      victim_->reap();
    }
    const auto until = std::chrono::steady_clock::now() + 10s;
    while (!Resources(survivor_->pid()).within(before) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(5ms);
    }
    const Resources after(survivor_->pid());
    EXPECT_TRUE(after.within(before)) << after.text() << " after " << before.text();
  }

 private:
  Child& source() { return case_.reader_dies() ? *survivor_ : *victim_; }
  Child& reader() { return case_.reader_dies() ? *victim_ : *survivor_; }
  Child& at_point() { return case_.point.reader ? reader() : source(); }

  void connect(const std::string& who, Child& child) {
    EXPECT_EQ(survivor_->ask("peer " + who + " " + child.ask("meta")), "KVF_OK");
    EXPECT_EQ(child.ask("peer survivor " + survivor_->ask("meta")), "KVF_OK");
  }

  // A small handoff between survivor and bystander, in the direction of the case.
  void serve_bystander() {
    Child& from = case_.reader_dies() ? *survivor_ : *bystander_;
    Child& to = case_.reader_dies() ? *bystander_ : *survivor_;
    const std::uint32_t seed = case_.reader_dies() ? seed_ : 2;
    const auto key = std::to_string(++key_);
    const auto ticket = from.ask("publish " + key + " 8 6,7 -1 20000 20000");
    const std::string peer = case_.reader_dies() ? "survivor" : "bystander";
    const auto transfer = to.ask("import " + peer + " " + ticket + " 7,6 0 -1 20000");
    EXPECT_EQ(to.ask("wait " + transfer + " 20000"), "KVF_OK safe");
    EXPECT_EQ(to.ask("compare " + std::to_string(seed) + " 6,7 7,6"), "same");
    EXPECT_EQ(from.ask("published " + key + " 20000"), "KVF_OK");
  }

  // Starts a handoff whose next steps reach the point. Answers that may never come are left.
  void begin() {
    EXPECT_EQ(at_point().ask(std::string("fault ") + case_.point.name +
                             (case_.victim == Victim::self && case_.hit == Hit::kill ? ":kill"
                                                                                     : ":stop")),
              "ok");
    end_of_source_ = "published " + std::to_string(++key_);
    const std::string to_reader = case_.reader_dies() ? "victim" : "survivor";
    const std::string to_source = case_.reader_dies() ? "survivor" : "victim";
    const std::string what = std::to_string(kTokens) + " " + kBlocks + " -1 ";
    if (!push_) {
      const auto ticket = source().ask("publish " + std::to_string(key_) + " " + what + "2000 1500");
      reader().send("import " + to_source + " " + ticket + " " + kBlocks + " 0 -1 20000");
      return;
    }
    const auto answer = reader().ask("receive " + std::to_string(key_) + " " + kBlocks + " 0 " +
                                     std::to_string(kTokens) + " -1 20000");
    const auto space = answer.find(' ');
    reader_transfer_ = answer.substr(0, space);
    source().send("push " + to_reader + " " + answer.substr(space + 1) + " " + what + "20000");
  }

  // The number of the reader's transfer; reads the answer that begin() left.
  std::string reader_transfer() {
    if (reader_transfer_.empty()) reader_transfer_ = reader().line();
    return reader_transfer_;
  }
  std::string reader_outcome() { return reader().ask("wait " + reader_transfer() + " 20000"); }
  std::string source_outcome() {
    if (!push_) return source().ask(end_of_source_ + " 20000");
    if (source_transfer_.empty()) source_transfer_ = source().line();
    const auto answer = source().ask("wait " + source_transfer_ + " 20000");
    EXPECT_NE(answer.find(" safe"), std::string::npos) << answer;
    return answer.substr(0, answer.find(' '));
  }

  // A success must be the bytes that the source had when it published.
  void check_reader(const std::string& outcome, std::uint32_t seed) {
    EXPECT_NE(outcome.find(" safe"), std::string::npos) << outcome;
    if (outcome != "KVF_OK safe") return;
    EXPECT_EQ(reader().ask("compare " + std::to_string(seed) + " " + kBlocks + " " + kBlocks),
              "same");
  }

  static ::testing::AssertionResult one_of(const std::string& got,
                                           const std::vector<std::string>& allowed) {
    for (const auto& text : allowed) {
      if (got == text || got == text + " safe") return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << "outcome " << got;
  }

  void round(std::uint32_t number) {
    if (!victim_) {
      victim_ = start_rank("victim", model_, "short");
      EXPECT_EQ(victim_->ask("fill 3"), "ok");
    }
    connect("victim", *victim_);
    reader_transfer_.clear();
    source_transfer_.clear();
    begin();
    const bool dies_itself = case_.victim == Victim::self && case_.hit == Hit::kill;
    ASSERT_EQ(at_point().halted(20000ms),
              dies_itself ? Child::State::ended : Child::State::stopped)
        << "the point was not reached";
    if (case_.victim == Victim::other) {
      victim_->kill(case_.hit == Hit::kill ? SIGKILL : SIGSTOP);
      ASSERT_NE(victim_->halted(20000ms), Child::State::running);
      survivor_->kill(SIGCONT);
    }
    if (case_.reader_dies()) {
      reader_was_lost(number);
    } else {
      source_was_lost(number);
    }
    if (case_.hit == Hit::kill) {
      victim_.reset();
      return;
    }
  }

  // The survivor is the source.
  void reader_was_lost(std::uint32_t number) {
    const auto ended = source_outcome();
    if (!case_.point.reader) {
      EXPECT_EQ(ended, "KVF_OK");  // its notice was there already
    } else if (case_.hit == Hit::kill && push_) {
      EXPECT_EQ(ended, "KVF_ERR_PEER_LOST");
    } else {  // expired if the reader was hit before its claim was on the wire
      EXPECT_TRUE(one_of(ended, {"KVF_ERR_EXPIRED", "KVF_ERR_PEER_LOST"}));
    }
    // The slots are ours again: other bytes, for somebody else.
    const auto old_seed = seed_;
    seed_ = 100 + number;
    EXPECT_EQ(survivor_->ask("fill " + std::to_string(seed_)), "ok");
    serve_bystander();
    if (case_.hit == Hit::kill) return;

    EXPECT_EQ(one_of(survivor_->ask("lost victim 10000"), {"KVF_ERR_PEER_LOST"}), true);
    const auto ours = survivor_->ask("digest");
    victim_->kill(SIGCONT);
    const auto outcome = reader_outcome();
    // Over a connection, the attestation came with the last bytes.
    const bool by_trailer =
        transport() != "" && transport() != "shm" && std::string(case_.point.name) == "before_attest";
    // A pull is begun before it is claimed, and may have ended before its reader was stopped.
    const bool begun = !push_ && std::string(case_.point.name) == "claimed";
    const bool attested =
        begun || by_trailer || std::string(case_.point.name) == "after_attest" || !case_.point.reader;
    if (outcome == "KVF_OK safe") {
      EXPECT_TRUE(attested) << "success after the lease had ended";
    } else {
      EXPECT_TRUE(one_of(outcome, {"KVF_ERR_EXPIRED", "KVF_ERR_PEER_LOST", "KVF_ERR_TRANSFER",
                                   "KVF_ERR_CANCELLED_BY_PEER"}))
          << reader().ask("text " + reader_transfer());
    }
    check_reader(outcome, old_seed);
    unchanged(*victim_, victim_->ask("digest"));
    EXPECT_EQ(survivor_->ask("digest"), ours);
  }

  // The survivor is the reader.
  void source_was_lost(std::uint32_t number) {
    const auto outcome = reader_outcome();
    if (!case_.point.reader) {
      EXPECT_EQ(outcome, "KVF_OK safe");  // decided before the source was hit
    } else {
      EXPECT_TRUE(one_of(outcome, {"KVF_OK", "KVF_ERR_PEER_LOST", "KVF_ERR_TRANSFER"}));
    }
    check_reader(outcome, victim_seed_);
    serve_bystander();
    EXPECT_EQ(survivor_->ask("lost victim 10000"), "KVF_ERR_PEER_LOST");
    if (case_.hit == Hit::kill) {
      victim_seed_ = 3;
      return;
    }
    const auto ours = survivor_->ask("digest");
    victim_->kill(SIGCONT);
    EXPECT_TRUE(one_of(source_outcome(), {"KVF_OK", "KVF_ERR_EXPIRED", "KVF_ERR_PEER_LOST"}));
    victim_seed_ = 200 + number;
    EXPECT_EQ(victim_->ask("fill " + std::to_string(victim_seed_)), "ok");
    unchanged(*survivor_, ours);
  }

  // No byte changes any more.
  static void unchanged(Child& child, const std::string& digest) {
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(child.ask("digest"), digest);
  }

  Case case_;
  bool push_;
  Model model_;
  std::unique_ptr<Child> survivor_, bystander_, victim_;
  std::uint32_t seed_ = 1, victim_seed_ = 3;
  std::uint64_t key_ = 0;
  std::string end_of_source_, reader_transfer_, source_transfer_;
};

class Fault : public ::testing::TestWithParam<Case> {};

TEST_P(Fault, IsSurvived) {
  std::vector<std::thread> threads;
  for (MemoryKind memory : {MemoryKind::pool, MemoryKind::own}) {
    for (bool push : {false, true}) {
      threads.emplace_back([memory, push] {
        try {
          Group(GetParam(), memory, push).run((rounds() + 3) / 4);
        } catch (const std::exception& e) {
          ADD_FAILURE() << e.what();
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Points, Fault, ::testing::ValuesIn(cases()), case_name);

}  // namespace
