// One source process as the driver sees it.
#pragma once

#include <memory>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

#include "child.hpp"
#include "source.hpp"

namespace soak {

// Slots that are free, taken at random ends.
class FreeSlots {
 public:
  explicit FreeSlots(std::uint32_t count) {
    for (std::uint32_t s = count; s-- > 0;) free_.push_back(static_cast<std::int32_t>(s));
  }
  std::size_t size() const { return free_.size(); }
  std::vector<std::int32_t> take(std::size_t n) {
    std::vector<std::int32_t> taken(free_.end() - static_cast<std::ptrdiff_t>(n), free_.end());
    free_.resize(free_.size() - n);
    return taken;
  }
  void give(const std::vector<std::int32_t>& slots) {
    free_.insert(free_.begin() + static_cast<std::ptrdiff_t>(free_.size() / 2), slots.begin(),
                 slots.end());
  }

 private:
  std::vector<std::int32_t> free_;
};

// Slots of one publication or push, and what they hold.
struct Published {
  std::vector<std::int32_t> blocks;
  std::int32_t state = -1;
  std::uint64_t tokens = 0;
  std::vector<Content> contents;
  Content state_content;
};

class Remote {
 public:
  Remote(Store& here, const std::string& name) : here_(here), name_(name) { start(); }

  void start() {
    child_ = std::make_unique<process_test::Child>(
        std::vector<std::string>{"/proc/self/exe", "source", name_});
    if (child_->line() != "ready") throw std::runtime_error(name_ + " did not start");
    ask("fill 1");
    contents_.clear();
    for (std::uint32_t s = 0; s < kBlocks; ++s) contents_.push_back({1, s});
    free_ = FreeSlots(kBlocks);
    free_states_ = FreeSlots(kStates);
    live_.clear();
    uses_.assign(kBlocks, 0);
    state_uses_.assign(kStates, 0);
    if (peer) peer.remove();
    peer = here_.agent.add_peer(process_test::from_hex(ask("meta")));
    if (peer.wait(30s) != KVF_OK) throw std::runtime_error(peer.text());
    const auto back = ask("peer " + process_test::to_hex(here_.engine.metadata()));
    if (back != "KVF_OK") throw std::runtime_error(name_ + " to us: " + back);
    ++generation;
  }
  // `cleanly`: its agent says goodbye; else kill -9.
  void end(bool cleanly) {
    if (!cleanly) child_->kill(SIGKILL);
    child_->close_input();
    child_->reap();
  }

  // The answer; what it says about ended publications is noted.
  std::string ask(const std::string& line) {
    const auto answer = child_->ask(line);
    const auto bar = answer.rfind(" |");
    if (bar == std::string::npos) throw std::runtime_error(name_ + " does not answer: " + answer);
    std::istringstream in(answer.substr(bar + 2));
    for (std::string item; in >> item;) {
      const auto colon = item.find(':');
      ended(std::stoull(item.substr(0, colon)), std::stoi(item.substr(colon + 1)));
    }
    const auto text = answer.substr(0, bar);
    if (text.rfind("error", 0) == 0) throw std::runtime_error(name_ + ": " + line + ": " + text);
    return text;
  }

  bool has_room(std::size_t blocks) const {
    return free_.size() >= blocks && free_states_.size() > 0;
  }
  // Slots with a fresh version, or (0) with what they hold.
  Published take(std::size_t blocks, bool state, std::uint64_t tokens, std::uint64_t version) {
    Published p;
    p.blocks = free_.take(blocks);
    p.tokens = tokens;
    for (auto slot : p.blocks) {
      const auto s = static_cast<std::uint32_t>(slot);
      if (version != 0) contents_[s] = {version, s};
      p.contents.push_back(contents_[s]);
    }
    if (state) {
      p.state = free_states_.take(1)[0];
      p.state_content = {version, static_cast<std::uint32_t>(p.state)};
    }
    return p;
  }
  // Writes other content into those of the blocks that no publication holds any more, at once.
  void scribble(const std::vector<std::int32_t>& blocks, std::uint64_t version) {
    std::string text;
    for (auto slot : blocks) {
      const auto s = static_cast<std::uint32_t>(slot);
      if (uses_[s] != 0) continue;
      contents_[s] = {version, s};
      text += " " + std::to_string(slot);
    }
    if (!text.empty()) ask("scribble " + std::to_string(version) + text);
  }
  static std::string words(const Published& p) {
    std::string text = std::to_string(p.state);
    for (auto slot : p.blocks) text += " " + std::to_string(slot);
    return text;
  }
  // Slots may be in several publications; they are free when the last one has ended.
  void lives(std::uint64_t number, const Published& p) {
    for (auto slot : p.blocks) ++uses_[static_cast<std::size_t>(slot)];
    if (p.state >= 0) ++state_uses_[static_cast<std::size_t>(p.state)];
    live_[number] = p;
  }
  const std::unordered_map<std::uint64_t, Published>& live() const { return live_; }
  pid_t pid() const { return child_->pid(); }

  kvferry::Peer peer;
  std::uint64_t expired = 0, declined = 0;
  std::uint64_t generation = 0;

 private:
  void ended(std::uint64_t number, std::int32_t status) {
    expired += status == KVF_ERR_EXPIRED;
    declined += status == KVF_ERR_DECLINED;
    const auto at = live_.find(number);
    if (at == live_.end()) return;
    const Published& p = at->second;
    for (auto slot : p.blocks) {
      if (--uses_[static_cast<std::size_t>(slot)] == 0) free_.give({slot});
    }
    if (p.state >= 0 && --state_uses_[static_cast<std::size_t>(p.state)] == 0) {
      free_states_.give({p.state});
    }
    live_.erase(at);
  }

  Store& here_;
  std::string name_;
  std::unique_ptr<process_test::Child> child_;
  FreeSlots free_{0}, free_states_{0};
  std::vector<std::uint32_t> uses_, state_uses_;
  std::vector<Content> contents_;
  std::unordered_map<std::uint64_t, Published> live_;
};

}  // namespace soak
