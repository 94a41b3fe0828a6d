// Operand tiles copied to shared memory and thrown away: what the tensor cores could be fed.
#pragma once

#include "stages.cuh"

namespace fanfold::probe {

template <class T>
__global__ void __launch_bounds__((kMathWarps + 1) * 32, 1)
    feed_kernel(const __grid_constant__ Operands operands) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& ring = *reinterpret_cast<Ring<T>*>(memory);
  if (threadIdx.x == 0) init_ring(ring);
  if constexpr (T::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_barrier();
  }
  if (threadIdx.x / 32 == kMathWarps) {
    if (threadIdx.x % 32 == 0) produce(ring, operands);
  } else {
    Position<T> at;
    for (int w = blockIdx.x / T::kCluster; w < operands.works; w += gridDim.x / T::kCluster)
      for (int k = 0; k < operands.blocks_k; ++k, at.advance()) {
        await_phase(&ring.full[at.stage], at.parity, Impatience{});
        release_stage(ring, at.stage);
      }
  }
  if constexpr (T::kCluster > 1) cluster_barrier();
}

}  // namespace fanfold::probe
