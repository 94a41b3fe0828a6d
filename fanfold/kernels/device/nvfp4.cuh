// Quantisation to nvfp4: blocks of 16 columns, each in one lane. Plain arithmetic, which every GPU
// has; csrc/host/numeric.h has the formula.
#pragma once

#include "device/numbers.cuh"

namespace fanfold {

inline constexpr float kE2m1Max = 6.0f;

// One value: nearest even, saturating at 6; NaN becomes +6.
__device__ __forceinline__ uint32_t e2m1_of(float value) {
  const uint32_t sign = (__float_as_uint(value) & 0x80000000u) >> 28;
  const float magnitude = fminf(fabsf(value), kE2m1Max);
  // Below 1 the step is 2^-1: adding 2^22 makes that the unit of the last place.
  const uint32_t subnormal = __float_as_uint(__fadd_rn(magnitude, 4194304.0f)) - 0x4a800000u;
  const uint32_t word = __float_as_uint(magnitude);
  const uint32_t normal = (word + 0x1fffffu + ((word >> 22) & 1u) - (126u << 23)) >> 22;
  const uint32_t code = magnitude < 1.0f ? subnormal : normal;
  return isnan(value) ? 7u : sign | code;
}

// The value of a positive e4m3.
__device__ __forceinline__ float positive_e4m3(uint32_t code) {
  if (code == 0x7fu) return __uint_as_float(0x7fffffffu);
  return code < 8 ? static_cast<float>(code) * 0x1p-9f : __uint_as_float((code + 960u) << 20);
}

// The scale of a call's rows, and its reciprocal.
struct GlobalScale {
  float scale;
  float back;

  __device__ static GlobalScale of(float given) {
    const float scale = given > 0.0f ? given : __uint_as_float(0x7fffffffu);
    return {scale, __fdiv_rn(1.0f, scale)};
  }
};

// 32 columns as e2m1, and the e4m3 scales of their two blocks, the first in the lowest byte.
struct Nvfp4Columns {
  uint4 values;
  uint32_t scales;
};

// Eight columns of bf16, times `factor`.
__device__ __forceinline__ uint32_t pack_e2m1(uint4 v, float factor) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= e2m1_of(__fmul_rn(bf16_of(v, i), factor)) << (4 * i);
  return word;
}

// The largest magnitude of a block, and what its scale would be in float32.
__device__ __forceinline__ float nvfp4_scale(uint4 low, uint4 high, const GlobalScale& global) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    largest = fmaxf(largest, fmaxf(fabsf(bf16_of(low, i)), fabsf(bf16_of(high, i))));
  return __fmul_rn(global.scale, __fmul_rn(largest, 1.0f / kE2m1Max));
}

__device__ __forceinline__ float nvfp4_factor(uint32_t code, const GlobalScale& global) {
  const float scale = positive_e4m3(code);
  return scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, __fmul_rn(scale, global.back));
}

// 32 columns of bf16, in four words of 16 bytes.
__device__ __forceinline__ Nvfp4Columns quantise_nvfp4(const uint4* v, const GlobalScale& global) {
  const uint32_t scales =
      pack_e4m3(nvfp4_scale(v[0], v[1], global), nvfp4_scale(v[2], v[3], global), 0.0f, 0.0f);
  const float first = nvfp4_factor(scales & 0xffu, global);
  const float second = nvfp4_factor(scales >> 8, global);
  return {{pack_e2m1(v[0], first), pack_e2m1(v[1], first), pack_e2m1(v[2], second),
           pack_e2m1(v[3], second)},
          scales};
}

}  // namespace fanfold
