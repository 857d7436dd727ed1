// The soak's source: a process that does what it is told, line by line, and adds to each answer
// what has ended meanwhile: "ANSWER | NUMBER:STATUS ...".
//
//   meta                       engine metadata, hex
//   peer HEX                   status after waiting for it
//   publish NUMBER KEY VERSION TOKEN_END CLAIM_MS STATE SLOTS   ticket, hex
//   push NUMBER OFFER VERSION TOKEN_END STATE SLOTS             "ok"
//   release NUMBER             "ok"
//   fill VERSION               every slot
//   scribble VERSION SLOTS     "ok"; blocks that are free are used for something else
//   look                       "ok"
//
// VERSION 0 leaves the slots as they are; STATE -1 is none.
#pragma once

#include <iostream>
#include <map>
#include <sstream>

#include "cache.hpp"
#include "store.hpp"

namespace soak {

class Source {
 public:
  explicit Source(const std::string& name) : store_(configure(name)) {}

  std::string answer(const std::string& line) {
    std::string text;
    try {
      text = run(line);
    } catch (const std::exception& e) {
      text = std::string("error ") + e.what();
    }
    text += " |";
    for (const kvf_event& event : store_.agent.take_events()) {
      if (event.kind == KVF_EVENT_PUBLICATION_ENDED) publications_.erase(event.user_data);
      if (event.kind == KVF_EVENT_TRANSFER_ENDED) pushes_.erase(event.user_data);
      if (event.kind == KVF_EVENT_PUBLICATION_ENDED || event.kind == KVF_EVENT_TRANSFER_ENDED) {
        text += " " + std::to_string(event.user_data) + ":" + std::to_string(event.status);
      }
    }
    return text;
  }

 private:
  std::string run(const std::string& line) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "meta") return process_test::to_hex(store_.engine.metadata());
    if (command == "look") return "ok";
    if (command == "fill") {
      std::uint64_t version = 0;
      in >> version;
      for (std::uint32_t slot = 0; slot < kBlocks; ++slot) store_.fill_block(slot, {version, slot});
      for (std::uint32_t slot = 0; slot < kStates; ++slot) store_.fill_state(slot, {version, slot});
      return "ok";
    }
    if (command == "scribble") {
      std::uint64_t version = 0;
      in >> version;
      for (std::uint32_t slot = 0; in >> slot;) store_.fill_block(slot, {version, slot});
      return "ok";
    }
    if (command == "peer") {
      std::string hex;
      in >> hex;
      peer_ = store_.agent.add_peer(process_test::from_hex(hex));
      return kvf_status_name(peer_.wait(20s));
    }
    std::uint64_t number = 0;
    in >> number;
    if (command == "release") {
      const auto at = publications_.find(number);
      if (at != publications_.end()) at->second.release();
      return "ok";
    }
    if (command == "publish") {
      kvferry::Offer offer;
      std::uint64_t key = 0, claim = 0;
      Slots slots;
      in >> key >> slots.version >> slots.token_end >> claim;
      read(in, slots);
      offer.key = kvferry::key(key);
      offer.groups = {kvferry::published(0, slots.blocks, 0, slots.token_end)};
      offer.states = states(slots);
      offer.claim = std::chrono::milliseconds(claim);
      offer.user_data = number;
      const auto& made = publications_[number] = store_.agent.publish(offer);
      return process_test::to_hex(made.ticket());
    }
    if (command == "push") {
      kvferry::Push push;
      std::string offer;
      Slots slots;
      in >> offer >> slots.version >> slots.token_end;
      read(in, slots);
      push.groups = {kvferry::published(0, slots.blocks, 0, slots.token_end)};
      push.states = states(slots);
      push.user_data = number;
      pushes_[number] = store_.agent.push_begin(peer_, process_test::from_hex(offer), push);
      return "ok";
    }
    return "unknown command";
  }

  struct Slots {
    std::uint64_t version = 0, token_end = 0;
    std::int32_t state = -1;
    std::vector<std::int32_t> blocks;
  };

  // The slots; filled if they have a version.
  void read(std::istringstream& in, Slots& slots) {
    in >> slots.state;
    for (std::int32_t slot; in >> slot;) slots.blocks.push_back(slot);
    if (slots.version == 0) return;
    for (auto slot : slots.blocks) {
      const auto s = static_cast<std::uint32_t>(slot);
      store_.fill_block(s, {slots.version, s});
    }
    if (slots.state >= 0) {
      const auto s = static_cast<std::uint32_t>(slots.state);
      store_.fill_state(s, {slots.version, s});
    }
  }
  static std::vector<kvf_published_state> states(const Slots& slots) {
    if (slots.state < 0) return {};
    return {{1, slots.state, slots.token_end}};
  }

  Store store_;
  kvferry::Peer peer_;
  std::map<std::uint64_t, kvferry::Publication> publications_;
  std::map<std::uint64_t, kvferry::Transfer> pushes_;
};

inline int source_main(const std::string& name) {
  Source source(name);
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) std::cout << source.answer(line) << std::endl;
  return 0;
}

}  // namespace soak
