// A whole high-throughput combine with known routing, bf16: expert rows become one row per (token,
// rank), which is pushed to the token's source, where the rows of all ranks are added. Products and
// sums are rounded as decision 0004 says.
//
// A team of warps shares a ring of pieces of rows in shared memory: one warp asks for them, some add
// them, one sends sums on. All teams of all CTAs draw from one list of jobs, in which a batch is
// folded some time after it was sent, so that nobody has to decide how many SMs send and how many
// fold. The pieces of a row, some columns each, have nothing to do with each other.
#pragma once

#include "ht_call.cuh"

namespace fanfold::probe::ht {

constexpr int kHidden = 7168;
constexpr int kRowBytes = kHidden * 2;

// One row on its way into a sum. A job (the rows of a batch of tokens that go to one rank, or that
// are folded) is a list of entries, sums one after the other; it ends with row -1 or is full.
struct Entry {
  static constexpr int kFirst = 1, kLast = 2;  // of its sum
  static constexpr int kFinal = 4;             // the last of the job
  static constexpr int kRankShift = 4;         // folded: of the rank that returned the row
  int32_t row;  // of y; of the receive buffer when folded, unless it is an own row token-major
  float weight;
  int32_t token;
  int32_t flags;
};
constexpr int kSendEntries = kBatch * kChoices;
constexpr int kFoldEntries = kBatch * kRanks;
static_assert(kFoldEntries <= 32 && kSendEntries % 32 == 0);

struct CombineArgs {
  const uint8_t* y;         // token-major a row per arrival, or expert-major
  uint8_t* out;             // [kTokens] rows
  uint8_t* buffer[kRanks];  // every rank's receive buffer, [kRanks][kTokens] rows
  Signals* signals[kRanks];
  Progress* progress;
  const Entry* sent;    // [kBatches][kRanks][kSendEntries]
  const Entry* folded;  // [kBatches][kFoldEntries]
  int rank;
  int lag;  // batches that are sent before the first is folded, if every warp does both
  // Of the split kernel: how many CTAs push, and whether their other warps fold at the same time.
  int pushing_ctas;
  bool folds_meanwhile;
  uint32_t* error;
};

// What a kernel leaves out, to see what it costs; its results are wrong then.
enum class Without { kNothing, kLoads, kAdding, kStores, kSignals };

template <int Teams, int Slots, int Adders, int Pieces, Without W = Without::kNothing>
struct CombineShape {
  static constexpr Without kWithout = W;
  static constexpr int kPieces = Pieces;
  static constexpr int kPieceBytes = kRowBytes / Pieces;
  static constexpr int kTeams = Teams;
  static constexpr int kSlots = Slots;    // pieces in a team's ring
  static constexpr int kAdders = Adders;  // warps of a team that add
  static constexpr int kTeamWarps = Adders + 2;
  static constexpr int kThreads = Teams * kTeamWarps * 32;
  static constexpr int kLaneUnits = kPieceBytes / 16 / 32 / Adders;
  static_assert(kLaneUnits * 16 * 32 * Adders == kPieceBytes && Pieces <= kMaxPieces);
};

// What becomes of the row in a slot.
struct Task {
  enum Kind : int16_t { kCopy, kAdd, kAddWeighted, kEnd };
  Kind kind;
  bool first, last;  // row of a sum
  float weight;
  uint8_t* to;          // of the sum
  uint32_t* publishes;  // the signal to raise when the sum and all before it are written, or null
};

template <class S>
struct TeamShared {
  alignas(128) uint8_t rows[S::kSlots][S::kPieceBytes];
  ArrivalBarrier full[S::kSlots];   // the row has arrived
  ArrivalBarrier added[S::kSlots];  // all adders are done with it
  ArrivalBarrier empty[S::kSlots];
  Task tasks[S::kSlots];
};

// Names the uses of a ring's slots in turn.
template <int Slots>
struct Turn {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++slot == Slots) slot = 0, parity ^= 1;
  }
};

// ---- the warp that asks for rows ---------------------------------------------------------------

template <class S, bool ExpertMajor>
class CombineLoader : CallWarp {
  // Token-major, a rank's own rows need no sending.
  static constexpr int kDestinations = ExpertMajor ? kRanks : kRanks - 1;
  static constexpr int kJobsPerStep = kDestinations + 1;
  // Each step sends a batch to every rank and folds the one that was sent `lag` steps ago.
  struct Job {
    bool sends;
    int batch, to, piece;
  };

 public:
  __device__ CombineLoader(const CombineArgs& a, TeamShared<S>& s)
      : CallWarp(a.signals, a.progress, a.rank, a.error), args(a), shared(s) {}

  __device__ void run() {
    await_ready();
    next_ticket = draw(&args.progress->sent);
    fetch();
    while (ticket < (kBatches + args.lag) * kJobsPerStep * S::kPieces) run_job(job_of(ticket));
    if (lane == 0) {
      Task& task = claim();
      task.kind = Task::kEnd;
      arrive(&shared.full[turn.slot]);
    }
  }

 private:
  __device__ Job job_of(int t) const {
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
    if (!job.sends) await_rows(entry, job);
    for (int more = 32;; more += 32) {
      const int rows = __popc(__ballot_sync(kFullWarp, entry.row >= 0));
      ask(job, entry, rows);
      if (!job.sends || rows < 32 || more == kSendEntries) return;
      entry = entries_of(job)[more + lane];
    }
  }

  // Every lane knows what is to be done with its row; they take slots one after the other.
  __device__ void ask(const Job& job, const Entry& entry, int rows) {
    const int column = job.piece * S::kPieceBytes;
    const uint8_t* from =
        (job.sends ? args.y + size_t(entry.row) * kRowBytes : folded_row(entry)) + column;
    Task task;
    task.kind = !job.sends ? Task::kAdd : ExpertMajor ? Task::kAddWeighted : Task::kCopy;
    task.first = entry.flags & Entry::kFirst;
    task.last = entry.flags & Entry::kLast;
    task.weight = entry.weight;
    task.to = column + (job.sends ? args.buffer[job.to] +
                                        (size_t(args.rank) * kTokens + entry.token) * kRowBytes
                                  : args.out + size_t(entry.token) * kRowBytes);
    const bool publishes = job.sends && entry.flags & Entry::kFinal;
    task.publishes =
        publishes ? &args.signals[job.to]->arrived[args.rank][signal_of(job)] : nullptr;
    for (int i = 0; i < rows; ++i) {
      if (lane == i) {
        claim() = task;
        if constexpr (S::kWithout == Without::kLoads) {
          arrive(&shared.full[turn.slot]);
        } else {
          arrive_expecting(&shared.full[turn.slot], S::kPieceBytes);
          bulk_load(shared.rows[turn.slot], from, S::kPieceBytes, &shared.full[turn.slot]);
        }
      }
      turn.next();
      __syncwarp();
    }
  }

  __device__ const uint8_t* folded_row(const Entry& entry) const {
    const int rank = entry.flags >> Entry::kRankShift;
    const bool own = !ExpertMajor && rank == args.rank;
    return (own ? args.y : args.buffer[args.rank]) + size_t(entry.row) * kRowBytes;
  }

  __device__ static int signal_of(const Job& job) { return job.batch * S::kPieces + job.piece; }

  __device__ void await_rows(const Entry& entry, const Job& job) {
    uint32_t ranks = entry.row >= 0 ? 1u << (entry.flags >> Entry::kRankShift) : 0;
    ranks = __reduce_or_sync(kFullWarp, ranks);
    if (S::kWithout != Without::kSignals && lane < kRanks && (ranks >> lane & 1) &&
        (ExpertMajor || lane != args.rank))
      await_batch(lane, signal_of(job));
    __syncwarp();
    fence_global_and_bulk();
  }

  // The next slot's task, once the slot is free.
  __device__ Task& claim() {
    await_full(&shared.empty[turn.slot], turn.parity ^ 1);
    return shared.tasks[turn.slot];
  }

  // Asks for the entries of the next job, and for the ticket of the one after it.
  __device__ void fetch() {
    ticket = __shfl_sync(kFullWarp, next_ticket, 0);
    next_ticket = draw(&args.progress->sent);
    const Job job = job_of(ticket);
    if (exists(job)) next_entry = entries_of(job)[lane];
  }

  __device__ const Entry* entries_of(const Job& job) const {
    return job.sends ? args.sent + (job.batch * kRanks + job.to) * kSendEntries
                     : args.folded + job.batch * kFoldEntries;
  }

  const CombineArgs& args;
  TeamShared<S>& shared;
  Turn<S::kSlots> turn;
  int ticket, next_ticket;
  Entry next_entry;
};

// ---- adding ------------------------------------------------------------------------------------

// sum = (First ? 0 : sum) + weight * v. Where a sum begins is a branch of its own: selecting 0 in
// each place would cost as much as the adding.
template <bool Weighted, bool First, int Units>
__device__ __forceinline__ void add_units(const uint4 (&v)[Units], float weight,
                                          float (&sum)[Units * 8]) {
#pragma unroll
  for (int i = 0; i < Units; ++i) {
    const uint32_t pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float& low = sum[i * 8 + p * 2];
      float& high = sum[i * 8 + p * 2 + 1];
      const float a = Weighted ? __fmul_rn(weight, bf16_low(pairs[p])) : bf16_low(pairs[p]);
      const float b = Weighted ? __fmul_rn(weight, bf16_high(pairs[p])) : bf16_high(pairs[p]);
      low = __fadd_rn(First ? 0.0f : low, a);
      high = __fadd_rn(First ? 0.0f : high, b);
    }
  }
}

template <bool Weighted, int Units>
__device__ __forceinline__ void add_units(const uint4 (&v)[Units], float weight, bool first,
                                          float (&sum)[Units * 8]) {
  if (first)
    add_units<Weighted, true>(v, weight, sum);
  else
    add_units<Weighted, false>(v, weight, sum);
}

// ---- a warp that adds its columns of every row -------------------------------------------------

template <class S>
class CombineAdder {
 public:
  __device__ CombineAdder(TeamShared<S>& s, int number, uint32_t* error)
      : shared(s), first_unit(number * S::kLaneUnits * 32 + threadIdx.x % 32), error(error) {}

  __device__ void run() {
    for (Turn<S::kSlots> turn;; turn.next()) {
      if (!wait_for(&shared.full[turn.slot], turn.parity, error)) return;
      const Task& task = shared.tasks[turn.slot];
      auto* row = reinterpret_cast<uint4*>(shared.rows[turn.slot]) + first_unit;
      const bool end = task.kind == Task::kEnd;
      constexpr bool kAdds = S::kWithout != Without::kAdding;
      if (kAdds && task.kind == Task::kAdd) add<false>(row, task);
      if (kAdds && task.kind == Task::kAddWeighted) add<true>(row, task);
      if (kAdds && task.last && (task.kind == Task::kAdd || task.kind == Task::kAddWeighted)) {
        write_sum(row);
        fence_shared_before_bulk();
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(&shared.added[turn.slot]);
      if (end) return;
    }
  }

 private:
  template <bool Weighted>
  __device__ void add(const uint4* row, const Task& task) {
    uint4 v[S::kLaneUnits];
#pragma unroll
    for (int i = 0; i < S::kLaneUnits; ++i) v[i] = row[i * 32];
    add_units<Weighted>(v, task.weight, task.first, sum);
  }

  // Over the last row, of which each lane has read just what it writes now.
  __device__ void write_sum(uint4* row) {
#pragma unroll
    for (int i = 0; i < S::kLaneUnits; ++i) {
      const float* s = sum + i * 8;
      row[i * 32] = {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
                     pack_bf16(s[6], s[7])};
    }
  }

  TeamShared<S>& shared;
  const int first_unit;
  uint32_t* error;
  float sum[S::kLaneUnits * 8];
};

// ---- the warp that sends sums on ---------------------------------------------------------------

// One thread. The store of a sum, its slot and its signal stay pending until the next sum comes, or
// nothing does.
template <class S>
class CombineStorer : CallWarp {
 public:
  __device__ CombineStorer(const CombineArgs& a, TeamShared<S>& s)
      : CallWarp(a.signals, a.progress, a.rank, a.error), shared(s) {}

  __device__ void run() {
    if (lane == 0) store_all();
    if (finish(gridDim.x * S::kTeams)) announce_ready(call + 1);
  }

 private:
  static constexpr int kPending = 4;  // stores that may be on their way
  static constexpr int64_t kIdleCycles = 4000;

  __device__ void store_all() {
    for (Turn<S::kSlots> turn;; turn.next()) {
      if (!await_added(turn)) return;
      const Task& task = shared.tasks[turn.slot];
      if (task.kind == Task::kEnd) break;
      if (task.last) {
        store(task, turn.slot);
      } else {
        arrive(&shared.empty[turn.slot]);
      }
    }
    settle();
  }

  // Slots are freed at once, as the loader may need them to go on. Signals wait longer, since to see
  // a store written takes a round trip on the link, during which nothing else is done here.
  __device__ bool await_added(const Turn<S::kSlots>& turn) {
    if (phase_is_over(&shared.added[turn.slot], turn.parity)) return true;
    bulk_wait_source_read();
    release(0);
    const int64_t begin = clock64();
    while (!phase_is_over(&shared.added[turn.slot], turn.parity))
      if (clock64() - begin > kIdleCycles) {
        settle();
        return await_full(&shared.added[turn.slot], turn.parity);
      }
    return true;
  }

  __device__ void store(const Task& task, int slot) {
    if (S::kWithout != Without::kStores) bulk_store(task.to, shared.rows[slot], S::kPieceBytes);
    bulk_commit();
    signals[stores % kPending] = task.publishes;
    slots[stores % kPending] = slot;
    ++stores;
    bulk_wait_source_read_but<1>();
    release(1);
    bulk_wait_written_but<kPending - 1>();
    publish(kPending - 1);
  }

  // Nothing is pending any more.
  __device__ void settle() {
    bulk_wait_source_read();
    release(0);
    bulk_wait_written();
    publish(0);
  }

  // Frees the slots of all but the last `pending` stores.
  __device__ void release(uint32_t pending) {
    for (; released + pending < stores; ++released)
      arrive(&shared.empty[slots[released % kPending]]);
  }

  __device__ void publish(uint32_t pending) {
    for (; published + pending < stores; ++published)
      if (signals[published % kPending]) store_release_system(signals[published % kPending], call);
  }

  TeamShared<S>& shared;
  uint32_t stores = 0, released = 0, published = 0;
  uint32_t* signals[kPending];
  int slots[kPending];
};

// ---- the kernel --------------------------------------------------------------------------------

template <class S, bool ExpertMajor>
__global__ void __launch_bounds__(S::kThreads, 1)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / 32;
  const int team = warp / S::kTeamWarps, number = warp % S::kTeamWarps;
  auto& shared = reinterpret_cast<TeamShared<S>*>(memory)[team];
  if (number == 0 && threadIdx.x % 32 == 0)
    for (int i = 0; i < S::kSlots; ++i) {
      init(&shared.full[i], 1);
      init(&shared.added[i], S::kAdders);
      init(&shared.empty[i], 1);
    }
  fence_barrier_init();
  __syncthreads();
  if (number == 0)
    CombineLoader<S, ExpertMajor>(args, shared).run();
  else if (number == 1)
    CombineStorer<S>(args, shared).run();
  else
    CombineAdder<S>(shared, number - 2, args.error).run();
}

}  // namespace fanfold::probe::ht
