#include "host/pages.h"

#include <sys/mman.h>

#include <cstddef>

#include "layout/types.h"

namespace fanfold {

void ask_for_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kHugePage = 2 << 20;
  constexpr int64_t kWorthwhile = 2 * kHugePage;
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin));
  const int64_t skipped = align_up(address, kHugePage) - address;
  const int64_t whole = (bytes - skipped) / kHugePage * kHugePage;
  if (whole < kWorthwhile) return;
  madvise(static_cast<std::byte*>(begin) + skipped, static_cast<size_t>(whole), MADV_HUGEPAGE);
#endif
}

}  // namespace fanfold
