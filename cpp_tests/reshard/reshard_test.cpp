// Real bytes between engines of every shape, through the C interface, ranks in processes of their
// own. Each shape runs two rounds, so that peers, templates and slots are used again.
#include <gtest/gtest.h>

#include <algorithm>

#include "processes.hpp"

using namespace reshard;

namespace {

class Reshard : public testing::TestWithParam<std::string> {};

TEST_P(Reshard, EveryByteArrivesAndNoOtherIsTouched) {
  every_byte_arrives(shape(GetParam()), false);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Shape& s : shapes()) all.push_back(s.name);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Reshard, testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

// What the table promises, so that it cannot shrink unseen.
TEST(ReshardTable, HasItsFortyShapesAndTenOfSeparateProcesses) {
  std::vector<std::string> all = names();
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end()) << "names are unique";
  EXPECT_GE(all.size(), 40u);
  std::size_t separate = 0;
  for (const Shape& s : shapes()) {
    const auto ranks = s.sides[0].ranks() + s.sides[1].ranks();
    if (s.place != Place::alone) continue;
    EXPECT_LE(ranks, 8u) << s.name;
    ++separate;
  }
  EXPECT_GE(separate, 10u);
}

}  // namespace
