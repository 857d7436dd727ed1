// The memory that a suite's blocks lie in. Suites read and write it only through this class, so
// that they can run on memory that the host cannot touch.
#pragma once

#include <kvferry.hpp>

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.hpp"

namespace kvferry_test {

enum class MemoryKind {
  Pool,  // made by kvferry: peers on the host can map it
  Own,   // the engine's own, registered
  Device,
};

inline std::string name_of(MemoryKind kind) {
  if (kind == MemoryKind::Device) return "Device";
  return kind == MemoryKind::Pool ? "Pool" : "Own";
}

class TestMemory {
 public:
  TestMemory(kvferry::Agent& agent, MemoryKind kind, std::size_t bytes) : bytes_(bytes) {
    // A second run of the suites puts into device memory what would be pools of kvferry.
    if (kind == MemoryKind::Device || (kind == MemoryKind::Pool && on_device())) {
      device_ = std::make_unique<DeviceMemory>(bytes);
      pool_ = agent.register_device_memory(device_->pointer(), bytes);
      return;
    }
    if (kind == MemoryKind::Pool) {
      pool_ = agent.host_pool(bytes);
      base_ = reinterpret_cast<std::uint8_t*>(pool_.data());
      return;
    }
    void* own = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) throw std::runtime_error("mmap failed");
    mapped_ = bytes;
    base_ = static_cast<std::uint8_t*>(own);
    pool_ = agent.register_memory(own, bytes);
  }
  TestMemory(const TestMemory&) = delete;
  TestMemory& operator=(const TestMemory&) = delete;
  ~TestMemory() {
    (void)!pool_.destroy();
    if (mapped_ != 0) munmap(base_, mapped_);
  }

  const kvferry::Pool& pool() const { return pool_; }
  kvferry::Pool& pool() { return pool_; }

  void write(std::size_t offset, const std::vector<std::uint8_t>& data) {
    if (device_) return device_->write(offset, data.data(), data.size());
    std::memcpy(base_ + offset, data.data(), data.size());
  }
  std::vector<std::uint8_t> read(std::size_t offset, std::size_t bytes) const {
    if (device_) {
      std::vector<std::uint8_t> data(bytes);
      device_->read(offset, data.data(), bytes);
      return data;
    }
    return {base_ + offset, base_ + offset + bytes};
  }
  std::vector<std::uint8_t> all() const { return read(0, bytes_); }

  // Bytes that differ from place to place and from seed to seed, none of them 0.
  void fill(std::uint32_t seed) {
    std::vector<std::uint8_t> data(bytes_);
    std::uint32_t x = seed * 2654435761u + 1;
    for (auto& byte : data) {
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
      byte = static_cast<std::uint8_t>(x % 255 + 1);
    }
    write(0, data);
  }

 private:
  std::size_t bytes_;
  std::unique_ptr<DeviceMemory> device_;
  kvferry::Pool pool_;
  std::uint8_t* base_ = nullptr;
  std::size_t mapped_ = 0;
};

}  // namespace kvferry_test
