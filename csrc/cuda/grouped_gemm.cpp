#include "cuda/grouped_gemm.h"

#include "cuda/tensor_map.h"

namespace fanfold::cuda {

GroupedGemmArgs grouped_gemm_args(const GroupedGemmOperands& at, const GroupedGemmSizes& sizes) {
  const auto pointer = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
  const auto [slices, rows, scale_rows, columns, depth, groups, tile_rows] = sizes;
  GroupedGemmArgs args{};
  args.a = tensor_map(pointer(at.a),
                      {.type = TensorType::UINT8,
                       .sizes = {depth, rows, slices},
                       .strides = {depth, rows * depth},
                       .box = {128, tile_rows / 2},
                       .swizzle = Swizzle::BYTES_128},
                      "a");
  args.a_scales = tensor_map(pointer(at.a_scales),
                             {.type = TensorType::FLOAT32,
                              .sizes = {rows, depth / 128, slices},
                              .strides = {scale_rows * 4, depth / 128 * scale_rows * 4},
                              .box = {tile_rows, 1},
                              .swizzle = Swizzle::NONE},
                             "the scales of a");
  args.b = tensor_map(pointer(at.b),
                      {.type = TensorType::UINT8,
                       .sizes = {depth, columns, groups},
                       .strides = {depth, columns * depth},
                       .box = {128, 128},
                       .swizzle = Swizzle::BYTES_128},
                      "b");
  args.d = tensor_map(pointer(at.d),
                      {.type = TensorType::BFLOAT16,
                       .sizes = {columns, rows, slices},
                       .strides = {columns * 2, rows * columns * 2},
                       .box = {64, 64},
                       .swizzle = Swizzle::BYTES_128},
                      "d");
  args.b_scales = reinterpret_cast<const float*>(at.b_scales);
  args.groups = reinterpret_cast<const int32_t*>(at.groups);
  args.rows = static_cast<int32_t>(rows);
  return args;
}

}  // namespace fanfold::cuda
