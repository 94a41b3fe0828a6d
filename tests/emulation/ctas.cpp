#include "ctas.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Warp {
  uint64_t words[2][kLanes];  // of this and of the last thing done together
  int arrived = 0;
  uint32_t generation = 0;
};

struct Barrier {
  int arrived = 0;
  uint32_t generation = 0;
};

// A thread of a CTA. A context starts it; then jumps, which ask nothing of the operating system,
// where swapcontext() sets the signal mask each time.
struct Fiber {
  ucontext_t context;
  jmp_buf state;
  bool started = false;
  bool done = false;
};

// Memory for stacks, kept for the next CTA: what the system gives it clears first.
class Stacks {
 public:
  using Memory = std::unique_ptr<char[]>;

  static Memory take(size_t bytes) {
    const std::lock_guard lock(mutex());
    std::vector<Memory>& left = of(bytes);
    if (left.empty()) return Memory(new char[bytes]);
    Memory memory = std::move(left.back());
    left.pop_back();
    return memory;
  }
  static void give_back(size_t bytes, Memory memory) {
    const std::lock_guard lock(mutex());
    of(bytes).push_back(std::move(memory));
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<Memory>& of(size_t bytes) {
    static std::map<size_t, std::vector<Memory>> left;
    return left[bytes];
  }
};

class Cta {
 public:
  Cta(int threads, void (*kernel)(const void*), const void* arguments)
      : fibers_(static_cast<size_t>(threads)), warps_(static_cast<size_t>(threads / kLanes)),
        kernel_(kernel), arguments_(arguments) {}

  void run() {
    own = this;
    left_ = threads();
    const size_t bytes = fibers_.size() * kStackBytes;
    Stacks::Memory stacks = Stacks::take(bytes);
    for (int i = 0; i < threads(); ++i) {
      Fiber& fiber = at(i);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(i) * kStackBytes;
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Cta::begin, 0);
    }
    current_ = 0;
    at(0).started = true;
    swapcontext(&caller_, &at(0).context);
    Stacks::give_back(bytes, std::move(stacks));
  }

  static thread_local Cta* own;

  int thread() const { return current_; }
  int lane() const { return current_ % kLanes; }

  void yield() {
    if (++yields_ % (4 * static_cast<uint64_t>(threads())) == 0) std::this_thread::yield();
    // Now and then another warp, whatever the lanes of this one do together; by chance, since a
    // rhythm could pass the same lanes over for ever.
    random_ = random_ * 1664525u + 1013904223u;
    const bool leaves = random_ >> 26 == 0;
    go_on_with(leaves ? current_ | (kLanes - 1) : current_, 0, threads());
  }

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

 private:
  int threads() const { return static_cast<int>(fibers_.size()); }
  Fiber& at(int i) { return fibers_[static_cast<size_t>(i)]; }

  // Runs the next thread behind `last` of the `count` from `first`.
  void go_on_with(int last, int first, int count) {
    const int before = current_;
    current_ = last;
    do {
      current_ = first + (current_ - first + 1) % count;
    } while (at(current_).done);
    if (current_ != before) switch_to(at(before), at(current_));
  }

  static void switch_to(Fiber& from, Fiber& to) {
    if (_setjmp(from.state) != 0) return;
    if (to.started) _longjmp(to.state, 1);
    to.started = true;
    setcontext(&to.context);
  }

  static void begin() {
    Cta& cta = *own;
    cta.kernel_(cta.arguments_);
    cta.at(cta.current_).done = true;
    if (--cta.left_ == 0) setcontext(&cta.caller_);
    cta.yield();
  }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Barrier barrier_;
  void (*kernel_)(const void*);
  const void* arguments_;
  ucontext_t caller_;
  int current_ = 0;
  int left_ = 0;
  uint64_t yields_ = 0;
  uint32_t random_ = 1;
};

thread_local Cta* Cta::own = nullptr;
thread_local Index block_index{};
thread_local Index grid_size{};

}  // namespace

Index thread() { return {static_cast<unsigned>(Cta::own->thread())}; }
Index block() { return block_index; }
Index grid() { return grid_size; }
int lane() { return Cta::own->lane(); }
void yield() { Cta::own->yield(); }
const uint64_t* together(uint64_t word) { return Cta::own->together(word); }
void barrier() { Cta::own->barrier(); }

void run_grid(int ctas, int threads, void (*kernel)(const void*), const void* arguments) {
  std::vector<std::thread> running;
  for (int i = 0; i < ctas; ++i) {
    running.emplace_back([=] {
      block_index = {static_cast<unsigned>(i)};
      grid_size = {static_cast<unsigned>(ctas)};
      Cta(threads, kernel, arguments).run();
    });
  }
  for (std::thread& cta : running) cta.join();
}

}  // namespace emulation
