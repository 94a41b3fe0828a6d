// What stands in a TensorMap where no driver has written it.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout/tensor_map.h"

namespace emulation {

// Of three dimensions, the innermost first; sizes and box in elements, strides in bytes.
struct TensorMap {
  unsigned char* address;
  int64_t sizes[3];
  int64_t strides[2];
  int64_t box[2];
  int64_t element_bytes;
  int64_t swizzles;  // 16-byte units of 128 bytes, by the place of these among eight

  static TensorMap of(const fanfold::TensorMap* map) {
    TensorMap tensor;
    std::memcpy(&tensor, map, sizeof tensor);
    return tensor;
  }
};
static_assert(sizeof(TensorMap) <= sizeof(fanfold::TensorMap));

}  // namespace emulation
