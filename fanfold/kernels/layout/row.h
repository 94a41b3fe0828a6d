// How one token's row is encoded on its way: sizes and offsets of each encoding.
//
//   bf16     hidden x 2 bytes
//   fp8      hidden bytes of e4m3, then one float32 scale per 128 columns
//   logfmt   per 128 columns two bfloat16 (log2 of the smallest and largest magnitude), then for
//            every column 10 bits: a sign and a 9-bit position between the two
#pragma once

#include "layout/types.h"

namespace fanfold {

inline constexpr int32_t kBlockColumns = 128;
inline constexpr int32_t kLogFmtBits = 10;

FANFOLD_HD constexpr int64_t blocks_of(int64_t hidden) { return ceil_div(hidden, kBlockColumns); }

FANFOLD_HD constexpr int64_t bf16_row_bytes(int64_t hidden) { return hidden * 2; }

FANFOLD_HD constexpr int64_t fp8_row_bytes(int64_t hidden) {
  return hidden + blocks_of(hidden) * 4;
}

FANFOLD_HD constexpr int64_t logfmt_row_bytes(int64_t hidden) {
  return blocks_of(hidden) * 4 + ceil_div(hidden * kLogFmtBits, 8);
}

// A slot takes any of the encodings: bf16 is the largest for every hidden size from 16 up.
FANFOLD_HD constexpr int64_t slot_bytes(int64_t hidden) {
  return align_up(bf16_row_bytes(hidden), kRowAlignment);
}

static_assert(slot_bytes(16) >= fp8_row_bytes(16) && slot_bytes(16) >= logfmt_row_bytes(16));
static_assert(slot_bytes(7168) >= fp8_row_bytes(7168) && slot_bytes(136) >= fp8_row_bytes(136));

}  // namespace fanfold
