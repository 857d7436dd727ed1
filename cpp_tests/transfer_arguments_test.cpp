// What kvf_pull_begin, kvf_import_begin, kvf_receive_begin, kvf_push_begin and the functions of
// kvf_transfer refuse; a refused call changes nothing.
#include "transfers.hpp"

using namespace kvferry_test;

namespace {

kvf_transfer* const kUntouched = reinterpret_cast<kvf_transfer*>(0x1234);

TEST(TransferArguments, EveryBadPullIsRefusedAndChangesNothing) {
  Pair pair, strangers;
  auto publication = pair.publish(1, {3, 9}, 8);
  const kvferry::Bytes ticket = publication.ticket();
  kvf_transfer* out = kUntouched;
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    PullDescription d(pair, ticket);
    change(d);
    EXPECT_REFUSED(kvf_pull_begin(pair.sink.agent.c(), &d.desc, &out), with, saying);
    EXPECT_EQ(out, kUntouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT, range = KVF_ERR_OUT_OF_RANGE;
  refused(KVF_ERR_ABI_MISMATCH, "desc.struct_size", [](auto& d) { d.desc.struct_size = 1; });
  refused(argument, "desc.reserved", [](auto& d) { d.desc.reserved = 1; });
  refused(no_stream().first, no_stream().second, [](auto& d) { d.desc.stream = &d; });
  refused(argument, "desc.peer is NULL", [](auto& d) { d.desc.peer = nullptr; });
  refused(argument, "desc.peer belongs to another agent",
          [&](auto& d) { d.desc.peer = strangers.peer.c(); });
  refused(argument, "desc.ticket is NULL", [](auto& d) { d.desc.ticket = nullptr; });
  refused(argument, "desc.ticket has 0 bytes", [](auto& d) { d.desc.ticket_bytes = 0; });
  refused(argument, "ticket", [](auto& d) { d.desc.ticket_bytes -= 1; });
  for (size_t at = 13; at < ticket.size(); ++at) {  // behind the head: a changed slot number
    kvferry::Bytes changed = ticket;
    changed[at] ^= 1;
    refused(argument, "checksum", [&](auto& d) { d.desc.ticket = changed.data(); });
  }
  const kvferry::Bytes foreign = strangers.publish(1, {3, 9}, 8).ticket();
  refused(argument, "add that engine as a peer", [&](auto& d) {
    d.desc.ticket = foreign.data();
    d.desc.ticket_bytes = foreign.size();
  });
  refused(argument, "desc.slots is NULL", [](auto& d) { d.desc.slots = nullptr; });
  refused(argument, "2 slots and a token_end of 0", [](auto& d) { d.desc.token_end = 0; });
  refused(argument, "group 0", [](auto& d) { d.desc.skip_token = 3; });
  refused(argument, "group 0", [](auto& d) { d.desc.num_slots = 1; });
  refused(argument, "group 0", [](auto& d) { d.slots[1] = -1; });
  refused(range, "group 7", [](auto& d) { d.desc.group = 7; });
  refused(argument, "group 1 is a state group", [](auto& d) { d.desc.group = 1; });
  refused(range, "slot 16 of group 0", [](auto& d) { d.slots[1] = 16; });
  refused(range, "slot -2 of group 0", [](auto& d) { d.slots[1] = -2; });
  refused(KVF_ERR_DUPLICATE, "slot 5", [](auto& d) { d.slots[1] = 5; });
  refused(range, "published 0..8", [](auto& d) { d.desc.token_end = 9; });

  PullDescription d(pair, ticket);
  EXPECT_REFUSED(kvf_pull_begin(pair.sink.agent.c(), nullptr, &out), argument, "desc is NULL");
  EXPECT_REFUSED(kvf_pull_begin(pair.sink.agent.c(), &d.desc, nullptr), argument,
                 "transfer is NULL");
  EXPECT_EQ(out, kUntouched);
  EXPECT_EQ(publication.query().claimed, 0u) << "the source has not heard of all that";

  ASSERT_EQ(kvf_pull_begin(pair.sink.agent.c(), &d.desc, &out), KVF_OK);
  EXPECT_EQ(kvf_transfer_wait(out, 20'000'000'000), KVF_OK);
  EXPECT_EQ(kvf_transfer_destroy(out), KVF_OK);
}

TEST(TransferArguments, EveryBadImportIsRefusedAndChangesNothing) {
  Pair pair;
  auto publication = pair.source.agent.publish(blocks_and_state());
  const kvferry::Bytes ticket = publication.ticket();
  kvf_transfer* out = kUntouched;
  struct Description {
    int32_t slots[2] = {5, 6};
    kvf_import_group group = KVF_IMPORT_GROUP_INIT;
    kvf_import_state state = KVF_IMPORT_STATE_INIT;
    kvf_slot_ref owned = KVF_SLOT_REF_INIT;
    kvf_import_desc desc = KVF_IMPORT_DESC_INIT;
  };
  const auto fill = [&](Description& d) {
    d.group.slots = d.slots;
    d.group.num_slots = 2;
    d.group.token_end = KVF_TOKEN_END_ALL;
    d.state.group = 1;
    d.state.as_of_token = 8;
    d.owned.slot = 7;
    d.desc.peer = pair.peer.c();
    d.desc.ticket = ticket.data();
    d.desc.ticket_bytes = ticket.size();
    d.desc.groups = &d.group;
    d.desc.num_groups = 1;
    d.desc.states = &d.state;
    d.desc.num_states = 1;
    d.desc.owned_only = &d.owned;
    d.desc.num_owned_only = 1;
  };
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    Description d;
    fill(d);
    change(d);
    EXPECT_REFUSED(kvf_import_begin(pair.sink.agent.c(), &d.desc, &out), with, saying);
    EXPECT_EQ(out, kUntouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT, abi = KVF_ERR_ABI_MISMATCH;
  constexpr auto range = KVF_ERR_OUT_OF_RANGE;
  refused(abi, "desc.abi_version", [](auto& d) { d.desc.abi_version = 5; });
  refused(abi, "elem_size of desc.groups", [](auto& d) { d.desc.groups_elem_size = 0; });
  refused(abi, "elem_size of desc.states", [](auto& d) { d.desc.states_elem_size = 0; });
  refused(abi, "elem_size of desc.owned_only", [](auto& d) { d.desc.owned_only_elem_size = 0; });
  refused(argument, "desc.reserved", [](auto& d) { d.desc.reserved = 1; });
  refused(no_stream().first, no_stream().second, [](auto& d) { d.desc.stream = &d; });
  refused(argument, "desc.direction 2", [](auto& d) { d.desc.direction = 2; });
  refused(argument, "desc.peer is NULL", [](auto& d) { d.desc.peer = nullptr; });
  refused(argument, "desc.ticket is NULL", [](auto& d) { d.desc.ticket = nullptr; });
  refused(argument, "desc.groups is NULL", [](auto& d) { d.desc.groups = nullptr; });
  refused(argument, "desc.states is NULL", [](auto& d) { d.desc.states = nullptr; });
  refused(argument, "desc.owned_only is NULL", [](auto& d) { d.desc.owned_only = nullptr; });
  refused(argument, "desc.groups[0].reserved", [](auto& d) { d.group.reserved = 1; });
  refused(argument, "desc.groups[0].slots is NULL", [](auto& d) { d.group.slots = nullptr; });
  refused(argument, "desc.groups[0] has 2 slots", [](auto& d) { d.group.token_end = 0; });
  refused(range, "slot 4 of group 1", [](auto& d) { d.state.slot = 4; });
  refused(argument, "group 0 is a paged group", [](auto& d) {
    d.state.group = 0;
    d.desc.num_groups = 0;
  });
  refused(KVF_ERR_INCOMPATIBLE, "token 8", [](auto& d) { d.state.as_of_token = 7; });
  refused(range, "slot 99 of group 0", [](auto& d) { d.owned.slot = 99; });
  refused(KVF_ERR_DUPLICATE, "slot 5 of group 0", [](auto& d) { d.owned.slot = 5; });
  Description d;
  fill(d);
  kvf_import_group twice[2] = {d.group, d.group};
  refused(KVF_ERR_DUPLICATE, "group 0 is given twice", [&](auto& broken) {
    broken.desc.groups = twice;
    broken.desc.num_groups = 2;
  });

  // A group that was not published.
  const Ints slots{3, 9};
  kvferry::Offer without;
  without.states = {{1, 2, 8}};
  auto other = pair.source.agent.publish(without);
  const kvferry::Bytes other_ticket = other.ticket();
  refused(KVF_ERR_NOT_FOUND, "group 0", [&](auto& broken) {
    broken.desc.ticket = other_ticket.data();
    broken.desc.ticket_bytes = other_ticket.size();
  });

  ASSERT_EQ(kvf_import_begin(pair.sink.agent.c(), &d.desc, &out), KVF_OK);
  EXPECT_EQ(kvf_transfer_wait(out, 20'000'000'000), KVF_OK);
  EXPECT_EQ(kvf_transfer_destroy(out), KVF_OK);
}

TEST(TransferArguments, APrefixThatDiffersIsRefused) {
  Pair pair;
  auto offer = blocks_and_state();
  offer.prefix_tag = 0xabc;
  auto publication = pair.source.agent.publish(offer);
  const kvferry::Bytes ticket = publication.ticket();
  PullDescription d(pair, ticket);
  d.desc.prefix_tag = 0xdef;
  kvf_transfer* out = kUntouched;
  EXPECT_REFUSED(kvf_pull_begin(pair.sink.agent.c(), &d.desc, &out), KVF_ERR_PREFIX_MISMATCH,
                 "0xdef");
  EXPECT_EQ(out, kUntouched);
  // One side without a tag, or both with the same.
  for (uint64_t tag : {0, 0xabc}) {
    auto again = pair.source.agent.publish(offer);
    const kvferry::Bytes bytes = again.ticket();
    PullDescription good(pair, bytes);
    good.desc.prefix_tag = tag;
    ASSERT_EQ(kvf_pull_begin(pair.sink.agent.c(), &good.desc, &out), KVF_OK);
    EXPECT_EQ(kvf_transfer_wait(out, 20'000'000'000), KVF_OK);
    EXPECT_EQ(kvf_transfer_destroy(out), KVF_OK);
  }
}

TEST(TransferArguments, FunctionsNameTheirBadArguments) {
  Pair pair;
  auto publication = pair.source.agent.publish(blocks_and_state());
  auto transfer =
      pair.sink.agent.pull_begin(pair.peer, publication.ticket(), 0, Ints{5, 6});
  transfer.finish(kLong);
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  kvf_transfer_info info = KVF_TRANSFER_INFO_INIT;
  kvf_part_info part = KVF_PART_INFO_INIT;
  kvf_transfer* t = transfer.c();
  EXPECT_REFUSED(kvf_transfer_query(t, nullptr, nullptr, 0, 0), argument, "info is NULL");
  EXPECT_REFUSED(kvf_transfer_query(t, &info, nullptr, sizeof part, 1), argument, "parts is NULL");
  EXPECT_REFUSED(kvf_transfer_query(t, &info, &part, 0, 1), KVF_ERR_ABI_MISMATCH,
                 "elem_size of parts");
  EXPECT_EQ(info.num_parts, 0u);
  info.struct_size = 5;
  EXPECT_REFUSED(kvf_transfer_query(t, &info, &part, sizeof part, 1), KVF_ERR_ABI_MISMATCH,
                 "info.struct_size is 5");
  EXPECT_REFUSED(kvf_transfer_error_text(t, nullptr, 1, nullptr), argument, "buf is NULL");
  size_t needed = 0;
  uint8_t aux[2] = {9, 9};
  EXPECT_REFUSED(kvf_transfer_aux(t, aux, 2, &needed), KVF_ERR_OUT_OF_RANGE, "3 are needed");
  EXPECT_EQ(needed, 3u);
  EXPECT_EQ(aux[0], 9);
  EXPECT_REFUSED(kvf_transfer_offer(t, nullptr, 0, &needed), KVF_ERR_STATE, "kvf_receive_begin");
  EXPECT_REFUSED(kvf_transfer_stream_wait(t, nullptr), argument, "KVF_STREAM_LEGACY");
}

TEST(TransferArguments, EveryBadPushIsRefused) {
  PushPair pair;
  const Ints to{5, 6};
  kvferry::Receive receive;
  receive.key = kvferry::key(4);
  receive.groups = {kvferry::wanted(0, to, 0, 8)};
  auto in = pair.sink.agent.receive_begin(receive);
  const kvferry::Bytes offer = in.offer();
  kvf_transfer* out = kUntouched;
  struct Description {
    int32_t slots[2] = {3, 9};
    kvf_published_group group = KVF_PUBLISHED_GROUP_INIT;
    kvf_push_desc desc = KVF_PUSH_DESC_INIT;
  };
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    Description d;
    d.group.slots = d.slots;
    d.group.num_slots = 2;
    d.group.token_end = 8;
    d.desc.peer = pair.back.c();
    d.desc.offer = offer.data();
    d.desc.offer_bytes = offer.size();
    d.desc.groups = &d.group;
    d.desc.num_groups = 1;
    change(d);
    EXPECT_REFUSED(kvf_push_begin(pair.source.agent.c(), &d.desc, &out), with, saying);
    EXPECT_EQ(out, kUntouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  refused(KVF_ERR_ABI_MISMATCH, "desc.struct_size", [](auto& d) { d.desc.struct_size = 1; });
  refused(no_stream().first, no_stream().second, [](auto& d) { d.desc.stream = &d; });
  refused(KVF_ERR_UNSUPPORTED, "desc.priority is 1", [](auto& d) { d.desc.priority = 1; });
  refused(argument, "desc.peer is NULL", [](auto& d) { d.desc.peer = nullptr; });
  refused(argument, "desc.peer belongs", [&](auto& d) { d.desc.peer = pair.peer.c(); });
  refused(argument, "desc.offer is NULL", [](auto& d) { d.desc.offer = nullptr; });
  refused(argument, "desc.offer has 0 bytes", [](auto& d) { d.desc.offer_bytes = 0; });
  refused(argument, "offer", [](auto& d) { d.desc.offer_bytes -= 1; });
  refused(argument, "desc.groups is NULL", [](auto& d) { d.desc.groups = nullptr; });
  refused(argument, "not pushed", [](auto& d) { d.desc.num_groups = 0; });
  refused(KVF_ERR_OUT_OF_RANGE, "0..8", [](auto& d) { d.group.token_end = 7; });
  refused(KVF_ERR_OUT_OF_RANGE, "slot 16", [](auto& d) { d.slots[0] = 16; });
  Description d;
  EXPECT_REFUSED(kvf_push_begin(pair.source.agent.c(), nullptr, &out), argument, "desc is NULL");
  EXPECT_REFUSED(kvf_push_begin(pair.source.agent.c(), &d.desc, nullptr), argument,
                 "transfer is NULL");
  EXPECT_EQ(in.poll(), KVF_IN_PROGRESS) << "the receiver has not heard of all that";

  kvf_receive_desc bad = KVF_RECEIVE_DESC_INIT;
  bad.key.reserved = 1;
  EXPECT_REFUSED(kvf_receive_begin(pair.sink.agent.c(), &bad, &out), argument, "desc.key.reserved");
  bad.key.reserved = 0;
  bad.stream = &bad;
  EXPECT_REFUSED(kvf_receive_begin(pair.sink.agent.c(), &bad, &out), no_stream().first,
                 no_stream().second);
  EXPECT_REFUSED(kvf_receive_begin(pair.sink.agent.c(), nullptr, &out), argument, "desc is NULL");
  bad.stream = nullptr;
  EXPECT_REFUSED(kvf_receive_begin(pair.sink.agent.c(), &bad, nullptr), argument,
                 "transfer is NULL");
  EXPECT_EQ(out, kUntouched);
}

}  // namespace
