// SPDX-License-Identifier: Apache-2.0
// Header-only C++17 layer over kvferry.h: ownership and exceptions, no logic, no ABI of its own.
// docs/abi.md holds the rules; a comment here says only what C++ adds.
//
// To add an object, give its destroy function a name:
//   using Pool = Handle<kvf_pool, kvf_pool_destroy>;
// and make it with make(): auto pool = make<Pool>(kvf_host_pool_create, agent.get(), &config);
#pragma once

#include <kvferry.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvferry {

// Text of the calling thread's last failed call.
inline std::string last_error() {
  std::string text(kvf_last_error(nullptr, 0), '\0');
  kvf_last_error(text.data(), text.size() + 1);  // the NUL goes where std::string keeps its own
  return text;
}

// A failed call: what is lost (status) and why (what()).
class Error : public std::runtime_error {
 public:
  // Takes the text of the calling thread's last failed call.
  explicit Error(kvf_status status) : Error(status, last_error()) {}
  Error(kvf_status status, const std::string& text)
      : std::runtime_error(std::string(kvf_status_name(status)) + ": " + text), status_(status) {}

  kvf_status status() const noexcept { return status_; }

 private:
  kvf_status status_;
};

// Throws Error for an error and gives states (KVF_IN_PROGRESS, KVF_TIMED_OUT, ...) back.
inline kvf_status check(kvf_status status) {
  if (status < 0) throw Error(status);
  return status;
}

// Calls a _destroy function, whatever it returns.
template <auto Destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* object) const noexcept {
    (void)Destroy(object);
  }
};

// Owns one object of the C interface.
template <typename T, auto Destroy>
using Handle = std::unique_ptr<T, Destroyer<Destroy>>;

// Calls a function whose last parameter is the new object and owns what it made.
template <typename H, typename Create, typename... Args>
H make(Create create, Args&&... args) {
  typename H::pointer object = nullptr;
  check(create(std::forward<Args>(args)..., &object));
  return H(object);
}

}  // namespace kvferry
