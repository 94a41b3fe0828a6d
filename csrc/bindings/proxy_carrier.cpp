#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "proxy/open_carrier.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

using proxy::CarrierOptions;
using proxy::OpenCarrier;
using proxy::ProxyAddress;
using proxy::ThreadAddress;
using transport::RemoteMemory;

using MemoryTuple = std::tuple<uint64_t, uint64_t, int64_t>;
using ThreadTuple = std::tuple<nb::bytes, MemoryTuple, MemoryTuple, MemoryTuple>;
// The setting, sockets' interface, whether rows may have a GPU's memory.
using NetworkTuple = std::tuple<std::string, std::string, bool>;
using ThreadsTuple = std::tuple<int32_t, int64_t>;  // how many, slots of their kernels' rings
using AddressTuple =
    std::tuple<int32_t, int64_t, uint64_t, int64_t, int64_t, std::vector<ThreadTuple>>;

MemoryTuple tuple_of(const RemoteMemory& memory) { return {memory.base, memory.key, memory.bytes}; }

RemoteMemory memory_of(const MemoryTuple& tuple) {
  return {std::get<0>(tuple), std::get<1>(tuple), std::get<2>(tuple)};
}

AddressTuple tuple_of(const ProxyAddress& address) {
  std::vector<ThreadTuple> threads;
  threads.reserve(address.threads.size());
  for (const ThreadAddress& thread : address.threads) {
    threads.emplace_back(nb::bytes(thread.address.data(), thread.address.size()),
                         tuple_of(thread.memory), tuple_of(thread.inbox), tuple_of(thread.rows));
  }
  return {address.ranks,           address.part_bytes,   address.first_sequence,
          address.credit.messages, address.credit.bytes, std::move(threads)};
}

ProxyAddress address_of(const AddressTuple& tuple) {
  const auto& [ranks, part_bytes, first_sequence, messages, bytes, threads] = tuple;
  ProxyAddress address{.ranks = ranks,
                       .part_bytes = part_bytes,
                       .first_sequence = first_sequence,
                       .credit = {.messages = static_cast<int32_t>(messages), .bytes = bytes},
                       .threads = {}};
  address.threads.reserve(threads.size());
  for (const auto& [name, memory, inbox, rows] : threads) {
    const auto* data = static_cast<const std::byte*>(name.data());
    address.threads.push_back(
        {{data, data + name.size()}, memory_of(memory), memory_of(inbox), memory_of(rows)});
  }
  return address;
}

}  // namespace

void bind_proxy_carrier(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<OpenCarrier>(module, "Carrier",
                          "Carries what a SymmetricMemory writes to ranks on other hosts, through "
                          "proxy threads over a network.")
      .def(
          "__init__",
          [](OpenCarrier* self, const SymmetricMemory& memory, const NetworkTuple& network,
             const std::string& world, bool one_host, const ThreadsTuple& threads,
             double timeout_seconds, bool give_up_peers) {
            const nb::gil_scoped_release unlocked;
            new (self) OpenCarrier(memory, {.network = std::get<0>(network),
                                            .interface = std::get<1>(network),
                                            .world = world,
                                            .one_host = one_host,
                                            .threads = std::get<0>(threads),
                                            .timeout_seconds = timeout_seconds,
                                            .give_up_peers = give_up_peers,
                                            .kernel_ring_slots = std::get<1>(threads),
                                            .gpu_memory = std::get<2>(network)});
          },
          "memory"_a, "network"_a, "world"_a, "one_host"_a, "threads"_a, "timeout_seconds"_a,
          "give_up_peers"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("network", &OpenCarrier::network)
      .def_prop_ro("why_no_gpu_memory", &OpenCarrier::why_no_gpu_memory,
                   "Why the network reaches no GPU's memory; empty if it may.")
      .def(
          "register_rows",
          [](OpenCarrier& self, uintptr_t address, int64_t bytes, int32_t device, int dmabuf) {
            const nb::gil_scoped_release unlocked;
            self.register_rows({.data = reinterpret_cast<std::byte*>(address),
                                .bytes = bytes,
                                .device = device,
                                .dmabuf = dmabuf});
          },
          "address"_a, "bytes"_a, "device"_a, "dmabuf"_a,
          "Gives rows memory of their own: of a GPU, or with device -1 of the CPU.")
      .def_prop_ro("holds_rows", &OpenCarrier::holds_rows,
                   "Whether the network has such memory, also after register_rows has failed.")
      .def_prop_ro("has_rows_apart", &OpenCarrier::has_rows_apart,
                   "Whether all ranks have given rows memory of their own, after start.")
      .def("address", [](const OpenCarrier& self) { return tuple_of(self.address()); })
      .def(
          "start",
          [](OpenCarrier& self, const std::vector<AddressTuple>& ranks) {
            std::vector<ProxyAddress> addresses;
            addresses.reserve(ranks.size());
            for (const AddressTuple& rank : ranks) addresses.push_back(address_of(rank));
            const nb::gil_scoped_release unlocked;
            self.start(addresses);
          },
          "ranks"_a)
      .def(
          "give_to", [](OpenCarrier& self, SymmetricMemory& memory) { memory.carry(self.take()); },
          "memory"_a)
      .def("close", &OpenCarrier::close, Unlocked());
}

}  // namespace fanfold::bindings
