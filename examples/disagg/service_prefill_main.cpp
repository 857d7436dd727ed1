// disagg_service_prefill: the scheduler of the engine that computes prompts. Its loop blocks in
// status(1) while publications are in flight and is woken by an end, or by interrupt() when a fresh
// prompt comes. Started by disagg_service.
#include "inbox.hpp"
#include "service.hpp"

#include <map>
#include <stdexcept>

using namespace disagg;

namespace {

class Scheduler {
 public:
  Scheduler(const RankOptions& options, Channel& channel)
      : channel_(channel), engine_(make_engine(options.engine)), side_("prefill", engine_->cache()) {
    engine_->bind(side_.pools());
    introduce(channel, *engine_, side_);
    side_.open();
  }

  void run() {
    Inbox inbox(channel_, [this] { side_.interrupt(); });
    for (std::deque<Message> messages; inbox.take(messages); messages.clear()) {
      for (Message& message : messages) handle(message);
      if (!messages.empty()) {
        report(side_.sent(0, {}));
      } else if (in_flight_ > 0) {
        report(side_.sent(1, std::chrono::seconds(1)));
      } else {
        inbox.wait();  // with nothing in flight a status call returns at once
      }
    }
  }

 private:
  void handle(Message& message) {
    if (message.kind() == Kind::report) {
      channel_.send(Message(Kind::reported).bytes(side_.metrics()).bytes(side_.records()));
      return;
    }
    Key key;
    key.request = message.number();
    key.attempt = static_cast<std::uint32_t>(message.number());
    if (message.kind() == Kind::cancel) return side_.cancel(key);
    if (message.kind() != Kind::request) throw std::runtime_error("a message that is not for the prefill side");
    const double start = now_seconds();
    const Token first = engine_->prefill(key.request, message.tokens());
    SequenceShape shape;
    const SequenceSlots slots = engine_->export_slots(key.request, &shape);
    const double published = now_seconds();
    const std::string ticket = side_.send(key, slots, first);
    ++in_flight_;
    channel_.send(Message(Kind::offered)
                      .number(key.request)
                      .number(key.attempt)
                      .bytes(ticket)
                      .number(shape.tokens)
                      .number(shape.image_bytes)
                      .real(published)
                      .real(published - start));
  }

  void report(const std::vector<Ended>& results) {
    for (const Ended& e : results) {
      if (e.ended) outcomes_[e.key.request] = e.outcome;
      if (!e.memory_safe) continue;  // the slots are still a reader's
      engine_->free(e.key.request);
      --in_flight_;
      channel_.send(Message(Kind::context_ended).number(e.key.request).bytes(outcomes_[e.key.request]));
    }
  }

  Channel& channel_;
  std::unique_ptr<Engine> engine_;
  RequestSide side_;
  std::size_t in_flight_ = 0;
  std::map<std::uint64_t, std::string> outcomes_;
};

void serve(const RankOptions& options, Channel& channel) { Scheduler(options, channel).run(); }

}  // namespace

int main(int argc, char** argv) { return run_rank(argc, argv, serve); }
