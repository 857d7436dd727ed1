// Some ranks of a shape in a process of their own, driven line by line through standard input; one
// answer line for each command. Ends with its input. Lists are separated by commas.
//
//   rank_program SHAPE [requests] SIDE:RANK ...      requests: by kvferry::CacheTransceiver
//
//   meta SIDE               -> metadata of its ranks of that side, hex
//   engine SIDE HEX,...     -> the engine's metadata, hex (of all ranks of the side, in order)
//   peer SIDE HEX           -> ok: the ranks of SIDE know the other engine
//   round N                 -> ok
//   publish REQUEST         -> tickets of the source ranks that serve it, hex
//   import REQUEST HEX      -> number of destination ranks that began
//   receive REQUEST         -> offers, hex
//   push REQUEST HEX,...    -> ok
//   finish                  -> bytes that came to its destination ranks, as the transfers say
//   release                 -> ok
//   check                   -> bytes compared with what must have been moved, or "differs ..."
#include <sstream>

#include "../support/serve.hpp"
#include "rank.hpp"

using namespace reshard;
using process_test::from_hex;
using process_test::to_hex;

namespace {

std::vector<std::string> split(const std::string& list, char at) {
  std::vector<std::string> items;
  std::istringstream in(list);
  for (std::string item; std::getline(in, item, at);) items.push_back(item);
  return items;
}

class Program {
 public:
  Program(const Shape& shape, const std::vector<std::string>& ranks) {
    bool requests = false;
    for (const auto& name : ranks) {
      if (name == "requests") {
        requests = true;
        continue;
      }
      const auto at = split(name, ':');
      auto& side = sides_[std::stoul(at[0])];
      side.push_back(std::make_unique<Rank>(shape, std::stoul(at[0]),
                                            static_cast<std::uint32_t>(std::stoul(at[1])),
                                            requests));
    }
  }

  std::string run(const std::string& line) {
    std::istringstream in(line);
    std::string command, first, second;
    in >> command >> first >> second;
    if (command == "meta") {
      return each(sides_[std::stoul(first)], [](Rank& r) { return to_hex(r.metadata()); });
    }
    if (command == "engine") {
      std::vector<kvferry::Bytes> all;
      for (const auto& hex : split(second, ',')) all.push_back(from_hex(hex));
      std::string metadata;
      for (auto& rank : sides_[std::stoul(first)]) {
        const auto its = to_hex(rank->engine(all));
        if (!metadata.empty() && its != metadata) return "error the ranks' engines differ";
        metadata = its;
      }
      return metadata;
    }
    if (command == "peer") {
      for (auto& rank : sides_[std::stoul(first)]) rank->peer(from_hex(second));
      return "ok";
    }
    if (command == "round") {
      for (auto& side : sides_) {
        for (auto& rank : side) rank->begin_round(static_cast<std::uint32_t>(std::stoul(first)));
      }
      return "ok";
    }
    if (command == "finish") {
      for (auto& rank : sides_[0]) rank->finish();
      std::uint64_t bytes = 0;
      for (auto& rank : sides_[1]) bytes += rank->finish();
      return std::to_string(bytes);
    }
    if (command == "release") {
      for (auto& rank : sides_[0]) rank->release();
      return "ok";
    }
    if (command == "check") {
      std::uint64_t bytes = 0;
      for (auto& rank : sides_[1]) {
        const auto difference = rank->check();
        if (!difference.empty()) return "differs " + difference;
        bytes += rank->moved();
      }
      return std::to_string(bytes);
    }
    const std::size_t q = std::stoul(first);
    const auto serving = [q](Rank& rank) { return rank.serves(q); };
    if (command == "publish") {
      return each(sides_[0], [&](Rank& r) { return serving(r) ? to_hex(r.publish(q)) : ""; });
    }
    if (command == "receive") {
      return each(sides_[1], [&](Rank& r) { return serving(r) ? to_hex(r.receive(q)) : ""; });
    }
    if (command == "import") {
      int began = 0;
      for (auto& rank : sides_[1]) {
        if (!serving(*rank)) continue;
        rank->import(q, from_hex(second));
        ++began;
      }
      return std::to_string(began);
    }
    if (command == "push") {
      for (auto& rank : sides_[0]) {
        if (!serving(*rank)) continue;
        for (const auto& offer : split(second, ',')) rank->push(q, from_hex(offer));
      }
      return "ok";
    }
    return "error unknown command " + command;
  }

 private:
  using Ranks = std::vector<std::unique_ptr<Rank>>;

  template <class Get>
  static std::string each(Ranks& ranks, Get get) {
    std::string list;
    for (auto& rank : ranks) {
      const std::string item = get(*rank);
      if (!item.empty()) list += (list.empty() ? "" : ",") + item;
    }
    return list;
  }

  Ranks sides_[2];
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  return kvferry_test::serve_lines([&] { return Program(shape(argv[1]), {argv + 2, argv + argc}); });
}
