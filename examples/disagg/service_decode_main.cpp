// disagg_service_decode: the scheduler of the engine that goes on from caches computed elsewhere. Each
// turn of its loop takes what has come (epoll over its inbox and the transceiver's descriptor), then
// decodes one token of every sequence. Started by disagg_service.
#include "inbox.hpp"
#include "service.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>

#include <sys/epoll.h>

using namespace disagg;

namespace {

struct Running {
  Key key;
  std::vector<Token> prompt, tokens;
  std::uint64_t wanted = 0, prefix = 0, bytes = 0;
  double decodable = 0, seconds = 0;
  Token last = 0;
  std::string outcome;
};

class Scheduler {
 public:
  Scheduler(const RankOptions& options, Channel& channel)
      : channel_(channel), engine_(make_engine(options.engine)), side_("decode", engine_->cache()) {
    engine_->bind(side_.pools());
    introduce(channel, *engine_, side_);
    side_.open();
    const std::string metadata = channel.expect(Kind::connect, kPatience).bytes();
    const std::string why = side_.connect(metadata, std::chrono::seconds(10));
    channel.send(Message(Kind::connected).bytes("").bytes(why));
  }

  void run() {
    Inbox inbox(channel_, [] {});
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (const int fd : {inbox.descriptor(), side_.descriptor()}) {
      epoll_event wanted{};
      wanted.events = EPOLLIN;
      wanted.data.fd = fd;
      if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted) != 0) throw std::runtime_error("epoll_ctl");
    }
    for (bool open = true; open;) {
      epoll_event ready[2];
      const int n = epoll_wait(epoll, ready, 2, decoding_.empty() ? -1 : 0);
      for (int i = 0; i < n; ++i) {
        if (ready[i].data.fd == side_.descriptor()) {
          for (const Ended& e : side_.received(0, {})) ended(e);
        } else {
          std::deque<Message> messages;
          open = inbox.take(messages);
          for (Message& message : messages) handle(message);
        }
      }
      step();
    }
    close(epoll);
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
    if (message.kind() != Kind::go_on) throw std::runtime_error("a message that is not for the decode side");
    Running& r = requests_[key.request];
    r.key = key;
    r.prompt = message.tokens();
    const std::string ticket = message.bytes();
    SequenceShape shape;
    shape.tokens = message.number();
    shape.image_bytes = message.number();
    r.wanted = message.number();
    const SequenceSlots slots = engine_->reserve(key.request, shape, longest_prefix(r));
    for (const GroupSlots& g : slots) r.prefix = std::max(r.prefix, g.skip);
    side_.receive(key, ticket, slots);
  }

  // The resident sequence that begins as this prompt does, and for how long.
  SharedPrefix longest_prefix(const Running& r) const {
    SharedPrefix best;
    for (const auto& [id, other] : requests_) {
      if (other.decodable == 0) continue;
      const auto end = std::mismatch(r.prompt.begin(), r.prompt.end(), other.prompt.begin(), other.prompt.end());
      const auto common = static_cast<std::uint64_t>(end.first - r.prompt.begin());
      if (common > best.tokens) best = {id, common};
    }
    return best;
  }

  void ended(const Ended& e) {
    Running& r = requests_.at(e.key.request);
    if (e.ended) {
      r.outcome = e.outcome;
      r.bytes = e.bytes;
      r.seconds = e.seconds;
    }
    if (e.ended && e.done) {
      if (!engine_->resume(e.key.request)) throw std::runtime_error("the bytes that came are no cache");
      r.decodable = now_seconds();
      r.last = side_.first_token(e.key);
      decoding_.push_back(e.key.request);
    } else if (e.memory_safe) {
      engine_->free(e.key.request);  // not before: late bytes may still come
      answer(r);
    }
  }

  void step() {
    for (const std::uint64_t id : decoding_) {
      Running& r = requests_.at(id);
      r.tokens.push_back(r.last = engine_->decode(id, r.last));
      if (r.tokens.size() == r.wanted) answer(r);  // it stays resident: its prefix serves others
    }
    const auto finished = [this](std::uint64_t id) { return requests_.at(id).tokens.size() == requests_.at(id).wanted; };
    decoding_.erase(std::remove_if(decoding_.begin(), decoding_.end(), finished), decoding_.end());
  }

  void answer(const Running& r) {
    channel_.send(Message(Kind::generated)
                      .number(r.key.request)
                      .bytes(r.outcome)
                      .tokens(r.tokens)
                      .real(r.decodable)
                      .number(r.bytes)
                      .number(r.prefix)
                      .real(r.seconds));
  }

  Channel& channel_;
  std::unique_ptr<Engine> engine_;
  RequestSide side_;
  std::map<std::uint64_t, Running> requests_;
  std::vector<std::uint64_t> decoding_;
};

void serve(const RankOptions& options, Channel& channel) { Scheduler(options, channel).run(); }

}  // namespace

int main(int argc, char** argv) { return run_rank(argc, argv, serve); }
