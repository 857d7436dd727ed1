// Device memory at both ends of a socket: a buffer is filled while another one is on its way.
#include "gpu.hpp"

#include "cache.hpp"
#include "child.hpp"

namespace {

using namespace kvferry_test;
using process_test::Child;

constexpr std::uint64_t kMib = 1 << 20;

// A source in another process, read through the Unix socket by one worker. Answers have 1 MiB, which
// is more than a socket takes in.
struct Wire {
  Wire()
      : child({AGENT_PROGRAM, "source", std::to_string(kMib), "8", "1", "device"}),
        shape{kMib, 8, 1, process_test::MemoryKind::device},
        here(config(), shape) {
    EXPECT_EQ(child.line(), "ready");
    EXPECT_EQ(child.ask("fill 7"), "ok");
    peer = here.agent.add_peer(process_test::from_hex(child.ask("meta")));
    EXPECT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
    before = copied();
  }
  static kvferry::AgentConfig config() {
    auto config = process_test::quick("sink");
    config.transports = "unix";
    config.workers = 1;
    return config;
  }
  // Bytes that the source's device has copied.
  std::uint64_t copied() { return std::stoull(child.ask("copied")) - before; }
  kvferry::Transfer pull() {
    const auto ticket = process_test::from_hex(child.ask("publish 1 4 6,0,4,2"));
    return here.agent.pull_begin(peer, ticket, 0, Ints{1, 3, 5, 7});
  }
  void expect_arrived() {
    const int from[] = {6, 0, 4, 2}, to[] = {1, 3, 5, 7};
    for (int i = 0; i < 4; ++i) EXPECT_EQ(here.differs(to[i], 7, from[i]), "");
    EXPECT_TRUE(here.untouched(2));
  }

  Child child;
  process_test::Shape shape;
  process_test::Cache here;
  kvferry::Peer peer;
  std::uint64_t before = 0;
};

// The reader's device does nothing. So the reader takes two answers, as many as it has buffers, the
// third one is stuck on the wire, and the fourth is in the source's other buffer. 8 are wanted.
TEST(Sockets, CopiesAndSendsOverlapAtBothEnds) {
  Wire wire;
  OF_DOUBLE(kvf_cuda_double_hold_all)(1);
  auto transfer = wire.pull();
  EXPECT_TRUE(eventually([&] { return wire.copied() >= 4 * kMib; }, std::chrono::seconds(5)));
  linger();
  EXPECT_EQ(wire.copied(), 4 * kMib);
  EXPECT_EQ(transfer.query().bytes, 0u);
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  OF_DOUBLE(kvf_cuda_double_hold_all)(0);
  ASSERT_EQ(transfer.wait(kLong), KVF_OK) << transfer.error_text();
  EXPECT_STREQ(transfer.query().transport, "unix");
  wire.expect_arrived();
}

// However much goes through them, an agent has a few buffers; they end with it.
TEST(Sockets, BuffersAreFewAndEndWithTheAgent) {
  { Stream warm; }
  const auto before = books();
  {
    Wire wire;
    for (int i = 0; i < 5; ++i) {
      ASSERT_EQ(wire.pull().wait(kLong), KVF_OK);
      EXPECT_EQ(wire.child.ask("published 1 10000"), "KVF_OK");
    }
    EXPECT_LE(books().pinned_allocations, before.pinned_allocations + 2);
    wire.expect_arrived();
  }
  EXPECT_EQ(books().pinned_allocations, before.pinned_allocations);
  EXPECT_EQ(books().streams, before.streams);
}

// A reader that ends while an answer is on the wire and another one is being copied.
TEST(Sockets, ASourceWhoseReaderDiesKeepsNothing) {
  process_test::Shape shape{kMib, 8, 1, process_test::MemoryKind::device};
  { Stream warm; }
  const auto before = books();
  {
    auto config = process_test::quick("source");
    config.transports = "unix";
    process_test::Cache here(config, shape);
    here.fill(7);
    setenv("KVFERRY_TRANSPORTS", "unix", 1);
    setenv("KVF_CUDA_DOUBLE_DELAY_US", "20000-20000", 1);
    Child reader({AGENT_PROGRAM, "reader", std::to_string(kMib), "8", "1", "device"});
    unsetenv("KVF_CUDA_DOUBLE_DELAY_US");
    unsetenv("KVFERRY_TRANSPORTS");
    EXPECT_EQ(reader.line(), "ready");
    EXPECT_EQ(reader.ask("peer " + process_test::to_hex(here.engine.metadata())), "KVF_OK");
    const Ints slots{6, 0, 4, 2};
    auto publication = here.agent.publish(kvferry::key(1), 0, slots, 4);
    const auto copied = books().copied_bytes;
    OF_DOUBLE(kvf_cuda_double_delay)(100'000, 100'000);
    reader.send("import " + process_test::to_hex(publication.ticket()) + " 1,3,5,7 0 20000");
    EXPECT_TRUE(eventually([&] { return books().copied_bytes > copied; }));
    reader.kill(SIGKILL);
    reader.reap();
    EXPECT_NE(publication.wait(kLong), KVF_TIMED_OUT);
    EXPECT_EQ(publication.query().memory_safe, 1u);
    EXPECT_EQ(here.unregister(10s), KVF_OK) << "no copy holds the pool open";
  }
  const auto now = books();
  EXPECT_EQ(now.pinned_allocations, before.pinned_allocations);
  EXPECT_EQ(now.streams, before.streams);
  OF_DOUBLE(kvf_cuda_double_delay)(0, 0);
  EXPECT_EQ(now.violations, before.violations);
}

}  // namespace
