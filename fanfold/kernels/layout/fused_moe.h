// The fused MoE layer in the memory of GPUs: what a call is given, and what it keeps between its
// roles and for the next call.
//
// Every rank sends rows to the experts of all ranks, and reads their results there. A rank begins a
// call by telling all others how many rows it has for each expert (`counted`), from which each
// finds the places of its rows. When a rank has these words of all others, all have ended the call
// before, so its rows and results may be written anew.
//
// Rows of an expert follow each other from a multiple of 128 on. A half block is 64 rows, what one
// warpgroup computes; counters of half blocks say how far their rows are.
#pragma once

#include "layout/protocol.h"
#include "layout/reports.h"
#include "layout/tensor_map.h"
#include "layout/types.h"

namespace fanfold {

inline constexpr int32_t kFusedMoeBlockRows = 128;
inline constexpr int32_t kFusedMoeHalfRows = 64;
inline constexpr int32_t kFusedMoeTileColumns = 256;
// Rows are copied by boxes of 64, 32, 16 or 8 of them: an expert may have few, and padding costs as
// much of the memory's bandwidth as valid rows.
inline constexpr int32_t kFusedMoeRowBoxes = 4;
FANFOLD_HD constexpr int32_t fused_moe_box_rows(int32_t box) { return kFusedMoeHalfRows >> box; }
// Of the second GEMM's columns that a warp sums at a time: so many blocks of 256.
inline constexpr int32_t kFusedMoeSumBlocks = 4;
inline constexpr int32_t kFusedMoeMostGroups = 2;
inline constexpr int32_t kFusedMoeMostCtas = 512;

// Words of counters, zero before a call, which clears those of the next. The first is the next
// ticket, the second the CTAs that have counted their share of the routing.
struct FusedMoeCounters {
  int64_t half_blocks;

  FANFOLD_HD constexpr int64_t arrived() const { return 4; }  // rows of tokens
  FANFOLD_HD constexpr int64_t activated() const { return arrived() + half_blocks; }  // tiles of L1
  // Tiles of L2, by groups of columns.
  FANFOLD_HD constexpr int64_t returned() const { return activated() + half_blocks; }
  FANFOLD_HD constexpr int64_t words() const {
    return returned() + kFusedMoeMostGroups * half_blocks;
  }
};

// From call to call, in device memory; zero before the first.
struct FusedMoeState {
  uint32_t calls[kFusedMoeMostCtas];  // of each CTA, so that none waits for another
};

// A row of a token that is to be copied; an entry is a place in the top-k lists.
struct FusedMoeCopy {
  int32_t rank, row, entry;
};

// Where the result of an entry is; the row is negative if there is none.
struct FusedMoePlace {
  int32_t rank, row;
};

// In place of a count: this rank takes no part in the call.
inline constexpr uint32_t kFusedMoeRefused = 0xffffffffu;

// Offsets in every rank's memory of what others write or read.
struct FusedMoeOffsets {
  int64_t counted;      // [2][source rank][experts of all ranks], CountedWord
  int64_t counters[2];  // FusedMoeCounters, in turns
  int64_t rows;         // [rows][hidden] e4m3
  int64_t row_scales;   // [hidden / 128][rows] float32
  int64_t row_weights;  // [rows] float32
  int64_t row_calls;    // [rows] uint32, the call that a row is of, from 1 on; with several ranks
  int64_t slots;        // [rows][hidden] bf16, the results
};

// When a CTA began, knew its rows, had stored its last tile of each GEMM, and ended; nanoseconds of
// the GPU's clock. And how many cycles its SM had in between.
struct FusedMoeSpan {
  uint64_t begin, routed, first_end, second_end, end, cycles;
};

struct FusedMoeArgs {
  // Maps count elements, the innermost first.
  TensorMap l1, l2;                      // e4m3 {depth, columns, experts}, box {128, 128}
  TensorMap a[2][kFusedMoeRowBoxes];     // e4m3 {depth, rows, 1}: tokens and activations
  TensorMap results[kFusedMoeRowBoxes];  // bf16 {hidden, rows, 1}
  TensorMap scales[2];                   // float32 {rows, depth / 128, 1}, of a; box {128, 1}

  // ---- of the caller ----------------------------------------------------------------------------
  const uint8_t* x;       // [tokens][hidden] e4m3
  const float* x_scales;  // [tokens][hidden / 128], strides in elements:
  int64_t scale_token_stride, scale_block_stride;
  const int64_t* topk_idx;    // [tokens][top-k]
  const float* topk_weights;  // [tokens][top-k]
  const float* l1_scales;     // [experts][2 * intermediate / 128][hidden / 128], gate before up
  const float* l2_scales;     // [experts][hidden / 128][intermediate / 128]
  const uint16_t* addend;     // [tokens][hidden] bf16, or null
  uint16_t* y;                // [tokens][hidden] bf16
  int32_t* statistics;        // [experts], or null

  // ---- of the layer -----------------------------------------------------------------------------
  PeerTable peers;
  FusedMoeOffsets at;
  float* activation_scales;  // [intermediate / 128][rows]
  int32_t* counts;           // [CTAs][experts of all ranks], rows of each CTA's tokens
  FusedMoePlace* places;     // [tokens][top-k]
  FusedMoeCopy* copies;      // [tokens][top-k], those of a CTA by expert
  uint32_t* tables;          // [CTAs][2 * experts + 1], where shared memory has no room
  FusedMoeState* state;
  Report* reports;      // in host memory
  FusedMoeSpan* spans;  // [CTAs], or null
  int64_t row_count;    // a multiple of 128
  int64_t timeout_ns;
  int32_t tokens;
  int32_t rows_for_groups;  // of a rank, from which on its columns of L2 are computed in groups
  float clamp;
  int32_t rank;
  int32_t refused;  // takes no part: nothing of the caller is read
  int32_t reserved;
};
static_assert(sizeof(FusedMoeArgs) % alignof(TensorMap) == 0);

}  // namespace fanfold
