// kvf_plan_explain: a deployment on paper.
#include "side.hpp"

using namespace kvferry_test;

namespace {

// `ranks` ranks that share 4 heads of 2 layers.
std::string engine(int ranks, int first_rank, const std::string& fingerprint = "m") {
  std::string json = "{\"fingerprint\": \"" + fingerprint + "\", \"ranks\": [";
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank != 0) json += ", ";
    json += "{\"global_rank\": " + std::to_string(first_rank + rank) +
            ", \"groups\": [{\"kind\": \"paged\", \"tokens_per_block\": 16, \"window\": 0, "
            "\"layers\": [0, 1], \"views\": [{\"role\": \"key\", \"element_bits\": 16, "
            "\"heads\": " +
            std::to_string(4 / ranks) +
            ", \"bytes_per_head\": 64, \"shards\": " + std::to_string(ranks) +
            ", \"shard\": " + std::to_string(rank) + ", \"replicas\": 1, \"replica\": 0}]}]}";
  }
  return json + "]}";
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(Plan, SaysWhoSendsWhatToWhom) {
  const std::string json = kvferry::explain(engine(4, 0), engine(2, 1000));
  EXPECT_EQ(count(json, "\"src\""), 4u) << json;
  EXPECT_EQ(count(json, "\"dst\": 1000"), 2u) << json;
  EXPECT_EQ(count(json, "\"dst\": 1001"), 2u) << json;
  EXPECT_NE(json.find("\"uncovered\": []"), std::string::npos) << json;
  EXPECT_NE(json.find("\"errors\": []"), std::string::npos) << json;
  const std::string table =
      kvferry::explain(engine(4, 0), engine(2, 1000), KVF_POLICY_LOWEST, KVF_EXPLAIN_TABLE);
  EXPECT_EQ(count(table, "\n"), 5u) << table;
}

TEST(Plan, WhatDoesNotFitIsToldInTheExplanation) {
  const std::string json = kvferry::explain(engine(1, 0, "m"), engine(1, 1000, "n"));
  EXPECT_EQ(json.find("\"errors\": []"), std::string::npos) << json;
  EXPECT_NE(kvferry::explain("{", engine(1, 0)).find("source layout file"), std::string::npos);
}

TEST(Plan, EveryBadArgumentIsRefused) {
  const std::string text = engine(1, 0);
  const kvf_bytes good{text.data(), text.size()}, none{nullptr, 4}, empty{text.data(), 0},
      latin{"\xe9", 1};
  size_t needed = 77;
  const auto refused = [&](const kvf_bytes* source, const kvf_bytes* destination, uint32_t policy,
                           uint32_t format, const std::string& saying) {
    EXPECT_REFUSED(kvf_plan_explain(source, destination, policy, format, nullptr, 0, &needed),
                   KVF_ERR_INVALID_ARGUMENT, saying);
  };
  refused(nullptr, &good, 0, 0, "source is NULL");
  refused(&good, nullptr, 0, 0, "destination is NULL");
  refused(&none, &good, 0, 0, "source.data is NULL");
  refused(&good, &empty, 0, 0, "destination.data has 0 bytes");
  refused(&latin, &good, 0, 0, "source is not UTF-8");
  refused(&good, &good, 2, 0, "policy 2");
  refused(&good, &good, 0, 2, "format 2");
  EXPECT_EQ(needed, 77u);
  char small[8] = "before";
  EXPECT_REFUSED(kvf_plan_explain(&good, &good, 0, 0, small, sizeof small, &needed),
                 KVF_ERR_OUT_OF_RANGE, "text has 8 bytes");
  EXPECT_STREQ(small, "before");
  EXPECT_GT(needed, 8u);
}

}  // namespace
