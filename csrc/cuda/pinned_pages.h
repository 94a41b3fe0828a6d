// Which pages of the CPU's memory kernels use that reach ranks on other hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/symmetric.h"

namespace fanfold::cuda {

// Memory that kernels use: whole pages.
struct PinnedRange {
  std::byte* data;
  int64_t bytes;
};

// Of whole pages: the page that two ranges share is pinned once. Ranges that only touch may lie in
// different mappings, and stay apart.
class Pages {
 public:
  void add(const void* data, int64_t bytes);
  // The rings into which kernels push.
  void add_rings(const SymmetricMemory& memory);

  // Ascending, without overlaps.
  std::vector<PinnedRange> merged();

 private:
  struct Span {
    uintptr_t begin, end;
  };
  std::vector<Span> spans_;
};

// Throws BadArgument, with the `advice`, if commands cannot name the first `bytes` bytes of the
// modes' memory.
void check_commands(const SymmetricMemory& memory, int64_t bytes, const char* advice);

}  // namespace fanfold::cuda
