#include "cuda/gin_hosts.h"

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "cuda/high_throughput.h"
#include "cuda/high_throughput_hosts.h"
#include "cuda/kernel.h"
#include "cuda/low_latency_hosts.h"
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

// Of ranks that reach each other by NCCL's GIN.
void bind_gin_hosts(nb::module_& module) {
  using cuda::GinWindow;
  nb::class_<GinWindow>(module, "GinWindow")
      .def(
          "__init__",
          [](GinWindow* window, int32_t rank, std::vector<int32_t> hosts, uintptr_t communicator,
             uintptr_t handle, uintptr_t memory, int64_t received, int64_t sent) {
            new (window) GinWindow{.rank = rank,
                                   .hosts = std::move(hosts),
                                   .communicator = communicator,
                                   .window = handle,
                                   .memory = memory,
                                   .received = received,
                                   .sent = sent,
                                   .slots = 1,
                                   .words = {},
                                   .rows = {}};
          },
          "rank"_a, "hosts"_a, "communicator"_a, "handle"_a, "memory"_a, "received"_a, "sent"_a)
      .def_rw("slots", &GinWindow::slots)
      .def_rw("words", &GinWindow::words)
      .def_rw("rows", &GinWindow::rows)
      .def(
          "block",
          [](const GinWindow& window, uintptr_t at) {
            const std::vector<std::byte> block = cuda::hosts_block(window, at);
            return nb::bytes(block.data(), block.size());
          },
          "at"_a, "What stands at this address of the GPU's memory before the first call.");
  module.attr("GIN_WORD_BYTES") = sizeof(GinWord);
  nb::class_<GinBetweenCallsArgs>(module, "GinBetweenCallsArgs")
      .def(
          "__init__",
          [](GinBetweenCallsArgs* args, uintptr_t hosts, uintptr_t numbers, int64_t timeout_ns,
             uintptr_t late) {
            new (args) GinBetweenCallsArgs{.hosts = reinterpret_cast<const RemoteHosts*>(hosts),
                                           .numbers = reinterpret_cast<const uint64_t*>(numbers),
                                           .timeout_ns = timeout_ns,
                                           .late = reinterpret_cast<int32_t*>(late)};
          },
          "hosts"_a, "numbers"_a, "timeout_ns"_a, "late"_a)
      .def_prop_ro(
          "address",
          [](const GinBetweenCallsArgs& args) { return reinterpret_cast<uintptr_t>(&args); })
      .def(
          "launch",
          [](const GinBetweenCallsArgs& args, const cuda::Kernel& kernel, int ctas, int threads,
             uintptr_t stream, bool early) {
            kernel.launch(&args, sizeof args,
                          {.ctas = ctas, .threads = threads, .stream = stream, .early = early});
          },
          "kernel"_a, "ctas"_a, "threads"_a, "stream"_a, "early"_a);
  module.def(
      "cuda_high_throughput_words_bytes",
      [](int32_t ranks) { return cuda::high_throughput_offsets(ranks, 0).ready; }, "ranks"_a,
      "Of the words before the rings that kernels put together, from the first byte on.");
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
  bind_gin_hosts(module);
}

}  // namespace fanfold::bindings
