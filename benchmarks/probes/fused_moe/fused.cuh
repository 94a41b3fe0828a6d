// The fused layer on one GPU: rows to experts, both GEMMs with SwiGLU and quantisation between
// them, the sum of each token's results; one launch of persistent clusters of two CTAs.
//
//   warps 0 to 7   copy the first rows, multiply and store tiles, at the end sum tokens
//   warp 8         copies weights to the stages; in the first CTA it takes the tickets
//   warp 9         copies rows to the stages, once they are there
//   warps 10, 11   copy tokens to the rows of their experts, then sum tokens whose columns are there;
//                  meanwhile they publish what the warpgroups 0 and 1 have stored
#pragma once

#include "grouped_gemm.cuh"
#include "route.cuh"

namespace fanfold::probe {

template <int kStages>
struct FusedTile : Tile<kBlockRows, kTileColumns, kStages, 2> {
  using Tail = FusedTail;
  static constexpr int kProducers = 2;
};

template <int kStages>
using FusedPolicy = Policy<FusedTile<kStages>, Sum::in_place>;

static_assert(sizeof(GemmShared<FusedPolicy<4>>) <= kMostShared);
static_assert(kHidden / kBlockK <= WeightScales<FusedPolicy<4>>::kMostBlocks);
// Tickets are taken eight blocks of K before the end of a tile.
static_assert(kHidden / kBlockK >= 8 && kIntermediate / kBlockK >= 8);

// ---- waits and tickets --------------------------------------------------------------------------

__device__ __forceinline__ void store_at_cta(uint64_t* own, int cta, uint64_t word) {
  asm volatile(
      "{\n .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " st.relaxed.cluster.shared::cluster.u64 [there], %2;\n}" ::"r"(shared_address(own)),
      "r"(cta), "l"(word)
      : "memory");
}

__device__ __forceinline__ uint64_t load_relaxed_cluster(const uint64_t* own) {
  uint64_t word;
  asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];"
               : "=l"(word)
               : "r"(shared_address(own))
               : "memory");
  return word;
}

__device__ __forceinline__ uint32_t load_acquire_cta(const uint32_t* own) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(v)
               : "r"(shared_address(own))
               : "memory");
  return v;
}

__device__ __forceinline__ void store_release_cta(uint32_t* own, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(own)), "r"(v)
               : "memory");
}

// The task number `n` of this CTA; no reader is two behind. No valid rows: no tickets are left.
__device__ inline Task await_task(const FusedTail& tail, uint32_t n) {
  Impatience impatience;
  for (;;) {
    const uint64_t word = load_relaxed_cluster(&tail.tasks[n % 4]);
    if (has_number(word, n)) return unpacked_task(word);
    if (impatience.expired()) return {};
  }
}

__device__ inline Schedule make_schedule(const FusedTail& tail, const FusedArgs& args) {
  return {tail.first_block,    tail.rows,          kExperts,         kFirstColumnBlocks,
          kSecondColumnBlocks, args.second_groups, args.pairs_halves};
}

__device__ __forceinline__ int blocks_k(int gemm) {
  return gemm == 0 ? kHidden / kBlockK : kIntermediate / kBlockK;
}

// ---- copies to the stages -----------------------------------------------------------------------

// Takes the cluster's tickets and tells both CTAs their tasks; by one thread of the first CTA.
class Tickets {
 public:
  __device__ Tickets(FusedTail& tail, const FusedArgs& args)
      : tail_(tail), args_(args), schedule_(make_schedule(tail, args)) {}

  __device__ void take() { next_ = static_cast<int>(atomicAdd(&args_.counters->ticket, 1u)); }
  __device__ void publish() {
    for (int cta = 0; cta < 2; ++cta) {
      Task task{};
      if (next_ < schedule_.tickets()) {
        Cursor cursor = cursor_;
        task = task_of(schedule_, next_, cta, cursor);
        if (cta == 1) cursor_ = cursor;
      }
      store_at_cta(&tail_.tasks[number_ % 4], cta, packed_task(task, number_));
    }
    ++number_;
  }

 private:
  FusedTail& tail_;
  const FusedArgs& args_;
  const Schedule schedule_;
  Cursor cursor_;
  int next_ = 0;
  uint32_t number_ = 0;
};

// By one thread; the first CTA's takes the tickets.
template <class T>
__device__ inline void produce_weights(Ring<T>& ring, const FusedArgs& args) {
  const int cta = static_cast<int>(cta_of_cluster());
  Tickets tickets(ring.tail, args);
  if (cta == 0) {
    tickets.take();
    tickets.publish();
  }
  // Blocks of K before a tile's end: so early that all roles know the next tile before this one is
  // done, else as late as possible, which makes the shares of the clusters fair.
  constexpr int kAhead = 6;
  Position<T> at;
  Task task = await_task(ring.tail, 0);
  for (uint32_t n = 1; task.valid > 0; ++n) {
    const TensorMap* map = task.gemm == 0 ? &args.w1 : &args.w2;
    // Gate columns stand in the lower half of a tile, the same columns of up in the upper.
    const int low = task.column_block * (task.gemm == 0 ? kTileColumns / 2 : kTileColumns);
    const int high = low + (task.gemm == 0 ? kIntermediate : kTileColumns / 2);
    constexpr int kHalfBytes = T::kBytesB / 2;
    const int blocks = blocks_k(task.gemm);
    for (int k = 0; k < blocks; ++k, at.advance()) {
      if (cta == 0) {
        if (k == blocks - kAhead - 2) tickets.take();
        if (k == blocks - kAhead) tickets.publish();
      }
      await_phase(&ring.empty[at.stage], at.parity ^ 1, Impatience{});
      ArrivalBarrier* full = &ring.full[at.stage];
      uint8_t* b = ring.b[at.stage];
      arrive_expecting(full, T::kBytesB);
      if (task.shares_weights) {
        load_box_multicast(b + cta * kHalfBytes, map,
                           {k * kBlockK, cta == 0 ? low : high, task.expert}, full, 0b11);
      } else {
        load_box(b, map, {k * kBlockK, low, task.expert}, full);
        load_box(b + kHalfBytes, map, {k * kBlockK, high, task.expert}, full);
      }
    }
    task = await_task(ring.tail, n);
  }
}

// Of a tile's half: what its rows wait for.
struct RowsAwaited {
  const uint32_t* counter;
  uint32_t wanted;  // 0: nothing
  __device__ RowsAwaited(const FusedArgs& args, const Task& task, int half) {
    const int at = task.row / kHalfRows + half;
    const int valid = max(0, min(task.valid - half * kHalfRows, kHalfRows));
    counter = task.gemm == 0 ? &args.counters->arrived[at] : &args.counters->activated[at];
    wanted = valid == 0 ? 0 : task.gemm == 1 ? kFirstColumnBlocks : args.leaves_copies ? 0 : valid;
  }
  __device__ bool are_there() const { return wanted == 0 || load_acquire_gpu(counter) >= wanted; }
};

// By one thread. It looks for the next tile's rows while this one is copied, and waits only if they
// were not there: a wait before could be for this tile.
template <class T>
__device__ inline void produce_rows(Ring<T>& ring, const FusedArgs& args) {
  const int cta = static_cast<int>(cta_of_cluster());
  Position<T> at;
  Task task = await_task(ring.tail, 0);
  uint32_t there = 0;  // bits of halves
  for (uint32_t n = 1; task.valid > 0; ++n) {
    for (int h = 0; h < 2; ++h) {
      const RowsAwaited rows(args, task, h);
      if (!(there >> h & 1) && rows.wanted) await_count(rows.counter, rows.wanted);
    }
    there = 0;
    fence_global_and_bulk();
    // Two boxes of rows; with at most 64 valid rows only the lower half of the tile is copied.
    const bool low = task.valid <= kHalfRows;
    const int box_rows = low ? kHalfRows / 2 : kHalfRows;
    const TensorMap* map = low ? &args.a_low[task.gemm] : &args.a[task.gemm];
    const uint32_t scale_bytes = 2 * box_rows * 4;
    const float* scales = args.a_scales[task.gemm] + task.row;
    const int blocks = blocks_k(task.gemm);
    Task next{};
    for (int k = 0; k < blocks; ++k, at.advance(), scales += args.row_count) {
      if (k >= blocks - 3) {
        const int h = k - (blocks - 2);
        if (h < 0) {
          next = await_task(ring.tail, n);
        } else {
          there |= uint32_t{RowsAwaited(args, next, h).are_there()} << h;
        }
      }
      await_phase(&ring.empty[at.stage], at.parity ^ 1, Impatience{});
      ArrivalBarrier* full = &ring.full[at.stage];
      uint8_t* a = ring.a[at.stage];
      arrive_expecting(full, 2 * box_rows * kBlockK + scale_bytes);
      const int x = k * kBlockK;
      if (task.shares_weights) {
        load_box(a, map, {x, task.row, 0}, full);
        load_box(a + box_rows * kBlockK, map, {x, task.row + box_rows, 0}, full);
      } else {
        load_box_multicast(a + cta * box_rows * kBlockK, map, {x, task.row + cta * box_rows, 0},
                           full, 0b11);
      }
      bulk_load(ring.scales[at.stage], scales, scale_bytes, full);
    }
    task = next;
  }
}

// ---- results ------------------------------------------------------------------------------------

__device__ __forceinline__ void store_pair(uint32_t shared, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(v) : "memory");
}

// Accumulators that ptxas takes for new ones: it serialises products whose registers held others.
template <int kCount>
__device__ __forceinline__ void registers_begin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i]));
}

// Of a warpgroup's tile: the first of a thread's two rows; the other is 8 further.
__device__ __forceinline__ int row_of_thread() {
  const int thread = threadIdx.x % kWarpgroupThreads;
  return thread / 32 * 16 + thread % 32 / 4;
}

__device__ __forceinline__ float row_weight(const FusedArgs& args, int row) {
  return __uint_as_float(
      load_relaxed_gpu(reinterpret_cast<const uint32_t*>(args.row_weights) + row));
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// silu(gate) * up * the row's weight of a warpgroup's tile, quantised; `row` is its first.
template <class P>
__device__ __forceinline__ void store_activations(float (&d)[P::kSums], StoreSlot& slot,
                                                  const FusedArgs& args, int row, int column_block,
                                                  const float (&weight)[2]) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const int slot_row = row_of_thread();
  float largest[2] = {kSmallestActivation, kSmallestActivation};
#pragma unroll
  for (int i = 0; i < P::kSums / 2; ++i) {
    const int h = i / 2 % 2;
    d[i] = silu(d[i]) * d[P::kSums / 2 + i] * weight[h];
    largest[h] = fmaxf(largest[h], fabsf(d[i]));
  }
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 2));
    factor[h] = __fdividef(kE4m3Max, largest[h]);
    if (thread % 4 == 0)
      args.a_scales[1][column_block * args.row_count + row + slot_row + 8 * h] =
          largest[h] * (1.0f / kE4m3Max);
  }
  if (thread == 0) bulk_await_read<0>();  // the slot's last store
  named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
  // Units of 16 bytes are swizzled: exclusive or with the row's place among eight.
  const uint32_t at = shared_address(slot) + slot_row * 128 + slot_row % 8 * 16 + 2 * (thread % 4);
#pragma unroll
  for (int j = 0; j < P::kSums / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* v = &d[4 * j + 2 * h];
      const uint32_t pair = pack_e4m3(v[0] * factor[h], v[1] * factor[h], 0, 0);
      store_pair((at ^ j / 2 * 16) + j % 2 * 8 + h * 8 * 128, static_cast<uint16_t>(pair));
    }
  fence_shared_before_bulk();
  fence_global_and_bulk();
  named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
  if (thread == 0) {
    store_box(&args.store[0], column_block * 128, row, slot);
    bulk_commit();
  }
}

// By one thread of a warpgroup.
__device__ inline void post(Mailbox& box, uint32_t word) {
  const uint32_t posted = box.posted;
  Impatience impatience;
  while (posted - load_acquire_cta(&box.taken) >= Mailbox::kSlots)
    if (impatience.expired()) return;
  box.words[posted % Mailbox::kSlots] = word;
  store_release_cta(&box.posted, posted + 1);
}

// By one thread of a spare warp: what was posted, for all of the GPU.
__device__ inline void serve(Mailbox& box, const FusedArgs& args) {
  const uint32_t posted = load_acquire_cta(&box.posted);
#pragma unroll 1
  for (uint32_t taken = box.taken; taken != posted; ++taken) {
    const uint32_t word = box.words[taken % Mailbox::kSlots];
    store_release_cta(&box.taken, taken + 1);
    if (word == Mailbox::kLast) {
      box.ended = 1;
    } else {
      add_release_gpu(reinterpret_cast<uint32_t*>(args.counters) + word, 1);
    }
  }
}

__device__ inline void serve_to_the_end(Mailbox& box, const FusedArgs& args) {
  Impatience impatience;
  for (serve(box, args); !box.ended; serve(box, args)) {
    if (impatience.expired()) return;
    __nanosleep(100);
  }
}

// The last tile that one thread has stored, until others may read it.
struct Unpublished {
  uint32_t* counter = nullptr;
  __device__ void publish(const FusedArgs& args, Mailbox& box) {
    if (!counter) return;
    bulk_await_written<0>();
    fence_global_and_bulk();
    post(box, static_cast<uint32_t>(counter - reinterpret_cast<uint32_t*>(args.counters)));
    counter = nullptr;
  }
};

template <class P>
__device__ __forceinline__ void begin_weight_scales(WeightScales<P>& scales, const FusedArgs& args,
                                                    const Task& task) {
  const int k = blocks_k(task.gemm);
  const int rows = task.gemm == 0 ? 2 * kIntermediate / 128 : kHidden / 128;
  const int low = task.gemm == 0 ? task.column_block : 2 * task.column_block;
  const int high = task.gemm == 0 ? low + kIntermediate / 128 : low + 1;
  const float* from = (task.gemm == 0 ? args.w1_scales : args.w2_scales) + task.expert * rows * k;
  scales.begin({from + low * k, from + high * k}, k);
}

__device__ __forceinline__ uint32_t* stored_counter(const FusedArgs& args, const Task& task,
                                                    int half) {
  if (task.gemm == 0) return &args.counters->activated[half];
  const int group = task.column_block * args.second_groups / kSecondColumnBlocks;
  return &args.counters->returned[half][group];
}

// When this CTA did something; by one thread.
__device__ __forceinline__ void mark(const FusedArgs& args, uint64_t FusedSpan::* when) {
  if (threadIdx.x == 0) args.spans[blockIdx.x].*when = global_nanoseconds();
}

// Two warpgroups. Ends when no tickets are left.
template <class P>
__device__ inline void multiply_tasks(GemmShared<P>& shared, const FusedArgs& args, int warpgroup) {
  FusedTail& tail = shared.ring.tail;
  Mailbox& box = tail.mailboxes[warpgroup];
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  WarpgroupSum<P> sum(shared.ring, warpgroup);
  WeightScales<P> scales;
  Unpublished stored;
  Task task = await_task(tail, 0);
  __syncwarp();
  if (task.valid > 0) begin_weight_scales<P>(scales, args, task);
  for (uint32_t n = 1; task.valid > 0; ++n) {
    const bool computes = task.valid > sum.part.row;
    const int row = task.row + sum.part.row;
    float weight[2] = {};
    float d[P::kSums];
    registers_begin(d);
    sum.run(d, scales, blocks_k(task.gemm), computes, [&] {
      stored.publish(args, box);  // by one thread: products need whole warps
      __syncwarp();
      if (task.gemm == 1) return;
      weight[0] = row_weight(args, row + row_of_thread());
      weight[1] = row_weight(args, row + row_of_thread() + 8);
    });
    const Task next = await_task(tail, n);
    __syncwarp();
    if (next.valid > 0) begin_weight_scales<P>(scales, args, next);
    if (computes) {
      if (task.gemm == 0) {
        store_activations<P>(d, shared.store[warpgroup][0], args, row, task.column_block, weight);
      } else {
        store_tile<P>(d, shared.store[warpgroup], &args.store[1], row,
                      task.column_block * kTileColumns, warpgroup);
      }
      if (first_thread) stored.counter = stored_counter(args, task, row / kHalfRows);
    }
    if (task.gemm == 0) mark(args, &FusedSpan::first_end);
    // The next tile may wait for this one, unless both are of the same GEMM.
    if (next.valid == 0 || next.gemm != task.gemm) stored.publish(args, box);
    __syncwarp();
    task = next;
  }
  if (first_thread) post(box, Mailbox::kLast);
  __syncwarp();
}

// By one warp: kSumColumns columns of a token, kUnits x kBatch loads of a lane at a time.
// `between` is called now and then by all lanes.
template <int kUnits, int kBatch, class Between>
__device__ inline void sum_chunk(const FusedArgs& args, int token, int chunk, uint32_t nap_ns,
                                 const Between& between) {
  constexpr int kRowWords = kHidden / 8;
  constexpr int kChunkUnits = kSumColumns / 8 / kWarpLanes;
  static_assert(kChunkUnits % kUnits == 0 && kTopK % kBatch == 0);
  const int lane = threadIdx.x % kWarpLanes;
  const int row = args.row_of[token * kTopK + lane % kTopK];
  // A chunk may lie in two groups: a lane for each row looks at the first, another at the last.
  constexpr int kChunkBlocks = kSumColumns / kTileColumns;
  const int block = chunk * kChunkBlocks + (lane < kTopK ? 0 : kChunkBlocks - 1);
  const int group = block * args.second_groups / kSecondColumnBlocks;
  const uint32_t* returned = &args.counters->returned[row / kHalfRows][group];
  const uint32_t wanted = kSecondColumnBlocks / args.second_groups;
  Impatience impatience;
  for (;;) {
    const bool there = lane >= 2 * kTopK || load_acquire_gpu(returned) >= wanted;
    if (__all_sync(kFullWarp, there)) break;
    if (__any_sync(kFullWarp, impatience.expired())) break;
    between();
    if (nap_ns) __nanosleep(nap_ns);
  }
  const int word = chunk * (kSumColumns / 8) + lane;
  const uint4* results = reinterpret_cast<const uint4*>(args.results) + word;
  uint4* y = reinterpret_cast<uint4*>(args.y) + int64_t{token} * kRowWords + word;
#pragma unroll 1
  for (int unit = 0; unit < kChunkUnits; unit += kUnits) {
    float total[kUnits][8] = {};
#pragma unroll
    for (int first = 0; first < kTopK; first += kBatch) {
      uint4 v[kBatch][kUnits];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int from = __shfl_sync(kFullWarp, row, first + k);
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
          v[k][u] = __ldcg(results + int64_t{from} * kRowWords + (unit + u) * kWarpLanes);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) add_unweighted(total[u], v[k][u]);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) y[(unit + u) * kWarpLanes] = round_to_bf16(total[u]);
    between();
  }
}

// y of this CTA's tokens, by all warps that come here. The first wait is long and polls less.
template <int kUnits, int kBatch, class Between>
__device__ inline void sum_tokens(const FusedArgs& args, FusedTail& tail, uint32_t first_nap_ns,
                                  uint32_t nap_ns, const Between& between) {
  if (args.leaves_sum) return;
  const OwnTokens own(args.tokens);
  const int tokens = own.last - own.first;
  uint32_t nap = first_nap_ns;
  for (;;) {
    uint32_t item = 0;
    if (threadIdx.x % kWarpLanes == 0) item = atomicAdd(&tail.next_sum, 1u);
    item = __shfl_sync(kFullWarp, item, 0);
    if (item >= static_cast<uint32_t>(tokens * kSumChunks)) return;
    const int chunk = static_cast<int>(item) / tokens;
    const int token = own.first + static_cast<int>(item) - chunk * tokens;
    sum_chunk<kUnits, kBatch>(args, token, chunk, nap, between);
    nap = nap_ns;
  }
}

// Warps 10 and 11.
__device__ inline void spare_warp(FusedTail& tail, const FusedArgs& args, int which) {
  Mailbox& box = tail.mailboxes[which];
  const bool serves = threadIdx.x % kWarpLanes == 0;
  const auto between = [&] {
    if (serves) serve(box, args);
    __syncwarp();
  };
  copy_rows<7>(args, kFirstCopies, kMostTokens * kTopK, which, 2, between);
  if (args.second_groups > 1) sum_tokens<1, 8>(args, tail, 2000, 1000, between);
  if (serves) serve_to_the_end(box, args);
}

// ---- the kernel ---------------------------------------------------------------------------------

template <class P>
__global__ void __launch_bounds__(kGemmThreads, 1)
    fused_kernel(const __grid_constant__ FusedArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GemmShared<P>*>(memory);
  const int warp = threadIdx.x / kWarpLanes;
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  mark(args, &FusedSpan::begin);
  const int64_t begin = clock64();
  if (threadIdx.x == 0) init_ring(shared.ring);
  route(*reinterpret_cast<RouteCounts*>(memory), shared.ring.tail, args);
  fence_shared_before_bulk();
  cluster_barrier();
  mark(args, &FusedSpan::routed);
  if (warpgroup == kMathWarpgroups) {
    lower_registers<40>();
    if (warp == kMathWarps) {
      if (threadIdx.x % kWarpLanes == 0) produce_weights(shared.ring, args);
    } else if (warp == kMathWarps + 1) {
      if (threadIdx.x % kWarpLanes == 0) produce_rows(shared.ring, args);
    } else {
      spare_warp(shared.ring.tail, args, warp - kMathWarps - 2);
    }
  } else {
    raise_registers<232>();
    copy_rows<14>(args, 0, kFirstCopies, warp, kMathWarps);
    multiply_tasks<P>(shared, args, warpgroup);
    mark(args, &FusedSpan::second_end);
    sum_tokens<2, 8>(args, shared.ring.tail, 0, 0, [] {});
  }
  cluster_barrier();
  mark(args, &FusedSpan::end);
  if (threadIdx.x == 0) args.spans[blockIdx.x].cycles = clock64() - begin;
}

}  // namespace fanfold::probe
