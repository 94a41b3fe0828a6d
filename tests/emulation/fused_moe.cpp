// Calls of the fused MoE kernel with the arguments that csrc/cuda/fused_moe.cpp makes; only the maps
// of tensors are not the driver's.
#include "cuda/fused_moe.h"

#include <cstdlib>
#include <cstring>

#include "ctas.hpp"
#include "cuda/tensor_map.h"
#include "tensor_map.hpp"

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

using namespace fanfold::cuda;

// What a layer sets once.
struct FusedMoeLayer {
  FusedMoeSizes sizes;
  int32_t rank;
  const uintptr_t* peers;
  uintptr_t reports;
  int64_t timeout_ns;
  float clamp;
  int32_t rows_for_groups;
};

// Where the results of rows are in a layer's memory.
extern "C" __attribute__((visibility("default"))) int64_t
fused_moe_results(const FusedMoeSizes* sizes) {
  return FusedMoeLayout(*sizes).shared.slots;
}

using Emulate = void(const void* arguments, emulation::Grid* grid);

// Runs one call on one rank, to its end; without `call` the rank refuses.
extern "C" __attribute__((visibility("default"))) void run_fused_moe(const FusedMoeLayer* layer,
                                                                     const FusedMoeCall* call,
                                                                     Emulate* emulate,
                                                                     emulation::Grid* grid) {
  FusedMoe core(layer->sizes, layer->rank, layer->peers, layer->reports);
  core.set_timeout_ns(layer->timeout_ns);
  core.set_clamp(layer->clamp);
  core.set_rows_for_groups(layer->rows_for_groups);
  const fanfold::FusedMoeArgs args = call != nullptr ? core.arguments(*call) : core.refusal();
  emulate(&args, grid);
}
