// disagg_prefill: one rank of the engine that computes prompts. Started by disagg_demo, which is the
// orchestrator at the other end of standard input and output.
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
  PrefillSide handoff("prefill", engine->cache());
  engine->bind(handoff.pools());
  introduce(channel, *engine, handoff);

  Token first = 0;
  Key key;
  for (Message message; channel.receive(&message, kPatience);) {
    double prefill_seconds = 0;
    switch (message.kind()) {
      case Kind::prefill:
      case Kind::republish: {
        key.request = message.number();
        key.attempt = static_cast<std::uint32_t>(message.number());
        if (message.kind() == Kind::prefill) {
          const std::vector<Token> prompt = message.tokens();
          const double start = now_seconds();
          first = engine->prefill(kSequence, prompt);
          prefill_seconds = now_seconds() - start;
        }
        SequenceShape shape;
        const SequenceSlots slots = engine->export_slots(kSequence, &shape);
        std::uint64_t blocks = 0;
        for (const GroupSlots& g : slots) blocks += g.slots.size();
        const double begin = now_seconds();
        const std::string ticket = handoff.publish(key, slots);
        const double end = now_seconds();
        channel.send(Message(Kind::published)
                         .bytes(ticket)
                         .number(shape.tokens)
                         .number(shape.image_bytes)
                         .number(static_cast<std::uint64_t>(first))
                         .number(blocks)
                         .real(prefill_seconds)
                         .real(begin)
                         .real(end - begin));
        break;
      }
      case Kind::finish: {
        // Only now may the engine touch these slots again.
        const std::string outcome = handoff.wait_ended(key, std::chrono::seconds(30));
        if (message.number() != 0) engine->free(kSequence);
        channel.send(Message(Kind::finished).bytes(outcome));
        break;
      }
      default: throw std::runtime_error("a message that is not for the prefill side");
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return run_rank(argc, argv, serve); }
