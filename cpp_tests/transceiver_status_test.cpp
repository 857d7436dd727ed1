// CacheTransceiver on real agents in one process, through the public headers alone: bytes, results,
// bounded polling, cancel, interrupt, event fd, argument checks.
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <cstring>
#include <kvferry_transceiver.hpp>
#include <numeric>
#include <thread>

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t slots = 64, tokens_per_block = 8, layers = 3, heads = 2;
constexpr std::uint64_t head_bytes = 32, token_bytes = head_bytes * heads;
constexpr std::uint64_t layer_bytes = token_bytes * tokens_per_block;
constexpr std::uint64_t slot_bytes = layer_bytes * layers;
constexpr auto long_time = 20s;

kvferry::View view(std::uint32_t role, std::uint64_t offset, const kvferry::Pool& pool) {
  kvferry::View v;
  v.role = role;
  v.heads = heads;
  v.bytes_per_head = head_bytes;
  v.slots = slots;
  kvf_tensor_desc tensor = KVF_TENSOR_DESC_INIT;
  tensor.pool = pool.c();
  tensor.offset = offset;
  v.tensors = {tensor};
  v.slot_stride = slot_bytes;
  v.layer_stride = layer_bytes;
  v.token_stride = token_bytes;
  v.head_stride = head_bytes;
  return v;
}

// One rank of one engine: pool with a key and a value part, and its transceiver.
struct Rank {
  explicit Rank(const char* name, const kvferry::CacheTransceiverConfig& config = {})
      : agent([&] {
          kvferry::AgentConfig c;
          c.name = name;
          c.fingerprint = "transceiver test";
          return c;
        }()),
        pool(agent.host_pool(2 * slots * slot_bytes)),
        engine([&] {
          kvferry::Group group;
          group.tokens_per_block = tokens_per_block;
          group.layers.resize(layers);
          std::iota(group.layers.begin(), group.layers.end(), 0u);
          group.views = {view(KVF_ROLE_KEY, 0, pool),
                         view(KVF_ROLE_VALUE, slots * slot_bytes, pool)};
          agent.set_layout({group});
          return agent.engine();
        }()),
        transceiver(agent, engine, config) {}

  std::uint8_t* token(bool value, std::int32_t slot, std::uint32_t layer, std::uint32_t at) {
    return reinterpret_cast<std::uint8_t*>(pool.data()) + (value ? slots * slot_bytes : 0) +
           static_cast<std::uint64_t>(slot) * slot_bytes + layer * layer_bytes +
           at * token_bytes;
  }
  // Every element from (request, key or value, token, layer, place).
  static std::uint8_t element(std::uint64_t request, bool value, std::uint64_t token,
                              std::uint32_t layer, std::uint64_t at) {
    return static_cast<std::uint8_t>(request * 131 + (value ? 77 : 0) + token * 29 + layer * 11 +
                                     at * 3 + 1);
  }
  void fill(std::uint64_t request, const std::vector<std::int32_t>& blocks) {
    each(request, blocks, blocks.size() * tokens_per_block,
         [](std::uint8_t& byte, std::uint8_t expected) { byte = expected; });
  }
  void expect(std::uint64_t request, const std::vector<std::int32_t>& blocks,
              std::uint64_t tokens) {
    std::size_t wrong = 0;
    each(request, blocks, tokens,
         [&](std::uint8_t& byte, std::uint8_t expected) { wrong += byte != expected; });
    EXPECT_EQ(wrong, 0u) << "request " << request;
  }
  template <class Visit>
  void each(std::uint64_t request, const std::vector<std::int32_t>& blocks, std::uint64_t tokens,
            Visit visit) {
    for (bool value : {false, true}) {
      for (std::uint64_t t = 0; t < tokens; ++t) {
        for (std::uint32_t layer = 0; layer < layers; ++layer) {
          std::uint8_t* bytes =
              token(value, blocks[t / tokens_per_block], layer, t % tokens_per_block);
          for (std::uint64_t i = 0; i < token_bytes; ++i) {
            visit(bytes[i], element(request, value, t, layer, i));
          }
        }
      }
    }
  }
  bool readable() const {
    pollfd fd{transceiver.event_fd(), POLLIN, 0};
    return poll(&fd, 1, 0) == 1;
  }

  kvferry::Agent agent;
  kvferry::Pool pool;
  kvferry::Engine engine;
  kvferry::CacheTransceiver transceiver;
};

class CacheTransceiverTest : public ::testing::Test {
 protected:
  CacheTransceiverTest() : peer(generation.agent.add_peer(context.engine.metadata())) {
    EXPECT_EQ(peer.wait(long_time), KVF_OK) << peer.text();
  }
  kvferry::Bytes send(std::uint64_t request, const std::vector<std::int32_t>& blocks,
                      std::uint64_t tokens) {
    kvferry::Offer offer;
    offer.key = kvferry::key(request);
    offer.groups = {kvferry::published(0, blocks, 0, tokens)};
    offer.aux = {1, 2, static_cast<std::uint8_t>(request)};
    offer.user_data = request + 1000;
    return context.transceiver.respondAndSendAsync(offer);
  }
  kvferry::ReceiveRequest receive(std::uint64_t request, kvferry::Bytes ticket,
                                  const std::vector<std::int32_t>& blocks) {
    kvferry::ReceiveRequest r;
    r.key = kvferry::key(request);
    r.peer = &peer;
    r.ticket = std::move(ticket);
    r.what.groups = {kvferry::wanted(0, blocks)};
    r.what.user_data = request + 2000;
    return r;
  }

  Rank context{"context"}, generation{"generation"};
  kvferry::Peer peer;
};

template <class Body>
std::chrono::milliseconds timed(Body body) {
  const auto start = Clock::now();
  body();
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
}

TEST_F(CacheTransceiverTest, MovesEveryElementOverTwoRoundsOfReuse) {
  for (std::uint64_t round = 0; round < 2; ++round) {
    struct Expected {
      std::uint64_t tokens;
      std::vector<std::int32_t> from, to;
    };
    std::vector<Expected> all;
    std::int32_t next = 0;
    for (std::uint64_t tokens : {1, 7, 8, 9, 10, 20, 23, 24, 25, 30, 32, 33, 60, 80}) {
      const std::uint64_t request = all.size();
      const auto blocks = static_cast<std::int32_t>((tokens + tokens_per_block - 1) /
                                                    tokens_per_block);
      Expected e{tokens, std::vector<std::int32_t>(static_cast<std::size_t>(blocks)), {}};
      std::iota(e.from.begin(), e.from.end(), next);
      next += blocks;
      ASSERT_LE(next, static_cast<std::int32_t>(slots));
      for (std::int32_t slot : e.from) e.to.push_back(static_cast<std::int32_t>(slots) - 1 - slot);
      context.fill(request + round * 100, e.from);
      generation.transceiver.requestAndReceiveAsync(
          receive(request, send(request, e.from, tokens), e.to));
      all.push_back(std::move(e));
    }
    auto received = generation.transceiver.checkGenTransferStatus(std::nullopt, long_time);
    EXPECT_EQ(received.status, KVF_OK);
    EXPECT_FALSE(received.more);
    EXPECT_TRUE(received.decision.empty());
    ASSERT_EQ(received.completed().size(), all.size());
    for (const kvf_request_result& r : received.results) {
      const Expected& e = all.at(r.key.request);
      EXPECT_EQ(r.user_data, r.key.request + 2000);
      EXPECT_EQ(r.kind, KVF_RESULT_ENDED);
      EXPECT_EQ(r.memory_safe, 1u);
      EXPECT_EQ(r.bytes, e.tokens * token_bytes * layers * 2);
      EXPECT_EQ(generation.transceiver.aux(r.key),
                (kvferry::Bytes{1, 2, static_cast<std::uint8_t>(r.key.request)}));
      generation.expect(r.key.request + round * 100, e.to, e.tokens);
    }
    EXPECT_TRUE(generation.transceiver.checkGenTransferComplete());
    auto sent = context.transceiver.checkContextTransferStatus(std::nullopt, long_time);
    EXPECT_EQ(sent.completed().size(), all.size());
    EXPECT_TRUE(sent.unsuccessful().empty());
  }
}

TEST_F(CacheTransceiverTest, NothingInFlightReturnsAtOnce) {
  for (std::optional<int> at_least : {std::optional<int>(0), std::optional<int>(1),
                                      std::optional<int>(1000), std::optional<int>()}) {
    EXPECT_LT(timed([&] {
                EXPECT_EQ(context.transceiver.checkContextTransferStatus(at_least).status, KVF_OK);
                EXPECT_EQ(generation.transceiver.checkGenTransferStatus(at_least).status, KVF_OK);
              }),
              100ms);
  }
}

TEST_F(CacheTransceiverTest, TheTargetIsClampedToWhatIsInFlight) {
  const auto ticket = send(1, {0}, 8);
  EXPECT_LT(timed([&] {
              generation.transceiver.requestAndReceiveAsync(receive(1, ticket, {1}));
              EXPECT_EQ(generation.transceiver.checkGenTransferStatus(100, long_time)
                            .results.size(),
                        1u);
              EXPECT_EQ(context.transceiver.checkContextTransferStatus(100, long_time)
                            .results.size(),
                        1u);
            }),
            5s);
}

TEST_F(CacheTransceiverTest, AStatusCallWaitsForWhatIsInFlightAndIsWoken) {
  const auto ticket = send(1, {0}, 8);
  std::thread later([&] {
    std::this_thread::sleep_for(50ms);
    generation.transceiver.requestAndReceiveAsync(receive(1, ticket, {1}));
  });
  kvferry::TransferStatuses sent;
  const auto took = timed(
      [&] { sent = context.transceiver.checkContextTransferStatus(1, long_time); });
  later.join();
  EXPECT_EQ(sent.completed().size(), 1u);
  EXPECT_GE(took, 40ms);
  EXPECT_LT(took, 5s);
}

TEST_F(CacheTransceiverTest, TheDeadlineEndsTheWaitAndKeepsTheRequest) {
  send(1, {0}, 8);
  kvferry::TransferStatuses sent;
  const auto took = timed(
      [&] { sent = context.transceiver.checkContextTransferStatus(1, 100ms); });
  EXPECT_EQ(sent.status, KVF_TIMED_OUT);
  EXPECT_TRUE(sent.results.empty());
  EXPECT_GE(took, 90ms);
  EXPECT_LT(took, 1s);
  EXPECT_TRUE(context.transceiver.hasInflightTransfer(kvferry::key(1)));
}

TEST_F(CacheTransceiverTest, CancelledRequestsCountAndAnotherMayStayPending) {
  send(1, {0}, 8);
  send(2, {1}, 8);
  context.transceiver.cancelRequest(kvferry::key(1));
  auto sent = context.transceiver.checkContextTransferStatus(1, long_time);
  ASSERT_EQ(sent.results.size(), 1u);
  EXPECT_EQ(sent.results[0].key.request, 1u);
  EXPECT_EQ(sent.results[0].outcome, KVF_OUTCOME_CANCELLED);
  EXPECT_EQ(sent.results[0].cause, KVF_ERR_CANCELLED);
  EXPECT_EQ(sent.results[0].memory_safe, 1u);
  EXPECT_TRUE(context.transceiver.cancelRequest(kvferry::key(1))) << "safe to free";
  EXPECT_TRUE(context.transceiver.hasInflightTransfer(kvferry::key(2)));
}

TEST_F(CacheTransceiverTest, InterruptEndsAWait) {
  send(1, {0}, 8);
  std::thread later([&] {
    std::this_thread::sleep_for(30ms);
    context.transceiver.interrupt();
  });
  EXPECT_LT(timed([&] {
              EXPECT_EQ(context.transceiver.checkContextTransferStatus(1, long_time).status,
                        KVF_INTERRUPTED);
            }),
            5s);
  later.join();
  context.transceiver.interrupt();  // also just before
  EXPECT_EQ(context.transceiver.checkContextTransferStatus(1, long_time).status,
            KVF_INTERRUPTED);
}

TEST_F(CacheTransceiverTest, TheDescriptorFollowsTheResults) {
  const auto ticket = send(1, {0}, 8);
  EXPECT_FALSE(context.readable());
  generation.transceiver.requestAndReceiveAsync(receive(1, ticket, {1}));
  pollfd fd{context.transceiver.event_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&fd, 1, 20000), 1);
  EXPECT_EQ(context.transceiver.checkContextTransferStatus(0).results.size(), 1u);
  EXPECT_FALSE(context.readable());
}

TEST_F(CacheTransceiverTest, ABlockingReceiveGivesItsResult) {
  context.fill(5, {3, 4});
  const auto r = generation.transceiver.requestAndReceiveSync(receive(5, send(5, {3, 4}, 12),
                                                                      {8, 9}));
  EXPECT_EQ(r.outcome, KVF_OUTCOME_DONE);
  EXPECT_EQ(r.key.request, 5u);
  generation.expect(5, {8, 9}, 12);
  const auto record = generation.transceiver.record(kvferry::key(5));
  EXPECT_EQ(record.side, KVF_SIDE_GENERATION);
  EXPECT_EQ(record.bytes, r.bytes);
  EXPECT_EQ(record.aux_bytes, 3u);
  EXPECT_STREQ(record.transport, "inproc");
}

TEST_F(CacheTransceiverTest, ACancelForAnUnknownKeyHitsTheRequestWhenItComes) {
  const auto ticket = send(1, {0}, 8);
  EXPECT_TRUE(generation.transceiver.cancelRequest(kvferry::key(1))) << "nothing is in use";
  generation.transceiver.requestAndReceiveAsync(receive(1, ticket, {1}));
  auto received = generation.transceiver.checkGenTransferStatus(1, long_time);
  ASSERT_EQ(received.results.size(), 1u);
  EXPECT_EQ(received.results[0].outcome, KVF_OUTCOME_CANCELLED);
  auto sent = context.transceiver.checkContextTransferStatus(1, long_time);
  ASSERT_EQ(sent.results.size(), 1u);
  EXPECT_EQ(sent.results[0].outcome, KVF_OUTCOME_DECLINED);
}

TEST_F(CacheTransceiverTest, ARefusedReceiveSaysWhyAndChangesNothing) {
  const auto ticket = send(1, {0}, 8);
  try {
    generation.transceiver.requestAndReceiveAsync(receive(2, ticket, {1}));
    FAIL() << "a ticket of another key";
  } catch (const kvferry::Error& e) {
    EXPECT_EQ(e.status(), KVF_ERR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(e.what()).find("request 1"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(generation.transceiver.checkGenTransferComplete());
  send(2, {1}, 8);
  try {
    send(2, {2}, 8);
    FAIL() << "a key in use";
  } catch (const kvferry::Error& e) {
    EXPECT_EQ(e.status(), KVF_ERR_DUPLICATE);
  }
  EXPECT_FALSE(context.transceiver.ticket(kvferry::key(2)).empty());
}

TEST_F(CacheTransceiverTest, WhatIsNotServedSaysSo) {
  const auto status = [](auto call) {
    try {
      call();
      return KVF_OK;
    } catch (const kvferry::Error& e) {
      return e.status();
    }
  };
  auto& t = context.transceiver;
  EXPECT_EQ(status([&] { t.respondAndSendLayerWise(); }), KVF_ERR_UNSUPPORTED);
  EXPECT_EQ(status([&] { t.prepareContextRequests({}); }), KVF_ERR_UNSUPPORTED);
  EXPECT_EQ(status([&] { t.apply({}); }), KVF_ERR_STATE);
  EXPECT_EQ(status([&] { t.record(kvferry::key(99)); }), KVF_ERR_NOT_FOUND);
  EXPECT_EQ(status([&] { t.offer(kvferry::key(99)); }), KVF_ERR_NOT_FOUND);
  EXPECT_EQ(t.records(), "");
}

TEST(CacheTransceiverPush, TheOfferTravelsAndEveryElementArrives) {
  kvferry::CacheTransceiverConfig config;
  config.direction = KVF_DIRECTION_PUSH;
  Rank context("push-context", config), generation("push-generation", config);
  const kvferry::Peer to = context.agent.add_peer(generation.engine.metadata());
  const kvferry::Peer from = generation.agent.add_peer(context.engine.metadata());
  ASSERT_EQ(to.wait(long_time), KVF_OK) << to.text();
  ASSERT_EQ(from.wait(long_time), KVF_OK) << from.text();
  const std::vector<std::int32_t> held = {5, 9, 2}, wanted = {60, 1, 33};
  context.fill(7, held);
  kvferry::ReceiveRequest request;
  request.key = kvferry::key(7);
  request.peer = &from;
  request.what.groups = {kvferry::wanted(0, wanted)};
  generation.transceiver.requestAndReceiveAsync(request);
  kvferry::Push push;
  push.groups = {kvferry::published(0, held, 0, 20)};
  push.aux = {4, 5};
  context.transceiver.respondAndSendAsync(to, generation.transceiver.offer(request.key), push);
  const auto received = generation.transceiver.checkGenTransferStatus(1, long_time);
  ASSERT_EQ(received.completed().size(), 1u) << generation.transceiver.errorText(request.key);
  EXPECT_EQ(received.results[0].bytes, 20 * token_bytes * layers * 2);
  EXPECT_EQ(generation.transceiver.aux(request.key), (kvferry::Bytes{4, 5}));
  generation.expect(7, wanted, 20);
  EXPECT_EQ(context.transceiver.checkContextTransferStatus(1, long_time).completed().size(), 1u);

  const kvf_request_record record = generation.transceiver.record(request.key);
  EXPECT_GT(record.first_byte_ns, 0u);
  EXPECT_GE(record.last_byte_ns, record.first_byte_ns);
  EXPECT_GT(record.gb_per_s, 0.0);
  const std::string lines = generation.transceiver.records();
  EXPECT_NE(lines.find("\"request\":7,"), std::string::npos) << lines;
  EXPECT_EQ(generation.transceiver.records(KVF_RECORDS_CSV).rfind("request,attempt,side,", 0), 0u);
  const std::string metrics = generation.agent.metrics_text();
  EXPECT_NE(metrics.find("kvferry_received_bytes_total{peer=\"push-context\""), std::string::npos)
      << metrics;
}

TEST_F(CacheTransceiverTest, DrainAndShutdownLeaveNothingBehind) {
  send(1, {0}, 8);
  EXPECT_FALSE(context.transceiver.drain(20ms));
  context.transceiver.shutdown(long_time);
  auto sent = context.transceiver.checkContextTransferStatus(0);
  ASSERT_EQ(sent.results.size(), 1u);
  EXPECT_EQ(sent.results[0].outcome, KVF_OUTCOME_CANCELLED);
  EXPECT_TRUE(context.agent.quarantine().empty());
}

TEST(CacheTransceiverVotes, ALeaderAloneGivesDecisionBytes) {
  kvferry::CacheTransceiverConfig config;
  config.consensus = KVF_CONSENSUS_VOTES;
  config.domain = 5;
  Rank rank("leader", config);
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  const std::vector<std::int32_t> blocks{0};
  offer.groups = {kvferry::published(0, blocks, 0, 8)};
  rank.transceiver.respondAndSendAsync(offer);
  EXPECT_FALSE(rank.transceiver.cancelRequest(kvferry::key(1))) << "a proposal";
  auto sent = rank.transceiver.checkContextTransferStatus(1, long_time);
  ASSERT_GE(sent.results.size(), 1u);
  EXPECT_EQ(sent.results[0].outcome, KVF_OUTCOME_CANCELLED);
  EXPECT_FALSE(sent.decision.empty());
  EXPECT_TRUE(rank.transceiver.apply(sent.decision).results.empty()) << "its own bytes";
}

TEST(CacheTransceiverCollective, WhatTheExchangeThrowsComesOut) {
  kvferry::CacheTransceiverConfig config;
  config.consensus = KVF_CONSENSUS_COLLECTIVE;
  config.world = config.tensor_ranks = 2;
  bool broken = true;
  config.exchange = [&](std::uint32_t group, const void* mine, void* all, std::size_t bytes) {
    EXPECT_EQ(group, KVF_EXCHANGE_TENSOR);
    if (broken) throw std::runtime_error("rank 1 is gone");
    for (std::size_t i = 0; i < 2; ++i) {
      std::memcpy(static_cast<char*>(all) + i * bytes, mine, bytes);
    }
  };
  Rank rank("collective", config);
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  const std::vector<std::int32_t> blocks{0};
  offer.groups = {kvferry::published(0, blocks, 0, 8)};
  rank.transceiver.respondAndSendAsync(offer);
  rank.transceiver.cancelRequest(kvferry::key(1));
  try {
    rank.transceiver.checkContextTransferStatus(0);
    FAIL();
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "rank 1 is gone");
  }
  broken = false;
  const auto sent = rank.transceiver.checkContextTransferStatus(0);
  ASSERT_GE(sent.results.size(), 1u);
  EXPECT_EQ(sent.results[0].outcome, KVF_OUTCOME_CANCELLED);
}

// Each bad argument: the right status, a text that names it, nothing changed.
TEST_F(CacheTransceiverTest, BadArgumentsAreNamed) {
  kvf_transceiver* t = context.transceiver.c();
  kvf_request_result results[4];
  std::size_t n = 77;
  const auto size = sizeof(results[0]);
  const auto named = [](kvf_status status, kvf_status expected, const char* name) {
    EXPECT_EQ(status, expected) << name;
    EXPECT_NE(kvferry::last_error().find(name), std::string::npos) << kvferry::last_error();
  };
  const auto check = kvf_transceiver_check_context_transfer_status;
  named(check(nullptr, 0, 0, results, size, 4, &n, nullptr, nullptr, 0, nullptr),
        KVF_ERR_INVALID_ARGUMENT, "transceiver");
  named(check(t, 0, 0, nullptr, size, 4, &n, nullptr, nullptr, 0, nullptr),
        KVF_ERR_INVALID_ARGUMENT, "results");
  named(check(t, 0, 0, results, 0, 4, &n, nullptr, nullptr, 0, nullptr), KVF_ERR_ABI_MISMATCH,
        "elem_size");
  named(check(t, 0, 0, results, size, 4, nullptr, nullptr, nullptr, 0, nullptr),
        KVF_ERR_INVALID_ARGUMENT, "n is NULL");
  named(check(t, 0, 0, results, size, 4, &n, nullptr, nullptr, 9, nullptr),
        KVF_ERR_INVALID_ARGUMENT, "decision");
  EXPECT_EQ(n, 77u);
  EXPECT_EQ(check(t, 0, 0, nullptr, 0, 0, &n, nullptr, nullptr, 0, nullptr), KVF_OK);
  EXPECT_EQ(n, 0u);
  kvf_key bad = kvferry::key(1);
  bad.reserved = 1;
  named(kvf_transceiver_cancel(t, bad), KVF_ERR_INVALID_ARGUMENT, "key.reserved");
  kvf_receive_request request = KVF_RECEIVE_REQUEST_INIT;
  named(kvf_transceiver_request_and_receive_async(t, nullptr), KVF_ERR_INVALID_ARGUMENT,
        "request");
  named(kvf_transceiver_request_and_receive_async(t, &request), KVF_ERR_INVALID_ARGUMENT,
        "request.peer");
  kvf_transceiver_config config = KVF_TRANSCEIVER_CONFIG_INIT;
  kvf_transceiver* made = nullptr;
  const auto create = [&] {
    return kvf_transceiver_create(context.agent.c(), context.engine.c(), &config, &made);
  };
  named(kvf_transceiver_create(context.agent.c(), generation.engine.c(), &config, &made),
        KVF_ERR_INVALID_ARGUMENT, "engine");
  config.consensus = 9;
  named(create(), KVF_ERR_INVALID_ARGUMENT, "config.consensus");
  config.consensus = KVF_CONSENSUS_COLLECTIVE;
  named(create(), KVF_ERR_INVALID_ARGUMENT, "callback");
  config.consensus = KVF_CONSENSUS_NONE;
  config.world = 2;
  named(create(), KVF_ERR_INVALID_ARGUMENT, "2 ranks without consensus");
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(kvf_transceiver_destroy(nullptr), KVF_OK);
}

}  // namespace
