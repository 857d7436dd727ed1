// Collective consensus with MPI as the caller's all-gather: every rank schedules itself, and all
// report the same requests in the same iteration. Run it as
//
//   mpirun -n 8 ./mpi_collective [ITERATIONS]
//
// The ranks form the generation engine (tensor-parallel, one head each); rank 0 also plays the
// context engine that they fetch from. kvferry moves the cache, MPI carries the agreement.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <kvferry_transceiver.hpp>
#include <random>

namespace {

constexpr std::uint32_t slots = 32, tokens = 4, head_bytes = 32;
constexpr std::uint64_t window = 8;  // requests in flight

// One paged group of keys; `world` heads cut into `shards`.
struct Cache {
  Cache(const char* name, std::uint32_t world, std::uint32_t shards, std::uint32_t shard)
      : agent([&] {
          kvferry::AgentConfig config;
          config.name = name;
          config.fingerprint = "mpi example";
          return config;
        }()) {
    kvferry::View view;
    view.role = KVF_ROLE_KEY;
    view.heads = world / shards;
    view.bytes_per_head = view.head_stride = head_bytes;
    view.token_stride = std::uint64_t{view.heads} * head_bytes;
    view.slot_stride = tokens * view.token_stride;
    view.slots = slots;
    view.shards = shards;
    view.shard = shard;
    pool = agent.host_pool(slots * view.slot_stride);
    view.tensors = {pool.at(0)};
    kvferry::Group group;
    group.tokens_per_block = tokens;
    group.layers = {0};
    group.views = {view};
    kvferry::Coordinates at;
    at.global_rank = at.tp_rank = shard;
    at.tp_size = shards;
    agent.set_layout({group}, at);
  }
  kvferry::Agent agent;
  kvferry::Pool pool;
};

void must(int code) {
  if (code != MPI_SUCCESS) throw std::runtime_error("MPI");
}

// Rank 0's bytes, on every rank; at most `room` of them.
kvferry::Bytes broadcast(const kvferry::Bytes& bytes, std::size_t room) {
  kvferry::Bytes buffer(sizeof(std::uint64_t) + room);
  std::uint64_t size = bytes.size();
  if (size > room) throw std::runtime_error("too long for a broadcast");
  std::memcpy(buffer.data(), &size, sizeof(size));
  std::copy(bytes.begin(), bytes.end(), buffer.begin() + sizeof(size));
  must(MPI_Bcast(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, 0, MPI_COMM_WORLD));
  std::memcpy(&size, buffer.data(), sizeof(size));
  return {buffer.begin() + sizeof(size), buffer.begin() + static_cast<long>(sizeof(size) + size)};
}

// All ranks' metadata, of different lengths.
std::vector<kvferry::Bytes> gather(const kvferry::Bytes& mine, int world) {
  int size = static_cast<int>(mine.size());
  std::vector<int> sizes(static_cast<std::size_t>(world)), at(sizes.size());
  must(MPI_Allgather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, MPI_COMM_WORLD));
  for (std::size_t i = 1; i < at.size(); ++i) at[i] = at[i - 1] + sizes[i - 1];
  kvferry::Bytes all(static_cast<std::size_t>(at.back() + sizes.back()));
  must(MPI_Allgatherv(mine.data(), size, MPI_BYTE, all.data(), sizes.data(), at.data(), MPI_BYTE,
                      MPI_COMM_WORLD));
  std::vector<kvferry::Bytes> parts;
  for (std::size_t i = 0; i < at.size(); ++i) {
    parts.emplace_back(all.begin() + at[i], all.begin() + at[i] + sizes[i]);
  }
  return parts;
}

int run(int rank, int world, std::uint64_t iterations) {
  const auto shards = static_cast<std::uint32_t>(world), shard = static_cast<std::uint32_t>(rank);
  Cache cache("generation", shards, shards, shard);
  kvferry::Engine engine = cache.agent.engine(shard, gather(cache.agent.metadata(), world));
  std::unique_ptr<Cache> source;
  kvferry::Engine source_engine;
  if (rank == 0) {
    source = std::make_unique<Cache>("context", shards, 1, 0);
    source_engine = source->agent.engine();
  }
  const auto metadata = rank == 0 ? source_engine.metadata() : kvferry::Bytes{};
  kvferry::Peer peer = cache.agent.add_peer(broadcast(metadata, 65536));
  kvferry::check(peer.wait(std::chrono::seconds(30)));

  kvferry::CacheTransceiverConfig config;
  config.consensus = KVF_CONSENSUS_COLLECTIVE;
  config.world = config.tensor_ranks = shards;
  config.rank = shard;
  config.exchange = [](std::uint32_t, const void* mine, void* all, std::size_t bytes) {
    const int n = static_cast<int>(bytes);
    must(MPI_Allgather(mine, n, MPI_BYTE, all, n, MPI_BYTE, MPI_COMM_WORLD));
  };
  kvferry::CacheTransceiver transceiver(cache.agent, engine, config);

  std::mt19937 skew(shard + 1), shared(7);  // the second gives the same on every rank
  std::deque<kvferry::Publication> offered;
  std::uint64_t begun = 0, safe = 0, done = 0, digest = 0;
  for (std::uint64_t i = 0; i < iterations || safe < begun; ++i) {
    if (skew() % 4 == 0) usleep(skew() % 200);
    if (i < iterations && begun - safe < window && shared() % 2 == 0) {
      const std::vector<std::int32_t> slot = {static_cast<std::int32_t>(begun % slots)};
      const kvf_key key = kvferry::key(++begun);
      kvferry::Bytes ticket;
      if (rank == 0) {
        offered.push_back(source->agent.publish(key, 0, slot, tokens));
        ticket = offered.back().ticket();
        if (offered.size() > slots) offered.pop_front();
        (void)source->agent.take_events();
      }
      kvferry::ReceiveRequest request;
      request.key = key;
      request.peer = &peer;
      request.ticket = broadcast(ticket, 1024);
      request.what.groups = {kvferry::wanted(0, slot)};
      transceiver.requestAndReceiveAsync(request);
      if (skew() % 64 == 0) transceiver.cancelRequest(key);  // any rank may
    }
    for (const kvf_request_result& r : transceiver.checkGenTransferStatus(0).results) {
      safe += r.memory_safe;
      done += r.kind == KVF_RESULT_ENDED && r.outcome == KVF_OUTCOME_DONE;
      // What was reported, in which iteration.
      for (std::uint64_t x : {i, r.key.request, std::uint64_t{r.kind}, std::uint64_t{r.outcome}}) {
        digest = (digest ^ x) * 0x100000001b3;
      }
    }
  }
  std::vector<std::uint64_t> all(shards);
  must(MPI_Allgather(&digest, 1, MPI_UINT64_T, all.data(), 1, MPI_UINT64_T, MPI_COMM_WORLD));
  for (std::uint64_t other : all) {
    if (other == digest) continue;
    std::fprintf(stderr, "rank %d differs from another\n", rank);
    return 1;
  }
  if (rank == 0) {
    std::printf("%d ranks reported the same in each of %llu iterations: %llu requests, %llu done\n",
                world, static_cast<unsigned long long>(iterations),
                static_cast<unsigned long long>(begun), static_cast<unsigned long long>(done));
  }
  must(MPI_Barrier(MPI_COMM_WORLD));  // the source is rank 0's
  return done > 0 && done < begun ? 0 : 1;  // some were cancelled
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  int result = 1;
  try {
    result = run(rank, world, argc > 1 ? std::stoull(argv[1]) : 10000);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
  }
  if (result != 0) MPI_Abort(MPI_COMM_WORLD, result);
  MPI_Finalize();
  return result;
}
