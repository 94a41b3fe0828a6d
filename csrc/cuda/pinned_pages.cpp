#include "cuda/pinned_pages.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "layout/command.h"
#include "layout/ring.h"

namespace fanfold::cuda {
namespace {

constexpr int64_t kPage = 4096;

}  // namespace

void Pages::add(const void* data, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto end = static_cast<int64_t>(begin) + bytes;
  spans_.push_back({begin / kPage * kPage, static_cast<uintptr_t>(align_up(end, kPage))});
}

void Pages::add_rings(const SymmetricMemory& memory) {
  for (const RingView& ring : memory.carrier().kernel_rings()) {
    const auto* header = reinterpret_cast<std::byte*>(ring.head) - offsetof(RingHeader, head);
    add(header, RingLayout{static_cast<int64_t>(ring.slots)}.bytes());
  }
}

std::vector<PinnedRange> Pages::merged() {
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

void check_commands(const SymmetricMemory& memory, int64_t bytes, const char* advice) {
  if (memory.carried().modes + bytes <= std::min(kMaxCommandSource, kMaxCommandTarget)) return;
  throw BadArgument("memory between hosts", std::to_string(bytes) + " bytes",
                    std::string("what a command can name, 32 GiB: ") + advice);
}

}  // namespace fanfold::cuda
