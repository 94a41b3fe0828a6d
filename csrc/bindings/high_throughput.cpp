#include "host/high_throughput.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "bindings/address.h"
#include "bindings/bindings.h"
#include "host/routes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

void bind_tokens(nb::module_& module) {
  using Tokens = HighThroughputTokens;
  nb::class_<Tokens> tokens(module, "HighThroughputTokens");
  tokens.def("__init__", [](Tokens* self) { new (self) Tokens{}; })
      .def_rw("row_bytes", &Tokens::row_bytes)
      .def_rw("scale_words", &Tokens::scale_words)
      .def_rw("scale_token_stride", &Tokens::scale_token_stride)
      .def_rw("scale_word_stride", &Tokens::scale_word_stride)
      .def_rw("weighted", &Tokens::weighted)
      .def_rw("tokens", &Tokens::tokens)
      .def_rw("experts", &Tokens::experts)
      .def_rw("top_k", &Tokens::top_k);
  def_array(tokens, "rows", &Tokens::rows);
  def_array(tokens, "scales", &Tokens::scales);
  def_array(tokens, "topk_idx", &Tokens::topk_idx);
  def_array(tokens, "topk_weights", &Tokens::topk_weights);
}

void bind_plan(nb::module_& module) {
  using Plan = HighThroughputPlan;
  nb::class_<Plan> plan(module, "HighThroughputPlan");
  plan.def("__init__", [](Plan* self) { new (self) Plan{}; })
      .def_rw("experts", &Plan::experts)
      .def_rw("top_k", &Plan::top_k)
      .def_rw("tokens", &Plan::tokens)
      .def_rw("received", &Plan::received);
  def_array(plan, "is_token_in_rank", &Plan::is_token_in_rank);
  def_array(plan, "source_prefix", &Plan::source_prefix);
  def_array(plan, "tokens_per_expert", &Plan::tokens_per_expert);
  def_array(plan, "offsets", &Plan::offsets);
  def_array(plan, "source_token", &Plan::source_token);
  def_array(plan, "topk_idx", &Plan::topk_idx);
  def_array(plan, "topk_weights", &Plan::topk_weights);
  def_array(plan, "rows_of", &Plan::rows_of);
}

void bind_results(nb::module_& module) {
  using Received = HighThroughputReceived;
  nb::class_<Received> received(module, "HighThroughputReceived");
  received.def("__init__", [](Received* self) { new (self) Received{}; })
      .def_rw("capacity", &Received::capacity)
      .def_rw("expert_major", &Received::expert_major);
  def_array(received, "rows", &Received::rows);
  def_array(received, "scales", &Received::scales);
  def_array(received, "row_weights", &Received::row_weights);
  def_array(received, "row_source_rank", &Received::row_source_rank);
  def_array(received, "row_source_token", &Received::row_source_token);

  using Outputs = HighThroughputOutputs;
  nb::class_<Outputs> outputs(module, "HighThroughputOutputs");
  outputs.def("__init__", [](Outputs* self) { new (self) Outputs{}; })
      .def_rw("hidden", &Outputs::hidden)
      .def_rw("weighted", &Outputs::weighted)
      .def_rw("expert_major", &Outputs::expert_major);
  def_array(outputs, "y", &Outputs::y);
  def_array(outputs, "row_weights", &Outputs::row_weights);
  def_array(outputs, "topk_weights", &Outputs::topk_weights);

  using Result = HighThroughputResult;
  nb::class_<Result> result(module, "HighThroughputResult");
  result.def("__init__", [](Result* self) { new (self) Result{}; })
      .def(
          "set_bias",
          [](Result& self, size_t place, const Lent& lent) {
            self.bias[place % 2] = array_of<const uint16_t>(lent, "bias");
          },
          "place"_a, "lent"_a.none());
  def_array(result, "out", &Result::out);
  def_array(result, "weights", &Result::weights);
}

// Binds count_routes. `sizes` are tokens, top_k, experts and ranks.
void count(const Lent& topk_idx, const std::tuple<int32_t, int32_t, int32_t, int32_t>& sizes,
           const Lent& tokens_per_rank, const Lent& tokens_per_expert,
           const Lent& is_token_in_rank) {
  const auto [tokens, top_k, experts, ranks] = sizes;
  count_routes(Routes{array_of<const int64_t>(topk_idx, "topk_idx"), tokens, top_k, experts, ranks},
               RouteCounts{array_of<int32_t>(tokens_per_rank, "tokens_per_rank"),
                           array_of<int32_t>(tokens_per_expert, "tokens_per_expert"),
                           array_of<uint8_t>(is_token_in_rank, "is_token_in_rank"), true});
}

}  // namespace

void bind_high_throughput(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  bind_tokens(module);
  bind_plan(module);
  bind_results(module);
  module.def("count_routes", &count, "topk_idx"_a, "sizes"_a, "tokens_per_rank"_a,
             "tokens_per_expert"_a, "is_token_in_rank"_a);
  nb::class_<HighThroughput>(module, "HighThroughput")
      .def(nb::init<SymmetricMemory&, int64_t, int64_t>(), "memory"_a, "offset"_a, "bytes"_a,
           nb::keep_alive<1, 2>())
      .def_prop_ro("ranks", &HighThroughput::ranks)
      .def_static(
          "required_bytes",
          [](int32_t ranks, int64_t staging_bytes) {
            return HighThroughputLayout{ranks}.bytes(staging_bytes);
          },
          "ranks"_a, "staging_bytes"_a)
      .def("exchange_counts", &HighThroughput::exchange_counts, "tokens"_a, "plan"_a, "alignment"_a,
           Unlocked())
      .def("dispatch_rows", &HighThroughput::dispatch_rows, "tokens"_a, "plan"_a, "received"_a,
           Unlocked())
      .def("dispatch_cached", &HighThroughput::dispatch_cached, "tokens"_a, "plan"_a, "received"_a,
           Unlocked())
      .def("combine", &HighThroughput::combine, "outputs"_a, "plan"_a, "result"_a, Unlocked())
      .def("refuse_dispatch", &HighThroughput::refuse_dispatch, "reason"_a, Unlocked())
      .def("refuse_combine", &HighThroughput::refuse_combine, "reason"_a, Unlocked());
}

}  // namespace fanfold::bindings
