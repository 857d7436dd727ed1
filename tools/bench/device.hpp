// SPDX-License-Identifier: Apache-2.0
// Device memory for the scenario device, straight from the CUDA driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::tools {

// The driver that kvferry uses too, with device 0's primary context current on this thread.
class Driver {
 public:
  // Throws when there is none.
  Driver();
  // As kvf_cuda_info() has it.
  const std::string& text() const noexcept { return text_; }
  // A test double of the driver: what it does takes as long as it likes.
  bool is_double() const noexcept { return double_; }

  std::uint64_t alloc(std::uint64_t bytes) const;
  void free(std::uint64_t memory) const noexcept;
  void upload(std::uint64_t to, const void* from, std::uint64_t bytes) const;
  void download(void* to, std::uint64_t from, std::uint64_t bytes) const;
  // One cuMemcpyDtoDAsync on a stream of its own, and waiting for it.
  void copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) const;

 private:
  template <class Function>
  void find(Function& function, const char* name);

  // CUresult, CUdevice and CUdeviceptr are an int, an int and an unsigned long long.
  using Address = unsigned long long;
  void* library_ = nullptr;
  std::string text_;
  bool double_ = false;
  void* stream_ = nullptr;
  int (*init_)(unsigned) = nullptr;
  int (*retain_)(void**, int) = nullptr;
  int (*set_current_)(void*) = nullptr;
  int (*alloc_)(Address*, std::size_t) = nullptr;
  int (*free_)(Address) = nullptr;
  int (*upload_)(Address, const void*, std::size_t) = nullptr;
  int (*download_)(void*, Address, std::size_t) = nullptr;
  int (*copy_)(Address, Address, std::size_t, void*) = nullptr;
  int (*stream_create_)(void**, unsigned) = nullptr;
  int (*stream_synchronize_)(void*) = nullptr;
};

// Memory of the device.
class DeviceMemory {
 public:
  DeviceMemory(const Driver& driver, std::uint64_t bytes)
      : driver_(driver), base_(driver.alloc(bytes)), bytes_(bytes) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { driver_.free(base_); }

  std::uint64_t base() const noexcept { return base_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  void* pointer() const noexcept { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(base_)); }
  std::vector<std::byte> read() const;

 private:
  const Driver& driver_;
  std::uint64_t base_;
  std::uint64_t bytes_;
};

}  // namespace kvferry::tools
