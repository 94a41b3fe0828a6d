#include "host/low_latency.h"

#include <nanobind/stl/string.h>

#include "bindings/address.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

void bind_geometry(nb::module_& module) {
  using G = LowLatencyGeometry;
  nb::class_<G>(module, "LowLatencyGeometry")
      .def(
          "__init__",
          [](G* self, int32_t ranks, int32_t experts, int32_t top_k, int32_t hidden,
             int32_t max_tokens) { new (self) G{ranks, experts, top_k, hidden, max_tokens}; },
          "ranks"_a, "experts"_a, "top_k"_a, "hidden"_a, "max_tokens"_a)
      .def_prop_ro("bytes", [](const G& self) { return LowLatencyLayout{self}.bytes(); });
}

void wait_for(LowLatencyOutputs& outputs, const Lent& signals, int32_t block_rows, int32_t blocks,
              int32_t ready_at) {
  outputs.ready = {array_of<const int32_t>(signals, "signals"), block_rows, blocks, ready_at};
}

void bind_arguments(nb::module_& module) {
  nb::enum_<RowEncoding>(module, "RowEncoding")
      .value("BF16", RowEncoding::kBf16)
      .value("FP8", RowEncoding::kFp8)
      .value("FP8_POWER_OF_TWO", RowEncoding::kFp8PowerOfTwo)
      .value("NVFP4", RowEncoding::kNvfp4);
  nb::enum_<ScaleFormat>(module, "ScaleFormat")
      .value("FLOAT32", ScaleFormat::kFloat32)
      .value("UE8M0", ScaleFormat::kUe8m0);

  using Tokens = LowLatencyTokens;
  nb::class_<Tokens> tokens(module, "LowLatencyTokens");
  tokens.def("__init__", [](Tokens* self) { new (self) Tokens{}; })
      .def_rw("tokens", &Tokens::tokens)
      .def_rw("weighted", &Tokens::weighted)
      .def_rw("encoding", &Tokens::encoding);
  def_array(tokens, "x", &Tokens::x);
  def_array(tokens, "topk_idx", &Tokens::topk_idx);
  def_array(tokens, "topk_weights", &Tokens::topk_weights);
  def_array(tokens, "global_scale", &Tokens::global_scale);

  using Received = LowLatencyReceived;
  nb::class_<Received> received(module, "LowLatencyReceived");
  received.def("__init__", [](Received* self) { new (self) Received{}; })
      .def_rw("encoding", &Received::encoding)
      .def_rw("scale_format", &Received::scale_format);
  def_array(received, "rows", &Received::rows);
  def_array(received, "scales", &Received::scales);
  def_array(received, "counts", &Received::counts);
  def_array(received, "source_tokens", &Received::source_tokens);
  def_array(received, "ranges", &Received::ranges);
  def_array(received, "row_weights", &Received::row_weights);
  def_array(received, "source_counts", &Received::source_counts);
  def_array(received, "experts", &Received::experts);
  def_array(received, "weights", &Received::weights);
  def_array(received, "expert_totals", &Received::expert_totals);
  def_array(received, "wait_ns", &Received::wait_ns);

  using Outputs = LowLatencyOutputs;
  nb::class_<Outputs> outputs(module, "LowLatencyOutputs");
  outputs.def("__init__", [](Outputs* self) { new (self) Outputs{}; })
      .def_rw("expert_stride", &Outputs::expert_stride)
      .def_rw("row_stride", &Outputs::row_stride)
      .def_rw("logfmt", &Outputs::logfmt);
  def_array(outputs, "y", &Outputs::y);
  def_array(outputs, "ranges", &Outputs::ranges);
  def_array(outputs, "source_counts", &Outputs::source_counts);
  def_array(outputs, "experts", &Outputs::experts);
  def_array(outputs, "weights", &Outputs::weights);

  outputs.def("wait_for", &wait_for, "signals"_a, "block_rows"_a, "blocks"_a, "ready_at"_a);

  using Result = LowLatencyResult;
  nb::class_<Result> result(module, "LowLatencyResult");
  result.def("__init__", [](Result* self) { new (self) Result{}; })
      .def_rw("tokens", &Result::tokens);
  def_array(result, "out", &Result::out);
  def_array(result, "topk_idx", &Result::topk_idx);
  def_array(result, "wait_ns", &Result::wait_ns);
}

// The late routing is a separate argument, because a struct must not keep the address of a Python
// object beyond the call.
uint32_t combine_send(LowLatency& self, const LowLatencyGeometry& geometry,
                      const LowLatencyOutputs& outputs, const LowLatencyTokens* late) {
  LowLatencyOutputs with_late = outputs;
  with_late.late_tokens = late;
  return self.combine_send(geometry, with_late);
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  bind_geometry(module);
  bind_arguments(module);
  nb::class_<LowLatency>(module, "LowLatency")
      .def(nb::init<SymmetricMemory&, int64_t, int64_t>(), "memory"_a, "offset"_a, "bytes"_a,
           nb::keep_alive<1, 2>())
      .def("dispatch_send", &LowLatency::dispatch_send, "geometry"_a, "tokens"_a, Unlocked())
      .def("dispatch_receive", &LowLatency::dispatch_receive, "epoch"_a, "received"_a, Unlocked())
      .def("combine_send", &combine_send, "geometry"_a, "outputs"_a, "late"_a.none() = nullptr,
           Unlocked())
      .def("combine_receive", &LowLatency::combine_receive, "epoch"_a, "result"_a, Unlocked())
      .def("refuse_dispatch", &LowLatency::refuse_dispatch, "reason"_a, Unlocked())
      .def("refuse_combine", &LowLatency::refuse_combine, "reason"_a, Unlocked())
      .def("quiesce", &LowLatency::quiesce, Unlocked())
      .def("reset", &LowLatency::reset, Unlocked());
}

}  // namespace fanfold::bindings
