// The messages between the orchestrator and the ranks: one pipe each way. They carry prompts, token
// ids, metadata and tickets as opaque bytes, and never cache.
#pragma once

#include "engine.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace disagg {

enum class Kind : std::uint32_t {
  hello = 1,        // rank: metadata, description, prompt tokens of a text
  join,             // orchestrator: every rank's metadata
  joined,           // rank: engine metadata
  connect,          // orchestrator to decode: the prefill engine's metadata
  connected,        // decode: transport, why
  prefill,          // orchestrator to prefill: key, prompt
  republish,        // orchestrator to prefill: the same sequence under another key
  published,        // prefill: ticket, shape, first token, times
  decode,           // orchestrator to decode: key, tickets, shape, first token, count, what to spoil
  decoded,          // decode: tokens, times
  finish,           // orchestrator to prefill: wait for the reader, free the sequence
  finished,         // prefill: how the publication ended
  failed,           // rank: the reason; it exits after this
  // of disagg_service, both ways in no fixed order
  request,          // orchestrator to prefill: key, prompt
  offered,          // prefill: key, ticket, shape, when published, seconds of the prefill
  go_on,            // orchestrator to decode: key, prompt, ticket, shape, tokens to generate
  cancel,           // orchestrator to both: key
  context_ended,    // prefill: key, outcome; the slots are free again
  generated,        // decode: key, outcome, tokens, when decodable, bytes, prefix tokens, seconds
  report,           // orchestrator to both: say how it went
  reported,         // both: metrics, records
};

// What a decode run does to the cache before it goes on from it.
enum class Spoil : std::uint32_t { nothing, flip_a_byte, leave_transfer_out };

// Fields are written and read in the same order; a reader that runs out of bytes throws.
class Message {
 public:
  explicit Message(Kind kind = Kind::failed) : kind_(kind) {}

  Kind kind() const { return kind_; }
  Message& number(std::uint64_t value);
  Message& real(double value);
  Message& bytes(const std::string& value);
  Message& list(const std::vector<std::string>& values);
  Message& tokens(const std::vector<Token>& values);

  std::uint64_t number();
  double real();
  std::string bytes();
  std::vector<std::string> list();
  std::vector<Token> tokens();

 private:
  friend class Channel;
  void take(void* to, std::size_t size);
  Kind kind_;
  std::string body_;
  std::size_t at_ = 0;
};

// A pair of pipes. Throws when the other side has gone or does not answer in time.
class Channel {
 public:
  // Takes ownership of both descriptors; `peer` is for messages.
  Channel(int in, int out, std::string peer) : in_(in), out_(out), peer_(std::move(peer)) {}
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void send(const Message& message);
  // False when the other side has closed the pipe before a message began.
  bool receive(Message* message, std::chrono::milliseconds timeout);
  // A message of this kind. A `failed` message becomes an exception with its text.
  Message expect(Kind kind, std::chrono::milliseconds timeout);
  const std::string& peer() const { return peer_; }
  int descriptor() const { return in_; }

 private:
  bool read_all(void* to, std::size_t size, std::chrono::steady_clock::time_point deadline);
  int in_, out_;
  std::string peer_;
};

// For orchestrators and ranks, which must not be killed by a peer's death.
void ignore_broken_pipes();
// Seconds of the clock that all processes of a machine share.
double now_seconds();

}  // namespace disagg
