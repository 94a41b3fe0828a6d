// The stream of bytes between two ranks: over TCP, or through a ring in shared memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "nccl_plugin/sockets.h"

namespace fanfold::nccl_plugin {

// Belongs to the thread of a wire.
class Link {
 public:
  explicit Link(Socket socket) : socket_(std::move(socket)) {}
  virtual ~Link() { socket_.shut_down(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  using State = Socket::State;
  // Moves what fits now, and adds its size to `moved`.
  virtual State send(const std::byte* data, size_t bytes, size_t& moved) {
    return socket_.send(data, bytes, moved);
  }
  virtual State receive(std::byte* data, size_t bytes, size_t& moved) {
    return socket_.receive(data, bytes, moved);
  }

  // For a sleep until `descriptor` has one of these events. 0: do not sleep, for bytes or room have
  // come. `has_output`: the owner has more to send than fits.
  virtual short events_to_sleep(bool has_output);
  int descriptor() const { return socket_.descriptor(); }
  virtual const char* name() const { return "TCP"; }

 protected:
  const Socket& socket() const { return socket_; }

 private:
  Socket socket_;
};

// Two rings in memory that both ranks map. The socket still tells that a peer has ended, and wakes
// a rank that sleeps.
struct SharedRings;

// Memory for the rings, made by the rank that opens the connection.
class RingMemory {
 public:
  RingMemory() = default;
  ~RingMemory();
  RingMemory(RingMemory&& other) noexcept;
  RingMemory& operator=(RingMemory&& other) noexcept;

  Problem create(uint64_t nonce);
  // Maps what the process `pid` of this host has open as `descriptor`, created with `nonce`.
  Problem open(int64_t pid, int descriptor, uint64_t nonce);

  SharedRings* rings() const { return rings_; }
  int descriptor() const { return file_.descriptor(); }

 private:
  Problem map();

  Socket file_;  // owns the descriptor
  SharedRings* rings_ = nullptr;
};

// `side` 0 has created the memory, side 1 has opened it.
std::unique_ptr<Link> shared_link(Socket socket, RingMemory memory, int side);

}  // namespace fanfold::nccl_plugin
