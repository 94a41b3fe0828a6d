// Maps of tensors as device/tensor_copy.cuh here reads them, in place of csrc/cuda/tensor_map.cpp.
#include "tensor_map.hpp"

#include <cstdlib>
#include <cstring>

#include "cuda/tensor_map.h"

namespace fanfold::cuda {
namespace {

int64_t bytes_of(TensorType type) {
  switch (type) {
    case TensorType::UINT8:
      return 1;
    case TensorType::BFLOAT16:
      return 2;
    case TensorType::FLOAT32:
      return 4;
  }
  std::abort();
}

}  // namespace

// Ends the process where the driver would refuse.
TensorMap tensor_map(const void* address, const TensorShape& shape, const char* name) {
  static_cast<void>(name);
  emulation::TensorMap tensor{};
  tensor.address = static_cast<unsigned char*>(const_cast<void*>(address));
  tensor.element_bytes = bytes_of(shape.type);
  tensor.swizzles = shape.swizzle == Swizzle::BYTES_128;
  auto misaligned = reinterpret_cast<uintptr_t>(address);
  for (int i = 0; i < 3; ++i) tensor.sizes[i] = static_cast<int64_t>(shape.sizes[i]);
  for (int i = 0; i < 2; ++i) {
    tensor.strides[i] = static_cast<int64_t>(shape.strides[i]);
    misaligned |= shape.strides[i];
    tensor.box[i] = shape.box[i];
    if (tensor.box[i] > 256) std::abort();
  }
  const int64_t row_bytes = tensor.box[0] * tensor.element_bytes;
  if (misaligned % 16 != 0 || row_bytes % 16 != 0) std::abort();
  if (tensor.swizzles && row_bytes != 128) std::abort();
  TensorMap map{};
  std::memcpy(&map, &tensor, sizeof tensor);
  return map;
}

}  // namespace fanfold::cuda
