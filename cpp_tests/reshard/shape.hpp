// What the reshard tests move: two engines that hold one model in different shapes, and requests.
// Data only; cases.cpp has the table, rank.hpp turns a side into layouts and bytes.
#pragma once

#include <cstdint>
#include <kvferry.hpp>
#include <string>
#include <vector>

namespace reshard {

// Order of a group's tensors; [..] are the axes, outermost first, v the views (key, value, ...).
enum class Form {
  nhd,         // per layer, view after view: [v][B, T, H, d]
  hnd,         // per layer, view after view: [v][B, H, T, d]
  flash,       // per layer: [B, v, T, H, d]
  trtllm,      // [B, L, v, H, T, d]
  trtllm_old,  // [B, v, L, H, T, d]
  megatron,    // [v][L, B, T, H, d]
  per_layer,   // per layer and view, views in two pools by turns, gaps between tensors
  padded,      // as nhd, with unused bytes behind every head, token and block
};

// One view of a group, over all ranks of an engine.
struct Role {
  std::uint32_t role, bits, heads, bytes;
  std::vector<kvferry::Section> sections;  // then `heads` is not used
};

struct Group {
  bool state = false;
  std::vector<std::uint32_t> layers;
  std::vector<Role> roles;
  std::uint32_t window[2] = {0, 0};  // of the source, of the destination
  std::uint32_t block_scale = 1;     // blocks of this group are that much longer
};

struct Side {
  std::uint32_t tp = 1;
  std::vector<std::vector<std::uint32_t>> stages;  // global layers in local order
  std::uint32_t tokens_per_block = 16;
  Form form = Form::nhd;
  std::uint32_t cp = 1, dp = 1;
  bool own_memory = false;       // registered memory of the engine instead of a pool of kvferry's
  bool live_tables = false;      // tables of windows hold the live blocks only
  bool sections_backwards = false;

  std::uint32_t pp() const { return static_cast<std::uint32_t>(stages.size()); }
  std::uint32_t ranks() const { return tp * cp * pp() * dp; }
};

struct Request {
  std::uint32_t tokens;
  std::uint32_t skip = 0;    // tokens that the destination has already
  std::uint32_t wanted = 0;  // tokens that the destination asks for; 0 = all
  std::uint32_t end() const { return wanted != 0 ? wanted : tokens; }
};

// Which ranks share a process.
enum class Place { alone, sides, together };

struct Shape {
  std::string name;
  std::vector<Group> groups;
  Side sides[2];  // source, destination
  std::vector<Request> requests;
  Place place = Place::sides;
  bool push = false;

  // Attention-DP index that serves a request; all pairs come up in turn.
  std::uint32_t dp_of(std::size_t side, std::size_t request) const {
    const std::size_t n = sides[0].dp;
    return static_cast<std::uint32_t>(side == 0 ? request % n
                                                : (request + request / n) % sides[1].dp);
  }
};

const std::vector<Shape>& shapes();

inline const Shape& shape(const std::string& name) {
  for (const Shape& s : shapes()) {
    if (s.name == name) return s;
  }
  throw std::runtime_error("no shape " + name);
}

}  // namespace reshard
