// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bare.hpp"
#include "bench.hpp"
#include "stream.hpp"

namespace kvferry::tools {

// The source of a run: in the second process; for inproc in this one.
class AnySource {
 public:
  AnySource(const Options& options, Child& child, const Setup& setup);

  const Bytes& metadata() const noexcept { return metadata_; }
  pid_t pid() const noexcept;
  Bytes publish(const Slots& slots);
  std::vector<Bytes> publish_each(const Slots& slots);
  // Throws unless every publication was read to its end.
  void settle();
  // What the transport is compared with: the same blocks out of the same memory.
  std::unique_ptr<Bare> limit(Team& team);

 private:
  const Options& options_;
  Setup setup_;
  std::optional<Source> local_;
  std::optional<RemoteSource> remote_;
  Bytes metadata_;
};

// The second process's part of limit().
SourceHook stream_hook();

}  // namespace kvferry::tools
