// Rows that pass through shared memory by bulk copies alone: one thread asks for them, and sends
// each on as soon as it is there.
#pragma once

#include "device.cuh"

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
    for (int i = 0; i < kSlots; ++i) init(&shared_.full[i], 1);
    fence_barrier_init();
  }

  // `next()` names a row, or gives -1 when there are no more. `load(row, slot, barrier)` asks for it
  // and names its bytes to the barrier; `store(row, slot)` sends it on.
  template <class Next, class Load, class Store>
  __device__ void run(Next& next, const Load& load, const Store& store) {
    int loading = 0, asked = 0;
    const auto ask = [&] {
      const int row = next();
      if (row < 0) return false;
      shared_.rows[loading] = row;
      load(row, shared_.slots[loading], &shared_.full[loading]);
      if (++loading == kSlots) loading = 0;
      ++asked;
      return true;
    };
    bool more = true;
    while (more && asked < Ahead) more = ask();
    int storing = 0;
    uint32_t parity = 0;
    for (int done = 0; done < asked; ++done) {
      Patience patience(error_);
      while (!phase_is_over(&shared_.full[storing], parity) && !patience.exhausted()) continue;
      store(shared_.rows[storing], shared_.slots[storing]);
      bulk_commit();
      bulk_wait_source_read_but<Behind>();
      if (more) more = ask();
      if (++storing == kSlots) storing = 0, parity ^= 1;
    }
  }

 private:
  Shared& shared_;
  uint32_t* error_;
};

// ---- who takes which row -----------------------------------------------------------------------

// Takers take rows in turn, those of different CTAs being neighbours.
class InTurn {
 public:
  __device__ InTurn(int taker, int takers, int rows) : row_(taker), step_(takers), rows_(rows) {}

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

// Whoever is free takes the next row. The ticket is drawn one row early, so nobody waits for it.
class FirstCome {
 public:
  __device__ FirstCome(TicketCounters* counters, int takers, int rows)
      : counters_(counters), takers_(takers), rows_(rows), ticket_(atomicAdd(&counters->next, 1u)) {
  }

  __device__ int operator()() {
    if (ticket_ >= static_cast<uint32_t>(rows_)) return -1;
    const int row = static_cast<int>(ticket_);
    ticket_ = atomicAdd(&counters_->next, 1u);
    return row;
  }

  // The last taker leaves the counters as the next launch needs them.
  __device__ void finish() {
    if (atomicAdd(&counters_->finished, 1u) + 1 != static_cast<uint32_t>(takers_)) return;
    counters_->next = 0;
    counters_->finished = 0;
  }

 private:
  TicketCounters* counters_;
  int takers_, rows_;
  uint32_t ticket_;
};

}  // namespace fanfold::probe
