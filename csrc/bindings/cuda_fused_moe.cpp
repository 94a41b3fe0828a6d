#include <cstdint>

#include "bindings/address.h"
#include "bindings/bindings.h"
#include "cuda/fused_moe.h"

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
          [](FusedMoeSizes* self, int32_t experts, int32_t top_k, int32_t hidden,
             int32_t intermediate, int32_t tokens, int32_t ctas) {
            new (self) FusedMoeSizes{.experts = experts,
                                     .top_k = top_k,
                                     .hidden = hidden,
                                     .intermediate = intermediate,
                                     .tokens = tokens,
                                     .ctas = ctas};
          },
          nb::kw_only(), "experts"_a, "top_k"_a, "hidden"_a, "intermediate"_a, "tokens"_a, "ctas"_a)
      .def_ro("ctas", &FusedMoeSizes::ctas)
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
      .def_rw("spans", &FusedMoeCall::spans);
}

}  // namespace

void bind_cuda_fused_moe(nb::module_& module) {
  module.attr("CUDA_FUSED_MOE_REPORT_BYTES") = kReportKinds * sizeof(Report);
  module.attr("CUDA_FUSED_MOE_MOST_CTAS") = kFusedMoeMostCtas;
  module.attr("CUDA_FUSED_MOE_SPAN_WORDS") = sizeof(FusedMoeSpan) / 8;
  bind_sizes(module);
  bind_call(module);
  nb::class_<FusedMoe>(module, "CudaFusedMoe")
      .def(nb::init<const FusedMoeSizes&, uintptr_t, uintptr_t>(), "sizes"_a, "memory"_a,
           "reports"_a)
      .def_prop_rw("timeout_ns", &FusedMoe::timeout_ns, &FusedMoe::set_timeout_ns)
      .def("set_clamp", &FusedMoe::set_clamp, "clamp"_a)
      .def("set_blocks_for_groups", &FusedMoe::set_blocks_for_groups, "blocks"_a)
      .def(
          "launch",
          [](const FusedMoe& self, const FusedMoeCall& call, const cuda::Kernel& kernel, int ctas,
             int threads, int shared_bytes, uintptr_t stream) {
            const FusedMoeArgs args = self.arguments(call);
            kernel.launch(&args, sizeof args,
                          {.ctas = ctas,
                           .threads = threads,
                           .shared_bytes = shared_bytes,
                           .stream = stream,
                           .cluster = 2});
          },
          "call"_a, "kernel"_a, "ctas"_a, "threads"_a, "shared_bytes"_a, "stream"_a);
}

}  // namespace fanfold::bindings
