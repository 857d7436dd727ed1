// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include <signal.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

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

Bytes read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || text.empty()) throw std::runtime_error("cannot read " + path);
  return Bytes(text.begin(), text.end());
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
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(metadata.data()),
            static_cast<std::streamsize>(metadata.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + file);
  std::cout << "serving; on the other machine: kvferry-info --peer " << file << std::endl;
  int signal = 0;
  sigwait(&ends, &signal);
}

Json peer(const Place& place, const std::string& file) {
  const Bytes metadata = read(file);
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
