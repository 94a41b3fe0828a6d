// A grid of emulated CTAs (ctas.cpp). A CTA is a thread of the operating system, and each of its
// threads a fiber of that thread, which gives way to the next where the real one would wait: in what
// the threads of a warp do together, at barriers, and whenever memory that others write is read. So
// a CTA's shared memory is its thread's own, and a kernel that waits for words of other CTAs or
// ranks goes on as they write them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

inline constexpr int kLanes = 32;
inline constexpr size_t kDynamicSharedBytes = 227 << 10;

struct Index {
  unsigned x;
};

// ---- of the running fiber -----------------------------------------------------------------------

Index thread();
Index block();
Index grid();
int lane();

// Lets the CTA's other threads run, and now and then the other CTAs.
void yield();

// The words of all lanes of the warp, once every lane has brought its own.
const uint64_t* together(uint64_t word);

// Returns when all threads of the CTA have come.
void barrier();

// ---- of a launch --------------------------------------------------------------------------------

// Runs `kernel(arguments)` on `ctas` CTAs at once, and returns when all have ended.
void run_grid(int ctas, int threads, void (*kernel)(const void*), const void* arguments);

}  // namespace emulation
