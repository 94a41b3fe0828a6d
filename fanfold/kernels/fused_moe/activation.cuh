// What becomes of the first GEMM's results.
#pragma once

#include "device/numbers.cuh"
#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// Of the largest of 128 activations, which have one scale.
inline constexpr float kSmallestActivation = 1e-6f;

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float silu(float v, float minus_log2e) {
  return v * reciprocal(1.0f + exp2_approximately(minus_log2e * v));
}

// fanfold.FusedMoE says what a clamp does; a NaN stays one.
__device__ __forceinline__ float swiglu(float gate, float up, float clamp,
                                        float minus_log2e = -kLog2E) {
  if constexpr (kClamps != 0) {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
  }
  return silu(gate, minus_log2e) * up;
}

}  // namespace fanfold::fused_moe
