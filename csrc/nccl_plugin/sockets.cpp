#include "nccl_plugin/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

namespace fanfold::nccl_plugin {
namespace {

constexpr int kBacklog = 4096;

void set_option(int descriptor, int level, int name, int value) {
  setsockopt(descriptor, level, name, &value, sizeof value);
}

socklen_t socket_bytes(const sockaddr& address) {
  if (address.sa_family == AF_INET) return sizeof(sockaddr_in);
  if (address.sa_family == AF_INET6) return sizeof(sockaddr_in6);
  return 0;
}

bool is_link_local(const sockaddr& address) {
  if (address.sa_family != AF_INET6) return false;
  sockaddr_in6 full{};
  std::memcpy(&full, &address, sizeof full);
  return IN6_IS_ADDR_LINKLOCAL(&full.sin6_addr);
}

// Lower is better: IPv4 of a real interface, IPv6 of one, then loopback.
int preference(const ifaddrs& candidate) {
  const int family = candidate.ifa_addr->sa_family == AF_INET ? 0 : 1;
  return family + ((candidate.ifa_flags & IFF_LOOPBACK) != 0 ? 2 : 0);
}

Problem choose_interface(const std::string& wanted, Address& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return system_problem("getifaddrs", errno);
  const ifaddrs* best = nullptr;
  std::string names;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    if (socket_bytes(*one->ifa_addr) == 0 || is_link_local(*one->ifa_addr)) continue;
    names += names.empty() ? one->ifa_name : std::string(", ") + one->ifa_name;
    if (!wanted.empty() && wanted != one->ifa_name) continue;
    if (best == nullptr || preference(*one) < preference(*best)) best = one;
  }
  if (best != nullptr) {
    address.socket_bytes = socket_bytes(*best->ifa_addr);
    std::memcpy(address.socket, best->ifa_addr, address.socket_bytes);
  }
  freeifaddrs(all);
  if (best != nullptr) return {};
  return "no interface '" + wanted + "' is up with an address; those that are: " + names +
         "; set interface= in FANFOLD_NCCL_PLUGIN";
}

sockaddr_storage as_socket_address(const Address& address) {
  sockaddr_storage storage{};
  std::memcpy(&storage, address.socket, std::min<size_t>(address.socket_bytes, 32));
  return storage;
}

Socket open_socket(int family) {
  return Socket(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

}  // namespace

void Socket::shut_down() const {
  if (descriptor_ >= 0) shutdown(descriptor_, SHUT_RDWR);
}

void Socket::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Socket::State Socket::send(const std::byte* data, size_t bytes, size_t& moved) const {
  const ssize_t sent = ::send(descriptor_, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) {
    moved += static_cast<size_t>(sent);
    return State::kOpen;
  }
  if (errno == EAGAIN || errno == EINTR) return State::kOpen;
  return errno == EPIPE || errno == ECONNRESET ? State::kEnded : State::kFailed;
}

Socket::State Socket::receive(std::byte* data, size_t bytes, size_t& moved) const {
  if (bytes == 0) return State::kOpen;
  const ssize_t got = recv(descriptor_, data, bytes, MSG_DONTWAIT);
  if (got > 0) {
    moved += static_cast<size_t>(got);
    return State::kOpen;
  }
  if (got == 0) return State::kEnded;
  if (errno == EAGAIN || errno == EINTR) return State::kOpen;
  return errno == ECONNRESET ? State::kEnded : State::kFailed;
}

std::string Address::text() const {
  const sockaddr_storage storage = as_socket_address(*this);
  char name[INET6_ADDRSTRLEN] = "?";
  uint16_t port = 0;
  if (storage.ss_family == AF_INET) {
    sockaddr_in full{};
    std::memcpy(&full, &storage, sizeof full);
    inet_ntop(AF_INET, &full.sin_addr, name, sizeof name);
    port = ntohs(full.sin_port);
  } else if (storage.ss_family == AF_INET6) {
    sockaddr_in6 full{};
    std::memcpy(&full, &storage, sizeof full);
    inet_ntop(AF_INET6, &full.sin6_addr, name, sizeof name);
    port = ntohs(full.sin6_port);
  }
  return std::string(name) + " port " + std::to_string(port);
}

Problem listen_on(const Settings& settings, Listener& listener) {
  listener.settings = settings;
  Address& address = listener.address;
  Problem problem = choose_interface(settings.interface, address);
  if (!problem.empty()) return problem;
  sockaddr_storage storage = as_socket_address(address);
  listener.socket = open_socket(storage.ss_family);
  const int descriptor = listener.socket.descriptor();
  if (descriptor < 0) return system_problem("socket", errno);
  if (bind(descriptor, reinterpret_cast<sockaddr*>(&storage), address.socket_bytes) != 0 ||
      listen(descriptor, kBacklog) != 0) {
    return system_problem("listening at " + address.text(), errno);
  }
  socklen_t bytes = sizeof storage;
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) {
    return system_problem("getsockname", errno);
  }
  std::memcpy(address.socket, &storage, address.socket_bytes);
  if (getrandom(&address.nonce, sizeof address.nonce, 0) != sizeof address.nonce) {
    return system_problem("getrandom", errno);
  }
  address.magic = Address::kMagic;
  // 0: shares no memory with anyone.
  address.host = settings.tcp_only ? 0 : host_identity();
  return {};
}

Problem begin_connect(const Address& address, Socket& socket) {
  if (address.magic != Address::kMagic || address.socket_bytes > sizeof address.socket) {
    return "a rank's handle is not of this plugin; all ranks must load the same plugin";
  }
  const sockaddr_storage storage = as_socket_address(address);
  socket = open_socket(storage.ss_family);
  if (!socket.is_open()) return system_problem("socket", errno);
  const int result = connect(socket.descriptor(), reinterpret_cast<const sockaddr*>(&storage),
                             address.socket_bytes);
  if (result == 0 || errno == EINPROGRESS) return {};
  return system_problem("connecting to " + address.text(), errno);
}

Problem finish_connect(const Address& address, const Socket& socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error == 0) return {};
  return system_problem("connecting to " + address.text(), error) +
         "; its rank may have ended, or a firewall may block the interface: set interface= in "
         "FANFOLD_NCCL_PLUGIN";
}

void make_reliable(const Socket& socket, int64_t timeout_ms) {
  const int descriptor = socket.descriptor();
  set_option(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(descriptor, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT,
             static_cast<int>(std::min<int64_t>(timeout_ms, INT_MAX)));
}

Socket accept_one(const Socket& listener) {
  return Socket(accept4(listener.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

}  // namespace fanfold::nccl_plugin
