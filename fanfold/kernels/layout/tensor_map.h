// The driver's description of a tensor in global memory, of which kernels copy boxes
// (device/tensor_copy.cuh).
#pragma once

#include "layout/types.h"

namespace fanfold {

// What cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace fanfold
