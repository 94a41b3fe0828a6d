// The send half of dispatch: quantise, push one row per (token, rank), and tell every rank which of
// its experts want the row and where among this source's rows it stands.
#pragma once

#include "dispatch_shape.cuh"

namespace fanfold::probe {

template <class G, class P>
class DispatchSend {
  using Shape = DispatchShape<G, P>;
  using Segment = typename Shape::Segment;
  using Shared = typename Shape::Shared;
  static constexpr int kSegments = Shape::kSegments;
  static constexpr int kWarps = Shape::kWarps;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kTopK = Shape::kTopK;
  static constexpr int kAtOnce = P::kAtOnce;

  const DispatchArgs<G>& args;
  Shared& shared;
  const Epoch epoch;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

 public:
  __device__ DispatchSend(const DispatchArgs<G>& a, Shared& s, uint32_t call)
      : args(a), shared(s), epoch{call} {}

  __device__ void run() {
    if constexpr (Shape::kSplit) {
      if (blockIdx.x < P::kSenders) return send_rows();
      send_headers(blockIdx.x - P::kSenders);
    } else {
      for (int token = blockIdx.x; token < G::kTokens; token += kCtas) {
        send_token(token);
        if (G::kTokens > kCtas) __syncthreads();  // the next token reuses shared memory
      }
    }
    if (!Shape::kSplit && blockIdx.x == kCtas - 1)
      push_counts({0, static_cast<int>(threadIdx.x), kThreads, 0});
  }

 private:
  // ---- every CTA sends a token ------------------------------------------------------------------

  __device__ void send_token(int token) {
    const bool sends = warp < kSegments && token < args.num_tokens;
    if constexpr (P::kPlaces == Places::kAllWarps) {
      // Everything is asked for before anything is used. The header's few stores then run ahead of
      // the row's many.
      uint4 low{}, high{};
      if (sends) load_segment(token, warp, low, high);
      const int expert = chosen_expert(token);
      count_earlier({0, static_cast<int>(threadIdx.x), kThreads, 0}, token, expert);
      if (warp == Shape::kFirstHeaderWarp) push_header(0, token, expert);
      if (sends) push_row(token, expert, quantise(low, high));
    } else if (warp >= kSegments) {
      const int expert = chosen_expert(token);
      count_earlier(
          {0, static_cast<int>(threadIdx.x) - kSegments * 32, Shape::kHeaderWarps * 32, 2}, token,
          expert);
      if (warp == Shape::kFirstHeaderWarp) push_header(0, token, expert);
    } else if (sends) {
      uint4 low, high;
      load_segment(token, warp, low, high);
      const int expert = chosen_expert(token);
      push_row(token, expert, quantise(low, high));
    }
  }

  // ---- few CTAs send all rows, the others the headers -------------------------------------------
  // A CTA whose stores wait for a link has its loads wait behind them, so those that receive should
  // not send; and few CTAs fill the links.

  __device__ void send_rows() {
    constexpr int kStep = P::kSenders * kWarps;
    constexpr int kSegmentsOfAll = G::kTokens * kSegments;
    for (int i = warp * P::kSenders + blockIdx.x; i < kSegmentsOfAll; i += kStep * kAtOnce)
      send_segments(i, kStep);
  }

  // The first segment leaves before the second is worked on: the link is the scarce thing.
  __device__ void send_segments(int first, int step) {
    uint4 low[kAtOnce], high[kAtOnce];
    int expert[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = (first + i * step) / kSegments;
      expert[i] = chosen_expert(token);
      if (token < args.num_tokens)
        load_segment(token, (first + i * step) % kSegments, low[i], high[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = (first + i * step) / kSegments;
      const int part = (first + i * step) % kSegments;
      if (token >= args.num_tokens) continue;
      const uint32_t ranks = ranks_of(expert[i]);
      if (part == 0 && lane == 0) args.handle->ranks_of[token] = ranks;
      push_stores(token, part, ranks, quantise(low[i], high[i]));
    }
  }

  __device__ void send_headers(int receiver) {
    constexpr int kGroupThreads = kThreads / Shape::kHeaderGroups;
    const int group = threadIdx.x / kGroupThreads;
    const Team team{group, static_cast<int>(threadIdx.x) % kGroupThreads, kGroupThreads, 1 + group};
    const int token = receiver + group * Shape::kReceivers;
    if (token < G::kTokens) {
      const int expert = chosen_expert(token);
      count_earlier(team, token, expert);
      if (team.thread < 32) push_header(group, token, expert);
    } else if (receiver == Shape::kReceivers - 1) {
      push_counts(team);
    }
  }

  // ---- rows -------------------------------------------------------------------------------------

  __device__ int chosen_expert(int token) {
    if (lane >= kTopK || token >= args.num_tokens) return -1;
    return static_cast<int>(args.topk_idx[token * kTopK + lane]);
  }

  __device__ uint32_t ranks_of(int expert) {
    return __reduce_or_sync(kFullWarp, expert < 0 ? 0u : 1u << (expert / G::kLocalExperts));
  }

  __device__ void load_segment(int token, int segment, uint4& low, uint4& high) {
    const uint4* x = args.x + (token * kSegments + segment) * 64 + lane * 2;
    low = load_constant(x);
    high = load_constant(x + 1);
  }

  __device__ Segment quantise(uint4 a, uint4 b) {
    if (!P::kQuantise) return {a, b};
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float v[16];
    float largest = 1e-4f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[2 * i] = bf16_low(words[i]);
      v[2 * i + 1] = bf16_high(words[i]);
      largest = fmaxf(largest, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
    }
#pragma unroll
    for (int other = 1; other < 8; other *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
    const float inverse = __fdiv_rn(448.0f, largest);
    uint32_t q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i] = pack_e4m3(v[4 * i] * inverse, v[4 * i + 1] * inverse, v[4 * i + 2] * inverse,
                       v[4 * i + 3] * inverse);
    const uint32_t scale = __float_as_uint(__fdiv_rn(largest, 448.0f));
    return {{q[0], q[1], q[2], q[3]},
            {__shfl_sync(kFullWarp, scale, 0), __shfl_sync(kFullWarp, scale, 8),
             __shfl_sync(kFullWarp, scale, 16), __shfl_sync(kFullWarp, scale, 24)}};
  }

  __device__ void push_row(int token, int expert, const Segment& segment) {
    const uint32_t ranks = ranks_of(expert);
    if (threadIdx.x == 0) args.handle->ranks_of[token] = ranks;
    if constexpr (P::kPush == Push::kBulk) {
      push_bulk(token, ranks, segment);
    } else {
      push_stores(token, warp, ranks, segment);
    }
  }

  __device__ uint4* slot_at(int rank, int token) {
    return args.peers[rank]->rows[epoch.half()][args.source_at[rank]][token];
  }

  // The i-th rank that a token is sent to: starting points differ, so that links fill evenly.
  __device__ int destination(int token, int i) {
    constexpr int kOthers = kRanks - 1;
    if (P::kOwnRank == OwnRank::kInTurn) return (args.rank + 1 + token + i) % kRanks;
    if (P::kOwnRank == OwnRank::kLast)
      return i == kOthers ? args.rank : (args.rank + 1 + (token + i) % kOthers) % kRanks;
    return i == 0 ? args.rank : (args.rank + 1 + (token + i) % kOthers) % kRanks;
  }

  __device__ bool wanted(uint32_t ranks, int rank) {
    return (ranks >> rank & 1) && (P::kRemoteRows || rank == args.rank);
  }

  __device__ void push_stores(int token, int part, uint32_t ranks, const Segment& segment) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      if (!wanted(ranks, rank)) continue;
      uint4* row = slot_at(rank, token);
      store_relaxed_system(row + part * 32 + lane, segment.data);
      if (lane == 0) store_relaxed_system(row + G::kDispatchUnits + part, segment.scales);
    }
    if constexpr (P::kArrival == Arrival::kSegmentFlag) {
      __syncwarp();
      if (lane < kRanks && (ranks >> lane & 1)) raise_flag(lane, token, part);
    }
    if constexpr (P::kArrival == Arrival::kRowFlag) {
      barrier_of(1, kSegments * 32);
      if (threadIdx.x < kRanks && (ranks >> threadIdx.x & 1)) raise_flag(threadIdx.x, token, 0);
    }
  }

  __device__ void push_bulk(int token, uint32_t ranks, const Segment& segment) {
    shared.row[warp * 32 + lane] = segment.data;
    if (lane == 0) shared.row[G::kDispatchUnits + warp] = segment.scales;
    fence_shared_before_bulk();
    barrier_of(1, kSegments * 32);
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      if (wanted(ranks, rank)) bulk_store(slot_at(rank, token), shared.row, G::kDispatchRow * 16);
    }
    bulk_commit();
    if (P::kArrival == Arrival::kRowFlag) {
      bulk_wait_written();
      for (int rank = 0; rank < kRanks; ++rank)
        if (ranks >> rank & 1) raise_flag(rank, token, 0);
    }
  }

  __device__ void raise_flag(int rank, int token, int segment) {
    store_release_system(
        &args.peers[rank]->flags[epoch.half()][args.source_at[rank]][token][segment], epoch.value);
  }

  // ---- headers and counts -----------------------------------------------------------------------

  // Threads that work together, and the barrier they share.
  struct Team {
    int group, thread, threads, barrier;
  };

  // How often each of a token's experts was chosen by earlier tokens: one look into a table per
  // earlier choice. Matches are rare, so shared memory atomics cost little.
  __device__ void count_earlier(const Team& team, int token, int expert) {
    constexpr int kTeam = P::kPlaces == Places::kAllWarps || Shape::kSplit
                              ? kThreads / Shape::kHeaderGroups
                              : Shape::kHeaderWarps * 32;
    constexpr int kScans = ceil_div(G::kTokens * kTopK, kTeam);
    uint8_t* choice_of = shared.choice_of[team.group];
    int32_t* earlier = shared.earlier[team.group];
    int others[kScans];
    const int choices = token < args.num_tokens ? token * kTopK : 0;
#pragma unroll
    for (int i = 0; i < kScans; ++i) {
      const int at = team.thread + i * team.threads;
      others[i] = at < choices ? static_cast<int>(args.topk_idx[at]) : -1;
    }
    auto* words = reinterpret_cast<uint32_t*>(choice_of);
    for (int i = team.thread; i < G::kExperts / 4; i += team.threads) words[i] = 0;
    if (team.thread < 32) earlier[team.thread] = 0;
    barrier_of(team.barrier, team.threads);
    if (team.thread < 32) {
      const bool first = (__match_any_sync(kFullWarp, expert) & lanes_below()) == 0;
      if (expert >= 0 && first) choice_of[expert] = lane + 1;
    }
    barrier_of(team.barrier, team.threads);
#pragma unroll
    for (int i = 0; i < kScans; ++i) {
      const int choice = others[i] >= 0 ? choice_of[others[i]] : 0;
      if (choice > 0) atomicAdd(&earlier[choice - 1], 1);
    }
    barrier_of(team.barrier, team.threads);
  }

  // Tells every rank of every token, also of those beyond num_tokens, so that nobody needs to know
  // another rank's token count.
  __device__ void push_header(int group, int token, int expert) {
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    if (lane >= kTopK) return;
    const int place = shared.earlier[group][__ffs(same) - 1] + __popc(same & lanes_below());
    const uint32_t weight =
        expert < 0 ? 0 : __float_as_uint(args.topk_weights[token * kTopK + lane]);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      const int local = expert - rank * G::kLocalExperts;
      const bool here = expert >= 0 && local >= 0 && local < G::kLocalExperts;
      store_relaxed_system(
          &args.peers[rank]->headers[epoch.half()][args.source_at[rank]][token][lane],
          HeaderEntry::encode(epoch.header_tag(), here ? local : HeaderEntry::kElsewhere, place,
                              weight));
    }
  }

  __device__ void push_counts(const Team& team) {
    for (int e = team.thread; e < G::kExperts; e += team.threads) shared.histogram[e] = 0;
    barrier_of(team.barrier, team.threads);
    for (int i = team.thread; i < args.num_tokens * kTopK; i += team.threads) {
      const int expert = static_cast<int>(args.topk_idx[i]);
      if (expert >= 0) atomicAdd(&shared.histogram[expert], 1);
    }
    barrier_of(team.barrier, team.threads);
    for (int e = team.thread; e < G::kExperts; e += team.threads) {
      const int rank = e / G::kLocalExperts;
      store_relaxed_system(
          &args.peers[rank]->counts[epoch.half()][args.source_at[rank]][e % G::kLocalExperts],
          CountWord::encode(epoch.count_tag(), shared.histogram[e]));
    }
  }
};

}  // namespace fanfold::probe
