// The wire to ranks on other hosts that is NCCL's GIN: kernels put and signal themselves.
// layout/gin.h says how words travel.
#pragma once

#include "layout/remote_hosts.h"
#include "nccl/device.cuh"
#include "protocol/deadline.cuh"

namespace fanfold {

inline constexpr bool kWireKnowsLost = false;
inline constexpr bool kWireHasArrivals = true;

struct WireCommand {
  int64_t source;  // offset of bytes in this rank's window; of a word nothing
  int64_t target;  // place at the peer
  int64_t bytes;
  uint64_t word;
  bool is_word;
};

__device__ __forceinline__ WireCommand words_command(const RemoteHosts& hosts, int peer,
                                                     int64_t offset, int64_t bytes) {
  return {hosts.gin->words[peer] + offset, offset, bytes, 0, false};
}
__device__ __forceinline__ WireCommand rows_command(const RemoteHosts& hosts, int peer,
                                                    int64_t offset, int64_t bytes) {
  return {hosts.gin->rows[peer] + offset, offset, bytes, 0, false};
}
__device__ __forceinline__ WireCommand store_command(const RemoteHosts&, int, int64_t offset,
                                                     uint64_t word) {
  return {0, offset, 0, word, true};
}

// NCCL does not tell which peer it has lost, so a lost peer is only late.
__device__ __forceinline__ bool is_lost_peer(const RemoteHosts&, int) { return false; }

// Each rank's words have a signal at their reader, and puts to each rank a counter here. Number 0
// is none to NCCL's proxy.
__device__ __forceinline__ unsigned gin_number(int rank) { return static_cast<unsigned>(rank) + 1; }

// These stand apart, so that a kernel has NCCL's code once.
__device__ __noinline__ void gin_put(const GinHosts& hosts, int peer, int64_t target,
                                     int64_t source, int64_t bytes, bool is_word) {
  const auto& comm = *static_cast<const ncclDevComm*>(hosts.communicator);
  const ncclGin gin(comm, 0);
  const ncclTeam world = ncclTeamWorld(comm);
  const auto window = static_cast<ncclWindow_t>(hosts.window);
  const auto to = static_cast<size_t>(target);
  const auto from = static_cast<size_t>(source);
  const auto size = static_cast<size_t>(bytes);
  const ncclGin_CounterInc done{gin_number(peer)};
  if (is_word) {
    const ncclGin_SignalAdd counts{gin_number(hosts.rank), 1};
    gin.put(world, peer, window, to, window, from, size, counts, done);
  } else {
    gin.put(world, peer, window, to, window, from, size, ncclGin_None{}, done);
  }
}
__device__ __noinline__ uint64_t gin_words_of(const GinHosts& hosts, int source) {
  const ncclGin gin(*static_cast<const ncclDevComm*>(hosts.communicator), 0);
  return gin.readSignal(gin_number(source));
}
__device__ __noinline__ uint64_t gin_puts_done(const GinHosts& hosts, int peer) {
  const ncclGin gin(*static_cast<const ncclDevComm*>(hosts.communicator), 0);
  return gin.readCounter(gin_number(peer));
}

// Puts to a peer that are not done; counters have 56 bits.
__device__ __forceinline__ uint64_t gin_puts_left(const GinHosts& hosts, int peer) {
  constexpr uint64_t kCounter = (uint64_t{1} << 56) - 1;
  return (hosts.peers[peer].posted - gin_puts_done(hosts, peer)) & kCounter;
}

__device__ __forceinline__ bool gin_try_enter(uint64_t* is_inside) {
  return exchange_acquire_gpu(is_inside, 1) == 0;
}
__device__ __forceinline__ void gin_leave(uint64_t* is_inside) { store_release_gpu(is_inside, 0); }

// One thread: posts a command, in the order of all for this peer. False if there was no room in
// time.
template <class Call>
__device__ __forceinline__ bool gin_post(const Call& call, int peer, const WireCommand& command,
                                         Deadline<Call>& deadline) {
  GinHosts& hosts = *call.remote_hosts().gin;
  GinPeer& at = hosts.peers[peer];
  while (!gin_try_enter(&at.is_posting)) {
    if (deadline.expired(peer)) return false;
  }
  bool has_room = true;
  while (has_room && gin_puts_left(hosts, peer) >= kMostGinPuts) has_room = !deadline.expired(peer);
  if (has_room) {
    WireCommand put = command;
    if (command.is_word) {
      put.source = hosts.slot(hosts.sent, peer, at.words);
      put.target = hosts.slot(hosts.received, hosts.rank, at.words);
      put.bytes = sizeof(GinWord);
      auto* words = reinterpret_cast<uint64_t*>(hosts.memory + put.source);
      store_relaxed_system(words, command.word);
      const auto place = static_cast<uint64_t>(command.target);
      store_relaxed_system(words + 1, GinWord::tagged(place, at.words));
      ++at.words;
    }
    gin_put(hosts, peer, put.target, put.source, put.bytes, command.is_word);
    ++at.posted;
  }
  gin_leave(&at.is_posting);
  return has_room;
}

// Posts the commands of those lanes that have one, each for its `peer`, in the order of the lanes.
// What this thread has seen and stored comes before. Returns false if there was no room for the
// time of a wait: then a peer is late, and nothing more is posted. By whole warps.
template <class Call>
__device__ __forceinline__ bool push_commands(const Call& call, bool has_command, int peer,
                                              const WireCommand& command) {
  uint32_t left = __ballot_sync(kFullWarp, has_command);
  bool posted = true;
  while (left != 0) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    Deadline deadline(call);
    if (call.lane == lane) posted = gin_post(call, peer, command, deadline);
    if (__any_sync(kFullWarp, !posted) != 0) return false;
    left &= left - 1;
  }
  return true;
}

// The same for commands to a different peer each: one that is late keeps them from no other.
template <class Call>
__device__ __forceinline__ void push_to_each(const Call& call, bool has_command, int peer,
                                             const WireCommand& command) {
  Deadline deadline(call);
  if (has_command) gin_post(call, peer, command, deadline);
  __syncwarp();
}

// The next word of a queue, if it has come; one thread at a time.
__device__ __forceinline__ bool gin_take(GinHosts& hosts, int source, uint64_t came,
                                         GinWord& taken) {
  GinPeer& at = hosts.peers[source];
  if (static_cast<int64_t>(came - at.taken) <= 0)
    return false;  // another thread may have seen more
  const int64_t slot = hosts.slot(hosts.received, source, at.taken);
  // The signal that counts it has been acquired.
  const uint4 found = load_published(reinterpret_cast<const uint4*>(hosts.memory + slot));
  taken = {uint64_t{found.y} << 32 | found.x, uint64_t{found.w} << 32 | found.z};
  if (!taken.has(at.taken)) return false;  // overwritten: more words than a queue ever has
  ++at.taken;
  return true;
}

// Drops what has come from a rank up to its fence of this number, which may have come while the
// last call of this rank still ran. Whether the fence has come. No other kernel of this rank runs.
__device__ __forceinline__ bool gin_drop_to_fence(GinHosts& hosts, int source, uint64_t number) {
  GinPeer& at = hosts.peers[source];
  const uint64_t came = gin_words_of(hosts, source);
  // Where this rank took none for long, later words lie in their slots. The fence is the last.
  const auto slots = static_cast<uint64_t>(hosts.slots);
  if (came > at.taken + slots) at.taken = came - slots;
  GinWord next{};
  while (at.fences < number && gin_take(hosts, source, came, next)) {
    if (next.target() == GinWord::kFence) at.fences = next.word;
  }
  return at.fences >= number;
}

// Brings the words that have come from a rank to their places, unless another thread does.
template <class Call>
__device__ __forceinline__ void take_arrivals(const Call& call, int source) {
  GinHosts& hosts = *call.remote_hosts().gin;
  GinPeer& at = hosts.peers[source];
  const uint64_t came = gin_words_of(hosts, source);
  if (load_acquire_gpu(&at.taken) == came || !gin_try_enter(&at.is_taking)) return;
  GinWord next{};
  while (gin_take(hosts, source, came, next)) {
    if (next.target() == GinWord::kFence) {  // of a rank that is ahead
      at.fences = next.word;
      continue;
    }
    auto* place = reinterpret_cast<uint64_t*>(hosts.memory + next.target());
    store_release_system(place, next.word);
  }
  gin_leave(&at.is_taking);
}

}  // namespace fanfold
