// What every high-throughput kernel does around its work: which call this is, who takes part,
// tickets, and what is left for the next call.
#pragma once

#include "layout/high_throughput_device.h"
#include "protocol/bulk_peer.cuh"
#include "protocol/deadline.cuh"
#include "protocol/rank_set.cuh"

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

  // ---- the course of a call ---------------------------------------------------------------------

  // One warp of the kernel: tells all peers that this rank has arrived, and so has left the call
  // before.
  __device__ void push_arrival() const {
    const ArrivalWord word{epoch, args.signature, static_cast<uint32_t>(args.tokens),
                           args.refused != 0};
    for_ranks_of(lane, kWarpLanes, [&](int rank) {
      if (is_peer(rank)) peer(rank).signal(arrival(rank_at(rank)), word.encode());
    });
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

__device__ __forceinline__ ArrivalWord Call::await_arrival(int rank) const {
  ArrivalWord own{epoch, args.signature, static_cast<uint32_t>(args.tokens), args.refused != 0};
  if (!is_peer(rank)) return own;
  const uint32_t awaited = epoch & ArrivalWord::kEpochMask;
  Deadline deadline(*this);
  const auto* place = own_at<const uint64_t>(arrival(rank));
  ArrivalWord word{};
  do {
    word = ArrivalWord::decode(load_acquire_system(place));
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
