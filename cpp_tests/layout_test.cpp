// kvf_layout: descriptions that say nothing sensible, and layouts that do not fit their memory.
#include "side.hpp"

using namespace kvferry_test;

namespace {

// One good description, for tests to break.
struct Description {
  explicit Description(const kvferry::Pool& pool) : tensor(pool.at(0)) {
    view.role = KVF_ROLE_KEY;
    view.element_bits = 16;
    view.heads = 2;
    view.slots = 4;
    view.bytes_per_head = 32;
    view.tensors = &tensor;
    view.num_tensors = 1;
    view.slot_stride = 768;
    view.layer_stride = 256;
    view.token_stride = 64;
    view.head_stride = 32;
    group.kind = KVF_GROUP_PAGED;
    group.tokens_per_block = 4;
    group.layers = layers;
    group.num_layers = 3;
    group.views = &view;
    group.num_views = 1;
    layout.groups = &group;
    layout.num_groups = 1;
  }
  Description(const Description&) = delete;

  kvf_status create(kvf_layout** out) const { return kvf_layout_create(&layout, out); }

  // Creates the layout and sets it on an agent.
  kvf_status set(kvferry::Agent& agent) const {
    kvf_layout* made = nullptr;
    kvferry::check(create(&made));
    const kvf_status status = kvf_agent_set_layout(agent.c(), made);
    const std::string text = kvferry::last_error();
    EXPECT_EQ(kvf_layout_destroy(made), KVF_OK);
    EXPECT_EQ(kvferry::last_error(), text);
    return status;
  }

  uint32_t layers[3] = {0, 1, 2};
  kvf_tensor_desc tensor;
  kvf_view_desc view = KVF_VIEW_DESC_INIT;
  kvf_group_desc group = KVF_GROUP_DESC_INIT;
  kvf_layout_desc layout = KVF_LAYOUT_DESC_INIT;
};

constexpr uint64_t kBytes = 4 * 768;

TEST(Layout, EveryMalformedDescriptionIsRefused) {
  kvferry::Agent agent;
  const kvferry::Pool pool = agent.host_pool(kBytes);
  kvf_layout* const untouched = reinterpret_cast<kvf_layout*>(0x1234);
  kvf_layout* out = untouched;
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    Description d(pool);
    change(d);
    EXPECT_REFUSED(d.create(&out), with, saying);
    EXPECT_EQ(out, untouched) << saying;
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT, abi = KVF_ERR_ABI_MISMATCH;
  refused(abi, "desc.struct_size is 1", [](auto& d) { d.layout.struct_size = 1; });
  refused(abi, "desc.abi_version is 2", [](auto& d) { d.layout.abi_version = 2; });
  refused(argument, "desc.num_groups is 0", [](auto& d) { d.layout.num_groups = 0; });
  refused(argument, "desc.groups is NULL", [](auto& d) { d.layout.groups = nullptr; });
  refused(abi, "elem_size of desc.groups is 0", [](auto& d) { d.layout.groups_elem_size = 0; });
  refused(argument, "desc.groups[0].kind is 0", [](auto& d) { d.group.kind = 0; });
  refused(argument, "desc.groups[0].kind is 3", [](auto& d) { d.group.kind = 3; });
  refused(argument, "state group with tokens_per_block 4",
          [](auto& d) { d.group.kind = KVF_GROUP_STATE; });
  refused(argument, "desc.groups[0].reserved is 5", [](auto& d) { d.group.reserved = 5; });
  refused(argument, "desc.groups[0].layers is NULL", [](auto& d) { d.group.layers = nullptr; });
  refused(argument, "desc.groups[0].views is NULL", [](auto& d) { d.group.views = nullptr; });
  refused(abi, "elem_size of desc.groups[0].views is 0",
          [](auto& d) { d.group.views_elem_size = 0; });
  refused(argument, "desc.groups[0].views[0].role is 0", [](auto& d) { d.view.role = 0; });
  refused(argument, "desc.groups[0].views[0].role is 10", [](auto& d) { d.view.role = 10; });
  refused(argument, "views[0].tensors is NULL", [](auto& d) { d.view.tensors = nullptr; });
  refused(argument, "views[0].tensors[0].pool is NULL", [](auto& d) { d.tensor.pool = nullptr; });
  refused(argument, "views[0].sections is NULL", [](auto& d) { d.view.num_sections = 1; });
  kvf_section_desc section = KVF_SECTION_DESC_INIT;
  const auto with_section = [&](auto& d) {
    d.view.sections = &section;
    d.view.num_sections = 1;
  };
  refused(argument, "views[0].sections[0].name is NULL", with_section);
  section.name = "x";
  section.reserved = 1;
  refused(argument, "views[0].sections[0].reserved is 1", with_section);

  Description d(pool);
  EXPECT_REFUSED(kvf_layout_create(nullptr, &out), argument, "desc is NULL");
  EXPECT_REFUSED(kvf_layout_create(&d.layout, nullptr), argument, "layout is NULL");
}

TEST(Layout, PoolsMustBelongToOneAgent) {
  kvferry::Agent one, two;
  const kvferry::Pool first = one.host_pool(kBytes), second = two.host_pool(kBytes);
  Description d(first);
  kvf_tensor_desc tensors[3] = {first.at(0), second.at(0), first.at(0)};
  d.view.tensors = tensors;
  d.view.num_tensors = 3;
  d.view.layer_stride = 0;
  kvf_layout* out = nullptr;
  EXPECT_REFUSED(d.create(&out), KVF_ERR_INVALID_ARGUMENT, "tensors[1].pool belongs to another");

  Description other(first);
  EXPECT_REFUSED(other.set(two), KVF_ERR_INVALID_ARGUMENT, "pools of another agent");
}

TEST(Layout, EveryLayoutThatDoesNotFitItsMemoryIsRefused) {
  kvferry::Agent agent;
  const kvferry::Pool pool = agent.host_pool(kBytes);
  const auto refused = [&](kvf_status with, const std::string& saying, auto change) {
    Description d(pool);
    change(d);
    EXPECT_REFUSED(d.set(agent), with, saying);
  };
  constexpr auto argument = KVF_ERR_INVALID_ARGUMENT;
  refused(argument, "tokens", [](auto& d) { d.group.tokens_per_block = 0; });
  refused(argument, "element", [](auto& d) { d.view.element_bits = 0; });
  refused(argument, "heads", [](auto& d) { d.view.heads = 0; });
  refused(argument, "shard", [](auto& d) { d.view.shard = 1; });
  refused(argument, "replica", [](auto& d) { d.view.replica = 1; });
  refused(argument, "ordinal", [](auto& d) { d.group.ordinal_offset = 1; });
  refused(argument, "tensors", [](auto& d) { d.view.num_tensors = 0; });
  refused(argument, "overlap", [](auto& d) { d.view.token_stride = 32; });
  refused(KVF_ERR_DUPLICATE, "layer 1", [](auto& d) { d.layers[2] = 1; });
  refused(KVF_ERR_OUT_OF_RANGE, "pool", [](auto& d) { d.tensor.offset = 1; });
  refused(KVF_ERR_OUT_OF_RANGE, "pool", [](auto& d) { d.view.slots = 5; });
  EXPECT_REFUSED(kvf_agent_set_layout(agent.c(), nullptr), argument, "layout is NULL");

  // Nothing was set by all that, and a good one is set once.
  Description d(pool);
  EXPECT_EQ(d.set(agent), KVF_OK);
  EXPECT_REFUSED(d.set(agent), KVF_ERR_STATE, "once");
}

TEST(Layout, ZeroIsTheDefaultOfCounts) {
  kvferry::Agent agent;
  const kvferry::Pool pool = agent.host_pool(kBytes);
  Description d(pool);
  EXPECT_EQ(d.view.shards, 0u);
  EXPECT_EQ(d.view.replicas, 0u);
  EXPECT_EQ(d.group.ordinal_stride, 0u);
  EXPECT_EQ(d.set(agent), KVF_OK);
}

TEST(Layout, AnOlderCallersElementsAreExtendedWithZeros) {
  kvferry::Agent agent;
  const kvferry::Pool pool = agent.host_pool(kBytes);
  Description d(pool);
  // A header whose kvf_tensor_desc had no offset yet.
  d.tensor.offset = UINT64_MAX;
  d.view.tensors_elem_size = offsetof(kvf_tensor_desc, offset);
  EXPECT_EQ(d.set(agent), KVF_OK);
}

}  // namespace
