#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "memory/rows_layout.h"
#include "memory/symmetric.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fanfold::bindings {
namespace {

void bind_calls(nb::class_<SymmetricMemory>& memory) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  memory.def("seal", &SymmetricMemory::seal)
      .def("close", &SymmetricMemory::close, Unlocked())
      .def("barrier", &SymmetricMemory::barrier, Unlocked())
      .def("masked", &SymmetricMemory::masked, "peer"_a)
      .def("gateway_to", &SymmetricMemory::gateway_to, "peer"_a)
      .def("set_masked", &SymmetricMemory::set_masked, "peer"_a, "value"_a)
      .def("why_lost", &SymmetricMemory::why_lost, "peer"_a)
      .def(
          "check_network",
          [](const SymmetricMemory& self, int32_t peer) { self.carrier().check(peer); }, "peer"_a,
          "Raises what has ended the network or, with a `peer` from 0 on, the way to it.")
      .def(
          "path",
          [](const SymmetricMemory& self, int32_t peer) { return self.carrier().path(peer); },
          "peer"_a, "How a peer on another host is reached, for messages.")
      .def(
          "fence",
          [](const SymmetricMemory& self) {
            static_cast<void>(self.carrier());  // checks that there is one
            for (int32_t peer = 0; peer < self.ranks(); ++peer) {
              if (!self.hosts().together(peer, self.rank())) return self.peer(peer).fence();
            }
          },
          Unlocked(), "Returns once ranks on other hosts have all that this rank has sent.")
      .def_prop_ro("late", [](const SymmetricMemory& self) { return self.late().size(); })
      .def(
          "late_peer",
          [](const SymmetricMemory& self, size_t index) {
            const TimeoutReport& report = self.late().at(index);
            return std::tuple(report.peer, report.phase, report.seconds, report.peer_gone);
          },
          "index"_a)
      .def("check_usable", &SymmetricMemory::check_usable)
      .def(
          "window",
          [](const SymmetricMemory& self, int32_t peer, int64_t offset, int64_t bytes) {
            return reinterpret_cast<uintptr_t>(self.window(peer, offset, bytes));
          },
          "peer"_a, "offset"_a, "bytes"_a)
      .def(
          "put",
          [](const SymmetricMemory& self, int32_t peer, int64_t offset, int64_t bytes) {
            static_cast<void>(self.window(peer, offset, bytes));  // checks them
            self.peer(peer).put(offset, bytes);
          },
          "peer"_a, "offset"_a, "bytes"_a, Unlocked(),
          "Has `peer` receive what stands at `offset` of its window. Nothing to do on one host.");
}

void bind_counts(nb::class_<SymmetricMemory>& memory) {
  memory
      .def_prop_ro("masked_ranks",
                   [](const SymmetricMemory& self) {
                     int32_t masked = 0;
                     for (int32_t peer = 0; peer < self.ranks(); ++peer) {
                       masked += self.masked(peer) ? 1 : 0;
                     }
                     return masked;
                   })
      .def(
          "waits",
          [](const SymmetricMemory& self) {
            std::vector<std::tuple<std::string, int32_t, uint64_t, double, uint64_t>> waits;
            for (const WaitCount& wait : self.waits()) {
              const auto seconds = static_cast<double>(wait.nanoseconds) * 1e-9;
              waits.emplace_back(name_of(wait.phase), wait.peer, wait.waits, seconds,
                                 wait.failures);
            }
            return waits;
          },
          "Phase, peer (-1: any one of several), waits, their seconds, and how many have failed.")
      .def(
          "rows",
          [](const SymmetricMemory& self) {
            std::vector<std::tuple<std::string, int32_t, uint64_t, uint64_t>> rows;
            for (const RowCount& count : self.rows().all()) {
              rows.emplace_back(name_of(count.phase), count.peer, count.rows, count.bytes);
            }
            return rows;
          },
          "Phase, peer, rows sent to it and their bytes.")
      .def(
          "expert_rows",
          [](const SymmetricMemory& self) {
            std::vector<std::tuple<int32_t, uint64_t>> rows;
            for (const ExpertRows& count : self.rows().of_experts()) {
              rows.emplace_back(count.expert, count.rows);
            }
            return rows;
          },
          "Expert of this rank and rows that it has received.")
      .def(
          "carrier_counts",
          [](const SymmetricMemory& self) {
            std::vector<std::tuple<std::string, int32_t, int32_t, uint64_t>> counts;
            for (const CarrierCount& count : self.carrier_counts()) {
              counts.emplace_back(count.name, count.thread, count.peer, count.value);
            }
            return counts;
          },
          "Name, thread, peer (-1: of the thread) and value. Empty on one host.");
}

}  // namespace

void bind_symmetric(nb::module_& module) {
  module.def("fork_generation", &fork_generation);
  nb::class_<SymmetricMemory> memory(module, "SymmetricMemory");
  memory
      .def(
          "__init__",
          [](SymmetricMemory* self, int32_t rank, int32_t ranks, int64_t bytes,
             double timeout_seconds, double spin_seconds, bool mask_late_peers,
             std::vector<int32_t> hosts) {
            new (self) SymmetricMemory(SymmetricOptions{.rank = rank,
                                                        .ranks = ranks,
                                                        .bytes = bytes,
                                                        .timeout_seconds = timeout_seconds,
                                                        .spin_seconds = spin_seconds,
                                                        .mask_late_peers = mask_late_peers,
                                                        .hosts = std::move(hosts)});
          },
          "rank"_a, "ranks"_a, "bytes"_a, "timeout_seconds"_a, "spin_seconds"_a,
          "mask_late_peers"_a, "hosts"_a)
      .def("address",
           [](const SymmetricMemory& self) {
             const PeerAddress address = self.address();
             return std::tuple(static_cast<int>(address.pid), address.descriptor,
                               static_cast<int>(address.thread));
           })
      .def(
          "map",
          [](SymmetricMemory& self, const std::vector<std::tuple<int, int, int>>& peers) {
            std::vector<PeerAddress> addresses;
            addresses.reserve(peers.size());
            for (const auto& [pid, descriptor, thread] : peers) {
              addresses.push_back({pid, descriptor, thread});
            }
            self.map(addresses);
          },
          "peers"_a)
      .def_prop_ro("bytes", &SymmetricMemory::bytes)
      .def_prop_ro("mapped_bytes", &SymmetricMemory::mapped_bytes)
      .def_prop_ro(
          "may_have_rows_apart",
          [](const SymmetricMemory& self) { return RowsLayout::fits_beside(self.mapped_bytes()); },
          "Whether commands can tell memory for rows alone from this one.")
      .def_prop_ro(
          "rows_bytes",
          [](const SymmetricMemory& self) {
            return RowsLayout{.ranks = self.ranks(), .bytes = self.bytes()}.total();
          },
          "Bytes of memory for rows alone that travel between hosts.");
  bind_calls(memory);
  bind_counts(memory);
}

}  // namespace fanfold::bindings
