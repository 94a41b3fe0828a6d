// Quantisation to fp8, a block of 128 columns by eight lanes.
#pragma once

#include "device/numbers.cuh"
#include "device/warp.cuh"

namespace fanfold {

// A lane's 16 columns as e4m3, and the scale of their block.
struct Quantised {
  uint4 values;
  float scale;
};

// 16 columns of bf16. The lanes of a block are those whose numbers differ in three bits only, of
// which `kLowestBit` is the lowest. All lanes of the warp take part.
template <int kLowestBit, bool kPowerOfTwo>
__device__ __forceinline__ Quantised quantise(uint4 a, uint4 b) {
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  float v[16];
  float largest = kSmallestAmax;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[2 * i] = bf16_low(words[i]);
    v[2 * i + 1] = bf16_high(words[i]);
    largest = fmaxf(largest, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
  }
#pragma unroll
  for (int bit = kLowestBit; bit < 8 * kLowestBit; bit *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, bit));
  float scale = __fdiv_rn(largest, kE4m3Max);
  float factor;
  if constexpr (kPowerOfTwo) {
    scale = next_power_of_two(scale);
    factor = __fdiv_rn(1.0f, scale);
  } else {
    factor = __fdiv_rn(kE4m3Max, largest);
  }
  uint32_t q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    q[i] = pack_e4m3(v[4 * i] * factor, v[4 * i + 1] * factor, v[4 * i + 2] * factor,
                     v[4 * i + 3] * factor);
  return {{q[0], q[1], q[2], q[3]}, scale};
}

}  // namespace fanfold
