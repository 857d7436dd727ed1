// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include <signal.h>

#include <iostream>
#include <stdexcept>

#include "file.hpp"
#include "pair.hpp"
#include "paths.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

Setup setup_at(const Place& place, const std::string& transports) {
  Setup setup;
  setup.transports = transports;
  setup.pool_bytes = setup.room_bytes = 1 << 16;
  setup.listen = place.listen;
  setup.advertise = place.advertise;
  return setup;
}

// {available, reason}: the library's words about a peer through these transports ("" = all).
Json reach(const Place& place, const Bytes& metadata, const std::string& transports,
           std::string* selected) {
  try {
    Side side(setup_at(place, transports), 1 << 16, "info");
    const Peer peer = side.agent().add_peer(metadata);
    const bool ready = peer.wait(15s) == KVF_OK;
    if (selected != nullptr) *selected = peer.query().transport;
    return {{"available", ready}, {"reason", peer.text()}};
  } catch (const Error& e) {
    return {{"available", false}, {"reason", e.what()}};
  }
}

}  // namespace

void serve(const Place& place, const std::string& file) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  Side side(setup_at(place, ""), 1 << 16, "serve");
  const Bytes metadata = side.metadata();
  write_file(file, metadata);
  std::cout << "serving; on the other machine: kvferry-info --peer " << file << std::endl;
  int signal = 0;
  sigwait(&ends, &signal);
}

Json peer(const Place& place, const std::string& file) {
  const std::string read = read_file(file);
  const Bytes metadata(read.begin(), read.end());
  std::string selected;
  const Json all = reach(place, metadata, "", &selected);
  Json each = Json::array();
  for (const char* name : kTransports) {
    Json one = reach(place, metadata, name, nullptr);
    one["name"] = name;
    each.push_back(one);
  }
  return {{"selected", selected.empty() ? Json() : Json(selected)},
          {"text", all["reason"]},
          {"transports", each}};
}

}  // namespace kvferry::tools
