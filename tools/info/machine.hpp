// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "channel.hpp"

namespace kvferry::tools {

// What this machine and this process's limits allow, as far as it matters to kvferry. Sizes are in
// bytes; null = the system does not tell, or there is no limit.
Json machine();

}  // namespace kvferry::tools
