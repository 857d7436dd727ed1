// The UCX transport: libraries that cannot be used, when one is loaded at all, and what becomes of
// memory and endpoints when a peer stops or dies.
//
// Every test is a process of its own (ctest), since UCX is opened once for a process.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "cache.hpp"
#include "child.hpp"
#include "skip.hpp"

using namespace process_test;
using Clock = std::chrono::steady_clock;

namespace {

std::vector<std::string> command(const std::string& name, const Shape& shape) {
  return {AGENT_PROGRAM,
          name,
          std::to_string(shape.block_bytes),
          std::to_string(shape.slots),
          std::to_string(shape.tokens_per_block),
          shape.memory == MemoryKind::pool ? "pool" : "own"};
}

// For this process and its children. UCX writes its log to standard output, where they answer.
void environment(const std::string& transports, const std::string& library = "",
                 const std::string& lanes = "") {
  setenv("KVFERRY_TRANSPORTS", transports.c_str(), 1);
  setenv("UCX_LOG_LEVEL", "fatal", 1);
  if (!library.empty()) setenv("KVFERRY_UCX_LIBRARY", library.c_str(), 1);
  if (!lanes.empty()) setenv("UCX_TLS", lanes.c_str(), 1);
}

std::string fake(const std::string& kind) { return std::string(FAKES) + "/" + kind + "/libucp.so.0"; }

// Whether a UCX that works is here: the one that the environment names, or the system's. Asked in a
// child, so that nothing of it is loaded in the test.
bool have_ucx() {
  const char* named = std::getenv("KVFERRY_UCX_LIBRARY");
  const std::string library = named != nullptr ? named : "libucp.so.0";
  const pid_t child = fork();
  if (child == 0) _exit(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

#define NEED_UCX() \
  if (!have_ucx()) KVF_SKIP("NO UCX HERE: NOT TESTED (scripts/install-ucx)")

bool is_loaded(const std::string& library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(library) != std::string::npos) return true;
  }
  return false;
}

void wait_until(Clock::duration limit, const std::function<bool()>& done) {
  const auto until = Clock::now() + limit;
  while (!done() && Clock::now() < until) std::this_thread::sleep_for(1ms);
}

// The source in a child process, the destination here.
struct Pair {
  explicit Pair(const Shape& shape) : source(command("source", shape)), here(quick("here"), shape) {
    EXPECT_EQ(source.line(), "ready");
    EXPECT_EQ(source.ask("fill 7"), "ok");
    peer = here.agent.add_peer(from_hex(source.ask("meta")));
  }
  kvferry::Bytes publish(int key, const std::string& slots, std::size_t tokens) {
    return from_hex(source.ask("publish " + std::to_string(key) + " " + std::to_string(tokens) + " " +
                               slots + " 20000 20000"));
  }
  // Pulls two blocks and compares them.
  void pull(int key) {
    const std::vector<std::int32_t> two = {1, 2};
    const auto ticket = publish(key, "5,9", 2);
    auto transfer = here.agent.pull_begin(peer, ticket, 0, two);
    ASSERT_EQ(transfer.wait(15s), KVF_OK) << transfer.error_text();
    EXPECT_EQ(here.differs(1, 7, 5), "");
    EXPECT_EQ(here.differs(2, 7, 9), "");
  }
  Child source;
  Cache here;
  kvferry::Peer peer;
};

struct Wrong {
  const char* name;
  std::string library;
  std::string text;
  friend void PrintTo(const Wrong& wrong, std::ostream* out) { *out << wrong.name; }
};

class WrongLibrary : public ::testing::TestWithParam<Wrong> {};

std::vector<Wrong> wrong() {
  return {{"missing", "/nowhere/libucp.so.0", "/nowhere/libucp.so.0 cannot be loaded"},
          {"old", fake("old"), "is UCX 1.12.0; at least 1.13 is needed"},
          {"without_get", fake("without_get"), "(UCX 1.13.0) has no ucp_get_nbx"},
          {"without_device", fake("without_device"), "ucp_init: No such device (-14)"}};
}

INSTANTIATE_TEST_SUITE_P(Kinds, WrongLibrary, ::testing::ValuesIn(wrong()),
                         [](const auto& info) { return info.param.name; });

// Refused with its reason; another transport is taken.
TEST_P(WrongLibrary, IsTheReasonForTakingTcp) {
  environment("ucx,tcp", GetParam().library);
  Pair pair{Shape()};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  const auto text = pair.peer.text();
  EXPECT_STREQ(pair.peer.query().transport, "tcp") << text;
  EXPECT_NE(text.find("not ucx: "), std::string::npos) << text;
  EXPECT_NE(text.find(GetParam().text), std::string::npos) << text;
  pair.pull(1);
}

TEST_P(WrongLibrary, IsAnErrorWhereNothingElseIsAllowed) {
  environment("ucx", GetParam().library);
  Pair pair{Shape()};
  EXPECT_EQ(pair.peer.wait(10s), KVF_ERR_UNSUPPORTED);
  const auto text = pair.peer.text();
  EXPECT_NE(text.find(GetParam().text), std::string::npos) << text;
  EXPECT_NE(text.find("shm: not allowed by the configuration"), std::string::npos) << text;
}

TEST(Ucx, ASourceWithoutItSaysWhy) {
  NEED_UCX();
  environment("ucx,tcp", "/nowhere/libucp.so.0");
  Shape shape;
  Child source(command("source", shape));
  ASSERT_EQ(source.line(), "ready");
  unsetenv("KVFERRY_UCX_LIBRARY");
  Cache here(quick("here"), shape);
  auto peer = here.agent.add_peer(from_hex(source.ask("meta")));
  ASSERT_EQ(peer.wait(10s), KVF_OK) << peer.text();
  EXPECT_STREQ(peer.query().transport, "tcp");
  const std::string why = "not ucx: the source: /nowhere/libucp.so.0 cannot be loaded";
  EXPECT_NE(peer.text().find(why), std::string::npos) << peer.text();
}

TEST(Ucx, IsNotLoadedWithoutBeingNamedOnOneHost) {
  Pair pair{Shape()};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  pair.pull(1);
  EXPECT_STREQ(pair.peer.query().transport, "shm");
  EXPECT_FALSE(is_loaded("libucp"));
}

TEST(Ucx, IsChosenWhenNamedAndSaysItsVersion) {
  NEED_UCX();
  environment("ucx,unix,tcp");
  Pair pair{Shape()};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  EXPECT_STREQ(pair.peer.query().transport, "ucx") << pair.peer.text();
  EXPECT_NE(pair.peer.text().find("ucx: UCX 1."), std::string::npos) << pair.peer.text();
  EXPECT_NE(pair.peer.text().find("forced"), std::string::npos) << pair.peer.text();
  pair.pull(1);
  EXPECT_TRUE(is_loaded("libucp"));
}

void handler(int) {}

TEST(Ucx, LeavesTheEnginesSignalHandlersAlone) {
  NEED_UCX();
  environment("ucx");
  const std::vector<int> signals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTERM, SIGINT, SIGUSR1};
  struct sigaction ours = {};
  ours.sa_handler = handler;
  for (int signal : signals) sigaction(signal, &ours, nullptr);
  Pair pair{Shape()};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  pair.pull(1);
  for (int signal : signals) {
    struct sigaction now = {};
    sigaction(signal, nullptr, &now);
    EXPECT_EQ(now.sa_handler, handler) << signal;
  }
}

TEST(Ucx, APoolIsReleasedAtOnceAfterItsTransfers) {
  NEED_UCX();
  environment("ucx");
  Shape shape;
  shape.memory = MemoryKind::own;
  Pair pair{shape};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  pair.pull(1);
  ASSERT_EQ(kvf_pool_unregister_begin(pair.here.pool().c(), 5000000000ull), KVF_OK);
  kvf_pool_info info = KVF_POOL_INFO_INIT;
  wait_until(4s, [&] {
    return kvf_pool_query(pair.here.pool().c(), &info) == KVF_OK && info.status == KVF_OK;
  });
  EXPECT_EQ(info.status, KVF_OK);
}

// A stopped source answers nothing: the transfer ends at its deadline with its memory quiet, and what
// the source sends when it goes on changes nothing.
TEST(Ucx, AStoppedSourceEndsAtTheDeadlineAndServesAgain) {
  NEED_UCX();
  environment("ucx", "", "tcp");
  Shape shape;
  shape.block_bytes = 4 << 20;
  shape.slots = 12;
  Pair pair{shape};
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  pair.pull(1);
  const auto ticket = pair.publish(2, "5,9", 2);
  pair.source.kill(SIGSTOP);
  const std::vector<std::int32_t> two = {3, 4};
  auto transfer =
      pair.here.agent.pull_begin(pair.peer, ticket, 0, two, 0, KVF_TOKEN_END_ALL, 300ms);
  const auto begun = Clock::now();
  EXPECT_EQ(transfer.wait(10s), KVF_ERR_DEADLINE) << transfer.error_text();
  EXPECT_LT(Clock::now() - begun, 2s);
  wait_until(5s, [&] { return transfer.query().memory_safe != 0; });
  EXPECT_EQ(transfer.query().memory_safe, 1u);
  EXPECT_EQ(pair.here.agent.quarantine().size(), 0u);
  const auto* block = pair.here.block(0, 3);
  const std::vector<unsigned char> before(block, block + shape.block_bytes);
  pair.source.kill(SIGCONT);
  // What was on its way comes to nothing.
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(std::memcmp(before.data(), block, before.size()), 0);
  pair.pull(3);
  EXPECT_STREQ(pair.peer.query().transport, "ucx");
}

// A reader dies in mid-copy; then the source frees the memory, which UCX must not touch any more.
TEST(Ucx, MemoryMayBeFreedAfterAReaderWasLost) {
  NEED_UCX();
  environment("ucx", "", "tcp");
  Shape shape;
  shape.block_bytes = 8 << 20;
  shape.slots = 12;
  shape.memory = MemoryKind::own;
  Cache here(quick("here"), shape);
  here.fill(3);
  for (int round = 0; round < 3; ++round) {
    Child reader(command("reader", shape));
    ASSERT_EQ(reader.line(), "ready");
    ASSERT_EQ(reader.ask("peer " + to_hex(here.engine.metadata())), "KVF_OK");
    const std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
    kvferry::Offer offer;
    offer.key = kvferry::key(round + 1);
    offer.groups = {kvferry::published(0, all, 0, 8)};
    offer.claim = 2s;  // it may die before its claim is on the wire
    auto publication = here.agent.publish(offer);
    EXPECT_EQ(reader.ask("import " + to_hex(publication.ticket()) + " 0,1,2,3,4,5,6,7 0 20000"), "0");
    reader.kill(round == 2 ? SIGSTOP : SIGKILL);  // the last one has bytes coming
    if (round < 2) {
      EXPECT_NE(publication.wait(10s), KVF_TIMED_OUT);
      continue;
    }
    publication.release();
    EXPECT_NE(publication.wait(10s), KVF_TIMED_OUT);
    ASSERT_EQ(kvf_pool_unregister_begin(here.pool().c(), 5000000000ull), KVF_OK);
    kvf_pool_info info = KVF_POOL_INFO_INIT;
    wait_until(4s, [&] {
      return kvf_pool_query(here.pool().c(), &info) == KVF_OK && info.status == KVF_OK;
    });
    ASSERT_EQ(info.status, KVF_OK);
    here.unmap();
    reader.kill(SIGCONT);
    const auto answer = reader.ask("wait 0 20000");
    EXPECT_NE(answer.find(" safe"), std::string::npos) << answer;
    EXPECT_EQ(answer.find("KVF_OK"), std::string::npos) << answer;
  }
}

}  // namespace
