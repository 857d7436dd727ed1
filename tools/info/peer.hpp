// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "channel.hpp"

namespace kvferry::tools {

// Where a side of --serve and --peer listens.
struct Place {
  std::string listen, advertise;
};

// Makes an agent, writes its engine's metadata to `file` and waits for SIGINT or SIGTERM.
void serve(const Place& place, const std::string& file);

// Connects to the agent whose metadata is in `file`: what was selected, and what the library says
// of each transport on its own. {selected, text, transports: [{name, available, reason}]}; `selected`
// is null when there is no way.
Json peer(const Place& place, const std::string& file);

}  // namespace kvferry::tools
