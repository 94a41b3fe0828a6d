#include "bindings/bindings.h"
#include "proxy/measure_flow_control.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using Fields = nb::typed<nb::dict, nb::str, int64_t>;

Fields incast(int32_t senders, int64_t bytes, int64_t chunk_bytes, int64_t credit_bytes,
              int64_t link_bytes_per_us, int64_t buffer_bytes) {
  proxy::IncastOptions options;
  options.senders = senders;
  options.bytes = bytes;
  options.chunk_bytes = chunk_bytes;
  options.credit.bytes = credit_bytes;
  options.link.bytes_per_us = link_bytes_per_us;
  options.link.buffer_bytes = buffer_bytes;
  proxy::Incast found{};
  {
    const nb::gil_scoped_release unlocked;
    found = proxy::measure_incast(options);
  }
  Fields out;
  out["bytes"] = found.bytes;
  out["ns"] = found.ns;
  out["messages"] = found.messages;
  out["packets"] = found.packets;
  out["dropped"] = found.dropped;
  out["queued"] = found.queued;
  out["in_flight"] = found.in_flight;
  return out;
}

}  // namespace

void bind_flow_control(nb::module_& module) {
  module.def(
      "measure_incast", &incast, "senders"_a, "bytes"_a, "chunk_bytes"_a, "credit_bytes"_a,
      "link_bytes_per_us"_a, "buffer_bytes"_a,
      "Proxies of many senders of one receiver over a modelled network: bytes, ns,\n"
      "messages, packets, dropped, queued and in_flight (csrc/proxy/measure_flow_control.h).");
}

}  // namespace fanfold::bindings
