// The receive half of combine, at a token's source: add the rows of the ranks in fp32 and rank
// order as they arrive, round once.
#pragma once

#include "low_latency/combine_shape.cuh"
#include "low_latency/logfmt.cuh"

namespace fanfold {

class CombineReceive {
 public:
  __device__ CombineReceive(const CombineArgs& args, const Prologue& seen)
      : args_(args), call_(args.call, seen, seen.epochs.receive),
        first_ranks_(first_task() < tasks() ? ranks_of_token(first_task() / kSegments)
                                            : TokenRanks::none()) {}

  __device__ void run() {
    RankSet live = call_.live_ranks();
    TokenRanks ranks = first_ranks_;
    await_all(live);
    if constexpr (kAcrossHosts != 0) live = those_that_came(live);
    for (int task = first_task(); task < tasks(); task += kWarps * static_cast<int>(gridDim.x)) {
      const int token = task / kSegments;
      if (task != first_task()) ranks = ranks_of_token(token);
      reduce(token, task % kSegments, ranks.among(live));
    }
  }

 private:
  static constexpr int kAtOnce = kRanks < 4 ? kRanks : 4;  // rows that a lane awaits together
  using Rows = uint4[kAtOnce];

  // A warp's first segment of all; the others follow at distances of the whole grid.
  __device__ int first_task() const {
    return static_cast<int>(blockIdx.x) + call_.warp * static_cast<int>(gridDim.x);
  }
  __device__ int tasks() const { return args_.call.tokens * kSegments; }

  __device__ TokenRanks ranks_of_token(int token) const {
    if constexpr (kLate) {
      const TopKEntries entries{args_.topk_idx, nullptr, args_.call.tokens};
      return TokenRanks::of(entries.of(token, call_.lane));
    } else {
      const TableLayout table{kRanks, kTopK, args_.call.max_tokens};
      const auto* words = reinterpret_cast<const uint32_t*>(args_.table + table.ranks_offset());
      if constexpr (kHasFewRanks) return TokenRanks(words[token]);
      if (call_.lane >= kTopK) return TokenRanks::none();
      return TokenRanks(words[int64_t{token} * kTopK + call_.lane]);
    }
  }

  __device__ void reduce(int token, int part, const TokenRanks& token_ranks) {
    float sum[kColumnsOfUnit] = {};
    if constexpr (kBiased != 0) add_biases(token, part, sum);
    const uint32_t ranks = token_ranks.word();
    if constexpr (!kHasFewRanks) {
      add_many_ranks(token, part, token_ranks, sum);
    } else if constexpr (kLogFmt != 0) {
      for (int r = 0; r < kRanks; ++r)
        if ((ranks >> r & 1u) != 0) add_segment_of(r, token, part, sum);
    } else if (has_unit(part, call_.lane)) {
#pragma unroll 1
      for (int first = 0; first < kRanks; first += kAtOnce)
        add_rows(FewRanks{first, ranks}, token, part, sum);
    }
    if (args_.out == nullptr || !has_unit(part, call_.lane)) return;
    auto* out = reinterpret_cast<uint4*>(args_.out) + int64_t{token} * kUnits;
    store_weak(out + part * kSegmentUnits + call_.lane, round_to_bf16(sum));
  }

  __device__ void add_biases(int token, int part, float (&sum)[kColumnsOfUnit]) const {
    if (!has_unit(part, call_.lane)) return;
#pragma unroll
    for (const unsigned char* bias : args_.biases) {
      if (bias == nullptr) continue;
      const auto* row = reinterpret_cast<const uint4*>(bias) + int64_t{token} * kUnits;
      add_unweighted(sum, load_once(row + part * kSegmentUnits + call_.lane));
    }
  }

  __device__ void add_many_ranks(int token, int part, const TokenRanks& ranks,
                                 float (&sum)[kColumnsOfUnit]) {
    if constexpr (kLogFmt != 0) {
      ranks.for_each_from(0, [&](int rank) { add_segment_of(rank, token, part, sum); });
      return;
    }
    for (TokenRanks::Cursor cursor(ranks, 0);;) {
      ManyRanks some;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) some.ranks[j] = cursor.next();
      if (some.ranks[0] == TokenRanks::kNone) return;
      if (has_unit(part, call_.lane)) add_rows(some, token, part, sum);
    }
  }

  __device__ uint4* received(int rank, int token) const { return call_.received_row(rank, token); }

  // ---- bf16 rows --------------------------------------------------------------------------------

  // Up to kAtOnce of a token's ranks.
  struct FewRanks {
    int first;
    uint32_t all;

    __device__ int rank(int j) const { return first + j; }
    __device__ bool has(int j) const {
      return first + j < kRanks && (all >> (first + j) & 1u) != 0;
    }
  };
  struct ManyRanks {
    int ranks[kAtOnce];

    __device__ int rank(int j) const { return ranks[j]; }
    __device__ bool has(int j) const { return ranks[j] != TokenRanks::kNone; }
  };

  template <class SomeRanks>
  __device__ void add_rows(const SomeRanks& some, int token, int part,
                           float (&sum)[kColumnsOfUnit]) {
    Rows v;
    const uint32_t came = await_rows(some, token, part, v);
    const int unit = part * kSegmentUnits + call_.lane;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!some.has(j)) continue;
      if ((came >> j & 1u) != 0) add_unweighted(sum, v[j]);
      // The half is written again when peers have the acknowledgement of this call.
      if (!call_.is_elsewhere(some.rank(j)))
        store_weak(received(some.rank(j), token) + unit, sentinels());
    }
  }

  // Bit j: the row of rank j of `some` is in v[j].
  template <class SomeRanks>
  __device__ uint32_t await_rows(const SomeRanks& some, int token, int part, Rows& v) {
    const int unit = part * kSegmentUnits + call_.lane;
    uint32_t open = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (!some.has(j)) continue;
      open |= 1u << j;
      v[j] = load_relaxed_system(received(some.rank(j), token) + unit);
    }
    const uint32_t wanted = open;
    uint32_t lost = 0;
    CombineDeadline deadline(call_);
    while (true) {
      int late = -1, late_rank = 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if ((open >> j & 1u) == 0) continue;
        if (arrived(v[j])) {
          open &= ~(1u << j);
        } else {
          late = j;
          late_rank = some.rank(j);
          v[j] = load_relaxed_system(received(late_rank, token) + unit);
        }
      }
      if (open == 0) return wanted & ~lost;
      if (!sends_nothing(late_rank) && !deadline.expired(late_rank)) continue;
      if (call_.failed()) return wanted & ~open & ~lost;
      lost |= 1u << late;
      open &= ~lost;
      if (open == 0) return wanted & ~lost;
    }
  }

  // A rank that refused sends no rows, and one that means another call none that can be awaited
  // like these. Looked at only where one is awaited in vain for a while.
  __device__ bool sends_nothing(int rank) {
    if ((++looks_ & 0xffu) != 0) return false;
    const Writer writer = call_.writer_of(rank);
    const auto* place = call_.own_at<const uint64_t>(writer, call_.call_word(writer));
    const CallWord word = CallWord::decode(load_relaxed_system(place));
    if (word.epoch != (call_.epoch & 0xffffu)) return false;
    return word.refused || (word.signature != args_.call.signature && args_.call.refused == 0);
  }

  // Every rank is heard of in every call, so that refusals, disagreement and other calls are seen.
  // That takes the warp of the grid with the fewest rows, before its rows: call words leave before
  // rows, and once rows are there no wait could be measured. With late weights the send half has
  // waited for all, and has said how long.
  __device__ void await_all(const RankSet& live) {
    if (blockIdx.x != gridDim.x - 1 || call_.warp != kWarps - 1) return;
    for (int round = 0; round < kRankRounds; ++round) {
      const int rank = round * kWarpLanes + call_.lane;
      if (live.has(rank)) await_rank(rank);
      __syncwarp();
    }
  }

  __device__ void await_rank(int rank) {
    const WaitClock clock(kLate ? nullptr : args_.wait_ns, rank);
    call_.report_call(rank, call_.await_call<!kLate>(rank));
    clock.stop();
  }

  // Those of `live` whose rows may be read. One warp of the CTA waits for all.
  __device__ RankSet those_that_came(const RankSet& live) const {
    __shared__ bool came[kRanks];
    if (call_.warp == 0) live.where([&](int rank) { return came[rank] = await_rows_from(rank); });
    __syncthreads();
    return live.where([&](int rank) { return came[rank]; });
  }

  // Returns whether the rows of `rank` may be read: of a rank elsewhere once its word is here, if
  // it has sent any.
  __device__ bool await_rows_from(int rank) const {
    const Writer writer = call_.writer_of(rank);
    if (!writer.elsewhere) return true;
    CombineDeadline deadline(call_);
    CallWord word{};
    do {
      word = CallWord::decode(call_.look_at_word(RowsOf<CallKind::kCombine>::kWord, writer));
      if (word.epoch == (call_.epoch & 0xffffu))
        return !word.refused && word.signature == args_.call.signature && args_.call.refused == 0;
    } while (!deadline.expired(rank));
    return false;
  }

  // ---- rows as LogFMT ---------------------------------------------------------------------------

  // The first word of a segment says how it is coded.
  __device__ void add_segment_of(int rank, int token, int part, float (&sum)[kColumnsOfUnit]) {
    CombineDeadline deadline(call_);
    uint4* units = received(rank, token) + part * kSegmentUnits;
    auto* words = reinterpret_cast<uint32_t*>(units);
    uint32_t mark = load_relaxed_system(words);
    while (mark == kSentinel) {
      if (sends_nothing(rank) || deadline.expired(rank)) break;
      mark = load_relaxed_system(words);
    }
    // Every lane has looked before one of them replaces the first word.
    if (__any_sync(kFullWarp, mark == kSentinel)) return;
    if (mark == kCodedMark) {
      add_coded(words, rank, part, deadline, sum);
    } else if (has_unit(part, call_.lane)) {
      uint4 v = load_relaxed_system(units + call_.lane);
      while (!arrived(v) && !deadline.expired(rank)) v = load_relaxed_system(units + call_.lane);
      if (arrived(v)) add_unweighted(sum, v);
      if (!call_.is_elsewhere(rank)) store_weak(units + call_.lane, sentinels());
    }
  }

  __device__ void add_coded(uint32_t* words, int rank, int part, CombineDeadline& deadline,
                            float (&sum)[kColumnsOfUnit]) {
    const int block = call_.lane / kBlockLanes;
    const int blocks = blocks_of_segment(part);
    // Eight fields begin at a word or in the middle of one, and touch three.
    const uint32_t* codes =
        words + range_place(block) + 1 + call_.lane % kBlockLanes * kLaneHalves / 2;
    uint32_t range = 0;
    uint32_t mine[3] = {};
    bool here = block >= blocks;
    while (!here) {
      range = load_relaxed_system(words + range_place(block));
      here = range != kSentinel;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        mine[i] = load_relaxed_system(codes + i);
        here = here && mine[i] != kSentinel;
      }
      if (!here && deadline.expired(rank)) break;
    }
    __syncwarp();
    if (here && block < blocks) add_codes(sum, range, mine, call_.lane);
    if (call_.is_elsewhere(rank)) return;
    for (int w = call_.lane; w < range_place(blocks); w += kWarpLanes)
      store_relaxed_gpu(words + w, kSentinel);
  }

  const CombineArgs& args_;
  const CombineCall call_;
  const TokenRanks first_ranks_;  // asked for before anything is sent
  uint32_t looks_ = 0;
};

}  // namespace fanfold
