#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "transport/libfabric_networks.h"
#include "transport/network_bench.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using transport::NetworkBench;
using transport::Wire;
using transport::libfabric::Network;

const char* name_of(transport::libfabric::LinkState state) {
  using transport::libfabric::LinkState;
  if (state == LinkState::kUp) return "up";
  return state == LinkState::kDown ? "down" : "unknown";
}

Wire wire_named(const std::string& name) { return name == "plain" ? Wire::kPlain : Wire::kFanfold; }

void bind_bench(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<NetworkBench>(module, "NetworkBench")
      .def(nb::init<const std::string&, int32_t, int64_t, double>(), "setting"_a, "rank"_a,
           "most_bytes"_a, "timeout_seconds"_a, Unlocked())
      .def_prop_ro("name", &NetworkBench::name)
      .def("address",
           [](const NetworkBench& self) {
             const std::vector<std::byte> address = self.address();
             return nb::bytes(address.data(), address.size());
           })
      .def(
          "connect",
          [](NetworkBench& self, const nb::bytes& address) {
            const auto* data = static_cast<const std::byte*>(address.data());
            self.connect({data, data + address.size()});
          },
          "address"_a)
      .def(
          "ping_pong",
          [](NetworkBench& self, const std::string& wire, int64_t bytes, int64_t rounds) {
            const transport::RoundTrips times = self.ping_pong(wire_named(wire), bytes, rounds);
            return std::tuple(times.p50_seconds, times.p99_seconds);
          },
          "wire"_a, "bytes"_a, "rounds"_a, Unlocked(),
          "Sends a write to and fro. Returns the median and the 99th percentile of the round trips "
          "in seconds. `wire` is \"plain\" or \"fanfold\".")
      .def(
          "stream",
          [](NetworkBench& self, const std::string& wire, int64_t bytes, int64_t writes,
             int64_t window) { return self.stream(wire_named(wire), {bytes, writes, window}); },
          "wire"_a, "bytes"_a, "writes"_a, "window"_a, Unlocked(),
          "Writes as fast as the network allows. Returns the seconds until the peer has seen all.");
}

}  // namespace

void bind_transport(nb::module_& module) {
  bind_bench(module);
  nb::class_<Network>(module, "Network", "An endpoint type that libfabric offers on one NIC.")
      .def(nb::init<>())
      .def_rw("provider", &Network::provider)
      .def_rw("nic", &Network::nic)
      .def_rw("bits_per_second", &Network::bits_per_second)
      .def_rw("numa_node", &Network::numa_node)
      .def_rw("addr_format", &Network::addr_format)
      .def_rw("loopback", &Network::loopback)
      .def_rw("link_local", &Network::link_local)
      .def_rw("refusal", &Network::refusal)
      .def_rw("why_no_gpu_memory", &Network::why_no_gpu_memory)
      .def_prop_rw(
          "state", [](const Network& self) { return std::string(name_of(self.state)); },
          [](Network& self, const std::string& state) {
            using transport::libfabric::LinkState;
            self.state = state == "up"     ? LinkState::kUp
                         : state == "down" ? LinkState::kDown
                                           : LinkState::kUnknown;
          });
  module.def(
      "find_networks", [] { return transport::libfabric::find_networks(); },
      "The networks of libfabric on this machine. Raises UnavailableError without it.");
  module.def("libfabric_version", [] {
    const auto& library = transport::libfabric::library();
    return std::tuple(library.version() >> 16, library.version() & 0xffff, library.path);
  });
  module.def(
      "choose_network",
      [](const std::vector<Network>& networks, const std::string& setting, bool one_host) {
        auto request = transport::libfabric::parse_setting(setting);
        request.one_host = one_host;
        const auto choice = transport::libfabric::choose(networks, request);
        return std::tuple(choice.networks, choice.reason);
      },
      "networks"_a, "setting"_a, "one_host"_a,
      "The indices of the chosen networks, and the reason. Raises UnavailableError if none fits.");
}

}  // namespace fanfold::bindings
