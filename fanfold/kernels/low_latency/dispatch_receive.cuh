// The receive half of dispatch: find out which rows come and where they go, and copy each to its
// experts' packed rows, or token-major once, as it arrives, in any order.
#pragma once

#include "low_latency/dispatch_shape.cuh"

namespace fanfold {

class DispatchReceive {
 public:
  __device__ DispatchReceive(const DispatchArgs& args, DispatchShared& shared, const Prologue& seen)
      : args_(args), shared_(shared), call_(args.call, seen, seen.epochs.receive),
        first_cta_(args.call.phases == kWhole ? args.call.senders : 0) {}

  __device__ bool takes_part() const { return static_cast<int>(blockIdx.x) >= first_cta_; }

  __device__ void run() {
    if (!takes_part()) return;
    read_counts();
    __syncthreads();
    if (blockIdx.x == gridDim.x - 1) publish_counts();
    const int ctas = static_cast<int>(gridDim.x) - first_cta_;
    const int rows = rows_to_look_at();
    const int cta = static_cast<int>(blockIdx.x) - first_cta_;
    if constexpr (kTokenMajor != 0) {
      aborted_ = is_aborted();
      if (is_kept()) {
        const int first = cta * kThreads + static_cast<int>(threadIdx.x);
        note_no_tokens(first, ctas * kThreads);
        keep_topk(first, ctas * kThreads);
      }
    }
    for (int first = 0; cta + first * ctas < rows; first += kPassRows) {
      if (first > 0) __syncthreads();
      for (int i = call_.warp; i < kPassRows; i += kWarps) place_row(i, pair_at(first + i, ctas));
      __syncwarp();  // lanes that store come to the barrier with the others
      __syncthreads();
      if (args_.call.refused != 0) {
        drop_rows(first, ctas);
        continue;
      }
      for (int task = 0; task < kPassRows * kSegments; task += kWarps * kTasks)
        take_rows(first, task, ctas);
    }
  }

 private:
  static constexpr int kSources = kRanks;
  static constexpr TokenCounts kTokenCounts{kRanks, kLocalExperts};
  // That a thread asks for together: more would not fit its registers.
  static constexpr int kCountsAtOnce = kSources < 8 ? kSources : 8;

  __device__ SourceToken pair_at(int turn, int ctas) const {
    return pair_of(static_cast<int>(blockIdx.x) - first_cta_, turn, ctas, kSources);
  }
  __device__ bool is_kept() const { return args_.call.refused == 0; }
  __device__ bool exists(SourceToken pair) const {
    return pair.token < shared_.tokens[pair.source];
  }

  __device__ int rows_to_look_at() const { return most_of(shared_.tokens) * kSources; }

  // ---- where rows go ----------------------------------------------------------------------------

  // The tokens of every source, and for each local expert, and token-major for this rank, the rows
  // of the sources before each.
  __device__ void read_counts() {
    const RankSet live = call_.live_ranks();
    if (call_.warp == kWarps - 1) await_sources(live);
    if constexpr (!kHasFewRanks) return read_many_counts(live);
    for (int e = static_cast<int>(threadIdx.x); e < kCounts; e += kThreads) {
      int rows = 0;
#pragma unroll 1
      for (int first = 0; first < kSources; first += kCountsAtOnce) {
        uint32_t words[kCountsAtOnce];
#pragma unroll
        for (int i = 0; i < kCountsAtOnce; ++i)
          if (first + i < kSources) words[i] = look_at_count(first + i, e);
#pragma unroll
        for (int i = 0; i < kCountsAtOnce; ++i) {
          const int s = first + i;
          if (s >= kSources) break;
          shared_.before[s][e] = rows;
          if (live.has(s)) rows += await_count(s, e, words[i]);
        }
      }
      shared_.total[e] = rows;
    }
  }

  // All threads: each has a count of some (source, expert), then the sums of some expert.
  __device__ void read_many_counts(const RankSet& live) {
    for (int i = 0; i < kTokenSets; i += kThreads) {
      const int at = i + static_cast<int>(threadIdx.x);
      const int s = at < kTokenSets ? at / kCounts : 0, e = at % kCounts;
      const bool is_live = live.has(s);
      if (at >= kTokenSets) continue;
      const uint32_t word = look_at_count(s, e);
      shared_.before[s][e] = is_live ? await_count(s, e, word) : 0;
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < kCounts; e += kThreads) {
      int rows = 0;
      for (int s = 0; s < kSources; ++s) {
        const int of_source = shared_.before[s][e];
        shared_.before[s][e] = rows;
        rows += of_source;
      }
      shared_.total[e] = rows;
    }
  }

  // One warp: lane by lane, the call words of all sources.
  __device__ void await_sources(const RankSet& live) {
    for (int first = 0; first < kSources; first += kWarpLanes) {
      const int source = first + call_.lane;
      const bool is_live = live.has(source);
      if (source < kSources) await_source(source, is_live);
      __syncwarp();
    }
  }

  __device__ void await_source(int source, bool is_live) {
    const WaitClock clock(args_.wait_ns, source);
    CallWord word{};
    if (is_live) word = call_.await_call(source);
    // What a rank elsewhere sends stays where it is: nobody has to take it away.
    if (!is_kept() && call_.is_elsewhere(source)) word.tokens = 0;
    shared_.tokens[source] = static_cast<int>(word.tokens);
    shared_.rows[source] = static_cast<uint8_t>(word.rows);
    shared_.refused[source] = word.refused;
    if (blockIdx.x == gridDim.x - 1 && is_live) call_.report_call(source, word);
    clock.stop();
  }

  // As it stands now. Of a rank elsewhere the last CTA looks for all of the grid, as at words.
  __device__ uint32_t look_at_count(int source, int local) const {
    const Writer writer = call_.writer_of(source);
    const auto* place = call_.own_at<const uint32_t>(writer, call_.count(writer, local));
    if (!writer.elsewhere) return load_relaxed_system(place);
    HostsSeen& hosts_seen = args_.call.state->hosts->seen;
    uint32_t* seen = &hosts_seen.counts[call_.half()][source * kLocalExperts + local];
    if (blockIdx.x != gridDim.x - 1) return load_relaxed_gpu(seen);
    const uint32_t found = load_relaxed_system(place);
    if (is_of_call(found)) store_relaxed_gpu(seen, found);
    return found;
  }
  __device__ bool is_of_call(uint32_t word) const {
    return CountWord::decode(word).tag == CountWord::tag_of(call_.epoch);
  }

  __device__ int await_count(int source, int local, uint32_t word) {
    Deadline deadline(call_);
    while (!is_of_call(word)) {
      if (deadline.expired(source)) return 0;
      word = look_at_count(source, local);
    }
    return static_cast<int>(CountWord::decode(word).count);
  }

  __device__ void publish_counts() {
    if (!is_kept()) return;
    const bool aborted = is_aborted();
    if constexpr (kTokenMajor != 0) return publish_ends(aborted);
    for (int e = static_cast<int>(threadIdx.x); e < kLocalExperts; e += kThreads) {
      const int last = kSources - 1;
      const int total = shared_.total[e];
      args_.counts[e] = total;
      if (args_.expert_totals != nullptr && !aborted) args_.expert_totals[e] += total;
      for (int s = 0; s < kSources; ++s) {
        const int64_t begin = shared_.before[s][e];
        const int64_t end = s == last ? total : shared_.before[s + 1][e];
        args_.ranges[int64_t{e} * kSources + s] = (begin << 32) | (end - begin);
      }
    }
    __syncthreads();  // the first of the ranges stands
    if (threadIdx.x == 0) publish_aborted(aborted);
    if (args_.table != nullptr) publish_tokens(aborted);
  }

  // Token-major: counts as the caller has them. An aborted call brings no rows.
  __device__ void publish_ends(bool aborted) {
    if (call_.warp == 0) publish_experts(aborted);
    if (threadIdx.x == 0) put_count(kTokenCounts.aborted(), aborted ? 1 : 0);
    for_ranks_of(static_cast<int>(threadIdx.x), kThreads, [&](int source) {
      const bool is_last = source == kSources - 1;
      const int end =
          is_last ? shared_.total[kLocalExperts] : shared_.before[source + 1][kLocalExperts];
      put_count(kTokenCounts.rank_end(source), aborted ? 0 : end);
    });
    publish_tokens(aborted);
  }

  __device__ void put_count(int place, int count) {
    const TokenRows& rows = args_.token_rows;
    rows.counts[place] = count;
    if (rows.cpu_counts != nullptr) rows.cpu_counts[place] = count;
  }

  __device__ void publish_experts(bool aborted) {
    const TokenRows& rows = args_.token_rows;
    int before = 0;  // rows, rounded up, of the experts that earlier lanes had
    for (int first = 0; first < kLocalExperts; first += kWarpLanes) {
      const int e = first + call_.lane;
      const int total = e < kLocalExperts && !aborted ? shared_.total[e] : 0;
      int end = (total + rows.alignment - 1) / rows.alignment * rows.alignment;
#pragma unroll
      for (int step = 1; step < kWarpLanes; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, end, step);
        if (call_.lane >= step) end += other;
      }
      end += before;
      before = __shfl_sync(kFullWarp, end, kWarpLanes - 1);
      if (e >= kLocalExperts) continue;
      put_count(kTokenCounts.expert_rows(e), total);
      put_count(kTokenCounts.expert_end(e), end);
      if (args_.expert_totals != nullptr) args_.expert_totals[e] += total;
    }
  }

  __device__ void publish_tokens(bool aborted) {
    auto* tokens = reinterpret_cast<int32_t*>(args_.table + table().tokens_offset());
    for_ranks_of(static_cast<int>(threadIdx.x), kThreads,
                 [&](int source) { tokens[source] = aborted ? kAborted : shared_.tokens[source]; });
  }

  // For who combines without a table.
  __device__ void publish_aborted(bool aborted) {
    if (aborted) args_.ranges[0] = kAbortedLate;
    if (args_.aborted != nullptr) *args_.aborted = aborted ? kAbortedLate : 0;
  }

  // Whether a rank has refused. All lanes of a warp ask together.
  __device__ bool is_aborted() const {
    bool refused = false;
    if constexpr (!kHasFewRanks) {
      for (int s = call_.lane; s < kSources; s += kWarpLanes) refused |= shared_.refused[s];
      return __any_sync(kFullWarp, refused) != 0;
    }
#pragma unroll
    for (int s = 0; s < kSources; ++s) refused = refused || shared_.refused[s];
    return refused;
  }

  __device__ TableLayout table() const { return {kRanks, kTopK, args_.call.max_tokens}; }
  __device__ int64_t capacity() const { return int64_t{kRanks} * args_.call.max_tokens; }

  // One warp: where the copies of one row go.
  __device__ void place_row(int i, SourceToken pair) {
    if (!exists(pair)) return;
    const Resolved header = take_header(call_, pair.source, pair.token);
    if (call_.lane == 0) shared_.fan[i] = __popc(header.all);
    if constexpr (kTokenMajor != 0) return place_token(i, pair, header);
    const int index = __popc(header.all & lanes_below());
    int row = 0;
    if (header.here) {
      row = shared_.before[pair.source][header.local] + header.place;
      shared_.places[i][index] = {header.local, row};
    }
    if (is_kept()) note_row(pair, header, index, row);
  }

  // Token-major: the place of a row of this rank, which all of the token's entries here have.
  __device__ void place_token(int i, SourceToken pair, const Resolved& header) {
    const bool comes = header.all != 0;
    const int first = comes ? __ffs(static_cast<int>(header.all)) - 1 : 0;
    const int place = __shfl_sync(kFullWarp, header.place, first);
    // Peers that disagree about the number of tokens must not lead outside of the rows.
    const int last = kRanks * args_.token_rows.most_tokens - 1;
    const int row = min(shared_.before[pair.source][kLocalExperts] + place, last);
    if (call_.lane == 0) {
      shared_.fan[i] = comes ? 1 : 0;
      shared_.places[i][0] = {0, row};
    }
    if (!is_kept() || aborted_) return;
    const int64_t q = int64_t{pair.source} * args_.call.max_tokens + pair.token;
    if (call_.lane == 0) {
      (reinterpret_cast<TableEntry*>(args_.table) + q * kTopK)[0] = {row, 1.0f};
      reinterpret_cast<int32_t*>(args_.table + table().fans_offset())[q] = comes ? 1 : 0;
    }
    if (comes) note_token(pair, header, row);
  }

  __device__ void note_token(SourceToken pair, const Resolved& header, int64_t row) {
    const TokenRows& rows = args_.token_rows;
    int32_t* const source = rows.sources + row * (2 + kTopK);
    if (call_.lane == 0) {
      source[0] = pair.source * rows.most_tokens + pair.token;
      source[1] = static_cast<int32_t>(row);
    }
    if (call_.lane >= kTopK) return;
    source[2 + call_.lane] = -1;
    rows.topk_idx[row * kTopK + call_.lane] = header.here ? header.local : -1;
    if (rows.topk_weights != nullptr)
      rows.topk_weights[row * kTopK + call_.lane] = header.here ? header.weight : 0.0f;
  }

  // The caller may overwrite its own before it makes another call by the same routing.
  __device__ void keep_topk(int first, int step) {
    for (int64_t i = first; i < int64_t{args_.call.tokens} * kTopK; i += step)
      args_.token_rows.own_topk[i] = args_.topk_idx[i];
  }

  // That no token is behind those that come, for who looks at all rows that there is room for; none
  // is there at all where the call is aborted.
  __device__ void note_no_tokens(int first, int step) {
    const TokenRows& rows = args_.token_rows;
    const int64_t come = aborted_ ? 0 : shared_.total[kLocalExperts];
    const int64_t room = int64_t{kRanks} * rows.most_tokens;
    for (int64_t i = come * kTopK + first; i < room * kTopK; i += step) {
      rows.topk_idx[i] = -1;
      if (rows.topk_weights != nullptr) rows.topk_weights[i] = 0.0f;
    }
    constexpr int kWords = 2 + kTopK;
    for (int64_t i = come * kWords + first; i < room * kWords; i += step) rows.sources[i] = -1;
  }

  __device__ void note_row(SourceToken pair, const Resolved& header, int index, int row) {
    const int64_t place = header.local * capacity() + row;
    if (header.here) {
      args_.source_tokens[place] = pair.token;
      if (args_.row_weights != nullptr) args_.row_weights[place] = header.weight;
    }
    if (args_.table == nullptr) return;
    const int64_t q = int64_t{pair.source} * args_.call.max_tokens + pair.token;
    auto* entries = reinterpret_cast<TableEntry*>(args_.table) + q * kTopK;
    if (header.here) entries[index] = {static_cast<int32_t>(place), header.weight};
    if (call_.lane == 0)
      reinterpret_cast<int32_t*>(args_.table + table().fans_offset())[q] = __popc(header.all);
  }

  // ---- rows -------------------------------------------------------------------------------------

  struct Task {
    int row;   // of the pass
    int part;  // of the row
  };
  __device__ Task task_at(int first_task, int i) const {
    const int task = first_task + call_.warp + i * kWarps;
    return {task / kSegments, task % kSegments};
  }
  __device__ bool is_due(int first_row, Task task, int ctas) const {
    return task.row < kPassRows && exists(pair_at(first_row + task.row, ctas)) &&
           shared_.fan[task.row] > 0;
  }

  __device__ uint4* received(int first_row, Task task, int ctas) const {
    const SourceToken pair = pair_at(first_row + task.row, ctas);
    return call_.received_row(pair.source, pair.token);
  }

  // All of a warp's segments are asked for at once, and each is copied when it is there.
  __device__ void take_rows(int first_row, int first_task, int ctas) {
    Segment segments[kTasks];
    uint32_t open = 0;
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const Task task = task_at(first_task, i);
      if (!is_due(first_row, task, ctas)) continue;
      open |= 1u << i;
      segments[i] = look(received(first_row, task, ctas), task.part);
    }
    Deadline deadline(call_);
    while (open != 0) {
      int late = 0;
#pragma unroll
      for (int i = 0; i < kTasks; ++i) {
        if ((open >> i & 1u) == 0) continue;
        const Task task = task_at(first_task, i);
        uint4* row = received(first_row, task, ctas);
        if (__all_sync(kFullWarp, is_here(segments[i]))) {
          fan_out(task, segments[i]);
          const int source = pair_at(first_row + task.row, ctas).source;
          if (!call_.is_elsewhere(source)) clear(row, task.part);
          open &= ~(1u << i);
        } else {
          late = pair_at(first_row + task.row, ctas).source;
          segments[i] = look(row, task.part);
        }
      }
      if (open == 0 || !__any_sync(kFullWarp, deadline.expired(late))) continue;
      if (call_.failed()) return;
      // The late rank is masked now: go on with the others.
#pragma unroll
      for (int i = 0; i < kTasks; ++i)
        if (pair_at(first_row + task_at(first_task, i).row, ctas).source == late)
          open &= ~(1u << i);
    }
  }

  // A rank that refused replaces the rows that arrive by sentinels, whatever their encoding.
  __device__ void drop_rows(int first_row, int ctas) {
    for (int i = call_.warp; i < kPassRows; i += kWarps) {
      const SourceToken pair = pair_at(first_row + i, ctas);
      if (!exists(pair) || shared_.fan[i] == 0) continue;
      uint4* row = call_.received_row(pair.source, pair.token);
      const int units = units_of(static_cast<RowKind>(shared_.rows[pair.source]));
      for (int unit = call_.lane; unit < units; unit += kWarpLanes) {
        Deadline deadline(call_);
        while (!arrived(load_relaxed_system(row + unit)) && !deadline.expired(pair.source))
          continue;
        store_weak(row + unit, sentinels());
      }
    }
  }

  // Of a row and its scales, however the kernel that sent it was made.
  __device__ static int units_of(RowKind kind) {
    if (kind == RowKind::kBf16) return kHidden * 2 / kUnitBytes;
    if (kind == RowKind::kFp8) return kHidden / kUnitBytes + (kBlocks + 3) / 4;
    const int scales = kHidden / kNvfp4BlockColumns;
    return kHidden / 2 / kUnitBytes + (scales + kUnitBytes - 1) / kUnitBytes;
  }

  __device__ Segment look(const uint4* row, int part) const {
    Segment segment{};
    if (has_unit(part, call_.lane))
      segment.data = load_relaxed_system(row + part * kSegmentUnits + call_.lane);
    if constexpr (kFp8) {
      segment.scales = load_relaxed_system(row + kUnits + part);
    } else if constexpr (kNvfp4) {
      if (has_scales(part, call_.lane))
        segment.scales = load_relaxed_system(row + scale_unit(part, call_.lane));
    }
    return segment;
  }

  __device__ static bool is_here(const Segment& segment) {
    return arrived(segment.data) && (!(kFp8 || kNvfp4) || arrived(segment.scales));
  }

  __device__ void fan_out(Task task, Segment& segment) {
    const int fan = shared_.fan[task.row];
    if constexpr (kNvfp4) {
      const uint32_t words = scatter_scales(segment.scales, call_.lane);
      segment.data = restore_unit(segment.data, words, call_.lane);
      store_tiled_scales(task, fan, words & ~(kEscaped * 0x01010101u));
    }
    auto* rows = reinterpret_cast<uint4*>(args_.rows);
    if (has_unit(task.part, call_.lane)) {
#pragma unroll 1
      for (int i = 0; i < fan; ++i) {
        const Place to = shared_.places[task.row][i];
        store_weak(rows + (to.local * capacity() + to.row) * kUnits + task.part * kSegmentUnits +
                       call_.lane,
                   segment.data);
      }
    }
    if constexpr (kFp8 && kPackScales != 0) {
      store_packed_scale(task, fan, segment.scales);
    } else if constexpr (kFp8) {
      store_scales(task, fan, segment.scales);
    }
  }

  // Four lanes a copy.
  __device__ void store_scales(Task task, int fan, uint4 scales) {
    const int which = call_.lane % 4;
    const uint32_t scale = which == 0   ? scales.x
                           : which == 1 ? scales.y
                           : which == 2 ? scales.z
                                        : scales.w;
    const int block = task.part * 4 + which;
    if (block >= kBlocks) return;
#pragma unroll 1
    for (int i = call_.lane / 4; i < fan; i += 8) {
      const Place to = shared_.places[task.row][i];
      args_.scales[scale_place(to, block)] = scale;
    }
  }

  __device__ int64_t scale_place(Place to, int block) const {
    if constexpr (kTokenMajor != 0) {
      const int64_t* strides = args_.token_rows.scale_strides;
      return to.row * strides[0] + block * strides[1];
    }
    return (int64_t{to.local} * kBlocks + block) * capacity() + to.row;
  }

  __device__ void store_packed_scale(Task task, int fan, uint4 scales) {
    const int blocks = min(4, kBlocks - task.part * 4);
    uint32_t packed = ue8m0_of(scales.x);
    if (blocks > 1) packed |= ue8m0_of(scales.y) << 8;
    if (blocks > 2) packed |= ue8m0_of(scales.z) << 16;
    if (blocks > 3) packed |= ue8m0_of(scales.w) << 24;
#pragma unroll 1
    for (int i = call_.lane; i < fan; i += kWarpLanes) {
      const Place to = shared_.places[task.row][i];
      args_.scales[(int64_t{to.local} * kSegments + task.part) * capacity() + to.row] = packed;
    }
  }

  // Sixteen lanes a copy, each with the scales of 64 columns.
  __device__ void store_tiled_scales(Task task, int fan, uint32_t scales) {
    const Nvfp4ScaleLayout layout{capacity(), kHidden};
    const int column = task.part * 16 + call_.lane % 16;
    if (column >= layout.columns()) return;
#pragma unroll 1
    for (int i = call_.lane / 16; i < fan; i += 2) {
      const Place to = shared_.places[task.row][i];
      args_.scales[to.local * layout.words() + layout.word(to.row, column)] = scales;
    }
  }

  // The half is written again when peers have the acknowledgement of this call, which the next
  // kernel sends.
  __device__ void clear(uint4* row, int part) const {
    if (has_unit(part, call_.lane))
      store_weak(row + part * kSegmentUnits + call_.lane, sentinels());
    if (has_scales(part, call_.lane)) store_weak(row + scale_unit(part, call_.lane), sentinels());
  }

  const DispatchArgs& args_;
  DispatchShared& shared_;
  const DispatchCall call_;
  const int first_cta_;
  bool aborted_ = false;  // token-major: whether a rank has refused
};

}  // namespace fanfold
