#include "host/numeric.h"

#include "bindings/address.h"
#include "bindings/bindings.h"
#include "layout/row.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

void quantize_fp8(const Lent& x, int64_t tokens, int64_t hidden, bool power_of_two,
                  const Lent& values, const Lent& scales) {
  const auto rows = array_of<const uint16_t>(x, "x");
  const auto quantized = array_of<uint8_t>(values, "values");
  const auto factors = array_of<float>(scales, "scales");
  rows.require("x", tokens * hidden);
  quantized.require("values", tokens * hidden);
  factors.require("scales", tokens * blocks_of(hidden));
  const ScaleRounding rounding = power_of_two ? ScaleRounding::kPowerOfTwo : ScaleRounding::kNone;
  const nb::gil_scoped_release unlocked;
  for (int64_t token = 0; token < tokens; ++token) {
    quantize_fp8_row(rows + token * hidden, hidden, rounding, quantized + token * hidden,
                     factors + token * blocks_of(hidden));
  }
}

}  // namespace

void bind_numeric(nb::module_& module) {
  module.def("quantize_fp8", &quantize_fp8, "x"_a, "tokens"_a, "hidden"_a, "power_of_two"_a,
             "values"_a, "scales"_a);
}

}  // namespace fanfold::bindings
