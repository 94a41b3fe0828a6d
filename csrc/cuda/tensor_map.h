// Maps of tensors, of which kernels copy boxes to and from shared memory (TMA).
#pragma once

#include <cstdint>

#include "cuda/driver.h"
#include "layout/tensor_map.h"

namespace fanfold::cuda {

// A tensor of three dimensions, the innermost first: `sizes` in elements, `strides` of the other
// two in bytes, and the box that one copy moves, in elements. What lies outside is read as zeros
// and not written.
struct TensorShape {
  TensorType type;
  uint64_t sizes[3];
  uint64_t strides[2];
  uint32_t box[2];  // of one element in the outermost dimension
  Swizzle swizzle;
};

// Throws DriverFailure if the driver refuses, for example an address or a stride that is no
// multiple of 16 bytes; `name` says whose map it is.
TensorMap tensor_map(const void* address, const TensorShape& shape, const char* name);

}  // namespace fanfold::cuda
