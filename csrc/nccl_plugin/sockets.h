// Non-blocking TCP sockets.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "nccl_plugin/abi.h"
#include "nccl_plugin/settings.h"

namespace fanfold::nccl_plugin {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  void close();
  // Ends the connection for the peer, also if a forked child has the descriptor, too.
  void shut_down() const;

  enum class State { kOpen, kEnded, kFailed };
  // Moves what fits now, and adds its size to `moved`. kFailed leaves the reason in errno.
  State send(const std::byte* data, size_t bytes, size_t& moved) const;
  State receive(std::byte* data, size_t bytes, size_t& moved) const;

 private:
  int descriptor_ = -1;
};

// What a rank needs in order to reach a listener: the contents of NCCL's handle.
struct Address {
  uint64_t magic = 0;
  uint64_t nonce = 0;  // of the listener; connections of other programs lack it
  uint64_t host = 0;   // host_identity(); 0: shares no memory
  uint32_t socket_bytes = 0;
  std::byte socket[32] = {};  // a sockaddr_in or sockaddr_in6

  static constexpr uint64_t kMagic = 0x46464e43434c3031;
  std::string text() const;  // "10.0.0.1 port 4711"
};
static_assert(sizeof(Address) <= abi::kHandleBytes);

struct Listener {
  Settings settings;
  Socket socket;
  Address address;
};

// Listens on the interface of the settings, at a free port.
Problem listen_on(const Settings& settings, Listener& listener);

// Begins to connect; the socket is writable when that is done.
Problem begin_connect(const Address& address, Socket& socket);
// The error of a connect that is done.
Problem finish_connect(const Address& address, const Socket& socket);
// A connection that waits to be accepted; closed if none does.
Socket accept_one(const Socket& listener);

// Sends at once, and ends when the peer's host has taken nothing for `timeout_ms`.
void make_reliable(const Socket& socket, int64_t timeout_ms);

}  // namespace fanfold::nccl_plugin
