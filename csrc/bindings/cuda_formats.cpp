#include "bindings/address.h"
#include "bindings/bindings.h"
#include "cuda/kernel.h"
#include "layout/formats.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {

void bind_cuda_formats(nb::module_& module) {
  nb::class_<QuantizeArgs> cls(module, "CudaQuantizeArgs");
  cls.def("__init__", [](QuantizeArgs* self) { new (self) QuantizeArgs{}; })
      .def_rw("tokens", &QuantizeArgs::tokens)
      // The address of the struct, for callers that emulate the kernel on the host.
      .def_prop_ro("address",
                   [](const QuantizeArgs& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def(
          "launch",
          [](const QuantizeArgs& self, const cuda::Kernel& kernel, int ctas, int threads,
             uintptr_t stream, bool early) {
            kernel.launch(&self, sizeof self,
                          {.ctas = ctas, .threads = threads, .stream = stream, .early = early});
          },
          "kernel"_a, "ctas"_a, "threads"_a, "stream"_a, "early"_a);
  def_address(cls, "x", &QuantizeArgs::x);
  def_address(cls, "values", &QuantizeArgs::values);
  def_address(cls, "scales", &QuantizeArgs::scales);
}

}  // namespace fanfold::bindings
