// What becomes of the first GEMM's results.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// Of the largest of 128 activations, which have one scale.
inline constexpr float kSmallestActivation = 1e-6f;

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// fanfold.FusedMoE says what a clamp does; a NaN stays one.
__device__ __forceinline__ float swiglu(float gate, float up, float clamp) {
  if constexpr (kClamps != 0) {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
  }
  return silu(gate) * up;
}

}  // namespace fanfold::fused_moe
