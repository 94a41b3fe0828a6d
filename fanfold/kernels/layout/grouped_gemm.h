// Arguments of the grouped GEMM (fanfold/deep_gemm.py says what it computes).
#pragma once

#include "layout/tensor_map.h"

namespace fanfold {

// Coordinates of the maps count elements, the innermost first. Contiguous form: one slice; masked
// form: a slice for each group.
struct GroupedGemmArgs {
  TensorMap a;            // e4m3 [slices][rows][depth], box {128, half a tile's rows}
  TensorMap a_scales;     // float32 [slices][depth / 128][rows], box {a tile's rows}
  TensorMap b;            // e4m3 [groups][columns][depth], box {128, 128}
  TensorMap d;            // bf16 [slices][rows][columns], box {64, 64}
  const float* b_scales;  // [groups][columns / 128, rounded up][depth / 128]
  // Contiguous form: the group of each row, negative for none; the first of each 128 counts, and of
  // each 64 whether there is one. Masked form: the rows of each group.
  const int32_t* groups;
  int32_t rows;  // of a slice
  int32_t reserved[3];
};
static_assert(sizeof(GroupedGemmArgs) == 4 * sizeof(TensorMap) + 64);

}  // namespace fanfold
