// The fused layer on one GPU: rows to experts, both GEMMs with SwiGLU and quantisation between
// them, the sum of each token's results; one launch of persistent clusters of two CTAs.
//
//   warps 0 to 7   copy the first rows, multiply and store tiles, at the end sum tokens
//   warp 8         copies weights to the stages; in the first CTA it takes the tickets
//   warp 9         copies rows to the stages, once they are there
//   warps 10, 11   copy tokens to the rows of their experts, then sum tokens whose columns are there
#pragma once

#include "grouped_gemm.cuh"
#include "route.cuh"

namespace fanfold::probe {

template <int kStages>
struct FusedTile : Tile<kBlockRows, kTileColumns, kStages, 2> {
  using Tail = FusedTail;
  static constexpr int kProducers = 2;
};

template <int kStages, bool kTanh_ = false>
struct FusedPolicy : Policy<FusedTile<kStages>, Sum::in_place> {
  static constexpr bool kTanh = kTanh_;  // SwiGLU by the hardware's tanh: less exact, half the work
};

static_assert(sizeof(GemmShared<FusedPolicy<4>>) <= kMostShared);

inline constexpr int kFirstCopies = 3 * kMathWarps;  // by the warps that multiply later

// ---- waits and tickets --------------------------------------------------------------------------

__device__ inline void await_count(const uint32_t* counter, uint32_t wanted, uint32_t nap_ns = 0) {
  Impatience impatience;
  while (load_acquire_gpu(counter) < wanted) {
    if (impatience.exhausted()) return;
    if (nap_ns) __nanosleep(nap_ns);
  }
}

// The cluster's ticket number `n`, for both CTAs; no reader is two behind.
__device__ inline void publish_ticket(FusedTail& tail, uint32_t n, int ticket) {
  const uint64_t word = uint64_t{n + 1} << 32 | static_cast<uint32_t>(ticket);
  const uint32_t own = shared_address(&tail.tickets[n % 4]);
  for (int cta = 0; cta < 2; ++cta)
    asm volatile(
        "{\n .reg .b32 there;\n"
        " mapa.shared::cluster.u32 there, %0, %1;\n"
        " st.relaxed.cluster.shared::cluster.u64 [there], %2;\n}" ::"r"(own),
        "r"(cta), "l"(word)
        : "memory");
}

__device__ inline int await_ticket(FusedTail& tail, uint32_t n) {
  const uint32_t own = shared_address(&tail.tickets[n % 4]);
  Impatience impatience;
  for (;;) {
    uint64_t word;
    asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(own) : "memory");
    if (word >> 32 == n + 1) return static_cast<int>(word);
    if (impatience.exhausted()) return 0x7fffffff;
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

// By one thread; the first CTA's takes the tickets.
template <class T>
__device__ inline void produce_weights(Ring<T>& ring, const FusedArgs& args) {
  const int cta = static_cast<int>(cta_of_cluster());
  const Schedule schedule = make_schedule(ring.tail, args);
  const int tickets = schedule.tickets();
  int taken = 0;
  const auto take = [&] {
    if (args.static_order) return static_cast<int>(blockIdx.x / 2 + taken++ * (gridDim.x / 2));
    return static_cast<int>(atomicAdd(&args.counters->ticket, 1u));
  };
  int next = 0;
  if (cta == 0) {
    next = take();
    publish_ticket(ring.tail, 0, next);
  }
  Cursor cursor;
  Position<T> at;
  for (uint32_t n = 0;; ++n) {
    const int ticket = cta == 0 ? next : await_ticket(ring.tail, n);
    if (ticket >= tickets) break;
    const Task task = task_of(schedule, ticket, cta, cursor);
    const TensorMap* map = task.gemm == 0 ? &args.w1 : &args.w2;
    // Gate columns stand in the lower half of a tile, the same columns of up in the upper.
    const int low = task.column_block * (task.gemm == 0 ? kTileColumns / 2 : kTileColumns);
    const int high = low + (task.gemm == 0 ? kIntermediate : kTileColumns / 2);
    constexpr int kHalfBytes = T::kBytesB / 2;
    const int blocks = blocks_k(task.gemm);
    for (int k = 0; k < blocks; ++k, at.advance()) {
      if (cta == 0) {  // late, for a fair share, but before the tile's products are done
        if (k == blocks - 4) next = take();
        if (k == blocks - 2) publish_ticket(ring.tail, n + 1, next);
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
  }
}

// Waits until a tile's rows are there.
__device__ inline void await_rows(const FusedArgs& args, const Task& task) {
  for (int h = 0; h < 2; ++h) {
    const int valid = min(task.valid - h * kHalfRows, kHalfRows);
    if (valid <= 0) break;
    const int half = task.row / kHalfRows + h;
    if (task.gemm == 0) {
      await_count(&args.counters->arrived[half], valid);
    } else {
      await_count(&args.counters->activated[half], kFirstColumnBlocks);
    }
  }
  fence_global_and_bulk();
}

// By one thread.
template <class T>
__device__ inline void produce_rows(Ring<T>& ring, const FusedArgs& args) {
  const int cta = static_cast<int>(cta_of_cluster());
  const Schedule schedule = make_schedule(ring.tail, args);
  const int tickets = schedule.tickets();
  Cursor cursor;
  Position<T> at;
  for (uint32_t n = 0;; ++n) {
    const int ticket = await_ticket(ring.tail, n);
    if (ticket >= tickets) break;
    const Task task = task_of(schedule, ticket, cta, cursor);
    await_rows(args, task);
    // Two boxes of rows; with at most 64 valid rows only the lower half of the tile is copied.
    const bool low = task.valid <= kHalfRows;
    const int box_rows = low ? kHalfRows / 2 : kHalfRows;
    const TensorMap* map = low ? &args.a_low[task.gemm] : &args.a[task.gemm];
    const uint32_t scale_bytes = 2 * box_rows * 4;
    const float* scales = args.a_scales[task.gemm] + task.row;
    for (int k = 0; k < blocks_k(task.gemm); ++k, at.advance(), scales += args.row_count) {
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

template <bool kTanh>
__device__ __forceinline__ float silu(float v) {
  if constexpr (!kTanh) return __fdividef(v, 1.0f + __expf(-v));
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(0.5f * v));
  return fmaf(0.5f * v, tanh, 0.5f * v);
}

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
    d[i] = silu<P::kTanh>(d[i]) * d[P::kSums / 2 + i] * weight[h];
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

// The last tile that one thread has stored, until others may read it.
struct Unpublished {
  uint32_t* counter = nullptr;
  __device__ void publish() {
    if (!counter) return;
    bulk_await_written<0>();
    fence_global_and_bulk();
    add_release_gpu(counter, 1);
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
  const int cta = static_cast<int>(cta_of_cluster());
  const Schedule schedule = make_schedule(tail, args);
  const int tickets = schedule.tickets();
  WarpgroupSum<P> sum(shared.ring, warpgroup);
  WeightScales<P> scales;
  Cursor cursor;
  Unpublished stored;
  uint32_t n = 0;
  int ticket = await_ticket(tail, n);
  __syncwarp();
  if (ticket >= tickets) return;
  Task task = task_of(schedule, ticket, cta, cursor);
  begin_weight_scales<P>(scales, args, task);
  while (ticket < tickets) {
    const bool computes = task.valid > sum.part.row;
    const int row = task.row + sum.part.row;
    float weight[2] = {};
    float d[P::kSums];
    registers_begin(d);
    sum.run(d, scales, blocks_k(task.gemm), computes, [&] {
      stored.publish();  // by one thread: products need whole warps
      __syncwarp();
      if (task.gemm == 1) return;
      weight[0] = row_weight(args, row + row_of_thread());
      weight[1] = row_weight(args, row + row_of_thread() + 8);
    });
    ticket = await_ticket(tail, ++n);
    __syncwarp();
    Task next = task;
    if (ticket < tickets) next = task_of(schedule, ticket, cta, cursor);
    begin_weight_scales<P>(scales, args, next);
    if (computes) {
      if (task.gemm == 0) {
        store_activations<P>(d, shared.store[warpgroup][0], args, row, task.column_block, weight);
      } else {
        store_tile<P>(d, shared.store[warpgroup], &args.store[1], row,
                      task.column_block * kTileColumns, warpgroup);
      }
      if (threadIdx.x % kWarpgroupThreads == 0)
        stored.counter = stored_counter(args, task, row / kHalfRows);
    }
    if (task.gemm == 0) mark(args, &FusedSpan::first_end);
    // The next tile may wait for this one, unless both are of the same GEMM.
    if (ticket >= tickets || next.gemm != task.gemm) stored.publish();
    __syncwarp();
    task = next;
  }
}

// By one warp: kSumColumns columns of a token, kUnits x kBatch loads of a lane at a time.
template <int kUnits, int kBatch>
__device__ inline void sum_chunk(const FusedArgs& args, int token, int chunk, uint32_t nap_ns) {
  constexpr int kRowWords = kHidden / 8;
  constexpr int kChunkUnits = kSumColumns / 8 / kWarpLanes;
  static_assert(kChunkUnits % kUnits == 0 && kTopK % kBatch == 0);
  const int lane = threadIdx.x % kWarpLanes;
  int row = 0;
  if (lane < kTopK) {
    row = args.row_of[token * kTopK + lane];
    const int group = chunk * args.second_groups / kSumChunks;
    await_count(&args.counters->returned[row / kHalfRows][group],
                kSecondColumnBlocks / args.second_groups, nap_ns);
  }
  __syncwarp();
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
  }
}

// y of this CTA's tokens, by all warps that come here. The first wait is long and polls less.
template <int kUnits, int kBatch>
__device__ inline void sum_tokens(const FusedArgs& args, FusedTail& tail, uint32_t first_nap_ns,
                                  uint32_t nap_ns) {
  const OwnTokens own(args.tokens);
  const int tokens = own.last - own.first;
  uint32_t nap = first_nap_ns;
  for (;;) {
    uint32_t item = 0;
    if (threadIdx.x % kWarpLanes == 0) item = atomicAdd(&tail.next_sum, 1u);
    item = __shfl_sync(kFullWarp, item, 0);
    if (item >= static_cast<uint32_t>(tokens * kSumChunks)) return;
    const int chunk = static_cast<int>(item) / tokens;
    sum_chunk<kUnits, kBatch>(args, own.first + static_cast<int>(item) - chunk * tokens, chunk,
                              nap);
    nap = nap_ns;
  }
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
      copy_rows<7>(args, kFirstCopies, kMostTokens * kTopK, warp - kMathWarps - 2, 2);
      if (args.second_groups > 1) sum_tokens<1, 4>(args, shared.ring.tail, 4000, 250);
    }
  } else {
    raise_registers<232>();
    copy_rows<14>(args, 0, kFirstCopies, warp, kMathWarps);
    multiply_tasks<P>(shared, args, warpgroup);
    mark(args, &FusedSpan::second_end);
    sum_tokens<2, 8>(args, shared.ring.tail, 0, 0);
  }
  cluster_barrier();
  mark(args, &FusedSpan::end);
  if (threadIdx.x == 0) args.spans[blockIdx.x].cycles = clock64() - begin;
}

}  // namespace fanfold::probe
