// How few SMs keep NVLink busy, and what one SM can do: all GPUs exchange the rows of one
// high-throughput dispatch, each (token, rank) once, by pushing or by pulling, with bulk copies
// through shared memory or with 16-byte loads and stores. No flags and no counts: every row's place
// is known and every row is there when the call begins.
//   link RESULTS.jsonl
#include "bulk_ring.cuh"
#include "traffic.hpp"

namespace fanfold::probe {

constexpr int kTokens = 4096;

enum class Half { kBoth, kLoads, kStores };

// One copy of a row.
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
  static constexpr int kAhead = Ahead;
  static constexpr int kBehind = Behind;
  static constexpr int kBytes = Units * 16;
  using Ring = BulkRing<kBytes, Ahead, Behind>;
  struct Shared {
    typename Ring::Shared rings[Warps];
  };
};

// Runs a ring of this warp over rows 0 to `rows`.
template <class S, class Load, class Store>
__device__ void run_ring(const LinkArgs& args, int rows, const Load& load, const Store& store) {
  if (threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x / 32;
  const int rings = S::kWarps * gridDim.x;
  typename S::Ring ring(dynamic_shared<typename S::Shared>().rings[warp], args.error);
  if (args.tickets) {
    FirstCome next(args.tickets, rings, rows);
    ring.run(next, load, store);
    next.finish();
  } else {
    InTurn next(warp * gridDim.x + blockIdx.x, rings, rows);
    ring.run(next, load, store);
  }
  bulk_await_written<0>();
}

// Row by row; or the half of it that loads, or stores, alone.
template <class S, Half H>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_moves_kernel(const __grid_constant__ LinkArgs args) {
  run_ring<S>(
      args, args.num_moves,
      [&](int row, uint8_t* slot, ArrivalBarrier* barrier) {
        if (H == Half::kStores) return arrive(barrier);
        const Move& m = args.moves[row];
        arrive_expecting(barrier, S::kBytes);
        bulk_load(slot, args.x[m.from] + size_t(m.from_row) * S::kUnits, S::kBytes, barrier);
      },
      [&](int row, const uint8_t* slot) {
        if (H == Half::kLoads) return;
        const Move& m = args.moves[row];
        bulk_store(args.out[m.to] + size_t(m.to_row) * S::kUnits, slot, S::kBytes);
      });
}

// Every row is loaded once and stored at each rank that receives it.
template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    bulk_tokens_kernel(const __grid_constant__ LinkArgs args) {
  run_ring<S>(
      args, kTokens,
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

// A warp takes pieces of rows; a piece is what its lanes load at once.
template <int Units, Half H>
__global__ void __launch_bounds__(kPlainWarps * 32, 1)
    plain_moves_kernel(const __grid_constant__ LinkArgs args) {
  constexpr int kPieces = static_cast<int>(ceil_div(Units, kAtOnce * 32));  // of a row
  const int step = kPlainWarps * gridDim.x;
  uint32_t seen = 0;
  uint4 v[kAtOnce] = {};
  for (int q = threadIdx.x / 32 * gridDim.x + blockIdx.x; q < args.num_moves * kPieces; q += step) {
    const Move m = args.moves[q / kPieces];
    const int first = q % kPieces * kAtOnce * 32 + threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int u = first + j * 32; H != Half::kStores && u < Units)
        v[j] = load_once(args.x[m.from] + size_t(m.from_row) * Units + u);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (const int u = first + j * 32; H != Half::kLoads && u < Units)
        store_weak(args.out[m.to] + size_t(m.to_row) * Units + u, v[j]);
    if (H == Half::kLoads)
      for (const uint4& u : v) seen |= u.x ^ u.y ^ u.z ^ u.w;
  }
  if (H == Half::kLoads && seen == 0) atomicAdd(args.mistakes, 1u);  // so the loads have a use
}

// ---- who copies which rows ----------------------------------------------------------------------

enum class Way {
  kPull,  // the reader copies
  kPush,  // the writer copies
  kOwn    // as many rows as a pull, but all within the rank
};

inline const char* name_of(Way way) {
  return way == Way::kPull ? "pull" : way == Way::kPush ? "push" : "within the rank";
}

// What `rank` copies, by token; of one token the next rank's row first and its own last.
inline std::vector<Move> moves_of(int rank, Way way, const Traffic& traffic) {
  std::vector<Move> moves;
  for (int s = 0; s < kRanks; ++s)
    for (int i = 0; i < traffic.tokens * kRanks; ++i) {
      const int p = i % kRanks, row = traffic.row_of[s][i];
      if (row < 0 || (way == Way::kPush ? s : p) != rank) continue;
      if (way == Way::kOwn) moves.push_back({rank, i / kRanks, rank, row});
      if (way != Way::kOwn) moves.push_back({s, i / kRanks, p, row});
    }
  const auto key = [&](const Move& m) {
    const int peer = m.from == rank ? m.to : m.from;
    return m.from_row * kRanks + (peer - rank - 1 + kRanks) % kRanks;
  };
  std::stable_sort(moves.begin(), moves.end(),
                   [&](const Move& a, const Move& b) { return key(a) < key(b); });
  return moves;
}

// ---- the study ---------------------------------------------------------------------------------

template <int Units>
class LinkStudy {
 public:
  LinkStudy(Node& node, Report& report, const Traffic& traffic)
      : node_(node), report_(report), traffic_(traffic),
        remote_bytes_(double(traffic.most_remote_rows()) * Units * 16) {
    node.each([&](int r) {
      x_[r] = device_array<uint4>(size_t(kTokens) * Units);
      out_[r] = device_array<uint4>(size_t(kRanks) * kTokens * Units);
    });
    node.each([&](int r) {
      args_[r] = arguments(r);
      fill_kernel<Units><<<kCtas, 512, 0, node.gpu(r).stream>>>(args_[r]);
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

  template <class S, Half H = Half::kBoth>
  void bulk(Way way, const std::vector<int>& sms, bool first_come) {
    set(way, first_come);
    time<S, H>(way, name_of(way), bulk_moves_kernel<S, H>, sms);
  }

  // Pushes every token after one load.
  template <class S>
  void bulk_tokens(const std::vector<int>& sms, bool first_come) {
    set(Way::kPush, first_come);
    time<S, Half::kBoth>(Way::kPush, "push, each row loaded once", bulk_tokens_kernel<S>, sms);
  }

  template <Half H = Half::kBoth>
  void plain(Way way, const std::vector<int>& sms) {
    set(way, false);
    time<void, H>(way, name_of(way), plain_moves_kernel<Units, H>, sms);
  }

 private:
  LinkArgs arguments(int r) {
    LinkArgs a{};
    for (int p = 0; p < kRanks; ++p) a.x[p] = x_[p], a.out[p] = out_[p];
    a.row_of = upload(traffic_.row_of[r]);
    a.arrivals = upload(traffic_.arrivals[r]);
    a.num_arrivals = static_cast<int>(traffic_.arrivals[r].size());
    a.rank = r;
    a.mistakes = device_array<uint32_t>(1);
    a.error = node_.gpu(r).error;
    return a;
  }

  void set(Way way, bool first_come) {
    node_.each([&](int r) {
      LinkArgs& a = args_[r];
      check(cudaFree(const_cast<Move*>(a.moves)), "free");
      check(cudaFree(a.tickets), "free");
      const std::vector<Move> moves = moves_of(r, way, traffic_);
      a.moves = upload(moves);
      a.num_moves = static_cast<int>(moves.size());
      a.tickets = first_come ? device_array<TicketCounters>(1) : nullptr;
    });
  }

  template <class S, Half H>
  static std::string method() {
    const char* half = H == Half::kBoth ? "" : H == Half::kLoads ? ", loads only" : ", stores only";
    if constexpr (std::is_void_v<S>)
      return field("method", std::string("plain") + half) + ", " + field("warps", kPlainWarps);
    else
      return field("method", std::string("bulk") + half) + ", " + field("warps", S::kWarps) + ", " +
             field("ahead", S::kAhead) + ", " + field("behind", S::kBehind);
  }

  template <class S, Half H>
  void time(Way way, const char* schedule, void (*kernel)(LinkArgs), const std::vector<int>& sms) {
    int threads = kPlainWarps * 32, shared = 0;
    if constexpr (!std::is_void_v<S>) threads = S::kWarps * 32, shared = sizeof(typename S::Shared);
    node_.each([&](int) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
            "shared memory");
    });
    // Bytes that leave a rank for others, or move within it.
    const double bytes = way == Way::kOwn ? double(args_[0].num_moves) * Units * 16 : remote_bytes_;
    for (const int ctas : sms) {
      const auto call = [&](int r) {
        kernel<<<ctas, threads, shared, node_.gpu(r).stream>>>(args_[r]);
      };
      std::string all = field("probe", "link") + ", " + field("schedule", schedule) + ", " +
                        method<S, H>() + ", " +
                        field("rows", args_[0].tickets ? "first come" : "in turn") + ", " +
                        field("row_bytes", Units * 16) + ", " + field("sms", ctas);
      if (H == Half::kBoth && way != Way::kOwn)
        all += ", " + field("mistakes", mistakes_after(call));
      const Timing timing = time_plan(node_, {call, 1, 20, true});
      report_.timing(all + ", " + field("timeouts", node_.take_errors()) + ", " +
                         field("gb_per_s", bytes / timing.median / 1e3),
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
      compare_kernel<Units><<<kCtas, 512, 0, node_.gpu(r).stream>>>(args_[r]);
      check(cudaStreamSynchronize(node_.gpu(r).stream), "compare");
      sum += take(args_[r].mistakes);
    });
    return sum;
  }

  Node& node_;
  Report& report_;
  const Traffic& traffic_;
  double remote_bytes_;
  uint4* x_[kRanks];
  uint4* out_[kRanks];
  LinkArgs args_[kRanks];
};

// `Slots` is what fits the shared memory: all but one of them loaded ahead.
template <int Units, int Warps, int Slots>
void study_rows(Node& node, Report& report, const Traffic& traffic) {
  using S = BulkShape<Units, Warps, Slots - 1, 1>;
  const std::vector<int> sms{4, 8, 10, 12, 16, 24, 32};
  LinkStudy<Units> study(node, report, traffic);
  for (const bool first_come : {false, true}) {
    study.template bulk<S>(Way::kPull, sms, first_come);
    study.template bulk_tokens<S>(sms, first_come);
  }
  study.plain(Way::kPull, sms);
  study.plain(Way::kPush, sms);
}

// What one SM can do by itself.
template <int Units, int Warps, int Slots>
void study_sm(Node& node, Report& report, const Traffic& traffic) {
  using Loads = BulkShape<Units, Warps, Slots - 1, 1>;
  using Stores = BulkShape<Units, Warps, 1, Slots - 1>;
  const std::vector<int> sms{4, 8, 16, 32};
  LinkStudy<Units> study(node, report, traffic);
  study.template bulk<Loads>(Way::kOwn, sms, false);
  study.template bulk<Loads, Half::kLoads>(Way::kOwn, sms, false);
  study.template bulk<Stores, Half::kStores>(Way::kOwn, sms, false);
  study.plain(Way::kOwn, sms);
  study.template plain<Half::kLoads>(Way::kOwn, sms);
  study.template plain<Half::kStores>(Way::kOwn, sms);
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  if (node.ranks() != kRanks) return std::fprintf(stderr, "four GPUs are needed\n"), 1;
  Report report(argv[1]);
  const Traffic traffic(11, kTokens, 8, 256);
  study_rows<2048 / 16, 8, 12>(node, report, traffic);
  study_rows<7424 / 16, 4, 7>(node, report, traffic);
  study_rows<14336 / 16, 4, 3>(node, report, traffic);
  study_sm<14336 / 16, 4, 3>(node, report, traffic);
}
