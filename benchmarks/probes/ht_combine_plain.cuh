// The same combine without shared memory: warps are independent of each other, load rows into
// registers, add, and store sums, 16 bytes a lane. Jobs are as in ht_combine.cuh. Token-major, some
// warps of some CTAs may first push all rows by bulk copies while others fold.
#pragma once

#include "ht_combine.cuh"

namespace fanfold::probe::ht {

template <int Warps, int Pieces, int Buffers>
struct PlainShape {
  static constexpr int kBuffers = Buffers;  // pieces in registers: one is added, the others come
  static constexpr int kWarps = Warps;
  static constexpr int kPieces = Pieces;
  static constexpr int kPieceBytes = kRowBytes / Pieces;
  static constexpr int kLaneUnits = kPieceBytes / 16 / 32;
  static_assert(kLaneUnits * 16 * 32 == kPieceBytes && Pieces <= kMaxPieces);
};

template <class S, bool ExpertMajor>
class PlainCombineWarp : CallWarp {
  static constexpr int kDestinations = ExpertMajor ? kRanks : kRanks - 1;
  static constexpr int kJobsPerStep = kDestinations + 1;

  struct Job {
    bool sends;
    int batch, to, piece;
  };

 public:
  __device__ explicit PlainCombineWarp(const CombineArgs& a)
      : CallWarp(a.signals, a.progress, a.rank, a.error), args(a) {}

  __device__ void run() {
    await_ready();
    next_ticket = draw(&args.progress->sent);
    fetch();
    while (ticket < (kBatches + args.lag) * kJobsPerStep * S::kPieces) run_job(job_of(ticket));
    if (finish(gridDim.x * S::kWarps)) announce_ready(call + 1);
  }

  // Token-major, when other warps send: the batches' pieces in turn.
  __device__ void fold_only() {
    only_folds = true;
    next_ticket = draw(&args.progress->received);
    fetch();
    while (ticket < kBatches * S::kPieces) run_job(job_of(ticket));
    if (finish(gridDim.x * S::kWarps)) announce_ready(call + 1);
  }

 private:
  __device__ Job job_of(int t) const {
    if (only_folds) return {false, t / S::kPieces, args.rank, t % S::kPieces};
    const int piece = t % S::kPieces;
    const int step = t / S::kPieces / kJobsPerStep, part = t / S::kPieces % kJobsPerStep;
    if (part < kDestinations) return {true, step, (args.rank + 1 + part) % kRanks, piece};
    return {false, step - args.lag, args.rank, piece};
  }

  __device__ static bool exists(const Job& job) { return job.batch >= 0 && job.batch < kBatches; }

  __device__ void run_job(const Job& job) {
    Entry entry = next_entry;
    fetch();
    if (!exists(job)) return;
    const int signal = only_folds ? job.batch : job.batch * S::kPieces + job.piece;
    if (!job.sends) await_rows(entry, signal);
    bool any = false;
    for (int more = 32;; more += 32) {
      const int rows = __popc(__ballot_sync(kFullWarp, entry.row >= 0));
      any |= rows > 0;
      add_rows(job, entry, rows);
      if (!job.sends || rows < 32 || more == kSendEntries) break;
      entry = entries_of(job)[more + lane];
    }
    __syncwarp();
    if (job.sends && any && lane == 0) publish_batch(job.to, signal);
  }

  __device__ void await_rows(const Entry& entry, int signal) {
    uint32_t ranks = entry.row >= 0 ? 1u << (entry.flags >> Entry::kRankShift) : 0;
    ranks = __reduce_or_sync(kFullWarp, ranks);
    if (lane < kRanks && (ranks >> lane & 1) && (ExpertMajor || lane != args.rank))
      await_batch(lane, signal);
    __syncwarp();
  }

  __device__ void add_rows(const Job& job, const Entry& entry, int rows) {
    const size_t column = job.piece * S::kPieceBytes + lane * 16;
    const bool own = !job.sends && !ExpertMajor && entry.flags >> Entry::kRankShift == args.rank;
    const uint8_t* from =
        (job.sends || own ? args.y : args.buffer[args.rank]) + size_t(entry.row) * kRowBytes;
    uint8_t* to =
        job.sends ? args.buffer[job.to] + (size_t(args.rank) * kTokens + entry.token) * kRowBytes
                  : args.out + size_t(entry.token) * kRowBytes;
    uint4 v[S::kBuffers][S::kLaneUnits];
#pragma unroll
    for (int b = 0; b + 1 < S::kBuffers; ++b)
      if (b < rows) load(v[b], shuffle(from, b) + column);
    for (int begin = 0; begin < rows; begin += S::kBuffers) {
#pragma unroll
      for (int b = 0; b < S::kBuffers; ++b) {
        const int r = begin + b;
        if (r >= rows) break;
        const int ahead = r + S::kBuffers - 1;
        if (ahead < rows)
          load(v[(b + S::kBuffers - 1) % S::kBuffers], shuffle(from, ahead) + column);
        const int flags = __shfl_sync(kFullWarp, entry.flags, r);
        const float weight = __shfl_sync(kFullWarp, entry.weight, r);
        if (job.sends && ExpertMajor)
          add_units<true>(v[b], weight, flags & Entry::kFirst, sum);
        else
          add_units<false>(v[b], weight, flags & Entry::kFirst, sum);
        if (flags & Entry::kLast) store(shuffle(to, r) + column);
      }
    }
  }

  __device__ static void load(uint4 (&v)[S::kLaneUnits], const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < S::kLaneUnits; ++i)
      v[i] = load_once(reinterpret_cast<const uint4*>(from) + i * 32);
  }

  __device__ void store(uint8_t* to) {
#pragma unroll
    for (int i = 0; i < S::kLaneUnits; ++i) {
      const float* s = sum + i * 8;
      store_weak(reinterpret_cast<uint4*>(to) + i * 32,
                 {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                  pack_bf16(s[6], s[7])});
    }
  }

  template <class T>
  __device__ static T* shuffle(T* pointer, int from_lane) {
    return reinterpret_cast<T*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(pointer), from_lane));
  }

  // Asks for the entries of the next job, and for the ticket of the one after it.
  __device__ void fetch() {
    ticket = __shfl_sync(kFullWarp, next_ticket, 0);
    next_ticket = draw(only_folds ? &args.progress->received : &args.progress->sent);
    const Job job = job_of(ticket);
    if (exists(job)) next_entry = entries_of(job)[lane];
  }

  __device__ const Entry* entries_of(const Job& job) const {
    return job.sends ? args.sent + (job.batch * kRanks + job.to) * kSendEntries
                     : args.folded + job.batch * kFoldEntries;
  }

  const CombineArgs& args;
  bool only_folds = false;
  int ticket, next_ticket;
  Entry next_entry;
  float sum[S::kLaneUnits * 8];
};

// ---- token-major rows are only moved: a ring of bulk copies ------------------------------------
// The threads that push hand their signals to another warp of their CTA, which raises them.

constexpr int kPushWarps = 4;
constexpr int kPushSlots = 3;
constexpr int kUnwritten = 6;  // rows of a warp that may be on their way

class PushWarp : CallWarp {
 public:
  struct Shared {
    alignas(128) uint8_t rows[kPushSlots][kRowBytes];
    ArrivalBarrier full[kPushSlots];
  };

  __device__ PushWarp(const CombineArgs& a, Shared& s, SignalQueue& queue)
      : CallWarp(a.signals, a.progress, a.rank, a.error), args(a), shared(s),
        hander(queue, a.error) {
    if (lane == 0)
      for (ArrivalBarrier& barrier : shared.full) init(&barrier, 1);
    fence_barrier_init();
    __syncwarp();
  }

  __device__ void run() {
    await_ready();
    next_ticket = draw(&args.progress->sent);
    fetch();
    while (ticket < kBatches * (kRanks - 1)) {
      const int to = to_of(ticket), batch = ticket / (kRanks - 1);
      const Entry entry = next_entry;
      fetch();
      push(entry, to, batch);
    }
    if (lane == 0) {
      while (stored != asked) store();
      bulk_wait_written();
      publish(0);
      hander.hand(nullptr);
    }
    __syncwarp();
  }

 private:
  __device__ int to_of(int t) const { return (args.rank + 1 + t % (kRanks - 1)) % kRanks; }

  // Each lane knows one row, as a batch has at most 8 token-major.
  __device__ void push(const Entry& entry, int to, int batch) {
    const int rows = __popc(__ballot_sync(kFullWarp, entry.row >= 0));
    for (int i = 0; i < rows; ++i) {
      const int row = __shfl_sync(kFullWarp, entry.row, i);
      const int token = __shfl_sync(kFullWarp, entry.token, i);
      if (lane != 0) continue;
      if (asked - stored == kPushSlots - 1) store();
      const int slot = asked % kPushSlots;
      targets[slot] = args.buffer[to] + (size_t(args.rank) * kTokens + token) * kRowBytes;
      signals[asked % kSignals] =
          i + 1 == rows ? &args.signals[to]->arrived[args.rank][batch] : nullptr;
      arrive_expecting(&shared.full[slot], kRowBytes);
      bulk_load(shared.rows[slot], args.y + size_t(row) * kRowBytes, kRowBytes, &shared.full[slot]);
      ++asked;
    }
    __syncwarp();
  }

  // The slot of the row before is free when this returns.
  __device__ void store() {
    const int slot = stored % kPushSlots;
    await_full(&shared.full[slot], stored / kPushSlots & 1);
    bulk_store(targets[slot], shared.rows[slot], kRowBytes);
    bulk_commit();
    ++stored;
    bulk_wait_source_read_but<1>();
    bulk_wait_written_but<kUnwritten>();
    publish(kUnwritten);
  }

  __device__ void publish(uint32_t unwritten) {
    for (; published + unwritten < stored; ++published)
      if (signals[published % kSignals]) hander.hand(signals[published % kSignals]);
  }

  __device__ void fetch() {
    ticket = __shfl_sync(kFullWarp, next_ticket, 0);
    next_ticket = draw(&args.progress->sent);
    if (ticket < kBatches * (kRanks - 1))
      next_entry =
          args.sent[(ticket / (kRanks - 1) * kRanks + to_of(ticket)) * kSendEntries + lane];
  }

  static constexpr int kSignals = 16;  // more than can be unwritten or unstored
  const CombineArgs& args;
  Shared& shared;
  SignalHander hander;
  int ticket, next_ticket;
  Entry next_entry;
  uint32_t asked = 0, stored = 0, published = 0;
  uint8_t* targets[kPushSlots];
  uint32_t* signals[kSignals];
};

template <class S, bool ExpertMajor>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    plain_combine_kernel(const __grid_constant__ CombineArgs args) {
  PlainCombineWarp<S, ExpertMajor>(args).run();
}

struct SplitShared {
  PushWarp::Shared rings[kPushWarps];
  SignalQueue queues[kPushWarps];
};

// Some CTAs push first; all fold in the end.
template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    split_combine_kernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<SplitShared*>(memory);
  const int warp = threadIdx.x / 32;
  if (static_cast<int>(blockIdx.x) < args.pushing_ctas) {
    if (threadIdx.x < kPushWarps) shared.queues[threadIdx.x] = {};
    __syncthreads();
    if (warp < kPushWarps)
      PushWarp(args, shared.rings[warp], shared.queues[warp]).run();
    else if (warp == kPushWarps)
      raise_signals(shared.queues, args.progress->calls + 1, args.error);
    if (!args.folds_meanwhile) __syncthreads();
  }
  PlainCombineWarp<S, false>(args).fold_only();
}

}  // namespace fanfold::probe::ht
