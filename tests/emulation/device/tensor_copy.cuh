// device/tensor_copy.cuh on a CPU: plain loops over a box. A load is done when it is asked for, a
// store as late as it may be (device/bulk.cuh).
#pragma once

#include <cstdlib>
#include <memory>

#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/memory.cuh"
#include "layout/types.h"
#include "tensor_map.hpp"

namespace fanfold {

struct Box {
  int x, y, z;
};

// A box in global memory and in shared memory, row by row.
class EmulatedBox {
 public:
  EmulatedBox(const TensorMap* map, Box at, const void* shared)
      : map_(emulation::TensorMap::of(map)), at_(at), shared_(shared_address(shared)) {
    if (shared_ % (map_.swizzles ? 1024 : 128) != 0) std::abort();
  }

  int64_t bytes() const { return map_.box[1] * row_bytes(); }

  // `to(place, from)` for each byte of the box: its place in shared memory, and where it is in global
  // memory, null outside of the tensor.
  template <class Move>
  void for_each_byte(const Move& move) const {
    for (int64_t y = 0; y < map_.box[1]; ++y)
      for (int64_t x = 0; x < row_bytes(); ++x) move(place(y * row_bytes() + x), global(x, y));
  }

 private:
  int64_t row_bytes() const { return map_.box[0] * map_.element_bytes; }

  uint32_t place(int64_t byte) const {
    const uint32_t linear = shared_ + static_cast<uint32_t>(byte);
    return map_.swizzles ? linear ^ (linear >> 7 & 7u) << 4 : linear;
  }
  unsigned char* global(int64_t x, int64_t y) const {
    const int64_t column = at_.x * map_.element_bytes + x;
    const int64_t row = at_.y + y;
    const bool inside = 0 <= column && column < map_.sizes[0] * map_.element_bytes && 0 <= row &&
                        row < map_.sizes[1] && 0 <= at_.z && at_.z < map_.sizes[2];
    if (!inside) return nullptr;
    return map_.address + column + row * map_.strides[0] + at_.z * map_.strides[1];
  }

  const emulation::TensorMap map_;
  const Box at_;
  const uint32_t shared_;
};

inline void prefetch_map(const TensorMap*) {}

// To the places of `shared` and `barrier` in one CTA of the cluster.
inline void emulated_load_box(unsigned cta, const EmulatedBox& box, ArrivalBarrier* barrier) {
  const bool is_own = cta == emulation::cta_of_cluster();
  unsigned char* memory = is_own ? emulated_shared : emulated_place(emulated_shared, cta);
  box.for_each_byte([&](uint32_t place, const unsigned char* from) {
    memory[place] = from != nullptr ? *from : 0;
  });
  complete(is_own ? barrier : emulated_place(barrier, cta), static_cast<uint32_t>(box.bytes()));
}

inline void load_box(void* shared, const TensorMap* map, Box at, ArrivalBarrier* barrier) {
  emulated_load_box(emulation::cta_of_cluster(), {map, at, shared}, barrier);
}
inline void load_box_multicast(void* shared, const TensorMap* map, Box at, ArrivalBarrier* barrier,
                               uint16_t ctas) {
  const EmulatedBox box(map, at, shared);
  for (unsigned cta = 0; ctas >> cta != 0; ++cta)
    if (ctas >> cta & 1) emulated_load_box(cta, box, barrier);
}

inline void store_box(const TensorMap* map, Box at, const void* shared) {
  const EmulatedBox box(map, at, shared);
  const auto bytes = std::make_shared<std::vector<unsigned char>>();
  const auto read = [=] {
    box.for_each_byte(
        [&](uint32_t place, unsigned char*) { bytes->push_back(emulated_shared[place]); });
  };
  const auto write = [=] {
    size_t next = 0;
    box.for_each_byte([&](uint32_t, unsigned char* to) {
      if (to != nullptr) *to = (*bytes)[next];
      ++next;
    });
  };
  LateStores::own().open.push_back({read, write});
}
inline void store_box(const TensorMap* map, int x, int y, const void* shared) {
  store_box(map, Box{x, y, 0}, shared);
}

}  // namespace fanfold
