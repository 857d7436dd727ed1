// The request level of kvferry as the service's two schedulers use it: kvferry::CacheTransceiver in
// the engine's words.
#pragma once

#include "handoff.hpp"

#include <chrono>
#include <string>
#include <vector>

namespace disagg {

// One line of a status call.
struct Ended {
  Key key;
  bool ended = false;  // false: a request that was reported before is safe only now
  bool done = false;
  std::string outcome;
  bool memory_safe = false;
  std::uint64_t bytes = 0;
  double seconds = 0;  // from the request's call to its attested end
};

// A rank with a transceiver; errors are exceptions. Any thread may call `interrupt`.
class RequestSide : public Handoff {
 public:
  RequestSide(const std::string& name, const Cache& cache);
  ~RequestSide();
  // After `join`.
  void open();
  // Gets ready to read from the other engine; says by which way.
  std::string connect(const std::string& engine_metadata, std::chrono::nanoseconds timeout);

  // Context side: offers a sequence, with its first token; the ticket.
  std::string send(const Key& key, const SequenceSlots& slots, Token first);
  std::vector<Ended> sent(int at_least, std::chrono::nanoseconds timeout);
  // Generation side.
  void receive(const Key& key, const std::string& ticket, const SequenceSlots& slots);
  std::vector<Ended> received(int at_least, std::chrono::nanoseconds timeout);
  Token first_token(const Key& key) const;

  void cancel(const Key& key);
  // Readable while `sent` or `received` has something to give.
  int descriptor() const;
  void interrupt();
  std::string metrics() const;
  std::string records() const;

 private:
  struct Requests;
  std::unique_ptr<Requests> requests_;
};

}  // namespace disagg
