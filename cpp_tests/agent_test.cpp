// kvf_agent: creation, threads, event fd, log callback, drain, end, fork.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "side.hpp"

using namespace kvferry_test;

namespace {

kvf_agent* const kUntouched = reinterpret_cast<kvf_agent*>(0x1234);

#define EXPECT_CREATE_REFUSED(config, status, saying)                     \
  do {                                                                    \
    kvf_agent* agent_ = kUntouched;                                       \
    EXPECT_REFUSED(kvf_agent_create(&(config), &agent_), status, saying); \
    EXPECT_EQ(agent_, kUntouched);                                        \
  } while (false)

void ignore_log(void*, uint32_t, const char*) {}

TEST(Agent, EveryBadConfigIsRefused) {
  kvf_agent* agent = kUntouched;
  kvf_agent_config config = KVF_AGENT_CONFIG_INIT;
  EXPECT_REFUSED(kvf_agent_create(nullptr, &agent), KVF_ERR_INVALID_ARGUMENT, "config is NULL");
  EXPECT_REFUSED(kvf_agent_create(&config, nullptr), KVF_ERR_INVALID_ARGUMENT, "agent is NULL");
  EXPECT_EQ(agent, kUntouched);

  config.struct_size = 8;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_ABI_MISMATCH, "config.struct_size is 8");
  config = KVF_AGENT_CONFIG_INIT;
  config.abi_version = 99;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_ABI_MISMATCH, "config.abi_version is 99");
  config = KVF_AGENT_CONFIG_INIT;
  config.workers = 100000;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "workers is 100000");
  config = KVF_AGENT_CONFIG_INIT;
  config.name = "\xff";
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "config.name is not UTF-8");
  config = KVF_AGENT_CONFIG_INIT;
  config.listen = "nonsense";
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "nonsense");
  config = KVF_AGENT_CONFIG_INIT;
  const std::vector<uint8_t> key(4097, 7);
  config.auth_key_bytes = 16;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "config.auth_key is NULL");
  config.auth_key = key.data();
  for (std::size_t bytes : {1, 15, 4097}) {
    config.auth_key_bytes = bytes;
    EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT,
                          "key has " + std::to_string(bytes) + " bytes");
  }
  config = KVF_AGENT_CONFIG_INIT;
  config.allow_unauthenticated = 2;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "allow_unauthenticated is 2");
  config = KVF_AGENT_CONFIG_INIT;
  config.data_connections = 257;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "data_connections is 257");
  config = KVF_AGENT_CONFIG_INIT;
  config.transports = "shm, pigeon";
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "pigeon");
  setenv("KVFERRY_TRANSPORTS", "tcp", 1);
  config.transports = "shm";
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "no transport is left");
  config = KVF_AGENT_CONFIG_INIT;
  setenv("KVFERRY_TRANSPORTS", "\xff", 1);
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "KVFERRY_TRANSPORTS");
  unsetenv("KVFERRY_TRANSPORTS");
  config.name = "two\nlines";
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "control character");
  config = KVF_AGENT_CONFIG_INIT;
  config.peer_silence_ns = 3000000000;  // the default distance of heartbeats
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "heartbeat_ns (3s)");
  config = KVF_AGENT_CONFIG_INIT;
  config.num_affinity = 1;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "config.affinity is NULL");
  const uint32_t no_cpu = 100000;
  config.affinity = &no_cpu;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "100000");
  config = KVF_AGENT_CONFIG_INIT;
  config.max_publications = 1u << 30;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "max_publications");
  config = KVF_AGENT_CONFIG_INIT;
  config.log_level = KVF_LOG_ERROR;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "without config.log");
  config.log = ignore_log;
  config.log_level = 5;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "config.log_level is 5");
}

// Beyond loopback: with a key, or with the word that it is open, and at an address that peers reach.
TEST(Agent, ListensBeyondLoopbackOnlyWithAKeyOrTheOpenOption) {
  kvf_agent* agent = kUntouched;
  kvf_agent_config config = KVF_AGENT_CONFIG_INIT;
  const std::vector<uint8_t> key(16, 7);
  for (const char* wildcard : {"0.0.0.0:0", "[::]:0"}) {
    config = KVF_AGENT_CONFIG_INIT;
    config.listen = wildcard;
    EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "auth_key");
    EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "KVFERRY_AUTH_KEY_FILE");
    EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "allow_unauthenticated");
    for (bool open : {false, true}) {
      config = KVF_AGENT_CONFIG_INIT;
      config.listen = wildcard;
      config.allow_unauthenticated = open ? 1 : 0;
      config.auth_key = open ? nullptr : key.data();
      config.auth_key_bytes = open ? 0 : key.size();
      EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "set advertise");
      for (const char* nowhere : {"0.0.0.0:5", "[::]:0", "224.0.0.1:5", "[fe80::1]:5"}) {
        config.advertise = nowhere;
        EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "set advertise");
      }
      config.advertise = "nonsense";
      EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "advertise \"nonsense\"");
      config.advertise = "192.0.2.7:0";
      ASSERT_EQ(kvf_agent_create(&config, &agent), KVF_OK) << kvferry::last_error();
      EXPECT_EQ(kvf_agent_destroy(agent, 5000000000), KVF_OK);
      agent = kUntouched;
    }
  }
}

TEST(Agent, AKeyFileIsTakenFromTheEnvironment) {
  const std::string path = testing::TempDir() + "/kvferry_key_" + std::to_string(getpid());
  const auto write = [&](const std::string& text) {
    std::FILE* file = std::fopen(path.c_str(), "w");
    ASSERT_NE(file, nullptr);
    std::fputs(text.c_str(), file);
    std::fclose(file);
  };
  setenv("KVFERRY_AUTH_KEY_FILE", path.c_str(), 1);
  kvf_agent* agent = kUntouched;
  kvf_agent_config config = KVF_AGENT_CONFIG_INIT;
  EXPECT_CREATE_REFUSED(config, KVF_ERR_SYSTEM, path);
  write("too short\n");
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "KVFERRY_AUTH_KEY_FILE");
  setenv("KVFERRY_AUTH_KEY_FILE", "/dev/zero", 1);  // has no end
  EXPECT_CREATE_REFUSED(config, KVF_ERR_INVALID_ARGUMENT, "4098 bytes");
  setenv("KVFERRY_AUTH_KEY_FILE", path.c_str(), 1);
  write("sixteen bytes...\n");
  config.listen = "0.0.0.0:0";
  config.advertise = "127.0.0.1:0";
  ASSERT_EQ(kvf_agent_create(&config, &agent), KVF_OK) << kvferry::last_error();
  EXPECT_EQ(kvf_agent_destroy(agent, 5000000000), KVF_OK);
  unsetenv("KVFERRY_AUTH_KEY_FILE");
  std::remove(path.c_str());
}

TEST(Agent, FunctionsNameTheirBadArguments) {
  kvferry::Agent agent;
  size_t n = 7;
  kvf_event event;
  EXPECT_REFUSED(kvf_agent_event_fd(agent.c(), nullptr), KVF_ERR_INVALID_ARGUMENT, "fd is NULL");
  EXPECT_REFUSED(kvf_agent_take_events(agent.c(), &event, sizeof event, 0, &n),
                 KVF_ERR_INVALID_ARGUMENT, "cap is 0");
  EXPECT_REFUSED(kvf_agent_take_events(agent.c(), nullptr, sizeof event, 1, &n),
                 KVF_ERR_INVALID_ARGUMENT, "events is NULL");
  EXPECT_REFUSED(kvf_agent_take_events(agent.c(), &event, 0, 1, &n), KVF_ERR_ABI_MISMATCH,
                 "elem_size of events is 0");
  EXPECT_REFUSED(kvf_agent_take_events(agent.c(), &event, sizeof event, 1, nullptr),
                 KVF_ERR_INVALID_ARGUMENT, "n is NULL");
  kvf_quarantined_slot slot;
  EXPECT_REFUSED(kvf_agent_quarantine(agent.c(), nullptr, sizeof slot, 1, &n),
                 KVF_ERR_INVALID_ARGUMENT, "slots is NULL");
  EXPECT_REFUSED(kvf_agent_quarantine(agent.c(), &slot, 0, 1, &n), KVF_ERR_ABI_MISMATCH,
                 "elem_size of slots is 0");
  EXPECT_REFUSED(kvf_agent_quarantine(agent.c(), &slot, sizeof slot, 1, nullptr),
                 KVF_ERR_INVALID_ARGUMENT, "n is NULL");
  EXPECT_REFUSED(kvf_agent_metadata(agent.c(), nullptr, 0, &n), KVF_ERR_STATE,
                 "kvf_agent_set_layout");
  EXPECT_EQ(n, 7u);
  char text[8];
  EXPECT_EQ(kvf_metrics_text(agent.c(), text, sizeof text, &n), KVF_ERR_OUT_OF_RANGE);
  EXPECT_GT(n, sizeof text);
}

TEST(Agent, MetadataIsGivenWholeOrNotAtAll) {
  Side side("one");
  const kvferry::Bytes whole = side.agent.metadata();
  ASSERT_GT(whole.size(), 8u);
  EXPECT_EQ(side.agent.metadata(), whole) << "the same bytes each time";
  kvferry::Bytes buf(whole.size(), 0xee);
  size_t needed = 0;
  EXPECT_REFUSED(kvf_agent_metadata(side.agent.c(), buf.data(), whole.size() - 1, &needed),
                 KVF_ERR_OUT_OF_RANGE, std::to_string(whole.size()) + " are needed");
  EXPECT_EQ(needed, whole.size());
  EXPECT_EQ(buf, kvferry::Bytes(whole.size(), 0xee));
  EXPECT_REFUSED(kvf_agent_metadata(side.agent.c(), nullptr, 10, nullptr),
                 KVF_ERR_INVALID_ARGUMENT, "buf is NULL");
}

bool readable(int fd, int timeout_ms = 0) {
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, timeout_ms) == 1;
}

TEST(Agent, EventFdIsReadableExactlyWhileThereIsAnEvent) {
  Side side("one");
  const int fd = side.agent.event_fd();
  EXPECT_EQ(side.agent.event_fd(), fd);
  EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
  EXPECT_FALSE(readable(fd));

  std::vector<kvferry::Publication> publications;
  for (int i = 0; i < 3; ++i) {
    kvferry::Offer offer;
    offer.key = kvferry::key(100, static_cast<uint32_t>(i));
    const std::vector<int32_t> slots{i};
    offer.groups = {kvferry::published(0, slots, 0, 4)};
    offer.user_data = 40 + static_cast<uint64_t>(i);
    publications.push_back(side.agent.publish(offer));
  }
  for (auto& publication : publications) publication.release();
  for (auto& publication : publications) EXPECT_EQ(publication.wait(kLong), KVF_ERR_CANCELLED);
  EXPECT_TRUE(readable(fd, 10000));

  std::vector<kvf_event> events;
  while (events.size() < 3) {
    ASSERT_TRUE(readable(fd, 10000));
    kvf_event event;
    size_t n = 0;
    ASSERT_EQ(kvf_agent_take_events(side.agent.c(), &event, sizeof event, 1, &n), KVF_OK);
    ASSERT_EQ(n, 1u);
    events.push_back(event);
  }
  EXPECT_FALSE(readable(fd));
  EXPECT_TRUE(side.agent.take_events().empty());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].kind, static_cast<uint32_t>(KVF_EVENT_PUBLICATION_ENDED));
    EXPECT_EQ(events[i].status, KVF_ERR_CANCELLED);
    EXPECT_EQ(events[i].key.request, 100u);
    EXPECT_EQ(events[i].key.attempt, i);
    EXPECT_EQ(events[i].user_data, 40 + i);
    EXPECT_EQ(events[i].object, publications[i].query().id);
  }
}

TEST(Agent, AnOlderCallersEventsAreWrittenUpToItsSize) {
  Side side("one");
  auto publication = side.agent.publish(kvferry::key(5), 0, std::vector<int32_t>{0}, 4);
  publication.release();
  EXPECT_EQ(publication.wait(kLong), KVF_ERR_CANCELLED);
  ASSERT_TRUE(readable(side.agent.event_fd(), 10000));
  uint32_t old[4] = {9, 9, 9, 9};  // kind and status, and what must stay
  size_t n = 0;
  ASSERT_EQ(kvf_agent_take_events(side.agent.c(), reinterpret_cast<kvf_event*>(old), 8, 1, &n),
            KVF_OK);
  EXPECT_EQ(n, 1u);
  EXPECT_EQ(old[0], static_cast<uint32_t>(KVF_EVENT_PUBLICATION_ENDED));
  EXPECT_EQ(static_cast<int32_t>(old[1]), KVF_ERR_CANCELLED);
  EXPECT_EQ(old[2], 9u);
}

// Names of this process's threads that start with the prefix, and whether they block SIGTERM.
std::vector<std::string> threads(const std::string& prefix, bool* all_block_signals = nullptr) {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line;
    std::ifstream(task.path() / "comm") >> name;
    if (name.rfind(prefix, 0) != 0) continue;
    names.push_back(name);
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line)) {
      if (line.rfind("SigBlk:", 0) != 0) continue;
      const unsigned long long mask = std::stoull(line.substr(7), nullptr, 16);
      if (all_block_signals && !(mask & (1ull << (SIGTERM - 1)))) *all_block_signals = false;
    }
  }
  return names;
}

TEST(Agent, ThreadsAreNamedBlockSignalsAndEndWithTheAgent) {
  auto cfg = config("weasel");
  cfg.workers = 3;
  kvferry::Agent agent(cfg);
  while (threads("kvf-weasel").size() < 4) std::this_thread::sleep_for(1ms);  // as they start
  bool block = true;
  EXPECT_EQ(threads("kvf-weasel", &block).size(), 4u) << "three workers and the control thread";
  EXPECT_TRUE(block);
  EXPECT_EQ(agent.destroy(kLong), KVF_OK);
  EXPECT_TRUE(threads("kvf-weasel").empty());
}

TEST(Agent, LogLinesComeUpToTheLevelAndCallsInsideAreRefused) {
  std::mutex mutex;
  std::vector<uint32_t> levels;
  std::atomic<int> refused{0};
  kvf_agent* inside = nullptr;
  auto cfg = config("source");
  cfg.log_level = KVF_LOG_INFO;
  cfg.log = [&](uint32_t level, const char* text) {
    std::lock_guard<std::mutex> lock(mutex);
    levels.push_back(level);
    EXPECT_NE(std::string(text), "");
    if (inside != nullptr && kvf_agent_drain(inside, 0) == KVF_ERR_REENTRANT) ++refused;
  };
  {
    Pair pair(cfg, config("sink"), MemoryKind::Pool);
    {
      std::lock_guard<std::mutex> lock(mutex);
      inside = pair.source.agent.c();
    }
    auto back = pair.source.agent.add_peer(pair.sink.engine.metadata());
    EXPECT_EQ(back.wait(kLong), KVF_OK);
    EXPECT_EQ(pair.sink.agent.destroy(kLong), KVF_OK);
    while (back.query().status != KVF_ERR_PEER_LOST) std::this_thread::sleep_for(1ms);
    std::lock_guard<std::mutex> lock(mutex);
    inside = nullptr;
  }
  EXPECT_FALSE(levels.empty());
  for (uint32_t level : levels) {
    EXPECT_GE(level, static_cast<uint32_t>(KVF_LOG_ERROR));
    EXPECT_LE(level, static_cast<uint32_t>(KVF_LOG_INFO));
  }
  EXPECT_GT(refused, 0);
}

TEST(Agent, DrainRefusesNewWorkAndTellsWhatRuns) {
  Side side("one");
  auto publication = side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  EXPECT_REFUSED(kvf_agent_drain(side.agent.c(), 10'000'000), KVF_ERR_DEADLINE, "1 publication");
  EXPECT_THROW(side.agent.publish(kvferry::key(2), 0, std::vector<int32_t>{4}, 4),
               kvferry::Error);
  publication.release();
  side.agent.drain(kLong);
}

TEST(Agent, ChildrenOutliveItAndAnswerShutdown) {
  auto pair = std::make_unique<Pair>();
  auto publication = pair->publish(1, {3}, 4);
  auto transfer = pair->sink.agent.pull_begin(pair->peer, publication.ticket(), 0,
                                              std::vector<int32_t>{5});
  transfer.finish(kLong);
  EXPECT_EQ(pair->source.agent.destroy(kLong), KVF_OK);
  EXPECT_EQ(pair->sink.agent.destroy(kLong), KVF_OK);

  EXPECT_REFUSED(transfer.poll(), KVF_ERR_SHUTDOWN, "agent of this transfer was destroyed");
  EXPECT_REFUSED(publication.wait(0s), KVF_ERR_SHUTDOWN, "agent of this publication");
  EXPECT_REFUSED(pair->peer.wait(0s), KVF_ERR_SHUTDOWN, "agent of this peer");
  size_t needed;
  EXPECT_REFUSED(kvf_engine_metadata(pair->sink.engine.c(), nullptr, 0, &needed),
                 KVF_ERR_SHUTDOWN, "agent of this engine");
  uint32_t id;
  EXPECT_REFUSED(kvf_pool_id(pair->sink.memory.pool().c(), &id), KVF_ERR_SHUTDOWN,
                 "agent of this pool");
  // The memory is still there, as long as its pool's handle is.
  EXPECT_EQ(pair->sink.block(0, 5), pair->source.block(0, 3));
  EXPECT_EQ(transfer.destroy(), KVF_OK);
  EXPECT_EQ(publication.destroy(), KVF_OK);
  EXPECT_EQ(pair->peer.destroy(), KVF_OK);
}

TEST(Agent, AForkedChildIsRefusedAndMayDestroy) {
  Side side("one");
  kvferry::Publication publication =
      side.agent.publish(kvferry::key(1), 0, std::vector<int32_t>{3}, 4);
  const pid_t child = fork();
  if (child == 0) {
    int fd;
    const bool ok = kvf_agent_event_fd(side.agent.c(), &fd) == KVF_ERR_FORKED &&
                    publication.wait(0s) == KVF_ERR_FORKED && publication.destroy() == KVF_OK &&
                    side.engine.destroy() == KVF_OK && side.agent.destroy(1s) == KVF_OK;
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(publication.wait(0s), KVF_TIMED_OUT) << "the parent goes on";
}

TEST(Agent, NoFileAndNoThreadIsLeftBehind) {
  const auto fds = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  { Pair warm; }
  const auto before = fds();
  for (int i = 0; i < 5; ++i) Pair pair;
  EXPECT_EQ(fds(), before);
  EXPECT_TRUE(threads("kvf-").empty());
}

}  // namespace
