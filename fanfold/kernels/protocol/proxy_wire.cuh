// The wire to ranks on other hosts that proxies of the CPU carry: kernels push commands into rings.
#pragma once

#include "layout/command.h"
#include "layout/remote_hosts.h"
#include "protocol/deadline.cuh"
#include "protocol/ring.cuh"

namespace fanfold {

using WireCommand = Command;
inline constexpr bool kWireKnowsLost = true;
inline constexpr bool kWireHasArrivals = false;
template <class Call>
__device__ __forceinline__ void take_arrivals(const Call&, int) {}

// Bytes of the send area for `peer`, to the same place in the memory of the peer. The host has
// checked that every offset of the layout fits.
__device__ __forceinline__ WireCommand write_command(int peer, int64_t place, int64_t bytes) {
  CommandFields fields;
  fields.kind = CommandKind::kWrite;
  fields.peer = peer;
  fields.bytes = bytes;
  fields.source = place;
  fields.target = place;
  Command command{};
  Command::make(fields, command);
  return command;
}
// The words at `offset`.
__device__ __forceinline__ WireCommand words_command(const RemoteHosts& hosts, int peer,
                                                     int64_t offset, int64_t bytes) {
  return write_command(peer, hosts.origin + offset, bytes);
}
// The rows at `offset`.
__device__ __forceinline__ WireCommand rows_command(const RemoteHosts& hosts, int peer,
                                                    int64_t offset, int64_t bytes) {
  return write_command(peer, hosts.rows_origin + offset, bytes);
}

// Whether the network has lost a peer on another host: a look at the CPU's memory. If not, it also
// asks the proxy whether the peer still runs, which some networks tell only then.
__device__ __forceinline__ bool is_lost_peer(const RemoteHosts& hosts, int peer) {
  const RingView& ring = hosts.rings[peer % hosts.ring_count];
  const uint64_t lost = load_relaxed_system(&ring.losses()->peers[peer / 64]);
  if ((lost >> (peer % 64) & 1u) != 0) return true;
  store_relaxed_system(&ring.questions()->peers[peer], uint32_t{1});
  return false;
}
static_assert(kMostRanks <= RingLosses::kMostPeers);

// A word, behind everything that was pushed for the peer before.
__device__ __forceinline__ WireCommand store_command(const RemoteHosts& hosts, int peer,
                                                     int64_t offset, uint64_t word) {
  CommandFields fields;
  fields.kind = CommandKind::kStore;
  fields.peer = peer;
  fields.target = hosts.origin + offset;
  fields.word = word;
  Command command{};
  Command::make(fields, command);
  return command;
}

// Pushes the commands of those lanes that have one, each for its `peer`, in the order of the lanes.
// What this thread has seen and stored comes before. Returns false if a ring stayed full for the
// time of a wait: then a peer of that ring is late, and the ring is as it was. By whole warps.
template <class Call>
__device__ __forceinline__ bool push_commands(const Call& call, bool has_command, int peer,
                                              const WireCommand& command) {
  const RemoteHosts& hosts = call.remote_hosts();
  const int ring = peer % hosts.ring_count;
  uint32_t left = __ballot_sync(kFullWarp, has_command);
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const int late = __shfl_sync(kFullWarp, peer, leader);
    const int at = __shfl_sync(kFullWarp, ring, leader);
    const bool is_mine = has_command && ring == at;
    Deadline deadline(call);
    if (!ring_try_push_together(hosts.rings[at], is_mine, command, deadline, late)) return false;
    left &= ~__ballot_sync(kFullWarp, is_mine);
  }
  return true;
}

// The same for commands to a different peer each.
template <class Call>
__device__ __forceinline__ void push_to_each(const Call& call, bool has_command, int peer,
                                             const WireCommand& command) {
  push_commands(call, has_command, peer, command);
}

}  // namespace fanfold
