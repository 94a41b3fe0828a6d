// Copies of boxes of a tensor between global and shared memory (TMA with tensor maps), to one CTA
// or to several of its cluster. Compute capability 9.0 and later.
//
// A map is a kernel parameter (`const __grid_constant__`) or lies in global memory. Coordinates
// count elements, the innermost first; what lies outside of the tensor is loaded as zeros and not
// stored. A box in shared memory begins on 128 bytes, with the swizzle of 128 bytes on 1024.
#pragma once

#include "device/bulk.cuh"
#include "device/memory.cuh"
#include "layout/tensor_map.h"
#include "layout/types.h"

namespace fanfold {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

struct Box {
  int x, y, z;  // of a tensor of three dimensions; z: 0 of one with two
};

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Its bytes count for the barrier's phase, which must expect them.
__device__ __forceinline__ void load_box(void* shared, const TensorMap* map, Box at,
                                         ArrivalBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(barrier))
      : "memory");
}

// To the same place in every CTA of the cluster whose bit is set; its bytes count for the barrier
// that stands where `barrier` is in that CTA.
__device__ __forceinline__ void load_box_multicast(void* shared, const TensorMap* map, Box at,
                                                   ArrivalBarrier* barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

// Of a tensor of two dimensions. A member of the thread's current group of bulk copies.
__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(x), "r"(y), "r"(shared_address(shared))
      : "memory");
}

// Of a tensor of three dimensions, likewise.
__device__ __forceinline__ void store_box(const TensorMap* map, Box at, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          map),
      "r"(at.x), "r"(at.y), "r"(at.z), "r"(shared_address(shared))
      : "memory");
}
#endif

}  // namespace fanfold
