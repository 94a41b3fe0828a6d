#include "host/numeric.h"

#include "bindings/bindings.h"
#include "layout/row.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

void quantize_fp8(uintptr_t x, int64_t tokens, int64_t hidden, bool power_of_two, uintptr_t values,
                  uintptr_t scales) {
  const auto* rows = reinterpret_cast<const uint16_t*>(x);
  const ScaleRounding rounding = power_of_two ? ScaleRounding::kPowerOfTwo : ScaleRounding::kNone;
  for (int64_t token = 0; token < tokens; ++token) {
    quantize_fp8_row(rows + token * hidden, hidden, rounding,
                     reinterpret_cast<uint8_t*>(values) + token * hidden,
                     reinterpret_cast<float*>(scales) + token * blocks_of(hidden));
  }
}

}  // namespace

void bind_numeric(nb::module_& module) {
  module.def("quantize_fp8", &quantize_fp8, "x"_a, "tokens"_a, "hidden"_a, "power_of_two"_a,
             "values"_a, "scales"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace fanfold::bindings
