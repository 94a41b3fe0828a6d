// The arguments of the grouped GEMM (fanfold/kernels/grouped_gemm).
#pragma once

#include <cstdint>

#include "layout/grouped_gemm.h"

namespace fanfold::cuda {

// Addresses on the GPU; GroupedGemmArgs says of what.
struct GroupedGemmOperands {
  uintptr_t a, a_scales, b, b_scales, d, groups;
};

// Of one call; `scale_rows` is the number of rows for which `a_scales` has memory.
struct GroupedGemmSizes {
  uint64_t slices, rows, scale_rows, columns, depth, groups;
  uint32_t tile_rows;
};

// Throws DriverFailure if the driver refuses a map.
GroupedGemmArgs grouped_gemm_args(const GroupedGemmOperands& at, const GroupedGemmSizes& sizes);

}  // namespace fanfold::cuda
