#include "cuda/low_latency_hosts.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace fanfold::cuda {
namespace {

constexpr int64_t kPage = 4096;

// Of whole pages: the page that two ranges share is pinned once. Ranges that only touch may lie in
// different mappings, and stay apart.
class Pages {
 public:
  void add(const void* data, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    const auto end = static_cast<int64_t>(begin) + bytes;
    spans_.push_back({begin / kPage * kPage, static_cast<uintptr_t>(align_up(end, kPage))});
  }

  std::vector<PinnedRange> merged() {
    std::sort(spans_.begin(), spans_.end(),
              [](const Span& a, const Span& b) { return a.begin < b.begin; });
    std::vector<Span> merged;
    for (const Span& span : spans_) {
      if (merged.empty() || span.begin >= merged.back().end) {
        merged.push_back(span);
      } else {
        merged.back().end = std::max(merged.back().end, span.end);
      }
    }
    std::vector<PinnedRange> ranges;
    ranges.reserve(merged.size());
    for (const Span& span : merged) {
      ranges.push_back(
          {reinterpret_cast<std::byte*>(span.begin), static_cast<int64_t>(span.end - span.begin)});
    }
    return ranges;
  }

 private:
  struct Span {
    uintptr_t begin, end;
  };
  std::vector<Span> spans_;
};

void check_commands(const SymmetricMemory& memory, const LowLatencyHostsLayout& layout) {
  const int64_t end = memory.carried().modes + layout.bytes();
  if (end <= std::min(kMaxCommandSource, kMaxCommandTarget)) return;
  throw BadArgument("memory between hosts", std::to_string(layout.bytes()) + " bytes",
                    "what a command can name, 32 GiB: lower max_tokens or hidden");
}

}  // namespace

std::vector<PinnedRange> pinned_ranges(const SymmetricMemory& memory,
                                       const LowLatencyGeometry& geometry) {
  const LowLatencyHostsLayout layout{geometry};
  check_commands(memory, layout);
  const int32_t rank = memory.rank();
  Pages pages;
  pages.add(memory.own(), layout.words_end());
  for (int32_t peer = 0; peer < memory.ranks(); ++peer) {
    if (memory.hosts().together(peer, rank)) continue;
    pages.add(memory.own() + layout.blocks(peer), layout.source_bytes());
    pages.add(memory.base(peer) + layout.blocks(rank), layout.source_bytes());
  }
  for (const RingView& ring : memory.carrier().kernel_rings()) {
    const auto* header = reinterpret_cast<std::byte*>(ring.head) - offsetof(RingHeader, head);
    pages.add(header, RingLayout{static_cast<int64_t>(ring.slots)}.bytes());
  }
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

std::vector<std::byte> hosts_block(const SymmetricMemory& memory, uintptr_t at) {
  const std::vector<RingView> rings = memory.carrier().kernel_rings();
  const auto count = static_cast<int64_t>(rings.size());
  const int64_t heads = align_up(int64_t{sizeof(LowLatencyHosts)}, kAreaAlignment);
  const int64_t views = heads + count * int64_t{sizeof(RingHead)};
  std::vector<std::byte> block(static_cast<size_t>(views + count * int64_t{sizeof(RingView)}));
  LowLatencyHosts hosts{};
  for (int32_t peer = 0; peer < memory.ranks(); ++peer) {
    if (!memory.hosts().together(peer, memory.rank())) {
      hosts.elsewhere[peer / 32] |= 1u << (peer % 32);
    }
  }
  hosts.received = reinterpret_cast<unsigned char*>(memory.own());
  hosts.origin = memory.carried().modes;
  hosts.rings = reinterpret_cast<const RingView*>(at + static_cast<uintptr_t>(views));
  hosts.ring_count = static_cast<int32_t>(count);
  std::memcpy(block.data(), &hosts, sizeof hosts);
  for (int64_t ring = 0; ring < count; ++ring) {
    RingView view = rings[static_cast<size_t>(ring)];
    view.head = reinterpret_cast<RingHead*>(at + static_cast<uintptr_t>(heads)) + ring;
    std::memcpy(block.data() + views + ring * int64_t{sizeof view}, &view, sizeof view);
  }
  return block;
}

}  // namespace fanfold::cuda
