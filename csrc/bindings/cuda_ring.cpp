#include <cstddef>
#include <cstdint>

#include "bindings/address.h"
#include "bindings/bindings.h"
#include "bindings/ring.h"
#include "cuda/kernel.h"
#include "ring/pinned_rings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

template <class Args>
void def_launch(nb::class_<Args>& cls) {
  cls.def("__init__", [](Args* self) { new (self) Args{}; })
      .def_rw("timeout_ns", &Args::timeout_ns)
      // The address of the struct, for callers that emulate the kernel on the host.
      .def_prop_ro("address", [](const Args& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def(
          "launch",
          [](const Args& self, const cuda::Kernel& kernel, int ctas, int threads,
             uintptr_t stream) {
            kernel.launch(&self, sizeof self, {.ctas = ctas, .threads = threads, .stream = stream});
          },
          "kernel"_a, "ctas"_a, "threads"_a, "stream"_a);
}

void bind_arguments(nb::module_& module) {
  nb::class_<RingPushArgs> push(module, "CudaRingPushArgs");
  def_launch(push);
  push.def_rw("commands", &RingPushArgs::commands)
      .def_rw("interval_ns", &RingPushArgs::interval_ns)
      .def_rw("ring_count", &RingPushArgs::ring_count)
      .def_rw("lanes", &RingPushArgs::lanes);
  def_address(push, "rings", &RingPushArgs::rings);
  nb::class_<RingClockArgs> clock(module, "CudaRingClockArgs");
  def_launch(clock);
  clock.def_rw("rounds", &RingClockArgs::rounds);
  def_address(clock, "asked", &RingClockArgs::asked);
  def_address(clock, "answered", &RingClockArgs::answered);
}

void bind_clock_pair(nb::module_& module) {
  nb::class_<ClockPair>(module, "ClockPair")
      .def(
          "__init__",
          [](ClockPair* self, int64_t host_ns, int64_t gpu_ns, int64_t round_trip_ns) {
            new (self) ClockPair{host_ns, gpu_ns, round_trip_ns};
          },
          nb::kw_only(), "host_ns"_a, "gpu_ns"_a, "round_trip_ns"_a)
      .def_ro("host_ns", &ClockPair::host_ns)
      .def_ro("gpu_ns", &ClockPair::gpu_ns)
      .def_ro("round_trip_ns", &ClockPair::round_trip_ns);
  module.def(
      "compare_clocks",
      [](uintptr_t asked, uintptr_t answered, uint64_t rounds) {
        const nb::gil_scoped_release unlocked;
        return compare_clocks(reinterpret_cast<uint64_t*>(asked),
                              reinterpret_cast<const uint64_t*>(answered), rounds);
      },
      "asked"_a, "answered"_a, "rounds"_a);
}

}  // namespace

void bind_cuda_ring(nb::module_& module) {
  module.attr("RING_HEAD_BYTES") = sizeof(RingHead);
  bind_arguments(module);
  bind_clock_pair(module);
  nb::class_<PinnedRings>(module, "PinnedRings")
      .def(
          "__init__",
          [](PinnedRings* self, uintptr_t memory, int64_t bytes, int64_t count, int64_t slots,
             uintptr_t heads) {
            new (self) PinnedRings(reinterpret_cast<std::byte*>(memory), bytes, count, slots,
                                   reinterpret_cast<RingHead*>(heads));
          },
          "memory"_a, "bytes"_a, "count"_a, "slots"_a, "heads"_a)
      .def_static("bytes", &PinnedRings::bytes, "count"_a, "slots"_a)
      .def_prop_ro(
          "views",
          [](const PinnedRings& self) { return reinterpret_cast<uintptr_t>(self.views()); })
      .def(
          "prepare",
          [](PinnedRings& self, int64_t producers, int64_t lanes, int64_t commands, int32_t threads,
             bool timed) { self.prepare({producers, lanes, commands, timed}, threads); },
          "producers"_a, "lanes"_a, "commands"_a, "threads"_a, "timed"_a)
      .def("pop",
           [](PinnedRings& self) {
             RingThroughput found{};
             {
               const nb::gil_scoped_release unlocked;
               found = self.pop();
             }
             return fields_of(found);
           })
      .def(
          "latency",
          [](const PinnedRings& self, const ClockPair& before, const ClockPair& after) {
            return fields_of(self.latency(before, after));
          },
          "before"_a, "after"_a);
}

}  // namespace fanfold::bindings
