// Calls of the grouped GEMM with the arguments that csrc/cuda/grouped_gemm.cpp makes.
#include "cuda/grouped_gemm.h"

#include "ctas.hpp"

// Runs one call to its end.
extern "C" __attribute__((visibility("default"))) void run_grouped_gemm(
    const fanfold::cuda::GroupedGemmOperands* operands,
    const fanfold::cuda::GroupedGemmSizes* sizes, emulation::Emulate* emulate,
    emulation::Grid* grid) {
  const fanfold::GroupedGemmArgs args = fanfold::cuda::grouped_gemm_args(*operands, *sizes);
  emulate(&args, grid);
}
