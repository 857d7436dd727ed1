// A prefill and a decode process on one GPU, each with a stream of its own; neither host ever waits
// for a kernel before it calls kvferry.
//
//   prefill: produce(stream); publish(stream)       - offered before it is computed
//   decode:  scribble(stream); pull(stream)         - asked for while its blocks are still in use
//            transfer.stream_wait(stream); check(stream)   - enqueued before it has arrived
//
// Exit status 0 when all is right, 77 when there is no device.
#include <kvferry.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "gpu.hpp"

using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kHeadBytes = 256, kHeads = 4, kTokens = 16, kSlots = 32;
constexpr std::uint64_t kTokenBytes = kHeadBytes * kHeads, kBlockBytes = kTokenBytes * kTokens;
constexpr std::size_t kBlockWords = kBlockBytes / 4;
constexpr int kNoDevice = 77;
const std::vector<std::int32_t> kFrom = {3, 9, 4, 30, 17, 1, 22, 8}, kTo = {0, 1, 2, 3, 4, 5, 6, 7};

// Keys of one layer as [block, token, head, element] in device memory.
struct Rank {
  std::uint32_t* memory = static_cast<std::uint32_t*>(gpu::alloc(kSlots * kBlockBytes));
  gpu::Stream stream = gpu::create_stream();
  kvferry::Agent agent;
  kvferry::Pool pool = agent.register_device_memory(memory, kSlots * kBlockBytes);
  kvferry::Engine engine;

  Rank() {
    kvferry::View key;
    key.role = KVF_ROLE_KEY, key.slots = kSlots, key.heads = kHeads, key.bytes_per_head = kHeadBytes;
    key.slot_stride = kBlockBytes, key.layer_stride = kSlots * kBlockBytes;
    key.token_stride = kTokenBytes, key.head_stride = kHeadBytes;
    key.tensors = {pool.at(0)};
    kvferry::Group group;
    group.tokens_per_block = kTokens, group.layers = {0}, group.views = {key};
    agent.set_layout({group});
    engine = agent.engine();
  }
  std::uint32_t* block(std::int32_t slot) { return memory + static_cast<std::size_t>(slot) * kBlockWords; }
};

// Messages between the two: a length and bytes. In a real deployment the orchestrator's.
void send(int fd, const kvferry::Bytes& bytes) {
  const std::uint64_t size = bytes.size();
  if (write(fd, &size, sizeof size) != sizeof size || write(fd, bytes.data(), size) != static_cast<ssize_t>(size)) {
    throw std::runtime_error("the other process is gone");
  }
}

kvferry::Bytes receive(int fd) {
  const auto all = [fd](void* to, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes;) {
      const ssize_t n = read(fd, static_cast<char*>(to) + at, bytes - at);
      if (n <= 0) throw std::runtime_error("the other process is gone");
      at += static_cast<std::size_t>(n);
    }
  };
  std::uint64_t size = 0;
  all(&size, sizeof size);
  kvferry::Bytes bytes(size);
  all(bytes.data(), size);
  return bytes;
}

int prefill(int in, int out) {
  if (!gpu::init()) return kNoDevice;
  Rank rank;
  send(out, rank.engine.metadata());
  for (std::uint32_t request = 1; request <= 3; ++request) {
    for (std::int32_t slot : kFrom) gpu::scribble(rank.stream, rank.block(slot), kBlockWords);
    for (std::size_t i = 0; i < kFrom.size(); ++i) {
      gpu::produce(rank.stream, rank.block(kFrom[i]), kBlockWords, request * 100 + static_cast<std::uint32_t>(i));
    }
    kvferry::Offer offer;
    offer.key = kvferry::key(request);
    offer.groups = {kvferry::published(0, kFrom, 0, kFrom.size() * kTokens)};
    offer.stream = rank.stream;
    auto publication = rank.agent.publish(offer);
    send(out, publication.ticket());
    if (publication.wait(20s) != KVF_OK) return 1;  // KVF_OK: the blocks may be computed anew
  }
  (void)receive(in);  // the decode process has seen all it wants
  return 0;
}

int decode(int in, int out) {
  if (!gpu::init()) return kNoDevice;
  Rank rank;
  auto* wrong = static_cast<std::uint32_t*>(gpu::alloc(sizeof(std::uint32_t)));
  kvferry::Peer peer = rank.agent.add_peer(receive(in));
  std::uint64_t bytes = 0;
  std::string transport;
  for (std::uint32_t request = 1; request <= 3; ++request) {
    const kvferry::Bytes ticket = receive(in);
    for (std::int32_t slot : kTo) gpu::scribble(rank.stream, rank.block(slot), kBlockWords);
    kvferry::Import import;
    import.groups = {kvferry::wanted(0, kTo)};
    import.stream = rank.stream;
    auto transfer = rank.agent.import_begin(peer, ticket, import);
    transfer.stream_wait(rank.stream);
    for (std::size_t i = 0; i < kTo.size(); ++i) {
      gpu::check(rank.stream, rank.block(kTo[i]), kBlockWords, request * 100 + static_cast<std::uint32_t>(i), wrong);
    }
    // The stream goes on when the transfer has ended, well or not: only this says which.
    transfer.finish(20s);
    bytes += transfer.query().bytes;
    transport = transfer.query().transport;
  }
  const std::uint32_t bad = gpu::read(rank.stream, wrong);
  std::printf("%llu bytes through %s, %u words wrong\n", static_cast<unsigned long long>(bytes), transport.c_str(), bad);
  send(out, kvferry::Bytes(1));
  gpu::free(wrong);
  return bad == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 4) {  // a child
    const int in = std::stoi(argv[2]), out = std::stoi(argv[3]);
    return std::strcmp(argv[1], "prefill") == 0 ? prefill(in, out) : decode(in, out);
  }
  int to_decode[2], to_prefill[2];
  if (pipe(to_decode) != 0 || pipe(to_prefill) != 0) return 1;
  // Programs of their own: a forked child has no CUDA.
  const auto start = [&](const char* role, int in, int out) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (int fd : {to_decode[0], to_decode[1], to_prefill[0], to_prefill[1]}) {
        if (fd != in && fd != out) close(fd);
      }
      execl("/proc/self/exe", argv[0], role, std::to_string(in).c_str(), std::to_string(out).c_str(), nullptr);
      _exit(127);
    }
    return pid;
  };
  const pid_t children[] = {start("prefill", to_prefill[0], to_decode[1]), start("decode", to_decode[0], to_prefill[1])};
  for (int fd : {to_decode[0], to_decode[1], to_prefill[0], to_prefill[1]}) close(fd);
  int worst = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (code != 0 && worst != kNoDevice) worst = code;
  }
  return worst;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
