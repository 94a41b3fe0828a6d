#include "cuda/low_latency_hosts.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {

void bind_cuda_low_latency_hosts(nb::module_& module) {
  module.def(
      "cuda_low_latency_hosts_bytes",
      [](const LowLatencyGeometry& geometry) { return LowLatencyHostsLayout{geometry}.bytes(); },
      "geometry"_a, "Bytes of a rank's memory between hosts.");
  module.def("cuda_low_latency_hosts_clear", &cuda::clear_received, "memory"_a, "geometry"_a,
             "Prepares what is received for the first call of a geometry.");
  module.def(
      "cuda_low_latency_hosts_pinned",
      [](const SymmetricMemory& memory, const LowLatencyGeometry& geometry) {
        std::vector<std::tuple<uintptr_t, int64_t>> ranges;
        for (const cuda::PinnedRange& range : cuda::pinned_ranges(memory, geometry)) {
          ranges.emplace_back(reinterpret_cast<uintptr_t>(range.data), range.bytes);
        }
        return ranges;
      },
      "memory"_a, "geometry"_a, "Address and bytes of each range of pages that kernels use.");
  static_assert(offsetof(LowLatencyHosts, seen) == 0);
  module.attr("CUDA_LOW_LATENCY_HOSTS_SEEN_BYTES") = sizeof(HostsSeen);
  module.def(
      "cuda_low_latency_hosts_block",
      [](const SymmetricMemory& memory, uintptr_t at) {
        const std::vector<std::byte> block = cuda::hosts_block(memory, at);
        return nb::bytes(block.data(), block.size());
      },
      "memory"_a, "at"_a, "What stands at this address of the GPU's memory before the first call.");
}

}  // namespace fanfold::bindings
