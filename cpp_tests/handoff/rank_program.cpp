// A rank in a process of its own, driven line by line; one answer line for each command. Ends with
// its input.
//
//   rank_program NAME TIMES MODEL...      (Model::words(); TIMES: see times.hpp)
//
//   agentmeta                             -> this agent's metadata, hex
//   engine RANK HEX...                    -> ok; engine of several ranks
//   meta                                  -> engine metadata, hex
//   fill SEED                             -> ok
//   peer NAME HEX                         -> status after waiting for it
//   lost NAME MS                          -> status once the peer is lost, at the latest after MS
//   publish KEY END SLOTS STATE CLAIM_MS LEASE_MS [TAG]   -> ticket, hex (STATE -1: none)
//   published KEY MS                      -> status after waiting for its end
//   release KEY                           -> ok
//   import PEER TICKET SLOTS SKIP STATE DEADLINE_MS       -> number of the transfer
//   receive KEY SLOTS SKIP END STATE DEADLINE_MS          -> number, offer in hex
//   push PEER OFFER END SLOTS STATE DEADLINE_MS [TAG]     -> number of the transfer
//   hold PEER TICKET                      -> ok
//   decline PEER TICKET                   -> ok, with the cause KVF_ERR_LIMIT
//   wait N MS                             -> status, "safe" or "unsafe" (waits for both)
//   text N                                -> what went wrong, one line
//   cancel N                              -> ok
//   compare SEED FROM TO                  -> "same", or where blocks TO are not the source's FROM
//   digest                                -> a number over the whole memory
//   fault TEXT                            -> ok (library with the feature `testing` only)
//   drain MS                              -> status
#include <dlfcn.h>

#include <map>
#include <sstream>
#include <thread>

#include "../support/serve.hpp"
#include "model.hpp"
#include "times.hpp"

using namespace handoff;
using process_test::from_hex;
using process_test::to_hex;

namespace {

using Milliseconds = std::chrono::milliseconds;

std::vector<std::int32_t> slots(const std::string& list) {
  std::vector<std::int32_t> all;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, ',');) all.push_back(std::stoi(item));
  return all;
}

std::string arm(const std::string& fault) {
  using Fault = kvf_status (*)(const char*);
  const auto set = reinterpret_cast<Fault>(dlsym(RTLD_DEFAULT, "kvf_testing_fault"));
  if (set == nullptr) return "no faults in this build";
  return set(fault.c_str()) == KVF_OK ? "ok" : kvferry::last_error();
}

class Program {
 public:
  Program(const std::string& name, const std::string& times, const Model& model)
      : rank_(configure(name, times), model) {}

  std::string run(const std::string& line) {
    std::istringstream in(line);
    const auto command = next<std::string>(in);
    if (command == "agentmeta") return to_hex(rank_.agent.metadata());
    if (command == "engine") {
      const auto rank = next<std::uint32_t>(in);
      std::vector<kvferry::Bytes> all;
      for (std::string hex; in >> hex;) all.push_back(from_hex(hex));
      rank_.engine = rank_.agent.engine(rank, all);
      return "ok";
    }
    if (command == "meta") return to_hex(rank_.engine.metadata());
    if (command == "fill") {
      rank_.fill(next<std::uint32_t>(in));
      return "ok";
    }
    if (command == "peer") {
      const auto who = next<std::string>(in);
      peers_[who] = rank_.agent.add_peer(from_hex(next<std::string>(in)));
      return name(peers_[who].wait(10s));
    }
    if (command == "lost") {
      const auto& peer = peers_.at(next<std::string>(in));
      const auto until = std::chrono::steady_clock::now() + Milliseconds(next<std::uint64_t>(in));
      while (peer.query().status >= 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(2ms);
      }
      return name(peer.query().status);
    }
    if (command == "publish") return publish(in);
    if (command == "published") {
      const auto key = next<std::uint64_t>(in);
      return name(publications_.at(key).wait(Milliseconds(next<std::uint64_t>(in))));
    }
    if (command == "release") {
      publications_.at(next<std::uint64_t>(in)).release();
      return "ok";
    }
    if (command == "hold" || command == "decline") {
      const auto& peer = peers_.at(next<std::string>(in));
      const auto ticket = from_hex(next<std::string>(in));
      if (command == "hold") {
        rank_.agent.hold(peer, ticket);
      } else {
        rank_.agent.decline(peer, ticket, KVF_ERR_LIMIT);
      }
      return "ok";
    }
    if (command == "import") return import(in);
    if (command == "receive") return receive(in);
    if (command == "push") return push(in);
    if (command == "wait") {
      const auto& transfer = transfers_.at(next<std::size_t>(in));
      const auto until = std::chrono::steady_clock::now() + Milliseconds(next<std::uint64_t>(in));
      const auto status = transfer.wait(until - std::chrono::steady_clock::now());
      while (transfer.query().memory_safe == 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(1ms);
      }
      return name(status) + (transfer.query().memory_safe != 0 ? " safe" : " unsafe");
    }
    if (command == "text") return transfers_.at(next<std::size_t>(in)).error_text();
    if (command == "cancel") {
      transfers_.at(next<std::size_t>(in)).cancel();
      return "ok";
    }
    if (command == "compare") return compare(in);
    if (command == "digest") {
      const auto* data = rank_.data();  // device memory is copied to the host by each call
      std::uint64_t hash = 14695981039346656037ULL;
      for (std::uint64_t i = 0; i + 8 <= rank_.bytes(); i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, data + i, 8);
        hash = (hash ^ word) * 1099511628211ULL;
        hash ^= hash >> 32;
      }
      return std::to_string(hash);
    }
    if (command == "fault") {
      std::string text;
      in >> text;
      return arm(text);
    }
    if (command == "drain") {
      return name(kvf_agent_drain(rank_.agent.c(), next<std::uint64_t>(in) * 1000000));
    }
    return "unknown command " + command;
  }

 private:
  static std::string name(std::int32_t status) { return kvf_status_name(status); }

  template <typename T>
  static T next(std::istringstream& in) {
    T value{};
    if (!(in >> value)) throw std::runtime_error("an argument is missing");
    return value;
  }

  std::vector<kvf_published_state> published_states(std::int32_t slot, std::uint64_t end) const {
    if (slot < 0) return {};
    return {{1, slot, end}, {2, slot, end}};
  }
  std::vector<kvf_import_state> wanted_states(std::int32_t slot) const {
    if (slot < 0) return {};
    return {{1, slot, KVF_AS_OF_ANY}, {2, slot, KVF_AS_OF_ANY}};
  }

  std::string publish(std::istringstream& in) {
    const auto key = next<std::uint64_t>(in), end = next<std::uint64_t>(in);
    const auto blocks = slots(next<std::string>(in));
    kvferry::Offer offer;
    offer.key = kvferry::key(key);
    offer.groups = {kvferry::published(0, blocks, 0, end)};
    offer.states = published_states(next<std::int32_t>(in), end);
    offer.claim = Milliseconds(next<std::uint64_t>(in));
    offer.lease = Milliseconds(next<std::uint64_t>(in));
    in >> offer.prefix_tag;  // stays 0 when there is none
    publications_[key] = rank_.agent.publish(offer);
    return to_hex(publications_[key].ticket());
  }

  std::string import(std::istringstream& in) {
    const auto& peer = peers_.at(next<std::string>(in));
    const auto ticket = from_hex(next<std::string>(in));
    const auto blocks = slots(next<std::string>(in));
    kvferry::Import what;
    what.groups = {kvferry::wanted(0, blocks, next<std::uint64_t>(in))};
    what.states = wanted_states(next<std::int32_t>(in));
    what.deadline = Milliseconds(next<std::uint64_t>(in));
    return add(rank_.agent.import_begin(peer, ticket, what));
  }

  std::string receive(std::istringstream& in) {
    kvferry::Receive what;
    what.key = kvferry::key(next<std::uint64_t>(in));
    const auto blocks = slots(next<std::string>(in));
    const auto skip = next<std::uint64_t>(in), end = next<std::uint64_t>(in);
    what.groups = {kvferry::wanted(0, blocks, skip, end)};
    what.states = wanted_states(next<std::int32_t>(in));
    what.deadline = Milliseconds(next<std::uint64_t>(in));
    auto transfer = rank_.agent.receive_begin(what);
    const auto offer = to_hex(transfer.offer());
    return add(std::move(transfer)) + " " + offer;
  }

  std::string push(std::istringstream& in) {
    const auto& peer = peers_.at(next<std::string>(in));
    const auto offer = from_hex(next<std::string>(in));
    const auto end = next<std::uint64_t>(in);
    const auto blocks = slots(next<std::string>(in));
    kvferry::Push what;
    what.groups = {kvferry::published(0, blocks, 0, end)};
    what.states = published_states(next<std::int32_t>(in), end);
    what.deadline = Milliseconds(next<std::uint64_t>(in));
    in >> what.prefix_tag;
    return add(rank_.agent.push_begin(peer, offer, what));
  }

  std::string add(kvferry::Transfer transfer) {
    transfers_.push_back(std::move(transfer));
    return std::to_string(transfers_.size() - 1);
  }

  std::string compare(std::istringstream& in) {
    const auto seed = next<std::uint32_t>(in);
    const auto from = slots(next<std::string>(in)), to = slots(next<std::string>(in));
    for (std::size_t i = 0; i < from.size(); ++i) {
      for (std::uint32_t view : {kKey, kValue}) {
        const auto text = rank_.slot_differs(seed, view, static_cast<std::uint32_t>(from[i]),
                                             static_cast<std::uint32_t>(to[i]));
        if (!text.empty()) return text;
      }
    }
    return "same";
  }

  Rank rank_;
  std::map<std::string, kvferry::Peer> peers_;
  std::map<std::uint64_t, kvferry::Publication> publications_;
  std::vector<kvferry::Transfer> transfers_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 11) return 2;
  return kvferry_test::serve_lines([&] { return Program(argv[1], argv[2], Model::parse(argv + 3)); });
}
