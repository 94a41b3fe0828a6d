#include "cuda/tensor_map.h"

#include <algorithm>
#include <string>

namespace fanfold::cuda {

TensorMap tensor_map(const void* address, const TensorShape& shape, const char* name) {
  constexpr int NO_INTERLEAVE = 0;
  constexpr int PROMOTE_TO_256_BYTES = 3;
  constexpr int ZEROS_OUT_OF_BOUNDS = 0;
  constexpr unsigned STEPS[3] = {1, 1, 1};
  // The driver refuses a size of 0; such a tensor has no element that a kernel asks for.
  uint64_t sizes[3];
  std::transform(shape.sizes, shape.sizes + 3, sizes,
                 [](uint64_t size) { return std::max<uint64_t>(size, 1); });
  const unsigned box[3] = {shape.box[0], shape.box[1], 1};
  TensorMap map{};
  const Result result = driver().tensor_map_encode_tiled(
      &map, shape.type, 3, const_cast<void*>(address), sizes, shape.strides, box, STEPS,
      NO_INTERLEAVE, shape.swizzle, PROMOTE_TO_256_BYTES, ZEROS_OUT_OF_BOUNDS);
  if (result != 0) {
    driver().check(result, "cuTensorMapEncodeTiled",
                   std::string("the map of ") + name + ": " + std::to_string(sizes[0]) + " x " +
                       std::to_string(sizes[1]) + " x " + std::to_string(sizes[2]) +
                       " elements at address " +
                       std::to_string(reinterpret_cast<uintptr_t>(address)) + ", strides of " +
                       std::to_string(shape.strides[0]) + " and " +
                       std::to_string(shape.strides[1]) + " bytes");
  }
  return map;
}

}  // namespace fanfold::cuda
