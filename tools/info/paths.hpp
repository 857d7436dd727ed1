// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "channel.hpp"

namespace kvferry::tools {

// As in kvf_agent_config, in the order in which they are tried.
inline constexpr const char* kTransports[] = {"inproc", "shm", "unix", "tcp", "ucx", "cuda_ipc"};

// Forces two agents onto each transport and reports what the library says: an array of
// {name, available, reason}.
Json transports(Child& child);

// Moves a pattern between two processes, from a pool of kvferry and from the engine's own memory,
// and compares every byte: an array of {memory, passed, transport, bytes, ...}.
Json self_test(Child& child);

}  // namespace kvferry::tools
