// The results of a token's slots, summed in the order of the slots.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

inline constexpr int kUnitColumns = 8;                          // of bf16: 16 bytes
inline constexpr int kWarpColumns = kUnitColumns * kWarpLanes;  // that a warp loads at a time
inline constexpr int kChunkColumns = kFusedMoeSumBlocks * kTileColumns;
static_assert(kWarpColumns == kTileColumns);

// One warp's part of a token: kUnits x kBatch loads of a lane at a time.
template <int kUnits, int kBatch>
class ChunkSum {
 public:
  __device__ ChunkSum(const Call& call, int token, int chunk)
      : call_(call), token_(token), first_(chunk * (kChunkColumns / kUnitColumns) +
                                           static_cast<int>(threadIdx.x % kWarpLanes)) {
    const int lane = threadIdx.x % kWarpLanes;
    place_ = lane < kTopK ? call.args.places[token * kTopK + lane] : FusedMoePlace{0, -1};
  }

  // Until all rows' columns are there; `between` is called after each look.
  template <class Between>
  __device__ void wait(int chunk, uint32_t nap_ns, const Between& between) const {
    const int rank = kRanks == 1 ? 0 : place_.rank;
    const int group_blocks = call_.group_blocks(rank);
    const int group = chunk * kFusedMoeSumBlocks / group_blocks;
    const uint32_t wanted = min(group_blocks, kSecondColumnBlocks - group * group_blocks);
    const uint32_t* returned = call_.returned(max(place_.row, 0) / kFusedMoeHalfRows, group);
    const int64_t offset = call_.offset(returned);
    Patience patience(call_, rank);
    for (;;) {
      const bool there = place_.row < 0 || has_returned(rank, offset, wanted);
      if (__all_sync(kFullWarp, there)) return;
      if (__any_sync(kFullWarp, !there && patience.expired())) return;
      between();
      if (nap_ns) __nanosleep(nap_ns);
    }
  }

  // Columns of the units from `unit` on.
  __device__ void run(int unit) const {
    float total[kUnits][kUnitColumns] = {};
#pragma unroll
    for (int first = 0; first < kTopK; first += kBatch) add_slots(total, first, unit);
    uint4* y = reinterpret_cast<uint4*>(call_.args.y) + int64_t{token_} * kRowUnits;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (!is_there(unit + u)) continue;
      if (call_.args.addend) {
        const auto* addend = reinterpret_cast<const uint4*>(call_.args.addend);
        add_unweighted(total[u], addend[int64_t{token_} * kRowUnits + place(unit + u)]);
      }
      y[place(unit + u)] = round_to_bf16(total[u]);
    }
  }

 private:
  static constexpr int kRowUnits = kHidden / kUnitColumns;

  __device__ bool has_returned(int rank, int64_t offset, uint32_t wanted) const {
    if constexpr (kRanks == 1) {
      return load_acquire_gpu(own_memory<uint32_t>(call_.args, offset)) >= wanted;
    } else {
      return call_.peer(rank).counted(offset) >= wanted;
    }
  }

  __device__ int place(int unit) const { return first_ + unit * kWarpLanes; }
  __device__ bool is_there(int unit) const {
    return kHidden % kChunkColumns == 0 || place(unit) < kRowUnits;
  }

  __device__ __forceinline__ void add_slots(float (&total)[kUnits][kUnitColumns], int first,
                                            int unit) const {
    uint4 v[kBatch][kUnits];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int from = min(first + k, kTopK - 1);
      const int rank = kRanks == 1 ? 0 : __shfl_sync(kFullWarp, place_.rank, from);
      const int row = __shfl_sync(kFullWarp, place_.row, from);
      const bool is_slot = first + k < kTopK && row >= 0;
      // A row that is not one is loaded all the same: the loads come together without a branch.
      const Peer slot = call_.peer(rank).from(
          call_.args.at.slots + int64_t{max(row, 0)} * kRowUnits * int64_t{sizeof(uint4)});
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int at = is_there(unit + u) ? place(unit + u) : 0;
        const uint4 loaded = slot.read_unit(at * int64_t{sizeof(uint4)});
        v[k][u] = is_slot ? loaded : uint4{};
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
#pragma unroll
      for (int u = 0; u < kUnits; ++u) add_unweighted(total[u], v[k][u]);
  }

  const Call& call_;
  const int token_;
  const int first_;      // this lane's place in its token's row
  FusedMoePlace place_;  // of the slot of this lane
};

// y of this CTA's tokens, by all warps that come here. The first wait is long and looks less often.
// A lane has kUnits * kSlots loads in flight.
template <int kUnits, int kSlots, class Between = Nothing>
__device__ inline void sum_tokens(const Call& call, uint32_t first_nap_ns, uint32_t nap_ns,
                                  const Between& between = {}) {
  constexpr int kBatch = kSlots < kTopK ? kSlots : kTopK;
  if (call.tail.aborted) return;
  const OwnTokens own(call.args.tokens);
  const int tokens = own.last - own.first;
  uint32_t nap = first_nap_ns;
  for (;;) {
    uint32_t item = 0;
    if (threadIdx.x % kWarpLanes == 0) item = atomicAdd(&call.tail.next_sum, 1u);
    item = __shfl_sync(kFullWarp, item, 0);
    if (item >= static_cast<uint32_t>(tokens * kSumChunks)) return;
    const int chunk = static_cast<int>(item) / tokens;
    const int token = own.first + static_cast<int>(item) - chunk * tokens;
    const ChunkSum<kUnits, kBatch> sum(call, token, chunk);
    sum.wait(chunk, nap, between);
    const int units = min(kFusedMoeSumBlocks, kSecondColumnBlocks - chunk * kFusedMoeSumBlocks);
#pragma unroll 1
    for (int unit = 0; unit < units; unit += kUnits) {
      sum.run(unit);
      between();
    }
    nap = nap_ns;
  }
}

}  // namespace fanfold::fused_moe
