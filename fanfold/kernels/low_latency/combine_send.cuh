// The send half of combine, on the expert side: weigh and sum the outputs of the local experts in
// fp32 and top-k order, round once, push one row to the rank of each token.
#pragma once

#include "low_latency/combine_shape.cuh"
#include "low_latency/host_sender.cuh"
#include "low_latency/logfmt.cuh"
#include "low_latency/ready.cuh"

namespace fanfold {

class CombineSend {
 public:
  __device__ CombineSend(const CombineArgs& args, CombineShared& shared, const Prologue& seen)
      : args_(args), shared_(shared), call_(args.call, seen, seen.epochs.send) {}

  __device__ void run() {
    send();
    if constexpr (kAcrossHosts != 0) push_rows_to_hosts();
  }

  // With kAwaitsSignals. Rows for other hosts leave behind the last one.
  __device__ void run_as_ready() {
    if (blockIdx.x == 0 && call_.warp == 0) push_call_word();
    send_headers();
    if constexpr (kAcrossHosts != 0) push_headers_to_hosts();
    if (call_.warp == kWarps - 1) look_up_tokens(call_.live_ranks());
    if (call_.warp == kIdleWarp) await_half();
    __syncthreads();
    send_as_ready();
    if constexpr (kAcrossHosts != 0) push_rows_to_hosts();
  }

 private:
  // The first sweep waits for headers, the last one reports the signals that have not come.
  enum class Sweep { kFirst, kLater, kLast };
  // Whether a sweep has sent a row, and has left one.
  struct Rows {
    bool sent;
    bool open;
  };
  static constexpr int kOpen = -1;  // the fan of a row that is left

  static constexpr int kBatch = 4;  // outputs that a lane asks for at once
  // Looks up no row where there are more warps than rows of a pass.
  static constexpr int kIdleWarp = kWarps > kPassRows ? kPassRows : 0;

  __device__ static SourceToken pair_at(int turn) {
    if constexpr (kAwaitsSignals) {  // of a token there may be more sources than CTAs
      const int q = static_cast<int>(blockIdx.x) + turn * static_cast<int>(gridDim.x);
      return {q % kRanks, q / kRanks};
    } else {
      return pair_of(static_cast<int>(blockIdx.x), turn, static_cast<int>(gridDim.x), kRanks);
    }
  }

  __device__ void send() {
    if constexpr (kLate) {
      if (blockIdx.x == 0 && call_.warp == 0) push_call_word();
      send_headers();
      if constexpr (kAcrossHosts != 0) push_headers_to_hosts();
    }
    // A rank that refused sends no rows, but takes the headers that arrive.
    const bool has_rows = kLate || args_.call.refused == 0;
    for (int first = 0;; first += kPassRows) {
      if (first > 0) __syncthreads();
      const RankSet live = call_.live_ranks();
      if (has_rows) look_up(first, live);
      if (first == 0 && call_.warp == kIdleWarp) await_half();
      if (!has_rows) return;
      __syncthreads();
      send_rows(first);
      const int next =
          static_cast<int>(blockIdx.x) + (first + kPassRows) * static_cast<int>(gridDim.x);
      if (next >= most_of(shared_.tokens) * kRanks) return;
    }
  }

  __device__ void push_call_word() const {
    call_.await_acks<true>();
    call_.push_call_word(RowKind::kBf16);
  }

  // One warp, with a barrier behind it: the half of the memory that rows go to is free, and the
  // call word has left, which in a kernel with late routing it has before.
  __device__ void await_half() const {
    if (!kLate && blockIdx.x == 0) return push_call_word();
    call_.await_acks();
  }

  // ---- to other hosts ---------------------------------------------------------------------------

  __device__ void push_headers_to_hosts() const {
    if (!is_last_cta(&args_.call.state->hosts->finished_headers)) return;
    push_to_each_host_rank(call_, [this](int, HostSender<CallKind::kCombine>& sender) {
      sender.push_tables();
      sender.push_word(call_.call_word(sender.writer()), call_.own_word(RowKind::kBf16));
    });
  }

  __device__ void push_rows_to_hosts() const {
    if (!is_last_cta(&args_.call.state->hosts->finished_rows)) return;
    // Where a signal has not come rows are missing, and no word says that they are there.
    if (kAwaitsSignals && __any_sync(kFullWarp, call_.failed()) != 0) return;
    push_to_each_host_rank(call_, [this](int peer, HostSender<CallKind::kCombine>& sender) {
      const int tokens = args_.call.refused == 0 ? shared_.tokens[peer] : 0;
      sender.push_rows(tokens, [&](int token) { return has_row_of(peer, token); });
      sender.push_word(call_.rows_word(sender.writer()), call_.own_word(RowKind::kBf16));
    });
  }

  // Whether an expert of this rank has an output for the token of a rank elsewhere, whose headers
  // stay where they are.
  __device__ bool has_row_of(int source, int token) const {
    if constexpr (!kLate) {
      const int64_t q = int64_t{source} * args_.call.max_tokens + token;
      return reinterpret_cast<const int32_t*>(args_.table + table().fans_offset())[q] > 0;
    }
    const Writer writer = call_.writer_of(source);
    const auto* header = call_.own_at<const uint64_t>(writer, call_.header(writer, token, 0));
    const auto is_output = [](uint64_t entry) {
      if (kAwaitsSignals && entry == ~uint64_t{0}) return true;  // sent as it was ready
      return kHeader.local(entry) != kHeader.elsewhere();
    };
    bool has = false;
    for (int k = 0; k < kTopK; ++k) has = has || is_output(load_relaxed_system(header + k));
    return has;
  }

  // ---- which outputs make up a row --------------------------------------------------------------

  __device__ void send_headers() {
    const int ctas = static_cast<int>(gridDim.x);
    const int each = (args_.call.tokens + ctas - 1) / ctas;
    const int first = static_cast<int>(blockIdx.x) * each;
    const int last = min(first + each, args_.call.tokens);
    const TopKEntries entries{args_.topk_idx, args_.topk_weights, args_.call.tokens};
    HeaderSender<CallKind::kCombine>(call_, entries, shared_.tokens_of).send(first, last);
  }

  __device__ TableLayout table() const { return {kRanks, kTopK, args_.call.max_tokens}; }

  // A warp a row, and one for the tokens of each source.
  __device__ void look_up(int first, const RankSet& live) {
    if (first == 0 && call_.warp == kWarps - 1) look_up_tokens(live);
    if constexpr (kLate) __syncthreads();
    for (int i = call_.warp; i < kPassRows; i += kWarps) {
      const SourceToken pair = pair_at(first + i);
      int fan = 0;
      // A pair beyond the memory's tokens has no header and no entries.
      if (pair.token < args_.call.max_tokens)
        fan = kLate ? look_up_late(i, pair) : look_up_table(i, pair);
      const bool is_live = live.has(pair.source);
      if (call_.lane == 0) shared_.fan[i] = is_live ? fan : 0;
    }
  }

  __device__ void look_up_tokens(const RankSet& live) {
    for (int round = 0; round < kRankRounds; ++round) {
      const int source = round * kWarpLanes + call_.lane;
      const bool is_live = live.has(source);
      if (source < kRanks) shared_.tokens[source] = tokens_of(source, is_live);
      __syncwarp();
    }
  }

  __device__ int tokens_of(int source, bool is_live) const {
    if constexpr (kLate) {
      if (!is_live) return 0;
      const WaitClock clock(args_.wait_ns, source);
      const CallWord word = call_.await_call(source);
      clock.stop();
      return static_cast<int>(word.tokens);
    } else {
      return reinterpret_cast<const int32_t*>(args_.table + table().tokens_offset())[source];
    }
  }

  // Everything is asked for at once, also what the row may turn out not to have.
  __device__ int look_up_table(int i, SourceToken pair) {
    const int64_t q = int64_t{pair.source} * args_.call.max_tokens + pair.token;
    const int fan =
        min(kTopK, reinterpret_cast<const int32_t*>(args_.table + table().fans_offset())[q]);
    const int tokens =
        reinterpret_cast<const int32_t*>(args_.table + table().tokens_offset())[pair.source];
    TableEntry entry{};
    if (call_.lane < kTopK)
      entry = (reinterpret_cast<const TableEntry*>(args_.table) + q * kTopK)[call_.lane];
    if (pair.token >= tokens) return 0;
    if (call_.lane < fan) {
      const int capacity = kRanks * args_.call.max_tokens;
      const int local = entry.row / capacity;
      shared_.terms[i][call_.lane] = {output(local, entry.row - local * capacity),
                                      args_.weighted != 0 ? entry.weight : 1.0f};
    }
    return fan;
  }

  __device__ int look_up_late(int i, SourceToken pair) {
    if (pair.token >= shared_.tokens[pair.source]) return 0;
    const Resolved header = take_header(call_, pair.source, pair.token);
    if (args_.call.refused != 0) return 0;
    if (header.here) keep_term(i, header, row_of(header, pair.source));
    return __popc(header.all);
  }

  // The row of this lane's entry among those of its expert.
  __device__ int64_t row_of(const Resolved& header, int source) const {
    const int64_t begin = args_.ranges[int64_t{header.local} * kRanks + source] >> 32;
    // A handle that is not what dispatch left must not lead outside of the outputs.
    const int64_t last = int64_t{kRanks} * args_.call.max_tokens - 1;
    return min(max(begin + header.place, int64_t{0}), last);
  }

  __device__ void keep_term(int i, const Resolved& header, int64_t row) {
    shared_.terms[i][__popc(header.all & lanes_below())] = {output(header.local, row),
                                                            header.weight};
  }

  __device__ const uint4* output(int64_t local, int64_t row) const {
    return reinterpret_cast<const uint4*>(args_.y + local * args_.expert_stride +
                                          row * args_.row_stride);
  }

  // ---- rows as they are ready -------------------------------------------------------------------

  // Looks at this CTA's rows again and again, and sends those whose outputs are all there, so that
  // no row waits for the signal of another. The header of a row stays until the row is sent; then
  // the sentinel in its place says so.
  __device__ void send_as_ready() {
    SweepClock clock(call_);
    __shared__ SweepEnd end;
    for (Sweep sweep = Sweep::kFirst;;) {
      const Rows rows = sweep_rows(sweep);
      if (!rows.open) return;
      if (threadIdx.x == 0) end = clock.end_of(rows.sent, sweep == Sweep::kLast);
      __syncthreads();
      if (end == SweepEnd::kNone) return;
      sweep = end == SweepEnd::kLast ? Sweep::kLast : Sweep::kLater;
    }
  }

  __device__ Rows sweep_rows(Sweep sweep) {
    Rows rows{};
    const int pairs = most_of(shared_.tokens) * kRanks;
    for (int first = 0;; first += kPassRows) {
      const RankSet live = call_.live_ranks();
      for (int i = call_.warp; i < kPassRows; i += kWarps) look_up_ready(i, first, live, sweep);
      __syncthreads();
      bool sends = false;
      for (int i = 0; i < kPassRows; ++i) {
        sends |= shared_.fan[i] > 0;
        rows.open |= shared_.fan[i] == kOpen;
      }
      if (sends) send_rows(first);
      rows.sent |= sends;
      __syncthreads();
      const int next =
          static_cast<int>(blockIdx.x) + (first + kPassRows) * static_cast<int>(gridDim.x);
      if (next >= pairs) return rows;
    }
  }

  __device__ void look_up_ready(int i, int first, const RankSet& live, Sweep sweep) {
    const SourceToken pair = pair_at(first + i);
    const bool has_row =
        pair.token < args_.call.max_tokens && pair.token < shared_.tokens[pair.source];
    const int fan = has_row ? fan_if_ready(i, pair, sweep) : 0;
    if (call_.lane == 0) shared_.fan[i] = live.has(pair.source) ? fan : 0;
  }

  // How many outputs make up the row, whose terms are kept then; 0 if it has been sent.
  __device__ int fan_if_ready(int i, SourceToken pair, Sweep sweep) {
    uint64_t entry = kHeader.elsewhere();
    uint64_t* const place = header_at(call_, pair.source, pair.token);
    if (call_.lane < kTopK) {
      entry = sweep == Sweep::kFirst ? await_entry(call_, pair.source, place)
                                     : load_relaxed_system(place);
    }
    if (__any_sync(kFullWarp, entry == ~uint64_t{0}) != 0) return 0;
    const Resolved header = resolve(entry);
    const int64_t row = header.here ? row_of(header, pair.source) : 0;
    const ReadySignal signal = ReadySignal::of(args_.ready, header.here ? header.local : 0, row);
    const bool waits = header.here && !signal.is_ready(args_.ready);
    if (__any_sync(kFullWarp, waits) != 0) {
      if (waits && sweep == Sweep::kLast) signal.time_out(call_, args_.ready);
      return kOpen;
    }
    if (header.here) keep_term(i, header, row);
    // Of a rank elsewhere, which fills its headers anew in each call, a row that is none stays so.
    const bool is_row = header.all != 0 || !call_.is_elsewhere(pair.source);
    if (call_.lane < kTopK && is_row) *place = ~uint64_t{0};
    return __popc(header.all);
  }

  // ---- rows -------------------------------------------------------------------------------------

  // This rank's own row first: it is needed no later than the others and leaves no link waiting.
  __device__ int own_row(int first) const {
    if constexpr (kAwaitsSignals) return 0;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPassRows; ++i)
      if (pair_at(first + i).source == args_.call.rank) own = i;
    return own;
  }

  __device__ void send_rows(int first) {
    const int own = own_row(first);
    for (int task = call_.warp; task < kPassRows * kSegments; task += kWarps) {
      const int i = (task / kSegments + own) % kPassRows;
      const int part = task % kSegments;
      if (shared_.fan[i] == 0 || (kAwaitsSignals && shared_.fan[i] == kOpen)) continue;
      const SourceToken pair = pair_at(first + i);
      const Peer segment =
          call_.row_at(pair.source, pair.token).from(call_.units(part * kSegmentUnits));
      float sum[kColumnsOfUnit] = {};
      if (has_unit(part, call_.lane)) weighted_sum(i, part, sum);
      if constexpr (kLogFmt != 0) {
        if (push_coded(segment, part, sum)) continue;
      }
      if (has_unit(part, call_.lane)) segment.put(call_.units(call_.lane), round_to_bf16(sum));
    }
  }

  __device__ void weighted_sum(int i, int part, float (&sum)[kColumnsOfUnit]) const {
    const int fan = shared_.fan[i];
    const int unit = part * kSegmentUnits + call_.lane;
    for (int first = 0; first < fan; first += kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (first + j < fan) v[j] = load_once(shared_.terms[i][first + j].row + unit);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (first + j < fan) add_weighted(sum, v[j], shared_.terms[i][first + j].weight);
    }
  }

  // ---- rows as LogFMT ---------------------------------------------------------------------------

  // False, with nothing written, if the segment cannot be coded or would not be shorter.
  __device__ bool push_coded(const Peer& segment, int part, const float (&sum)[kColumnsOfUnit]) {
    if (!fits_coded(part)) return false;
    if (__all_sync(kFullWarp, is_codable(sum)) == 0) return false;
    uint32_t* stage = shared_.stage[call_.warp];
    const int block = call_.lane / kBlockLanes;
    const uint32_t range = range_word(sum);
    stage_codes(sum, range, reinterpret_cast<uint16_t*>(stage + block * kBlockCodeWords),
                call_.lane);
    __syncwarp();
    const int blocks = blocks_of_segment(part);
    const auto put = [&](int place, uint32_t word) { segment.put(int64_t{place} * 4, word); };
    if (call_.lane == 0) put(0, kCodedMark);
    if (call_.lane % kBlockLanes == 0 && block < blocks) put(range_place(block), range);
    for (int w = call_.lane; w < blocks * kBlockCodeWords; w += kWarpLanes)
      put(range_place(w / kBlockCodeWords) + 1 + w % kBlockCodeWords, stage[w]);
    __syncwarp();
    return true;
  }

  const CombineArgs& args_;
  CombineShared& shared_;
  const CombineCall call_;
};

}  // namespace fanfold
