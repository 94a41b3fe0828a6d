// What a variant of the dispatch kernel is made of, and what its two halves share.
#pragma once

#include "device.cuh"
#include "layout.cuh"

namespace fanfold::probe {

enum class Arrival { kSelf, kRowFlag, kSegmentFlag };
enum class Push { kStore, kBulk };
enum class OwnRank { kFirst, kInTurn, kLast };  // among the ranks that a row is pushed to
enum class Places {
  kHeaderWarps,  // some warps work out the header while the others send the row
  kAllWarps,     // all warps work out the header, which leaves before the row
};

// The leave-outs compute wrong results and serve to place time.
struct DispatchPolicy {
  static constexpr int kSenders = 0;  // CTAs that push all rows; 0: every CTA pushes its token's
  static constexpr Arrival kArrival = Arrival::kSelf;
  static constexpr Push kPush = Push::kStore;
  static constexpr OwnRank kOwnRank = OwnRank::kFirst;
  static constexpr int kAtOnce = 2;  // segments that a warp of a sending CTA has in flight
  static constexpr Places kPlaces = Places::kAllWarps;
  static constexpr bool kAnyOrder = true;     // rows are taken as they arrive, not in turn
  static constexpr bool kCountsAhead = true;  // read all counts while headers are awaited
  static constexpr bool kPeekEarly = false;   // ask for rows before knowing whether they come
  static constexpr int kHeaderWarps = 4;      // at least
  static constexpr int kWarps = 16;           // at least
  static constexpr int kFanOuts = 1;          // 0 leaves it out, 2 does it twice
  static constexpr bool kQuantise = true;
  static constexpr bool kRemoteRows = true;
  static constexpr bool kScalesByColumn = true;
  static constexpr bool kTrace = false;
};

template <class G, class P>
struct DispatchShape {
  __host__ __device__ static constexpr int max_of(int a, int b) { return a > b ? a : b; }

  static constexpr bool kSplit = P::kSenders > 0;
  static constexpr int kSegments = G::kDispatchSegments;
  static constexpr int kTopK = G::kTopK;
  static constexpr int kWarps = kSplit ? P::kWarps : max_of(kSegments + P::kHeaderWarps, P::kWarps);
  static constexpr int kThreads = kWarps * 32;

  // Warps from this one on do what needs no row: headers, and where received rows go.
  static constexpr int kFirstHeaderWarp = kSplit ? 0 : kSegments;
  static constexpr int kHeaderWarps = kWarps - kFirstHeaderWarp;

  // Tokens whose headers a CTA works out at the same time.
  static constexpr int kHeaderGroups = kSplit ? 2 : 1;

  static constexpr int kReceivers = kCtas - P::kSenders;
  static constexpr int kRows = ceil_div(kRanks * G::kTokens, kReceivers);  // that a CTA receives
  static constexpr int kTasks = ceil_div(kRows * kSegments, kWarps);  // segments that a warp takes
  static_assert(!kSplit || 2 * kReceivers > G::kTokens, "counts need an idle half of a CTA");
  static_assert(kRows * kSegments <= Trace::kTasks || !P::kTrace);

  struct Segment {
    uint4 data, scales;  // the scales in every lane
  };

  struct Shared {
    uint4 row[P::kPush == Push::kBulk ? G::kDispatchRow : 1];
    int32_t earlier[kHeaderGroups][32];
    // Of an expert: one plus the token's first choice of it.
    alignas(4) uint8_t choice_of[kHeaderGroups][G::kExperts];
    int32_t histogram[G::kExperts];
    int32_t before[kRanks][G::kLocalExperts];  // rows of earlier sources
    int32_t fan[kRows];
    int32_t slots[kRows][kTopK];
  };
};

}  // namespace fanfold::probe
