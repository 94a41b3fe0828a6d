// What a kernel's source needs of CUDA, on a CPU: the words of the language, the built-in functions,
// and threads. Included before anything else when a kernel is compiled by the host's compiler.
//
// A CTA is a thread of the operating system, and each of its threads a fiber of that thread, which
// gives way to the next where the real one would wait: in what the threads of a warp do together, at
// barriers, and whenever memory that others write is read. So a CTA's shared memory is its thread's
// own, and a kernel that waits for words of other CTAs or ranks goes on as they write them.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulation {

inline constexpr int kLanes = 32;
inline constexpr size_t kStackBytes = 64 << 10;
inline constexpr size_t kDynamicSharedBytes = 227 << 10;

struct Index {
  unsigned x;
};

struct Warp {
  uint64_t words[2][kLanes];  // of this and of the last thing done together
  int arrived = 0;
  uint32_t generation = 0;
};

struct Barrier {
  int arrived = 0;
  uint32_t generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

class Cta {
 public:
  Cta(int threads, const std::function<void()>& body)
      : fibers_(static_cast<size_t>(threads)), warps_(static_cast<size_t>(threads / kLanes)),
        body_(body) {}

  void run() {
    own() = this;
    left_ = threads();
    for (int i = 0; i < threads(); ++i) {
      Fiber& fiber = at(i);
      fiber.stack = std::make_unique<char[]>(kStackBytes);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Cta::begin, 0);
    }
    current_ = 0;
    swapcontext(&caller_, &at(0).context);
  }

  static Cta*& own() {
    static thread_local Cta* cta = nullptr;
    return cta;
  }

  unsigned thread() const { return static_cast<unsigned>(current_); }
  int lane() const { return current_ % kLanes; }

  // Lets the CTA's other threads run, and now and then the other CTAs.
  void yield() {
    if (++yields_ % (4 * threads()) == 0) std::this_thread::yield();
    // Now and then another warp, whatever the lanes of this one do together; by chance, since a
    // rhythm could pass the same lanes over for ever.
    random_ = random_ * 1664525u + 1013904223u;
    const bool leaves = random_ >> 26 == 0;
    go_on_with(leaves ? current_ | (kLanes - 1) : current_, 0, threads());
  }

  // The words of all lanes, once every lane has brought its own.
  const uint64_t* together(uint64_t word) {
    Warp& warp = warps_[static_cast<size_t>(current_ / kLanes)];
    const uint32_t generation = warp.generation;
    uint64_t* words = warp.words[generation % 2];
    words[lane()] = word;
    if (++warp.arrived == kLanes) {
      warp.arrived = 0;
      ++warp.generation;
    } else {
      // A warp goes as far as it can before another does, so that what lacks a barrier fails; but
      // one of its lanes may wait for others.
      for (int looks = 0; warp.generation == generation; ++looks)
        looks < 2 ? go_on_with(current_, current_ - lane(), kLanes) : yield();
    }
    return words;
  }

  // All threads come.
  void barrier() {
    together(0);  // a warp whole, so that all of it gets here before another goes on
    const uint32_t generation = barrier_.generation;
    if (++barrier_.arrived == threads()) {
      barrier_.arrived = 0;
      ++barrier_.generation;
    } else {
      while (barrier_.generation == generation) yield();
    }
  }

  int threads() const { return static_cast<int>(fibers_.size()); }

 private:
  Fiber& at(int i) { return fibers_[static_cast<size_t>(i)]; }

  // Runs the next thread behind `last` of the `count` from `first`.
  void go_on_with(int last, int first, int count) {
    const int before = current_;
    current_ = last;
    do {
      current_ = first + (current_ - first + 1) % count;
    } while (at(current_).done);
    if (current_ != before) swapcontext(&at(before).context, &at(current_).context);
  }

  static void begin() {
    Cta& cta = *own();
    cta.body_();
    cta.at(cta.current_).done = true;
    if (--cta.left_ == 0) setcontext(&cta.caller_);
    cta.yield();
  }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Barrier barrier_;
  const std::function<void()>& body_;
  ucontext_t caller_;
  int current_ = 0;
  int left_ = 0;
  uint64_t yields_ = 0;
  uint32_t random_ = 1;
};

inline Index& block() {
  static thread_local Index index{};
  return index;
}
inline Index& grid() {
  static thread_local Index index{};
  return index;
}
inline Index thread() { return {Cta::own()->thread()}; }

inline std::atomic<size_t>& dynamic_shared_bytes() {
  static std::atomic<size_t> bytes{0};
  return bytes;
}

// Runs `kernel` on `ctas` CTAs at once, and returns when all have ended.
inline void run_grid(int ctas, int threads, const std::function<void()>& kernel) {
  std::vector<std::thread> running;
  for (int i = 0; i < ctas; ++i) {
    running.emplace_back([=, &kernel] {
      block() = {static_cast<unsigned>(i)};
      grid() = {static_cast<unsigned>(ctas)};
      Cta(threads, kernel).run();
    });
  }
  for (std::thread& cta : running) cta.join();
}

}  // namespace emulation

#define threadIdx (emulation::thread())
#define blockIdx (emulation::block())
#define gridDim (emulation::grid())

using std::max;
using std::min;

// ---- what the lanes of a warp do together; all of them always do --------------------------------

inline uint32_t __ballot_sync(uint32_t, bool bit) {
  const uint64_t* words = emulation::Cta::own()->together(bit ? 1 : 0);
  uint32_t bits = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) bits |= words[lane] != 0 ? 1u << lane : 0u;
  return bits;
}
inline int __any_sync(uint32_t mask, bool bit) { return __ballot_sync(mask, bit) != 0; }
inline int __all_sync(uint32_t mask, bool bit) { return __ballot_sync(mask, bit) == 0xffffffffu; }
inline void __syncwarp() { emulation::Cta::own()->together(0); }
inline uint32_t __match_any_sync(uint32_t, int value) {
  const uint64_t* words = emulation::Cta::own()->together(static_cast<uint32_t>(value));
  uint32_t bits = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane)
    bits |= words[lane] == static_cast<uint32_t>(value) ? 1u << lane : 0u;
  return bits;
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  const uint64_t* words = emulation::Cta::own()->together(value);
  uint64_t bits = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) bits |= words[lane];
  return static_cast<uint32_t>(bits);
}
template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  return std::bit_cast<T>(static_cast<uint32_t>(
      emulation::Cta::own()->together(std::bit_cast<uint32_t>(value))[lane % emulation::kLanes]));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return __shfl_sync(mask, value, emulation::Cta::own()->lane() ^ other);
}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __syncthreads() { emulation::Cta::own()->barrier(); }

// ---- arithmetic -----------------------------------------------------------------------------------

inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
using std::isnan;
namespace fanfold {
// A signalling NaN gives way to a number, too; C's function returns NaN.
inline float fmaxf(float a, float b) { return isnan(a) || a < b ? b : a; }
}  // namespace fanfold

inline uint32_t atomicOr(uint32_t* word, uint32_t bits) {
  return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}
inline uint32_t atomicAdd(uint32_t* word, uint32_t value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
