#include "cuda/high_throughput_hosts.h"

#include <cstring>

#include "cuda/high_throughput.h"

namespace fanfold::cuda {

std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory, int64_t ring_bytes,
                                       bool rows_apart) {
  const HighThroughputOffsets at = high_throughput_offsets(memory.ranks(), ring_bytes);
  check_commands(memory, at.results, "lower FANFOLD_RING_BYTES");
  const int32_t rank = memory.rank();
  const auto ring = [&](int32_t source) { return at.ring + source * ring_bytes; };
  Pages pages;
  pages.add(memory.own(), at.ring);
  for (int32_t peer = 0; peer < memory.ranks(); ++peer) {
    if (memory.hosts().together(peer, rank)) continue;
    // Other words need no send area.
    pages.add(memory.base(peer) + at.counts, at.ready - at.counts);
    if (rows_apart) continue;
    pages.add(memory.own() + ring(peer), ring_bytes);
    pages.add(memory.base(peer) + ring(rank), ring_bytes);
  }
  pages.add_rings(memory);
  return pages.merged();
}

void clear_received(const SymmetricMemory& memory, int64_t ring_bytes) {
  const HighThroughputOffsets at = high_throughput_offsets(memory.ranks(), ring_bytes);
  std::memset(memory.own(), 0, static_cast<size_t>(at.ring));
}

}  // namespace fanfold::cuda
