// What the binary interface promises: versions, numbers, names, sizes, offsets.
#include <gtest/gtest.h>
#include <kvferry.hpp>

#include <cstddef>
#include <cstring>
#include <thread>

namespace {

TEST(Abi, HeaderAndLibraryAgree) {
  EXPECT_EQ(kvf_version(), KVF_VERSION);
  EXPECT_STREQ(kvf_version_string(), KVF_VERSION_STRING);
  EXPECT_EQ(kvf_abi_version(), static_cast<uint32_t>(KVF_ABI_VERSION));
}

// A changed number here is a break of the ABI and not a test to update.
struct Layout {
  const char* what;
  size_t is;
  size_t promised;
};
#define SIZE(type, promised) {"sizeof " #type, sizeof(type), promised}
#define OFFSET(type, field, promised) {#type "." #field, offsetof(type, field), promised}

TEST(Abi, SizesAndOffsets) {
  const Layout table[] = {
      SIZE(kvf_status, 4),
#include "struct_layout.inc"
  };
  for (const Layout& row : table) EXPECT_EQ(row.is, row.promised) << row.what;
}

#undef SIZE
#undef OFFSET

// Numbers are promised too: a caller's binary holds them.
TEST(Abi, StatusNumbersAndNames) {
  const struct {
    kvf_status status;
    int number;
    const char* name;
  } table[] = {
      {KVF_OK, 0, "KVF_OK"},
      {KVF_IN_PROGRESS, 1, "KVF_IN_PROGRESS"},
      {KVF_INTERRUPTED, 2, "KVF_INTERRUPTED"},
      {KVF_TIMED_OUT, 3, "KVF_TIMED_OUT"},
      {KVF_ERR_INVALID_ARGUMENT, -1, "KVF_ERR_INVALID_ARGUMENT"},
      {KVF_ERR_ABI_MISMATCH, -2, "KVF_ERR_ABI_MISMATCH"},
      {KVF_ERR_UNSUPPORTED, -3, "KVF_ERR_UNSUPPORTED"},
      {KVF_ERR_OUT_OF_RANGE, -4, "KVF_ERR_OUT_OF_RANGE"},
      {KVF_ERR_SLOT_BUSY, -5, "KVF_ERR_SLOT_BUSY"},
      {KVF_ERR_DUPLICATE, -6, "KVF_ERR_DUPLICATE"},
      {KVF_ERR_NOT_FOUND, -7, "KVF_ERR_NOT_FOUND"},
      {KVF_ERR_NO_MEMORY, -8, "KVF_ERR_NO_MEMORY"},
      {KVF_ERR_LIMIT, -9, "KVF_ERR_LIMIT"},
      {KVF_ERR_REENTRANT, -10, "KVF_ERR_REENTRANT"},
      {KVF_ERR_FORKED, -11, "KVF_ERR_FORKED"},
      {KVF_ERR_BUSY, -12, "KVF_ERR_BUSY"},
      {KVF_ERR_STATE, -13, "KVF_ERR_STATE"},
      {KVF_ERR_INCOMPATIBLE, -14, "KVF_ERR_INCOMPATIBLE"},
      {KVF_ERR_CANCELLED, -20, "KVF_ERR_CANCELLED"},
      {KVF_ERR_CANCELLED_BY_PEER, -21, "KVF_ERR_CANCELLED_BY_PEER"},
      {KVF_ERR_EXPIRED, -22, "KVF_ERR_EXPIRED"},
      {KVF_ERR_DECLINED, -23, "KVF_ERR_DECLINED"},
      {KVF_ERR_DEADLINE, -24, "KVF_ERR_DEADLINE"},
      {KVF_ERR_TRANSFER, -25, "KVF_ERR_TRANSFER"},
      {KVF_ERR_PREFIX_MISMATCH, -26, "KVF_ERR_PREFIX_MISMATCH"},
      {KVF_ERR_PEER_LOST, -40, "KVF_ERR_PEER_LOST"},
      {KVF_ERR_PEER_UNREACHABLE, -41, "KVF_ERR_PEER_UNREACHABLE"},
      {KVF_ERR_PROTOCOL, -42, "KVF_ERR_PROTOCOL"},
      {KVF_ERR_AUTH, -43, "KVF_ERR_AUTH"},
      {KVF_ERR_SHUTDOWN, -60, "KVF_ERR_SHUTDOWN"},
      {KVF_ERR_GROUP_LOST, -61, "KVF_ERR_GROUP_LOST"},
      {KVF_ERR_SYSTEM, -62, "KVF_ERR_SYSTEM"},
      {KVF_ERR_INTERNAL, -99, "KVF_ERR_INTERNAL"},
  };
  for (const auto& row : table) {
    EXPECT_EQ(static_cast<int>(row.status), row.number) << row.name;
    EXPECT_STREQ(kvf_status_name(row.status), row.name);
  }
  EXPECT_STREQ(kvf_status_name(12345), "KVF_STATUS_UNKNOWN");
}

TEST(Abi, NoFailureHasNoText) {
  std::thread([] {
    char text[8] = "before";
    EXPECT_EQ(kvf_last_error(nullptr, 0), 0u);
    EXPECT_EQ(kvf_last_error(text, sizeof text), 0u);
    EXPECT_STREQ(text, "");
  }).join();
}

TEST(Hpp, CheckThrowsErrorsAndGivesStatesBack) {
  EXPECT_EQ(kvferry::check(KVF_OK), KVF_OK);
  EXPECT_EQ(kvferry::check(KVF_TIMED_OUT), KVF_TIMED_OUT);
  try {
    kvferry::check(KVF_ERR_SLOT_BUSY);
    FAIL() << "expected kvferry::Error";
  } catch (const kvferry::Error& error) {
    EXPECT_EQ(error.status(), KVF_ERR_SLOT_BUSY);
    EXPECT_EQ(std::string(error.what()).rfind("KVF_ERR_SLOT_BUSY: ", 0), 0u) << error.what();
  }
}

// The templates on an object of our own, since they take any create and destroy function.
struct Object {
  int value;
};
int destroyed = 0;
kvf_status object_create(int value, Object** out) {
  if (value < 0) return KVF_ERR_OUT_OF_RANGE;
  *out = new Object{value};
  return KVF_OK;
}
kvf_status object_destroy(Object* object) {
  ++destroyed;
  delete object;
  return KVF_OK;
}

TEST(Hpp, HandlesDestroyOnceAndMakeThrows) {
  using Owned = kvferry::Handle<Object, object_destroy>;
  {
    Owned object = kvferry::make<Owned>(object_create, 7);
    EXPECT_EQ(object->value, 7);
    Owned moved = std::move(object);
  }
  EXPECT_EQ(destroyed, 1);
  EXPECT_THROW(kvferry::make<Owned>(object_create, -1), kvferry::Error);
  EXPECT_EQ(destroyed, 1);
}

}  // namespace
