#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bindings/address.h"
#include "bindings/bindings.h"
#include "cuda/fused_moe.h"
#include "fused_moe/schedule.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using cuda::FusedMoe;
using cuda::FusedMoeCall;
using cuda::FusedMoeLayout;
using cuda::FusedMoeSizes;

void bind_sizes(nb::module_& module) {
  nb::class_<FusedMoeSizes>(module, "CudaFusedMoeSizes")
      .def(
          "__init__",
          [](FusedMoeSizes* self, int32_t ranks, int32_t experts, int32_t top_k, int32_t hidden,
             int32_t intermediate, int32_t tokens) {
            new (self) FusedMoeSizes{.ranks = ranks,
                                     .experts = experts,
                                     .top_k = top_k,
                                     .hidden = hidden,
                                     .intermediate = intermediate,
                                     .tokens = tokens};
          },
          nb::kw_only(), "ranks"_a, "experts"_a, "top_k"_a, "hidden"_a, "intermediate"_a,
          "tokens"_a)
      .def_prop_ro("rows", &FusedMoeSizes::rows)
      .def_prop_ro("bytes", [](const FusedMoeSizes& self) { return FusedMoeLayout(self).bytes; })
      .def_prop_ro("zeroed", [](const FusedMoeSizes& self) { return FusedMoeLayout(self).zeroed; });
}

void bind_call(nb::module_& module) {
  nb::class_<FusedMoeCall> cls(module, "CudaFusedMoeCall");
  cls.def("__init__", [](FusedMoeCall* self) { new (self) FusedMoeCall{}; })
      .def_rw("tokens", &FusedMoeCall::tokens)
      .def_rw("x", &FusedMoeCall::x)
      .def_rw("x_scales", &FusedMoeCall::x_scales)
      .def(
          "set_scale_strides",
          [](FusedMoeCall& self, int64_t token, int64_t block) {
            self.scale_strides[0] = token;
            self.scale_strides[1] = block;
          },
          "token"_a, "block"_a)
      .def_rw("topk_idx", &FusedMoeCall::topk_idx)
      .def_rw("topk_weights", &FusedMoeCall::topk_weights)
      .def_rw("l1", &FusedMoeCall::l1)
      .def_rw("l1_scales", &FusedMoeCall::l1_scales)
      .def_rw("l2", &FusedMoeCall::l2)
      .def_rw("l2_scales", &FusedMoeCall::l2_scales)
      .def_rw("addend", &FusedMoeCall::addend)
      .def_rw("y", &FusedMoeCall::y)
      .def_rw("statistics", &FusedMoeCall::statistics)
      .def_rw("spans", &FusedMoeCall::spans)
      .def_rw("clamp", &FusedMoeCall::clamp);
}

void launch(const FusedMoeArgs& args, const cuda::Kernel& kernel, cuda::LaunchShape shape) {
  shape.cluster = 2;
  kernel.launch(&args, sizeof args, shape);
}

}  // namespace

void bind_cuda_fused_moe(nb::module_& module) {
  module.attr("CUDA_FUSED_MOE_REPORT_BYTES") = kReportKinds * sizeof(Report);
  module.attr("CUDA_FUSED_MOE_MOST_CTAS") = kFusedMoeMostCtas;
  module.attr("CUDA_FUSED_MOE_MOST_ROWS") = int64_t{fused_moe::kMostBlocks} * kFusedMoeBlockRows;
  module.attr("CUDA_FUSED_MOE_SPAN_WORDS") = sizeof(FusedMoeSpan) / 8;
  bind_sizes(module);
  bind_call(module);
  nb::class_<FusedMoe>(module, "CudaFusedMoe")
      .def(
          "__init__",
          [](FusedMoe* self, const FusedMoeSizes& sizes, int32_t rank,
             const std::vector<uintptr_t>& peers,
             uintptr_t reports) { new (self) FusedMoe(sizes, rank, peers.data(), reports); },
          "sizes"_a, "rank"_a, "peers"_a, "reports"_a)
      .def_prop_rw("timeout_ns", &FusedMoe::timeout_ns, &FusedMoe::set_timeout_ns)
      .def("set_rows_for_groups", &FusedMoe::set_rows_for_groups, "rows"_a)
      .def(
          "launch",
          [](const FusedMoe& self, const FusedMoeCall& call, const cuda::Kernel& kernel, int ctas,
             int threads, int shared_bytes, uintptr_t stream) {
            launch(self.arguments(call), kernel, {ctas, threads, shared_bytes, stream});
          },
          "call"_a, "kernel"_a, "ctas"_a, "threads"_a, "shared_bytes"_a, "stream"_a)
      .def(
          "refuse",
          [](const FusedMoe& self, const cuda::Kernel& kernel, int ctas, int threads,
             int shared_bytes, uintptr_t stream) {
            launch(self.refusal(), kernel, {ctas, threads, shared_bytes, stream});
          },
          "kernel"_a, "ctas"_a, "threads"_a, "shared_bytes"_a, "stream"_a);
}

}  // namespace fanfold::bindings
