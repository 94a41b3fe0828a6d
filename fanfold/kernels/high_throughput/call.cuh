// What every high-throughput kernel does around its work: which call this is, who takes part,
// tickets, and what is left for the next call.
#pragma once

#include "layout/high_throughput_device.h"
#include "protocol/bulk_peer.cuh"
#include "protocol/deadline.cuh"
#include "protocol/rank_set.cuh"
#include "protocol/wire.cuh"

namespace fanfold {

static_assert(kRanks <= kMostRanks);

// One kernel's view of its call. Cheap to make in every thread.
class Call {
 public:
  const HighThroughputArgs& args;
  const HighThroughputPhase phase;
  const uint32_t epoch;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;

  __device__ Call(const HighThroughputArgs& a, HighThroughputPhase p)
      : args(a), phase(p), epoch(a.state->epoch + 1) {}

  __device__ int parity() const { return static_cast<int>(epoch & 1u); }
  __device__ bool is_peer(int rank) const { return rank < kRanks && rank != args.rank; }

  // ---- places in the memory of a rank, as offsets -----------------------------------------------

  __device__ int64_t arrival(int source) const {
    return args.at.arrivals + int64_t{parity() * kRanks + source} * 8;
  }
  // Words of one ring, for each slot, or each slice of each slot: what a source has sent, and what
  // a reader has read.
  __device__ int64_t ready(int source, int word) const {
    return args.at.ready + int64_t{source * kRingWords + word} * 8;
  }
  __device__ int64_t ack(int reader, int word) const {
    return args.at.acks + int64_t{reader * kRingWords + word} * 8;
  }

  // What stands at an offset of this rank's own memory.
  template <class T>
  __device__ T* own_at(int64_t offset) const {
    return own_memory<T>(args, offset);
  }
  __device__ BulkPeer peer(int rank) const { return {args, rank}; }
  __device__ int rank_at(int peer) const { return fanfold::rank_at(args, peer); }

  // ---- ranks on other hosts ---------------------------------------------------------------------

  __device__ bool is_elsewhere(int rank) const {
    if constexpr (kAcrossHosts == 0) return false;
    return rank < kRanks && (remote_hosts().elsewhere[rank / 32] >> (rank % 32) & 1u) != 0;
  }
  // With kAcrossHosts: there is one.
  __device__ int first_elsewhere() const {
    int rank = 0;
    while (rank < kRanks - 1 && !is_elsewhere(rank)) ++rank;
    return rank;
  }
  // Likewise.
  __device__ const RemoteHosts& remote_hosts() const { return *args.state->hosts; }
  // Where the network writes what ranks elsewhere send to an offset of this rank's memory.
  template <class T>
  __device__ T* received_at(int64_t offset) const {
    return reinterpret_cast<T*>(remote_hosts().received + offset);
  }
  // Bytes of a ring. With kAcrossHosts rings lie so far apart, else as their slots end: of the
  // CPU's memory only the rings of ranks elsewhere are pinned.
  __device__ int64_t ring_bytes() const { return (args.at.results - args.at.ring) / kRanks; }
  // What stands at an offset where `source` sends rows.
  template <class T>
  __device__ T* rows_at(int source, int64_t offset) const {
    return is_elsewhere(source) ? received_rows_at<T>(offset) : own_at<T>(offset);
  }
  // Of a rank elsewhere.
  template <class T>
  __device__ T* received_rows_at(int64_t offset) const {
    return reinterpret_cast<T*>(remote_hosts().received_rows + offset);
  }
  // Where rows for a rank go, which of one elsewhere have memory of their own.
  __device__ BulkPeer rows_peer(int rank) const {
    return is_elsewhere(rank) ? BulkPeer(remote_hosts().sent_rows[rank]) : peer(rank);
  }
  // A word at `own` from `source`, as it stands now, loaded by `load`. Of a rank elsewhere one CTA
  // `looks` for the whole grid, as looks at the CPU's memory come one after the other, and hands on
  // what is `awaited` by `store`, to where a rank of this host would have put it.
  template <class Load, class Store, class Awaited>
  __device__ uint64_t look_at(const uint64_t* own, int source, bool looks, const Load& load,
                              const Store& store, const Awaited& awaited) const {
    if (!is_elsewhere(source) || !looks) return load(own);
    const int64_t offset = reinterpret_cast<const unsigned char*>(own) - own_at<unsigned char>(0);
    const uint64_t found = load(received_at<const uint64_t>(offset));
    if (awaited(found)) store(own_at<uint64_t>(offset), found);
    return found;
  }
  // A word for each lane's `rank`, elsewhere, behind everything that was pushed for that before.
  // By whole warps; false if a ring stayed full.
  __device__ bool push_word(bool has_word, int rank, int64_t offset, uint64_t word) const;

  // ---- the course of a call ---------------------------------------------------------------------

  // One warp of the kernel: tells all peers that this rank has arrived, and so has left the call
  // before.
  __device__ void push_arrival() const {
    const ArrivalWord word{epoch, args.signature, static_cast<uint32_t>(args.tokens),
                           args.refused != 0};
    for_ranks_of(lane, kWarpLanes, [&](int rank) {
      if (is_peer(rank) && !is_elsewhere(rank))
        peer(rank).signal(arrival(rank_at(rank)), word.encode());
    });
    if constexpr (kAcrossHosts == 0) return;
    __syncwarp();
    for (int round = 0; round < kRankRounds; ++round) {
      const int rank = round * kWarpLanes + lane;
      const bool is_there = is_elsewhere(rank);
      push_word(is_there, is_there ? rank : 0, arrival(rank_at(is_there ? rank : 0)),
                word.encode());
    }
  }

  // Wipes some `ready` words, others in every call, before their use comes again. Nobody writes
  // there between the last batch of a call and the arrivals of the next; before a call this rank's
  // own CTAs might, which send to it, too.
  __device__ void wipe() const {
    const auto words = static_cast<uint32_t>((args.at.acks - args.at.ready) / 8);
    auto* ready = own_at<uint64_t>(args.at.ready);
    constexpr int kWiped = wiped_words(kRanks);
    if constexpr (kWiped == 1) {
      ready[epoch % words] = 0;
    } else {
      for (int i = 0; i < kWiped; ++i) ready[(uint64_t{epoch} * kWiped + i) % words] = 0;
    }
    if constexpr (kAcrossHosts != 0) {
      auto* received = received_at<uint64_t>(args.at.ready);
      for (int i = 0; i < kWiped; ++i) received[(uint64_t{epoch} * kWiped + i) % words] = 0;
    }
  }

  // What a rank says of this call as it arrives; of this rank itself, and behind the last one, what
  // this rank says.
  __device__ ArrivalWord await_arrival(int rank) const;

  __device__ bool failed() const { return load_relaxed_gpu(&args.state->failed) != 0; }
  __device__ void fail() const { store_relaxed_gpu(&args.state->failed, 1u); }

  __device__ void report(ReportKind kind, int peer, int32_t first, int32_t second) const {
    store_report(&args.reports[static_cast<int>(kind)],
                 {reported_call(static_cast<uint32_t>(phase), peer), epoch, first, second});
  }

  // ---- what a Deadline asks ---------------------------------------------------------------------

  static constexpr uint32_t kNothingSeen = 0;

  __device__ static bool is_masked(int) { return false; }
  static constexpr bool kAsksNetwork = kAcrossHosts != 0 && kWireKnowsLost;
  __device__ bool is_lost(int peer) const {
    return is_elsewhere(peer) && is_lost_peer(remote_hosts(), peer);
  }
  static constexpr bool kTakesArrivals = kAcrossHosts != 0 && kWireHasArrivals;
  __device__ void take_arrivals(int peer) const {
    if (is_elsewhere(peer)) fanfold::take_arrivals(*this, peer);
  }
  __device__ void time_out(int peer, uint32_t seen) const;
};

// Apart, so that no wait carries it in its registers.
__device__ __noinline__ void report_timeout(const Call& call, int peer, int32_t seen) {
  call.report(ReportKind::kTimeout, peer, seen, 0);
}

__device__ __forceinline__ void Call::time_out(int peer, uint32_t seen) const {
  fail();
  report_timeout(*this, peer, static_cast<int32_t>(seen));
}

__device__ __forceinline__ bool Call::push_word(bool has_word, int rank, int64_t offset,
                                                uint64_t word) const {
  return push_commands(*this, has_word, rank, store_command(remote_hosts(), rank, offset, word));
}

// Pushes rows that lie `row_bytes` apart in the memory of each lane's `rank`, those of `tokens`: a
// command for each run of neighbours. By whole warps; false if a ring stayed full.
__device__ __forceinline__ bool push_runs(const Call& call, bool has_rows, int rank, int64_t rows,
                                          int64_t row_bytes, uint32_t tokens) {
  uint32_t left = has_rows ? tokens : 0u;
  bool pushed = true;
  while (pushed && __any_sync(kFullWarp, left != 0)) {
    const int first = left != 0 ? __ffs(static_cast<int>(left)) - 1 : 0;
    const int count = __ffs(static_cast<int>(~(left >> first))) - 1;  // in a run
    const WireCommand command = rows_command(call.remote_hosts(), rank, rows + first * row_bytes,
                                             int64_t{count} * row_bytes);
    pushed = push_commands(call, left != 0, rank, command);
    left &= ~(((1u << count) - 1u) << first);
  }
  return pushed;
}

// Pushes such rows, and a word behind them. What the lane has stored is there first.
__device__ __forceinline__ void push_rows(const Call& call, bool has_rows, int rank, int64_t rows,
                                          int64_t row_bytes, uint32_t tokens, int64_t place,
                                          uint64_t word) {
  fence_system();
  const bool pushed = push_runs(call, has_rows, rank, rows, row_bytes, tokens);
  // Without its rows the word is not sent, and the peer is late here.
  if (pushed) call.push_word(has_rows, rank, place, word);
}

__device__ __forceinline__ ArrivalWord Call::await_arrival(int rank) const {
  ArrivalWord own{epoch, args.signature, static_cast<uint32_t>(args.tokens), args.refused != 0};
  if (!is_peer(rank)) return own;
  const uint32_t awaited = epoch & ArrivalWord::kEpochMask;
  Deadline deadline(*this);
  const auto is_awaited = [awaited](uint64_t found) {
    return ArrivalWord::decode(found).epoch == awaited;
  };
  const auto* place = own_at<const uint64_t>(arrival(rank));
  ArrivalWord word{};
  do {
    word = ArrivalWord::decode(look_at(
        place, rank, blockIdx.x == 0, [](const uint64_t* at) { return load_acquire_system(at); },
        [](uint64_t* at, uint64_t found) { store_release_system(at, found); }, is_awaited));
    if (word.epoch == awaited) return word;
  } while (!deadline.expired(rank, word.epoch));
  word.refused = true;
  return word;
}

// What all warps of a CTA must know before anything moves.
struct Participants {
  int tokens[kRanks];  // of each source
  bool is_aborted;     // a rank has refused, or makes another call: nothing moves
};

// The whole CTA: the participants of this call, when all have arrived.
__device__ __forceinline__ void gather(const Call& call, Participants& shared) {
  if (call.warp == 0) {
    if (blockIdx.x == 0) call.push_arrival();
    bool stops = false;
    for (int round = 0; round < kRankRounds; ++round) {
      const int rank = round * kWarpLanes + call.lane;
      const ArrivalWord word = call.await_arrival(rank);
      const bool differs = word.signature != call.args.signature;
      if (rank < kRanks) shared.tokens[rank] = static_cast<int>(word.tokens);
      if (blockIdx.x == 0 && call.args.refused == 0 && !call.failed()) {
        if (word.refused) {
          call.report(ReportKind::kRefused, rank, 0, 0);
        } else if (differs) {
          call.report(ReportKind::kDisagreement, rank, 0, 0);
        }
      }
      stops = stops || (rank < kRanks && (word.refused || differs));
    }
    stops = __any_sync(kFullWarp, stops) != 0;
    if (call.lane == 0) shared.is_aborted = stops || call.failed();
  }
  __syncthreads();
}

// Whether the routing comes from an aborted call. What is done with it moves nothing either, on any
// rank, and is no call: the rank that refused has no routing, and does not take part.
__device__ __forceinline__ bool is_aborted(const int32_t* source_prefix) {
  return source_prefix[0] == kAbortedRouting;
}

// The next ticket of a counter, in lane 0; the others get it from `of_lane_0`.
__device__ __forceinline__ uint32_t draw(const Call& call, uint32_t* counter) {
  return call.lane == 0 ? atomicAdd(counter, 1u) : 0u;
}
__device__ __forceinline__ uint32_t of_lane_0(uint32_t value) {
  return __shfl_sync(kFullWarp, value, 0);
}

// Each warp, when it has nothing left to do. The last one of the grid leaves what the next call
// begins with, and marks a routing as aborted, if there is one. The next kernel may come to the GPU
// when each CTA has a warp that is here: before it would hold SMs of its own all the time, which
// whatever runs beside could have. True for the last warp of a call that has failed.
__device__ __forceinline__ bool finish(const Call& call, int32_t* void_prefix = nullptr) {
  constexpr uint32_t kFailure = 1u << 16;
  static_assert(kMostHighThroughputCtas * kWarps < kFailure);
  __syncwarp();
  allow_next_kernel();
  HighThroughputState* state = call.args.state;
  uint32_t finished = 0;
  if (call.lane == 0) {
    const uint32_t own = call.failed() ? kFailure + 1u : 1u;
    __threadfence();  // what this warp drew comes before the counters begin anew
    finished = atomicAdd(&state->finished, own) + own;
  }
  finished = of_lane_0(finished);
  if ((finished & (kFailure - 1u)) != gridDim.x * kWarps) return false;
  if (call.lane == 0) {
    if (void_prefix != nullptr) void_prefix[0] = kAbortedRouting;
    call.wipe();
    state->sent = state->received = state->kept = state->finished = state->gathered = 0;
    state->epoch = call.epoch;
  }
  return finished >= kFailure;
}

}  // namespace fanfold
