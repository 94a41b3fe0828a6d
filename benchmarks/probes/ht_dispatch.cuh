// A whole high-throughput dispatch with known routing: thousands of rows and their scales from the
// ranks' inputs to their final places, by few SMs. Warps are independent of each other: each draws
// batches of tokens and moves their rows through its own ring of shared memory by bulk copies.
#pragma once

#include "ht_call.cuh"

namespace fanfold::probe::ht {

enum class Method {
  kInPlace,        // the source writes each row to its (first) final place at the receiver
  kReceiveBuffer,  // the source writes to a buffer of the receiver, which copies to final places
  kPull            // the source stages each row once in its own memory, whence receivers fetch it
};

constexpr int kWarps = 4;

// Where one token's row goes, as its source sees it and as a receiver does; -1 is nowhere.
struct Record {
  int32_t at_rank[kRanks];    // source: the first place at each other rank
  int32_t at_home[kChoices];  // places in this rank's own results
};
constexpr int kRecordWords = sizeof(Record) / 4;
constexpr int kWordsPerLane = kBatch * kRecordWords / 32;
static_assert(kBatch * kRecordWords % 32 == 0);

template <int RowBytes, int ScaleBytes, int Ahead, int Behind>
struct Rows {
  static constexpr int kRowBytes = RowBytes;
  static constexpr int kScaleBytes = ScaleBytes;
  static constexpr int kBytes = RowBytes + ScaleBytes;
  static constexpr int kStride = round_up(kBytes, 128);  // whole lines on the wire
  static constexpr int kAhead = Ahead;                   // rows that a warp loads in front
  static constexpr int kBehind = Behind;                 // rows that may still be on their way out
};

struct DispatchArgs {
  const uint8_t* x;       // [kTokens][row bytes]
  const uint8_t* scales;  // [kTokens][scale bytes]
  uint8_t* out[kRanks];   // every rank's results; those of others are written by kInPlace only
  uint8_t* out_scales[kRanks];
  uint8_t* buffer[kRanks];  // every rank's receive buffer [kRanks][kTokens], or stage [kTokens]
  Signals* signals[kRanks];
  Progress* progress;
  const Record* sent;      // [kTokens]
  const Record* received;  // [kBatches][kRanks][kBatch]
  int rank;
  Roles roles;
  uint32_t* error;
};

template <class R, Method M, bool ExpertMajor>
class DispatchWarp : CallWarp {
  static constexpr int kSlots = R::kAhead + R::kBehind;
  // In place, a receiver only makes the second and further copies of a row.
  static constexpr int kFirstCopy = M == Method::kInPlace ? 1 : 0;

 public:
  struct Shared {
    alignas(128) uint8_t rows[kSlots][R::kStride];
    ArrivalBarrier full[kSlots];
    Record records[kSlots];
    int tokens[kSlots];
    int publishes[kSlots];  // the batch whose last row this is, or -1
    Record batch[kBatch];
  };

  __device__ DispatchWarp(const DispatchArgs& a, Shared& s)
      : CallWarp(a.signals, a.progress, a.rank, a.error), args(a), shared(s) {
    if (lane == 0)
      for (int i = 0; i < kSlots; ++i) init(&shared.full[i], 1);
    fence_barrier_init();
    __syncwarp();
  }

  __device__ void run() {
    if (M == Method::kInPlace && blockIdx.x == 0 && threadIdx.x < 32) announce_ready(call);
    if (args.roles.sends()) {
      await_ready();
      move<true>();
    }
    if (M != Method::kInPlace || ExpertMajor) move<false>();
    if (M == Method::kInPlace) await_batches();
    if (finish(gridDim.x * kWarps) && M != Method::kInPlace) announce_ready(call + 1);
  }

 private:
  __device__ void await_batches() {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kRanks * kBatches;
         i += gridDim.x * blockDim.x)
      if (i / kBatches != args.rank) await_batch(i / kBatches, i % kBatches);
  }

  // ---- a ring of rows ---------------------------------------------------------------------------
  // `asked` and `stored` count rows since the launch and thereby name slots and phases.

  template <bool Sending>
  __device__ void move() {
    const uint32_t first = asked;
    remaining = 0;
    ticket = draw(tickets<Sending>());
    fetch<Sending>();
    bool more = true;
    while (more && asked - first < R::kAhead) more = ask<Sending>();
    for (; stored != asked; ++stored) {
      await_full(&shared.full[stored % kSlots], stored / kSlots & 1);
      store<Sending>(stored % kSlots);
      bulk_commit();
      Sending ? bulk_wait_written_but<R::kBehind>() : bulk_wait_source_read_but<R::kBehind>();
      __syncwarp();
      if (Sending && stored - first >= R::kBehind) publish((stored - R::kBehind) % kSlots);
      if (more) more = ask<Sending>();
    }
    bulk_wait_written();
    __syncwarp();
    const uint32_t rest = min(stored - first, static_cast<uint32_t>(R::kBehind));
    for (uint32_t i = stored - rest; Sending && i != stored; ++i) publish(i % kSlots);
  }

  // The next row is loaded, or there is none.
  template <bool Sending>
  __device__ bool ask() {
    while (remaining == 0)
      if (!open_batch<Sending>()) return false;
    const int j = __ffs(remaining) - 1;
    remaining &= remaining - 1;
    const int slot = asked++ % kSlots;
    if (lane < kRecordWords)
      reinterpret_cast<int32_t*>(&shared.records[slot])[lane] =
          reinterpret_cast<int32_t*>(&shared.batch[j])[lane];
    if (lane == 0) {
      const int token = batch * kBatch + j;
      shared.tokens[slot] = token;
      shared.publishes[slot] = remaining == 0 ? batch : -1;
      load<Sending>(slot, token, shared.batch[j].at_home[0]);
    }
    __syncwarp();
    return true;
  }

  template <bool Sending>
  __device__ bool open_batch() {
    constexpr int kSources = Sending ? 1 : kRanks - 1;
    if (ticket >= kBatches * kSources) return false;
    batch = ticket / kSources;
    source = source_of<Sending>(ticket);
    __syncwarp();
    for (int i = 0; i < kWordsPerLane; ++i)
      reinterpret_cast<int32_t*>(shared.batch)[i * 32 + lane] = words[i];
    __syncwarp();
    ticket = draw(tickets<Sending>());
    remaining = __ballot_sync(kFullWarp, lane < kBatch && wanted<Sending>(shared.batch[lane]));
    if (remaining == 0 && Sending) publish_to_all(batch);
    if (remaining != 0 && !Sending) {
      await_batch(source, batch);
      fence_global_and_bulk();
    }
    fetch<Sending>();
    return true;
  }

  // A receiver's tickets go through the other ranks, its neighbour's rows first.
  template <bool Sending>
  __device__ int source_of(int t) const {
    return Sending ? args.rank : (args.rank + 1 + t % (kRanks - 1)) % kRanks;
  }

  template <bool Sending>
  __device__ static bool wanted(const Record& r) {
    bool any = r.at_home[Sending ? 0 : kFirstCopy] >= 0;
    for (int p = 0; Sending && p < kRanks; ++p) any |= r.at_rank[p] >= 0;
    return any;
  }

  template <bool Sending>
  __device__ uint32_t* tickets() {
    return Sending ? &args.progress->sent : &args.progress->received;
  }

  // The records of the next batch are asked for while the rows of this one are.
  template <bool Sending>
  __device__ void fetch() {
    constexpr int kSources = Sending ? 1 : kRanks - 1;
    ticket = __shfl_sync(kFullWarp, ticket, 0);
    if (ticket >= kBatches * kSources) return;
    const int row = Sending ? ticket : ticket / kSources * kRanks + source_of<Sending>(ticket);
    const Record* records = (Sending ? args.sent : args.received) + row * kBatch;
    for (int i = 0; i < kWordsPerLane; ++i)
      words[i] = reinterpret_cast<const int32_t*>(records)[i * 32 + lane];
  }

  // ---- a row in and out -------------------------------------------------------------------------

  template <bool Sending>
  __device__ void load(int slot, int token, int first_place) {
    ArrivalBarrier* full = &shared.full[slot];
    uint8_t* to = shared.rows[slot];
    if constexpr (Sending)
      return load_parts(to, args.x, args.scales, token, full);
    else if constexpr (M == Method::kInPlace)
      return load_parts(to, args.out[args.rank], args.out_scales[args.rank], first_place, full);
    const uint8_t* from = M == Method::kPull ? args.buffer[source] + size_t(token) * R::kStride
                                             : args.buffer[args.rank] +
                                                   (size_t(source) * kTokens + token) * R::kStride;
    arrive_expecting(full, R::kStride);
    bulk_load(to, from, R::kStride, full);
  }

  __device__ static void load_parts(uint8_t* to, const uint8_t* rows, const uint8_t* scales,
                                    int row, ArrivalBarrier* full) {
    arrive_expecting(full, R::kBytes);
    bulk_load(to, rows + size_t(row) * R::kRowBytes, R::kRowBytes, full);
    if constexpr (R::kScaleBytes > 0)
      bulk_load(to + R::kRowBytes, scales + size_t(row) * R::kScaleBytes, R::kScaleBytes, full);
  }

  // Each lane sees to one copy.
  template <bool Sending>
  __device__ void store(int slot) {
    const uint8_t* from = shared.rows[slot];
    const Record& record = shared.records[slot];
    if (lane < kChoices && record.at_home[lane] >= 0 && (Sending || lane >= kFirstCopy))
      store_parts(from, args.rank, record.at_home[lane]);
    if constexpr (Sending) {
      const int token = shared.tokens[slot];
      const bool goes = lane < kRanks && record.at_rank[lane & (kRanks - 1)] >= 0;
      if constexpr (M == Method::kPull) {
        if (__any_sync(kFullWarp, goes) && lane == kChoices)
          bulk_store(args.buffer[args.rank] + size_t(token) * R::kStride, from, R::kStride);
      } else if (goes && M == Method::kInPlace) {
        store_parts(from, lane, record.at_rank[lane]);
      } else if (goes) {
        bulk_store(args.buffer[lane] + (size_t(args.rank) * kTokens + token) * R::kStride, from,
                   R::kStride);
      }
    }
  }

  __device__ void store_parts(const uint8_t* from, int rank, int place) {
    bulk_store(args.out[rank] + size_t(place) * R::kRowBytes, from, R::kRowBytes);
    if constexpr (R::kScaleBytes > 0)
      bulk_store(args.out_scales[rank] + size_t(place) * R::kScaleBytes, from + R::kRowBytes,
                 R::kScaleBytes);
  }

  __device__ void publish(int slot) {
    if (shared.publishes[slot] >= 0) publish_to_all(shared.publishes[slot]);
  }

  __device__ void publish_to_all(int which) {
    if (lane < kRanks && lane != args.rank) publish_batch(lane, which);
    __syncwarp();
  }

  const DispatchArgs& args;
  Shared& shared;
  uint32_t asked = 0, stored = 0;
  int ticket, batch, source;
  int32_t words[kWordsPerLane];
  uint32_t remaining = 0;  // rows of the batch not yet asked for
};

template <class R, Method M, bool ExpertMajor>
__global__ void __launch_bounds__(kWarps * 32, 1)
    dispatch_kernel(const __grid_constant__ DispatchArgs args) {
  using Warp = DispatchWarp<R, M, ExpertMajor>;
  extern __shared__ __align__(128) uint8_t memory[];
  Warp(args, reinterpret_cast<typename Warp::Shared*>(memory)[threadIdx.x / 32]).run();
}

}  // namespace fanfold::probe::ht
