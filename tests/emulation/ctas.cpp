#include "ctas.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
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
  uint32_t ballots[2] = {0, 0};
  int arrived = 0;
  uint32_t generation = 0;
};

// Of some of a CTA's warps.
struct NamedBarrier {
  int arrived = 0;
  uint32_t generation = 0;
  bool all[2] = {true, true};  // of this generation and of the last one
};
constexpr int kNamedBarriers = 16;

// CTAs that meet, and their anchors.
struct Cluster {
  explicit Cluster(int ctas) : anchors(static_cast<size_t>(ctas)) {}

  std::vector<std::atomic<unsigned char*>> anchors;  // null behind the CTA's end
  std::atomic<unsigned> arrived{0}, generation{0};
};

// A thread of a CTA. A context starts it; then jumps, which ask nothing of the operating system,
// where swapcontext() sets the signal mask each time.
struct Fiber {
  ucontext_t context;
  jmp_buf state;
  bool started = false;
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
  Cta(int threads, uint32_t seed, void (*kernel)(const void*), const void* arguments)
      : fibers_(static_cast<size_t>(threads)), waits_(static_cast<size_t>(threads), kNowhere),
        warps_(static_cast<size_t>(threads / kLanes)), kernel_(kernel), arguments_(arguments),
        random_(seed) {}

  void run() {
    own = this;
    left_ = ready_ = threads();
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
    if (++yields_ >= 4 * ready_) {
      yields_ = 0;
      std::this_thread::yield();
    }
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
      warp.ballots[warp.generation % 2] = 0;  // of the last but one, which all lanes have read
    } else {
      // A warp goes as far as it can before another does, so that what lacks a barrier fails; but
      // one of its lanes may wait for others.
      for (int looks = 0; warp.generation == generation; ++looks)
        looks < 2 ? go_on_with(current_, current_ - lane(), kLanes) : yield();
    }
    return words;
  }

  uint32_t ballot(bool bit) {
    Warp& warp = warps_[static_cast<size_t>(current_ / kLanes)];
    uint32_t& bits = warp.ballots[warp.generation % 2];
    bits |= bit ? 1u << lane() : 0u;
    together(0);
    return bits;
  }

  void barrier() {
    together(0);  // a warp whole, so that all of it gets here before another goes on
    if (++barrier_arrived_ == threads()) {
      barrier_arrived_ = 0;
      release(0);
    } else {
      wait(0);
    }
  }

  bool named_barrier(int id, int threads, bool brought) {
    together(0);
    NamedBarrier& barrier = named_[id];
    const uint32_t generation = barrier.generation;
    bool& all = barrier.all[generation % 2];
    all = all && brought;
    arrive(id, threads);
    if (barrier.generation == generation) wait(id);
    return all;
  }
  void named_barrier_arrive(int id, int threads) {
    together(0);
    arrive(id, threads);
  }

 private:
  int threads() const { return static_cast<int>(fibers_.size()); }
  void arrive(int id, int threads) {
    NamedBarrier& barrier = named_[id];
    if (++barrier.arrived < threads) return;
    barrier.arrived = 0;
    // The results of the generation before are read: those who read them have come here.
    barrier.all[++barrier.generation % 2] = true;
    release(id);
  }
  // Until barrier `id` releases the running thread, no other gives way to it.
  void wait(int id) {
    waits_[static_cast<size_t>(current_)] = static_cast<int8_t>(id);
    --ready_;
    yield();
  }
  void release(int id) {
    for (int8_t& place : waits_)
      if (place == id) {
        place = kNowhere;
        ++ready_;
      }
  }
  Fiber& at(int i) { return fibers_[static_cast<size_t>(i)]; }

  // Runs the next thread behind `last` of the `count` from `first`.
  void go_on_with(int last, int first, int count) {
    const int before = current_;
    current_ = last;
    do {
      if (++current_ == first + count) current_ = first;
    } while (waits_[static_cast<size_t>(current_)] != kNowhere);
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
    cta.waits_[static_cast<size_t>(cta.current_)] = kDone;
    --cta.ready_;
    if (--cta.left_ == 0) setcontext(&cta.caller_);
    cta.yield();
  }

  static constexpr int8_t kNowhere = -1, kDone = -2;

  std::vector<Fiber> fibers_;
  std::vector<int8_t> waits_;  // where each thread waits: at a barrier, 0 is that of all threads
  std::vector<Warp> warps_;
  int barrier_arrived_ = 0;
  NamedBarrier named_[kNamedBarriers];
  void (*kernel_)(const void*);
  const void* arguments_;
  ucontext_t caller_;
  int current_ = 0;
  int left_ = 0;   // that have not ended
  int ready_ = 0;  // of these, those that wait at no barrier
  int yields_ = 0;
  uint32_t random_;
};

thread_local Cta* Cta::own = nullptr;
thread_local Index block_index{};
thread_local Index grid_size{};
thread_local Cluster* cluster = nullptr;

unsigned cluster_size() { return static_cast<unsigned>(cluster->anchors.size()); }

}  // namespace

Index thread() { return {static_cast<unsigned>(Cta::own->thread())}; }
Index block() { return block_index; }
Index grid() { return grid_size; }
int lane() { return Cta::own->lane(); }
void yield() { Cta::own->yield(); }
void nap() { std::this_thread::sleep_for(std::chrono::microseconds(1)); }
const uint64_t* together(uint64_t word) { return Cta::own->together(word); }
uint32_t ballot(bool bit) { return Cta::own->ballot(bit); }
uint32_t matching(uint32_t value) {
  const uint64_t* words = together(value);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= words[lane] == value ? 1u << lane : 0u;
  return bits;
}
void barrier() { Cta::own->barrier(); }
bool named_barrier(int id, int threads, bool brought) {
  return Cta::own->named_barrier(id, threads, brought);
}
void named_barrier_arrive(int id, int threads) { Cta::own->named_barrier_arrive(id, threads); }

unsigned cta_of_cluster() { return block_index.x % cluster_size(); }

void meet_cluster(unsigned char* anchor) {
  cluster->anchors[cta_of_cluster()] = anchor;
  const unsigned before = cluster->generation;
  if (++cluster->arrived == cluster_size()) {
    cluster->arrived = 0;
    ++cluster->generation;
  }
  while (cluster->generation == before) std::this_thread::yield();
}

unsigned char* anchor_of(unsigned cta) { return cluster->anchors[cta]; }

void run_grid(const Grid& grid, void (*kernel)(const void*), const void* arguments) {
  std::vector<std::unique_ptr<Cluster>> clusters;
  for (int i = 0; i < grid.ctas; i += grid.cluster)
    clusters.push_back(std::make_unique<Cluster>(grid.cluster));
  std::vector<std::thread> running;
  for (int i = 0; i < grid.ctas; ++i) {
    Cluster* own = clusters[static_cast<size_t>(i / grid.cluster)].get();
    running.emplace_back([&grid, &clusters, own, kernel, arguments, i] {
      block_index = {static_cast<unsigned>(i)};
      grid_size = {static_cast<unsigned>(grid.ctas)};
      cluster = own;
      if (own == clusters.back().get())
        std::this_thread::sleep_for(std::chrono::microseconds(grid.late_us));
      Cta(grid.threads, grid.seed * (static_cast<uint32_t>(i) + 1), kernel, arguments).run();
      cluster->anchors[cta_of_cluster()] = nullptr;
    });
  }
  for (std::thread& cta : running) cta.join();
}

}  // namespace emulation
