#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>

#include "bindings/bindings.h"
#include "cuda/grouped_gemm.h"
#include "cuda/kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {

void bind_cuda_grouped_gemm(nb::module_& module) {
  nb::class_<GroupedGemmArgs>(module, "CudaGroupedGemmArgs")
      .def(
          "__init__",
          [](GroupedGemmArgs* self, const std::array<uintptr_t, 6>& at,
             const std::array<uint64_t, 6>& sizes, uint32_t tile_rows) {
            new (self) GroupedGemmArgs(cuda::grouped_gemm_args(
                {at[0], at[1], at[2], at[3], at[4], at[5]},
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
