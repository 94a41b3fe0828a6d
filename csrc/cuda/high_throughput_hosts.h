// What the high-throughput kernels of a rank need to reach ranks on other hosts: as in
// low_latency_hosts.h, but laid out as a rank's memory on its GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/pinned_pages.h"
#include "memory/symmetric.h"

namespace fanfold::cuda {

// What kernels use of `memory` with rings of `ring_bytes`, without these rings if rows lie apart,
// and the rings of commands. Throws BadArgument if commands cannot name all of it.
std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory, int64_t ring_bytes,
                                       bool rows_apart);

// Takes away all words that say that something has arrived. Nothing is under way to this rank.
void clear_received(const SymmetricMemory& memory, int64_t ring_bytes);

}  // namespace fanfold::cuda
