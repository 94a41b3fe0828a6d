// Conversions between number formats, as csrc/host/numeric.h defines them.
#pragma once

#include "layout/types.h"

namespace fanfold {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kSmallestAmax = 1e-4f;

// Without the care for subnormal numbers that a division takes; within 1 unit of the last place.
__device__ __forceinline__ float reciprocal(float v) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v));
  return v;
}

// 2 to the power of v, likewise; within 2 units of the last place.
__device__ __forceinline__ float exp2_approximately(float v) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
  return v;
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// One value, with no instruction for it: nearest even; NaN becomes the positive one.
__device__ __forceinline__ uint32_t bf16_by_hand(float value) {
  const uint32_t bits = __float_as_uint(value);
  return isnan(value) ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Two values, rounded likewise.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bf16_by_hand(low) | bf16_by_hand(high) << 16;
#endif
}

// One value, with no instruction for it: nearest even, saturating; NaN becomes the positive one.
__device__ __forceinline__ uint32_t e4m3_by_hand(float value) {
  const uint32_t bits = __float_as_uint(value);
  const float magnitude = fminf(fabsf(value), kE4m3Max);
  // Below 2^-6 the step is 2^-9: adding 2^14 makes that the unit of the last place.
  const uint32_t subnormal = __float_as_uint(__fadd_rn(magnitude, 16384.0f)) - 0x46800000u;
  const uint32_t word = __float_as_uint(magnitude);
  const uint32_t normal = (word + 0x7ffffu + ((word >> 20) & 1u) - (120u << 23)) >> 20;
  const uint32_t code = magnitude < 0x1p-6f ? subnormal : normal;
  const uint32_t sign = (bits & 0x80000000u) >> 24;
  return isnan(value) ? 0x7fu : sign | code;
}

// Four values, the first in the lowest byte, rounded likewise.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t quad;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
#else
  return e4m3_by_hand(a) | e4m3_by_hand(b) << 8 | e4m3_by_hand(c) << 16 | e4m3_by_hand(d) << 24;
#endif
}

// 2^ceil(log2(value)) of a positive normal value, exactly.
__device__ __forceinline__ float next_power_of_two(float value) {
  return __uint_as_float((__float_as_uint(value) + 0x7fffffu) & 0xff800000u);
}

// The exponent byte of a power of two.
__device__ __forceinline__ uint32_t ue8m0_of(uint32_t power_of_two_bits) {
  return power_of_two_bits >> 23;
}

// Element i of the eight bf16 of `v`.
__device__ __forceinline__ float bf16_of(uint4 v, int i) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  return i % 2 == 0 ? bf16_low(words[i / 2]) : bf16_high(words[i / 2]);
}

// sum += weight * the eight bf16 of `v`; products are rounded before they are added
// (docs/decisions/arithmetic.md).
__device__ __forceinline__ void add_weighted(float (&sum)[8], uint4 v, float weight) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, bf16_of(v, i)));
}
// With a weight of one; the compiler would keep the product.
__device__ __forceinline__ void add_unweighted(float (&sum)[8], uint4 v) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], bf16_of(v, i));
}

__device__ __forceinline__ uint4 round_to_bf16(const float (&v)[8]) {
  return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
          pack_bf16(v[6], v[7])};
}

// 0.0 plus each of two bf16: -0.0 becomes 0.0, all others stay as they are.
__device__ __forceinline__ uint32_t bf16_plus_zero(uint32_t pair) {
#if __CUDA_ARCH__ >= 800
  constexpr uint32_t kOnes = 0x3f803f80u, kZeros = 0;
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(kOnes), "r"(kZeros));
  return sum;
#else
  return pack_bf16(__fadd_rn(0.0f, bf16_low(pair)), __fadd_rn(0.0f, bf16_high(pair)));
#endif
}
// Of eight.
__device__ __forceinline__ uint4 bf16_plus_zero(uint4 v) {
  return {bf16_plus_zero(v.x), bf16_plus_zero(v.y), bf16_plus_zero(v.z), bf16_plus_zero(v.w)};
}

}  // namespace fanfold
