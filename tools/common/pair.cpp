// SPDX-License-Identifier: Apache-2.0
#include "pair.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

kvferry::Agent make_agent(const Setup& setup, const char* name) {
  AgentConfig config;
  config.name = name;
  config.transports = setup.transports;
  config.workers = setup.workers;
  config.spin = std::chrono::microseconds(setup.spin_us);
  config.fingerprint = "kvferry-tools";
  config.listen = setup.listen;
  config.advertise = setup.advertise;
  return kvferry::Agent(config);
}

// One layer, one opaque view, one token a block: slots are blocks.
std::vector<Group> blocks_of(const Pool& pool, std::uint64_t block_size, std::uint64_t bytes) {
  View view;
  view.role = KVF_ROLE_OPAQUE;
  view.element_bits = 8;
  view.bytes_per_head = block_size;
  view.slots = static_cast<std::uint32_t>(bytes / block_size);
  view.tensors = {pool.at(0)};
  view.slot_stride = view.layer_stride = view.token_stride = view.head_stride = block_size;
  Group group;
  group.tokens_per_block = 1;
  group.layers = {0};
  group.views = {view};
  return {group};
}

std::vector<std::uint8_t> as_bytes(const Json& value) { return value.get_binary(); }

}  // namespace

Anonymous::Anonymous(std::uint64_t bytes) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(),
                            "mmap of " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(at);
  std::memset(data_, 0, bytes);
}

Anonymous::Anonymous(Anonymous&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Anonymous& Anonymous::operator=(Anonymous&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Anonymous::~Anonymous() {
  if (data_) munmap(data_, bytes_);
}

Side::Side(const Setup& setup, std::uint64_t bytes, const char* name)
    : agent_(make_agent(setup, name)) {
  if (setup.memory == "pool") {
    pool_ = agent_.host_pool(bytes);
    data_ = pool_.data();
  } else {
    own_ = Anonymous(bytes);
    pool_ = agent_.register_memory(own_.data(), bytes);
    data_ = own_.data();
  }
  const auto begin = std::chrono::steady_clock::now();
  agent_.set_layout(blocks_of(pool_, setup.block_size, bytes));
  engine_ = agent_.engine();
  layout_time_ = std::chrono::steady_clock::now() - begin;
}

int Side::pool_fd() const {
  // The mapping's inode, then the descriptor with the same one.
  std::ifstream maps("/proc/self/maps");
  std::uint64_t inode = 0;
  for (std::string line; inode == 0 && std::getline(maps, line);) {
    std::istringstream fields(line);
    std::uint64_t begin = 0, end = 0;
    char dash = 0;
    std::string permissions, offset, device;
    fields >> std::hex >> begin >> dash >> end >> permissions >> offset >> device >> std::dec;
    const auto at = reinterpret_cast<std::uintptr_t>(data_);
    if (at >= begin && at < end) fields >> inode;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    struct stat status {};
    if (inode != 0 && fstat(fd, &status) == 0 && status.st_ino == inode) return fd;
  }
  throw std::runtime_error("the memfd of the pool is not among this process's descriptors");
}

Source::Source(const Setup& setup) : side_(setup, setup.pool_bytes, "source") {
  auto* words = reinterpret_cast<std::uint64_t*>(side_.data());
  for (std::uint64_t i = 0; i < setup.pool_bytes / 8; ++i) words[i] = pattern(i * 8);
}

Bytes Source::publish(const std::vector<std::int32_t>& slots) {
  publications_.push_back(side_.agent().publish(key(next_++), 0, slots, slots.size()));
  return publications_.back().ticket();
}

kvf_status Source::settle(std::chrono::nanoseconds timeout) {
  kvf_status worst = KVF_OK;
  for (const Publication& publication : publications_) {
    if (const kvf_status status = publication.wait(timeout); status != KVF_OK) worst = status;
  }
  publications_.clear();
  (void)side_.agent().take_events();
  return worst;
}

Destination::Destination(const Setup& setup, const Bytes& source_metadata)
    : block_size_(setup.block_size),
      side_(setup, setup.room_bytes, "dest"),
      peer_(side_.agent().add_peer(source_metadata)) {
  slots_.resize(setup.room_bytes / setup.block_size);
  for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i] = static_cast<std::int32_t>(i);
  if (const kvf_status status = peer_.wait(15s); status != KVF_OK) {
    throw Error(status, peer_.text());
  }
  peer_time_ = std::chrono::steady_clock::now() - begin_;
}

Transfer Destination::pull(const Bytes& ticket, std::size_t blocks) {
  return side_.agent().pull_begin(peer_, ticket, 0, Slots(slots_.data(), blocks));
}

Transfer Destination::pull(const Bytes& ticket, const std::vector<std::int32_t>& to) {
  return side_.agent().pull_begin(peer_, ticket, 0, to);
}

void Destination::clear(std::size_t blocks) {
  std::memset(side_.data(), 0xEE, blocks * block_size_);
}

void Destination::clear(const std::vector<std::int32_t>& to) {
  for (const std::int32_t slot : to) {
    std::memset(side_.data() + static_cast<std::uint64_t>(slot) * block_size_, 0xEE, block_size_);
  }
}

void Destination::compare(const std::vector<std::int32_t>& from) const {
  compare(from, {slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(from.size())});
}

void Destination::compare(const std::vector<std::int32_t>& slots,
                          const std::vector<std::int32_t>& to) const {
  for (std::size_t block = 0; block < slots.size(); ++block) {
    const auto from = static_cast<std::uint64_t>(slots[block]) * block_size_;
    const std::byte* at = side_.data() + static_cast<std::uint64_t>(to[block]) * block_size_;
    for (std::uint64_t i = 0; i < block_size_; i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, at + i, sizeof word);
      if (word != pattern(from + i)) {
        throw std::runtime_error("wrong data: block " + std::to_string(block) + " (slot " +
                                 std::to_string(slots[block]) + " of the source) differs at byte " +
                                 std::to_string(i));
      }
    }
  }
}

RemoteSource::RemoteSource(Child& child, const Setup& setup) : child_(child) {
  const Json reply = child.call({{"do", "open"}, {"setup", setup}}, &pool_fd_);
  metadata_ = as_bytes(reply["metadata"]);
  address_ = reply["address"];
}

RemoteSource::~RemoteSource() {
  try {
    child_.call({{"do", "close"}});
  } catch (const std::exception&) {  // it has gone, which is as good
  }
}

Bytes RemoteSource::publish(const std::vector<std::int32_t>& slots) {
  return as_bytes(child_.call({{"do", "publish"}, {"slots", slots}})["ticket"]);
}

std::vector<Bytes> RemoteSource::publish_each(const std::vector<std::int32_t>& slots) {
  const Json reply = child_.call({{"do", "publish_each"}, {"slots", slots}});
  std::vector<Bytes> tickets;
  for (const Json& ticket : reply["tickets"]) tickets.push_back(as_bytes(ticket));
  return tickets;
}

void RemoteSource::settle() {
  const kvf_status status = child_.call({{"do", "settle"}})["status"];
  if (status != KVF_OK) {
    throw std::runtime_error("the source says that a publication ended with " +
                             std::string(kvf_status_name(status)));
  }
}

int serve_source(int fd, const SourceHook& hook) {
  std::optional<Source> source;
  return answer(fd, [&](const Json& request, int& with) -> Json {
    const std::string what = request["do"];
    if (what == "open") {
      if (hook) hook(nullptr, request);
      source.reset();
      const Setup setup = request["setup"];
      source.emplace(setup);
      if (setup.memory == "pool") with = source->side().pool_fd();
      return {{"metadata", Json::binary(source->side().metadata())},
              {"address", reinterpret_cast<std::uintptr_t>(source->side().data())}};
    }
    if (what == "close") {
      if (hook) hook(nullptr, request);
      source.reset();
      return Json::object();
    }
    if (!source) throw std::runtime_error(what + " before open");
    if (what == "publish") {
      return {{"ticket", Json::binary(source->publish(request["slots"]))}};
    }
    if (what == "publish_each") {
      Json tickets = Json::array();
      for (const std::int32_t slot : request["slots"]) {
        tickets.push_back(Json::binary(source->publish({slot})));
      }
      return {{"tickets", tickets}};
    }
    if (what == "settle") return {{"status", static_cast<std::int32_t>(source->settle(30s))}};
    if (hook) return hook(&*source, request);
    throw std::runtime_error("unknown request " + what);
  });
}

}  // namespace kvferry::tools
