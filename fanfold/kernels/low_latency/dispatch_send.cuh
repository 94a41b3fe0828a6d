// The send half of dispatch. A few CTAs push rows: one to every rank that holds one of the token's
// experts. The others push headers, and the first of them how many rows each expert gets. An SM
// whose stores wait for a link has its loads wait behind them, so those that are to receive in the
// same kernel should not push rows; and few fill the links (docs/decisions/low-latency-kernels.md).
#pragma once

#include "device/fp8.cuh"
#include "device/nvfp4.cuh"
#include "low_latency/dispatch_shape.cuh"
#include "low_latency/host_sender.cuh"

namespace fanfold {

class DispatchSend {
 public:
  __device__ DispatchSend(const DispatchArgs& args, DispatchShared& shared, const Prologue& seen)
      : args_(args), shared_(shared), call_(args.call, seen, seen.epochs.send),
        entries_{args.topk_idx, args.topk_weights, args.call.tokens} {}

  __device__ void run() {
    const int senders = args_.call.senders;
    if (static_cast<int>(blockIdx.x) < senders) {
      send_rows(senders);
    } else {
      send_headers(static_cast<int>(blockIdx.x) - senders, static_cast<int>(gridDim.x) - senders);
    }
    if constexpr (kAcrossHosts != 0) push_to_hosts();
  }

 private:
  static constexpr int kAtOnce = 2;  // segments that a warp has in flight

  // What a lane's unit is made of; with kScaled also, behind it, the scales of the segment, if the
  // lane sends them.
  struct Columns {
    uint4 units[kUnitInputs + (kScaled ? 1 : 0)];
  };

  // ---- rows -------------------------------------------------------------------------------------

  __device__ void send_rows(int senders) {
    const int step = senders * kWarps;
    const int segments = args_.call.tokens * kSegments;
    int first = call_.warp * senders + static_cast<int>(blockIdx.x);
    if (first >= segments) return;
    Columns columns[kAtOnce];
    int expert[kAtOnce];
    load_segments(first, step, columns, expert);
    if constexpr (kNvfp4) global_ = GlobalScale::of(*args_.global_scale);
    call_.await_acks();  // each warp, as no barrier follows; the rows are on their way
    const RankSet live = call_.live_ranks();
    while (true) {
      push_segments(first, step, live, columns, expert);
      first += step * kAtOnce;
      if (first >= segments) return;
      load_segments(first, step, columns, expert);
    }
  }

  __device__ void load_segments(int first, int step, Columns (&columns)[kAtOnce],
                                int (&expert)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = (first + i * step) / kSegments;
      expert[i] = entries_.of(token, call_.lane);
      if (token < args_.call.tokens)
        columns[i] = load_segment(token, (first + i * step) % kSegments);
    }
  }

  // The first segment leaves before the second is worked on: the link is the scarce thing.
  __device__ void push_segments(int first, int step, const RankSet& live,
                                const Columns (&columns)[kAtOnce], const int (&expert)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = (first + i * step) / kSegments;
      const int part = (first + i * step) % kSegments;
      if (token >= args_.call.tokens) continue;
      const TokenRanks ranks = TokenRanks::of(expert[i]).among(live);
      if (part == 0 && args_.table != nullptr) keep_ranks(token, ranks);
      push_segment(token, part, ranks, encode(columns[i]));
    }
  }

  __device__ void keep_ranks(int token, const TokenRanks& ranks) const {
    constexpr TableLayout kAnyTokens{kRanks, kTopK, 0};
    constexpr int kWords = kAnyTokens.rank_words();
    const TableLayout table{kRanks, kTopK, args_.call.max_tokens};
    auto* words = reinterpret_cast<uint32_t*>(args_.table + table.ranks_offset());
    if (call_.lane < kWords) words[int64_t{token} * kWords + call_.lane] = ranks.word();
  }

  __device__ Columns load_segment(int token, int part) const {
    Columns columns{};
    if constexpr (kScaled)
      if (has_scales(part, call_.lane)) columns.units[kUnitInputs] = scales_of(token, part);
    if (!has_unit(part, call_.lane)) return columns;
    const auto* x = reinterpret_cast<const uint4*>(args_.x) + int64_t{token} * kInputUnits;
    const int unit = part * kSegmentUnits + call_.lane;
#pragma unroll
    for (int i = 0; i < kUnitInputs; ++i) columns.units[i] = load_once(x + unit * kUnitInputs + i);
    return columns;
  }

  __device__ uint4 scales_of(int token, int part) const {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int block = part * 4 + i;
      if (block < kBlocks)
        words[i] =
            args_.x_scales[token * args_.x_scale_strides[0] + block * args_.x_scale_strides[1]];
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ Segment encode(const Columns& columns) const {
    const uint4* v = columns.units;
    if constexpr (kNvfp4) {
      auto [values, scales] = quantise_nvfp4(v, global_);
      scales |= escape_block(values.x, values.y);
      scales |= escape_block(values.z, values.w) << 8;
      return {values, gather_scales(scales, call_.lane)};
    } else if constexpr (kScaled) {
      return {escaped(v[0]), escaped(v[1])};
    } else if constexpr (kFp8) {
      return quantised(v[0], v[1]);
    } else {
      return {escaped(v[0]), {}};
    }
  }

  __device__ static uint4 escaped(uint4 v) {
    return {escape_sentinel(v.x), escape_sentinel(v.y), escape_sentinel(v.z), escape_sentinel(v.w)};
  }

  // Eight lanes that follow each other hold a block.
  __device__ static Segment quantised(uint4 low, uint4 high) {
    const auto [values, scale] = quantise<1, kPowerOfTwoScales>(low, high);
    const uint32_t bits = __float_as_uint(scale);
    return {values,
            {__shfl_sync(kFullWarp, bits, 0), __shfl_sync(kFullWarp, bits, 8),
             __shfl_sync(kFullWarp, bits, 16), __shfl_sync(kFullWarp, bits, 24)}};
  }

  // The own rank first; for the others starting points differ, so that links fill evenly.
  __device__ int destination(int token, int i) const {
    if (i == 0) return args_.call.rank;
    return (args_.call.rank + 1 + (token + i) % (kRanks - 1 > 0 ? kRanks - 1 : 1)) % kRanks;
  }

  __device__ void push_segment(int token, int part, const TokenRanks& ranks,
                               const Segment& segment) {
    const auto push = [&](int rank) {
      const Peer row = call_.row_at(rank, token);
      if (has_unit(part, call_.lane))
        row.put(call_.units(part * kSegmentUnits + call_.lane), segment.data);
      if (has_scales(part, call_.lane))
        row.put(call_.units(scale_unit(part, call_.lane)), segment.scales);
    };
    if constexpr (!kHasFewRanks) return ranks.for_each_from(args_.call.rank, push);
#pragma unroll 8
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      if ((ranks.word() >> rank & 1u) != 0) push(rank);
    }
  }

  // ---- to other hosts ---------------------------------------------------------------------------

  __device__ void push_to_hosts() const {
    if (!is_last_cta(&args_.call.state->hosts->finished_rows)) return;
    push_to_each_host_rank(call_, [this](int peer, HostSender<CallKind::kDispatch>& sender) {
      sender.push_tables();
      sender.push_rows(args_.call.tokens, [&](int token) { return has_row(peer, token); });
      sender.push_word(call_.rows_word(sender.writer()), call_.own_word(kRowKind));
    });
  }

  __device__ bool has_row(int peer, int token) const {
    bool has = false;
    for (int k = 0; k < kTopK; ++k) {
      const int expert = entries_.of(token, k);
      has = has || (expert >= 0 && expert / kLocalExperts == peer);
    }
    return has;
  }

  // ---- headers and counts -----------------------------------------------------------------------

  // The first CTA has counts alone to send, if there is another for the headers.
  __device__ void send_headers(int cta, int ctas) {
    if (cta == 0) send_counts();
    const int alone = ctas > 1 ? 1 : 0;
    if (cta < alone) return;
    if (alone == 0) __syncthreads();  // all have read the sets
    const int each = (args_.call.tokens + ctas - alone - 1) / (ctas - alone);
    const int first = (cta - alone) * each;
    const int last = min(first + each, args_.call.tokens);
    HeaderSender<CallKind::kDispatch>(call_, entries_, shared_.tokens_of).send(first, last);
  }

  __device__ void send_counts() {
    const RankSet live = call_.live_ranks();
    constexpr int kRounds = (kTokenSets + kThreads - 1) / kThreads;
    int counts[kRounds] = {};
    const auto count = [&](int) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int set = static_cast<int>(threadIdx.x) + i * kThreads;
        if (set < kTokenSets) counts[i] += shared_.tokens_of[set].size();
      }
    };
    for_each_window(entries_, args_.call.tokens, shared_.tokens_of, count, [&] {
      if (call_.warp != 0) return;
      call_.await_acks<true>();
      call_.push_call_word(kRowKind);
    });
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int set = static_cast<int>(threadIdx.x) + i * kThreads;
      const int rank = set < kTokenSets ? set / kCounts : 0;
      const bool is_live = live.has(rank);
      if (set >= kTokenSets || !is_live) continue;
      const CountWord word{static_cast<uint32_t>(counts[i]), CountWord::tag_of(call_.epoch)};
      Peer(args_.call, rank).put(call_.count(call_.writer_to(rank), set % kCounts), word.encode());
    }
  }

  const DispatchArgs& args_;
  DispatchShared& shared_;
  const DispatchCall call_;
  const TopKEntries entries_;
  GlobalScale global_{};  // of nvfp4 rows
};

}  // namespace fanfold
