// A low-latency combine over peer memory: weigh and sum at the expert side, return one row per
// (token, rank), add ranks at the source.
#pragma once

#include "device.cuh"
#include "dispatch_shape.cuh"
#include "layout.cuh"

namespace fanfold::probe {

struct CombinePolicy {
  static constexpr int kReceivers = 0;  // CTAs that only add ranks; 0: every CTA sends, then adds
  static constexpr Arrival kArrival = Arrival::kSelf;
  static constexpr Push kPush = Push::kStore;
  static constexpr int kWarps = 32;
  static constexpr OwnRank kOwnRank = OwnRank::kFirst;
  static constexpr int kReadRepeats = 1;     // 2 reads every expert row twice
  static constexpr bool kReadRows = true;    // false sends made-up rows
  static constexpr bool kRemoteRows = true;  // false sends (and awaits) the own rank's only
  static constexpr bool kTrace = false;
};

template <class G, class P>
class Combine {
  static constexpr int kSegments = G::kCombineSegments;
  static constexpr int kTopK = G::kTopK;
  static constexpr bool kSplit = P::kReceivers > 0;
  static constexpr int kSenders = kCtas - P::kReceivers;
  static constexpr int kReducers = kSplit ? P::kReceivers : kCtas;
  static constexpr int kFirstReducer = kSplit ? kSenders : 0;
  static constexpr int kRows = ceil_div(kRanks * G::kTokens, kSenders);
  static constexpr int kBatch = 4;  // expert rows asked for at once

 public:
  static constexpr int kWarps = P::kWarps;
  static constexpr int kThreads = kWarps * 32;

  struct Shared {
    uint4 rows[P::kPush == Push::kBulk ? kRows : 1][P::kPush == Push::kBulk ? G::kCombineUnits : 1];
    int32_t entries_of[kRows];
    HandleEntry entries[kRows][kTopK];
    uint32_t ranks_of[G::kTokens];
  };

 private:
  const CombineArgs<G>& args;
  Shared& shared;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  Epoch epoch{0};
  CombineBuffer<G>* mine;

  struct Pair {
    int source, token;
  };
  __device__ static Pair pair_of(int row) {
    const int q = blockIdx.x + row * kSenders;
    return {(q + row) % kRanks, q / kRanks};
  }

 public:
  __device__ Combine(const CombineArgs<G>& a, Shared& s)
      : args(a), shared(s), mine(a.peers[a.rank]) {}

  __device__ void run() {
    stamp(&Trace::start);
    CtaEpochs& epochs = args.epochs[blockIdx.x];
    load_handle();
    if (args.phases & kSend) epoch.value = epochs.send;
    if (args.phases == kReceive) epoch.value = epochs.receive;
    __syncthreads();
    stamp(&Trace::resolved);
    if (threadIdx.x == 0 && (args.phases & kSend)) epochs.send = epoch.value + 1;
    if (threadIdx.x == 0 && (args.phases & kReceive)) epochs.receive = epoch.value + 1;
    if ((args.phases & kSend) && blockIdx.x < kSenders) send();
    stamp(&Trace::sent);
    if ((args.phases & kReceive) && static_cast<int>(blockIdx.x) >= kFirstReducer) receive();
    if (P::kPush == Push::kBulk && threadIdx.x == 0) bulk_wait_source_read();
    if (P::kTrace) __syncthreads();
    stamp(&Trace::end);
  }

 private:
  __device__ void stamp(uint64_t Trace::* moment) {
    if (P::kTrace && threadIdx.x == 0) args.trace[blockIdx.x].*moment = global_nanoseconds();
  }

  __device__ bool travels(int peer) { return P::kRemoteRows || peer == args.rank; }

  __device__ void load_handle() {
    for (int i = threadIdx.x; i < kRows * 32; i += kThreads) {
      const int row = i / 32;
      const Pair pair = pair_of(row);
      const bool exists = pair.token < G::kTokens && travels(pair.source);
      const int count = exists ? args.handle->entries_of[pair.source][pair.token] : 0;
      if (i % 32 < kTopK && exists)
        shared.entries[row][i % 32] = args.handle->entries[pair.source][pair.token][i % 32];
      if (i % 32 == 0) shared.entries_of[row] = count;
    }
    for (int t = threadIdx.x; t < args.num_tokens; t += kThreads)
      shared.ranks_of[t] = args.handle->ranks_of[t];
  }

  // ---- sending: the expert side -----------------------------------------------------------------

  __device__ void send() {
    if (blockIdx.x == 0 && threadIdx.x < kRanks)
      store_relaxed_system(
          &args.peers[threadIdx.x]->present[epoch.half()][args.source_at[threadIdx.x]],
          epoch.value);
    if (P::kPush == Push::kBulk) {
      send_bulk();
    } else {
      send_stores();
    }
  }

  // The i-th row to send.
  __device__ int row_at(int i) {
    if (P::kOwnRank == OwnRank::kInTurn) return i;
    int own = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (pair_of(row).source == args.rank) own = row;
    return (i + own + (P::kOwnRank == OwnRank::kLast ? 1 : 0)) % kRows;
  }

  __device__ void send_stores() {
    for (int task = warp; task < kRows * kSegments; task += kWarps) {
      const int row = row_at(task / kSegments);
      if (shared.entries_of[row] == 0) continue;
      const Pair pair = pair_of(row);
      const int unit = task % kSegments * 32 + lane;
      CombineBuffer<G>* peer = args.peers[pair.source];
      const int place = args.source_at[pair.source];
      store_relaxed_system(&peer->rows[epoch.half()][place][pair.token][unit],
                           weighted_sum(row, unit));
      if (P::kArrival == Arrival::kSegmentFlag) {
        __syncwarp();
        if (lane == 0)
          store_release_system(&peer->flags[epoch.half()][place][pair.token][task % kSegments],
                               epoch.value);
      }
    }
  }

  // A row is put together in shared memory by all warps and leaves as one copy.
  __device__ void send_bulk() {
    for (int i = 0; i < kRows; ++i) {
      const int row = row_at(i);
      if (shared.entries_of[row] == 0) continue;
      const Pair pair = pair_of(row);
      for (int segment = warp; segment < kSegments; segment += kWarps)
        shared.rows[row][segment * 32 + lane] = weighted_sum(row, segment * 32 + lane);
      fence_shared_before_bulk();
      __syncthreads();
      if (threadIdx.x == 0) {
        const int place = args.source_at[pair.source];
        bulk_store(args.peers[pair.source]->rows[epoch.half()][place][pair.token], shared.rows[row],
                   G::kCombineUnits * 16);
        bulk_commit();
      }
    }
    if (P::kArrival != Arrival::kSelf && threadIdx.x == 0) {
      bulk_wait_written();
      for (int row = 0; row < kRows; ++row) {
        const Pair pair = pair_of(row);
        const int place = args.source_at[pair.source];
        if (shared.entries_of[row] != 0)
          store_release_system(&args.peers[pair.source]->flags[epoch.half()][place][pair.token][0],
                               epoch.value);
      }
    }
  }

  __device__ uint4 weighted_sum(int row, int unit) {
    float sum[8] = {};
    const int count = shared.entries_of[row];
    for (int repeat = 0; repeat < P::kReadRepeats; ++repeat) {
      for (int first = 0; first < count; first += kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (first + i < count) v[i] = expert_unit(shared.entries[row][first + i].slot, unit);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (first + i < count) add_weighted(sum, v[i], shared.entries[row][first + i].weight);
      }
    }
    return round_to_bf16(sum);
  }

  __device__ uint4 expert_unit(int slot, int unit) {
    if (!P::kReadRows) return {0x3F803F80u + slot, 0, 0, 0};
    return load_constant(args.y + static_cast<int64_t>(slot) * G::kCombineUnits + unit);
  }

  // Products are rounded before they are added (decision 0004).
  __device__ static void add_weighted(float (&sum)[8], uint4 v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, bf16_low(words[i])));
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, bf16_high(words[i])));
    }
  }

  __device__ static uint4 round_to_bf16(const float (&v)[8]) {
    return {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
            pack_bf16(v[6], v[7])};
  }

  // ---- receiving: the source side ---------------------------------------------------------------

  __device__ void receive() {
    const int tasks = args.num_tokens * kSegments;
    const int reducer = blockIdx.x - kFirstReducer;
    for (int i = warp; reducer + i * kReducers < tasks; i += kWarps) {
      const int task = reducer + i * kReducers;
      reduce(i, task / kSegments, task % kSegments);
    }
    if (reducer == 0 && threadIdx.x < kRanks) await_peer(threadIdx.x);
  }

  __device__ void stamp_task(int task, uint64_t TaskTrace::* moment) {
    if (P::kTrace && lane == 0) args.trace[blockIdx.x].tasks[task].*moment = global_nanoseconds();
  }

  __device__ void reduce(int task, int token, int segment) {
    const uint32_t ranks =
        P::kRemoteRows ? shared.ranks_of[token] : shared.ranks_of[token] & (1u << args.rank);
    uint4 v[kRanks];
    await_rows(token, segment, ranks, v);
    stamp_task(task, &TaskTrace::arrived);
    float sum[8] = {};
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (ranks >> r & 1) add_weighted(sum, v[r], 1.0f);
    args.out[token * G::kCombineUnits + segment * 32 + lane] = round_to_bf16(sum);
    if constexpr (P::kArrival == Arrival::kSelf) clear(token, segment, ranks);
    stamp_task(task, &TaskTrace::done);
  }

  // The half is written again two calls from now, after this kernel's end is known everywhere.
  __device__ void clear(int token, int segment, uint32_t ranks) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (ranks >> r & 1)
        store_weak(&mine->rows[epoch.half()][r][token][segment * 32 + lane], absent());
  }

  __device__ void await_rows(int token, int segment, uint32_t ranks, uint4 (&v)[kRanks]) {
    Patience patience(args.error);
    const auto load = [&](int r) {
      return load_relaxed_system(&mine->rows[epoch.half()][r][token][segment * 32 + lane]);
    };
    if constexpr (P::kArrival != Arrival::kSelf) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        if (ranks >> r & 1) await_flag(r, token, segment, patience);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (ranks >> r & 1) v[r] = load(r);
    if constexpr (P::kArrival == Arrival::kSelf) {
      bool complete;
      do {
        complete = true;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          if (!(ranks >> r & 1) || arrived(v[r])) continue;
          complete = false;
          v[r] = load(r);
        }
      } while (!complete && !patience.exhausted());
    }
  }

  __device__ void await_flag(int rank, int token, int segment, Patience& patience) {
    const int flag = P::kPush == Push::kBulk ? 0 : segment;
    while (load_acquire_system(&mine->flags[epoch.half()][rank][token][flag]) != epoch.value &&
           !patience.exhausted())
      continue;
  }

  // A rank that returns no row here is heard of too: the next use of this half relies on it.
  __device__ void await_peer(int rank) {
    Patience patience(args.error);
    while (load_relaxed_system(&mine->present[epoch.half()][rank]) != epoch.value &&
           !patience.exhausted())
      continue;
  }
};

template <class G, class P>
__global__ void __launch_bounds__(Combine<G, P>::kThreads, 1)
    combine_kernel(const __grid_constant__ CombineArgs<G> args) {
  using Kernel = Combine<G, P>;
  extern __shared__ __align__(128) unsigned char memory[];
  allow_next_kernel();
  wait_for_previous_kernel();
  Kernel(args, *reinterpret_cast<typename Kernel::Shared*>(memory)).run();
}

}  // namespace fanfold::probe
