// What the roles of the fused kernel share: the sizes of its two GEMMs, the shared memory, and
// waits that end.
//
// Constants: kRanks, kExperts (of all ranks), kTopK, kHidden, kIntermediate, kMostDepth (the larger
// of both), kClamps, kSwapsAb, kTwoLevels, kTileRows (128), kSharedBytes.
#pragma once

#include "constants.h"
#include "device/warp.cuh"
#include "fused_moe/schedule.h"
#include "gemm/store.cuh"
#include "gemm/sum.cuh"
#include "protocol/peer.cuh"

namespace fanfold::fused_moe {

using namespace gemm;

inline constexpr int kLocalExperts = kExperts / kRanks;

// A tile of the first GEMM has 128 columns of the gate, and the same 128 of the up projection.
inline constexpr int kFirstColumnBlocks = kIntermediate / (kTileColumns / 2);
inline constexpr int kSecondColumnBlocks = (kHidden + kTileColumns - 1) / kTileColumns;
inline constexpr int kSumChunks =
    (kSecondColumnBlocks + kFusedMoeSumBlocks - 1) / kFusedMoeSumBlocks;

static_assert(kHidden % kBlockDepth == 0 && kIntermediate % kBlockDepth == 0);
static_assert(kTileRows == kFusedMoeBlockRows && kTileColumns == kFusedMoeTileColumns);
static_assert(kRanks <= kFewRanks && kExperts % kRanks == 0);
static_assert(kTopK <= kWarpLanes && kLocalExperts <= kMostExperts);
static_assert(kFirstColumnBlocks < kMostColumnBlocks && kSecondColumnBlocks < kMostColumnBlocks);

__device__ __forceinline__ constexpr int depth_blocks(int gemm) {
  return (gemm == 0 ? kHidden : kIntermediate) / kBlockDepth;
}

// ---- shared memory ------------------------------------------------------------------------------

// Counters of tiles that are written, from the thread that has stored them to a spare warp: the
// release for the whole GPU takes about a microsecond, which is not to be a warpgroup's. A word is
// 1 + the index of a counter, 0 where a slot is empty; slots are used in turn.
struct Mailbox {
  static constexpr uint32_t kSlots = 4;
  static constexpr uint32_t kLast = ~0u;
  uint32_t words[kSlots];
};

// A role of a CTA may be four tiles, which are as many stages, ahead of another.
inline constexpr uint32_t kTasks = 8;
// Of more experts the tables of the schedule lie in global memory.
inline constexpr int kSharedExperts = kLocalExperts <= 94 ? kLocalExperts : 0;

struct TicketState {
  Cursor cursor;
  int ticket;          // the last that was taken
  uint32_t published;  // tasks
};

struct Tail {
  uint64_t tasks[kTasks];
  Mailbox mailboxes[kMathWarpgroups];
  uint32_t next_sum;
  uint32_t expired;  // 1 + the rank waited for once a wait has lasted too long, else 0
  uint32_t aborted;  // a rank takes no part: nothing moves
  int own_copies;    // rows of this CTA's tokens
  TicketState tickets;
  uint32_t grouped;  // a bit for each rank that computes the second GEMM's columns in groups
  uint32_t before[kSharedExperts + 1];
  int32_t rows[kSharedExperts + 1];
};

struct SharedMemory {
  Ring ring;
  Tail tail;
  alignas(1024) StoreSlot store[kMathWarpgroups][kSlots];
};
static_assert(sizeof(SharedMemory) == kSharedBytes);

// ---- boxes of rows ------------------------------------------------------------------------------

// The index of the smallest box that holds so many rows, 1 or more; of the largest where they are
// more than it has.
__device__ __forceinline__ int smallest_box(int rows) {
  constexpr int kLeast = fused_moe_box_rows(kFusedMoeRowBoxes - 1);
  static_assert(kFusedMoeHalfRows == 64 && kLeast % 8 == 0);  // 8: rows of a swizzle
  return rows > kFusedMoeHalfRows / 2 ? 0 : __clz(max(rows, kLeast) - 1) - 26;
}

// ---- a call -------------------------------------------------------------------------------------

struct Call {
  const FusedMoeArgs& args;
  Tail& tail;
  const uint32_t number;     // of this call
  uint32_t* const counters;  // of this call

  __device__ Call(const FusedMoeArgs& a, Tail& t)
      : args(a), tail(t), number(a.state->calls[blockIdx.x]),
        counters(own_memory<uint32_t>(a, a.at.counters[number % 2])) {}

  __device__ FusedMoeCounters at() const { return {args.row_count / kFusedMoeHalfRows}; }
  __device__ uint32_t* ticket() const { return counters; }
  __device__ uint32_t* shares_counted() const { return counters + 1; }
  __device__ uint32_t* arrived(int half) const { return counters + at().arrived() + half; }
  __device__ uint32_t* activated(int half) const { return counters + at().activated() + half; }
  __device__ uint32_t* returned(int half, int group) const {
    return counters + at().returned() + kFusedMoeMostGroups * half + group;
  }

  __device__ uint32_t* before() const {
    return kSharedExperts ? tail.before
                          : args.tables + int64_t{blockIdx.x} * (2 * kLocalExperts + 1);
  }
  __device__ int32_t* rows() const {
    return kSharedExperts ? tail.rows : reinterpret_cast<int32_t*>(before() + kLocalExperts + 1);
  }
  // Of the second GEMM's columns on a rank, see Schedule.
  __device__ int group_blocks(int rank) const {
    constexpr int kOfTwo = (kSumChunks + 1) / 2 * kFusedMoeSumBlocks;
    return (tail.grouped >> rank & 1) != 0 ? kOfTwo : kSecondColumnBlocks;
  }
  __device__ Schedule schedule() const {
    return {before(),
            rows(),
            kLocalExperts,
            kFirstColumnBlocks,
            kSecondColumnBlocks,
            group_blocks(args.rank)};
  }
  __device__ Peer peer(int rank) const { return {args, rank}; }
  // Of one of the counters, in every rank's memory.
  __device__ int64_t offset(const uint32_t* counter) const {
    return args.at.counters[number % 2] + (counter - counters) * int64_t{sizeof(uint32_t)};
  }

  // When this CTA did something; by one thread.
  __device__ void mark(uint64_t FusedMoeSpan::* when) const {
    if (threadIdx.x == 0 && args.spans) args.spans[blockIdx.x].*when = global_nanoseconds();
  }
  // The count at the beginning is kept in memory, as registers are short.
  __device__ void mark_begin() const {
    mark(&FusedMoeSpan::begin);
    if (threadIdx.x == 0 && args.spans) args.spans[blockIdx.x].cycles = sm_cycles();
  }
  __device__ void mark_end() const {
    mark(&FusedMoeSpan::end);
    if (threadIdx.x != 0 || !args.spans) return;
    uint64_t& cycles = args.spans[blockIdx.x].cycles;
    cycles = sm_cycles() - cycles;
  }
};

// The tokens that this CTA sends to their experts, and sums.
struct OwnTokens {
  int first, last;
  __device__ explicit OwnTokens(int tokens)
      : first(static_cast<int>(int64_t{blockIdx.x} * tokens / gridDim.x)),
        last(static_cast<int>((int64_t{blockIdx.x} + 1) * tokens / gridDim.x)) {}
  __device__ int entries() const { return (last - first) * kTopK; }
};

// ---- waits --------------------------------------------------------------------------------------

// The end of one wait, for what `rank` does or makes others do. All CTAs of all ranks must run at
// the same time; where one does not, waits end after the time that the caller gives. From then on
// every wait of the CTA ends at its first look, and what it computes is wrong, which the host is
// told at the end. (A trap would end the process's context; in a wait it also makes ptxas take the
// accumulators' registers.)
class Patience {
 public:
  __device__ Patience(const Call& call, int rank) : call_(call), rank_(rank) {}
  __device__ explicit Patience(const Call& call) : Patience(call, call.args.rank) {}

  __device__ bool expired() {
    if (load_relaxed_cta(&call_.tail.expired) != 0) return true;
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < call_.args.timeout_ns) return false;
    store_relaxed_cta(&call_.tail.expired, static_cast<uint32_t>(rank_) + 1);
    return true;
  }

 private:
  const Call& call_;
  const int rank_;
  int64_t begin_ = 0;
};

// How roles wait for stages: true unless the wait has lasted too long.
struct Waits {
  const Call& call;
  __device__ __forceinline__ bool operator()(ArrivalBarrier* barrier, uint32_t parity) const {
    return await_phase(barrier, parity, Patience(call));
  }
};

// A counter of this rank, into which other CTAs count, and other ranks.
__device__ __forceinline__ bool has_counted(const uint32_t* counter, uint32_t wanted) {
  if constexpr (kRanks == 1) {
    return load_acquire_gpu(counter) >= wanted;
  } else {
    return load_acquire_system(counter) >= wanted;
  }
}

__device__ inline bool await_count(const Call& call, const uint32_t* counter, uint32_t wanted) {
  Patience patience(call);
  while (!has_counted(counter, wanted))
    if (patience.expired()) return false;
  return true;
}

// The task number `n` of this CTA; by one thread. No valid rows: there is none.
__device__ inline PackedTask await_packed_task(const Call& call, uint32_t n) {
  Patience patience(call);
  for (;;) {
    const PackedTask packed{fetch_relaxed_cluster(&call.tail.tasks[n % kTasks])};
    if (packed.has_number(n)) return packed;
    if (patience.expired()) return {};
  }
}

__device__ inline Task await_task(const Call& call, uint32_t n) {
  return await_packed_task(call, n).task();
}

}  // namespace fanfold::fused_moe
