// SPDX-License-Identifier: Apache-2.0
#include "paths.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "pair.hpp"

namespace kvferry::tools {

using namespace std::chrono_literals;

namespace {

// A tiny pair that may only use `transport`; moves one block. What the library says about it.
Json try_transport(Child& child, const std::string& transport) {
  Setup setup;
  setup.transports = transport;
  setup.pool_bytes = setup.room_bytes = 1 << 16;
  Json result{{"name", transport}, {"available", false}};
  try {
    const std::vector<std::int32_t> slots{3};
    const auto move = [&](Destination& destination, const Bytes& ticket) {
      destination.pull(ticket, slots.size()).finish(10s);
      destination.compare(slots);
      result["available"] = true;
      result["reason"] = destination.peer().text();
    };
    if (transport == "inproc") {
      Source source(setup);
      Destination destination(setup, source.side().metadata());
      move(destination, source.publish(slots));
      source.settle(10s);
    } else {
      RemoteSource source(child, setup);
      Destination destination(setup, source.metadata());
      move(destination, source.publish(slots));
      source.settle();
    }
  } catch (const std::exception& e) {
    result["available"] = false;
    const std::string text = e.what();
    result["reason"] = text.find("is not known") == std::string::npos
                           ? text
                           : "not in this version of kvferry";
  }
  return result;
}

Json test_memory(Child& child, const std::string& memory) {
  Json result{{"memory", memory}, {"passed", false}};
  try {
    Setup setup;
    setup.memory = memory;
    setup.block_size = 64 << 10;
    setup.workers = 2;
    setup.pool_bytes = setup.room_bytes = 16 << 20;
    RemoteSource source(child, setup);
    Destination destination(setup, source.metadata());
    // Scattered, backwards, the first and the last block among them.
    std::vector<std::int32_t> slots;
    const auto all = static_cast<std::int32_t>(setup.pool_bytes / setup.block_size);
    for (std::int32_t slot = all - 1; slot > 0; slot -= 3) slots.push_back(slot);
    slots.push_back(0);
    destination.clear(slots.size());
    const Transfer transfer = destination.pull(source.publish(slots), slots.size());
    transfer.finish(30s);
    destination.compare(slots);
    source.settle();
    const TransferInfo info = transfer.query();
    result["passed"] = true;
    result["transport"] = std::string(info.transport);
    result["bytes"] = info.bytes;
    result["microseconds"] = static_cast<double>(info.elapsed_ns) / 1e3;
    result["text"] = destination.peer().text();
  } catch (const std::exception& e) {
    result["text"] = e.what();
  }
  return result;
}

}  // namespace

Json transports(Child& child) {
  Json all = Json::array();
  for (const char* name : kTransports) {
    all.push_back(try_transport(child, name));
  }
  return all;
}

Json self_test(Child& child) {
  return Json::array({test_memory(child, "pool"), test_memory(child, "own")});
}

}  // namespace kvferry::tools
