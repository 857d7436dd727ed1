// A rank in a process of its own, driven line by line through its standard input; one answer line
// for each command. Ends with its input.
//
//   agent_program NAME BLOCK_BYTES SLOTS TOKENS_PER_BLOCK pool|own|device
//
//   meta                                 -> engine metadata, hex
//   fill SEED                            -> ok
//   peer HEX                             -> status after waiting for it
//   publish KEY TOKEN_END SLOTS [CLAIM_MS LEASE_MS]   -> ticket, hex
//   published KEY MS                     -> status after waiting for its end
//   release KEY                          -> ok
//   import HEX SLOTS SKIP DEADLINE_MS    -> number of the transfer
//   wait N MS                            -> status, then memory_safe
//   state N                              -> cause, safe|unsafe, bytes, transport, ms, text; does not wait
//   peerstate MS                         -> status once the peer is lost, at the latest after MS; text
//   metric START                         -> the metric line that starts so, or "none"
//   differs SLOT SEED SOURCE_SLOT        -> first difference or "same"
//   copied                               -> bytes that the CUDA double has copied in this process
//   hold 1|0                             -> ok; whether the double executes nothing of any stream
//   pending                              -> work that the double has not executed
//   unregister MS | drain MS | destroy MS -> status
#include <map>
#include <sstream>
#include <thread>

#include "../support/serve.hpp"
#include "cache.hpp"

using namespace process_test;

namespace {

std::vector<std::int32_t> slots(const std::string& list) {
  std::vector<std::int32_t> all;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, ',');) all.push_back(std::stoi(item));
  return all;
}

class Program {
 public:
  Program(const std::string& name, const Shape& shape) : cache_(quick(name), shape) {}

  std::string run(const std::string& line) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "meta") return to_hex(cache_.engine.metadata());
    if (command == "fill") {
      std::uint32_t seed = 0;
      in >> seed;
      cache_.fill(seed);
      return "ok";
    }
    if (command == "peer") {
      std::string hex;
      in >> hex;
      peer_ = cache_.agent.add_peer(from_hex(hex));
      return name(peer_.wait(10s));
    }
    if (command == "publish") return publish(in);
    if (command == "published") {
      std::uint64_t key = 0, ms = 0;
      in >> key >> ms;
      return name(publications_.at(key).wait(std::chrono::milliseconds(ms)));
    }
    if (command == "release") {
      std::uint64_t key = 0;
      in >> key;
      publications_.at(key).release();
      return "ok";
    }
    if (command == "import") return import(in);
    if (command == "wait") {
      std::size_t number = 0;
      std::uint64_t ms = 0;
      in >> number >> ms;
      const auto status = transfers_.at(number).wait(std::chrono::milliseconds(ms));
      // The outcome may come before the last piece of a copy has stopped.
      const auto quiet_by = std::chrono::steady_clock::now() + 5s;
      while (status != KVF_TIMED_OUT && transfers_[number].query().memory_safe == 0 &&
             std::chrono::steady_clock::now() < quiet_by) {
        std::this_thread::sleep_for(100us);
      }
      return name(status) + (transfers_[number].query().memory_safe != 0 ? " safe" : " unsafe");
    }
    if (command == "state") {
      std::size_t number = 0;
      in >> number;
      const auto info = transfers_.at(number).query();
      const std::string transport = info.transport;
      return name(info.cause) + (info.memory_safe != 0 ? " safe " : " unsafe ") +
             std::to_string(info.bytes) + " " + (transport.empty() ? "-" : transport) + " " +
             std::to_string(info.elapsed_ns / 1000000) + " " + transfers_[number].error_text();
    }
    if (command == "peerstate") {
      std::uint64_t ms = 0;
      in >> ms;
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
      while (peer_.query().status >= 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(2ms);
      }
      return name(peer_.query().status) + " " + peer_.text();
    }
    if (command == "metric") {
      std::string start;
      in >> start;
      std::istringstream text(cache_.agent.metrics_text());
      for (std::string line_; std::getline(text, line_);) {
        if (line_.rfind(start, 0) == 0) return line_;
      }
      return "none";
    }
    if (command == "differs") {
      std::uint32_t slot = 0, seed = 0, source = 0;
      in >> slot >> seed >> source;
      const auto text = cache_.differs(slot, seed, source);
      return text.empty() ? "same" : text;
    }
    if (command == "copied") return std::to_string(kvferry_test::books().copied_bytes);
    if (command == "pending") return std::to_string(kvferry_test::books().pending_work);
    if (command == "hold") {
      int held = 0;
      in >> held;
      const auto name = "kvf_cuda_double_hold_all";
      const auto hold = kvferry_test::Cuda::get().find<decltype(kvf_cuda_double_hold_all)>(name);
      if (hold == nullptr) return "only the double holds streams";
      hold(held);
      return "ok";
    }
    std::uint64_t ms = 0;
    in >> ms;
    if (command == "unregister") return name(cache_.unregister(std::chrono::milliseconds(ms)));
    if (command == "drain") {
      return name(kvf_agent_drain(cache_.agent.c(), ms * 1000000));
    }
    if (command == "destroy") return name(cache_.agent.destroy(std::chrono::milliseconds(ms)));
    return "unknown command " + command;
  }

 private:
  static std::string name(std::int32_t status) { return kvf_status_name(status); }

  std::string publish(std::istringstream& in) {
    std::uint64_t key = 0, end = 0, claim = 0, lease = 0;
    std::string list;
    in >> key >> end >> list >> claim >> lease;
    const auto blocks = slots(list);
    kvferry::Offer offer;
    offer.key = kvferry::key(key);
    offer.groups = {kvferry::published(0, blocks, 0, end)};
    offer.claim = std::chrono::milliseconds(claim);
    offer.lease = std::chrono::milliseconds(lease);
    publications_[key] = cache_.agent.publish(offer);
    return to_hex(publications_[key].ticket());
  }

  std::string import(std::istringstream& in) {
    std::string hex, list;
    std::uint64_t skip = 0, deadline = 0;
    in >> hex >> list >> skip >> deadline;
    const auto blocks = slots(list);
    transfers_.push_back(cache_.agent.pull_begin(peer_, from_hex(hex), 0, blocks, skip,
                                                 KVF_TOKEN_END_ALL,
                                                 std::chrono::milliseconds(deadline)));
    return std::to_string(transfers_.size() - 1);
  }

  Cache cache_;
  kvferry::Peer peer_;
  std::map<std::uint64_t, kvferry::Publication> publications_;
  std::vector<kvferry::Transfer> transfers_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  Shape shape;
  shape.block_bytes = std::stoull(argv[2]);
  shape.slots = static_cast<std::uint32_t>(std::stoul(argv[3]));
  shape.tokens_per_block = static_cast<std::uint32_t>(std::stoul(argv[4]));
  shape.memory = memory_kind(argv[5]);
  return kvferry_test::serve_lines([&] { return Program(argv[1], shape); });
}
