// kvf_publication and tickets: offers under a lease, how they end, and when slots are safe.
#include <thread>

#include "side.hpp"

using namespace kvferry_test;

namespace {

kvf_publication* const kUntouched = reinterpret_cast<kvf_publication*>(0x1234);

// One good description, for tests to break.
struct Description {
  Description() {
    group.slots = slots;
    group.num_slots = 2;
    group.token_end = 8;
    state.group = 1;
    state.slot = 2;
    state.as_of_token = 8;
    desc.key.request = 1;
    desc.groups = &group;
    desc.num_groups = 1;
    desc.states = &state;
    desc.num_states = 1;
  }
  Description(const Description&) = delete;

  int32_t slots[2] = {3, 9};
  kvf_published_group group = KVF_PUBLISHED_GROUP_INIT;
  kvf_published_state state = KVF_PUBLISHED_STATE_INIT;
  kvf_publish_desc desc = KVF_PUBLISH_DESC_INIT;
};

TEST(Publication, EveryBadDescriptionIsRefusedAndChangesNothing) {
  Side side("one");
  kvf_publication* out = kUntouched;
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    Description d;
    change(d);
    EXPECT_REFUSED(kvf_publish(side.agent.c(), &d.desc, &out), with, saying);
    EXPECT_EQ(out, kUntouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT, abi = KVF_ERR_ABI_MISMATCH;
  constexpr auto range = KVF_ERR_OUT_OF_RANGE, duplicate = KVF_ERR_DUPLICATE;
  refused(abi, "desc.struct_size is 0", [](auto& d) { d.desc.struct_size = 0; });
  refused(abi, "elem_size of desc.groups is 0", [](auto& d) { d.desc.groups_elem_size = 0; });
  refused(abi, "elem_size of desc.states is 0", [](auto& d) { d.desc.states_elem_size = 0; });
  refused(argument, "desc.reserved is 1", [](auto& d) { d.desc.reserved = 1; });
  refused(argument, "desc.key.reserved is 1", [](auto& d) { d.desc.key.reserved = 1; });
  refused(argument, "desc.groups is NULL", [](auto& d) { d.desc.groups = nullptr; });
  refused(argument, "desc.states is NULL", [](auto& d) { d.desc.states = nullptr; });
  refused(argument, "desc.aux is NULL", [](auto& d) { d.desc.aux_bytes = 1; });
  refused(argument, "desc.groups[0].reserved is 1", [](auto& d) { d.group.reserved = 1; });
  refused(argument, "desc.groups[0].slots is NULL", [](auto& d) { d.group.slots = nullptr; });
  refused(no_stream().first, no_stream().second, [](auto& d) { d.desc.stream = &d; });
  refused(argument, "2 slots and a token_end of 0", [](auto& d) { d.group.token_end = 0; });
  refused(argument, "tokens 9..8", [](auto& d) { d.group.token_begin = 9; });
  refused(argument, "1 slots for the 2 blocks", [](auto& d) { d.group.num_slots = 1; });
  refused(argument, "from block ordinal 2 on", [](auto& d) { d.group.first_ordinal = 2; });
  refused(argument, "from block ordinal 18446744073709551615 on",
          [](auto& d) { d.group.first_ordinal = UINT64_MAX; });
  refused(argument, "token_end is KVF_TOKEN_END_ALL",
          [](auto& d) { d.group.token_end = KVF_TOKEN_END_ALL; });
  refused(argument, "as_of_token is KVF_AS_OF_ANY",
          [](auto& d) { d.state.as_of_token = KVF_AS_OF_ANY; });
  refused(range, "group 2", [](auto& d) { d.group.group = 2; });
  refused(range, "slot 16 of group 0", [](auto& d) { d.slots[1] = 16; });
  refused(range, "slot -2 of group 0", [](auto& d) { d.slots[1] = -2; });
  refused(duplicate, "slot 3 of group 0", [](auto& d) { d.slots[1] = 3; });
  refused(argument, "group 1 is a state group", [](auto& d) {
    d.group.group = 1;
    d.desc.num_states = 0;
  });
  refused(argument, "group 0 is a paged group", [](auto& d) {
    d.state.group = 0;
    d.desc.num_groups = 0;
  });
  refused(range, "slot 4 of group 1", [](auto& d) { d.state.slot = 4; });
  refused(range, "slot -1 of group 1", [](auto& d) { d.state.slot = -1; });
  static const std::vector<uint8_t> long_aux(65537, 1);
  refused(KVF_ERR_LIMIT, "65537", [](auto& d) {
    d.desc.aux = long_aux.data();
    d.desc.aux_bytes = long_aux.size();
  });
  Description d;
  kvf_published_group twice[2] = {d.group, d.group};
  refused(duplicate, "group 0 is given twice", [&](auto& broken) {
    broken.desc.groups = twice;
    broken.desc.num_groups = 2;
  });
  EXPECT_REFUSED(kvf_publish(side.agent.c(), nullptr, &out), argument, "desc is NULL");
  EXPECT_REFUSED(kvf_publish(side.agent.c(), &d.desc, nullptr), argument, "publication is NULL");
  kvferry::Agent bare;
  EXPECT_REFUSED(kvf_publish(bare.c(), &d.desc, &out), KVF_ERR_STATE, "engine");
  EXPECT_EQ(out, kUntouched);

  // No slot was marked: all of them can be written.
  kvferry::Receive all;
  std::vector<int32_t> every(Cache::slots);
  for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<int32_t>(i);
  all.groups = {kvferry::wanted(0, every, 0, Cache::slots * Cache::tokens)};
  side.agent.receive_begin(all).cancel();
  EXPECT_TRUE(side.agent.take_events().empty());
}

TEST(Publication, FunctionsNameTheirBadArguments) {
  Side side("one");
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  EXPECT_REFUSED(kvf_publication_query(publication.c(), nullptr), KVF_ERR_INVALID_ARGUMENT,
                 "info is NULL");
  kvf_publication_info info = KVF_PUBLICATION_INFO_INIT;
  info.struct_size = 11;
  info.claimed = 9;
  EXPECT_REFUSED(kvf_publication_query(publication.c(), &info), KVF_ERR_ABI_MISMATCH,
                 "info.struct_size is 11");
  EXPECT_EQ(info.claimed, 9u);
  const size_t size = publication.ticket().size();
  std::vector<uint8_t> buf(size, 0xee);
  size_t needed = 0;
  EXPECT_REFUSED(kvf_publication_ticket(publication.c(), buf.data(), size - 1, &needed),
                 KVF_ERR_OUT_OF_RANGE, std::to_string(size) + " are needed");
  EXPECT_EQ(needed, size);
  EXPECT_EQ(buf, std::vector<uint8_t>(size, 0xee));
}

TEST(Publication, AnOlderCallersInfoIsWrittenUpToItsSize) {
  Side side("one");
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  kvf_publication_info info;
  std::memset(&info, 0x77, sizeof info);
  info.struct_size = offsetof(kvf_publication_info, memory_safe);
  info.abi_version = KVF_ABI_VERSION;
  ASSERT_EQ(kvf_publication_query(publication.c(), &info), KVF_OK);
  EXPECT_EQ(info.struct_size, offsetof(kvf_publication_info, memory_safe)) << "the caller's";
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_PENDING));
  EXPECT_EQ(info.cause, KVF_IN_PROGRESS);
  EXPECT_EQ(info.memory_safe, 0x77777777u);
}

TEST(Publication, LivesUntilItsReaderHasFinished) {
  Pair pair;
  auto publication = pair.publish(7, {3, 9}, 8);
  kvf_publication_info info = publication.query();
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_PENDING));
  EXPECT_EQ(info.claimed, 0u);
  EXPECT_EQ(info.memory_safe, 0u);
  EXPECT_EQ(info.key.request, 7u);
  EXPECT_EQ(publication.wait(1ms), KVF_TIMED_OUT);

  auto transfer = pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0,
                                             std::vector<int32_t>{5, 6});
  transfer.finish(kLong);
  EXPECT_EQ(publication.wait(kLong), KVF_OK);
  info = publication.query();
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_DONE));
  EXPECT_EQ(info.cause, KVF_OK);
  EXPECT_EQ(info.memory_safe, 1u);
  EXPECT_EQ(info.readers_done, 1u);
  EXPECT_EQ(info.readers_expected, 1u);
}

TEST(Publication, EmptyIsValid) {
  Pair pair;
  kvferry::Offer nothing;
  nothing.key = kvferry::key(1);
  auto publication = pair.source.agent.publish(nothing);
  auto transfer = pair.sink.agent.import_begin(pair.peer, publication.ticket(), {});
  EXPECT_EQ(transfer.poll(), KVF_OK) << "born complete";
  EXPECT_EQ(publication.wait(kLong), KVF_OK) << "and the source was told";
}

TEST(Publication, ReleaseIsIdempotentAndEndsIt) {
  Side side("one");
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  publication.release();
  publication.release();
  EXPECT_REFUSED(publication.wait(kLong), KVF_ERR_CANCELLED, "released");
  publication.release();
  const kvf_publication_info info = publication.query();
  EXPECT_EQ(info.outcome, static_cast<uint32_t>(KVF_OUTCOME_CANCELLED));
  EXPECT_EQ(info.memory_safe, 1u);
}

TEST(Publication, NobodyComesAndItExpires) {
  Side side("one");
  kvferry::Offer offer;
  const std::vector<int32_t> slots{3};
  offer.groups = {kvferry::published(0, slots, 0, 4)};
  offer.claim = 20ms;
  auto publication = side.agent.publish(offer);
  EXPECT_REFUSED(publication.wait(kLong), KVF_ERR_EXPIRED, "");
  EXPECT_EQ(publication.query().outcome, static_cast<uint32_t>(KVF_OUTCOME_EXPIRED));
  EXPECT_EQ(publication.query().memory_safe, 1u);
}

TEST(Publication, ASlotMayBeInManyAndIsFreeAfterTheLast) {
  Side side("one");
  auto first = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  auto second = side.agent.publish(kvferry::key(2), 0, std::vector<int32_t>{3}, 4);
  kvferry::Receive into;
  const std::vector<int32_t> slots{3};
  into.groups = {kvferry::wanted(0, slots, 0, 4)};
  const auto busy = [&](const std::string& saying) {
    try {
      side.agent.receive_begin(into);
      FAIL() << "slot 3 was given away";
    } catch (const kvferry::Error& error) {
      EXPECT_EQ(error.status(), KVF_ERR_SLOT_BUSY);
      EXPECT_NE(std::string(error.what()).find(saying), std::string::npos) << error.what();
    }
  };
  busy("2 publication(s)");
  first.release();
  EXPECT_EQ(first.wait(kLong), KVF_ERR_CANCELLED);
  busy("1 publication(s)");
  second.release();
  EXPECT_EQ(second.wait(kLong), KVF_ERR_CANCELLED);
  auto receive = side.agent.receive_begin(into);
  // And the other way round.
  Description d;
  kvf_publication* out = kUntouched;
  EXPECT_REFUSED(kvf_publish(side.agent.c(), &d.desc, &out), KVF_ERR_SLOT_BUSY,
                 "destination of transfer " + std::to_string(receive.query().id));
  EXPECT_EQ(out, kUntouched);
}

TEST(Publication, ADestroyedHandleLeavesTheOfferAndNoEvent) {
  Pair pair;
  auto publication = pair.publish(1, {3}, 4);
  const kvferry::Bytes ticket = publication.ticket();
  EXPECT_EQ(publication.destroy(), KVF_OK);
  auto transfer = pair.sink.agent.pull_begin(pair.peer, ticket, 0, std::vector<int32_t>{5});
  transfer.finish(kLong);
  EXPECT_EQ(pair.sink.block(0, 5), pair.source.block(0, 3));
  pair.source.agent.drain(kLong);
  for (const kvf_event& event : pair.source.agent.take_events()) {
    EXPECT_NE(event.kind, static_cast<uint32_t>(KVF_EVENT_PUBLICATION_ENDED));
  }
}

TEST(Ticket, EveryBadArgumentIsRefused) {
  Pair pair, strangers;
  auto publication = pair.publish(1, {3}, 4);
  const kvferry::Bytes ticket = publication.ticket();
  kvf_agent* agent = pair.sink.agent.c();
  const kvf_peer* peer = pair.peer.c();
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  const auto both = [&](const kvf_peer* p, const void* bytes, size_t size,
                        const std::string& saying) {
    EXPECT_REFUSED(kvf_ticket_hold(agent, p, bytes, size), argument, saying);
    EXPECT_REFUSED(kvf_ticket_decline(agent, p, bytes, size, KVF_ERR_NO_MEMORY), argument, saying);
  };
  both(nullptr, ticket.data(), ticket.size(), "peer is NULL");
  both(strangers.peer.c(), ticket.data(), ticket.size(), "peer belongs to another agent");
  both(peer, nullptr, ticket.size(), "ticket is NULL");
  both(peer, ticket.data(), 0, "ticket has 0 bytes");
  both(peer, ticket.data(), ticket.size() - 1, "ticket");
  auto foreign = strangers.publish(1, {3}, 4).ticket();
  both(peer, foreign.data(), foreign.size(), "another engine");
  for (int32_t cause : {0, 1, -12345}) {
    EXPECT_REFUSED(kvf_ticket_decline(agent, peer, ticket.data(), ticket.size(), cause), argument,
                   "cause is " + std::to_string(cause));
  }
  EXPECT_EQ(publication.wait(20ms), KVF_TIMED_OUT) << "nothing was declined";
}

TEST(Ticket, DeclinedEndsThePublicationSoon) {
  Pair pair;
  auto publication = pair.publish(1, {3}, 4);
  pair.sink.agent.decline(pair.peer, publication.ticket(), KVF_ERR_NO_MEMORY);
  EXPECT_EQ(publication.wait(kLong), KVF_ERR_DECLINED);
  EXPECT_EQ(publication.query().outcome, static_cast<uint32_t>(KVF_OUTCOME_DECLINED));
  EXPECT_EQ(publication.query().memory_safe, 1u);
}

TEST(Ticket, HeldKeepsTheLease) {
  Pair pair;
  kvferry::Offer offer;
  const std::vector<int32_t> slots{3};
  offer.groups = {kvferry::published(0, slots, 0, 4)};
  offer.claim = 300ms;
  offer.lease = 300ms;
  auto publication = pair.source.agent.publish(offer);
  for (int i = 0; i < 20; ++i) {
    pair.sink.agent.hold(pair.peer, publication.ticket());
    EXPECT_EQ(publication.wait(50ms), KVF_TIMED_OUT) << "after " << i * 50 << " ms";
  }
  EXPECT_EQ(publication.query().claimed, 1u);
  EXPECT_EQ(publication.wait(kLong), KVF_ERR_EXPIRED) << "once nobody holds it";
}

}  // namespace
