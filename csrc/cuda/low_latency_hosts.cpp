#include "cuda/low_latency_hosts.h"

#include <cstring>

#include "layout/command.h"
#include "memory/rows_layout.h"

namespace fanfold::cuda {
namespace {

// What a source has in the memory that begins at `base`: all blocks, or the tables before rows that
// lie apart.
void add_blocks(Pages& pages, const std::byte* base, const LowLatencyHostsLayout& layout,
                int32_t source, bool rows_apart) {
  if (!rows_apart) return pages.add(base + layout.blocks(source), layout.source_bytes());
  for (const CallKind kind : {CallKind::kDispatch, CallKind::kCombine}) {
    for (int32_t parity = 0; parity < kParities; ++parity) {
      const int64_t begin = layout.block(kind, parity, source);
      pages.add(base + begin, layout.rows(kind, parity, source) - begin);
    }
  }
}

}  // namespace

std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory,
                                       const LowLatencyGeometry& geometry, bool rows_apart) {
  const LowLatencyHostsLayout layout{geometry};
  check_commands(memory, layout.bytes(), "lower max_tokens or hidden");
  const int32_t rank = memory.rank();
  Pages pages;
  pages.add(memory.own(), layout.words_end());
  for (int32_t peer = 0; peer < memory.ranks(); ++peer) {
    if (memory.hosts().together(peer, rank)) continue;
    add_blocks(pages, memory.own(), layout, peer, rows_apart);
    add_blocks(pages, memory.base(peer), layout, rank, rows_apart);
  }
  pages.add_rings(memory);
  return pages.merged();
}

void clear_received(const SymmetricMemory& memory, const LowLatencyGeometry& geometry) {
  const LowLatencyHostsLayout layout{geometry};
  const auto clear = [&](int64_t offset, int64_t bytes) {
    std::memset(memory.own() + offset, 0, static_cast<size_t>(bytes));
  };
  clear(0, layout.words_end());
  constexpr auto kDispatch = CallKind::kDispatch;
  for (int32_t source = 0; source < memory.ranks(); ++source) {
    if (memory.hosts().together(source, memory.rank())) continue;
    // Each count says itself of which call it is.
    for (int32_t parity = 0; parity < kParities; ++parity) {
      clear(layout.block(kDispatch, parity, source), layout.counts_bytes(kDispatch));
    }
  }
}

std::vector<std::byte> hosts_block(const SymmetricMemory& memory, uintptr_t at, uintptr_t rows) {
  const std::vector<RingView> rings = memory.carrier().kernel_rings();
  const auto count = static_cast<int64_t>(rings.size());
  const int64_t heads = align_up(int64_t{sizeof(LowLatencyHosts)}, kAreaAlignment);
  const int64_t views = heads + count * int64_t{sizeof(RingHead)};
  std::vector<std::byte> block(static_cast<size_t>(views + count * int64_t{sizeof(RingView)}));
  LowLatencyHosts hosts{};
  auto* const apart = reinterpret_cast<unsigned char*>(rows);
  const RowsLayout layout{.ranks = memory.ranks(), .bytes = memory.bytes()};
  for (int32_t peer = 0; peer < memory.ranks(); ++peer) {
    if (memory.hosts().together(peer, memory.rank())) continue;
    hosts.remote.elsewhere[peer / 32] |= 1u << (peer % 32);
    hosts.remote.sent_rows[peer] = reinterpret_cast<unsigned char*>(memory.base(peer));
    if (apart != nullptr) hosts.remote.sent_rows[peer] = apart + layout.area(peer);
  }
  hosts.remote.received = reinterpret_cast<unsigned char*>(memory.own());
  hosts.remote.received_rows = apart != nullptr ? apart : hosts.remote.received;
  hosts.remote.origin = memory.carried().modes;
  hosts.remote.rows_origin = apart != nullptr ? kRowsApart : hosts.remote.origin;
  hosts.remote.rings = reinterpret_cast<const RingView*>(at + static_cast<uintptr_t>(views));
  hosts.remote.ring_count = static_cast<int32_t>(count);
  std::memcpy(block.data(), &hosts, sizeof hosts);
  for (int64_t ring = 0; ring < count; ++ring) {
    RingView view = rings[static_cast<size_t>(ring)];
    view.head = reinterpret_cast<RingHead*>(at + static_cast<uintptr_t>(heads)) + ring;
    std::memcpy(block.data() + views + ring * int64_t{sizeof view}, &view, sizeof view);
  }
  return block;
}

}  // namespace fanfold::cuda
