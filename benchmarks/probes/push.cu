// How a rank's rows reach its peers soonest: stores or bulk copies, and how the receiver learns of
// them. Every CTA pushes one token's row to the peers that want it, then awaits its share of rows,
// reads them whole and compares every word. There is no other work, so the difference to an empty
// kernel is the cost of moving and announcing the rows.
//   push RESULTS.jsonl
#include <random>

#include "harness.cuh"

namespace fanfold::probe {

enum class Method {
  kSelf,          // relaxed 16-byte stores; a word that is not all ones has arrived
  kSelfWeak,      // the same with plain stores
  kSelfPause,     // the same with relaxed stores and 100 ns between polls
  kSelfPhased,    // relaxed stores, every CTA to the first neighbour first, then to the second, ...
  kSendOnly,      // relaxed stores that nobody awaits
  kSendPhased,    // the same in phases
  kTagged12,      // 12 bytes of payload and a tag in each 16-byte store
  kTagged120,     // 120 bytes of payload and a tag in each 128-byte line that a warp stores
  kWarpFlag,      // stores, then each warp releases a flag of its own
  kRowFlag,       // stores, a CTA barrier, then one thread releases the row's flag
  kCounter,       // the same, but the thread adds to the one counter of this source
  kBulkSelf,      // one bulk copy a row from shared memory, no announcement
  kBulkRowFlag,   // one bulk copy a row, awaited, then the row's flag
  kBulkQuarters,  // four bulk copies a row by four warps, each with a flag
  kBulkCounter,   // one bulk copy a row, awaited, then the source's counter
};

__host__ __device__ constexpr bool is_bulk(Method m) { return m >= Method::kBulkSelf; }
__host__ __device__ constexpr bool is_self(Method m) {
  return m == Method::kSelf || m == Method::kSelfWeak || m == Method::kSelfPause ||
         m == Method::kSelfPhased || m == Method::kBulkSelf;
}

constexpr int kPushTokens = 128;
constexpr int kPushThreads = 512;
constexpr int kPushWarps = kPushThreads / 32;

template <int Units>
struct PushBuffer {
  static constexpr int kStride = round_up(Units * 4 / 3 + 8, 8);
  uint4 rows[2][kRanks][kPushTokens][kStride];
  uint32_t flags[2][kRanks][kPushTokens][kPushWarps];
  uint32_t counters[kRanks];
};

template <int Units>
struct PushArgs {
  PushBuffer<Units>* peers[kRanks];
  const uint32_t* goes_to;     // [token]: bit p says that the token goes to rank p
  const uint32_t* comes_from;  // [token]: bit s says that source s sends its token of that number
  int source_at[kRanks];
  uint32_t* epochs;           // [kCtas]
  uint32_t expected[kRanks];  // rows from each source
  uint32_t* mistakes;
  uint32_t* error;
  int rank;
};

template <int Units, Method M>
class Push {
  static constexpr int kWireUnits = M == Method::kTagged12    ? ceil_div(Units * 4, 3)
                                    : M == Method::kTagged120 ? ceil_div(Units * 16, 120) * 8
                                                              : Units;
  static constexpr int kPerThread = ceil_div(kWireUnits, kPushThreads);
  static constexpr int kRows = ceil_div(kRanks * kPushTokens, kCtas);

  const PushArgs<Units>& args;
  uint4* shared;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  uint32_t epoch;
  PushBuffer<Units>* mine;

 public:
  static constexpr size_t kShared = is_bulk(M) ? Units * 16 : 16;

  __device__ Push(const PushArgs<Units>& a, uint4* s)
      : args(a), shared(s), epoch(a.epochs[blockIdx.x]), mine(a.peers[a.rank]) {}

  __device__ void run() {
    if (blockIdx.x < kPushTokens) send(blockIdx.x);
    if (M == Method::kSendOnly || M == Method::kSendPhased) return finish();
    for (int row = 0; row < kRows; ++row) {
      const int q = blockIdx.x + row * kCtas;
      const int source = (q + row) % kRanks;
      const int token = q / kRanks;
      if (token >= kPushTokens || source == args.rank) continue;
      if (args.comes_from[token] >> source & 1) receive(source, token);
    }
    if (is_bulk(M)) bulk_wait_source_read();
    finish();
  }

 private:
  __device__ void finish() {
    __syncthreads();
    if (threadIdx.x == 0) args.epochs[blockIdx.x] = epoch + 1;
  }

  __device__ int destination(int token, int i) {
    const bool phased = M == Method::kSelfPhased || M == Method::kSendPhased;
    return (args.rank + 1 + (phased ? 0 : token) + i) % kRanks;
  }

  // What unit u of a row holds on the wire, tag included.
  __device__ uint4 content(int source, int token, int u) {
    uint4 v{epoch * 131u + u, token * 7u + source, epoch ^ (u * 3u), static_cast<uint32_t>(u)};
    if (M == Method::kTagged12) v.w = epoch;
    if (M == Method::kTagged120 && u % 8 == 7) v.z = v.w = epoch;
    return v;
  }

  __device__ uint32_t* flags_at(int rank, int token) {
    return args.peers[rank]->flags[epoch & 1][args.source_at[rank]][token];
  }

  __device__ void send(int token) {
    const uint32_t ranks = args.goes_to[token] & ~(1u << args.rank);
    if constexpr (is_bulk(M)) return send_bulk(token, ranks);
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      if (!(ranks >> rank & 1)) continue;
      uint4* row = args.peers[rank]->rows[epoch & 1][args.source_at[rank]][token];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int u = threadIdx.x + j * kPushThreads;
        if (u >= kWireUnits) continue;
        const uint4 v = content(args.source_at[rank], token, u);
        if (M == Method::kSelfWeak) store_weak(row + u, v);
        if (M != Method::kSelfWeak) store_relaxed_system(row + u, v);
      }
    }
    announce(token, ranks);
  }

  __device__ void announce(int token, uint32_t ranks) {
    if constexpr (M == Method::kWarpFlag) {
      __syncwarp();
      if (lane < kRanks && (ranks >> lane & 1))
        store_release_system(flags_at(lane, token) + warp, epoch);
    }
    if constexpr (M == Method::kRowFlag || M == Method::kCounter) {
      __syncthreads();
      if (threadIdx.x < kRanks && (ranks >> threadIdx.x & 1)) announce_row(threadIdx.x, token);
    }
  }

  __device__ void announce_row(int rank, int token) {
    if constexpr (M == Method::kCounter || M == Method::kBulkCounter) {
      add_release_system(&args.peers[rank]->counters[args.source_at[rank]], 1);
    } else {
      store_release_system(flags_at(rank, token), epoch);
    }
  }

  __device__ void send_bulk(int token, uint32_t ranks) {
    for (int u = threadIdx.x; u < Units; u += kPushThreads) shared[u] = content(0, token, u);
    fence_shared_before_bulk();
    __syncthreads();
    constexpr int kParts = M == Method::kBulkQuarters ? 4 : 1;
    if (lane != 0 || warp >= kParts) return;
    const int first = Units * warp / kParts;
    const int last = Units * (warp + 1) / kParts;
    for (int i = 0; i < kRanks; ++i) {
      const int rank = destination(token, i);
      if (ranks >> rank & 1)
        bulk_store(args.peers[rank]->rows[epoch & 1][args.source_at[rank]][token] + first,
                   shared + first, (last - first) * 16);
    }
    bulk_commit();
    if constexpr (M == Method::kBulkSelf) return;
    bulk_wait_written();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!(ranks >> rank & 1)) continue;
      if constexpr (M == Method::kBulkQuarters)
        store_release_system(flags_at(rank, token) + warp, epoch);
      else
        announce_row(rank, token);
    }
  }

  // ---- receiving --------------------------------------------------------------------------------

  __device__ void receive(int source, int token) {
    uint4* row = mine->rows[epoch & 1][source][token];
    await_announcement(source, token);
    uint4 v[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int u = threadIdx.x + j * kPushThreads;
      if (u < round_up(kWireUnits, 8)) v[j] = load_relaxed_system(row + u);
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int u = threadIdx.x + j * kPushThreads;
      if (u >= kWireUnits) continue;
      Patience patience(args.error);
      while (!here(v[j], u) && !patience.exhausted()) {
        if (M == Method::kSelfPause) pause(100);
        v[j] = load_relaxed_system(row + u);
      }
      const uint4 want = content(is_bulk(M) ? 0 : source, token, u);
      if (v[j].x != want.x || v[j].y != want.y || v[j].z != want.z || v[j].w != want.w)
        atomicAdd(args.mistakes, 1u);
      if (is_self(M)) store_weak(row + u, absent());
    }
  }

  __device__ bool here(uint4 v, int u) {
    if constexpr (is_self(M)) return arrived(v);
    if constexpr (M == Method::kTagged12) return v.w == epoch;
    if constexpr (M == Method::kTagged120) {
      const uint32_t group = 0xFFu << (lane & 24);
      return __shfl_sync(group, v.w, lane | 7) == epoch;
    }
    return true;
  }

  __device__ void await_announcement(int source, int token) {
    Patience patience(args.error);
    const uint32_t* flags = mine->flags[epoch & 1][source][token];
    if constexpr (M == Method::kCounter || M == Method::kBulkCounter) {
      while (static_cast<int32_t>(load_acquire_system(&mine->counters[source]) -
                                  args.expected[source] * (epoch - 1)) < 0 &&
             !patience.exhausted())
        continue;
    } else if constexpr (M == Method::kWarpFlag) {
      while (load_acquire_system(flags + warp) != epoch && !patience.exhausted()) continue;
    } else if constexpr (M == Method::kRowFlag || M == Method::kBulkRowFlag) {
      while (load_acquire_system(flags) != epoch && !patience.exhausted()) continue;
    } else if constexpr (M == Method::kBulkQuarters) {
      for (int part = 0; part < 4; ++part)
        while (load_acquire_system(flags + part) != epoch && !patience.exhausted()) continue;
    }
    __syncwarp();
  }
};

template <int Units, Method M>
__global__ void __launch_bounds__(kPushThreads, 1)
    push_kernel(const __grid_constant__ PushArgs<Units> args) {
  __shared__ alignas(128) uint4 shared[Push<Units, M>::kShared / 16];
  Push<Units, M>(args, shared).run();
}

template <int Units>
class PushProbe {
 public:
  PushProbe(Node& node, Report& report, int topk) : node_(node), report_(report), topk_(topk) {
    std::mt19937 random(11);
    std::vector<std::vector<uint32_t>> goes_to(node.ranks(), std::vector<uint32_t>(kPushTokens));
    for (auto& masks : goes_to)
      for (auto& mask : masks)
        for (int k = 0; k < topk; ++k) mask |= 1u << random() % kRanks;
    node.each([&](int g) { buffers_[g] = device_array<PushBuffer<Units>>(1); });
    node.each([&](int g) { args_[g] = arguments(g, goes_to); });
  }

  void run() {
    time<Method::kSelf>("self");
    time<Method::kSelfWeak>("self, plain stores");
    time<Method::kSelfPause>("self, pause 100 ns");
    time<Method::kSelfPhased>("self, phased");
    time<Method::kSendOnly>("nobody awaits");
    time<Method::kSendPhased>("nobody awaits, phased");
    time<Method::kTagged12>("tag in 16 bytes");
    time<Method::kTagged120>("tag in 128 bytes");
    time<Method::kWarpFlag>("warp flag");
    time<Method::kRowFlag>("row flag");
    time<Method::kCounter>("counter");
    time<Method::kBulkSelf>("self, bulk");
    time<Method::kBulkRowFlag>("row flag, bulk");
    time<Method::kBulkQuarters>("quarter flags, bulk");
    time<Method::kBulkCounter>("counter, bulk");
  }

 private:
  PushArgs<Units> arguments(int g, const std::vector<std::vector<uint32_t>>& goes_to) {
    PushArgs<Units> a{};
    const Route route = Route::of(g, node_.ranks());
    std::vector<uint32_t> comes_from(kPushTokens, 0);
    for (int p = 0; p < kRanks; ++p) {
      a.peers[p] = buffers_[route.gpu_of[p]];
      a.source_at[p] = route.source_at[p];
      // Peer p reaches this GPU as the rank for which it is this GPU's source p.
      const Route back = Route::of(route.gpu_of[p], node_.ranks());
      for (int mine = 0; mine < kRanks; ++mine) {
        if (back.gpu_of[mine] != g || back.source_at[mine] != p || p == route.rank) continue;
        for (int t = 0; t < kPushTokens; ++t)
          if (goes_to[route.gpu_of[p]][t] >> mine & 1) comes_from[t] |= 1u << p, ++a.expected[p];
      }
    }
    a.goes_to = upload(goes_to[g]);
    a.comes_from = upload(comes_from);
    a.epochs = device_array<uint32_t>(kCtas);
    a.mistakes = device_array<uint32_t>(1);
    a.error = node_.gpu(g).error;
    a.rank = route.rank;
    return a;
  }

  static uint32_t* upload(const std::vector<uint32_t>& words) {
    uint32_t* memory = device_array<uint32_t>(words.size());
    check(cudaMemcpy(memory, words.data(), words.size() * 4, cudaMemcpyHostToDevice), "upload");
    return memory;
  }

  void reset() {
    const std::vector<uint32_t> first(kCtas, 2);
    node_.each([&](int r) {
      check(cudaMemset(buffers_[r], 0, sizeof *buffers_[r]), "reset");
      check(cudaMemset(buffers_[r]->rows, 0xFF, sizeof buffers_[r]->rows), "reset");
      check(cudaMemcpy(args_[r].epochs, first.data(), kCtas * 4, cudaMemcpyHostToDevice), "reset");
    });
    node_.synchronize();
  }

  uint32_t take_mistakes() {
    uint32_t sum = 0;
    node_.each([&](int r) {
      uint32_t own = 0;
      check(cudaMemcpy(&own, args_[r].mistakes, 4, cudaMemcpyDeviceToHost), "mistakes");
      check(cudaMemset(args_[r].mistakes, 0, 4), "mistakes");
      sum += own;
    });
    return sum;
  }

  template <Method M>
  void time(const std::string& variant) {
    const auto call = [this](int r) {
      push_kernel<Units, M><<<kCtas, kPushThreads, 0, node_.gpu(r).stream>>>(args_[r]);
    };
    uint32_t bytes = 0;  // of the rank that receives most
    for (const auto& a : args_)
      bytes = std::max(
          bytes, (a.expected[0] + a.expected[1] + a.expected[2] + a.expected[3]) * Units * 16);
    const std::string all = field("probe", "push") + ", " + field("variant", variant) + ", " +
                            field("row_bytes", Units * 16) + ", " + field("topk", topk_) + ", " +
                            field("received_bytes", bytes) + ", " + field("gpus", node_.ranks());
    reset();
    report_.timing(all + ", " + field("mode", "chain"), time_plan(node_, {call, 20, 40, false}));
    report_.timing(all + ", " + field("mode", "single"), time_plan(node_, {call, 1, 60, false}));
    const uint32_t mistakes = take_mistakes();
    const bool late = node_.take_errors();
    if (mistakes || late)
      report_.line(all + ", " + field("mistakes", mistakes) + ", " + field("timeouts", late));
  }

  Node& node_;
  Report& report_;
  int topk_;
  PushBuffer<Units>* buffers_[kRanks];
  PushArgs<Units> args_[kRanks] = {};
};

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  Report report(argv[1]);
  PushProbe<7392 / 16>(node, report, 8).run();
  PushProbe<2112 / 16>(node, report, 8).run();
  PushProbe<1056 / 16>(node, report, 22).run();
  PushProbe<14336 / 16>(node, report, 8).run();
  PushProbe<4096 / 16>(node, report, 8).run();
  PushProbe<2048 / 16>(node, report, 22).run();
}
