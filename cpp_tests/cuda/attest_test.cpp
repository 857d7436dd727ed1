// Device memory is attested after the copy. Runs on the library with fault points.
#include "gpu.hpp"

#include <memory>

#include "cache.hpp"
#include "child.hpp"

namespace {

using namespace kvferry_test;
using process_test::Child;
using ProcessKind = process_test::MemoryKind;

const Ints kTo{5, 6};

// The source revokes its lease and stops before it can tell anybody; only the word says so.
TEST(Attest, AnOfferThatEndsDuringTheCopyIsExpired) {
  setenv("KVF_FAULT", "after_revoke:stop", 1);
  const char* mutant = std::getenv("KVF_MUTANT");
  auto child = std::make_unique<Child>(std::vector<std::string>{
      AGENT_PROGRAM, "source", "65536", "32", "1", "device"});
  if (mutant != nullptr) {
    setenv("KVF_FAULT", (std::string(mutant) + ":on").c_str(), 1);
  } else {
    unsetenv("KVF_FAULT");
  }
  EXPECT_EQ(child->line(), "ready");
  EXPECT_EQ(child->ask("fill 7"), "ok");
  process_test::Shape shape{65536, 32, 1, ProcessKind::device};
  process_test::Cache here(process_test::quick("sink"), shape);
  auto peer = here.agent.add_peer(process_test::from_hex(child->ask("meta")));
  ASSERT_EQ(peer.wait(kLong), KVF_OK) << peer.text();
  const auto ticket = process_test::from_hex(child->ask("publish 1 2 3,9"));
  OF_DOUBLE(kvf_cuda_double_delay)(300'000, 300'000);
  auto transfer = here.agent.pull_begin(peer, ticket, 0, kTo);
  while (transfer.query().submitted == 0) std::this_thread::sleep_for(1ms);
  linger();
  child->send("release 1");
  ASSERT_EQ(child->halted(10s), Child::State::stopped) << "needs the library with fault points";
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_EXPIRED) << transfer.error_text();
}

}  // namespace
