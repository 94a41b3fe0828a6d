// What NCCL's GIN promises, between ranks that are threads of one process, and nothing more: puts
// land in any order and any time, a signal behind all puts before it, a counter when its put is done.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "gin_device.hpp"

namespace emulation {

class GinNetwork {
 public:
  // Most puts to a rank that are not done, where NCCL's code would wait without end.
  static constexpr size_t kMost = 32;

  // With a seed puts land in another order, and each step takes up to `most_us`. Signals that are
  // not `strong` come behind their own put alone.
  GinNetwork(std::vector<char*> memory, int words, uint32_t seed, uint32_t most_us, bool strong)
      : memory_(std::move(memory)), words_(words), seed_(seed), most_us_(most_us), strong_(strong),
        random_(seed) {
    const size_t ranks = memory_.size();
    ended_.resize(ranks);
    queues_.resize(ranks * ranks);
    signals_ = std::make_unique<std::atomic<uint64_t>[]>(ranks * static_cast<size_t>(words));
    counters_ = std::make_unique<std::atomic<uint64_t>[]>(ranks * static_cast<size_t>(words));
    carries_ = std::thread([this] { carry(); });
  }
  ~GinNetwork() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    work_.notify_all();
    carries_.join();
  }

  GinDevice device(int rank) {
    return {
        .rank = rank,
        .ranks = static_cast<int>(memory_.size()),
        .network = this,
        .put = [](void* self, int from, const GinPut& put) { as(self).add(from, put); },
        .signal = [](void* self, int of, int i) { return as(self).at(as(self).signals_, of, i); },
        .counter = [](void* self, int of,
                      int i) { return as(self).at(as(self).counters_, of, i); }};
  }
  // A rank's window has ended: what is under way to it or from it is lost.
  void end(int rank) {
    const std::lock_guard lock(mutex_);
    ended_[static_cast<size_t>(rank)] = true;
  }
  int faults() const { return faults_; }
  int reordered() const { return reordered_; }

 private:
  struct Waiting : GinPut {
    bool has_landed = false;
  };

  static GinNetwork& as(void* self) { return *static_cast<GinNetwork*>(self); }
  uint64_t at(const std::unique_ptr<std::atomic<uint64_t>[]>& words, int rank, int i) const {
    return words[static_cast<size_t>(rank * words_ + i)].load(std::memory_order_acquire);
  }

  void add(int rank, const GinPut& put) {
    const std::lock_guard lock(mutex_);
    auto& queue =
        queues_[static_cast<size_t>(rank) * memory_.size() + static_cast<size_t>(put.peer)];
    // Number 0 is none to NCCL's proxy.
    const bool is_wrong = put.signal == 0 || put.signal >= words_ || put.counter <= 0 ||
                          put.counter >= words_ || queue.size() >= kMost;
    if (is_wrong) ++faults_;
    queue.push_back({put});
    ++waiting_;
    work_.notify_one();
  }

  void carry() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return ends_ || waiting_ > 0; });
      if (ends_) return;
      const size_t first = random_() % queues_.size();
      for (size_t i = 0; i < queues_.size(); ++i) {
        const size_t at = (first + i) % queues_.size();
        if (queues_[at].empty()) continue;
        step(static_cast<int>(at / memory_.size()), queues_[at]);
        break;
      }
      if (most_us_ != 0 && random_() % 8 == 0) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % (8 * most_us_)));
        lock.lock();
      }
    }
  }

  // One thing happens to one put of a queue: its bytes land, or it is done.
  void step(int rank, std::deque<Waiting>& queue) {
    const size_t i = seed_ == 0 ? 0 : random_() % std::min<size_t>(queue.size(), 12);
    Waiting& put = queue[i];
    if (ended_[static_cast<size_t>(rank)] || ended_[static_cast<size_t>(put.peer)]) {
      waiting_ -= queue.size();
      return queue.clear();
    }
    if (!put.has_landed) {
      land(rank, put);
      put.has_landed = true;
      if (i > 0) ++reordered_;
      if (seed_ != 0) return;
    }
    if (put.signal >= 0) {
      if (strong_ && i > 0) return;
      signals_[static_cast<size_t>(put.peer * words_ + put.signal)].fetch_add(put.add);
    }
    counters_[static_cast<size_t>(rank * words_ + put.counter)].fetch_add(1);
    queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(i));
    --waiting_;
  }

  // The last words first. Words of 8 bytes are not torn.
  void land(int rank, const Waiting& put) {
    const char* from = memory_[static_cast<size_t>(rank)] + put.from;
    char* to = memory_[static_cast<size_t>(put.peer)] + put.to;
    size_t left = put.bytes;
    for (; left % 8 != 0; --left) to[left - 1] = from[left - 1];
    for (; left > 0; left -= 8) {
      const auto* word = reinterpret_cast<const uint64_t*>(from + left - 8);
      __atomic_store_n(reinterpret_cast<uint64_t*>(to + left - 8),
                       __atomic_load_n(word, __ATOMIC_RELAXED), __ATOMIC_RELEASE);
    }
  }

  std::vector<char*> memory_;
  const int words_;
  const uint32_t seed_, most_us_;
  const bool strong_;
  std::mt19937 random_;
  std::vector<std::deque<Waiting>> queues_;
  std::vector<bool> ended_;
  std::unique_ptr<std::atomic<uint64_t>[]> signals_, counters_;
  std::mutex mutex_;
  std::condition_variable work_;
  size_t waiting_ = 0;
  bool ends_ = false;
  std::atomic<int> faults_ = 0, reordered_ = 0;
  std::thread carries_;
};

}  // namespace emulation
