// How fast a grouped FP8 GEMM of own PTX is, and how exact, over tiles, clusters and sums.
//   grouped_gemm RESULTS.jsonl
#include "grouped_gemm.cuh"

#include "data.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kExperts = 64;
constexpr int kTopK = 8;
constexpr int kSamples = 48;

struct Layer {
  const char* name;
  int k, columns;
};

struct Options {
  bool shares = true;        // by multicast
  bool skips_loads = false;  // wrong results, to place time
};

const char* name_of(Sum sum) {
  switch (sum) {
    case Sum::in_place:
      return "in place";
    case Sum::two_level:
      return "two level";
    case Sum::halves:
      return "two level, halves";
    case Sum::unscaled:
      return "unscaled";
  }
  return "";
}

// Operands of one GEMM of the layer; made once, for the most rows.
class Bench {
 public:
  Bench(const Layer& layer, int64_t most_rows)
      : layer(layer), a_(random_e4m3(most_rows * layer.k, 1)),
        b_(random_e4m3(int64_t{kExperts} * layer.columns * layer.k, 2)),
        a_scales_(random_scales(most_rows * (layer.k / 128), 3)),
        b_scales_(random_scales(int64_t{kExperts} * (layer.columns / 128) * (layer.k / 128), 4)),
        d_(device_array<uint16_t>(most_rows * layer.columns)), spans_(device_array<Span>(1024)),
        reference_(device_array<double>(int64_t{kSamples} * layer.columns)),
        nans_(device_array<unsigned long long>(1)) {}
  ~Bench() {
    for (void* each : {(void*)a_, (void*)b_, (void*)a_scales_, (void*)b_scales_, (void*)d_,
                       (void*)spans_, (void*)reference_, (void*)nans_})
      check(cudaFree(each), "free");
  }

  template <class P>
  void run(Report& report, Timer& timer, const char* form, int tokens, const Routing& routing,
           Between between = Between::flush, const Options& options = {}) {
    using T = typename P::T;
    const auto plan =
        plan_tiles(routing, layer.columns, T::kBlockM, T::kBlockN, T::kCluster, options.shares);
    Work* works = upload(plan);
    GemmArgs args = arguments<P>(routing, works, static_cast<int>(plan.size()));
    args.operands.skips_loads = options.skips_loads;
    const Grid grid{132 / T::kCluster * T::kCluster, kGemmThreads, T::kCluster,
                    sizeof(GemmShared<P>)};
    auto* kernel = grouped_gemm_kernel<P>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          "shared memory");
    check(cudaMemset(d_, 0xff, routing.total_rows * int64_t{layer.columns} * 2), "poison");
    launch(kernel, grid, args);
    check(cudaDeviceSynchronize(), "grouped GEMM");
    check_waits("grouped GEMM");
    const bool right = !options.skips_loads && P::kSum != Sum::unscaled;
    const Accuracy accuracy = right ? compare(routing, args.operands.rows) : Accuracy{};
    const Timing timing = timer.time([&] { launch(kernel, grid, args); }, between);
    const double flops = 2.0 * routing.routed_rows * layer.columns * layer.k;
    report.line(
        "\"probe\": \"grouped_gemm\"" + field("layer", layer.name) + field("form", form) +
        field("tokens", tokens) + field("block_m", T::kBlockM) + field("block_n", T::kBlockN) +
        field("stages", T::kStages) + field("cluster", T::kCluster) +
        field("multicast", T::kCluster == 2 && options.shares ? "yes" : "no") +
        field("sum", name_of(P::kSum)) + field("loads", options.skips_loads ? "none" : "all") +
        field("turns", P::kTurns == Turns::none        ? "none"
                       : P::kTurns == Turns::issued    ? "issued"
                       : P::kTurns == Turns::half_done ? "half done"
                                                       : "nearly done") +
        field("store_slots", kStoreSlots<P>) + field("between", name_of(between)) +
        field("us", timing.median) + field("least", timing.least) + field("most", timing.most) +
        field("tflops", flops / timing.median * 1e-6) +
        (right ? field("difference", accuracy.difference) + field("worst", accuracy.worst) +
                     field("unwritten", static_cast<double>(accuracy.unwritten))
               : field("results", "wrong, to place time")) +
        spans<P>(grid.ctas));
    check(cudaFree(works), "free");
  }

  const Layer layer;

 private:
  template <class P>
  GemmArgs arguments(const Routing& routing, const Work* works, int count) {
    using T = typename P::T;
    const uint64_t k = layer.k;
    const uint64_t rows = routing.total_rows;
    const uint64_t columns = layer.columns;
    GemmArgs args{};
    args.operands.a = tensor_map(a_, {{k, rows, 1}, {128, T::kBlockM / 2, 1}});
    args.operands.b = tensor_map(b_, {{k, columns, kExperts}, {128, T::kBlockN / 2, 1}});
    args.operands.a_scales = a_scales_;
    args.operands.rows = static_cast<int64_t>(rows);
    args.operands.blocks_k = layer.k / 128;
    args.operands.plan = works;
    args.operands.works = count;
    args.d = tensor_map(
        d_, {{columns, rows}, {kStoreColumns, kWgmmaRows}, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2});
    args.b_scales = b_scales_;
    args.columns = layer.columns;
    args.spans = spans_;
    return args;
  }

  Accuracy compare(const Routing& routing, int64_t total_rows) {
    std::vector<SampleRow> samples;
    for (uint64_t i = 0; samples.size() < kSamples; ++i) {
      const int expert = static_cast<int>(hash(2 * i) % kExperts);
      if (routing.rows[expert] == 0) continue;
      const int row = static_cast<int>(hash(2 * i + 1) % routing.rows[expert]);
      samples.push_back({routing.first_row[expert] + row, expert});
    }
    SampleRow* uploaded = upload(samples);
    const ReferenceArgs args{layer.k, layer.columns, 1,         total_rows, a_,
                             b_,      a_scales_,     b_scales_, uploaded,   reference_};
    reference_kernel<<<dim3((layer.columns + 7) / 8, kSamples), 256>>>(args);
    check(cudaMemset(nans_, 0, 8), "clear");
    for (int e = 0; e < kExperts; ++e)
      if (routing.rows[e])
        count_nans_kernel<<<routing.rows[e], 256>>>(
            d_ + int64_t{routing.first_row[e]} * layer.columns, layer.columns, nans_);
    check(cudaDeviceSynchronize(), "reference");
    const auto want = download(reference_, samples.size() * layer.columns);
    double xx = 0, yy = 0, xy = 0, worst = 0;
    for (size_t s = 0; s < samples.size(); ++s) {
      const auto got = download(d_ + int64_t{samples[s].row} * layer.columns, layer.columns);
      for (int c = 0; c < layer.columns; ++c) {
        const uint32_t bits = uint32_t{got[c]} << 16;
        float y;
        std::memcpy(&y, &bits, 4);
        const double x = want[s * layer.columns + c];
        xx += x * x;
        yy += double{y} * y;
        xy += x * y;
        worst = std::max(worst, std::abs(x - y));
      }
    }
    check(cudaFree(uploaded), "free");
    return {1 - 2 * xy / (xx + yy), worst / std::sqrt(xx / want.size()),
            static_cast<int64_t>(download(nans_, 1)[0])};
  }

  // The clock during the last call, the first and the last CTA to end, and the shares of cycles
  // that the first warpgroup of an average CTA waited.
  template <class P>
  std::string spans(int ctas) {
    const auto all = download(spans_, ctas);
    double cycles = 0, ns = 0;
    uint64_t begin = ~0ull, first_end = ~0ull, last_end = 0;
    Stalls sum;
    for (const Span& span : all) {
      cycles += span.cycles;
      ns += span.end_ns - span.begin_ns;
      begin = std::min(begin, span.begin_ns);
      first_end = std::min(first_end, span.end_ns);
      last_end = std::max(last_end, span.end_ns);
      sum.full += span.stalls.full;
      sum.turn += span.stalls.turn;
      sum.tensor += span.stalls.tensor;
      sum.enqueue += span.stalls.enqueue;
      sum.store += span.stalls.store;
    }
    std::string text = field("mhz", cycles / ns * 1e3) +
                       field("first_end_us", (first_end - begin) * 1e-3) +
                       field("last_end_us", (last_end - begin) * 1e-3);
    if (P::kProfile)
      text += field("await_full", sum.full / cycles) + field("await_turn", sum.turn / cycles) +
              field("enqueue", sum.enqueue / cycles) + field("await_tensor", sum.tensor / cycles) +
              field("store", sum.store / cycles);
    return text;
  }

  uint8_t *a_, *b_;
  float *a_scales_, *b_scales_;
  uint16_t* d_;
  Span* spans_;
  double* reference_;
  unsigned long long* nans_;
};

constexpr Layer kFirst{"first", 7168, 4096};
constexpr Layer kSecond{"second", 2048, 7168};

template <int kM, int kN, int kStages, int kCluster>
using Of = Tile<kM, kN, kStages, kCluster>;

template <int kStages, int kCluster = 2, Turns kTurns = Turns::issued, bool kProfile = false>
using Wide = Policy<Of<128, 256, kStages, kCluster>, Sum::in_place, kTurns, kProfile>;

template <int kStages, Sum kSum, int kCluster = 2, bool kProfile = false>
using Free = Policy<Of<128, 256, kStages, kCluster>, kSum, Turns::none, kProfile>;

class Contiguous {
 public:
  Contiguous(Report& report, Timer& timer, const Layer& layer)
      : bench_(layer, 8192 * kTopK + kExperts * 128), report_(report), timer_(timer) {}

  template <class P>
  void run(int tokens, Between between, const Options& options = {}) {
    bench_.run<P>(report_, timer_, "contiguous", tokens,
                  random_routing(tokens, kExperts, kTopK, 128), between, options);
  }

  // Where the time is: without scales, without loads, without either.
  void parts() {
    for (const bool skips_loads : {false, true}) {
      const Options options{.skips_loads = skips_loads};
      run<Wide<4>>(8192, Between::pause, options);
      run<Wide<4, 2, Turns::issued, true>>(8192, Between::pause, options);
      run<Free<4, Sum::in_place>>(8192, Between::pause, options);
      run<Free<4, Sum::in_place, 2, true>>(8192, Between::pause, options);
      run<Free<4, Sum::unscaled>>(8192, Between::pause, options);
      run<Free<4, Sum::unscaled, 2, true>>(8192, Between::pause, options);
      run<Free<4, Sum::unscaled, 1>>(8192, Between::pause, options);
    }
  }

  // How sums are formed, how warpgroups take turns, what is multicast.
  void variants(Between between) {
    constexpr int kTokens = 8192;
    const Options apart{.shares = false};
    run<Free<4, Sum::in_place, 1>>(kTokens, between);
    run<Free<4, Sum::in_place>>(kTokens, between, apart);
    run<Free<4, Sum::in_place>>(kTokens, between);
    run<Wide<4>>(kTokens, between);
    run<Wide<3>>(kTokens, between);
    run<Wide<3, 1>>(kTokens, between);
    run<Free<3, Sum::in_place>>(kTokens, between);
    run<Wide<3, 2, Turns::half_done>>(kTokens, between);
    run<Wide<3, 2, Turns::nearly_done>>(kTokens, between);
    run<Free<3, Sum::halves>>(kTokens, between);
    run<Policy<Of<128, 256, 3, 2>, Sum::halves, Turns::issued>>(kTokens, between);
    run<Policy<Of<128, 192, 4, 2>, Sum::two_level>>(kTokens, between);
    run<Policy<Of<128, 192, 4, 2>, Sum::two_level, Turns::issued>>(kTokens, between);
    run<Policy<Of<128, 192, 4, 2>, Sum::in_place, Turns::issued>>(kTokens, between);
    run<Policy<Of<128, 128, 5, 2>, Sum::two_level>>(kTokens, between);
  }

  void tokens(int count) {
    for (const Between between : {Between::pause, Between::flush}) {
      run<Wide<3>>(count, between);
      run<Wide<4>>(count, between);
      run<Free<4, Sum::in_place>>(count, between);
      run<Free<3, Sum::halves>>(count, between);
    }
  }

 private:
  Bench bench_;
  Report& report_;
  Timer& timer_;
};

void masked(Report& report, Timer& timer, const Layer& layer) {
  constexpr int kSlot = 256;
  Bench bench(layer, kExperts * kSlot);
  const auto run = [&]<class P>(int tokens, Between between, P) {
    bench.run<P>(report, timer, "masked", tokens,
                 random_routing(tokens, kExperts, kTopK, 64, kSlot), between);
  };
  for (const int tokens : {32, 64, 128, 256, 512, 1024}) {
    for (const Between between : {Between::clean_flush, Between::flush}) {
      run(tokens, between, Policy<Of<64, 256, 4, 1>, Sum::two_level>{});
      run(tokens, between, Policy<Of<64, 256, 4, 2>, Sum::two_level>{});
      run(tokens, between, Policy<Of<64, 256, 4, 2>, Sum::in_place>{});
      run(tokens, between, Policy<Of<64, 128, 7, 1>, Sum::two_level>{});
      run(tokens, between, Wide<4>{});
    }
    run(tokens, Between::flush, Policy<Of<64, 256, 4, 1>, Sum::two_level, Turns::none, true>{});
  }
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return 2;
  Report report(argv[1], argc, argv);
  Timer timer;
  for (const Layer& layer : {kFirst, kSecond}) {
    masked(report, timer, layer);
    Contiguous contiguous(report, timer, layer);
    for (const int tokens : {1024, 2048, 4096}) contiguous.tokens(tokens);
    contiguous.parts();
    for (const Between between : {Between::pause, Between::flush}) contiguous.variants(between);
  }
}
