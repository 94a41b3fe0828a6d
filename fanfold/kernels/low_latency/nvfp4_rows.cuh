// nvfp4 rows on their way: words that are not the sentinel, and scales in units of 16 bytes.
//
// A lane's unit has two blocks of 16 columns, of two words each. Eight columns of -6 are a word of
// ones, which is the sentinel. No scale is negative, so the sign bit of a block's scale says that
// the block has such a word. The block's first word then says which words are the sentinel (bit 0
// the first, bit 1 the second), and its second word is the other one.
#pragma once

#include "device/nvfp4.cuh"
#include "device/warp.cuh"
#include "low_latency/call.cuh"

namespace fanfold {

inline constexpr uint32_t kEscaped = 0x80u;  // of a scale

// Replaces the two words of a block; the bit of its scale.
__device__ __forceinline__ uint32_t escape_block(uint32_t& first, uint32_t& second) {
  const uint32_t which = (first == kSentinel ? 1u : 0u) | (second == kSentinel ? 2u : 0u);
  if (which == 0) return 0;
  second = which == 3 ? 0u : which == 1 ? second : first;
  first = which;
  return kEscaped;
}

__device__ __forceinline__ void restore_block(uint32_t scale, uint32_t& first, uint32_t& second) {
  if ((scale & kEscaped) == 0) return;
  const uint32_t which = first;
  first = (which & 1u) != 0 ? kSentinel : second;
  if ((which & 2u) != 0) second = kSentinel;
}

// The scales of a warp's units, two in the low bytes of each lane, as four units of 16 bytes: lane
// u has the u-th, and so have lanes u + 4, u + 8 and so on.
__device__ __forceinline__ uint4 gather_scales(uint32_t scales, int lane) {
  const uint32_t pair = scales | __shfl_xor_sync(kFullWarp, scales, 1) << 16;  // of even lanes
  const int first = lane % 4 * 8;
  return {__shfl_sync(kFullWarp, pair, first), __shfl_sync(kFullWarp, pair, first + 2),
          __shfl_sync(kFullWarp, pair, first + 4), __shfl_sync(kFullWarp, pair, first + 6)};
}

// The word `lane` % 16 of the sixteen that lanes 0 to 3 hold: the scales of 64 columns.
__device__ __forceinline__ uint32_t scatter_scales(uint4 units, int lane) {
  const int holder = lane % 16 / 4;
  const uint32_t words[4] = {
      __shfl_sync(kFullWarp, units.x, holder), __shfl_sync(kFullWarp, units.y, holder),
      __shfl_sync(kFullWarp, units.z, holder), __shfl_sync(kFullWarp, units.w, holder)};
  const int which = lane % 4;
  return which == 0 ? words[0] : which == 1 ? words[1] : which == 2 ? words[2] : words[3];
}

// The unit of a lane as it was quantised; `words` as scatter_scales returns them.
__device__ __forceinline__ uint4 restore_unit(uint4 v, uint32_t words, int lane) {
  const uint32_t scales = __shfl_sync(kFullWarp, words, lane / 2) >> (lane % 2 * 16);
  restore_block(scales, v.x, v.y);
  restore_block(scales >> 8, v.z, v.w);
  return v;
}

}  // namespace fanfold
