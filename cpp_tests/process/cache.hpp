// One rank's cache for the process tests: an agent, memory of either kind, a layout of one paged
// group with a key and a value view, and bytes that tell where they come from.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <kvferry.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../support/device.hpp"

namespace process_test {

using namespace std::chrono_literals;

// `pool` is device memory when the suite runs on a device (KVF_TEST_MEMORY).
enum class MemoryKind { pool, own, device };

inline bool is_device(MemoryKind kind) {
  return kind == MemoryKind::device || (kind == MemoryKind::pool && kvferry_test::on_device());
}

inline const char* word(MemoryKind kind) {
  if (kind == MemoryKind::device) return "device";
  return kind == MemoryKind::own ? "own" : "pool";
}

inline MemoryKind memory_kind(const std::string& name) {
  if (name == "device") return MemoryKind::device;
  return name == "own" ? MemoryKind::own : MemoryKind::pool;
}

// Numbers of a cache; both sides of a test use the same.
struct Shape {
  std::uint64_t block_bytes = 4096;  // of one view
  std::uint32_t slots = 32;
  std::uint32_t tokens_per_block = 1;
  MemoryKind memory = MemoryKind::pool;

  std::uint64_t view_bytes() const { return block_bytes * slots; }
};

// KVF_TEST_LISTEN, KVF_TEST_ADVERTISE: the address. Deadlines short enough for tests, long enough for a busy machine.
inline kvferry::AgentConfig quick(std::string name) {
  kvferry::AgentConfig config;
  config.name = std::move(name);
  config.fingerprint = "process test";
  config.connect = 5s;
  config.peer_silence = 3s;
  config.heartbeat = 500ms;
  config.lease = 3s;
  config.transfer = 20s;
  if (const char* listen = std::getenv("KVF_TEST_LISTEN")) config.listen = listen;
  if (const char* address = std::getenv("KVF_TEST_ADVERTISE")) config.advertise = address;
  if (std::getenv("KVF_TEST_LOG") != nullptr) {
    config.log_level = KVF_LOG_DEBUG;
    config.log = [name = config.name](std::uint32_t level, const char* text) {
      std::fprintf(stderr, "%s %u %s\n", name.c_str(), level, text);
    };
  }
  return config;
}

// Byte `at` of a view's block in the cache filled with `seed`.
inline unsigned char expected(std::uint32_t seed, std::uint32_t view, std::uint32_t slot,
                              std::uint64_t at) {
  std::uint64_t x = (std::uint64_t{seed} << 48) ^ (std::uint64_t{view} << 40) ^
                    (std::uint64_t{slot} << 24) ^ at;
  x *= 0x9e3779b97f4a7c15ULL;
  return static_cast<unsigned char>(x >> 56);
}

class Cache {
 public:
  Cache(const kvferry::AgentConfig& config, const Shape& shape) : shape_(shape), agent(config) {
    const std::uint64_t bytes = 2 * shape.view_bytes();
    if (is_device(shape.memory)) {
      mirror_ = std::make_unique<kvferry_test::Mirror>(bytes);
      base_ = mirror_->host();
      pool_ = agent.register_device_memory(mirror_->device(), bytes);
    } else if (shape.memory == MemoryKind::pool) {
      pool_ = agent.host_pool(bytes);
      base_ = reinterpret_cast<unsigned char*>(pool_.data());
    } else {
      mapped_ = (bytes + 4095) & ~std::uint64_t{4095};
      void* at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at == MAP_FAILED) throw std::runtime_error("mmap");
      std::memset(at, 0, mapped_);
      base_ = static_cast<unsigned char*>(at);
      pool_ = agent.register_memory(base_, bytes);
    }
    kvferry::Group group;
    group.tokens_per_block = shape.tokens_per_block;
    group.layers = {0};
    for (std::uint32_t v = 0; v < 2; ++v) {
      kvferry::View view;
      view.role = v == 0 ? KVF_ROLE_KEY : KVF_ROLE_VALUE;
      view.element_bits = 8;
      view.bytes_per_head = shape.block_bytes / shape.tokens_per_block;
      view.slots = shape.slots;
      view.slot_stride = shape.block_bytes;
      view.token_stride = view.bytes_per_head;
      view.tensors = {pool_.at(v * shape.view_bytes())};
      group.views.push_back(view);
    }
    agent.set_layout({group});
    engine = agent.engine();
  }
  Cache(const Cache&) = delete;
  ~Cache() {
    if (mapped_ == 0 && !mirror_) return;
    (void)!agent.destroy(10s);
    if (mapped_ != 0) munmap(base_, mapped_);
  }
  kvferry::Pool& pool() { return pool_; }
  // Gives memory of our own back to the system, as an engine may once its pool was released.
  void unmap() {
    munmap(base_, mapped_);
    mapped_ = 0;
  }

  const unsigned char* block(std::uint32_t view, std::uint32_t slot) const {
    return base_ + view * shape_.view_bytes() + slot * shape_.block_bytes;
  }
  void fill(std::uint32_t seed) {
    for (std::uint32_t v = 0; v < 2; ++v) {
      for (std::uint32_t s = 0; s < shape_.slots; ++s) {
        auto* at = const_cast<unsigned char*>(block(v, s));
        for (std::uint64_t i = 0; i < shape_.block_bytes; ++i) at[i] = expected(seed, v, s, i);
      }
    }
    if (mirror_) mirror_->up();
  }
  // Takes the pool back: KVF_OK when its memory may be freed.
  kvf_status unregister(std::chrono::nanoseconds deadline) {
    pool_.unregister_begin(deadline);
    kvf_pool_info info = KVF_POOL_INFO_INIT;
    do {
      std::this_thread::sleep_for(100us);
      kvferry::check(kvf_pool_query(pool_.c(), &info));
    } while (info.status == KVF_IN_PROGRESS);
    return static_cast<kvf_status>(info.status);
  }
  // The first difference between our `slot` and the other side's `source_slot`, or "".
  std::string differs(std::uint32_t slot, std::uint32_t seed, std::uint32_t source_slot) const {
    fetch(slot);
    for (std::uint32_t v = 0; v < 2; ++v) {
      for (std::uint64_t i = 0; i < shape_.block_bytes; ++i) {
        if (block(v, slot)[i] != expected(seed, v, source_slot, i)) {
          return "view " + std::to_string(v) + " slot " + std::to_string(slot) + " byte " +
                 std::to_string(i);
        }
      }
    }
    return "";
  }
  // Whether a slot still has the zeros it was made with.
  bool untouched(std::uint32_t slot) const {
    fetch(slot);
    for (std::uint32_t v = 0; v < 2; ++v) {
      for (std::uint64_t i = 0; i < shape_.block_bytes; ++i) {
        if (block(v, slot)[i] != 0) return false;
      }
    }
    return true;
  }

 private:
  void fetch(std::uint32_t slot) const {
    for (std::uint32_t v = 0; mirror_ && v < 2; ++v) {
      mirror_->down(v * shape_.view_bytes() + slot * shape_.block_bytes, shape_.block_bytes);
    }
  }

  Shape shape_;
  std::unique_ptr<kvferry_test::Mirror> mirror_;
  unsigned char* base_ = nullptr;
  std::uint64_t mapped_ = 0;

 public:
  kvferry::Agent agent;
  kvferry::Engine engine;

 private:
  kvferry::Pool pool_;
};

inline std::string to_hex(const kvferry::Bytes& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (auto b : bytes) {
    text += digits[static_cast<unsigned>(b) >> 4];
    text += digits[static_cast<unsigned>(b) & 15];
  }
  return text;
}

inline kvferry::Bytes from_hex(const std::string& text) {
  auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  kvferry::Bytes bytes(text.size() / 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<kvferry::Bytes::value_type>(digit(text[2 * i]) << 4 |
                                                       digit(text[2 * i + 1]));
  }
  return bytes;
}

}  // namespace process_test
