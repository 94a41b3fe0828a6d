// Rows of tokens to the experts, on all ranks.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

inline constexpr int kFirstCopies = kMathWarps;  // of a CTA; the first tiles wait for them

// Tells the rank of a row that it is there. Where several ranks count, all of them do so for the
// whole system: additions for one GPU need not be atomic beside those of another.
__device__ __forceinline__ void publish_row(const Call& call, const FusedMoeCopy& copy) {
  uint32_t* arrived = call.arrived(copy.row / kFusedMoeHalfRows);
  if constexpr (kRanks == 1) {
    add_release_gpu(arrived, 1);
  } else {
    call.peer(copy.rank).count(call.offset(arrived));
  }
}

// By one warp: a token's row, its scales and its weight to a row of an expert.
template <int kInFlight>
__device__ inline void copy_row(const Call& call, const FusedMoeCopy& copy) {
  constexpr int kUnits = kHidden / 16;
  constexpr int kStep = kInFlight * kWarpLanes;
  constexpr bool kWhole = kUnits % kStep == 0;
  const FusedMoeArgs& args = call.args;
  const int lane = threadIdx.x % kWarpLanes;
  const int token = copy.entry / kTopK;
  const Peer peer = call.peer(copy.rank);
  const auto* from = reinterpret_cast<const uint4*>(args.x + int64_t{token} * kHidden);
  const Peer to = peer.from(args.at.rows + int64_t{copy.row} * kHidden);
  const float* scales = args.x_scales + token * args.scale_token_stride;
  for (int block = lane; block < kHidden / kBlockDepth; block += kWarpLanes)
    peer.put_word(args.at.row_scales + (block * args.row_count + copy.row) * 4,
                  __float_as_uint(scales[block * args.scale_block_stride]));
  if (lane == 0) {
    const int64_t word = copy.row * int64_t{4};
    peer.put_word(args.at.row_weights + word, __float_as_uint(args.topk_weights[copy.entry]));
    if constexpr (kRanks > 1) peer.put_word(args.at.row_calls + word, call.number + 1);
  }
#pragma unroll 1
  for (int first = lane; first < kUnits; first += kStep) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (kWhole || first + j * kWarpLanes < kUnits)
        v[j] = load_once(from + first + j * kWarpLanes);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (kWhole || first + j * kWarpLanes < kUnits)
        to.put_unit((first + j * kWarpLanes) * int64_t{16}, v[j]);
  }
  fence_global_and_bulk();
  __syncwarp();
  if (lane == 0) publish_row(call, copy);
}

// By `warps` warps, of which this is number `warp`: this CTA's copies from `first` to `last`.
// `between` is called after each.
template <int kInFlight, class Between = Nothing>
__device__ inline void copy_rows(const Call& call, int first, int last, int warp, int warps,
                                 const Between& between = {}) {
  const FusedMoeCopy* copies = call.args.copies + OwnTokens(call.args.tokens).first * kTopK;
  for (int i = first + warp; i < min(last, call.tail.own_copies); i += warps) {
    copy_row<kInFlight>(call, copies[i]);
    between();
  }
}

}  // namespace fanfold::fused_moe
