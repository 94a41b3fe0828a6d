// One-sided writes between hosts: the smallest interface that every network can offer.
//
// A transport belongs to one thread. It makes few promises, because networks differ:
//
//   - A write carries bytes and a 4-byte immediate. When the immediate arrives at the target, the
//     bytes of the same write are in the target's memory. A write may have no bytes.
//   - Writes may land in any order, also those to one peer.
//   - A write may land again, with its immediate, until the transport reports its completion to the
//     sender. After that it lands once if it has not landed yet, and never again if it has.
//   - A completion allows the sender to reuse the source memory. It does not mean that the bytes
//     have landed: only the target knows that.
//   - Nothing lands or completes unless the thread of each side keeps calling `poll`.
//   - Nothing is thrown after `open`: errors are values, and a failed transport stays failed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fanfold::transport {

enum class Code {
  kOk,
  kAgain,   // the transport has no room now: poll, then try again
  kFailed,  // the peer or the whole transport is lost; `error()` says why
};

// What a peer needs in order to write here: names of this side's endpoints. Opaque bytes, the same
// size on all ranks of a job, exchanged by the caller.
using Address = std::vector<std::byte>;

// Registered memory as a peer addresses it. Opaque to callers.
struct RemoteMemory {
  uint64_t base = 0;  // added to each offset
  uint64_t key = 0;
  int64_t bytes = 0;
};

// A registered range of this process; an index that the transport gives out.
struct LocalMemory {
  int32_t index = -1;
};

// Memory of a GPU of this process.
struct GpuMemory {
  std::byte* data;  // as its kernels address it
  int64_t bytes;
  int32_t device;   // CUDA's number of the GPU
  int dmabuf = -1;  // a descriptor of these pages, from `data` on; -1: there is none
};

struct Write {
  int32_t peer;
  int32_t rail;  // which of the endpoints, from 0 to rails() - 1
  LocalMemory source;
  int64_t source_offset;
  RemoteMemory target;
  int64_t target_offset;
  int64_t bytes;  // 0 sends the immediate alone
  uint32_t immediate;
  uint64_t context;  // returned with the completion
  // Whether a failure of this write must name its peer, even if that makes the write slower.
  bool reported = false;
};

enum class EventKind {
  kArrival,     // `immediate` of a peer's write has landed on `rail`
  kCompletion,  // the write with `context` is complete; its source may be reused
  kPeerFailed,  // writes to `peer` fail from here on; `error()` says why
  kPeerEnded,   // the same, because the peer's process has ended or has closed its transport
};

struct Event {
  EventKind kind;
  int32_t rail;
  int32_t peer;  // of a peer's failure, and of kArrival where the transport knows it; else -1
  uint32_t immediate;
  uint64_t context;
};

struct Limits {
  int64_t write_bytes;  // of one write; at most 1 GiB
  int32_t writes;       // in flight on one rail before `write` returns kAgain
  int32_t rails;        // endpoints of this transport
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string_view name() const = 0;  // for messages: "loopback", "libfabric:tcp"
  virtual Limits limits() const = 0;

  virtual Address address() const = 0;
  // Makes `peer` reachable at `address`. Call it once for each peer before the first write.
  virtual Code connect(int32_t peer, const Address& address) = 0;

  // How writes reach a connected peer, for messages: "eth0, from 10.0.0.1 to 10.0.0.2 port 4711";
  // empty if there is nothing to say.
  virtual std::string path(int32_t peer) const {
    static_cast<void>(peer);
    return {};
  }

  // The cores that are near its NICs, for the thread that it belongs to; empty: any.
  virtual std::vector<int32_t> cores() const { return {}; }

  // Registers memory for writes from and to it. The memory must stay mapped until the transport is
  // destroyed. Returns nothing valid (index -1) if it fails.
  virtual LocalMemory register_memory(std::byte* data, int64_t bytes) = 0;
  // Why `register_gpu_memory` always fails; empty if a NIC writes and reads a GPU's memory without
  // the CPU, so that it may work.
  virtual std::string why_no_gpu_memory() const { return "it moves bytes by the CPU"; }
  // As `register_memory`, of a GPU's memory.
  virtual LocalMemory register_gpu_memory(const GpuMemory& memory) {
    static_cast<void>(memory);
    return {};
  }
  // How peers address memory that this process has registered.
  virtual RemoteMemory remote(LocalMemory memory) const = 0;

  // Starts a write. kAgain: nothing has been sent.
  virtual Code write(const Write& write) = 0;

  // Asks the network whether `peer` still runs; if it has ended, kPeerEnded follows. Returns false
  // if this network tells that only to those who write to the peer.
  virtual bool probe(int32_t peer) {
    static_cast<void>(peer);
    return false;
  }

  // Drives the transport, and stores up to `events.size()` events. Returns their number.
  virtual int32_t poll(std::span<Event> events) = 0;

  // Why the last call failed, in words for a user; empty if nothing has failed.
  virtual const std::string& error() const = 0;
};

}  // namespace fanfold::transport
