// How fast operand tiles reach shared memory: from the L2, and weights from memory.
//   feed RESULTS.jsonl
#include "feed.cuh"

#include "data.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kDepth = 7168;
constexpr int kColumns = 4096;
constexpr int kExperts = 64;

struct Source {
  const char* name;
  Routing routing;  // rows of each expert
  int columns;
  bool packed;     // b lies tile by tile
  int rounds = 0;  // tiles of each CTA; 0: those of the source, once
  Between between = Between::flush;
};

class Bench {
 public:
  Bench()
      : a_(random_e4m3(int64_t{kExperts} * 256 * kDepth, 1)),
        b_(random_e4m3(int64_t{kExperts} * kColumns * kDepth, 2)),
        scales_(random_scales(int64_t{kExperts} * 256 * (kDepth / 128), 3)) {}

  // `common`: the operand that the two CTAs of a cluster both need, by multicast or each for itself.
  template <class T>
  void run(Report& report, Timer& timer, const Source& source, Shared common = Shared::nothing,
           bool multicast = true) {
    auto plan = plan_tiles(source.routing, source.columns, T::kBlockM, T::kBlockN, T::kCluster,
                           multicast, common == Shared::b);
    if (T::kCluster == 2 && common == Shared::nothing)
      for (Work& work : plan) {  // as rows of the next pair, columns of this one
        work.row[1] = (work.row[0] + T::kBlockM) % source.routing.total_rows;
        work.shared = Shared::nothing;
      }
    if (source.rounds) {  // as many tiles for every CTA, again and again
      const size_t once = plan.size();
      plan.resize(source.rounds * (132 / T::kCluster));
      for (size_t i = once; i < plan.size(); ++i) plan[i] = plan[i % once];
    }
    Work* works = upload(plan);
    const Operands operands = make<T>(source, works, static_cast<int>(plan.size()));
    const Grid grid{132 / T::kCluster * T::kCluster, (kMathWarps + 1) * 32, T::kCluster,
                    sizeof(Ring<T>)};
    auto* kernel = feed_kernel<T>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          "shared memory");
    const Timing timing = timer.time([&] { launch(kernel, grid, operands); }, source.between, 9);
    check_waits("feed");
    const double tiles = double(plan.size()) * T::kCluster;
    const double bytes = tiles * operands.blocks_k * T::kStageBytes;
    const double flops = tiles * 2.0 * T::kBlockM * T::kBlockN * kDepth;
    report.line("\"probe\": \"feed\"" + field("source", source.name) +
                field("block_m", T::kBlockM) + field("block_n", T::kBlockN) +
                field("stages", T::kStages) + field("cluster", T::kCluster) +
                field("common", common == Shared::nothing ? "none"
                                : common == Shared::a     ? "a"
                                                          : "b") +
                field("multicast", multicast && common != Shared::nothing ? "yes" : "no") +
                field("between", name_of(source.between)) + field("us", timing.median) +
                field("least", timing.least) + field("most", timing.most) +
                field("landed_tb_per_s", bytes / timing.median * 1e-6) +
                field("flops_fed_tflops", flops / timing.median * 1e-6) +
                field("weights_tb_per_s", double(kDepth) * source.columns *
                                              source.routing.rows.size() / timing.median * 1e-6));
    check(cudaFree(works), "free");
  }

  template <int kM, int kN, int kStages>
  void clusters(Report& report, Timer& timer, const Source& source) {
    using Pair = Tile<kM, kN, kStages, 2>;
    run<Tile<kM, kN, kStages, 1>>(report, timer, source);
    run<Pair>(report, timer, source);
    run<Pair>(report, timer, source, Shared::a, false);
    run<Pair>(report, timer, source, Shared::a);
    run<Pair>(report, timer, source, Shared::b, false);
    run<Pair>(report, timer, source, Shared::b);
  }

 private:
  template <class T>
  Operands make(const Source& source, const Work* works, int count) {
    const uint64_t rows = source.routing.total_rows;
    const uint64_t experts = source.routing.rows.size();
    const uint64_t columns = source.columns;
    Operands operands{};
    operands.a = tensor_map(a_, {{kDepth, rows, 1}, {128, T::kBlockM / 2, 1}});
    operands.b = source.packed
                     ? tensor_map(b_, {{128, experts * columns * (kDepth / 128), 1},
                                       {128, T::kBlockN / 2, 1}})
                     : tensor_map(b_, {{kDepth, columns, experts}, {128, T::kBlockN / 2, 1}});
    operands.a_scales = scales_;
    operands.rows = static_cast<int64_t>(rows);
    operands.blocks_k = kDepth / 128;
    operands.packed_columns = source.packed ? source.columns : 0;
    operands.plan = works;
    operands.works = count;
    return operands;
  }

  uint8_t *a_, *b_;
  float* scales_;
};

// `rows` of each of `experts`.
Source even(const char* name, int experts, int rows, int columns, bool packed = false) {
  Source source{name, {}, columns, packed};
  for (int e = 0; e < experts; ++e) {
    source.routing.first_row.push_back(e * rows);
    source.routing.rows.push_back(rows);
    source.routing.total_rows += rows;
    source.routing.routed_rows += rows;
  }
  return source;
}

void cached(Report& report, Timer& timer, Bench& bench) {
  // 11 MB of each operand.
  Source source = even("cached", 1, 1536, 1536);
  source.rounds = 12;
  bench.clusters<64, 256, 2>(report, timer, source);
  bench.clusters<64, 256, 3>(report, timer, source);
  bench.clusters<64, 256, 4>(report, timer, source);
  bench.clusters<64, 256, 5>(report, timer, source);
  bench.clusters<128, 256, 2>(report, timer, source);
  bench.clusters<128, 256, 3>(report, timer, source);
  bench.clusters<128, 256, 4>(report, timer, source);
  bench.clusters<128, 192, 3>(report, timer, source);
  bench.clusters<128, 192, 4>(report, timer, source);
  bench.clusters<128, 192, 5>(report, timer, source);
  bench.clusters<128, 128, 6>(report, timer, source);
  bench.clusters<192, 192, 3>(report, timer, source);
  bench.clusters<192, 192, 4>(report, timer, source);
}

void streamed(Report& report, Timer& timer, Bench& bench) {
  for (const bool packed : {false, true}) {
    const auto source = [&](int rows, Between between = Between::clean_flush) {
      Source made =
          even(packed ? "streamed, packed" : "streamed", kExperts, rows, kColumns, packed);
      made.between = between;
      return made;
    };
    bench.run<Tile<64, 256, 4, 1>>(report, timer, source(64, Between::flush));
    bench.run<Tile<64, 256, 2, 1>>(report, timer, source(64));
    bench.run<Tile<64, 256, 3, 1>>(report, timer, source(64));
    bench.run<Tile<64, 256, 4, 1>>(report, timer, source(64));
    bench.run<Tile<64, 256, 5, 1>>(report, timer, source(64));
    bench.run<Tile<64, 256, 5, 2>>(report, timer, source(64), Shared::a);
    bench.run<Tile<64, 128, 4, 1>>(report, timer, source(64));
    bench.run<Tile<64, 128, 6, 1>>(report, timer, source(64));
    bench.run<Tile<64, 128, 8, 1>>(report, timer, source(64));
    bench.run<Tile<128, 256, 4, 2>>(report, timer, source(128), Shared::a);
    bench.run<Tile<128, 256, 4, 2>>(report, timer, source(256), Shared::b);
  }
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return 2;
  Report report(argv[1], argc, argv);
  Timer timer;
  Bench bench;
  cached(report, timer, bench);
  streamed(report, timer, bench);
}
