#include "transport/socket_probe.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace fanfold::transport {

SocketProbe::SocketProbe(std::span<const std::byte> address) {
  sockaddr_storage to{};
  std::memcpy(&to, address.data(), std::min(address.size(), sizeof to));
  descriptor_ = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const bool opened = descriptor_ >= 0;
  const auto bytes = static_cast<socklen_t>(address.size());
  if (opened && connect(descriptor_, reinterpret_cast<const sockaddr*>(&to), bytes) == 0) {
    end(0);
  } else if (!opened || errno != EINPROGRESS) {
    end(errno);
  }
}

SocketProbe::~SocketProbe() { end(0); }

SocketProbe::Answer SocketProbe::end(int error) {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
  return answer_ = error == ECONNREFUSED ? Answer::kRefused : Answer::kOther;
}

SocketProbe::Answer SocketProbe::answer() {
  if (answer_ != Answer::kNone) return answer_;
  pollfd wanted{.fd = descriptor_, .events = POLLOUT, .revents = 0};
  if (poll(&wanted, 1, 0) == 0) return Answer::kNone;
  int error = 0;
  socklen_t bytes = sizeof error;
  getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &bytes);
  return end(error);
}

}  // namespace fanfold::transport
