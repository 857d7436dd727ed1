#include "driver.hpp"

#include <poll.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <optional>
#include <random>

#include "remote.hpp"
#include "resources.hpp"

namespace soak {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kWindow = 16;     // handoffs at a time
constexpr std::size_t kBigBlocks = 900; // 14 MiB: several pieces
constexpr std::uint64_t kKeys = 64;     // request ids that are used again and again
constexpr auto kHung = 40s;             // longer than any deadline here

enum class Kind {
  pull,
  push,
  again,    // slots that another publication holds too
  late,     // imported after the claim deadline
  never,    // nobody comes
  decline,
  cancel,   // by us, in mid-copy
  release,  // by the source, in mid-copy
};

struct Job {
  Kind kind = Kind::pull;
  std::size_t source = 0;
  std::uint64_t generation = 0;  // of the source
  Published from;
  std::vector<std::int32_t> to, continuation;
  std::int32_t state = -1;
  std::size_t skipped = 0;  // blocks
  kvferry::Bytes ticket;
  kvferry::Transfer transfer;
  Clock::time_point started = Clock::now(), import_at;
};

class Driver {
 public:
  Driver(std::uint64_t handoffs, std::uint64_t seed)
      : random_(seed), here_(configure("here")), sources_{{here_, "steady"}, {here_, "mortal"}} {
    report_.asked = handoffs;
    held_.resize(kBlocks);
  }

  Report run() {
    const auto started = Clock::now();
    const std::uint64_t every = std::max<std::uint64_t>(1, report_.asked / 400);
    const std::uint64_t life = std::min<std::uint64_t>(2000, std::max<std::uint64_t>(report_.asked / 2, 1));
    std::uint64_t next_sample = every, next_restart = life;
    while (more_to_do() || !jobs_.empty()) {
      while (jobs_.size() < kWindow && more_to_do() && start()) {
      }
      begin_late_ones();
      take_events();
      if (report_.handoffs >= next_restart && next_restart < report_.asked + life) {
        restart();
        next_restart += life;
      }
      if (report_.handoffs >= next_sample && undisturbed()) {
        sample();
        next_sample += every;
      }
      find_hung();
    }
    wait_for_sources();
    finish();
    report_.seconds = std::chrono::duration<double>(Clock::now() - started).count();
    return report_;
  }

 private:
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  bool more_to_do() const {
    return report_.handoffs + jobs_.size() < report_.asked ||
           (report_.handoffs < 2 * report_.asked && (owed_cancels() || owed_expiries()));
  }
  bool owed_cancels() const { return report_.cancels < report_.asked / 100; }
  bool owed_expiries() const { return expiries() < report_.asked / 100; }
  std::uint64_t expiries() const {
    return report_.expiries + sources_[0].expired + sources_[1].expired;
  }

  Kind choose() {
    const auto dice = below(1000);
    if (dice < 20 || (report_.handoffs >= report_.asked && owed_cancels())) return Kind::cancel;
    if (dice < 30) return Kind::release;
    if (dice < 45 || (report_.handoffs >= report_.asked && owed_expiries())) return Kind::late;
    if (dice < 52) return Kind::never;
    if (dice < 57) return Kind::decline;
    if (dice < 107) return Kind::again;
    if (dice < 300) return Kind::push;
    return Kind::pull;
  }

  // False: no room now.
  bool start() {
    Job job;
    job.kind = choose();
    job.source = below(2);
    Remote& source = sources_[job.source];
    job.generation = source.generation;
    const bool big = job.kind == Kind::cancel || job.kind == Kind::release;
    const std::size_t blocks = big ? kBigBlocks : 1 + below(below(4) == 0 ? 32 : 8);
    if (!source.has_room(blocks)) source.ask("look");
    const std::size_t needed = std::max<std::size_t>(blocks, 32) + 2;
    if (!source.has_room(blocks) || free_.size() < needed || free_states_.size() == 0) {
      ::poll(nullptr, 0, 1);
      return false;
    }
    if (job.kind == Kind::again &&
        (source.live().empty() || source.live().begin()->second.blocks.size() > 32)) {
      job.kind = Kind::pull;
    }
    std::uint64_t version = 0;
    if (job.kind == Kind::again) {
      job.from = source.live().begin()->second;
    } else {
      const std::uint64_t tail = below(3) == 0 ? below(kTokens) : 0;
      version = big ? 0 : ++version_;
      job.from = source.take(blocks, !big && below(2) == 0, blocks * kTokens - tail, version);
    }
    const std::size_t n = job.from.blocks.size();
    const bool whole = job.from.tokens == n * kTokens;
    if (!big && below(2) == 0) job.skipped = below(n + (whole ? 1 : 0));
    const auto number = ++number_;
    if (job.kind == Kind::push) {
      take_destination(job);
      push(number, job, version);
    } else {
      publish(number, job, version);
    }
    return true;
  }

  void take_destination(Job& job) {
    job.to = free_.take(job.from.blocks.size());
    job.continuation = free_.take(1 + below(2));
    if (job.from.state >= 0) job.state = free_states_.take(1)[0];
    // What must not change has to be known.
    for (std::size_t i = 0; i < job.skipped; ++i) know(job.to[i]);
    know(job.to.back());  // its last tokens may not be written
    for (auto slot : job.continuation) know(slot);
  }
  void know(std::int32_t slot) {
    auto& held = held_[static_cast<std::size_t>(slot)];
    if (held) return;
    held = Content{++version_, 1u << 31};
    here_.fill_block(static_cast<std::uint32_t>(slot), *held);
  }

  void push(std::uint64_t number, Job& job, std::uint64_t version) {
    ++report_.pushes;
    kvferry::Receive what;
    what.key = kvferry::key(below(kKeys));
    what.groups = {kvferry::wanted(0, job.to, job.skipped * kTokens, job.from.tokens)};
    if (job.state >= 0) what.states = {{1, job.state, job.from.tokens}};
    for (auto slot : job.continuation) what.owned_only.push_back({0, slot});
    what.user_data = number;
    job.transfer = here_.agent.receive_begin(what);
    Remote& source = sources_[job.source];
    source.lives(number, job.from);
    const auto line = "push " + std::to_string(number) + " " +
                      process_test::to_hex(job.transfer.offer()) + " " + std::to_string(version) +
                      " " + std::to_string(job.from.tokens) + " " + Remote::words(job.from);
    jobs_[number] = std::move(job);
    source.ask(line);
  }

  void publish(std::uint64_t number, Job& job, std::uint64_t version) {
    Remote& source = sources_[job.source];
    const bool short_life = job.kind == Kind::late || job.kind == Kind::never;
    source.lives(number, job.from);
    job.ticket = process_test::from_hex(source.ask(
        "publish " + std::to_string(number) + " " + std::to_string(below(kKeys)) + " " +
        std::to_string(version) + " " + std::to_string(job.from.tokens) + " " +
        std::to_string(short_life ? 1 + below(3) : 20000) + " " + Remote::words(job.from)));
    if (job.kind == Kind::never) {
      ++report_.handoffs;
      return;
    }
    if (job.kind == Kind::decline) {
      here_.agent.decline(source.peer, job.ticket, KVF_ERR_LIMIT);
      ++report_.handoffs;
      return;
    }
    take_destination(job);
    if (job.kind == Kind::late) {
      job.import_at = Clock::now() + std::chrono::milliseconds(2 + below(4));
      late_.push_back(number);
      jobs_[number] = std::move(job);
      return;
    }
    jobs_[number] = std::move(job);
    import(number);
    if (jobs_[number].kind == Kind::cancel || jobs_[number].kind == Kind::release) disturb(number);
  }

  void import(std::uint64_t number) {
    Job& job = jobs_[number];
    kvferry::Import what;
    what.groups = {kvferry::wanted(0, job.to, job.skipped * kTokens)};
    if (job.state >= 0) what.states = {{1, job.state, job.from.tokens}};
    for (auto slot : job.continuation) what.owned_only.push_back({0, slot});
    what.user_data = number;
    Remote& source = sources_[job.source];
    job.started = Clock::now();
    job.transfer = here_.agent.import_begin(source.peer, job.ticket, what);
  }

  // Waits until the copy is on its way, then ends it from here or there.
  void disturb(std::uint64_t number) {
    Job& job = jobs_[number];
    while (job.transfer.poll() == KVF_IN_PROGRESS && job.transfer.query().bytes == 0) {
      sched_yield();
    }
    if (job.kind == Kind::cancel) {
      job.transfer.cancel();
    } else {
      Remote& source = sources_[job.source];
      source.ask("release " + std::to_string(number));
      for (int i = 0; i < 20 && source.live().count(number) != 0; ++i) source.ask("look");
      source.scribble(job.from.blocks, ++version_);
    }
  }

  void begin_late_ones() {
    const auto now = Clock::now();
    while (!late_.empty()) {
      const auto at = jobs_.find(late_.front());
      if (at != jobs_.end()) {
        if (at->second.import_at > now) return;
        if (at->second.generation == sources_[at->second.source].generation) {
          Remote& source = sources_[at->second.source];
          source.ask("look");
          source.scribble(at->second.from.blocks, ++version_);
          import(late_.front());
        } else {  // its ticket is of an engine that is gone
          give_back(at->second, false);
          ++report_.handoffs;
          jobs_.erase(at);
        }
      }
      late_.erase(late_.begin());
    }
  }

  void take_events() {
    auto events = here_.agent.take_events();
    if (events.empty() && (jobs_.size() >= kWindow || !more_to_do())) {
      pollfd p{here_.agent.event_fd(), POLLIN, 0};
      ::poll(&p, 1, 1);
      events = here_.agent.take_events();
    }
    for (const auto& event : events) {
      if (event.kind != KVF_EVENT_TRANSFER_ENDED && event.kind != KVF_EVENT_MEMORY_SAFE) continue;
      const auto at = jobs_.find(event.user_data);
      if (at == jobs_.end() || at->second.transfer.query().memory_safe == 0) continue;
      check(at->second);
      jobs_.erase(at);
      ++report_.handoffs;
    }
  }

  void check(Job& job) {
    const auto status = job.transfer.poll();
    const auto info = job.transfer.query();
    if (status == KVF_ERR_CANCELLED && info.bytes > 0 && info.bytes < info.bytes_total) {
      ++report_.cancels;
    }
    report_.expiries += status == KVF_ERR_EXPIRED;
    if (!allowed(job, status)) {
      ++report_.unexpected;
      std::fprintf(stderr, "soak: kind %d ended with %s: %s\n", static_cast<int>(job.kind),
                   kvf_status_name(status), job.transfer.error_text().c_str());
    }
    if (status == KVF_OK) {
      report_.full_hits += job.skipped == job.to.size();
      for (std::size_t i = job.skipped; i < job.to.size(); ++i) {
        const auto slot = static_cast<std::uint32_t>(job.to[i]);
        const std::uint64_t left = job.from.tokens - i * kTokens;
        const auto tokens = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, kTokens));
        wrong(here_.wrong_in_block(slot, job.from.contents[i], tokens,
                                   held_[slot].value_or(Content{})));
      }
      if (job.state >= 0) {
        wrong(here_.wrong_in_state(static_cast<std::uint32_t>(job.state), job.from.state_content));
      }
      report_.bytes += info.bytes;
    }
    // These were never to be written, whatever the outcome.
    for (std::size_t i = 0; i < job.skipped; ++i) unchanged(job.to[i]);
    for (auto slot : job.continuation) unchanged(slot);
    give_back(job, status == KVF_OK);
  }
  void unchanged(std::int32_t slot) {
    const auto s = static_cast<std::uint32_t>(slot);
    wrong(here_.wrong_in_block(s, held_[s].value_or(Content{})));
  }
  void wrong(std::uint64_t bytes) {
    if (bytes != 0 && report_.wrong_bytes == 0) std::fprintf(stderr, "soak: wrong bytes\n");
    report_.wrong_bytes += bytes;
  }

  bool allowed(const Job& job, kvf_status status) const {
    if (status == KVF_OK) return true;  // the bytes are checked
    if (job.generation != sources_[job.source].generation) {
      return status == KVF_ERR_PEER_LOST || status == KVF_ERR_TRANSFER ||
             status == KVF_ERR_EXPIRED || status == KVF_ERR_CANCELLED ||
             status == KVF_ERR_CANCELLED_BY_PEER;
    }
    switch (job.kind) {
      case Kind::cancel: return status == KVF_ERR_CANCELLED;
      case Kind::release:
        return status == KVF_ERR_EXPIRED || status == KVF_ERR_CANCELLED_BY_PEER;
      case Kind::late: return status == KVF_ERR_EXPIRED;
      default: return false;
    }
  }

  void give_back(Job& job, bool moved) {
    for (std::size_t i = 0; i < job.to.size(); ++i) {
      auto& held = held_[static_cast<std::size_t>(job.to[i])];
      if (i < job.skipped) continue;
      const bool whole = (i + 1) * kTokens <= job.from.tokens;
      held = moved && whole ? std::optional<Content>(job.from.contents[i]) : std::nullopt;
    }
    free_.give(job.to);
    free_.give(job.continuation);
    if (job.state >= 0) free_states_.give({job.state});
  }

  void restart() {
    Remote& mortal = sources_[1];
    mortal.end(report_.restarts % 2 == 1);
    ++report_.restarts;
    // A receive does not know its sender before it has heard of it: that is for the engine to end.
    for (auto& [number, job] : jobs_) {
      if (job.source == 1 && job.kind == Kind::push) job.transfer.cancel();
    }
    mortal.start();
  }

  // Nothing is being cancelled: whatever is in quarantine now was left there.
  bool undisturbed() const {
    return std::all_of(jobs_.begin(), jobs_.end(), [this](const auto& entry) {
      const Job& job = entry.second;
      return job.kind != Kind::cancel && job.kind != Kind::release &&
             job.generation == sources_[job.source].generation;
    });
  }

  void sample() {
    const auto here = Resources::of(getpid()), there = Resources::of(sources_[0].pid());
    rss_.push_back(static_cast<double>(here.rss_kib + there.rss_kib));
    fds_.push_back(static_cast<double>(here.fds + there.fds));
    quarantine_.push_back(static_cast<double>(here_.agent.quarantine().size()));
  }

  void find_hung() {
    const auto now = Clock::now();
    if (now < look_again_) return;
    look_again_ = now + 100ms;
    for (auto& source : sources_) source.ask("look");
    for (auto at = jobs_.begin(); at != jobs_.end();) {
      if (now - at->second.started < kHung) {
        ++at;
        continue;
      }
      ++report_.hung;
      ++report_.handoffs;
      std::fprintf(stderr, "soak: kind %d hangs\n", static_cast<int>(at->second.kind));
      at = jobs_.erase(at);
    }
  }

  // Every publication must end too.
  void wait_for_sources() {
    const auto until = Clock::now() + kHung;
    const auto live = [this] { return sources_[0].live().size() + sources_[1].live().size(); };
    while (live() > 0 && Clock::now() < until) {
      for (auto& source : sources_) source.ask("look");
      ::poll(nullptr, 0, 5);
    }
    report_.hung += live();
    report_.quarantined = here_.agent.quarantine().size();
  }

  void finish() {
    report_.expiries = expiries();
    for (const auto& source : sources_) report_.declined += source.declined;
    const auto half = [](const std::vector<double>& all) {
      return std::vector<double>(all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2),
                                 all.end());
    };
    report_.rss_slope_percent = slope_percent(half(rss_));
    report_.fds_slope_percent = slope_percent(half(fds_));
    // Of all slots, since there is nothing in it as a rule.
    for (auto& slots : quarantine_) slots += kBlocks;
    report_.quarantine_slope_percent = slope_percent(half(quarantine_));
    for (auto& source : sources_) source.end(true);
  }

  std::mt19937_64 random_;
  Report report_;
  Store here_;
  Remote sources_[2];
  FreeSlots free_{kBlocks}, free_states_{kStates};
  std::vector<std::optional<Content>> held_;  // by our blocks
  std::unordered_map<std::uint64_t, Job> jobs_;
  std::vector<std::uint64_t> late_;
  std::uint64_t number_ = 0, version_ = 1;
  Clock::time_point look_again_{};
  std::vector<double> rss_, fds_, quarantine_;
};

}  // namespace

Report run(std::uint64_t handoffs, std::uint64_t seed) {
  { const kvferry::Agent first; }  // what a process keeps for good after its first agent
  const auto before = Resources::of(getpid());
  Report report = Driver(handoffs, seed).run();
  auto after = Resources::of(getpid());
  for (int i = 0; i < 1000 && (after.fds > before.fds || after.maps > before.maps); ++i) {
    ::poll(nullptr, 0, 10);
    after = Resources::of(getpid());
  }
  report.leaked_fds = after.fds > before.fds ? after.fds - before.fds : 0;
  report.leaked_maps = after.maps > before.maps ? after.maps - before.maps : 0;
  return report;
}

bool Report::good() const {
  return handoffs >= asked && wrong_bytes == 0 && unexpected == 0 && hung == 0 &&
         leaked_fds == 0 && leaked_maps == 0 && quarantined == 0 && rss_slope_percent < 1 &&
         fds_slope_percent < 1 && quarantine_slope_percent < 1 && cancels >= asked / 100 &&
         expiries >= asked / 100 && restarts >= std::max<std::uint64_t>(1, asked / 2000);
}

std::string Report::json() const {
  char text[1024];
  std::snprintf(
      text, sizeof text,
      "{\"handoffs\": %" PRIu64 ", \"wrong_bytes\": %" PRIu64 ", \"hung\": %" PRIu64
      ", \"leaked_fds\": %" PRIu64 ", \"leaked_maps\": %" PRIu64
      ", \"rss_slope_percent\": %.3f, \"cancels\": %" PRIu64 ", \"expiries\": %" PRIu64
      ", \"restarts\": %" PRIu64 ", \"unexpected\": %" PRIu64 ", \"quarantined\": %" PRIu64
      ", \"fds_slope_percent\": %.3f, \"quarantine_slope_percent\": %.3f, \"pushes\": %" PRIu64
      ", \"declined\": %" PRIu64 ", \"full_hits\": %" PRIu64 ", \"bytes\": %" PRIu64
      ", \"seconds\": %.1f}",
      handoffs, wrong_bytes, hung, leaked_fds, leaked_maps, rss_slope_percent, cancels, expiries,
      restarts, unexpected, quarantined, fds_slope_percent, quarantine_slope_percent, pushes,
      declined, full_hits, bytes, seconds);
  return text;
}

std::string Report::text() const {
  std::string lines = json();
  for (auto& c : lines) {
    if (c == ',') c = '\n';
  }
  lines.erase(std::remove_if(lines.begin(), lines.end(),
                             [](char c) { return c == '{' || c == '}' || c == '"'; }),
              lines.end());
  return " " + lines + (good() ? "\n good" : "\n NOT GOOD");
}

}  // namespace soak
