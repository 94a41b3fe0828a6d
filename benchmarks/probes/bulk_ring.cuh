// A ring of rows in shared memory: one thread loads each row by a bulk copy and stores it by another
// as soon as it has arrived.
#pragma once

#include "device/bulk.cuh"
#include "harness.cuh"

namespace fanfold::probe {

// Loads run `Ahead` rows in front; the stores of up to `Behind` rows may still be reading their
// slot. One thread owns one ring, so a CTA has as many independent rings as warps.
template <int SlotBytes, int Ahead, int Behind>
class BulkRing {
 public:
  static constexpr int kSlots = Ahead + Behind;

  struct Shared {
    alignas(128) uint8_t slots[kSlots][SlotBytes];
    ArrivalBarrier full[kSlots];
    int rows[kSlots];
  };

  __device__ BulkRing(Shared& shared, uint32_t* error) : shared_(shared), error_(error) {
    for (int i = 0; i < kSlots; ++i) init_barrier(&shared_.full[i], 1);
    fence_barrier_init();
  }

  // `next()` returns a row, or -1 after the last. `load(row, slot, barrier)` enqueues its copy and
  // tells the barrier its bytes; `store(row, slot)` enqueues the copy out of the slot.
  template <class Next, class Load, class Store>
  __device__ void run(Next& next, const Load& load, const Store& store) {
    int loading = 0, loaded = 0;
    const auto load_next = [&] {
      const int row = next();
      if (row < 0) return false;
      shared_.rows[loading] = row;
      load(row, shared_.slots[loading], &shared_.full[loading]);
      if (++loading == kSlots) loading = 0;
      ++loaded;
      return true;
    };
    bool more = true;
    while (more && loaded < Ahead) more = load_next();
    int storing = 0;
    uint32_t parity = 0;
    for (int done = 0; done < loaded; ++done) {
      Deadline deadline(error_);
      while (!phase_is_over(&shared_.full[storing], parity) && !deadline.expired()) continue;
      store(shared_.rows[storing], shared_.slots[storing]);
      bulk_commit();
      bulk_await_read<Behind>();
      if (more) more = load_next();
      if (++storing == kSlots) storing = 0, parity ^= 1;
    }
  }

 private:
  Shared& shared_;
  uint32_t* error_;
};

// ---- the order in which rings take rows ---------------------------------------------------------

// Ring i of n takes rows i, i + n, ...; rings of different CTAs are neighbours.
class InTurn {
 public:
  __device__ InTurn(int ring, int rings, int rows) : row_(ring), step_(rings), rows_(rows) {}

  __device__ int operator()() {
    const int row = row_;
    row_ += step_;
    return row < rows_ ? row : -1;
  }

 private:
  int row_, step_, rows_;
};

struct TicketCounters {
  uint32_t next, finished;
};

// A ring that is free takes the next row. It draws each ticket one row early, so it never waits for
// the counter.
class FirstCome {
 public:
  __device__ FirstCome(TicketCounters* counters, int rings, int rows)
      : counters_(counters), rings_(rings), rows_(rows), ticket_(atomicAdd(&counters->next, 1u)) {}

  __device__ int operator()() {
    if (ticket_ >= static_cast<uint32_t>(rows_)) return -1;
    const int row = static_cast<int>(ticket_);
    ticket_ = atomicAdd(&counters_->next, 1u);
    return row;
  }

  // The last ring to finish resets the counters for the next launch.
  __device__ void finish() {
    if (atomicAdd(&counters_->finished, 1u) + 1 != static_cast<uint32_t>(rings_)) return;
    counters_->next = 0;
    counters_->finished = 0;
  }

 private:
  TicketCounters* counters_;
  int rings_, rows_;
  uint32_t ticket_;
};

}  // namespace fanfold::probe
