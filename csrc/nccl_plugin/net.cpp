// The table of NET: messages between two ranks over TCP, from and to host memory.
//
// NCCL 2.28.9 takes GIN only from the library whose NET it uses, and uses that NET for collectives
// between hosts. Each connection belongs to one thread of NCCL, which drives it by `test`.
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "nccl_plugin/entry.h"

namespace fanfold::nccl_plugin {
namespace {

using abi::Result;
using entry::guarded;

struct Connection;

struct Request {
  Connection* connection = nullptr;
  std::byte* data = nullptr;
  uint64_t bytes = 0;  // of the message; of a receive first those of its memory
  uint64_t moved = 0;
  bool used = false;
  bool done = false;
};

// Messages pass in order; each is its size in 8 bytes, then its bytes.
struct Connection {
  bool sends = false;
  Socket socket;
  Problem problem;
  std::array<Request, abi::kNetRequests> requests;  // used in turn
  size_t begun = 0;
  size_t finished = 0;
  uint64_t size_word = 0;
  size_t size_moved = 0;
};

struct NetListener : Listener {
  // Accepted, and its nonce is not complete: perhaps another program's.
  struct Incoming {
    Socket socket;
    uint64_t nonce = 0;
    size_t got = 0;
  };
  std::vector<Incoming> incoming;
};

Result fail(Connection& connection, const Problem& problem) {
  if (connection.problem.empty()) {
    connection.problem = problem;
    warn(Result::kRemoteError, "a connection of NET fails: " + problem);
  }
  return Result::kRemoteError;
}

// Moves what fits of `bytes`; sets `all` when all have moved.
Result move_some(Connection& connection, std::byte* data, uint64_t bytes, uint64_t& moved,
                 bool& all) {
  size_t now = 0;
  const auto state = connection.sends ? connection.socket.send(data + moved, bytes - moved, now)
                                      : connection.socket.receive(data + moved, bytes - moved, now);
  moved += now;
  all = moved == bytes;
  if (state == Socket::State::kOpen) return Result::kSuccess;
  return fail(connection,
              state == Socket::State::kEnded
                  ? "the peer has ended; look at its output"
                  : system_problem("the socket", errno) + "; check the network between the hosts");
}

Result move_size(Connection& connection, Request& request, bool& all) {
  if (connection.size_moved == 0 && connection.sends) connection.size_word = request.bytes;
  uint64_t moved = connection.size_moved;
  const Result result = move_some(connection, reinterpret_cast<std::byte*>(&connection.size_word),
                                  sizeof connection.size_word, moved, all);
  connection.size_moved = moved;
  if (result != Result::kSuccess || !all || connection.sends || request.moved > 0) return result;
  if (connection.size_word > request.bytes) {
    return fail(connection, "a message of " + std::to_string(connection.size_word) +
                                " bytes meets a receive of " + std::to_string(request.bytes) +
                                " bytes; the ranks disagree on a size");
  }
  request.bytes = connection.size_word;
  return result;
}

Result drive(Connection& connection) {
  if (!connection.problem.empty()) return Result::kRemoteError;
  while (connection.finished < connection.begun) {
    Request& request = connection.requests[connection.finished % abi::kNetRequests];
    bool all = connection.size_moved == sizeof connection.size_word;
    Result result = all ? Result::kSuccess : move_size(connection, request, all);
    if (result != Result::kSuccess || !all) return result;
    all = request.moved == request.bytes;
    if (!all) result = move_some(connection, request.data, request.bytes, request.moved, all);
    if (result != Result::kSuccess || !all) return result;
    request.done = true;
    connection.size_moved = 0;
    ++connection.finished;
  }
  return Result::kSuccess;
}

Result begin(Connection& connection, void* data, uint64_t bytes, void** request) {
  *request = nullptr;
  Request& fresh = connection.requests[connection.begun % abi::kNetRequests];
  if (fresh.used) return drive(connection);  // NCCL tries again
  fresh = {.connection = &connection,
           .data = static_cast<std::byte*>(data),
           .bytes = bytes,
           .moved = 0,
           .used = true,
           .done = false};
  ++connection.begun;
  *request = &fresh;
  return drive(connection);
}

// ---- the table ----

Result init(void** instance, uint64_t /*comm*/, void* /*config*/, abi::Logger logger,
            void* /*profiler*/) {
  return entry::init(instance, logger);
}

Result get_properties(int device, abi::NetProperties11* properties) {
  return guarded("getProperties", [&] {
    // NCCL refuses a NET whose type it does not know; GIN has its own properties.
    entry::describe(*properties, 1, abi::kHostMemory, abi::kDeviceNone);
    return entry::check_device(device);
  });
}

// The peer's kernel completes the connection before the peer accepts it, so this waits for a round
// trip only.
Problem open_connection(const Address& address, Connection& connection) {
  Settings settings;
  Problem problem = read_settings(settings);
  if (problem.empty()) problem = begin_connect(address, connection.socket);
  if (!problem.empty()) return problem;
  pollfd writable{.fd = connection.socket.descriptor(), .events = POLLOUT, .revents = 0};
  const auto most_ms = static_cast<int>(std::min<int64_t>(settings.timeout_ms, 1 << 30));
  int ready = -1;
  while (ready < 0) {
    ready = poll(&writable, 1, most_ms);
    if (ready < 0 && errno != EINTR) return system_problem("poll", errno);
  }
  if (ready == 0) {
    return "connecting to " + address.text() + " takes longer than " + std::to_string(most_ms) +
           " ms; a firewall may block the interface: set interface= in FANFOLD_NCCL_PLUGIN";
  }
  problem = finish_connect(address, connection.socket);
  if (!problem.empty()) return problem;
  make_reliable(connection.socket, settings.timeout_ms);
  size_t sent = 0;
  const auto* nonce = reinterpret_cast<const std::byte*>(&address.nonce);
  // The first bytes of a fresh connection find room.
  if (connection.socket.send(nonce, sizeof address.nonce, sent) != Socket::State::kOpen ||
      sent != sizeof address.nonce) {
    return system_problem("the first send to " + address.text(), errno);
  }
  return {};
}

Result connect(void* /*instance*/, int /*device*/, void* handle, void** sender,
               void** /*device_handle*/) {
  return guarded("connect", [&] {
    Address address;
    std::memcpy(&address, handle, sizeof address);
    auto fresh = std::make_unique<Connection>();
    fresh->sends = true;
    const Problem problem = open_connection(address, *fresh);
    if (!problem.empty()) return warn(Result::kSystemError, problem);
    *sender = fresh.release();
    return Result::kSuccess;
  });
}

Result accept(void* listener, void** receiver, void** /*device_handle*/) {
  return guarded("accept", [&] {
    *receiver = nullptr;
    auto& of = *static_cast<NetListener*>(listener);
    for (Socket fresh = accept_one(of.socket); fresh.is_open(); fresh = accept_one(of.socket)) {
      of.incoming.emplace_back().socket = std::move(fresh);
    }
    Socket accepted;
    std::erase_if(of.incoming, [&](NetListener::Incoming& incoming) {
      if (accepted.is_open()) return false;
      auto* nonce = reinterpret_cast<std::byte*>(&incoming.nonce);
      const auto state = incoming.socket.receive(
          nonce + incoming.got, sizeof incoming.nonce - incoming.got, incoming.got);
      if (state == Socket::State::kOpen && incoming.got < sizeof incoming.nonce) return false;
      const bool ours = state == Socket::State::kOpen && incoming.nonce == of.address.nonce;
      if (ours) accepted = std::move(incoming.socket);
      return true;
    });
    if (!accepted.is_open()) return Result::kSuccess;
    auto fresh = std::make_unique<Connection>();
    fresh->socket = std::move(accepted);
    make_reliable(fresh->socket, of.settings.timeout_ms);
    *receiver = fresh.release();
    return Result::kSuccess;
  });
}

Result register_memory(void* /*comm*/, void* data, size_t /*bytes*/, int kind, void** memory) {
  return guarded("regMr", [&] {
    if (kind != abi::kHostMemory) {
      return warn(Result::kInvalidArgument,
                  "NET moves host memory only, not memory of the kind " + std::to_string(kind));
    }
    *memory = data;
    return Result::kSuccess;
  });
}

Result register_dmabuf(void* comm, void* data, size_t bytes, int kind, uint64_t /*offset*/,
                       int /*descriptor*/, void** memory) {
  return register_memory(comm, data, bytes, kind, memory);
}

Result deregister(void* /*comm*/, void* /*memory*/) { return Result::kSuccess; }

Result send(void* sender, void* data, size_t bytes, int /*tag*/, void* /*memory*/,
            void* /*profiler*/, void** request) {
  return guarded("isend",
                 [&] { return begin(*static_cast<Connection*>(sender), data, bytes, request); });
}

Result receive(void* receiver, int count, void** data, size_t* bytes, int* /*tags*/,
               void** /*memories*/, void** /*profilers*/, void** request) {
  return guarded("irecv", [&] {
    if (count != 1) {
      return warn(Result::kInvalidArgument,
                  "NET receives one message at a time, not " + std::to_string(count));
    }
    return begin(*static_cast<Connection*>(receiver), data[0], bytes[0], request);
  });
}

// Host memory needs no flush.
Result flush(void* /*receiver*/, int /*count*/, void** /*data*/, int* /*bytes*/,
             void** /*memories*/, void** request) {
  *request = nullptr;
  return Result::kSuccess;
}

Result test(void* request, int* done, int* bytes) {
  return guarded("test", [&] {
    auto& of = *static_cast<Request*>(request);
    *done = 0;
    if (!of.done) {
      const Result result = drive(*of.connection);
      if (result != Result::kSuccess) return result;
    }
    if (!of.done) return Result::kSuccess;
    *done = 1;
    if (bytes != nullptr) *bytes = static_cast<int>(of.bytes);
    of.used = false;
    return Result::kSuccess;
  });
}

Result set_attributes(void* /*instance*/, void* /*attributes*/) { return Result::kSuccess; }

}  // namespace

extern "C" {

const abi::Net11 ncclNetPlugin_v11 = {
    .name = entry::kName,
    .init = init,
    .devices = entry::devices,
    .get_properties = get_properties,
    .listen = entry::listen<NetListener>,
    .connect = connect,
    .accept = accept,
    .register_memory = register_memory,
    .register_dmabuf = register_dmabuf,
    .deregister = deregister,
    .send = send,
    .receive = receive,
    .flush = flush,
    .test = test,
    .close_sender = entry::close<Connection>,
    .close_receiver = entry::close<Connection>,
    .close_listener = entry::close<NetListener>,
    .device_memory = nullptr,
    .receive_consumed = nullptr,
    .merge_devices = nullptr,
    .finalize = entry::finalize,
    .set_attributes = set_attributes,
};
}

}  // namespace fanfold::nccl_plugin
