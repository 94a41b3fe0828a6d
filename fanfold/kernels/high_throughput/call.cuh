// What every high-throughput kernel does around its work: which call this is, who takes part, who
// is waited for and for how long, tickets, and what is left for the next call.
//
// Constants of all kernels: kRanks, kExperts, kTopK, kWarps, kMirror (a bench's, see `writer_at`).
#pragma once

#include "constants.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "layout/high_throughput_device.h"

namespace fanfold {

inline constexpr int kLocalExperts = kExperts / kRanks;
inline constexpr int kThreads = kWarps * kWarpLanes;
static_assert(kExperts % kRanks == 0 && kTopK <= kWarpLanes);
static_assert(kRanks <= kMostHighThroughputRanks && kRanks <= kWarpLanes);

// Where in the memory of `owner` this rank writes. In a bench's mirror two GPUs stand for more:
// each is rank 0, and what it sends to another rank comes to the other GPU as from another.
__device__ __forceinline__ int writer_at(const HighThroughputArgs& args, int owner) {
  return kMirror != 0 ? (kRanks - owner) % kRanks : args.rank;
}

// Which rank this one is to `source`.
__device__ __forceinline__ int reader_for(const HighThroughputArgs& args, int source) {
  return kMirror != 0 ? (kRanks - source) % kRanks : args.rank;
}

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

  // ---- places in the memory of `owner` ----------------------------------------------------------

  template <class T>
  __device__ T* at(int owner, int64_t offset) const {
    return reinterpret_cast<T*>(args.peers[owner] + offset);
  }
  __device__ uint64_t* announcement(int owner, int source) const {
    return at<uint64_t>(owner, args.at.announcements) + parity() * kRanks + source;
  }
  // Words of one ring: of each slot, or of each slice of each slot.
  __device__ uint64_t* ready(int owner, int source, int word) const {
    return at<uint64_t>(owner, args.at.ready) + source * kRingWords + word;
  }
  __device__ uint64_t* taken(int owner, int reader, int word) const {
    return at<uint64_t>(owner, args.at.taken) + reader * kRingWords + word;
  }

  // ---- the course of a call ---------------------------------------------------------------------

  // One warp of the kernel: says to all peers that this rank is here, and so has left the call
  // before.
  __device__ void announce() const {
    if (!is_peer(lane)) return;
    const AnnouncementWord word{epoch, args.facts, static_cast<uint32_t>(args.tokens),
                                args.refused != 0};
    store_release_system(announcement(lane, writer_at(args, lane)), word.encode());
  }

  // Wipes one word of those that tell of batches, another in every call, before its use comes
  // again. Nobody writes there when all batches of a call have come and the next is not announced;
  // before a call this rank's own CTAs might, which send to it, too.
  __device__ void wipe() const {
    const auto words = static_cast<uint32_t>((args.at.taken - args.at.ready) / 8);
    at<uint64_t>(args.rank, args.at.ready)[epoch % words] = 0;
  }

  // What lane r's rank announces of this call.
  __device__ AnnouncementWord await_announcement() const;

  __device__ bool failed() const { return load_relaxed_gpu(&args.state->failed) != 0; }
  __device__ void fail() const { store_relaxed_gpu(&args.state->failed, 1u); }

  __device__ void report(HighThroughputReportKind kind, int peer, int32_t first,
                         int32_t second) const {
    const uint4 words{(1u + static_cast<uint32_t>(phase)) | (static_cast<uint32_t>(peer) << 8),
                      epoch, static_cast<uint32_t>(first), static_cast<uint32_t>(second)};
    store_relaxed_system(reinterpret_cast<uint4*>(&args.reports[static_cast<int>(kind)]), words);
  }
};

// Apart, so that no wait carries it in its registers.
__device__ __noinline__ void report_timeout(const Call& call, int peer, int32_t came) {
  call.report(HighThroughputReportKind::kTimeout, peer, came, 0);
}

// A wait that ends: when a call has failed, and when its time is over, which fails the call.
class Patience {
 public:
  __device__ explicit Patience(const Call& call) : call_(call) {}

  // Asked after every fruitless look; `came` is what stands where `peer` was to write.
  __device__ bool exhausted(int peer, uint32_t came) {
    if ((++looks_ & (kLooks - 1)) != 0) return false;
    if (call_.failed()) return true;
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < call_.args.timeout_ns) return false;
    call_.fail();
    report_timeout(call_, peer, static_cast<int32_t>(came));
    return true;
  }

 private:
  static constexpr uint32_t kLooks = 1u << 8;

  const Call& call_;
  uint32_t looks_ = 0;
  int64_t begin_ = 0;
};

__device__ __forceinline__ AnnouncementWord Call::await_announcement() const {
  AnnouncementWord own{epoch, args.facts, static_cast<uint32_t>(args.tokens), args.refused != 0};
  if (!is_peer(lane)) return own;
  const uint32_t awaited = epoch & AnnouncementWord::kEpochMask;
  Patience patience(*this);
  AnnouncementWord word{};
  do {
    word = AnnouncementWord::decode(load_acquire_system(announcement(args.rank, lane)));
    if (word.epoch == awaited) return word;
  } while (!patience.exhausted(lane, word.epoch));
  word.refused = true;
  return word;
}

// What all warps of a CTA must know before anything moves.
struct Participants {
  int tokens[kRanks];  // of each source
  bool is_void;        // somebody refused, or means another call: nothing moves
};

// The whole CTA: the participants of this call, when all have announced it.
__device__ __forceinline__ void gather(const Call& call, Participants& shared) {
  if (call.warp == 0) {
    if (blockIdx.x == 0) call.announce();
    const AnnouncementWord word = call.await_announcement();
    const bool differs = word.facts != call.args.facts;
    if (call.lane < kRanks) shared.tokens[call.lane] = static_cast<int>(word.tokens);
    if (blockIdx.x == 0 && call.args.refused == 0 && !call.failed()) {
      if (word.refused) {
        call.report(HighThroughputReportKind::kRefused, call.lane, 0, 0);
      } else if (differs) {
        call.report(HighThroughputReportKind::kDisagreement, call.lane, 0, 0);
      }
    }
    const bool stops = __any_sync(kFullWarp, call.lane < kRanks && (word.refused || differs)) != 0;
    if (call.lane == 0) shared.is_void = stops || call.failed();
  }
  __syncthreads();
}

// Whether the routing was a call that moved nothing. What is done with it moves nothing either, on
// any rank, and is no call: the rank that refused knows of no routing, and does not take part.
__device__ __forceinline__ bool is_void(const int32_t* source_prefix) {
  return source_prefix[0] == kVoidRouting;
}

// The next ticket of a counter, in lane 0; the others get it from `of_lane_0`.
__device__ __forceinline__ uint32_t draw(const Call& call, uint32_t* counter) {
  return call.lane == 0 ? atomicAdd(counter, 1u) : 0u;
}
__device__ __forceinline__ uint32_t of_lane_0(uint32_t value) {
  return __shfl_sync(kFullWarp, value, 0);
}

// Each warp, when it has nothing left to do. The last one of the grid leaves what the next call
// begins with, and makes a routing void, if there is one. The next kernel may come to the GPU when
// each CTA has a warp that is here: before it would hold SMs of its own all the time, which
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
    if (void_prefix != nullptr) void_prefix[0] = kVoidRouting;
    call.wipe();
    state->sent = state->received = state->kept = state->finished = state->gathered = 0;
    state->epoch = call.epoch;
  }
  return finished >= kFailure;
}

}  // namespace fanfold
