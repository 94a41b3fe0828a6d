// How one token's row is encoded on its way: sizes and offsets of each encoding.
//
//   bf16     hidden x 2 bytes
//   fp8      hidden bytes of e4m3, then one float32 scale per 128 columns
//   nvfp4    hidden / 2 bytes of e2m1, two to a byte, the first in the low half, then one e4m3
//            scale per 16 columns
//   logfmt   per 128 columns two bfloat16 (log2 of the smallest and largest magnitude), then for
//            every column 10 bits: a sign and a 9-bit position between the two
#pragma once

#include "layout/types.h"

namespace fanfold {

inline constexpr int32_t kBlockColumns = 128;
inline constexpr int32_t kNvfp4BlockColumns = 16;
inline constexpr int32_t kLogFmtBits = 10;

FANFOLD_HD constexpr int64_t blocks_of(int64_t hidden) { return ceil_div(hidden, kBlockColumns); }

FANFOLD_HD constexpr int64_t bf16_row_bytes(int64_t hidden) { return hidden * 2; }

FANFOLD_HD constexpr int64_t fp8_row_bytes(int64_t hidden) {
  return hidden + blocks_of(hidden) * 4;
}

FANFOLD_HD constexpr int64_t nvfp4_value_bytes(int64_t hidden) { return hidden / 2; }
FANFOLD_HD constexpr int64_t nvfp4_row_bytes(int64_t hidden) {
  return nvfp4_value_bytes(hidden) + hidden / kNvfp4BlockColumns;
}

FANFOLD_HD constexpr int64_t logfmt_row_bytes(int64_t hidden) {
  return blocks_of(hidden) * 4 + ceil_div(hidden * kLogFmtBits, 8);
}

// A slot takes any of the encodings: bf16 is the largest for every hidden size from 16 up.
FANFOLD_HD constexpr int64_t slot_bytes(int64_t hidden) {
  return align_up(bf16_row_bytes(hidden), kRowAlignment);
}

// Where the scales of received nvfp4 rows lie, as block-scaled matrix products read them: in tiles
// of 128 rows by four scales, [row / 128][column / 64][row % 32][row / 32 % 4][column / 16 % 4].
// A word has the four scales of 64 columns.
struct Nvfp4ScaleLayout {
  int64_t rows;  // that an expert has room for
  int64_t hidden;

  static constexpr int64_t kTileRows = 128;
  static constexpr int64_t kTileColumns = 64;

  FANFOLD_HD constexpr int64_t columns() const { return ceil_div(hidden, kTileColumns); }
  // Of one expert.
  FANFOLD_HD constexpr int64_t words() const {
    return ceil_div(rows, kTileRows) * columns() * kTileRows;
  }
  FANFOLD_HD constexpr int64_t word(int64_t row, int64_t column) const {
    return (row / kTileRows * columns() + column) * kTileRows + row % 32 * 4 + row / 32 % 4;
  }
};

static_assert(Nvfp4ScaleLayout{200, 96}.words() == 512);
static_assert(Nvfp4ScaleLayout{200, 96}.word(165, 1) == 3 * 128 + 5 * 4 + 1);

static_assert(slot_bytes(16) >= fp8_row_bytes(16) && slot_bytes(16) >= logfmt_row_bytes(16));
static_assert(slot_bytes(7168) >= fp8_row_bytes(7168) && slot_bytes(136) >= fp8_row_bytes(136));

}  // namespace fanfold
