#include "cuda/low_latency_hosts.h"

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "cuda/high_throughput_hosts.h"
#include "cuda/network_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

std::vector<std::tuple<uintptr_t, int64_t>> addresses_of(
    const std::vector<cuda::PinnedRange>& pinned) {
  std::vector<std::tuple<uintptr_t, int64_t>> ranges;
  ranges.reserve(pinned.size());
  for (const cuda::PinnedRange& range : pinned) {
    ranges.emplace_back(reinterpret_cast<uintptr_t>(range.data), range.bytes);
  }
  return ranges;
}

}  // namespace

void bind_cuda_hosts(nb::module_& module) {
  module.def("cuda_why_no_network_memory", &cuda::why_no_network_memory, "device"_a,
             "Why kernels of a GPU could not read what NICs write there; empty if they can.");
  module.def("cuda_make_dmabuf", &cuda::make_dmabuf, "address"_a, "bytes"_a,
             "A descriptor of whole pages of a GPU's memory; -1 if the driver makes none.");
  module.def(
      "cuda_low_latency_hosts_bytes",
      [](const LowLatencyGeometry& geometry) { return LowLatencyHostsLayout{geometry}.bytes(); },
      "geometry"_a, "Bytes of a rank's memory between hosts.");
  module.def(
      "cuda_low_latency_hosts_clear",
      [](const SymmetricMemory& memory, const LowLatencyGeometry& geometry) {
        cuda::clear_received(memory, geometry);
      },
      "memory"_a, "geometry"_a, "Prepares what is received for the first call of a geometry.");
  module.def(
      "cuda_low_latency_hosts_pinned",
      [](const SymmetricMemory& memory, const LowLatencyGeometry& geometry, bool rows_apart) {
        return addresses_of(cuda::pinned_ranges(memory, geometry, rows_apart));
      },
      "memory"_a, "geometry"_a, "rows_apart"_a,
      "Address and bytes of each range of pages that kernels use.");
  module.attr("CUDA_LOW_LATENCY_HOSTS_SEEN_AT") = offsetof(LowLatencyHosts, seen);
  module.attr("CUDA_LOW_LATENCY_HOSTS_SEEN_BYTES") = sizeof(HostsSeen);
  module.def(
      "cuda_low_latency_hosts_block",
      [](const SymmetricMemory& memory, uintptr_t at, uintptr_t rows) {
        const std::vector<std::byte> block = cuda::hosts_block(memory, at, rows);
        return nb::bytes(block.data(), block.size());
      },
      "memory"_a, "at"_a, "rows"_a,
      "What stands at this address of the GPU's memory before the first call. Rows have the memory "
      "at the address `rows`; 0: that of the CPU.");
  module.def(
      "cuda_high_throughput_hosts_pinned",
      [](const SymmetricMemory& memory, int64_t ring_bytes, bool rows_apart) {
        return addresses_of(cuda::pinned_ranges(memory, ring_bytes, rows_apart));
      },
      "memory"_a, "ring_bytes"_a, "rows_apart"_a,
      "Address and bytes of each range of pages that kernels use.");
  module.def(
      "cuda_high_throughput_hosts_clear",
      [](const SymmetricMemory& memory, int64_t ring_bytes) {
        cuda::clear_received(memory, ring_bytes);
      },
      "memory"_a, "ring_bytes"_a, "Takes away what says that something has arrived.");
}

}  // namespace fanfold::bindings
