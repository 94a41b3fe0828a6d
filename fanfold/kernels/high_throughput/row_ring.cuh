// Rows that pass through a warp's ring of shared memory: bulk copies bring them in some rows ahead,
// and as many as may still be on their way out keep their slot. All lanes take part.
//
// Constants: kSlotBytes (of a slot, a multiple of 128), kAhead (rows that are asked for in front),
// kBehind (rows whose slot may still be read).
#pragma once

#include "device/bulk.cuh"
#include "high_throughput/call.cuh"

namespace fanfold {

inline constexpr int kSlots = kAhead + kBehind;

struct RowRingShared {
  alignas(128) unsigned char slots[kSlots][kSlotBytes];
  ArrivalBarrier full[kSlots];
};

// When a slot may be written again.
enum class Until {
  kRead,    // what it holds has been read
  kWritten  // and has arrived where it goes
};

// What there is to be asked for.
enum class Next { kRow, kNotYet, kNone };

// `Job` says what rows are:
//   Next next(slot, may_wait)  names the next row and asks for it, with one arrival of each lane at
//                              `full[slot]`. Where it would have to wait for others, and may not,
//                              it says so: they may wait for rows that are still in this ring
//   void pass(slot)            enqueues the stores of the row in the slot
//   void passed(slot)          they are done, as far as `kUntil` says
class RowRing {
 public:
  RowRingShared& shared;

  __device__ RowRing(RowRingShared& memory, const Call& call) : shared(memory), call_(call) {
    if (call.lane == 0)
      for (int i = 0; i < kSlots; ++i) init_barrier(&shared.full[i], kWarpLanes);
    fence_barrier_init();
    __syncwarp();
  }

  template <Until kUntil, class Job>
  __device__ void run(Job& job) {
    bool more = true;
    while (more || passed_ != asked_) {
      while (more && asked_ - stored_ < kAhead && asked_ - passed_ < kSlots) {
        const Next next = job.next(slot_of(asked_), asked_ == passed_);
        if (next == Next::kNotYet) break;
        more = next == Next::kRow;
        asked_ += more ? 1 : 0;
      }
      if (stored_ != asked_) {
        await(stored_);
        job.pass(slot_of(stored_++));
        bulk_commit();
        await_stores<kUntil, kBehind>();
        if (stored_ - passed_ > kBehind) job.passed(slot_of(passed_++));
      } else {
        await_stores<kUntil, 0>();
        while (passed_ != stored_) job.passed(slot_of(passed_++));
      }
    }
  }

 private:
  __device__ static int slot_of(uint32_t row) { return static_cast<int>(row % kSlots); }

  // Loads from GPUs' memory, a peer's where rows are pulled, which come or fail. The bound is there
  // all the same, and then names this rank.
  __device__ void await(uint32_t row) const {
    Deadline deadline(call_);
    while (!phase_is_over(&shared.full[slot_of(row)], (row / kSlots) & 1u))
      if (deadline.expired(call_.args.rank, row)) break;
    __syncwarp();
  }

  template <Until kUntil, int kYoungest>
  __device__ static void await_stores() {
    if constexpr (kUntil == Until::kWritten) {
      bulk_await_written<kYoungest>();
    } else {
      bulk_await_read<kYoungest>();
    }
    __syncwarp();
  }

  const Call& call_;
  // Rows since the launch, which name slots and phases.
  uint32_t asked_ = 0, stored_ = 0, passed_ = 0;
};

}  // namespace fanfold
