// disagg_service: the orchestrator of a small disaggregated service. Requests with common beginnings
// arrive over time, a prefill and a decode engine (a process each) serve them with schedulers of their
// own, one request is cancelled on the way, and every token is compared with a run in one process.
#include "launcher.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <stdexcept>

#include <getopt.h>
#include <poll.h>

using namespace disagg;

namespace {

constexpr char kUsage[] =
    R"(usage: disagg_service [options]
  --requests N       requests that arrive (default 12)
  --tokens N         tokens to generate for each (default 8)
  --gap-ms N         mean time between two arrivals (default 40)
  --hybrid           sliding-window and recurrent-state layers between the others
  --all-metrics      the metrics' histograms and comments, too
)";

struct Options {
  EngineOptions engine;
  std::uint64_t requests = 12, tokens = 8, gap_ms = 40;
  bool all_metrics = false;
};

Options parse(int argc, char** argv) {
  const option known[] = {{"requests", required_argument, nullptr, 'r'}, {"tokens", required_argument, nullptr, 'n'},
                          {"gap-ms", required_argument, nullptr, 'g'},   {"hybrid", no_argument, nullptr, 'h'},
                          {"all-metrics", no_argument, nullptr, 'a'},    {"help", no_argument, nullptr, '?'},
                          {}};
  Options o;
  for (int c; (c = getopt_long(argc, argv, "", known, nullptr)) != -1;) switch (c) {
      case 'r': o.requests = std::clamp(parse_numbers(optarg)[0], 2u, 14u); break;  // all stay in the cache
      case 'n': o.tokens = std::max(parse_numbers(optarg)[0], 1u); break;
      case 'g': o.gap_ms = std::max(parse_numbers(optarg)[0], 1u); break;
      case 'h': o.engine.hybrid = true; break;
      case 'a': o.all_metrics = true; break;
      default: std::fputs(kUsage, stderr); std::exit(2);
    }
  return o;
}

struct Request {
  std::vector<Token> prompt, tokens, expected;
  double arrives = 0, arrived = 0, published = 0, decodable = 0, seconds = 0;
  std::uint64_t bytes = 0, prefix = 0;
  bool cancelled = false, answered = false, released = false;
  std::string generation_outcome, context_outcome;

  bool as_it_should() const {
    if (cancelled) return generation_outcome == "cancelled" && tokens.empty() && context_outcome != "done";
    return generation_outcome == "done" && context_outcome == "done" && tokens == expected;
  }
};

std::string prompt_text(std::uint64_t request) {
  static const char* const systems[] = {
      "You are the harbour master of a busy port. Ships announce themselves with their cargo, their draught "
      "and the hour at which they want to berth. Answer each of them in one short sentence, and name a pier. ",
      "You are a patient translator of old sailing books. Keep the names of the sails and of the ropes as they "
      "are, explain each one when it comes up for the first time, and leave out the captain's opinions. "};
  return systems[request % 2] + ("Request " + std::to_string(request) + ": the tide of hour ") +
         std::to_string(3 + 7 * request % 24) + " brings " + std::to_string(100 + 37 * request) + " tons.";
}

class Service {
 public:
  explicit Service(const Options& options)
      : options_(options), context_("disagg_service_prefill", "prefill", options.engine),
        generation_("disagg_service_decode", "decode", options.engine), engine_(make_engine(options.engine)),
        requests_(options.requests) {
    context_.introduce();
    generation_.introduce();
    generation_.send_all(Message(Kind::connect).bytes(context_.engine_metadata()));
    Message connected = generation_.rank(0).expect(Kind::connected, kPatience);
    connected.bytes();
    why_ = connected.bytes();
    std::mt19937 random(5);
    std::exponential_distribution<double> gap(1000.0 / static_cast<double>(options.gap_ms));
    double at = 0;
    for (std::uint64_t i = 0; i < requests_.size(); ++i) {
      requests_[i].prompt = engine_->tokenize(prompt_text(i));
      requests_[i].arrives = at;
      at += gap(random);
    }
    requests_[requests_.size() / 2].cancelled = true;
  }

  void run() {
    const double start = now_seconds(), give_up = start + 240;
    std::uint64_t next = 0;
    const auto over = [](const Request& r) { return r.answered && r.released; };
    while (!std::all_of(requests_.begin(), requests_.end(), over)) {
      if (now_seconds() > give_up) throw std::runtime_error("the service has not answered within 240 s");
      int wait_ms = 1000;
      if (next < requests_.size()) {
        const double left = start + requests_[next].arrives - now_seconds();
        if (left <= 0) {
          arrive(next++);
          continue;
        }
        wait_ms = static_cast<int>(std::ceil(left * 1e3));
      }
      Channel* channels[] = {&context_.rank(0), &generation_.rank(0)};
      pollfd ready[] = {{channels[0]->descriptor(), POLLIN, 0}, {channels[1]->descriptor(), POLLIN, 0}};
      if (poll(ready, 2, wait_ms) <= 0) continue;
      for (int i = 0; i < 2; ++i)
        if (ready[i].revents != 0) answer(*channels[i]);
    }
    for (EngineProcesses* side : {&context_, &generation_}) {
      side->send_all(Message(Kind::report));
      Message reported = side->rank(0).expect(Kind::reported, kPatience);
      metrics_ += reported.bytes();
      records_ += (side == &context_ ? "context:\n" : "generation:\n") + reported.bytes();
    }
    compare();
  }

  bool passed() const {
    const auto shared = [](const Request& r) { return r.prefix > 0; };
    return std::all_of(requests_.begin(), requests_.end(), [](const Request& r) { return r.as_it_should(); }) &&
           std::any_of(requests_.begin(), requests_.end(), shared);
  }

  void print() const {
    std::printf("\n  %zu requests arrive at a prefill and a decode engine\n\n", requests_.size());
    std::printf("  engine     %s\n  transport  %s\n\n", context_.description().c_str(), why_.c_str());
    std::printf("  %-8s %7s %7s %10s %12s %14s  %-10s %-18s %s\n", "request", "prompt", "shared", "bytes", "transfer us",
                "decodable us", "outcome", "context's", "tokens as in one process");
    std::vector<double> latencies;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      const Request& r = requests_[i];
      const double latency = (r.decodable - r.published) * 1e6;
      if (r.generation_outcome == "done") latencies.push_back(latency);
      const char* verdict = r.cancelled ? "cancelled on the way" : r.tokens == r.expected ? "all equal" : "DIFFERENT";
      std::printf("  %-8zu %7zu %7llu %10llu %12.0f %14.0f  %-10s %-18s %s%s\n", i, r.prompt.size(),
                  static_cast<unsigned long long>(r.prefix), static_cast<unsigned long long>(r.bytes), r.seconds * 1e6,
                  r.generation_outcome == "done" ? latency : 0, r.generation_outcome.c_str(), r.context_outcome.c_str(),
                  verdict, r.as_it_should() ? "" : "  WRONG");
    }
    std::sort(latencies.begin(), latencies.end());
    const auto at = [&](double part) {
      return latencies.empty() ? 0 : latencies[static_cast<std::size_t>(part * static_cast<double>(latencies.size() - 1) + 0.5)];
    };
    std::printf("\n  publish to decodable: p50 %.0f us, p99 %.0f us (%zu requests)\n", at(0.5), at(0.99), latencies.size());
    std::printf("\n  metrics\n");
    std::istringstream lines(metrics_);
    for (std::string line; std::getline(lines, line);)
      if (options_.all_metrics || (line[0] != '#' && line.find("_bucket{") == std::string::npos))
        std::printf("  %s\n", line.c_str());
    std::printf("\n  records\n");
    std::istringstream rows(records_);
    for (std::string line; std::getline(rows, line);) std::printf("  %s\n", line.c_str());
    std::printf(passed() ? "\n  PASSED\n\n" : "\n  FAILED\n\n");
  }

 private:
  void arrive(std::uint64_t i) {
    requests_[i].arrived = now_seconds();
    context_.send_all(Message(Kind::request).number(i).number(0).tokens(requests_[i].prompt));
  }

  void answer(Channel& channel) {
    Message message;
    if (!channel.receive(&message, kPatience)) throw std::runtime_error(channel.peer() + " has ended");
    if (message.kind() == Kind::failed) throw std::runtime_error(channel.peer() + ": " + message.bytes());
    const std::uint64_t i = message.number();
    Request& r = requests_.at(i);
    switch (message.kind()) {
      case Kind::offered: {
        const std::uint64_t attempt = message.number();
        const std::string ticket = message.bytes();
        const std::uint64_t tokens = message.number(), image = message.number();
        r.published = message.real();
        // The client has gone: the cancel reaches the decode side before the request does, and the
        // prefill side hears of it from there.
        if (r.cancelled) generation_.send_all(Message(Kind::cancel).number(i).number(attempt));
        generation_.send_all(Message(Kind::go_on)
                                 .number(i)
                                 .number(attempt)
                                 .tokens(r.prompt)
                                 .bytes(ticket)
                                 .number(tokens)
                                 .number(image)
                                 .number(options_.tokens));
        return;
      }
      case Kind::context_ended:
        r.context_outcome = message.bytes();
        r.released = true;
        return;
      case Kind::generated:
        r.generation_outcome = message.bytes();
        r.tokens = message.tokens();
        r.decodable = message.real();
        r.bytes = message.number();
        r.prefix = message.number();
        r.seconds = message.real();
        r.answered = true;
        return;
      default: throw std::runtime_error(channel.peer() + " sent a message out of turn");
    }
  }

  // The whole engine in this process, with ordinary memory and without kvferry.
  void compare() {
    std::vector<std::vector<std::byte>> memory;
    std::vector<std::byte*> pools;
    for (const std::uint64_t bytes : engine_->cache().pools) pools.push_back(memory.emplace_back(bytes).data());
    engine_->bind(pools);
    for (Request& r : requests_) {
      if (r.cancelled) continue;
      Token token = engine_->prefill(1, r.prompt);
      for (std::uint64_t i = 0; i < options_.tokens; ++i) r.expected.push_back(token = engine_->decode(1, token));
      engine_->free(1);
    }
  }

  const Options options_;
  EngineProcesses context_, generation_;
  std::unique_ptr<Engine> engine_;
  std::vector<Request> requests_;
  std::string why_, metrics_, records_;
};

}  // namespace

int main(int argc, char** argv) {
  ignore_broken_pipes();
  try {
    Service service(parse(argc, argv));
    service.run();
    service.print();
    return service.passed() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "disagg_service: %s\n", e.what());
    return 1;
  }
}
