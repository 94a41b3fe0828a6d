// Which tile each CTA computes next. Clusters take tiles in fixed rounds, segment after segment, in
// each columns before rows. A segment is the rows of one group, or in the contiguous form up to 32
// blocks of them, which stay in the L2 while its columns are computed.
//
// The CTAs of a cluster take two blocks of rows and share columns of b; a last single block of rows
// is taken by both, with two blocks of columns that share rows of a.
#pragma once

#include "device/warp.cuh"
#include "gemm/stages.cuh"
#include "layout/grouped_gemm.h"

namespace fanfold::grouped_gemm {

using gemm::kBlockDepth, gemm::kCluster, gemm::kScaleColumns, gemm::kTileColumns;

inline constexpr int kDepthBlocks = kDepth / kBlockDepth;
inline constexpr int kColumnBlocks = (kColumns + kTileColumns - 1) / kTileColumns;
inline constexpr int kScaleBlocks = (kColumns + kScaleColumns - 1) / kScaleColumns;
static_assert(kDepth % kBlockDepth == 0 && kColumns % 64 == 0);

enum class Shared { a, b };  // what the CTAs of the cluster have in common

struct Tile {
  int slice, row, column, group;
  int valid;  // rows from `row` on that are the group's; 0 where there is no such block of columns
  Shared shared;
};

struct Segment {
  int slice, row, rows, group;
};

// Masked form: the slice of each group.
class Slices {
 public:
  __device__ explicit Slices(const GroupedGemmArgs& args) : args_(args) {}

  __device__ bool next(Segment& segment) {
    if (group_ == kGroups) return false;
    const int rows = max(0, min(__ldg(args_.groups + group_), args_.rows));
    segment = {group_, 0, rows, group_};
    ++group_;
    return true;
  }

 private:
  const GroupedGemmArgs& args_;
  int group_ = 0;
};

// Contiguous form: what follows each other of one group.
class Runs {
 public:
  __device__ explicit Runs(const GroupedGemmArgs& args) : args_(args) {}

  // By whole warps: a lane looks at one block of rows.
  __device__ bool next(Segment& segment) {
    if (row_ >= args_.rows) return false;
    const int group = group_of(row_);
    const int lane = threadIdx.x % kWarpLanes;
    const uint32_t same = __ballot_sync(kFullWarp, group_of(row_ + lane * kTileRows) == group);
    const int blocks = same == kFullWarp ? kWarpLanes : __ffs(~same) - 1;
    const int end = row_ + blocks * kTileRows;
    // Of the last block perhaps only the first half.
    const int rows = blocks * kTileRows - (group_of(end - kWgmmaRows) < 0 ? kWgmmaRows : 0);
    segment = {0, row_, group < 0 ? 0 : rows, group};
    row_ = end;
    return true;
  }

 private:
  __device__ int group_of(int row) const {
    const int group = row < args_.rows ? __ldg(args_.groups + row) : -1;
    return 0 <= group && group < kGroups ? group : -1;
  }

  const GroupedGemmArgs& args_;
  int row_ = 0;
};

template <bool>
struct SegmentsOf {
  using Type = Runs;
};
template <>
struct SegmentsOf<true> {
  using Type = Slices;
};

// By whole warps, each of which enumerates the same tiles.
class Tiles {
 public:
  __device__ explicit Tiles(const GroupedGemmArgs& args)
      : segments_(args), cta_(static_cast<int>(cta_of_cluster())),
        work_(static_cast<int>(blockIdx.x) / kCluster) {}

  __device__ bool next(Tile& tile) {
    while (work_ >= end_) {
      if (!segments_.next(segment_)) return false;
      begin_ = end_;
      const int blocks = (segment_.rows + kTileRows - 1) / kTileRows;
      pairs_ = blocks / 2;
      end_ += pairs_ * kColumnBlocks + blocks % 2 * ((kColumnBlocks + 1) / 2);
    }
    const int local = work_ - begin_;
    work_ += static_cast<int>(gridDim.x) / kCluster;
    const bool paired = local < pairs_ * kColumnBlocks;
    int block = 2 * pairs_;
    int column = 2 * (local - pairs_ * kColumnBlocks) + cta_;
    if (paired) {
      column = local / pairs_;
      block = 2 * (local - column * pairs_) + cta_;
    }
    const int left = segment_.rows - block * kTileRows;
    tile = {segment_.slice,
            segment_.row + block * kTileRows,
            column * kTileColumns,
            segment_.group,
            column < kColumnBlocks ? min(left, kTileRows) : 0,
            paired ? Shared::b : Shared::a};
    return true;
  }

 private:
  SegmentsOf<kMasked != 0>::Type segments_;
  const int cta_;
  int work_;
  Segment segment_{};
  int pairs_ = 0, begin_ = 0, end_ = 0;  // of the segment's blocks, and its work
};

}  // namespace fanfold::grouped_gemm
