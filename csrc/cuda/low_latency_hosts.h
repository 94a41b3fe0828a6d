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
// geometry, without rows if these lie `rows_apart`; ascending, without overlaps. Throws BadArgument
// if commands cannot name all of it.
std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory,
                                       const LowLatencyGeometry& geometry, bool rows_apart);

// Takes away what says that something has arrived: the first call of the geometry has the number of
// an earlier one. Nothing is under way to this rank.
void clear_received(const SymmetricMemory& memory, const LowLatencyGeometry& geometry);

// What begins in the GPU's memory at the address `at` with LowLatencyHosts, before the first call:
// that, then the rings' heads and views. Rows lie at the address `rows`, a RowsLayout; 0: in
// `memory`.
std::vector<std::byte> hosts_block(const SymmetricMemory& memory, uintptr_t at, uintptr_t rows);

}  // namespace fanfold::cuda
