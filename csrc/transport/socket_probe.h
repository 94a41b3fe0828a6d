// Asks whether anything listens at an address of TCP, without waiting for the answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fanfold::transport {

class SocketProbe {
 public:
  enum class Answer {
    kNone,     // not yet
    kRefused,  // nothing listens there
    kOther,    // something does, or no connection can tell
  };

  // Begins to connect to `address`, a sockaddr_in or sockaddr_in6 as the system lays it out.
  explicit SocketProbe(std::span<const std::byte> address);
  ~SocketProbe();
  SocketProbe(const SocketProbe&) = delete;
  SocketProbe& operator=(const SocketProbe&) = delete;

  Answer answer();

 private:
  Answer end(int error);

  int descriptor_ = -1;
  Answer answer_ = Answer::kNone;
};

}  // namespace fanfold::transport
