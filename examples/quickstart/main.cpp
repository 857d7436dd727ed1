// A prefill rank hands a sequence's cache to a decode rank.
#include <kvferry.hpp>

#include <cstdio>
#include <cstring>
using namespace std::chrono_literals;

struct Rank {  // keys and values of 2 layers as [role, layer, block, token, head, element]
  static constexpr std::uint64_t head = 256, token = 8 * head, block = 16 * token, layer = 64 * block;
  kvferry::Agent agent;
  kvferry::Pool pool = agent.host_pool(2 * 2 * layer);
  kvferry::Engine engine;
  Rank() {
    kvferry::View key;
    key.role = KVF_ROLE_KEY, key.slots = 64, key.heads = 8, key.bytes_per_head = head;
    key.slot_stride = block, key.layer_stride = layer;
    key.token_stride = token, key.head_stride = head;
    kvferry::View value = key;
    value.role = KVF_ROLE_VALUE;
    key.tensors = {pool.at(0)}, value.tensors = {pool.at(2 * layer)};
    kvferry::Group group;
    group.tokens_per_block = 16, group.layers = {0, 1}, group.views = {key, value};
    agent.set_layout({group});
    engine = agent.engine();
  }
};

int main() {
  Rank prefill, decode;  // two processes in real life; metadata() crosses once, by any way
  kvferry::Peer peer = decode.agent.add_peer(prefill.engine.metadata());

  // 50 tokens were computed into blocks 3, 9, 4, 60. The ticket travels with the request.
  const std::vector<std::int32_t> from = {3, 9, 4, 60}, to = {0, 1, 2, 3};
  for (int slot : from) std::memset(prefill.pool.data() + slot * Rank::block, slot, Rank::block);
  auto offer = prefill.agent.publish(kvferry::key(/*request=*/1), /*group=*/0, from, /*tokens=*/50);
  auto pull = decode.agent.pull_begin(peer, offer.ticket(), /*group=*/0, to);
  pull.finish(5s);                            // throws unless every byte came under the lease
  if (offer.wait(5s) != KVF_OK) return 1;     // KVF_OK: the source may reuse its blocks
  const auto& info = pull.query();
  const int got = static_cast<int>(decode.pool.data()[to[1] * Rank::block]);
  std::printf("%d bytes through %s, block 1 holds %d\n", int(info.bytes), info.transport, got);
  return got == 9 ? 0 : 1;
}
