// device/tensor_copy.cuh on a CPU: plain loops over a box. A load is done when it is asked for, a
// store as late as it may be (device/bulk.cuh).
#pragma once

#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/memory.cuh"
#include "late.hpp"
#include "layout/types.h"

namespace fanfold {

using emulation::Box;

inline void prefetch_map(const TensorMap*) {}

// To the places of `shared` and `barrier` in one CTA of the cluster.
inline void emulated_load_box(unsigned cta, const TensorMap* map, Box at, void* shared,
                              ArrivalBarrier* barrier) {
  const bool is_own = cta == emulation::cta_of_cluster();
  unsigned char* memory = is_own ? emulated_shared : emulated_place(emulated_shared, cta);
  const uint32_t bytes = emulation::load_box(memory, shared_address(shared), map, at);
  complete(is_own ? barrier : emulated_place(barrier, cta), bytes);
}

inline void load_box(void* shared, const TensorMap* map, Box at, ArrivalBarrier* barrier) {
  emulated_load_box(emulation::cta_of_cluster(), map, at, shared, barrier);
}
inline void load_box_multicast(void* shared, const TensorMap* map, Box at, ArrivalBarrier* barrier,
                               uint16_t ctas) {
  for (unsigned cta = 0; ctas >> cta != 0; ++cta)
    if (ctas >> cta & 1) emulated_load_box(cta, map, at, shared, barrier);
}

inline void store_box(const TensorMap* map, Box at, const void* shared) {
  emulation::store_box_late(map, at, emulated_shared, shared_address(shared));
}
inline void store_box(const TensorMap* map, int x, int y, const void* shared) {
  store_box(map, Box{x, y, 0}, shared);
}

}  // namespace fanfold
