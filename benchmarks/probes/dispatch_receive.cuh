// The receive half of dispatch: find out which rows come and where they go, and copy each to its
// experts' packed rows as it arrives.
#pragma once

#include "dispatch_shape.cuh"

namespace fanfold::probe {

template <class G, class P>
class DispatchReceive {
  using Shape = DispatchShape<G, P>;
  using Segment = typename Shape::Segment;
  using Shared = typename Shape::Shared;
  static constexpr int kSegments = Shape::kSegments;
  static constexpr int kWarps = Shape::kWarps;
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kTopK = Shape::kTopK;
  static constexpr int kRows = Shape::kRows;
  static constexpr int kTasks = Shape::kTasks;
  static constexpr int kFirstHeaderWarp = Shape::kFirstHeaderWarp;
  static constexpr int kHeaderWarps = Shape::kHeaderWarps;
  static constexpr bool kPeekEarly = P::kPeekEarly && P::kArrival == Arrival::kSelf;

  const DispatchArgs<G>& args;
  Shared& shared;
  const Epoch epoch;
  DispatchBuffer<G>* const mine;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  struct Pair {
    int source, token;
  };
  // Neighbouring CTAs take the sources of one token, so that few tokens spread over many CTAs.
  __device__ static Pair pair_of(int row) {
    const int q = blockIdx.x - P::kSenders + row * Shape::kReceivers;
    return {(q + row) % kRanks, q / kRanks};
  }

 public:
  __device__ DispatchReceive(const DispatchArgs<G>& a, Shared& s, uint32_t call)
      : args(a), shared(s), epoch{call}, mine(a.peers[a.rank]) {}

  // Warps that pushed no row look ahead while the others are held up by the link.
  __device__ void run() {
    Segment segments[kTasks];
    if (kPeekEarly) peek_all(segments, false);
    if (warp >= kFirstHeaderWarp) resolve_rows();
    if (blockIdx.x == kCtas - 1) publish_counts();
    __syncthreads();
    if (P::kTrace && threadIdx.x == 0) args.trace[blockIdx.x].resolved = global_nanoseconds();
    if (!kPeekEarly && P::kArrival == Arrival::kSelf) peek_all(segments, true);
    if constexpr (P::kArrival == Arrival::kSelf && P::kAnyOrder) {
      take_in_any_order(segments);
    } else {
      take_in_turn(segments);
    }
  }

 private:
  // ---- where rows go ----------------------------------------------------------------------------

  // Where each of this CTA's rows goes; one warp a row.
  __device__ void resolve_rows() {
    if (P::kCountsAhead) {
      read_counts();
      barrier_of(3, kHeaderWarps * 32);
    }
    for (int row = warp - kFirstHeaderWarp; row < kRows; row += kHeaderWarps) {
      const Pair pair = pair_of(row);
      if (pair.token >= G::kTokens) {
        if (lane == 0) shared.fan[row] = 0;
        continue;
      }
      resolve(row, pair);
    }
  }

  __device__ void resolve(int row, Pair pair) {
    uint64_t entry = HeaderEntry::encode(0, HeaderEntry::kElsewhere, 0, 0);
    if (lane < kTopK) entry = await_header(pair);
    const uint32_t expert = HeaderEntry::expert(entry);
    const bool travels = P::kRemoteRows || pair.source == args.rank;
    const bool here = expert != HeaderEntry::kElsewhere && travels;
    const uint32_t all = __ballot_sync(kFullWarp, here);
    if (here) {
      const int index = __popc(all & lanes_below());
      const int before = P::kCountsAhead ? shared.before[pair.source][expert]
                                         : rows_of_earlier_sources(pair.source, expert);
      const int slot = expert * G::kSlots + before + HeaderEntry::place(entry);
      shared.slots[row][index] = slot;
      args.handle->entries[pair.source][pair.token][index] = {
          slot, __uint_as_float(HeaderEntry::weight_bits(entry))};
    }
    if (lane == 0) {
      shared.fan[row] = __popc(all);
      args.handle->entries_of[pair.source][pair.token] = __popc(all);
    }
  }

  __device__ uint64_t await_header(Pair pair) {
    const uint64_t* address = &mine->headers[epoch.half()][pair.source][pair.token][lane];
    Patience patience(args.error);
    uint64_t entry = load_relaxed_system(address);
    while (HeaderEntry::tag(entry) != epoch.header_tag() && !patience.exhausted())
      entry = load_relaxed_system(address);
    return entry;
  }

  __device__ uint32_t await_count(int source, int expert, uint32_t word) {
    Patience patience(args.error);
    while (CountWord::tag(word) != epoch.count_tag() && !patience.exhausted())
      word = load_relaxed_system(&mine->counts[epoch.half()][source][expert]);
    return CountWord::count(word);
  }

  __device__ int rows_of_earlier_sources(int sources, int expert) {
    uint32_t words[kRanks];
#pragma unroll
    for (int s = 0; s < kRanks; ++s)
      if (s < sources) words[s] = load_relaxed_system(&mine->counts[epoch.half()][s][expert]);
    int rows = 0;
#pragma unroll
    for (int s = 0; s < kRanks; ++s)
      if (s < sources) rows += await_count(s, expert, words[s]);
    return rows;
  }

  __device__ void read_counts() {
    for (int e = threadIdx.x - kFirstHeaderWarp * 32; e < G::kLocalExperts;
         e += kHeaderWarps * 32) {
      uint32_t words[kRanks];
#pragma unroll
      for (int s = 0; s < kRanks; ++s)
        words[s] = load_relaxed_system(&mine->counts[epoch.half()][s][e]);
      int rows = 0;
#pragma unroll
      for (int s = 0; s < kRanks; ++s) {
        shared.before[s][e] = rows;
        rows += await_count(s, e, words[s]);
      }
    }
  }

  __device__ void publish_counts() {
    for (int e = threadIdx.x; e < G::kLocalExperts; e += kThreads)
      args.packed_counts[e] = rows_of_earlier_sources(kRanks, e);
  }

  // ---- rows -------------------------------------------------------------------------------------

  // All of a warp's segments are asked for at once.
  __device__ void peek_all(Segment (&segments)[kTasks], bool fan_known) {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = warp + i * kWarps;
      if (task >= kRows * kSegments || pair_of(task / kSegments).token >= G::kTokens) continue;
      if (!fan_known || shared.fan[task / kSegments] > 0) segments[i] = peek(task);
    }
  }

  __device__ bool is_due(int task) {
    return task < kRows * kSegments && shared.fan[task / kSegments] > 0;
  }

  __device__ void take_in_any_order(Segment (&segments)[kTasks]) {
    uint32_t open = 0;
#pragma unroll
    for (int i = 0; i < kTasks; ++i) open |= is_due(warp + i * kWarps) ? 1u << i : 0;
    Patience patience(args.error);
    while (open != 0) {
#pragma unroll
      for (int i = 0; i < kTasks; ++i) {
        if (!(open >> i & 1)) continue;
        const int task = warp + i * kWarps;
        const bool here = arrived(segments[i].data) && arrived(segments[i].scales);
        if (__all_sync(kFullWarp, here)) {
          stamp_task(task, &TaskTrace::arrived);
          fan_out(task, segments[i]);
          clear(task);
          stamp_task(task, &TaskTrace::done);
          open &= ~(1u << i);
        } else {
          segments[i] = peek(task);
        }
      }
      if (__any_sync(kFullWarp, patience.exhausted())) return;
    }
  }

  __device__ void take_in_turn(Segment (&segments)[kTasks]) {
#pragma unroll
    for (int i = 0; i < kTasks; ++i) {
      const int task = warp + i * kWarps;
      if (!is_due(task)) continue;
      await(task, segments[i]);
      fan_out(task, segments[i]);
      if (P::kArrival == Arrival::kSelf) clear(task);
    }
  }

  __device__ uint4* received(int task) {
    const Pair pair = pair_of(task / kSegments);
    return mine->rows[epoch.half()][pair.source][pair.token];
  }

  __device__ Segment peek(int task) {
    const uint4* row = received(task);
    const int segment = task % kSegments;
    return {load_relaxed_system(row + segment * 32 + lane),
            load_relaxed_system(row + G::kDispatchUnits + segment)};
  }

  __device__ void await(int task, Segment& segment) {
    if (P::kArrival != Arrival::kSelf) {
      await_flag(task);
      segment = peek(task);
      return;
    }
    Patience patience(args.error);
    while (!(arrived(segment.data) && arrived(segment.scales)) && !patience.exhausted()) {
      segment = peek(task);
    }
    __syncwarp();
  }

  __device__ void await_flag(int task) {
    const Pair pair = pair_of(task / kSegments);
    const int segment = P::kArrival == Arrival::kRowFlag ? 0 : task % kSegments;
    Patience patience(args.error);
    while (load_acquire_system(&mine->flags[epoch.half()][pair.source][pair.token][segment]) !=
               epoch.value &&
           !patience.exhausted())
      continue;
    __syncwarp();
  }

  __device__ void stamp_task(int task, uint64_t TaskTrace::* moment) {
    if (P::kTrace && lane == 0) args.trace[blockIdx.x].tasks[task].*moment = global_nanoseconds();
  }

  __device__ void fan_out(int task, const Segment& segment) {
    const int row = task / kSegments;
    const int part = task % kSegments;
    const int fan = shared.fan[row];
    for (int repeat = 0; repeat < P::kFanOuts; ++repeat) {
      for (int i = 0; i < fan; ++i)
        store_weak(args.packed + static_cast<int64_t>(shared.slots[row][i]) * G::kDispatchUnits +
                       part * 32 + lane,
                   segment.data);
      store_scales(row, part, fan, segment.scales);
    }
  }

  __device__ void store_scales(int row, int part, int fan, uint4 scales) {
    const int which = lane % 4;
    const uint32_t scale = which == 0   ? scales.x
                           : which == 1 ? scales.y
                           : which == 2 ? scales.z
                                        : scales.w;
    for (int i = lane / 4; i < fan; i += 8) {
      const int slot = shared.slots[row][i];
      const int block = part * 4 + which;
      const int64_t at =
          P::kScalesByColumn
              ? (static_cast<int64_t>(slot / G::kSlots) * G::kBlocks + block) * G::kSlots +
                    slot % G::kSlots
              : static_cast<int64_t>(slot) * G::kBlocks + block;
      args.packed_scales[at] = __uint_as_float(scale);
    }
  }

  // The half is written again two calls from now, after this kernel's end is known everywhere.
  __device__ void clear(int task) {
    uint4* row = received(task);
    const int segment = task % kSegments;
    store_weak(row + segment * 32 + lane, absent());
    if (lane == 0) store_weak(row + G::kDispatchUnits + segment, absent());
  }
};

}  // namespace fanfold::probe
