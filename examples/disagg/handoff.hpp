// All that the example does with kvferry. The engines know nothing of it; an engine of your own
// would replace engine.hpp and keep this.
#pragma once

#include "engine.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace disagg {

// A request and which try it is; the orchestrator chooses both.
struct Key {
  std::uint64_t request = 0;
  std::uint32_t attempt = 0;
};

struct TransferReport {
  bool ok = false;
  std::string error;
  std::uint64_t bytes = 0;
  double seconds = 0;  // from begin to the attested outcome
  std::string transport;
};

// One rank's agent, its pools and its layout. Errors are exceptions.
class Handoff {
 public:
  // Makes the agent, one shareable pool per entry of `cache.pools`, and describes the layout.
  Handoff(const std::string& name, const Cache& cache);
  ~Handoff();

  std::vector<std::byte*> pools() const;
  // This rank's metadata; the orchestrator collects all ranks' and gives them to every rank.
  std::string metadata() const;
  void join(const std::vector<std::string>& all_ranks);
  // What the other side needs to know of this engine, sent once.
  std::string engine_metadata() const;

 protected:
  struct Objects;
  std::unique_ptr<Objects> objects_;
};

class PrefillSide : public Handoff {
 public:
  using Handoff::Handoff;
  // Offers a sequence's slots; they must stay as they are until `wait_ended`. Returns the ticket.
  std::string publish(const Key& key, const SequenceSlots& slots);
  // Waits until the reader has everything and the slots may be reused. Says how it ended ("done").
  std::string wait_ended(const Key& key, std::chrono::nanoseconds timeout);
};

class DecodeSide : public Handoff {
 public:
  using Handoff::Handoff;
  struct Path {
    std::string transport;
    std::string why;
  };
  // Gets ready to read from the other engine, and says by which way and why that one.
  Path connect(const std::string& engine_metadata, std::chrono::nanoseconds timeout);
  // Fetches what the tickets (one per source rank) offer into our slots.
  TransferReport pull(const Key& key, const std::vector<std::string>& tickets, const SequenceSlots& slots,
                      std::chrono::nanoseconds timeout);
};

}  // namespace disagg
