// The published transceiver tests (TensorRT-LLM's cacheTransceiverTest.cpp) on
// kvferry::CacheTransceiver: their parallel shapes, each rank in a process of its own where they have
// 2 to 8, every element compared, two rounds so that slots and connections are used again.
// docs/mirrors.md has the same table for people; the shapes themselves are reshard/cases.cpp's.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "reshard/processes.hpp"

using namespace reshard;

namespace {

struct Published {
  const char* test;   // theirs
  const char* shape;  // ours
};

const Published published[] = {
    // SymmetricalCacheTest: {1,2} x {1,2} -> the same
    {"SymmetricalCacheTest", "GridTp1Pp1ToTp1Pp1"},
    {"SymmetricalCacheTest", "GridTp2Pp1ToTp2Pp1"},
    {"SymmetricalCacheTest", "GridTp1Pp2ToTp1Pp2"},
    {"SymmetricalCacheTest", "GridTp2Pp2ToTp2Pp2"},
    // AsymmetricalCacheTest: {1,2} x {1,2} -> {1,2} x {1,2}
    {"AsymmetricalCacheTest", "GridTp1Pp1ToTp2Pp1"},
    {"AsymmetricalCacheTest", "GridTp2Pp1ToTp1Pp1"},
    {"AsymmetricalCacheTest", "GridTp1Pp2ToTp2Pp1"},
    {"AsymmetricalCacheTest", "GridTp2Pp1ToTp1Pp2"},
    {"AsymmetricalCacheTest", "GridTp2Pp2ToTp1Pp1"},
    {"AsymmetricalCacheTest", "GridTp1Pp1ToTp2Pp2"},
    {"AsymmetricalCacheTest", "SixteenHeadsPp2ToPp1"},
    {"AsymmetricalCacheTest", "SixteenHeadsPp2ToPp4"},
    {"AsymmetricalCacheTest, windows", "WindowTp1ToTp1"},
    {"AsymmetricalCacheTest, windows", "WindowTp4ToPp4"},
    {"AsymmetricalCacheTest, windows", "WindowLiveTables"},
    {"AsymmetricalCacheTest, uneven PP", "UnevenPp4ToPp4"},
    {"AsymmetricalCacheTest, uneven PP", "UnevenTp4ToPp4"},
    {"AsymmetricalCacheTest, duplicated heads", "OneHeadTp4ToTp1"},
    {"AsymmetricalCacheTest, duplicated heads", "TwoHeadsTp4ToTp2"},
    {"AsymmetricalCacheTest, duplicated heads", "TwoHeadsTp1ToTp4"},
    {"AsymmetricalCacheTest, duplicated heads", "TwoHeadsUnevenPp4ToTp4"},
    {"AsymmetricalCacheTest, MLA", "MlaTp2ToTp1"},
    {"AsymmetricalCacheTest, MLA", "MlaTp1ToTp2"},
    {"AsymmetricalCacheTest, MLA", "MlaTp2ToPp2"},
    {"AsymmetricalCacheTest, MLA", "MlaTp2Pp2ToTp4Pp2"},
    {"AsymmetricalCacheTest, MLA with indexer-K", "MlaIndexTp4ToPp4"},
    {"AsymmetricalCacheTest, MLA, gen CP", "MlaToCp2"},
    {"AsymmetricalCacheTest, MLA, gen CP", "MlaTp2ToCp4"},
    {"AsymmetricalCacheTest, MLA, gen PP2 CP2", "MlaIndexTp2ToPp2Cp2"},
    // AsymmetricalCacheTestWithDP: DP of the context, of the generation, of both
    {"AsymmetricalCacheTestWithDP", "DpContextOnly"},
    {"AsymmetricalCacheTestWithDP", "DpGenerationOnly"},
    {"AsymmetricalCacheTestWithDP", "DpBoth"},
    {"AsymmetricalCacheTestWithDP, MLA", "MlaDpContextOnly"},
    {"AsymmetricalCacheTestWithDP, MLA", "MlaDpGenerationOnly"},
    {"AsymmetricalCacheTestWithDP, MLA", "MlaDpBoth"},
    // test_cache_transceiver_single_process: boundary lengths, blocks of 8
    {"boundary lengths", "LengthsTp2ToTp1"},
    {"boundary lengths", "LengthsBlocks8To32"},
    {"boundary lengths", "LengthsBlocks32To8"},
    {"boundary lengths, windows", "LengthsWindow"},
};

class CacheTransceiverShapes : public testing::TestWithParam<Published> {};

TEST_P(CacheTransceiverShapes, EveryElementArrivesInTwoRounds) {
  every_byte_arrives(shape(GetParam().shape), true);
}

INSTANTIATE_TEST_SUITE_P(Published, CacheTransceiverShapes, testing::ValuesIn(published),
                         [](const auto& info) { return std::string(info.param.shape); });

// Their prompt lengths, all of them.
TEST(CacheTransceiverShapesTable, HasThePublishedLengths) {
  std::map<std::uint32_t, std::size_t> times;
  for (const Published& p : published) {
    for (const Request& r : shape(p.shape).requests) ++times[r.tokens];
  }
  for (std::uint32_t tokens : {1, 7, 8, 9, 10, 20, 23, 24, 25, 30, 32, 33, 60, 80}) {
    EXPECT_GT(times[tokens], 0u) << tokens << " tokens";
  }
  std::size_t separate = 0;
  for (const Published& p : published) separate += shape(p.shape).place == Place::alone;
  EXPECT_GE(separate, 8u) << "ranks in processes of their own";
}

}  // namespace
