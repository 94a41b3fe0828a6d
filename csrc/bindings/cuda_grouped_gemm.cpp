#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>

#include "bindings/bindings.h"
#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "layout/grouped_gemm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using cuda::Swizzle;
using cuda::TensorType;

// The operands of one call, as addresses on the GPU.
struct Operands {
  uintptr_t a, a_scales, b, b_scales, d, groups;
};

// The sizes of one call; `scale_rows` is the number of rows for which `a_scales` has memory.
struct Sizes {
  uint64_t slices, rows, scale_rows, columns, depth, groups;
  uint32_t tile_rows;
};

GroupedGemmArgs arguments(const Operands& at, const Sizes& sizes) {
  const auto pointer = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
  const auto [slices, rows, scale_rows, columns, depth, groups, tile_rows] = sizes;
  GroupedGemmArgs args{};
  args.a = cuda::tensor_map(pointer(at.a),
                            {.type = TensorType::UINT8,
                             .sizes = {depth, rows, slices},
                             .strides = {depth, rows * depth},
                             .box = {128, tile_rows / 2},
                             .swizzle = Swizzle::BYTES_128},
                            "a");
  args.a_scales = cuda::tensor_map(pointer(at.a_scales),
                                   {.type = TensorType::FLOAT32,
                                    .sizes = {rows, depth / 128, slices},
                                    .strides = {scale_rows * 4, depth / 128 * scale_rows * 4},
                                    .box = {tile_rows, 1},
                                    .swizzle = Swizzle::NONE},
                                   "the scales of a");
  args.b = cuda::tensor_map(pointer(at.b),
                            {.type = TensorType::UINT8,
                             .sizes = {depth, columns, groups},
                             .strides = {depth, columns * depth},
                             .box = {128, 128},
                             .swizzle = Swizzle::BYTES_128},
                            "b");
  args.d = cuda::tensor_map(pointer(at.d),
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

}  // namespace

void bind_cuda_grouped_gemm(nb::module_& module) {
  nb::class_<GroupedGemmArgs>(module, "CudaGroupedGemmArgs")
      .def(
          "__init__",
          [](GroupedGemmArgs* self, const std::array<uintptr_t, 6>& at,
             const std::array<uint64_t, 6>& sizes, uint32_t tile_rows) {
            new (self) GroupedGemmArgs(
                arguments({at[0], at[1], at[2], at[3], at[4], at[5]},
                          {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], tile_rows}));
          },
          // a, its scales, b, its scales, d, the groups
          "addresses"_a,
          // slices, rows, rows of the scales' memory, columns, depth, groups
          "sizes"_a, "tile_rows"_a)
      .def(
          "launch",
          [](const GroupedGemmArgs& self, const cuda::Kernel& kernel, int ctas, int threads,
             int shared_bytes, uintptr_t stream) {
            kernel.launch(&self, sizeof self,
                          {.ctas = ctas,
                           .threads = threads,
                           .shared_bytes = shared_bytes,
                           .stream = stream,
                           .cluster = 2});
          },
          "kernel"_a, "ctas"_a, "threads"_a, "shared_bytes"_a, "stream"_a);
}

}  // namespace fanfold::bindings
