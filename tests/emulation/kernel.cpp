// One kernel for one set of constants as a library: KERNEL is its file, ENTRY its function, ARGUMENTS
// the struct it takes. MEMORY_OF is the namespace of a kernel that declares its dynamic shared memory
// there itself, and its threads.
#include KERNEL

#ifdef MEMORY_OF
namespace MEMORY_OF {
alignas(1024) thread_local uint8_t memory[emulation::kDynamicSharedBytes];
}
#endif

namespace {

#ifdef MEMORY_OF
constexpr int kThreadsOfCta = MEMORY_OF::kThreads;

void begin_cta() {
  fanfold::emulated_shared = MEMORY_OF::memory;
  std::memset(MEMORY_OF::memory, 0xA5, sizeof MEMORY_OF::memory);
}
#else
constexpr int kThreadsOfCta = fanfold::kThreads;

void begin_cta() {}
#endif

void run(const void* arguments) {
  if (threadIdx.x == 0) begin_cta();  // no other thread runs before it waits
  ENTRY(*static_cast<const fanfold::ARGUMENTS*>(arguments));
}

}  // namespace

// Of a CTA, as the kernel that has run took it.
extern "C" __attribute__((visibility("default"))) size_t dynamic_shared_bytes() {
  return __atomic_load_n(&fanfold::emulated_shared_bytes, __ATOMIC_RELAXED);
}

extern "C" __attribute__((visibility("default"))) int cta_threads() { return kThreadsOfCta; }

// Runs the kernel on `ctas` CTAs, which are one cluster, and returns when it has ended.
extern "C" __attribute__((visibility("default"))) void emulate(const void* arguments, int ctas) {
  emulation::run_grid({.ctas = ctas, .cluster = ctas, .threads = kThreadsOfCta}, run, arguments);
}

// Likewise on `grid`, whose threads this function sets.
extern "C" __attribute__((visibility("default"))) void emulate_grid(const void* arguments,
                                                                    emulation::Grid* grid) {
  grid->threads = kThreadsOfCta;
  emulation::run_grid(*grid, run, arguments);
}
