#include "cuda/high_throughput.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/address.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using cuda::HighThroughput;
using cuda::Kernel;
using Place = cuda::HighThroughputPlace;
using Shape = cuda::HighThroughputShape;
using Dispatch = HighThroughputDispatchArgs;
using Combine = HighThroughputCombineArgs;

// The grid and the options of a launch.
struct Launch {
  int ctas;
  int threads;
  int shared_bytes;
  bool early;
};

template <typename Args>
void launch(const Kernel& kernel, const Args& args, const Launch& shape, uintptr_t stream) {
  kernel.launch(&args, sizeof args,
                {.ctas = shape.ctas,
                 .threads = shape.threads,
                 .shared_bytes = shape.shared_bytes,
                 .stream = stream,
                 .early = shape.early});
}

// Binds an argument struct with the fields that every call has.
template <typename Args>
nb::class_<Args> bind_call(nb::module_& module, const char* name) {
  nb::class_<Args> cls(module, name);
  // The address of the struct, for callers that emulate the kernel on the host.
  cls.def_prop_ro("address", [](const Args& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def("copy", [](const Args& self) { return Args(self); })
      .def_prop_rw(
          "tokens", [](const Args& self) { return self.call.tokens; },
          [](Args& self, int32_t tokens) { self.call.tokens = tokens; })
      .def_prop_rw(
          "refused", [](const Args& self) { return self.call.refused != 0; },
          [](Args& self, bool refused) { self.call.refused = refused ? 1 : 0; })
      .def_prop_ro("slots", [](const Args& self) { return self.call.slots; })
      .def_prop_ro("signature", [](const Args& self) { return self.call.signature; })
      .def(
          "launch",
          [](const Args& self, const Kernel& kernel, const Launch& shape, uintptr_t stream) {
            launch(kernel, self, shape, stream);
          },
          "kernel"_a, "shape"_a, "stream"_a);
  return cls;
}

void bind_plan(nb::module_& module) {
  auto cls = bind_call<PlanArgs>(module, "CudaPlanArgs");
  cls.def_rw("alignment", &PlanArgs::alignment).def_rw("capacity", &PlanArgs::capacity);
  def_address(cls, "topk_idx", &PlanArgs::topk_idx);
  def_address(cls, "counted", &PlanArgs::counted);
  def_address(cls, "rows", &PlanArgs::rows);
  def_address(cls, "places", &PlanArgs::places);
  def_address(cls, "choices", &PlanArgs::choices);
  def_address(cls, "tokens_per_expert", &PlanArgs::tokens_per_expert);
  def_address(cls, "offsets", &PlanArgs::offsets);
  def_address(cls, "source_prefix", &PlanArgs::source_prefix);
  def_address(cls, "first_rows", &PlanArgs::first_rows);
  def_address(cls, "totals", &PlanArgs::totals);
}

void bind_dispatch(nb::module_& module) {
  auto cls = bind_call<Dispatch>(module, "CudaHighThroughputDispatchArgs");
  cls.def_rw("scale_token_stride", &Dispatch::scale_token_stride)
      .def_rw("scale_word_stride", &Dispatch::scale_word_stride)
      .def_rw("capacity", &Dispatch::capacity)
      .def_rw("result_rows", &Dispatch::result_rows)
      .def_prop_rw(
          "marks_absent", [](const Dispatch& self) { return self.marks_absent != 0; },
          [](Dispatch& self, bool marks) { self.marks_absent = marks ? 1 : 0; })
      .def_prop_rw(
          "zeroes_padding", [](const Dispatch& self) { return self.zeroes_padding != 0; },
          [](Dispatch& self, bool zeroes) { self.zeroes_padding = zeroes ? 1 : 0; })
      .def_rw("batch_stride", &Dispatch::batch_stride);
  def_address(cls, "x", &Dispatch::x);
  def_address(cls, "scales", &Dispatch::scales);
  def_address(cls, "rows", &Dispatch::rows);
  def_address(cls, "first_rows", &Dispatch::first_rows);
  def_address(cls, "topk_words", &Dispatch::topk_words);
  def_address(cls, "weights", &Dispatch::weights);
  def_address(cls, "source_prefix", &Dispatch::source_prefix);
  def_address(cls, "offsets", &Dispatch::offsets);
  def_address(cls, "tokens_per_expert", &Dispatch::tokens_per_expert);
  def_address(cls, "out", &Dispatch::out);
  def_address(cls, "out_scales", &Dispatch::out_scales);
  def_address(cls, "row_weights", &Dispatch::row_weights);
  def_address(cls, "row_source_rank", &Dispatch::row_source_rank);
  def_address(cls, "row_source_token", &Dispatch::row_source_token);
  def_address(cls, "offsets_copy", &Dispatch::offsets_copy);
  def_address(cls, "tokens_per_expert_copy", &Dispatch::tokens_per_expert_copy);
  def_address(cls, "rows_of", &Dispatch::rows_of);
  def_address(cls, "topk_idx", &Dispatch::topk_idx);
  def_address(cls, "topk_weights", &Dispatch::topk_weights);
  def_address(cls, "source_token", &Dispatch::source_token);
  def_address(cls, "batches", &Dispatch::batches);
}

void bind_combine(nb::module_& module) {
  auto cls = bind_call<Combine>(module, "CudaHighThroughputCombineArgs");
  cls.def_rw("lag", &Combine::lag)
      .def_rw("last_lag", &Combine::last_lag)
      .def_rw("biases", &Combine::biases)
      .def_rw("kept", &Combine::kept)
      .def_rw("batch_stride", &Combine::batch_stride)
      .def(
          "set_bias",
          [](Combine& self, int place, uintptr_t address) {
            if (place < 0 || place > 1) throw BadArgument("place", std::to_string(place), "0 or 1");
            self.bias[place] = reinterpret_cast<const unsigned char*>(address);
          },
          "place"_a, "address"_a);
  def_address(cls, "batches", &Combine::batches);
  def_address(cls, "source_prefix", &Combine::source_prefix);
  def_address(cls, "rows_of", &Combine::rows_of);
  def_address(cls, "y", &Combine::y);
  def_address(cls, "row_weights", &Combine::row_weights);
  def_address(cls, "topk_weights", &Combine::topk_weights);
  def_address(cls, "rows", &Combine::rows);
  def_address(cls, "out", &Combine::out);
  def_address(cls, "out_weights", &Combine::out_weights);
}

void bind_layout(nb::module_& module) {
  using Layout = DispatchLayoutArgs;
  nb::class_<Layout> cls(module, "CudaDispatchLayoutArgs");
  cls.def("__init__", [](Layout* self) { new (self) Layout{}; })
      .def_rw("tokens", &Layout::tokens)
      .def_prop_ro("address", [](const Layout& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def(
          "launch",
          [](const Layout& self, const Kernel& kernel, const Launch& shape, uintptr_t stream) {
            launch(kernel, self, shape, stream);
          },
          "kernel"_a, "shape"_a, "stream"_a);
  def_address(cls, "topk_idx", &Layout::topk_idx);
  def_address(cls, "tokens_per_rank", &Layout::tokens_per_rank);
  def_address(cls, "tokens_per_expert", &Layout::tokens_per_expert);
  def_address(cls, "is_token_in_rank", &Layout::is_token_in_rank);
}

void bind_place(nb::module_& module) {
  nb::class_<Place>(module, "CudaHighThroughputPlace")
      .def(
          "__init__",
          [](Place* self, int32_t rank, const std::vector<uintptr_t>& peers, uintptr_t state,
             uintptr_t reports, int64_t timeout_ns, int32_t max_tokens, int64_t ring_bytes) {
            if (peers.size() > kMostRanks) {
              throw BadArgument("ranks", std::to_string(peers.size()),
                                "at most " + std::to_string(kMostRanks));
            }
            const auto ranks = static_cast<int32_t>(peers.size());
            Place place{rank, ranks, {}, state, reports, timeout_ns, max_tokens, ring_bytes};
            std::copy(peers.begin(), peers.end(), place.peers.begin());
            new (self) Place(place);
          },
          "rank"_a, "peers"_a, "state"_a, "reports"_a, "timeout_ns"_a, "max_tokens"_a,
          "ring_bytes"_a);
  nb::enum_<HighThroughputPhase>(module, "CudaHighThroughputPhase")
      .value("PLAN", HighThroughputPhase::kPlan)
      .value("DISPATCH", HighThroughputPhase::kDispatch)
      .value("COMBINE", HighThroughputPhase::kCombine);
  nb::class_<Shape>(module, "CudaHighThroughputShape")
      .def(
          "__init__",
          [](Shape* self, HighThroughputPhase phase, int32_t experts, int32_t top_k) {
            new (self) Shape{.phase = phase, .experts = experts, .top_k = top_k};
          },
          "phase"_a, "experts"_a, "top_k"_a)
      .def_rw("row_bytes", &Shape::row_bytes)
      .def_rw("scale_words", &Shape::scale_words)
      .def_rw("slot_bytes", &Shape::slot_bytes)
      .def_rw("expert_major", &Shape::expert_major)
      .def_rw("in_place", &Shape::in_place)
      .def_rw("kept_rings", &Shape::kept_rings)
      .def_rw("slices", &Shape::slices)
      .def_rw("variant", &Shape::variant)
      .def_rw("alignment", &Shape::alignment);
  nb::class_<Launch>(module, "CudaLaunch")
      .def(
          "__init__",
          [](Launch* self, int ctas, int threads, int shared_bytes, bool early) {
            new (self) Launch{ctas, threads, shared_bytes, early};
          },
          "ctas"_a, "threads"_a, "shared_bytes"_a, "early"_a)
      .def_ro("ctas", &Launch::ctas)
      .def_ro("threads", &Launch::threads)
      .def_ro("shared_bytes", &Launch::shared_bytes)
      .def_ro("early", &Launch::early);
}

}  // namespace

void bind_cuda_high_throughput(nb::module_& module) {
  bind_place(module);
  bind_plan(module);
  bind_dispatch(module);
  bind_combine(module);
  bind_layout(module);
  module.attr("CUDA_HIGH_THROUGHPUT_STATE_BYTES") = sizeof(HighThroughputState);
  module.attr("CUDA_HIGH_THROUGHPUT_STATE_PEERS_AT") = offsetof(HighThroughputState, peers);
  module.attr("CUDA_HIGH_THROUGHPUT_STATE_HOSTS_AT") = offsetof(HighThroughputState, hosts);
  module.attr("CUDA_HIGH_THROUGHPUT_REPORT_BYTES") = sizeof(Report) * kReportKinds;
  module.attr("CUDA_HIGH_THROUGHPUT_MOST_CTAS") = kMostHighThroughputCtas;
  module.attr("CUDA_HIGH_THROUGHPUT_MOST_RANKS") = kMostRanks;
  module.attr("CUDA_HIGH_THROUGHPUT_MOST_EXPERTS") = HighThroughputDeviceLayout::kMostCounted;
  module.attr("CUDA_BATCH_TOKENS") = kBatchTokens;
  module.attr("CUDA_MOST_SLICES") = kMostSlices;
  // Bytes that must be zero at first, and where results in place begin.
  module.def(
      "cuda_high_throughput_bytes",
      [](int32_t ranks, int64_t ring_bytes) {
        const auto at = cuda::high_throughput_offsets(ranks, ring_bytes);
        return std::pair(at.ring, at.results);
      },
      "ranks"_a, "ring_bytes"_a);
  module.def(
      "cuda_dispatch_batches",
      [](int32_t tokens, int32_t short_tokens) {
        return DispatchBatches(tokens, short_tokens).count();
      },
      "tokens"_a, "short_tokens"_a);
  nb::class_<HighThroughput>(module, "CudaHighThroughput")
      .def(nb::init<const Place&>(), "place"_a)
      .def(
          "plan_arguments",
          [](const HighThroughput& self, const Shape& shape, int32_t ctas, int32_t senders) {
            return self.plan_arguments(shape, {ctas, senders});
          },
          "shape"_a, "ctas"_a, "senders"_a)
      .def(
          "dispatch_arguments",
          [](const HighThroughput& self, const Shape& shape, int32_t ctas, int32_t senders) {
            return self.dispatch_arguments(shape, {ctas, senders});
          },
          "shape"_a, "ctas"_a, "senders"_a)
      .def(
          "combine_arguments",
          [](const HighThroughput& self, const Shape& shape, int32_t ctas, int32_t senders) {
            return self.combine_arguments(shape, {ctas, senders});
          },
          "shape"_a, "ctas"_a, "senders"_a);
}

}  // namespace fanfold::bindings
