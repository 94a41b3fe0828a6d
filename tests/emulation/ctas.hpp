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

// Lets other CTAs run for a microsecond.
void nap();

// The words of all lanes of the warp, once every lane has brought its own.
const uint64_t* together(uint64_t word);

// Of the lanes of the warp: those that bring true, and those that bring the same value as this one.
uint32_t ballot(bool bit);
uint32_t matching(uint32_t value);

// Returns when all threads of the CTA have come.
void barrier();

// Returns when `threads` threads of the CTA, whole warps, have come to barrier `id`, 1 to 15; whether
// all of them have brought true. Without waiting: arrives for those that wait.
bool named_barrier(int id, int threads, bool brought);
void named_barrier_arrive(int id, int threads);

// ---- of the running CTA's cluster ---------------------------------------------------------------

unsigned cta_of_cluster();

// Returns when all CTAs of the cluster have come, one thread of each. From then on the others find
// `anchor`, an address of this CTA, until it ends.
void meet_cluster(unsigned char* anchor);

// The anchor of a CTA of the cluster; null once that has ended.
unsigned char* anchor_of(unsigned cta);

// ---- of a launch --------------------------------------------------------------------------------

struct Grid {
  int ctas;
  int cluster;           // CTAs of a cluster; divides `ctas`
  int threads;           // of a CTA
  uint32_t seed = 1;     // of the order in which a CTA's threads run
  uint32_t late_us = 0;  // the last cluster begins so much later
};

// Runs `kernel(arguments)` on all CTAs at once, and returns when all have ended.
void run_grid(const Grid& grid, void (*kernel)(const void*), const void* arguments);

// `emulate_grid` of a kernel's library (kernel.cpp).
using Emulate = void(const void* arguments, Grid* grid);

}  // namespace emulation
