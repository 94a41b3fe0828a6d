// The arguments of the fused MoE kernel, and the memory that it works in.
#pragma once

#include <cstdint>

#include "cuda/kernel.h"
#include "layout/fused_moe.h"

namespace fanfold::cuda {

// Fixed for a layer.
struct FusedMoeSizes {
  int32_t experts;  // of this rank
  int32_t top_k;
  int32_t hidden, intermediate;  // multiples of 128
  int32_t tokens;                // most of a call
  int32_t ctas;

  // For which there is room: each expert's rows begin on a multiple of 128.
  int64_t rows() const;
};

// Where the parts of a layer's memory begin, in bytes; `zeroed` of them must be zero at first.
struct FusedMoeLayout {
  explicit FusedMoeLayout(const FusedMoeSizes& sizes);

  int64_t state, counters[2];
  int64_t zeroed;
  int64_t rows, activations, slots;
  int64_t a_scales[2], row_weights;
  int64_t counts, row_of, copies, tables;
  int64_t bytes;
};

// Addresses of one call; FusedMoeArgs says of what.
struct FusedMoeCall {
  int32_t tokens;
  uintptr_t x, x_scales;
  int64_t scale_strides[2];
  uintptr_t topk_idx, topk_weights;
  uintptr_t l1, l1_scales, l2, l2_scales;
  uintptr_t addend, y, statistics, spans;  // or 0, but for y
};

class FusedMoe {
 public:
  // `memory` is layout().bytes on a boundary of 1024 bytes; `reports` has kReportKinds.
  FusedMoe(const FusedMoeSizes& sizes, uintptr_t memory, uintptr_t reports);

  int64_t timeout_ns() const { return fixed_.timeout_ns; }
  void set_timeout_ns(int64_t timeout_ns) { fixed_.timeout_ns = timeout_ns; }
  void set_clamp(float clamp) { fixed_.clamp = clamp; }
  // From so many blocks of 128 rows on, tokens are summed while columns are computed.
  void set_blocks_for_groups(int32_t blocks) { fixed_.blocks_for_groups = blocks; }

  // Throws DriverFailure if the driver refuses a map.
  FusedMoeArgs arguments(const FusedMoeCall& call) const;

 private:
  FusedMoeSizes sizes_;
  FusedMoeArgs fixed_{};
};

}  // namespace fanfold::cuda
