// What the low-latency kernels of a rank need to reach ranks on other hosts. They send from, and
// receive in, the rank's SymmetricMemory of the CPU, whose carrier takes their commands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/pinned_pages.h"
#include "layout/low_latency_hosts.h"
#include "memory/symmetric.h"

namespace fanfold::cuda {

// The rings into which the kernels push, and what they read and write of `memory` in calls of the
// geometry; ascending, without overlaps. Throws BadArgument if commands cannot name all of it.
std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory,
                                       const LowLatencyGeometry& geometry);

// Takes away what says that something has arrived: the first call of the geometry has the number of
// an earlier one. Nothing is under way to this rank.
void clear_received(const SymmetricMemory& memory, const LowLatencyGeometry& geometry);

// What begins in the GPU's memory at the address `at` with LowLatencyHosts, before the first call:
// that, then the rings' heads and views.
std::vector<std::byte> hosts_block(const SymmetricMemory& memory, uintptr_t at);

}  // namespace fanfold::cuda
