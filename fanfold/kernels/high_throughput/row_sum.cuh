// Weighted sums of bf16 rows by a team of warps, each of which takes its columns of every row:
// fp32, in order, rounded once. Loads run `kDepth` pieces ahead, across the rows of a table; a
// piece is kPieceUnits units of each lane, of one row (2 and 6: more of either spill registers).
//
// Constants: kRowBytes, kTeamWarps, kMostTerms (rows in a sum).
#pragma once

#include "device/numbers.cuh"
#include "high_throughput/call.cuh"

namespace fanfold {

inline constexpr int kUnitBytes = 16;
inline constexpr int kUnits = kRowBytes / kUnitBytes;
inline constexpr int kPieceUnits = 2;  // of a lane
inline constexpr int kGroupUnits = kPieceUnits * kTeamWarps * kWarpLanes;
inline constexpr int kGroups = (kUnits + kGroupUnits - 1) / kGroupUnits;
inline constexpr int kDepth = 6;
static_assert(kRowBytes % kUnitBytes == 0);

struct alignas(16) Term {
  const unsigned char* row;
  float weight;
};

struct alignas(16) Sum {
  unsigned char* to;
  int32_t token;  // for who adds to it
  int32_t terms;  // 0 gives zeros
};

// What a team adds up, in shared memory.
struct SumTable {
  int32_t sums;
  Sum sum[kBatchTokens];
  Term term[kBatchTokens][kMostTerms];
};

template <bool kWeighted>
class RowSums {
 public:
  __device__ RowSums(const SumTable& table, int member, int lane)
      : table_(table), member_(member), lane_(lane) {}

  // `start(token, unit, sum)` adds what a sum begins with, to zeros; `between()` is called now and
  // then, when this warp has done its part of a sum.
  template <class Start, class Between>
  __device__ void run(const Start& start, const Between& between) {
    Cursor loads(table_), adds(table_);
    uint4 pieces[kDepth][kPieceUnits];
#pragma unroll
    for (int d = 0; d < kDepth; ++d) load(loads, pieces[d]);
    for (int done = 0; adds.sum < table_.sums;) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (adds.sum >= table_.sums) break;
        add(adds, pieces[d], start);
        load(loads, pieces[d]);
      }
      if (adds.sum != done) between();
      done = adds.sum;
    }
  }

 private:
  struct Cursor {
    int sum = 0, group = 0, term = 0, terms;

    __device__ explicit Cursor(const SumTable& table) : terms(terms_of(table, 0)) {}

    // A sum of nothing has one piece, of zeros.
    __device__ static int terms_of(const SumTable& table, int sum) {
      return sum < table.sums ? max(table.sum[sum].terms, 1) : 1;
    }
    __device__ void step(const SumTable& table) {
      if (++term < terms) return;
      term = 0;
      if (++group < kGroups) return;
      group = 0;
      terms = terms_of(table, ++sum);
    }
  };

  __device__ int unit_of(int group, int i) const {
    return ((group * kPieceUnits + i) * kTeamWarps + member_) * kWarpLanes + lane_;
  }
  __device__ bool has_unit(int group, int i) const {
    return kUnits % kGroupUnits == 0 || unit_of(group, i) < kUnits;
  }

  __device__ void load(Cursor& at, uint4 (&piece)[kPieceUnits]) const {
    if (at.sum >= table_.sums) return;
    const auto* row = reinterpret_cast<const uint4*>(table_.term[at.sum][at.term].row);
    const bool exists = table_.sum[at.sum].terms != 0;
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      piece[i] = uint4{0, 0, 0, 0};
      if (exists && has_unit(at.group, i)) piece[i] = load_once(row + unit_of(at.group, i));
    }
    at.step(table_);
  }

  template <class Start>
  __device__ void add(Cursor& at, const uint4 (&piece)[kPieceUnits], const Start& start) {
    const float weight = kWeighted ? table_.term[at.sum][at.term].weight : 1.0f;
    const Sum& sum = table_.sum[at.sum];
    const bool last = at.term == at.terms - 1;
#pragma unroll
    for (int i = 0; i < kPieceUnits; ++i) {
      if (!has_unit(at.group, i)) continue;
      const int unit = unit_of(at.group, i);
      if (at.term == 0) {
#pragma unroll
        for (float& value : sums_[i]) value = 0.0f;
        start(sum.token, unit, sums_[i]);
      }
      add_weighted(sums_[i], piece[i], weight);
      if (last) store_weak(reinterpret_cast<uint4*>(sum.to) + unit, round_to_bf16(sums_[i]));
    }
    at.step(table_);
  }

  const SumTable& table_;
  const int member_, lane_;
  float sums_[kPieceUnits][8];
};

}  // namespace fanfold
