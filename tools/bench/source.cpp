// SPDX-License-Identifier: Apache-2.0
#include "source.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace kvferry::tools {

using namespace std::chrono_literals;

AnySource::AnySource(const Options& options, Child& child, const Setup& setup)
    : options_(options), setup_(setup) {
  if (options.transport == "inproc") {
    local_.emplace(setup);
    metadata_ = local_->side().metadata();
  } else {
    remote_.emplace(child, setup);
    metadata_ = remote_->metadata();
  }
}

pid_t AnySource::pid() const noexcept { return remote_ ? remote_->pid() : getpid(); }

Bytes AnySource::publish(const Slots& slots) {
  return local_ ? local_->publish(slots) : remote_->publish(slots);
}

std::vector<Bytes> AnySource::publish_each(const Slots& slots) {
  if (remote_) return remote_->publish_each(slots);
  std::vector<Bytes> tickets;
  for (const std::int32_t slot : slots) tickets.push_back(local_->publish({slot}));
  return tickets;
}

void AnySource::settle() {
  if (remote_) return remote_->settle();
  if (const kvf_status status = local_->settle(30s); status != KVF_OK) {
    throw std::runtime_error(std::string("a publication ended with ") + kvf_status_name(status));
  }
}

std::unique_ptr<Bare> AnySource::limit(Team& team) {
  if (local_) return local_copies(team, local_->side().data(), setup_.block_size);
  std::string family = options_.transport;
  if (family == "ucx") {
    // UCX moves the bytes itself, through whatever it chose: its way decides about the limit.
    const char* lanes = std::getenv("UCX_TLS");
    family = lanes && std::string(lanes).find("tcp") != std::string::npos ? "tcp" : "shm";
  }
  if (family == "shm" && setup_.memory == "pool" && options_.transport == "shm") {
    return mapped_copies(team, remote_->pool_fd(), setup_.pool_bytes, setup_.block_size);
  }
  if (family == "shm") {
    return process_reads(team, remote_->pid(), remote_->address(), setup_.block_size);
  }
  const Json reply = remote_->call({{"do", "stream"}, {"family", family}, {"setup", setup_}});
  return stream_reads(team, family, reply["place"], setup_.block_size, setup_.spin_us);
}

SourceHook stream_hook() {
  auto server = std::make_shared<std::optional<StreamServer>>();
  return [server](Source* source, const Json& request) -> Json {
    server->reset();
    if (!source) return Json::object();
    if (request["do"] != "stream") {
      throw std::runtime_error("unknown request " + request["do"].get<std::string>());
    }
    const Setup setup = request["setup"];
    const std::string family = request["family"];
    server->emplace(family, source->side().data(), setup.pool_bytes, setup.block_size,
                    setup.spin_us);
    return {{"place", (*server)->place()}};
  };
}

}  // namespace kvferry::tools
