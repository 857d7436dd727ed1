// One rank of a voting engine in a process of its own, driven line by line; one answer line for
// each command. Ends with its input.
//
//   consensus_rank RANK context|generation SILENCE_MS SEED
//
//   agentmeta                    -> this agent's metadata, hex
//   engine HEX...                -> ok
//   transceiver LIMIT_MS         -> ok
//   meta                         -> engine metadata, hex
//   peer HEX                     -> status after waiting for it
//   begin KEY SLOT TICKET|-      -> ok (generation), the ticket (context), or the error's name
//   cancel KEY                   -> status
//   status AT_LEAST MS           -> DECISION RESULTS
//   apply DECISION|-             -> RESULTS, or the error's name
//   record KEY                   -> cause of its end on this rank so far
//   readable MS                  -> yes or no: the transceiver's event fd
//   step DECISION|lead|- [begin KEY SLOT TICKET | cancel KEY]...
//                                -> DECISION RESULTS [ticket]...; random pauses before each part
//
// RESULTS: KEY:kind:outcome:cause:safe:rank of each, joined by commas, or "none"; the rank only of
// what did not succeed, because a success names the rank itself.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <iostream>
#include <random>
#include <sstream>

#include "holder.hpp"

using namespace consensus;

namespace {

std::string name(kvf_status status) { return kvf_status_name(status); }

std::string text(const std::vector<kvf_request_result>& results) {
  std::string all;
  for (const auto& r : results) {
    if (!all.empty()) all += ",";
    all += std::to_string(r.key.request) + ":" +
           (r.kind == KVF_RESULT_ENDED ? "ended" : "safe") + ":" + std::to_string(r.outcome) + ":" +
           name(static_cast<kvf_status>(r.cause)) + ":" + std::to_string(r.memory_safe) + ":" +
           (r.outcome == KVF_OUTCOME_DONE ? "-" : std::to_string(r.rank));
  }
  return all.empty() ? "none" : all;
}

std::string hex(const kvferry::Bytes& bytes) { return bytes.empty() ? "-" : to_hex(bytes); }

class Program {
 public:
  Program(std::uint32_t rank, bool context, std::chrono::milliseconds silence, std::uint32_t seed)
      : rank_(rank),
        context_(context),
        random_(seed * 131 + rank),
        holder_(configure("rank" + std::to_string(rank), silence), world, rank) {}

  std::string run(const std::string& line) {
    std::istringstream in(line);
    const auto command = next<std::string>(in);
    if (command == "agentmeta") return to_hex(holder_.agent.metadata());
    if (command == "engine") {
      std::vector<kvferry::Bytes> all;
      for (std::string one; in >> one;) all.push_back(from_hex(one));
      holder_.engine = holder_.agent.engine(rank_, all);
      return "ok";
    }
    if (command == "transceiver") {
      kvferry::CacheTransceiverConfig config;
      config.consensus = KVF_CONSENSUS_VOTES;
      config.domain = 7;
      config.world = world;
      config.rank = rank_;
      config.context_limit = config.generation_limit =
          std::chrono::milliseconds(next<std::uint64_t>(in));
      transceiver_ = std::make_unique<kvferry::CacheTransceiver>(holder_.agent, holder_.engine,
                                                                 config);
      return "ok";
    }
    if (command == "meta") return to_hex(holder_.engine.metadata());
    if (command == "peer") {
      peer_ = holder_.agent.add_peer(from_hex(next<std::string>(in)));
      return name(peer_.wait(30s));
    }
    if (command == "begin") return begin(in);
    if (command == "cancel") {
      return name(kvf_transceiver_cancel(transceiver_->c(), kvferry::key(next<std::uint64_t>(in))));
    }
    if (command == "status") {
      const auto at_least = next<int>(in);
      const auto statuses = status(at_least, std::chrono::milliseconds(next<int>(in)));
      return hex(statuses.decision) + " " + text(statuses.results);
    }
    if (command == "apply") return text(apply(next<std::string>(in)));
    if (command == "record") {
      const auto record = transceiver_->record(kvferry::key(next<std::uint64_t>(in)));
      return record.ended_ns == 0 ? name(KVF_IN_PROGRESS) : name(static_cast<kvf_status>(record.cause));
    }
    if (command == "readable") {
      pollfd fd{transceiver_->event_fd(), POLLIN, 0};
      return poll(&fd, 1, next<int>(in)) == 1 ? "yes" : "no";
    }
    if (command == "step") return step(in);
    return "unknown command " + command;
  }

 private:
  template <class T>
  static T next(std::istringstream& in) {
    T value{};
    if (!(in >> value)) throw std::runtime_error("a word is missing");
    return value;
  }

  void skew() {
    const auto draw = random_() % 256;
    if (draw < 64) usleep(static_cast<useconds_t>(random_() % 200));
    if (draw == 255) usleep(4000);
  }

  kvferry::TransferStatuses status(int at_least, std::chrono::milliseconds timeout) {
    return context_ ? transceiver_->checkContextTransferStatus(at_least, timeout)
                    : transceiver_->checkGenTransferStatus(at_least, timeout);
  }

  std::vector<kvf_request_result> apply(const std::string& decision) {
    kvferry::Bytes bytes;
    if (decision != "-") bytes = from_hex(decision);
    auto all = transceiver_->apply(bytes);
    for (bool more = all.more; more;) {
      const auto rest = transceiver_->apply({});
      all.results.insert(all.results.end(), rest.results.begin(), rest.results.end());
      more = rest.more;
    }
    return all.results;
  }

  std::string begin(std::istringstream& in) {
    const auto key = next<std::uint64_t>(in);
    const std::vector<std::int32_t> slot = {next<std::int32_t>(in)};
    const auto ticket = next<std::string>(in);
    if (context_) {
      kvferry::Offer offer;
      offer.key = kvferry::key(key);
      offer.groups = {kvferry::published(0, slot, 0, tokens)};
      return to_hex(transceiver_->respondAndSendAsync(offer));
    }
    kvferry::ReceiveRequest request;
    request.key = kvferry::key(key);
    request.peer = &peer_;
    request.ticket = from_hex(ticket);
    request.what.groups = {kvferry::wanted(0, slot)};
    transceiver_->requestAndReceiveAsync(request);
    return "ok";
  }

  std::string step(std::istringstream& in) {
    const auto decision = next<std::string>(in);
    skew();
    std::string answer;
    if (decision == "lead") {
      const auto statuses = status(0, 0ms);
      answer = hex(statuses.decision) + " " + text(statuses.results);
    } else {
      answer = "- " + (decision == "-" ? "none" : text(apply(decision)));
    }
    for (std::string what; in >> what;) {
      skew();
      if (what == "cancel") {
        transceiver_->cancelRequest(kvferry::key(next<std::uint64_t>(in)));
      } else {
        const std::string began = begin(in);
        if (context_) answer += " " + began;
      }
    }
    return answer;
  }

  std::uint32_t rank_;
  bool context_;
  std::mt19937 random_;
  Holder holder_;
  kvferry::Peer peer_;
  std::unique_ptr<kvferry::CacheTransceiver> transceiver_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL); // also when it is stopped
  Program program(static_cast<std::uint32_t>(std::stoul(argv[1])), argv[2] == std::string("context"),
                  std::chrono::milliseconds(std::stoul(argv[3])),
                  static_cast<std::uint32_t>(std::stoul(argv[4])));
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::string answer;
    try {
      answer = program.run(line);
    } catch (const kvferry::Error& e) {
      answer = e.what(); // starts with the status
    } catch (const std::exception& e) {
      answer = e.what();
    }
    std::cout << answer << std::endl;
  }
  return 0;
}
