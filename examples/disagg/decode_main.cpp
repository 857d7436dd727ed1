// disagg_decode: one rank of the engine that goes on from a cache computed elsewhere. Started by
// disagg_demo, which is the orchestrator at the other end of standard input and output.
#include "rank.hpp"

#include <stdexcept>

using namespace disagg;

namespace {

constexpr SequenceId kSequence = 1;

void serve(const RankOptions& options, Channel& channel) {
  EngineOptions engine_options = options.engine;
  SocketRanks ranks(options.engine.tp_rank + options.engine.pp_rank == 0, options.sockets);
  if (!options.sockets.empty()) engine_options.ranks = &ranks;
  const auto engine = make_engine(engine_options);
  DecodeSide handoff("decode", engine->cache());
  engine->bind(handoff.pools());
  introduce(channel, *engine, handoff);
  const DecodeSide::Path path =
      handoff.connect(channel.expect(Kind::connect, kPatience).bytes(), std::chrono::seconds(10));
  channel.send(Message(Kind::connected).bytes(path.transport).bytes(path.why));

  for (Message message; channel.receive(&message, kPatience);) {
    if (message.kind() != Kind::decode) throw std::runtime_error("a message that is not for the decode side");
    Key key;
    key.request = message.number();
    key.attempt = static_cast<std::uint32_t>(message.number());
    const std::vector<std::string> tickets = message.list();
    SequenceShape shape;
    shape.tokens = message.number();
    shape.image_bytes = message.number();
    Token token = static_cast<Token>(message.number());
    const std::uint64_t count = message.number();
    const auto spoil = static_cast<Spoil>(message.number());

    const SequenceSlots slots = engine->reserve(kSequence, shape);
    // Nothing of an earlier run may help this one.
    const std::uint64_t held = fill(engine->cache(), handoff.pools(), slots, std::byte{0xa5});
    TransferReport report;
    if (spoil != Spoil::leave_transfer_out) {
      report = handoff.pull(key, tickets, slots, std::chrono::seconds(30));
      if (!report.ok) throw std::runtime_error("the transfer failed: " + report.error);
    }
    if (spoil == Spoil::flip_a_byte) {
      const Engine::Fault fault = engine->fault(kSequence);
      *fault.byte ^= fault.mask;
    }
    const double start = now_seconds();
    // An engine that can tell that the bytes are no cache goes on with an empty one.
    const bool accepted = engine->resume(kSequence);
    const double resumed = now_seconds();
    std::vector<Token> tokens;
    double first = resumed;
    for (std::uint64_t i = 0; i < count; ++i) {
      tokens.push_back(token = engine->decode(kSequence, token));
      if (i == 0) first = now_seconds();
    }
    const double end = now_seconds();
    engine->free(kSequence);
    channel.send(Message(Kind::decoded)
                     .tokens(tokens)
                     .number(accepted)
                     .number(held)
                     .number(report.bytes)
                     .real(report.seconds)
                     .bytes(report.transport)
                     .real(resumed - start)
                     .real(first)
                     .real(count > 1 ? (end - first) / static_cast<double>(count - 1) : 0));
  }
}

}  // namespace

int main(int argc, char** argv) { return run_rank(argc, argv, serve); }
