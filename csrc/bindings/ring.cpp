#include "bindings/ring.h"

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
RingFields fields_of(const RingThroughput& found) {
  RingFields out;
  out["commands"] = found.commands;
  out["seconds"] = found.seconds;
  return out;
}

RingFields fields_of(const RingLatency& found) {
  RingFields out;
  out["commands"] = found.commands;
  out["rate"] = found.rate;
  out["clock_ns"] = found.clock_ns;
  out["average_ns"] = found.average_ns;
  out["p50_ns"] = found.p50_ns;
  out["p99_ns"] = found.p99_ns;
  out["most_ns"] = found.most_ns;
  return out;
}

namespace {

// What `measure` has found, without the lock of the interpreter.
template <class Measure>
RingFields unlocked(const Measure& measure) {
  const auto found = [&] {
    const nb::gil_scoped_release released;
    return measure();
  }();
  return fields_of(found);
}

RingFields ring_throughput(int64_t slots, int32_t producers, int64_t commands) {
  return unlocked([&] { return measure_ring_throughput(slots, producers, commands); });
}

RingFields ring_latency(int64_t slots, double rate, int64_t commands) {
  return unlocked([&] { return measure_ring_latency(slots, rate, commands); });
}

}  // namespace

void bind_ring(nb::module_& module) {
  module.def("measure_ring_throughput", &ring_throughput, "slots"_a, "producers"_a, "commands"_a,
             "Commands per second that so many threads push and this thread pops: a dict of\n"
             "commands and seconds. csrc/ring/measure.h has the details.");
  module.def("measure_ring_latency", &ring_latency, "slots"_a, "rate"_a, "commands"_a,
             "One-way latencies of commands pushed at so many per second: a dict of commands,\n"
             "rate, clock_ns, average_ns, p50_ns, p99_ns and most_ns.");
}

}  // namespace fanfold::bindings
