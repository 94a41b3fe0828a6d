// What the two halves of dispatch share: how a row lies in its slot and how a warp holds a part.
//
// A slot holds the row's units of 16 bytes and, with fp8, behind them one unit for each segment:
// the scales of its four blocks. With nvfp4 the 64 scales of a segment are four units. Constants
// of the kernel: kEncoding (RowEncoding), kPackScales (scales come out as UE8M0), kTasks (segments
// that a warp of a receiver has in flight), kTokenMajor (a token's row comes once, whichever of
// this rank's experts it names, and what it names comes beside it).
#pragma once

#include "device/numbers.cuh"
#include "low_latency/headers.cuh"
#include "low_latency/nvfp4_rows.cuh"

namespace fanfold {

inline constexpr bool kScaled = kEncoding == 4;  // fp8 that the caller has scaled
inline constexpr bool kFp8 = kEncoding == 1 || kEncoding == 2 || kScaled;
inline constexpr bool kPowerOfTwoScales = kEncoding == 2;
inline constexpr bool kNvfp4 = kEncoding == 3;
inline constexpr RowKind kRowKind = kNvfp4 ? RowKind::kNvfp4
                                    : kFp8 ? RowKind::kFp8
                                           : RowKind::kBf16;
// Units of the caller's row that become one.
inline constexpr int kUnitInputs = kNvfp4 ? 4 : kFp8 && !kScaled ? 2 : 1;
inline constexpr int kInputUnits = kHidden * (kScaled ? 1 : 2) / kUnitBytes;
inline constexpr int kUnits = kInputUnits / kUnitInputs;
inline constexpr int kSegments = (kUnits + kSegmentUnits - 1) / kSegmentUnits;
inline constexpr int kBlocks = (kHidden + kBlockColumns - 1) / kBlockColumns;
// Of a segment, and of a row.
inline constexpr int kSegmentScaleUnits = kNvfp4 ? 4 : kFp8 ? 1 : 0;
inline constexpr int kScaleUnits =
    kNvfp4 ? (kHidden / kNvfp4BlockColumns + kUnitBytes - 1) / kUnitBytes
           : kSegments * kSegmentScaleUnits;
static_assert(kHidden * (kScaled ? 1 : 2) % (kUnitInputs * kUnitBytes) == 0);
static_assert(kTokenMajor == 0 || kEncoding == 0 || kScaled);
static_assert(!kFp8 || kSegments == (kBlocks + 3) / 4, "a segment has four scales");

using DispatchCall = Call<CallKind::kDispatch>;

template <>
struct RowsOf<CallKind::kDispatch> {
  static constexpr int kBytes = (kUnits + kScaleUnits) * kUnitBytes;
  static constexpr HostWord kWord = HostWord::kDispatch;
};

// A warp's part of a row: a unit of each lane, and the scales of the segment: with fp8 in every
// lane, with nvfp4 in lanes that `has_scales`.
struct Segment {
  uint4 data;
  uint4 scales;
};

__device__ __forceinline__ bool has_unit(int part, int lane) {
  return kUnits % kSegmentUnits == 0 || part * kSegmentUnits + lane < kUnits;
}

// Whether a lane stores a unit of the segment's scales.
__device__ __forceinline__ bool has_scales(int part, int lane) {
  if constexpr (kNvfp4) {
    return lane < kSegmentScaleUnits && part * kSegmentScaleUnits + lane < kScaleUnits;
  } else {
    return kFp8 && lane == 0;
  }
}
__device__ __forceinline__ int scale_unit(int part, int lane) {
  return kUnits + part * kSegmentScaleUnits + (kNvfp4 ? lane : 0);
}

struct Place {
  int32_t local;
  int32_t row;  // of the expert
};

// Sending and receiving have memory of their own, so that no barrier is needed between them.
struct DispatchTables {
  TokenSet tokens_of[kTokenSets];
  int32_t before[kRanks][kCounts];  // rows of earlier sources
  int32_t total[kCounts];
  int32_t tokens[kRanks];
  uint8_t rows[kRanks];  // RowKind of each source; what a refusing rank must know
  bool refused[kRanks];
};

// Rows of a receiver that are placed, then taken, together: as many as its warps have in flight, a
// warp of them at most, and as shared memory has room for.
inline constexpr int kMostSharedBytes = 48 * 1024;
inline constexpr int kRowsInFlight =
    kWarps * kTasks / kSegments > 0 ? kWarps * kTasks / kSegments : 1;
inline constexpr int kRowsOfWarp = kRowsInFlight < kWarpLanes ? kRowsInFlight : kWarpLanes;
inline constexpr int kRowsWithRoom =
    (kMostSharedBytes - 16 - static_cast<int>(sizeof(DispatchTables))) /
    static_cast<int>(sizeof(int32_t) + kTopK * sizeof(Place));
inline constexpr int kPassRows = kRowsOfWarp < kRowsWithRoom ? kRowsOfWarp : kRowsWithRoom;
static_assert(kPassRows > 0);

struct alignas(16) DispatchShared : DispatchTables {
  int32_t fan[kPassRows];
  Place places[kPassRows][kTopK];
};
static_assert(sizeof(DispatchShared) <= kMostSharedBytes);

}  // namespace fanfold
