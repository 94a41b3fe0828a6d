// LogFMT-10 (csrc/host/numeric.h) of a warp's segment: two blocks of 128 columns, 16 lanes each
// with eight columns. A coded segment begins with a mark that no bf16 row holds, then come for each
// block its range and 10 bits a column. A field that the code never uses, that of a negative zero,
// is mapped to all ones, so that no word is the sentinel. A segment that cannot be coded, or would
// not be shorter, travels as bf16.
#pragma once

#include "low_latency/combine_shape.cuh"

namespace fanfold {

inline constexpr float kLogFmtSteps = 510.0f;
inline constexpr float kLogFmtOctaves = 32.0f;
inline constexpr float kLogFmtLimit = 0x1p127f;
inline constexpr int kBlockCodeWords = kBlockColumns * kLogFmtBits / 32;
inline constexpr uint32_t kCodedMark = 0xfffffffeu;  // a negative NaN, which rounding never gives

__device__ __forceinline__ int units_of_segment(int part) {
  return min(kSegmentUnits, kUnits - part * kSegmentUnits);
}
__device__ __forceinline__ int blocks_of_segment(int part) {
  return (units_of_segment(part) * kColumnsOfUnit + kBlockColumns - 1) / kBlockColumns;
}
__device__ __forceinline__ bool fits_coded(int part) {
  return 1 + blocks_of_segment(part) * (1 + kBlockCodeWords) <= units_of_segment(part) * 4;
}
// Of a block's range in its segment; the codes follow.
__device__ __forceinline__ int range_place(int block) { return 1 + block * (1 + kBlockCodeWords); }

inline constexpr uint32_t kLogFmtMask = 0x1ffu;
inline constexpr uint32_t kLogFmtSign = 0x200u;
inline constexpr int kBlockLanes = 16;

struct LogRange {
  float low;
  float high;
  __device__ float step() const { return __fdiv_rn(__fsub_rn(high, low), kLogFmtSteps); }
};

// The bf16 value next below or equal, and next above or equal.
__device__ __forceinline__ uint32_t bf16_floor(float value) {
  const uint32_t bits = __float_as_uint(value);
  const bool away = (bits >> 31) != 0 && (bits & 0xffffu) != 0;
  return ((bits >> 16) + (away ? 1u : 0u)) & 0xffffu;
}
__device__ __forceinline__ uint32_t bf16_ceil(float value) { return bf16_floor(-value) ^ 0x8000u; }

__device__ __forceinline__ bool is_codable(const float (&v)[8]) {
  bool codable = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) codable = codable && fabsf(v[i]) < kLogFmtLimit;
  return codable;
}

// The range of a block as its first word. All 16 lanes of the block ask together.
__device__ __forceinline__ uint32_t range_word(const float (&v)[8]) {
  float smallest = __uint_as_float(0x7f800000u);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float magnitude = fabsf(v[i]);
    if (magnitude == 0.0f) continue;
    smallest = fminf(smallest, magnitude);
    largest = fmaxf(largest, magnitude);
  }
#pragma unroll
  for (int other = 1; other < kBlockLanes; other *= 2) {
    smallest = fminf(smallest, __shfl_xor_sync(kFullWarp, smallest, other));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
  }
  if (largest == 0.0f) return 0;
  const float high = log2f(largest);
  return bf16_floor(fmaxf(log2f(smallest), __fsub_rn(high, kLogFmtOctaves))) |
         (bf16_ceil(high) << 16);
}

__device__ __forceinline__ LogRange range_of(uint32_t word) {
  return {bf16_low(word), bf16_high(word)};
}

__device__ __forceinline__ uint32_t logfmt_code(float value, const LogRange& range) {
  if (value == 0.0f) return 0;
  const uint32_t sign = value < 0.0f ? kLogFmtSign : 0u;
  const float step = range.step();
  if (step == 0.0f) return sign | 1u;
  const float position = __fdiv_rn(__fsub_rn(log2f(fabsf(value)), range.low), step);
  return sign | (1u + static_cast<uint32_t>(fminf(fmaxf(rintf(position), 0.0f), kLogFmtSteps)));
}

__device__ __forceinline__ float logfmt_value(uint32_t code, const LogRange& range) {
  const uint32_t position = code & kLogFmtMask;
  if (position == 0) return 0.0f;
  const float steps = __fmul_rn(static_cast<float>(position - 1), range.step());
  const float magnitude = exp2f(__fadd_rn(range.low, steps));
  return (code & kLogFmtSign) != 0 ? -magnitude : magnitude;
}

// Eight fields of a lane are five halves of words.
inline constexpr int kLaneHalves = 5;

__device__ __forceinline__ void stage_codes(const float (&v)[8], uint32_t range_bits,
                                            uint16_t* stage, int lane) {
  const LogRange range = range_of(range_bits);
  uint64_t fields = 0;
  int held = 0;
  int half = lane % kBlockLanes * kLaneHalves;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    fields |= uint64_t{logfmt_code(v[i], range) ^ kLogFmtMask} << held;
    for (held += kLogFmtBits; held >= 16; held -= 16, fields >>= 16)
      stage[half++] = static_cast<uint16_t>(fields);
  }
}

__device__ __forceinline__ void add_codes(float (&sum)[8], uint32_t range_bits,
                                          const uint32_t (&words)[3], int lane) {
  const LogRange range = range_of(range_bits);
  // A lane's fields begin at a word, or in the middle of one.
  uint64_t low = (uint64_t{words[1]} << 32) | words[0];
  uint64_t high = words[2];
  if (lane % 2 != 0) {
    low = (low >> 16) | (high << 48);
    high >>= 16;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int bit = i * kLogFmtBits;
    uint64_t field = bit < 64 ? low >> bit : high >> (bit - 64);
    if (bit < 64 && bit + kLogFmtBits > 64) field |= high << (64 - bit);
    const auto code = static_cast<uint32_t>(field & 0x3ffu) ^ kLogFmtMask;
    if ((code & kLogFmtMask) != 0) sum[i] = __fadd_rn(sum[i], logfmt_value(code, range));
  }
}

}  // namespace fanfold
