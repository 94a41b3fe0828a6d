// Which tile each CTA computes next. Clusters take tiles in fixed rounds; the CTAs of one share
// columns of b where their rows belong to one group, or rows of a where a group has a last single
// block of rows. All roles of a CTA enumerate the same tiles.
#pragma once

#include "grouped_gemm/stages.cuh"

namespace fanfold::grouped_gemm {

enum class Shared { nothing, a, b };  // what the CTAs of the cluster have in common

struct Tile {
  int slice, row, column, group;
  int valid;  // rows from `row` on that are somebody's; 0: nothing to compute
  Shared shared;
  __device__ bool loads() const { return valid > 0 || shared != Shared::nothing; }
};

__device__ __forceinline__ int blocks_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Masked form: group after group, in each columns before rows.
class MaskedTiles {
 public:
  __device__ explicit MaskedTiles(const GroupedGemmArgs& args)
      : args_(args), cta_(static_cast<int>(cta_of_cluster())), work_(blockIdx.x / kCluster) {
    enter(0);
  }

  __device__ bool next(Tile& tile) {
    while (work_ >= end_) {
      if (group_ + 1 >= kGroups) return false;
      begin_ = end_;
      enter(group_ + 1);
    }
    int local = work_ - begin_;
    work_ += gridDim.x / kCluster;
    const int pairs = blocks_of(rows_) / 2;
    const bool paired = local < pairs * kColumnBlocks;
    int block = 2 * pairs, column = 0;
    if (paired) {
      column = local / pairs;
      block = 2 * (local - column * pairs) + cta_;
    } else {
      column = 2 * (local - pairs * kColumnBlocks) + cta_;
    }
    const int valid = min(rows_ - block * kTileRows, kTileRows);
    tile = {group_,
            block * kTileRows,
            column * kTileColumns,
            group_,
            column < kColumnBlocks ? valid : 0,
            paired ? Shared::b : Shared::a};
    return true;
  }

 private:
  __device__ void enter(int group) {
    group_ = group;
    rows_ = max(0, min(__ldg(args_.groups + group), args_.rows));
    const int blocks = blocks_of(rows_);
    end_ = begin_ + blocks / 2 * kColumnBlocks + blocks % 2 * ((kColumnBlocks + 1) / 2);
  }

  const GroupedGemmArgs& args_;
  const int cta_;
  int work_;
  int group_ = 0, rows_ = 0, begin_ = 0, end_ = 0;  // of the group's work
};

// Contiguous form: bands of blocks of rows, in each columns before rows, so that a band's rows of a
// and the columns of b at hand stay in the L2.
class ContiguousTiles {
 public:
  __device__ explicit ContiguousTiles(const GroupedGemmArgs& args)
      : args_(args), cta_(static_cast<int>(cta_of_cluster())),
        pairs_((blocks_of(args.rows) + 1) / 2), work_(blockIdx.x / kCluster) {}

  __device__ bool next(Tile& tile) {
    if (work_ >= pairs_ * kColumnBlocks) return false;
    const int first = work_ / (kBandPairs * kColumnBlocks) * kBandPairs;
    const int pairs = min(kBandPairs, pairs_ - first);
    const int local = work_ - first * kColumnBlocks;
    work_ += gridDim.x / kCluster;
    const int column = local / pairs;
    const int row = 2 * (first + local - column * pairs) * kTileRows;
    const int own = row + cta_ * kTileRows;
    const int group = group_of(own);
    const int other = group_of(row + (1 - cta_) * kTileRows);
    const bool none = group < 0;
    tile = {0,
            own,
            column * kTileColumns,
            none ? 0 : group,
            none ? 0 : valid_from(own),
            none || group != other ? Shared::nothing : Shared::b};
    return true;
  }

 private:
  static constexpr int kBandPairs = 8;

  __device__ int group_of(int row) const {
    const int group = row < args_.rows ? __ldg(args_.groups + row) : -1;
    return group < kGroups ? group : -1;
  }
  __device__ int valid_from(int row) const {
    return group_of(row + kWgmmaRows) < 0 ? kWgmmaRows : kTileRows;
  }

  const GroupedGemmArgs& args_;
  const int cta_, pairs_;
  int work_;
};

template <bool>
struct TilesOf {
  using Type = ContiguousTiles;
};
template <>
struct TilesOf<true> {
  using Type = MaskedTiles;
};
using Tiles = TilesOf<kMasked != 0>::Type;

}  // namespace fanfold::grouped_gemm
