// Two processes: every byte, every end, and what happens when one of them dies or stops.
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "cache.hpp"
#include "child.hpp"
#include "proc.hpp"

using namespace process_test;
using Clock = std::chrono::steady_clock;

namespace {

std::string kind_name(MemoryKind kind) { return kind == MemoryKind::pool ? "pool" : "own"; }

std::vector<std::string> command(const std::string& name, const Shape& shape) {
  return {AGENT_PROGRAM,
          name,
          std::to_string(shape.block_bytes),
          std::to_string(shape.slots),
          std::to_string(shape.tokens_per_block),
          kind_name(shape.memory)};
}

std::string list(const std::vector<std::int32_t>& slots) {
  std::string text;
  for (auto s : slots) text += (text.empty() ? "" : ",") + std::to_string(s);
  return text;
}

// The source in a child process, the destination here.
struct Pair {
  explicit Pair(const Shape& shape) : source(command("source", shape)), here(quick("here"), shape) {
    EXPECT_EQ(source.line(), "ready");
    EXPECT_EQ(source.ask("fill 7"), "ok");
    peer = here.agent.add_peer(from_hex(source.ask("meta")));
    EXPECT_EQ(peer.wait(10s), KVF_OK) << peer.text();
  }
  kvferry::Bytes publish(int key, std::uint64_t end, const std::vector<std::int32_t>& slots,
                         const std::string& rest = "") {
    return from_hex(source.ask("publish " + std::to_string(key) + " " + std::to_string(end) + " " +
                               list(slots) + " " + rest));
  }
  Child source;
  Cache here;
  kvferry::Peer peer;
};

// Mappings of kvferry's shared memory in this process.
std::size_t kvferry_maps() {
  std::FILE* f = std::fopen("/proc/self/maps", "r");
  char line[4096];
  std::size_t n = 0;
  while (std::fgets(line, sizeof line, f) != nullptr) {
    if (std::strstr(line, "memfd:kvferry") != nullptr) ++n;
  }
  std::fclose(f);
  return n;
}

bool warm() {
  static const bool once = kvferry_test::on_device() && (kvferry_test::DeviceMemory(1), true);
  return once;
}

struct Resources {
  // The driver's own threads and files are there from the first allocation on.
  bool device = warm();
  std::size_t fds = kvferry_test::open_files("/proc/self");
  std::size_t threads = kvferry_test::threads("/proc/self");
  std::size_t maps = kvferry_maps();
  bool operator==(const Resources& o) const {
    return fds == o.fds && threads == o.threads && maps == o.maps;
  }
};

// What is left after a test, once everything had time to go.
void expect_nothing_left(const Resources& before) {
  const auto deadline = Clock::now() + 10s;
  while (!(Resources{} == before) && Clock::now() < deadline) std::this_thread::sleep_for(5ms);
  const Resources after;
  EXPECT_EQ(after.fds, before.fds);
  EXPECT_EQ(after.threads, before.threads);
  EXPECT_EQ(after.maps, before.maps);
}

}  // namespace

class Bytes : public ::testing::TestWithParam<std::tuple<MemoryKind, std::uint64_t>> {};

TEST_P(Bytes, ScatteredReversedFirstAndLast) {
  const Resources before;
  {
    Shape shape;
    shape.memory = std::get<0>(GetParam());
    shape.block_bytes = std::get<1>(GetParam());
    shape.slots = shape.block_bytes > (16 << 20) ? 3 : 9;
    Pair pair(shape);
    const auto last = static_cast<std::int32_t>(shape.slots) - 1;
    std::vector<std::int32_t> from = {last, 0}, to = {0, last};
    if (shape.slots > 4) {
      from = {last, 5, 4, 2, 0};
      to = {0, 2, 4, 7, last};
    }
    const auto ticket = pair.publish(1, from.size(), from);
    auto transfer = pair.here.agent.pull_begin(pair.peer, ticket, 0, to);
    ASSERT_EQ(transfer.wait(30s), KVF_OK) << transfer.error_text();
    const auto info = transfer.query();
    EXPECT_EQ(info.bytes, 2 * from.size() * shape.block_bytes);
    const char* forced = std::getenv("KVFERRY_TRANSPORTS");
    const char* usual = is_device(shape.memory) ? "cuda_ipc" : "shm";
    EXPECT_STREQ(info.transport, forced != nullptr ? forced : usual);
    for (std::size_t i = 0; i < from.size(); ++i) {
      EXPECT_EQ(pair.here.differs(static_cast<std::uint32_t>(to[i]), 7,
                                  static_cast<std::uint32_t>(from[i])),
                "");
    }
    EXPECT_TRUE(pair.here.untouched(1));
    EXPECT_EQ(pair.source.ask("published 1 10000"), "KVF_OK");
  }
  expect_nothing_left(before);
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, Bytes,
    ::testing::Combine(::testing::Values(MemoryKind::pool, MemoryKind::own),
                       ::testing::Values(1, 2, 63, 64, 65, 511, 4095, 4096, 4097, 65536, 1 << 20,
                                         (1 << 20) + 13, 64 << 20)),
    [](const auto& info) {
      return kind_name(std::get<0>(info.param)) + "_" + std::to_string(std::get<1>(info.param));
    });

class Process : public ::testing::TestWithParam<MemoryKind> {
 protected:
  Shape shape() const {
    Shape s;
    s.memory = GetParam();
    return s;
  }
};

INSTANTIATE_TEST_SUITE_P(Memory, Process, ::testing::Values(MemoryKind::pool, MemoryKind::own),
                         [](const auto& info) { return kind_name(info.param); });

// The six stages of the source's death.
enum class Stage { before_connect, connected, published, copying, finished, draining };

std::string stage_name(const ::testing::TestParamInfo<std::tuple<MemoryKind, Stage>>& info) {
  static const char* names[] = {"before_connect", "connected", "published",
                                "copying",        "finished",  "draining"};
  return kind_name(std::get<0>(info.param)) + "_" +
         names[static_cast<int>(std::get<1>(info.param))];
}

class SourceDeath : public ::testing::TestWithParam<std::tuple<MemoryKind, Stage>> {};

TEST_P(SourceDeath, IsAClearErrorAndLeavesNothing) {
  const auto [memory, stage] = GetParam();
  const Resources before;
  {
    Shape shape;
    shape.memory = memory;
    shape.block_bytes = 8 << 20;
    shape.slots = 12;
    Child source(command("source", shape));
    ASSERT_EQ(source.line(), "ready");
    const auto metadata = from_hex(source.ask("meta"));
    Cache here(quick("here"), shape);
    const auto die = [&] {
      source.kill(SIGKILL);
      source.reap();
    };
    if (stage == Stage::before_connect) die();
    auto peer = here.agent.add_peer(metadata);
    const auto started = Clock::now();
    if (stage == Stage::before_connect) {
      EXPECT_EQ(peer.wait(10s), KVF_ERR_PEER_UNREACHABLE) << peer.text();
      EXPECT_LT(Clock::now() - started, 8s);
      return;
    }
    ASSERT_EQ(peer.wait(10s), KVF_OK) << peer.text();
    const std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    kvferry::Bytes ticket;
    if (stage != Stage::connected) {
      ticket = from_hex(source.ask("publish 1 12 " + list(all)));
    }
    if (stage == Stage::draining) source.send("drain 20000");
    if (stage == Stage::copying) {
      auto transfer = here.agent.pull_begin(peer, ticket, 0, all);
      die();
      const auto status = transfer.wait(15s);
      // Whoever came first: all bytes attested before the death, or the death.
      EXPECT_TRUE(status == KVF_OK || status == KVF_ERR_PEER_LOST ||
                  status == KVF_ERR_TRANSFER)
          << kvf_status_name(status) << " " << transfer.error_text();
      const auto safe_by = Clock::now() + 10s;
      while (transfer.query().memory_safe == 0 && Clock::now() < safe_by) {
        std::this_thread::sleep_for(1ms);
      }
      EXPECT_EQ(transfer.query().memory_safe, 1u);
      if (status != KVF_OK) {
        EXPECT_NE(transfer.error_text(), "");
      }
    } else if (stage == Stage::finished) {
      auto transfer = here.agent.pull_begin(peer, ticket, 0, all);
      EXPECT_EQ(transfer.wait(15s), KVF_OK) << transfer.error_text();
      die();
    } else {
      die();
    }
    // The peer is lost promptly: a process's end is told by the kernel.
    const auto lost_by = Clock::now() + 2s;
    while (peer.query().status != KVF_ERR_PEER_LOST && Clock::now() < lost_by) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(peer.query().status, KVF_ERR_PEER_LOST) << peer.text();
    // The dead peer's memory is unmapped at once; our lease table and pool stay.
    // The peer's leases, and its pool if it is one of kvferry.
    const bool mapped = memory == MemoryKind::pool && !is_device(memory);
    const std::size_t ours = before.maps + (mapped ? 2 : 1);
    while (kvferry_maps() != ours && Clock::now() < lost_by) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(kvferry_maps(), ours);
    if (!ticket.empty()) {
      auto late = here.agent.pull_begin(peer, ticket, 0, all);
      EXPECT_EQ(late.wait(5s), KVF_ERR_PEER_LOST);
      EXPECT_NE(late.error_text(), "");
    }
    EXPECT_EQ(here.agent.quarantine().size(), 0u);
  }
  expect_nothing_left(before);
}

INSTANTIATE_TEST_SUITE_P(
    Stages, SourceDeath,
    ::testing::Combine(::testing::Values(MemoryKind::pool, MemoryKind::own),
                       ::testing::Values(Stage::before_connect, Stage::connected, Stage::published,
                                         Stage::copying, Stage::finished, Stage::draining)),
    stage_name);

// The same for the destination's death, seen by the source.
class DestinationDeath : public ::testing::TestWithParam<std::tuple<MemoryKind, Stage>> {};

TEST_P(DestinationDeath, EndsThePublicationAndLeavesNothing) {
  const auto [memory, stage] = GetParam();
  const Resources before;
  {
    Shape shape;
    shape.memory = memory;
    shape.block_bytes = 8 << 20;
    shape.slots = 12;
    Cache here(quick("here"), shape);
    here.fill(3);
    Child reader(command("reader", shape));
    ASSERT_EQ(reader.line(), "ready");
    const auto die = [&] {
      reader.kill(SIGKILL);
      reader.reap();
    };
    const std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    kvferry::Offer offer;
    offer.key = kvferry::key(1);
    offer.groups = {kvferry::published(0, all, 0, 12)};
    offer.claim = 2s;
    auto publication = here.agent.publish(offer);
    const auto ticket = to_hex(publication.ticket());
    if (stage != Stage::before_connect) {
      ASSERT_EQ(reader.ask("peer " + to_hex(here.engine.metadata())), "KVF_OK");
    }
    kvf_status expected = KVF_ERR_EXPIRED;  // nobody ever claimed it
    if (stage == Stage::copying || stage == Stage::draining) {
      if (stage == Stage::draining) reader.send("drain 20000");
      reader.send("import " + ticket + " " + list(all) + " 0 20000");
      if (stage == Stage::copying) {
        // Long enough for the claim, shorter than 192 MiB take.
        const auto seen_by = Clock::now() + 5s;
        while (publication.query().claimed == 0 && Clock::now() < seen_by) {
          std::this_thread::sleep_for(100us);
        }
        expected = KVF_ERR_PEER_LOST;
      }
    } else if (stage == Stage::finished) {
      EXPECT_EQ(reader.ask("import " + ticket + " " + list(all) + " 0 20000"), "0");
      EXPECT_EQ(reader.ask("wait 0 20000"), "KVF_OK safe");
      EXPECT_EQ(publication.wait(10s), KVF_OK);
      expected = KVF_OK;
    }
    die();
    const auto status = publication.wait(10s);
    if (stage == Stage::copying && status == KVF_OK) {
      expected = KVF_OK;  // it had finished before
    }
    EXPECT_EQ(status, expected) << kvf_status_name(status);
    EXPECT_EQ(publication.query().memory_safe, 1u);
    // The slots can be used again.
    auto again = here.agent.publish(kvferry::key(2), 0, all, 12);
    again.release();
    EXPECT_EQ(again.wait(5s), KVF_ERR_CANCELLED);
  }
  expect_nothing_left(before);
}

INSTANTIATE_TEST_SUITE_P(
    Stages, DestinationDeath,
    ::testing::Combine(::testing::Values(MemoryKind::pool, MemoryKind::own),
                       ::testing::Values(Stage::before_connect, Stage::connected, Stage::published,
                                         Stage::copying, Stage::finished, Stage::draining)),
    stage_name);

TEST_P(Process, DiesAtTwentyRandomInstants) {
  std::mt19937 random(20261130);
  const Resources before;
  for (int round = 0; round < 20; ++round) {
    Shape s = shape();
    s.block_bytes = 64 << 10;
    Pair pair(s);
    const std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7};
    const auto ticket = pair.publish(1, 8, all, "20000 20000");
    std::thread killer([&, after = random() % 3000] {
      std::this_thread::sleep_for(std::chrono::microseconds(after));
      pair.source.kill(SIGKILL);
    });
    const auto started = Clock::now();
    kvf_status status = KVF_OK;
    int done = 0;
    while (Clock::now() - started < 10s) {
      auto transfer = pair.here.agent.pull_begin(pair.peer, ticket, 0, all);
      status = transfer.wait(5s);
      ASSERT_NE(status, KVF_TIMED_OUT);
      if (status != KVF_OK) break;
      for (auto slot : all) {
        ASSERT_EQ(pair.here.differs(static_cast<std::uint32_t>(slot), 7,
                                    static_cast<std::uint32_t>(slot)),
                  "");
      }
      ++done;
    }
    killer.join();
    EXPECT_TRUE(status == KVF_ERR_PEER_LOST || status == KVF_ERR_EXPIRED ||
                status == KVF_ERR_TRANSFER)
        << "round " << round << " after " << done << ": " << kvf_status_name(status);
    pair.source.reap();
    // The failed transfer's copy stops within a piece.
    const auto quiet_by = Clock::now() + 5s;
    while (!pair.here.agent.quarantine().empty() && Clock::now() < quiet_by) {
      std::this_thread::sleep_for(100us);
    }
    EXPECT_EQ(pair.here.agent.quarantine().size(), 0u);
  }
  expect_nothing_left(before);
}

TEST_P(Process, AStoppedSourceIsLostAndItsReturnChangesNothing) {
  Pair pair(shape());
  const std::vector<std::int32_t> two = {3, 4};
  const auto ticket = pair.publish(1, 2, two);
  pair.source.kill(SIGSTOP);
  const auto lost_by = Clock::now() + 8s;
  while (pair.peer.query().status != KVF_ERR_PEER_LOST && Clock::now() < lost_by) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(pair.peer.query().status, KVF_ERR_PEER_LOST) << pair.peer.text();
  auto late = pair.here.agent.pull_begin(pair.peer, ticket, 0, two);
  EXPECT_EQ(late.wait(5s), KVF_ERR_PEER_LOST);
  EXPECT_TRUE(pair.here.untouched(3));
  pair.source.kill(SIGCONT);
  EXPECT_EQ(pair.source.ask("fill 9"), "ok");
  EXPECT_TRUE(pair.here.untouched(3));
  // It must be added anew, and then serves again.
  pair.peer = pair.here.agent.add_peer(from_hex(pair.source.ask("meta")));
  ASSERT_EQ(pair.peer.wait(10s), KVF_OK) << pair.peer.text();
  const auto fresh = pair.publish(2, 2, {5, 6});
  auto transfer = pair.here.agent.pull_begin(pair.peer, fresh, 0, two);
  EXPECT_EQ(transfer.wait(5s), KVF_OK) << transfer.error_text();
  EXPECT_EQ(pair.here.differs(3, 9, 5), "");
}

TEST_P(Process, AStoppedReaderLosesItsLease) {
  Shape s = shape();
  Cache here(quick("here"), s);
  here.fill(3);
  Child reader(command("reader", s));
  ASSERT_EQ(reader.line(), "ready");
  ASSERT_EQ(reader.ask("peer " + to_hex(here.engine.metadata())), "KVF_OK");
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  const std::vector<std::int32_t> two = {1, 2};
  offer.groups = {kvferry::published(0, two, 0, 2)};
  offer.claim = 300ms;
  auto publication = here.agent.publish(offer);
  reader.kill(SIGSTOP);
  EXPECT_EQ(publication.wait(10s), KVF_ERR_EXPIRED);
  here.fill(4);  // the slots are ours again
  reader.kill(SIGCONT);
  EXPECT_EQ(reader.ask("import " + to_hex(publication.ticket()) + " 1,2 0 5000"), "0");
  const auto answer = reader.ask("wait 0 10000");
  EXPECT_TRUE(answer == "KVF_ERR_EXPIRED safe" || answer == "KVF_ERR_PEER_LOST safe") << answer;
}

TEST_P(Process, AnEmptyPullTellsTheSource) {
  Pair pair(shape());
  const std::vector<std::int32_t> two = {3, 4};
  const auto ticket = pair.publish(1, 2, two);
  auto transfer = pair.here.agent.pull_begin(pair.peer, ticket, 0, two, 2);
  EXPECT_EQ(transfer.poll(), KVF_OK) << "born complete";
  EXPECT_EQ(transfer.query().submitted, 0u);
  EXPECT_EQ(pair.source.ask("published 1 10000"), "KVF_OK");
  EXPECT_TRUE(pair.here.untouched(3));
}
