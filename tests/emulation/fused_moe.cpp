// Calls of the fused MoE kernel with the arguments that csrc/cuda/fused_moe.cpp makes; only the maps
// of tensors are not the driver's.
#include "cuda/fused_moe.h"

#include "ctas.hpp"

using namespace fanfold::cuda;

// What a layer sets once.
struct FusedMoeLayer {
  FusedMoeSizes sizes;
  int32_t rank;
  const uintptr_t* peers;
  uintptr_t reports;
  int64_t timeout_ns;
  int32_t rows_for_groups;
};

// Where a GEMM stores its rows in a layer's memory: activations, results.
extern "C" __attribute__((visibility("default"))) int64_t
fused_moe_stored(const FusedMoeSizes* sizes, int32_t gemm) {
  const FusedMoeLayout layout(*sizes);
  return gemm == 0 ? layout.activations : layout.shared.slots;
}

// Where ranks tell how many rows they have, and which call a row is of.
extern "C" __attribute__((visibility("default"))) int64_t
fused_moe_counted(const FusedMoeSizes* sizes) {
  return FusedMoeLayout(*sizes).shared.counted;
}
extern "C" __attribute__((visibility("default"))) int64_t
fused_moe_row_calls(const FusedMoeSizes* sizes) {
  return FusedMoeLayout(*sizes).shared.row_calls;
}

// Where the CTAs of a rank count in calls of one parity.
extern "C" __attribute__((visibility("default"))) int64_t
fused_moe_counters(const FusedMoeSizes* sizes, int32_t parity) {
  return FusedMoeLayout(*sizes).shared.counters[parity];
}

// Runs one call on one rank, to its end; without `call` the rank refuses.
extern "C" __attribute__((visibility("default"))) void run_fused_moe(const FusedMoeLayer* layer,
                                                                     const FusedMoeCall* call,
                                                                     emulation::Emulate* emulate,
                                                                     emulation::Grid* grid) {
  FusedMoe core(layer->sizes, layer->rank, layer->peers, layer->reports);
  core.set_timeout_ns(layer->timeout_ns);
  core.set_rows_for_groups(layer->rows_for_groups);
  const fanfold::FusedMoeArgs args = call != nullptr ? core.arguments(*call) : core.refusal();
  emulate(&args, grid);
}
