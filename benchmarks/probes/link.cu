// How few SMs keep NVLink busy: all GPUs exchange the rows of one high-throughput dispatch, each
// (token, rank) once, by pushing or by pulling, with bulk copies through shared memory or with
// 16-byte loads and stores. No flags, no counts: places are known and the data is already there.
//   link RESULTS.jsonl
#include "bulk_ring.cuh"
#include "harness.cuh"
#include "traffic.hpp"

namespace fanfold::probe {

constexpr int kTokens = 4096;

// One row's way.
struct Move {
  int32_t from, from_row, to, to_row;  // rank and row
};

struct LinkArgs {
  uint4* x[kRanks];       // every rank's input, [kTokens] rows
  uint4* out[kRanks];     // every rank's result, a row per arrival
  const int32_t* row_of;  // [kTokens][kRanks] of this rank's tokens
  const Move* moves;      // of this rank
  int num_moves;
  const Arrival* arrivals;  // of this rank
  int num_arrivals;
  int rank;
  TicketCounters* tickets;  // null: rows are taken in turn
  uint32_t* mistakes;
  uint32_t* error;
};

__host__ __device__ inline uint4 content(int rank, int token, int unit) {
  const uint32_t h = (rank * kTokens + token) * 2654435761u + unit * 40503u;
  return {h, h ^ (h >> 13), h * 2246822519u, static_cast<uint32_t>(unit)};
}

template <int Units>
__global__ void fill_kernel(const __grid_constant__ LinkArgs args) {
  for (int t = blockIdx.x; t < kTokens; t += gridDim.x)
    for (int u = threadIdx.x; u < Units; u += blockDim.x)
      args.x[args.rank][size_t(t) * Units + u] = content(args.rank, t, u);
}

template <int Units>
__global__ void compare_kernel(const __grid_constant__ LinkArgs args) {
  for (int i = blockIdx.x; i < args.num_arrivals; i += gridDim.x) {
    const Arrival a = args.arrivals[i];
    for (int u = threadIdx.x; u < Units; u += blockDim.x) {
      const uint4 want = content(a.source, a.token, u);
      const uint4 v = args.out[args.rank][size_t(i) * Units + u];
      if (v.x != want.x || v.y != want.y || v.z != want.z || v.w != want.w)
        atomicAdd(args.mistakes, 1u);
    }
  }
}

// ---- bulk copies -------------------------------------------------------------------------------

template <int Units, int Warps, int Ahead, int Behind>
struct BulkShape {
  static constexpr int kUnits = Units;
  static constexpr int kWarps = Warps;
  static constexpr int kBytes = Units * 16;
  using Ring = BulkRing<kBytes, Ahead, Behind>;
  struct Shared {
    typename Ring::Shared rings[Warps];
  };
};

// Runs a ring of this warp over rows 0 to `rows`.
template <class S, class Load, class Store>
__device__ void run_ring(const LinkArgs& args, uint8_t* memory, int rows, const Load& load,
                         const Store& store) {
  const int warp = threadIdx.x / 32;
  const int rings = S::kWarps * gridDim.x;
  typename S::Ring ring(reinterpret_cast<typename S::Shared*>(memory)->rings[warp], args.error);
  if (args.tickets) {
    FirstCome next(args.tickets, rings, rows);
    ring.run(next, load, store);
    next.finish();
  } else {
    InTurn next(warp * gridDim.x + blockIdx.x, rings, rows);
    ring.run(next, load, store);
  }
  bulk_wait_written();
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_moves_kernel(const __grid_constant__ LinkArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  if (threadIdx.x % 32 != 0) return;
  run_ring<S>(
      args, memory, args.num_moves,
      [&](int row, uint8_t* slot, ArrivalBarrier* barrier) {
        const Move& m = args.moves[row];
        arrive_expecting(barrier, S::kBytes);
        bulk_load(slot, args.x[m.from] + size_t(m.from_row) * S::kUnits, S::kBytes, barrier);
      },
      [&](int row, const uint8_t* slot) {
        const Move& m = args.moves[row];
        bulk_store(args.out[m.to] + size_t(m.to_row) * S::kUnits, slot, S::kBytes);
      });
}

// The halves of a move by themselves: nothing is stored, or nothing loaded.
template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_loads_kernel(const __grid_constant__ LinkArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  if (threadIdx.x % 32 != 0) return;
  run_ring<S>(
      args, memory, args.num_moves,
      [&](int row, uint8_t* slot, ArrivalBarrier* barrier) {
        const Move& m = args.moves[row];
        arrive_expecting(barrier, S::kBytes);
        bulk_load(slot, args.x[m.from] + size_t(m.from_row) * S::kUnits, S::kBytes, barrier);
      },
      [](int, const uint8_t*) {});
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_stores_kernel(const __grid_constant__ LinkArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  if (threadIdx.x % 32 != 0) return;
  run_ring<S>(
      args, memory, args.num_moves, [](int, uint8_t*, ArrivalBarrier* barrier) { arrive(barrier); },
      [&](int row, const uint8_t* slot) {
        const Move& m = args.moves[row];
        bulk_store(args.out[m.to] + size_t(m.to_row) * S::kUnits, slot, S::kBytes);
      });
}

// Every row is loaded once and stored wherever it is wanted.
template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_tokens_kernel(const __grid_constant__ LinkArgs args) {
  extern __shared__ __align__(128) uint8_t memory[];
  if (threadIdx.x % 32 != 0) return;
  run_ring<S>(
      args, memory, kTokens,
      [&](int row, uint8_t* slot, ArrivalBarrier* barrier) {
        arrive_expecting(barrier, S::kBytes);
        bulk_load(slot, args.x[args.rank] + size_t(row) * S::kUnits, S::kBytes, barrier);
      },
      [&](int row, const uint8_t* slot) {
        const int4 rows_at = reinterpret_cast<const int4*>(args.row_of)[row];
        const int row_at[kRanks] = {rows_at.x, rows_at.y, rows_at.z, rows_at.w};
#pragma unroll
        for (int p = 0; p < kRanks; ++p)
          if (row_at[p] >= 0)
            bulk_store(args.out[p] + size_t(row_at[p]) * S::kUnits, slot, S::kBytes);
      });
}

// ---- loads and stores --------------------------------------------------------------------------

constexpr int kPlainWarps = 32;
constexpr int kAtOnce = 8;  // loads of a thread in flight

// A warp takes pieces of rows, a piece being what its lanes load at once.
template <int Units>
struct Pieces {
  static constexpr int kPieceUnits = kAtOnce * 32;
  static constexpr int kPerRow = ceil_div(Units, kPieceUnits);

  __device__ static void load(uint4 (&v)[kAtOnce], const uint4* row, int piece) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int u = piece * kPieceUnits + j * 32 + threadIdx.x % 32;
      if (u < Units) v[j] = load_constant(row + u);
    }
  }
  __device__ static void store(uint4* row, const uint4 (&v)[kAtOnce], int piece) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int u = piece * kPieceUnits + j * 32 + threadIdx.x % 32;
      if (u < Units) store_weak(row + u, v[j]);
    }
  }
};

template <int Units>
__global__ void __launch_bounds__(kPlainWarps * 32, 1)
    plain_moves_kernel(const __grid_constant__ LinkArgs args) {
  using P = Pieces<Units>;
  const int step = kPlainWarps * gridDim.x;
  for (int q = threadIdx.x / 32 * gridDim.x + blockIdx.x; q < args.num_moves * P::kPerRow;
       q += step) {
    const Move m = args.moves[q / P::kPerRow];
    uint4 v[kAtOnce];
    P::load(v, args.x[m.from] + size_t(m.from_row) * Units, q % P::kPerRow);
    P::store(args.out[m.to] + size_t(m.to_row) * Units, v, q % P::kPerRow);
  }
}

template <int Units>
__global__ void __launch_bounds__(kPlainWarps * 32, 1)
    plain_loads_kernel(const __grid_constant__ LinkArgs args) {
  using P = Pieces<Units>;
  const int step = kPlainWarps * gridDim.x;
  uint32_t seen = 0;
  for (int q = threadIdx.x / 32 * gridDim.x + blockIdx.x; q < args.num_moves * P::kPerRow;
       q += step) {
    const Move m = args.moves[q / P::kPerRow];
    uint4 v[kAtOnce] = {};
    P::load(v, args.x[m.from] + size_t(m.from_row) * Units, q % P::kPerRow);
    for (const uint4& u : v) seen |= u.x ^ u.y ^ u.z ^ u.w;
  }
  if (seen == 0) atomicAdd(args.mistakes, 1u);
}

template <int Units>
__global__ void __launch_bounds__(kPlainWarps * 32, 1)
    plain_stores_kernel(const __grid_constant__ LinkArgs args) {
  using P = Pieces<Units>;
  const int step = kPlainWarps * gridDim.x;
  uint4 v[kAtOnce];
  for (int j = 0; j < kAtOnce; ++j) v[j] = content(args.rank, threadIdx.x, j);
  for (int q = threadIdx.x / 32 * gridDim.x + blockIdx.x; q < args.num_moves * P::kPerRow;
       q += step) {
    const Move m = args.moves[q / P::kPerRow];
    P::store(args.out[m.to] + size_t(m.to_row) * Units, v, q % P::kPerRow);
  }
}

// ---- who moves what, and when ------------------------------------------------------------------

enum class Mover { kReader, kWriter, kHalf };  // kHalf: even tokens are pulled, odd ones pushed
enum class Order {
  kByToken,  // a token's rows in a row, those of the neighbours first
  kByPeer    // everything of the first neighbour, of the second, ...; own rows in between
};

enum class Ways {
  kAll,     // as routed
  kRemote,  // without the rows that stay
  kNext,    // the remote ones, but all from, or to, the next rank
  kOwn      // as many rows, but all within the rank
};

struct Schedule {
  const char* name;
  Mover mover;
  Order order;
  Ways ways = Ways::kAll;
};

class Schedules {
 public:
  explicit Schedules(const Traffic& traffic) : traffic_(traffic) {}

  // What `rank` moves.
  std::vector<Move> moves(int rank, const Schedule& schedule) const {
    std::vector<Move> all;
    for (int s = 0; s < kRanks; ++s)
      for (int t = 0; t < traffic_.tokens; ++t)
        for (int p = 0; p < kRanks; ++p) {
          const int row = traffic_.row_of[s][t * kRanks + p];
          if (row < 0 || (s == p && schedule.ways != Ways::kAll && schedule.ways != Ways::kOwn))
            continue;
          const bool writer =
              schedule.mover == Mover::kWriter || (schedule.mover == Mover::kHalf && t % 2 == 1);
          if ((writer ? s : p) != rank) continue;
          Move move{s, t, p, row};
          if (schedule.ways == Ways::kNext) (writer ? move.to : move.from) = (rank + 1) % kRanks;
          if (schedule.ways == Ways::kOwn) move.from = move.to = rank;
          all.push_back(move);
        }
    std::stable_sort(all.begin(), all.end(), [&](const Move& a, const Move& b) {
      return key(rank, schedule.order, a) < key(rank, schedule.order, b);
    });
    return all;
  }

 private:
  int64_t key(int rank, Order order, const Move& m) const {
    const int peer = m.from == rank ? m.to : m.from;
    const int turn = (peer - rank - 1 + kRanks) % kRanks;  // the rank itself is last
    if (order == Order::kByToken) return m.from_row * kRanks + turn;
    const int64_t among_peers = int64_t{turn} * traffic_.tokens + m.from_row;
    if (turn < kRanks - 1) return among_peers;
    return int64_t{m.from_row} * (kRanks - 1);
  }

  const Traffic& traffic_;
};

// ---- the study ---------------------------------------------------------------------------------

template <int Units>
class LinkStudy {
 public:
  LinkStudy(Node& node, Report& report, const Traffic& traffic)
      : node_(node), report_(report), schedules_(traffic),
        remote_bytes_(double(traffic.most_remote_rows()) * Units * 16) {
    node.each([&](int r) {
      x_[r] = device_array<uint4>(size_t(kTokens) * Units);
      out_[r] = device_array<uint4>(size_t(kRanks) * kTokens * Units);
    });
    node.each([&](int r) {
      args_[r] = arguments(r, traffic);
      fill_kernel<Units><<<132, 512, 0, node.gpu(r).stream>>>(args_[r]);
    });
    node.synchronize();
  }

  ~LinkStudy() {
    node_.each([&](int r) {
      for (void* p : {(void*)x_[r], (void*)out_[r], (void*)args_[r].row_of, (void*)args_[r].moves,
                      (void*)args_[r].arrivals, (void*)args_[r].tickets, (void*)args_[r].mistakes})
        check(cudaFree(p), "free");
    });
  }

  enum class Half { kBoth, kLoads, kStores };

  template <int Warps, int Ahead, int Behind, Half H = Half::kBoth>
  void bulk(const Schedule& schedule, const std::vector<int>& sms, bool first_come) {
    using S = BulkShape<Units, Warps, Ahead, Behind>;
    const auto kernel = H == Half::kBoth    ? bulk_moves_kernel<S>
                        : H == Half::kLoads ? bulk_loads_kernel<S>
                                            : bulk_stores_kernel<S>;
    set(schedule, first_come);
    time(schedule, shape<H>("bulk", Warps, Ahead, Behind), kernel, Warps * 32,
         sizeof(typename S::Shared), sms, H == Half::kBoth);
  }

  // Pushes every token by one load.
  template <int Warps, int Ahead, int Behind>
  void bulk_tokens(const std::vector<int>& sms, bool first_come) {
    using S = BulkShape<Units, Warps, Ahead, Behind>;
    const Schedule schedule{"push, each row loaded once", Mover::kWriter, Order::kByToken};
    set(schedule, first_come);
    time(schedule, shape<Half::kBoth>("bulk", Warps, Ahead, Behind), bulk_tokens_kernel<S>,
         Warps * 32, sizeof(typename S::Shared), sms, true);
  }

  template <Half H = Half::kBoth>
  void plain(const Schedule& schedule, const std::vector<int>& sms) {
    const auto kernel = H == Half::kBoth    ? plain_moves_kernel<Units>
                        : H == Half::kLoads ? plain_loads_kernel<Units>
                                            : plain_stores_kernel<Units>;
    set(schedule, false);
    time(schedule, shape<H>("plain", kPlainWarps, 0, 0), kernel, kPlainWarps * 32, 0, sms,
         H == Half::kBoth);
  }

 private:
  template <Half H>
  static std::string shape(const char* method, int warps, int ahead, int behind) {
    const char* half = H == Half::kBoth ? "" : H == Half::kLoads ? ", loads only" : ", stores only";
    return field("method", std::string(method) + half) + ", " + field("warps", warps) + ", " +
           field("ahead", ahead) + ", " + field("behind", behind);
  }

  LinkArgs arguments(int r, const Traffic& traffic) {
    LinkArgs a{};
    for (int p = 0; p < kRanks; ++p) a.x[p] = x_[p], a.out[p] = out_[p];
    a.row_of = upload(traffic.row_of[r]);
    a.arrivals = upload(traffic.arrivals[r]);
    a.num_arrivals = static_cast<int>(traffic.arrivals[r].size());
    a.rank = r;
    a.mistakes = device_array<uint32_t>(1);
    a.error = node_.gpu(r).error;
    return a;
  }

  void set(const Schedule& schedule, bool first_come) {
    node_.each([&](int r) {
      LinkArgs& a = args_[r];
      check(cudaFree(const_cast<Move*>(a.moves)), "free");
      check(cudaFree(a.tickets), "free");
      const std::vector<Move> moves = schedules_.moves(r, schedule);
      a.moves = upload(moves);
      a.num_moves = static_cast<int>(moves.size());
      a.tickets = first_come ? device_array<TicketCounters>(1) : nullptr;
    });
  }

  // Bytes that leave a rank for others, or move within it.
  double bytes_of(const Schedule& schedule) const {
    return schedule.ways == Ways::kOwn ? double(args_[0].num_moves) * Units * 16 : remote_bytes_;
  }

  void time(const Schedule& schedule, const std::string& method, void (*kernel)(LinkArgs),
            int threads, size_t shared, const std::vector<int>& sms, bool complete) {
    node_.each([&](int) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "shared memory");
    });
    for (const int ctas : sms) {
      const auto call = [&](int r) {
        kernel<<<ctas, threads, shared, node_.gpu(r).stream>>>(args_[r]);
      };
      std::string all = field("probe", "link") + ", " + field("schedule", schedule.name) + ", " +
                        method + ", " + field("rows", args_[0].tickets ? "first come" : "in turn") +
                        ", " + field("row_bytes", Units * 16) + ", " + field("sms", ctas);
      if (complete && schedule.ways == Ways::kAll)
        all += ", " + field("mistakes", mistakes_after(call));
      const Timing timing = time_plan(node_, {call, 1, 20, true});
      report_.timing(all + ", " + field("timeouts", node_.take_errors()) + ", " +
                         field("gb_per_s", bytes_of(schedule) / timing.median / 1e3),
                     timing);
    }
  }

  uint32_t mistakes_after(const std::function<void(int)>& call) {
    node_.each([&](int r) {
      check(cudaMemset(out_[r], 0xA5, size_t(args_[r].num_arrivals) * Units * 16), "poison");
    });
    node_.synchronize();
    node_.each(call);
    node_.synchronize();
    uint32_t sum = 0;
    node_.each([&](int r) {
      compare_kernel<Units><<<132, 512, 0, node_.gpu(r).stream>>>(args_[r]);
      check(cudaStreamSynchronize(node_.gpu(r).stream), "compare");
      sum += take(args_[r].mistakes);
    });
    return sum;
  }

  Node& node_;
  Report& report_;
  Schedules schedules_;
  double remote_bytes_;
  uint4* x_[kRanks];
  uint4* out_[kRanks];
  LinkArgs args_[kRanks];
};

constexpr Schedule kPull{"pull", Mover::kReader, Order::kByToken};
constexpr Schedule kPush{"push", Mover::kWriter, Order::kByToken};
constexpr Schedule kPullByPeer{"pull, peer by peer", Mover::kReader, Order::kByPeer};
constexpr Schedule kPushByPeer{"push, peer by peer", Mover::kWriter, Order::kByPeer};
constexpr Schedule kHalf{"half pushed, half pulled", Mover::kHalf, Order::kByToken};

// Only to see what bounds the others.
constexpr Schedule kPullNext{"pull, next rank only", Mover::kReader, Order::kByToken, Ways::kNext};
constexpr Schedule kPushNext{"push, next rank only", Mover::kWriter, Order::kByToken, Ways::kNext};
constexpr Schedule kOwn{"within the rank", Mover::kReader, Order::kByToken, Ways::kOwn};

// Ahead and behind by pull and push, as many as fit.
template <int Units, int Warps, int Slots>
void study_rows(Node& node, Report& report, const Traffic& traffic) {
  const std::vector<int> all{4, 8, 10, 12, 16, 24, 32};
  const std::vector<int> some{12, 24};
  LinkStudy<Units> study(node, report, traffic);
  for (const bool first_come : {false, true}) {
    study.template bulk<Warps, Slots - 1, 1>(kPull, all, first_come);
    study.template bulk_tokens<Warps, Slots - 1, 1>(all, first_come);
    study.template bulk<Warps, Slots - 1, 1>(kPush, some, first_come);
    for (const Schedule& s : {kPullByPeer, kPushByPeer, kHalf, kPullNext, kPushNext})
      study.template bulk<Warps, Slots - 1, 1>(s, some, first_come);
  }
  study.plain(kPull, all);
  study.plain(kPush, all);
}

// What one SM can do by itself.
template <int Units, int Warps, int Slots>
void study_sm(Node& node, Report& report, const Traffic& traffic) {
  using Study = LinkStudy<Units>;
  const std::vector<int> sms{4, 8, 16, 32};
  Study study(node, report, traffic);
  study.template bulk<Warps, Slots - 1, 1>(kOwn, sms, false);
  study.template bulk<Warps, Slots - 1, 1, Study::Half::kLoads>(kOwn, sms, false);
  study.template bulk<Warps, 1, Slots - 1, Study::Half::kStores>(kOwn, sms, false);
  study.plain(kOwn, sms);
  study.template plain<Study::Half::kLoads>(kOwn, sms);
  study.template plain<Study::Half::kStores>(kOwn, sms);
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  if (node.ranks() != kRanks) return std::fprintf(stderr, "four GPUs are needed\n"), 1;
  Report report(argv[1]);
  const Traffic traffic(11, kTokens, 8, 256, 0.0);
  study_rows<2048 / 16, 8, 12>(node, report, traffic);
  study_rows<7392 / 16, 4, 7>(node, report, traffic);
  study_rows<7424 / 16, 4, 7>(node, report, traffic);
  study_rows<14336 / 16, 4, 3>(node, report, traffic);
  study_sm<14336 / 16, 4, 3>(node, report, traffic);
  study_sm<14336 / 16, 1, 15>(node, report, traffic);
  study_sm<3584 / 16, 8, 7>(node, report, traffic);
}
