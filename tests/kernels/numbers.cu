// The conversions of device/numbers.cuh on whatever they are given, and rows quantised with them as
// dispatch does it.
#include "constants.h"
#include "device/numbers.cuh"
#include "device/warp.cuh"
#include "layout/row.h"

using namespace fanfold;

struct ConvertArgs {
  const float* values;  // [count], a multiple of eight
  uint32_t* bf16;       // [count / 2]: pairs
  uint32_t* e4m3;       // [count / 4]: fours
  uint32_t* by_hand;    // [count / 4]
  float* powers;        // [count]: the next power of two
  uint4* weighted;      // [count / 8]: bf16 of 1 + weight * bf16(value)
  uint4* unweighted;    // [count / 8]: the same without a weight
  float weight;
  int32_t count;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    convert(const __grid_constant__ ConvertArgs args) {
  const int step = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < args.count / 8; i += step) {
    float v[8];
    float sum[8];
    for (int j = 0; j < 8; ++j) {
      v[j] = args.values[8 * i + j];
      sum[j] = 1.0f;
      args.powers[8 * i + j] = next_power_of_two(v[j]);
    }
    const uint4 rounded = round_to_bf16(v);
    for (int j = 0; j < 4; ++j) args.bf16[4 * i + j] = pack_bf16(v[2 * j], v[2 * j + 1]);
    for (int j = 0; j < 8; j += 4) {
      args.e4m3[2 * i + j / 4] = pack_e4m3(v[j], v[j + 1], v[j + 2], v[j + 3]);
      args.by_hand[2 * i + j / 4] = e4m3_by_hand(v[j]) | e4m3_by_hand(v[j + 1]) << 8 |
                                    e4m3_by_hand(v[j + 2]) << 16 | e4m3_by_hand(v[j + 3]) << 24;
    }
    add_weighted(sum, rounded, args.weight);
    args.weighted[i] = round_to_bf16(sum);
    for (float& one : sum) one = 1.0f;
    add_unweighted(sum, rounded);
    args.unweighted[i] = round_to_bf16(sum);
  }
}

struct QuantiseArgs {
  const uint32_t* rows;  // [blocks][kBlockColumns / 2]: pairs of bf16
  uint32_t* values;      // [blocks][kBlockColumns / 4]: fours of e4m3
  float* scales;         // [blocks]
  uint32_t* exponents;   // [blocks]: as UE8M0; power-of-two scales
  int32_t blocks;
  int32_t power_of_two;
};

// A warp a block, four columns a lane.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantise(const __grid_constant__ QuantiseArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int warps = kThreads / kWarpLanes;
  const int step = static_cast<int>(gridDim.x) * warps;
  for (int b = static_cast<int>(blockIdx.x) * warps + warp; b < args.blocks; b += step) {
    const uint32_t* pairs = args.rows + (b * kWarpLanes + lane) * 2;
    const float v[4] = {bf16_low(pairs[0]), bf16_high(pairs[0]), bf16_low(pairs[1]),
                        bf16_high(pairs[1])};
    float largest = kSmallestAmax;
    for (const float value : v) largest = fmaxf(largest, fabsf(value));
    for (int other = 1; other < kWarpLanes; other *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
    float scale = __fdiv_rn(largest, kE4m3Max);
    float factor = __fdiv_rn(kE4m3Max, largest);
    if (args.power_of_two != 0) {
      scale = next_power_of_two(scale);
      factor = __fdiv_rn(1.0f, scale);
    }
    args.values[b * kWarpLanes + lane] =
        pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
    if (lane != 0) continue;
    args.scales[b] = scale;
    args.exponents[b] = ue8m0_of(__float_as_uint(scale));
  }
}
