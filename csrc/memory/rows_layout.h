// Memory for rows alone that travel between hosts, apart from a rank's SymmetricMemory of the CPU.
//
//   received       as the modes' part of the SymmetricMemory
//   areas          of every rank, to send from: likewise, and each begins a share behind the last
//
// What one rank sends is a share of what all send, and lies at the same offsets of every area. So
// the shares do not meet, although the areas overlap, and all of it takes three times the memory
// of what is received however many ranks there are.
#pragma once

#include <cstdint>

#include "layout/command.h"
#include "layout/types.h"

namespace fanfold {

struct RowsLayout {
  int32_t ranks;
  int64_t bytes;  // of the modes' part

  constexpr int64_t share() const { return align_up((bytes + ranks - 1) / ranks, kAreaAlignment); }
  constexpr int64_t area(int32_t peer) const {
    return align_up(bytes, kAreaAlignment) + peer * share();
  }
  // Whether commands can tell it from the other memory, of which a rank has `mapped_bytes`.
  static constexpr bool fits_beside(int64_t mapped_bytes) { return mapped_bytes <= kRowsApart; }
  constexpr int64_t total() const { return area(ranks - 1) + bytes; }
};

static_assert(RowsLayout{.ranks = 2, .bytes = 1000}.area(1) == 1024 + 512);
static_assert(RowsLayout{.ranks = 64, .bytes = 64 << 20}.total() < 3 * (64 << 20));

}  // namespace fanfold
