#include <nanobind/stl/string.h>

#include <span>

#include "bindings/bindings.h"
#include "cuda/driver.h"
#include "cuda/kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {

void bind_cuda(nb::module_& module) {
  using cuda::Kernel;
  module.def("cuda_driver_version", &cuda::driver_version);
  // Loading may wait for running kernels, and those for a rank that is another thread, so release
  // the interpreter lock.
  nb::class_<Kernel>(module, "CudaKernel")
      .def(
          "__init__",
          [](Kernel* self, const nb::bytes& image, std::string entry, const std::string& symbol) {
            const std::span data(static_cast<const std::byte*>(image.data()), image.size());
            const nb::gil_scoped_release unlocked;
            new (self) Kernel(data, std::move(entry), symbol);
          },
          "image"_a, "entry"_a, "symbol"_a)
      .def_prop_ro("entry", &Kernel::entry)
      .def_prop_ro("registers", &Kernel::registers)
      .def_prop_ro("local_bytes", &Kernel::local_bytes)
      .def_prop_ro("static_shared_bytes", &Kernel::static_shared_bytes)
      .def("allow_shared_bytes", &Kernel::allow_shared_bytes, "bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "most_clusters",
          [](const Kernel& self, int threads, int shared_bytes, int cluster) {
            return self.most_clusters({.ctas = cluster,
                                       .threads = threads,
                                       .shared_bytes = shared_bytes,
                                       .cluster = cluster});
          },
          "threads"_a, "shared_bytes"_a, "cluster"_a)
      .def(
          "launch",
          [](const Kernel& self, uintptr_t arguments, size_t bytes, int ctas, int threads,
             int shared_bytes, uintptr_t stream, bool early) {
            self.launch(reinterpret_cast<const void*>(arguments), bytes,
                        {.ctas = ctas,
                         .threads = threads,
                         .shared_bytes = shared_bytes,
                         .stream = stream,
                         .early = early});
          },
          "arguments"_a, "bytes"_a, "ctas"_a, "threads"_a, "shared_bytes"_a = 0, "stream"_a = 0,
          "early"_a = false);
}

}  // namespace fanfold::bindings
