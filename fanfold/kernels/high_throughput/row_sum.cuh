// Weighted sums of one slice of bf16 rows by a warp: fp32, in order, rounded once. Each lane copies
// its own columns into a ring in shared memory, some rows ahead, so lanes wait for nobody. (Loads
// into registers that far ahead took twice the time, as they wait for each other; bulk copies need
// more instructions, and instructions bind this.)
#pragma once

#include "device/numbers.cuh"
#include "high_throughput/combine_shape.cuh"

namespace fanfold {

class RowSums {
 public:
  __device__ RowSums(WorkerShared& own, int lane) : own_(own), lane_(lane) {}

  // Begins with a list of entries, whose pieces are of `units`: asks for the first pieces.
  // `rows.from(entry)` says where the piece of a row begins.
  template <class Rows>
  __device__ void begin(const Entry* entries, int count, int units, const Rows& rows) {
    entries_ = entries;
    count_ = count;
    units_ = units;
    asked_ = 0;
    await_copies<0>();  // zeros behind the last list's end, which nothing orders before what comes
    for (int i = 0; i < kPieces - 1; ++i) ask(i, entries[i], rows);
  }

  // Adds and stores them. `rows.to(place)` says where a sum goes; without `Rows::kAdds` there is
  // only one row in each, and it goes as it is; `Rows::kNothing` is the sum of no rows;
  // `Rows::kFolds`: the rounded sum is added to zero, as a fold of one rank adds it.
  // `between(i)` is called behind each.
  template <class Rows, class Between>
  __device__ void run(const Rows& rows, const Between& between) {
    clear<Rows>();
    int taken = 0;
    Entry next_entry = entries_[0], next_asked = entries_[kPieces - 1];
    for (int i = 0; i < count_; ++i) {
      const Entry entry = next_entry, asked = next_asked;
      next_entry = entries_[i + 1], next_asked = entries_[i + kPieces];  // some turns early
      await_copies<kPieces - 2>();
      uint4 units[kLaneUnits];
#pragma unroll
      for (int u = 0; u < kLaneUnits; ++u) units[u] = own_.pieces[taken][unit_of(u)];
      taken = next(taken);
      ask(i + kPieces - 1, asked, rows);  // while these come to the registers
      if constexpr (Rows::kAdds) {
        add(entry, units, rows);
      } else {
        store(entry.place(), units, rows);
      }
      between(i);
    }
  }

  // Instead of `run`: what was asked for comes all the same.
  __device__ void drop() const { await_copies<0>(); }

 private:
  template <class Rows>
  __device__ void ask(int i, const Entry& entry, const Rows& rows) {
    const bool copies = i < count_ && entry.kind() != Entry::Kind::kZeros;
    uint4* to = own_.pieces[asked_] + lane_;
    const auto* from = reinterpret_cast<const uint4*>(rows.from(entry)) + lane_;
#pragma unroll
    for (int u = 0; u < kLaneUnits; ++u)
      copy_async_or_zeros(to + u * kWarpLanes, from + u * kWarpLanes, copies && has_unit(u));
    commit_copies();  // also of nothing, as they are counted
    asked_ = next(asked_);
  }

  __device__ static int next(int piece) { return piece + 1 == kPieces ? 0 : piece + 1; }

  __device__ int unit_of(int u) const { return u * kWarpLanes + lane_; }
  __device__ bool has_unit(int u) const {
    constexpr bool kAll = kSliceUnits % kWarpLanes == 0 && kUnits % kSliceUnits == 0;
    return kAll || unit_of(u) < units_;
  }

  template <class Rows>
  __device__ void store(int place, const uint4 (&units)[kLaneUnits], const Rows& rows) const {
    const auto to = rows.to(place).from(lane_ * kUnitBytes);
#pragma unroll
    for (int u = 0; u < kLaneUnits; ++u)
      if (has_unit(u)) to.put_unit(u * kWarpLanes * kUnitBytes, units[u]);
  }

  // The first row of a sum is added to nothing, as the others are to it: a path of its own would
  // save additions, but be as much code again, and took longer (docs/decisions/combine.md).
  template <class Rows>
  __device__ void add(const Entry& entry, const uint4 (&units)[kLaneUnits], const Rows& rows) {
#pragma unroll
    for (int u = 0; u < kLaneUnits; ++u) {
      if constexpr (Rows::kWeights) {
        add_weighted(sums_[u], units[u], entry.weight);
      } else {
        add_unweighted(sums_[u], units[u]);
      }
    }
    if (!entry.is_last()) return;
    uint4 rounded[kLaneUnits];
#pragma unroll
    for (int u = 0; u < kLaneUnits; ++u) {
      rounded[u] = round_to_bf16(sums_[u]);
      if constexpr (Rows::kFolds) rounded[u] = bf16_plus_zero(rounded[u]);
    }
    store(entry.place(), rounded, rows);
    clear<Rows>();
  }

  template <class Rows>
  __device__ void clear() {
#pragma unroll
    for (int u = 0; u < kLaneUnits; ++u)
#pragma unroll
      for (float& value : sums_[u]) value = Rows::kNothing;
  }

  WorkerShared& own_;
  const int lane_;
  const Entry* entries_ = nullptr;
  int count_ = 0, units_ = 0;
  int asked_ = 0;  // place in the ring
  float sums_[kLaneUnits][8];
};

}  // namespace fanfold
