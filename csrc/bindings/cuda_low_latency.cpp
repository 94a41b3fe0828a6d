#include "cuda/low_latency.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/address.h"
#include "bindings/bindings.h"
#include "bindings/cuda_low_latency_fast_path.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using cuda::Kernel;
using cuda::LowLatency;

// Binds the fields that every call has.
template <typename Class, typename Args>
void def_call(Class& cls) {
  // The address of the struct, for callers that emulate the kernel on the host.
  cls.def_prop_ro("address", [](const Args& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def("copy", [](const Args& self) { return Args(self); })
      .def_prop_rw(
          "tokens", [](const Args& self) { return self.call.tokens; },
          [](Args& self, int32_t tokens) { self.call.tokens = tokens; })
      .def_prop_rw(
          "phases", [](const Args& self) { return self.call.phases; },
          [](Args& self, uint32_t phases) { self.call.phases = phases; })
      .def_prop_rw(
          "refused", [](const Args& self) { return self.call.refused != 0; },
          [](Args& self, bool refused) { self.call.refused = refused ? 1 : 0; });
}

template <typename Args>
void launch(const Args& args, const Kernel& kernel, int ctas, int threads, uintptr_t stream,
            bool early) {
  kernel.launch(&args, sizeof args,
                {.ctas = ctas, .threads = threads, .stream = stream, .early = early});
}

void bind_token_rows(nb::module_& module) {
  nb::class_<TokenRows> rows(module, "CudaTokenRows");
  rows.def(nb::init<>());
  def_address(rows, "topk_idx", &TokenRows::topk_idx);
  def_address(rows, "topk_weights", &TokenRows::topk_weights);
  def_address(rows, "sources", &TokenRows::sources);
  def_address(rows, "counts", &TokenRows::counts);
  def_address(rows, "cpu_counts", &TokenRows::cpu_counts);
  def_address(rows, "own_topk", &TokenRows::own_topk);
  rows.def_rw("most_tokens", &TokenRows::most_tokens)
      .def_rw("alignment", &TokenRows::alignment)
      .def(
          "set_scale_strides",
          [](TokenRows& self, int64_t of_row, int64_t of_block) {
            self.scale_strides[0] = of_row;
            self.scale_strides[1] = of_block;
          },
          "of_row"_a, "of_block"_a);
}

void bind_dispatch_arguments(nb::module_& module) {
  nb::class_<DispatchArgs> dispatch(module, "CudaDispatchArgs");
  def_call<nb::class_<DispatchArgs>, DispatchArgs>(dispatch);
  def_address(dispatch, "x", &DispatchArgs::x);
  def_address(dispatch, "topk_idx", &DispatchArgs::topk_idx);
  def_address(dispatch, "topk_weights", &DispatchArgs::topk_weights);
  def_address(dispatch, "global_scale", &DispatchArgs::global_scale);
  def_address(dispatch, "rows", &DispatchArgs::rows);
  def_address(dispatch, "scales", &DispatchArgs::scales);
  def_address(dispatch, "counts", &DispatchArgs::counts);
  def_address(dispatch, "source_tokens", &DispatchArgs::source_tokens);
  def_address(dispatch, "ranges", &DispatchArgs::ranges);
  def_address(dispatch, "aborted", &DispatchArgs::aborted);
  def_address(dispatch, "row_weights", &DispatchArgs::row_weights);
  def_address(dispatch, "table", &DispatchArgs::table);
  def_address(dispatch, "expert_totals", &DispatchArgs::expert_totals);
  def_address(dispatch, "wait_ns", &DispatchArgs::wait_ns);
  // For rows that come with scales: the strides of their tokens and blocks, in words.
  dispatch.def(
      "set_scales",
      [](DispatchArgs& self, uintptr_t scales, int64_t of_token, int64_t of_block) {
        self.x_scales = reinterpret_cast<const uint32_t*>(scales);
        self.x_scale_strides[0] = of_token;
        self.x_scale_strides[1] = of_block;
      },
      "scales"_a, "of_token"_a, "of_block"_a);
  bind_token_rows(module);
  dispatch.def_rw("token_rows", &DispatchArgs::token_rows);
  dispatch.def("launch", &launch<DispatchArgs>, "kernel"_a, "ctas"_a, "threads"_a, "stream"_a,
               "early"_a);
}

void bind_combine_arguments(nb::module_& module) {
  nb::class_<CombineArgs> combine(module, "CudaCombineArgs");
  def_call<nb::class_<CombineArgs>, CombineArgs>(combine);
  def_address(combine, "y", &CombineArgs::y);
  combine.def_rw("expert_stride", &CombineArgs::expert_stride)
      .def_rw("row_stride", &CombineArgs::row_stride)
      .def_rw("weighted", &CombineArgs::weighted);
  def_address(combine, "ranges", &CombineArgs::ranges);
  def_address(combine, "aborted", &CombineArgs::aborted);
  def_address(combine, "table", &CombineArgs::table);
  def_address(combine, "topk_idx", &CombineArgs::topk_idx);
  def_address(combine, "topk_weights", &CombineArgs::topk_weights);
  def_address(combine, "out", &CombineArgs::out);
  def_address(combine, "wait_ns", &CombineArgs::wait_ns);
  combine.def(
      "set_biases",
      [](CombineArgs& self, uintptr_t first, uintptr_t second) {
        self.biases[0] = reinterpret_cast<const unsigned char*>(first);
        self.biases[1] = reinterpret_cast<const unsigned char*>(second);
      },
      "first"_a, "second"_a);
  // For a kernel that waits for outputs; the fields of ReadySignals.
  combine.def(
      "wait_for",
      [](CombineArgs& self, uintptr_t signals, int32_t block_rows, int32_t blocks,
         int32_t ready_at) {
        self.ready = {reinterpret_cast<const uint32_t*>(signals), block_rows, blocks, ready_at};
      },
      "signals"_a, "block_rows"_a, "blocks"_a, "ready_at"_a);
  combine.def("launch", &launch<CombineArgs>, "kernel"_a, "ctas"_a, "threads"_a, "stream"_a,
              "early"_a);
}

void bind_fast_path(nb::module_& module) {
  nb::class_<FastPath>(module, "CudaFastPath")
      .def(
          "__init__",
          [](FastPath* self, nb::handle like, const LowLatencyGeometry& geometry, int64_t table_at,
             int64_t source_tokens_at, int64_t row_weights_at) {
            new (self) FastPath(like, geometry, {table_at, source_tokens_at, row_weights_at});
          },
          "like"_a.none(), "geometry"_a, "table_at"_a, "source_tokens_at"_a, "row_weights_at"_a)
      .def("dispatch", &FastPath::dispatch, "args"_a, "x"_a.none(), "topk_idx"_a.none(),
           "topk_weights"_a.none())
      .def("token_rows", &FastPath::token_rows, "args"_a, "x"_a.none(), "scales"_a.none(),
           "topk_idx"_a.none(), "topk_weights"_a.none())
      .def("late", &FastPath::late, "args"_a, "ranges"_a.none(), "topk_idx"_a.none(),
           "topk_weights"_a.none())
      .def("combine", &FastPath::combine, "args"_a, "tokens"_a, "y"_a.none(), "out"_a.none(),
           "block"_a.none())
      .def("combine_rows", &FastPath::combine_rows, "args"_a, "tokens"_a, "rows"_a, "y"_a.none(),
           "out"_a)
      .def("suits", &FastPath::suits, "x"_a.none(), "topk_idx"_a.none())
      .def("suits_token_rows", &FastPath::suits_token_rows, "x"_a.none(), "scales"_a.none(),
           "topk_idx"_a.none())
      .def("suits_handle", &FastPath::suits_handle, "y"_a.none(), "source_tokens"_a.none(),
           "ranges"_a.none(), "topk_idx"_a.none())
      .def("place", &FastPath::place, "args"_a, "rows"_a, "scales"_a.none(), "counts"_a, "block"_a,
           "weighted"_a)
      .def("place_late", &FastPath::place_late, "args"_a, "rows"_a, "scales"_a.none(), "counts"_a,
           "ranges"_a, "source_tokens"_a, "row_weights"_a.none());
}

}  // namespace

void bind_cuda_low_latency(nb::module_& module) {
  bind_dispatch_arguments(module);
  bind_combine_arguments(module);
  bind_fast_path(module);
  module.attr("CUDA_FEW_RANKS") = kFewRanks;
  module.attr("CUDA_STATE_PEERS_AT") = offsetof(LowLatencyState, peers);
  module.attr("CUDA_STATE_HOSTS_AT") = offsetof(LowLatencyState, hosts);
  module.attr("CUDA_STATE_BYTES") = sizeof(LowLatencyState);
  module.attr("CUDA_STATE_EPOCHS_BYTES") = sizeof(LowLatencyState::epochs);
  module.attr("CUDA_REPORT_BYTES") = sizeof(LowLatencyReports);
  module.attr("CUDA_REPORT_KINDS") = kReportKinds;
  // The place of `signal` among reports; `signal_bound` follows.
  module.attr("CUDA_SIGNAL_REPORT") = offsetof(LowLatencyReports, signal) / sizeof(Report);
  module.attr("CUDA_FIRST_EPOCH") = kFirstEpoch;
  module.attr("CUDA_MOST_CTAS") = kMostCtas;
  // Returns the offset from which on every word must hold the sentinel at first, and the number of
  // bytes in all.
  module.def(
      "cuda_low_latency_bytes",
      [](const LowLatencyGeometry& geometry, bool late, bool token_major) {
        const auto at = LowLatencyDeviceLayout{geometry, late, token_major}.offsets();
        return std::pair(at.headers, at.end);
      },
      "geometry"_a, "late"_a, "token_major"_a = false);
  module.def(
      "cuda_table_bytes",
      [](const LowLatencyGeometry& geometry) {
        return TableLayout{geometry.ranks, geometry.top_k, geometry.max_tokens}.bytes();
      },
      "geometry"_a);
  module.def("cuda_least_receivers", &least_receivers, "ranks"_a);
  module.def("check_cuda_geometry", &cuda::check_device_geometry, "geometry"_a);

  using Place = cuda::LowLatencyPlace;
  nb::class_<Place>(module, "CudaLowLatencyPlace")
      .def(
          "__init__",
          [](Place* self, int32_t rank, const std::vector<uintptr_t>& peers, uintptr_t state,
             uintptr_t reports, int64_t timeout_ns, bool mask_late) {
            if (peers.size() > kMostRanks) {
              throw BadArgument("ranks", std::to_string(peers.size()),
                                "at most " + std::to_string(kMostRanks));
            }
            Place place{rank, {}, state, reports, timeout_ns, mask_late};
            std::copy(peers.begin(), peers.end(), place.peers.begin());
            new (self) Place(place);
          },
          "rank"_a, "peers"_a, "state"_a, "reports"_a, "timeout_ns"_a, "mask_late"_a);
  nb::class_<LowLatency>(module, "CudaLowLatency")
      .def(
          "__init__",
          [](LowLatency* self, const Place& place, const LowLatencyGeometry& geometry, bool late,
             int32_t ctas, int32_t senders, bool token_major) {
            new (self) LowLatency(place, geometry, late, {ctas, senders}, token_major);
          },
          "place"_a, "geometry"_a, "late"_a, "ctas"_a, "senders"_a, "token_major"_a = false)
      .def("dispatch_arguments", &LowLatency::dispatch_arguments, "encoding"_a, "weights"_a)
      .def("combine_arguments", &LowLatency::combine_arguments, "logfmt"_a, "weights"_a);
}

}  // namespace fanfold::bindings
