// Arithmetic on rows in bf16, e4m3, e2m1 and LogFMT. Every backend must give the same bits.
//
// The functions round each product and each sum (the build forbids contraction to fused
// multiply-add), so that an independent implementation can reproduce every bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fanfold {

inline float bf16_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Round to nearest even; every NaN becomes the quiet one.
uint16_t float_to_bf16(float value);

// Round to nearest even, saturating at 448; every NaN becomes the positive one, as on GPUs. (The
// sign of the NaN that infinity times 0 gives depends on the processor.)
uint8_t float_to_e4m3(float value);

enum class ScaleRounding { kNone, kPowerOfTwo };

// For each block of 128 columns (the last may be shorter): amax = max(|x|, 1e-4),
// scale = amax / 448, values = e4m3(x * (448 / amax)). With kPowerOfTwo, scale is raised to
// 2^ceil(log2(scale)) and values = e4m3(x * (1 / scale)). These are DeepEP's formulas.
void quantize_fp8_row(const uint16_t* x, int64_t hidden, ScaleRounding rounding, uint8_t* values,
                      float* scales);

// The exponent byte of a power-of-two scale (UE8M0: value = 2^(byte - 127)).
uint8_t ue8m0_of(float power_of_two);

// Round to nearest even, saturating at 6; every NaN becomes +6, as e2m1 has none.
uint8_t float_to_e2m1(float value);

// For each block of 16 columns: amax = max(|x|), which ignores NaNs,
// scale = e4m3(global_scale * (amax * (1 / 6))), factor = 1 / (scale * (1 / global_scale)), or 0 if
// scale is 0, and values = e2m1(x * factor), two to a byte. 1 / 6 is the nearest float. A global
// scale that is not positive gives scales that are NaN. `hidden` is a multiple of 16.
void quantize_nvfp4_row(const uint16_t* x, int64_t hidden, float global_scale, uint8_t* values,
                        uint8_t* scales);

// sum[i] += weight * row[i]; rounds the product before the addition.
void add_weighted_bf16(const uint16_t* row, float weight, int64_t columns, float* sum);
// sum[i] += row[i]
void add_bf16(const uint16_t* row, int64_t columns, float* sum);
// sum[i] = row[i]
void widen_bf16(const uint16_t* row, int64_t columns, float* sum);
void round_to_bf16(const float* sum, int64_t columns, uint16_t* row);

// Encodes a row as LogFMT-10 (layout/row.h). For each block of 128 columns, hi and lo are the
// bfloat16 values nearest above and below log2 of the largest and smallest nonzero magnitude (lo at
// least hi - 32). The code of a column is 0 for zero, else 1 + round((log2|x| - lo) * 510 /
// (hi - lo)). Returns false, with `row` undefined, if a value is not finite or 2^127 or more; the
// caller then sends the row as bf16.
bool encode_logfmt_row(const float* values, int64_t hidden, std::byte* row);
// sum[i] += the decoded value.
void add_logfmt_row(const std::byte* row, int64_t hidden, float* sum);

}  // namespace fanfold
