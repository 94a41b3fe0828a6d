#include "host/row_copy.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fanfold {
namespace {

// The share of the rows of all ranks in a last-level cache of 32 MiB: half, because the experts'
// outputs are as large. A constant, because virtual machines report a wrong cache size.
constexpr int64_t kCacheBytes = int64_t{16} << 20;
// A shorter row often ends in the middle of a cache line, which makes non-temporal stores slow.
constexpr int64_t kShortRow = 512;

#if defined(__SSE2__)
constexpr size_t kVector = sizeof(__m128i);

bool whole_vectors(const std::byte* to, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(bytes)) % kVector == 0;
}

void copy_past_caches(std::byte* to, const std::byte* from, int64_t bytes) {
  auto* out = reinterpret_cast<__m128i*>(to);
  const auto* in = reinterpret_cast<const __m128i*>(from);
  const int64_t vectors = bytes / static_cast<int64_t>(kVector);
  for (int64_t i = 0; i < vectors; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
}

void order_copies() { _mm_sfence(); }
#else
bool whole_vectors(const std::byte*, int64_t) { return false; }
void copy_past_caches(std::byte*, const std::byte*, int64_t) {}
void order_copies() {}
#endif

}  // namespace

RowCopy::RowCopy(int64_t bytes, int32_t ranks) : past_caches_(bytes * ranks > kCacheBytes) {}

RowCopy::~RowCopy() {
  if (past_caches_) order_copies();
}

void RowCopy::operator()(std::byte* to, const std::byte* from, int64_t bytes) const {
  if (past_caches_ && bytes >= kShortRow && whole_vectors(to, bytes)) {
    copy_past_caches(to, from, bytes);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

}  // namespace fanfold
