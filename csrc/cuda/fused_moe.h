// The arguments of the fused MoE kernel, and the memory that it works in.
#pragma once

#include <cstdint>

#include "cuda/kernel.h"
#include "layout/fused_moe.h"

namespace fanfold::cuda {

// Fixed for a layer, the same on all ranks.
struct FusedMoeSizes {
  int32_t ranks;
  int32_t experts;  // of all ranks
  int32_t top_k;
  int32_t hidden, intermediate;  // multiples of 128
  int32_t tokens;                // most of a rank in a call

  int32_t local_experts() const { return experts / ranks; }
  // For which a rank has room: all tokens of all ranks may go to its experts, and each expert's
  // rows begin on a multiple of 128.
  int64_t rows() const;
};

// Where the parts of every rank's memory begin, in bytes; `zeroed` of them must be zero at first.
struct FusedMoeLayout {
  explicit FusedMoeLayout(const FusedMoeSizes& sizes);

  FusedMoeOffsets shared;
  int64_t state;
  int64_t zeroed;
  int64_t activations, activation_scales;
  int64_t counts, places, copies, tables;
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
  float clamp;                             // read by kernels that limit the activation
};

class FusedMoe {
 public:
  // `peers`: of each rank the address of its memory, FusedMoeLayout::bytes on 128 bytes;
  // `reports` has kReportKinds.
  FusedMoe(const FusedMoeSizes& sizes, int32_t rank, const uintptr_t* peers, uintptr_t reports);

  int64_t timeout_ns() const { return fixed_.timeout_ns; }
  void set_timeout_ns(int64_t timeout_ns) { fixed_.timeout_ns = timeout_ns; }
  // From so many rows of a rank on, tokens are summed while columns are computed.
  void set_rows_for_groups(int32_t rows) { fixed_.rows_for_groups = rows; }

  // Throws DriverFailure if the driver refuses a map.
  FusedMoeArgs arguments(const FusedMoeCall& call) const;
  // Of a call in which this rank takes no part.
  FusedMoeArgs refusal() const;

 private:
  FusedMoeSizes sizes_;
  FusedMoeArgs fixed_{};
};

}  // namespace fanfold::cuda
