// kvf_peer: engines that fit or do not, and what is told about them.
#include <thread>

#include "side.hpp"

using namespace kvferry_test;

namespace {

kvf_peer* const kUntouched = reinterpret_cast<kvf_peer*>(0x1234);

bool has_event(kvferry::Agent& agent, uint32_t kind, kvf_event* found) {
  for (int i = 0; i < 10000; ++i) {
    for (const kvf_event& event : agent.take_events()) {
      if (event.kind != kind) continue;
      *found = event;
      return true;
    }
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

TEST(Peer, EveryBadArgumentIsRefused) {
  Side side("one"), other("two");
  const kvferry::Bytes metadata = other.engine.metadata();
  kvf_peer* out = kUntouched;
  const auto add = [&](const kvferry::Bytes& bytes) {
    return kvf_peer_add(side.agent.c(), bytes.data(), bytes.size(), 0, &out);
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  EXPECT_REFUSED(kvf_peer_add(side.agent.c(), nullptr, 5, 0, &out), argument,
                 "engine_metadata is NULL");
  EXPECT_REFUSED(kvf_peer_add(side.agent.c(), metadata.data(), 0, 0, &out), argument,
                 "engine_metadata has 0 bytes");
  EXPECT_REFUSED(kvf_peer_add(side.agent.c(), metadata.data(), metadata.size(), 0, nullptr),
                 argument, "peer is NULL");
  EXPECT_REFUSED(add(side.engine.metadata()), argument, "own");
  EXPECT_REFUSED(add(other.agent.metadata()), argument, "");
  kvferry::Bytes broken = metadata;
  broken[0] ^= 1;
  EXPECT_REFUSED(add(broken), argument, "");
  for (size_t cut : {size_t{1}, size_t{16}, metadata.size() / 2, metadata.size() - 1}) {
    EXPECT_REFUSED(add({metadata.begin(), metadata.begin() + static_cast<std::ptrdiff_t>(cut)}),
                   argument, "");
  }
  // A changed stride or address would be believed.
  for (size_t at = 0; at < metadata.size(); ++at) {
    broken = metadata;
    broken[at] ^= 4;
    EXPECT_LT(add(broken), 0) << "byte " << at;
  }
  EXPECT_EQ(out, kUntouched);

  auto peer = side.agent.add_peer(metadata);
  EXPECT_REFUSED(kvf_peer_query(peer.c(), nullptr), argument, "info is NULL");
  kvf_peer_info info = KVF_PEER_INFO_INIT;
  info.abi_version = 0;
  EXPECT_REFUSED(kvf_peer_query(peer.c(), &info), KVF_ERR_ABI_MISMATCH, "info.abi_version is 0");
  EXPECT_REFUSED(kvf_peer_text(peer.c(), nullptr, 4, nullptr), argument, "buf is NULL");
}

TEST(Peer, AnEngineThatDoesNotFitIsRefusedWithBothValues) {
  Side side("one");
  auto cfg = config("two");
  cfg.fingerprint = "another model";
  Side other(cfg, MemoryKind::Pool);
  const kvferry::Bytes metadata = other.engine.metadata();
  kvf_peer* out = kUntouched;
  EXPECT_REFUSED(kvf_peer_add(side.agent.c(), metadata.data(), metadata.size(), 0, &out),
                 KVF_ERR_INCOMPATIBLE, "another model");
  EXPECT_NE(kvferry::last_error().find("test"), std::string::npos) << kvferry::last_error();
  EXPECT_EQ(out, kUntouched);
}

TEST(Peer, ReadyIsToldWithTheTransportAndItsReason) {
  Pair pair;
  const kvf_peer_info info = pair.peer.query();
  EXPECT_EQ(info.status, KVF_OK);
  EXPECT_EQ(info.ranks, 1u);
  EXPECT_EQ(info.ranks_ready, 1u);
  EXPECT_STREQ(info.transport, "inproc");
  EXPECT_NE(pair.peer.text().find("inproc"), std::string::npos) << pair.peer.text();

  kvf_event event;
  ASSERT_TRUE(has_event(pair.sink.agent, KVF_EVENT_PEER_READY, &event));
  EXPECT_EQ(event.object, info.id);
  EXPECT_EQ(event.user_data, 77u);
  EXPECT_EQ(event.status, KVF_OK);

  // Texts are cut to the buffer.
  char text[5];
  size_t needed = 0;
  EXPECT_EQ(kvf_peer_text(pair.peer.c(), text, sizeof text, &needed), KVF_OK);
  EXPECT_EQ(std::string(text), pair.peer.text().substr(0, 4));
  EXPECT_EQ(needed, pair.peer.text().size() + 1);
}

TEST(Peer, ItsEndIsTold) {
  Pair pair;
  const uint64_t id = pair.peer.query().id;
  EXPECT_EQ(pair.source.agent.destroy(kLong), KVF_OK);
  kvf_event event;
  ASSERT_TRUE(has_event(pair.sink.agent, KVF_EVENT_PEER_LOST, &event));
  EXPECT_EQ(event.object, id);
  EXPECT_EQ(event.user_data, 77u);
  EXPECT_EQ(event.status, KVF_ERR_PEER_LOST);
  EXPECT_REFUSED(pair.peer.wait(0s), KVF_ERR_PEER_LOST, "");
  EXPECT_FALSE(kvferry::last_error().empty());
}

TEST(Peer, ARemovedPeerServesNothing) {
  Pair pair;
  auto publication = pair.publish(1, {3}, 4);
  pair.peer.remove();
  pair.peer.remove();
  kvf_status status = KVF_OK;
  for (int i = 0; i < 10000 && status == KVF_OK; ++i) {
    try {
      auto transfer = pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0,
                                                 std::vector<int32_t>{5});
      status = transfer.wait(kLong);
    } catch (const kvferry::Error& error) {
      status = error.status();
    }
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_LT(status, 0) << "the removed peer still serves";
}

}  // namespace
