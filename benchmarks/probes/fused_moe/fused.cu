// How long the layer takes as one kernel on one GPU, and how exact it is.
//   fused RESULTS.jsonl VARIANT TOKENS...
// Variants, joined by "+": tickets, nothing else: the second GEMM's columns are computed in seven
// groups, and tokens are summed by groups meanwhile; halves, in two groups; whole, in one, so that
// tokens are summed at the end; pairs, a last half block of rows makes a pair with a full one. To
// place time, the timed calls of permuted find their rows already copied, and unsummed ends without
// the sum. Alone: gemms, the two GEMMs of grouped_gemm.cuh on the same rows.
#include "fused.cuh"

#include "fused_reference.cuh"
#include "harness.cuh"

#include <sstream>
#include <utility>

namespace fanfold::probe {

struct Variant {
  std::string name;
  bool pairs = false, halves = false, whole = false;
  bool permuted = false, unsummed = false, gemms = false;
  explicit Variant(const std::string& text) : name(text) {
    std::stringstream words(text);
    for (std::string word; std::getline(words, word, '+');) set(word);
  }

 private:
  void set(const std::string& word) {
    const std::pair<const char*, bool*> known[] = {
        {"pairs", &pairs},       {"halves", &halves},     {"whole", &whole},
        {"permuted", &permuted}, {"unsummed", &unsummed}, {"gemms", &gemms},
    };
    if (word == "tickets") return;
    for (const auto& [each, flag] : known)
      if (word == each) {
        *flag = true;
        return;
      }
    std::fprintf(stderr, "%s: no such variant\n", word.c_str());
    std::exit(2);
  }
};

struct TopK {
  std::vector<int64_t> experts;  // [tokens][top-k]
  std::vector<float> weights;
  std::vector<int> rows;  // of each expert
};

// Each token goes to different experts at random; its weights sum to one.
TopK random_top_k(int tokens) {
  std::mt19937 random(tokens);
  TopK top;
  top.rows.assign(kExperts, 0);
  std::vector<int> order(kExperts);
  for (int e = 0; e < kExperts; ++e) order[e] = e;
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < kTopK; ++k) {
      std::swap(order[k], order[k + random() % (kExperts - k)]);
      top.experts.push_back(order[k]);
      ++top.rows[order[k]];
    }
    float sum = 0;
    for (int k = 0; k < kTopK; ++k) sum += 1 + (hash(t * kTopK + k) & 255);
    for (int k = 0; k < kTopK; ++k) top.weights.push_back((1 + (hash(t * kTopK + k) & 255)) / sum);
  }
  return top;
}

struct SpanSummary {
  double total, routed, first_end_least, first_end_most, second_end_least, second_end_most, mhz;
};

class Bench {
 public:
  explicit Bench(const Variant& variant) : variant_(variant) {
    weights_and_tokens();
    args_.w1 = tensor_map(w1_, {{kHidden, 2 * kIntermediate, kExperts}, {128, 128, 1}});
    args_.w2 = tensor_map(w2_, {{kIntermediate, kHidden, kExperts}, {128, 128, 1}});
    const uint64_t k[2] = {kHidden, kIntermediate};
    uint8_t* a[2] = {args_.rows, activations_};
    for (int gemm = 0; gemm < 2; ++gemm) {
      args_.a[gemm] = tensor_map(a[gemm], {{k[gemm], kMostRows, 1}, {128, 64, 1}});
      args_.a_low[gemm] = tensor_map(a[gemm], {{k[gemm], kMostRows, 1}, {128, 32, 1}});
    }
    args_.store[0] = tensor_map(activations_, {{kIntermediate, kMostRows}, {128, 64}});
    args_.store[1] = tensor_map(
        results_,
        {{kHidden, kMostRows}, {kStoreColumns, kWgmmaRows}, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2});
  }

  void run(Report& report, Timer& timer, int tokens) {
    if (variant_.gemms) {
      run_gemms(report, timer, tokens);
    } else {
      run_policy<FusedPolicy<4>>(report, timer, tokens);
    }
  }

 private:
  void weights_and_tokens() {
    constexpr int64_t kRowsOfW1 = int64_t{kExperts} * 2 * kIntermediate;
    constexpr int64_t kRowsOfW2 = int64_t{kExperts} * kHidden;
    input_.x = x_ = random_e4m3(int64_t{kMostTokens} * kHidden, 1);
    input_.w1 = w1_ = random_e4m3(kRowsOfW1 * kHidden, 2);
    input_.w2 = w2_ = random_e4m3(kRowsOfW2 * kIntermediate, 3);
    // Sums of about one, so that SwiGLU is neither linear nor zero.
    input_.x_scales = random_scales(kMostTokens * (kHidden / 128), 4);
    input_.w1_scales = random_scales(kRowsOfW1 / 128 * (kHidden / 128), 5, 1.0f / 160 / 85);
    input_.w2_scales = random_scales(kRowsOfW2 / 128 * (kIntermediate / 128), 6, 1.0f / 160 / 45);
    activations_ = device_array<uint8_t>(int64_t{kMostRows} * kIntermediate);
    results_ = device_array<uint16_t>(int64_t{kMostRows} * kHidden);
    for (Counters*& each : banks_) each = device_array<Counters>(1);
    args_.x = input_.x;
    args_.x_scales = input_.x_scales;
    args_.w1_scales = input_.w1_scales;
    args_.w2_scales = input_.w2_scales;
    args_.y = device_array<uint16_t>(int64_t{kMostTokens} * kHidden);
    args_.rows = device_array<uint8_t>(int64_t{kMostRows} * kHidden);
    args_.a_scales[0] = device_array<float>(int64_t{kMostRows} * (kHidden / 128));
    args_.a_scales[1] = device_array<float>(int64_t{kMostRows} * (kIntermediate / 128));
    args_.row_weights = device_array<float>(kMostRows);
    args_.results = results_;
    args_.row_count = kMostRows;
    args_.counts = device_array<int32_t>(1024 * kExperts);
    args_.row_of = device_array<int32_t>(kMostTokens * kTopK);
    args_.copies = device_array<Copy>(kMostTokens * kTopK);
    args_.spans = device_array<FusedSpan>(1024);
    args_.pairs_halves = variant_.pairs;
    args_.second_groups = variant_.whole ? 1 : variant_.halves ? 2 : kSumChunks;
    nans_ = device_array<unsigned long long>(1);
  }

  template <class P>
  void call(const Grid& grid) {
    args_.counters = banks_[calls_ % 2];
    args_.next_counters = banks_[++calls_ % 2];
    launch(fused_kernel<P>, grid, args_);
  }

  template <class P>
  Grid grid_of() {
    Grid grid{0, kGemmThreads, 2, sizeof(GemmShared<P>)};
    check(cudaFuncSetAttribute(fused_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          "shared memory");
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {2, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = 132;
    config.blockDim = grid.threads;
    config.dynamicSmemBytes = grid.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, fused_kernel<P>, &config), "occupancy");
    grid.ctas = 2 * std::min(clusters, 66);  // all must run at the same time
    return grid;
  }

  void poison(int tokens) {
    check(cudaMemset(args_.y, 0xff, int64_t{tokens} * kHidden * 2), "poison");
    check(cudaMemset(args_.rows, 0xff, int64_t{kMostRows} * kHidden), "poison");
    check(cudaMemset(activations_, 0xff, int64_t{kMostRows} * kIntermediate), "poison");
    check(cudaMemset(results_, 0xff, int64_t{kMostRows} * kHidden * 2), "poison");
    check(cudaMemset(args_.a_scales[0], 0xff, int64_t{kMostRows} * (kHidden / 128) * 4), "poison");
    check(cudaMemset(args_.a_scales[1], 0xff, int64_t{kMostRows} * (kIntermediate / 128) * 4),
          "poison");
    check(cudaMemset(args_.row_of, 0xff, kMostTokens * kTopK * 4), "poison");
  }

  template <class P>
  void run_policy(Report& report, Timer& timer, int tokens) {
    const TopK top = random_top_k(tokens);
    auto* experts = upload(top.experts);
    auto* weights = upload(top.weights);
    args_.experts = experts;
    args_.weights = weights;
    args_.tokens = tokens;
    const Grid grid = grid_of<P>();
    poison(tokens);
    call<P>(grid);
    check(cudaDeviceSynchronize(), "fused kernel");
    check_waits("fused kernel");
    const std::string verdict = compare(top, tokens) + field("y_hash", hash_of_y(tokens));
    call<P>(grid);
    check(cudaDeviceSynchronize(), "fused kernel again");
    const std::string again = field("y_hash_again", hash_of_y(tokens));
    args_.leaves_copies = variant_.permuted;
    args_.leaves_sum = variant_.unsummed;
    const auto hit = std::count_if(top.rows.begin(), top.rows.end(), [](int n) { return n > 0; });
    const double flops = 6.0 * tokens * kTopK * kHidden * kIntermediate;
    for (const Between between : {Between::flush, Between::pause}) {
      std::vector<SpanSummary> spans;
      const Timing timing = timer.time([&] { call<P>(grid); }, between, 15,
                                       [&] { spans.push_back(summary(grid.ctas)); });
      check_waits("fused kernel, timed");
      std::sort(spans.begin(), spans.end(),
                [](const SpanSummary& a, const SpanSummary& b) { return a.total < b.total; });
      const SpanSummary& span = spans[spans.size() / 2];
      report.line(
          "\"probe\": \"fused\"" + field("variant", variant_.name) + field("tokens", tokens) +
          field("experts_hit", static_cast<double>(hit)) + field("ctas", grid.ctas) +
          field("between", name_of(between)) + field("us", timing.median) +
          field("least", timing.least) + field("most", timing.most) + field("span_us", span.total) +
          field("tflops", flops / span.total * 1e-6) +
          field("weights_tb_per_s", hit * 3.0 * kHidden * kIntermediate / span.total * 1e-6) +
          field("routed_us", span.routed) + field("first_end_least", span.first_end_least) +
          field("first_end_most", span.first_end_most) +
          field("second_end_least", span.second_end_least) +
          field("second_end_most", span.second_end_most) + field("mhz", span.mhz) + verdict +
          again);
    }
    args_.leaves_copies = args_.leaves_sum = false;
    check(cudaFree(experts), "free");
    check(cudaFree(weights), "free");
  }

  // The rows are those that a call of the fused kernel leaves.
  void run_gemms(Report& report, Timer& timer, int tokens) {
    using Fused = FusedPolicy<4>;
    using Apart = Policy<Tile<kBlockRows, kTileColumns, 4, 2>, Sum::in_place>;
    const TopK top = random_top_k(tokens);
    auto* experts = upload(top.experts);
    auto* weights = upload(top.weights);
    args_.experts = experts;
    args_.weights = weights;
    args_.tokens = tokens;
    call<Fused>(grid_of<Fused>());
    check(cudaDeviceSynchronize(), "fused kernel");
    check_waits("fused kernel");
    Routing routing;
    for (const int rows : top.rows) {
      routing.first_row.push_back(routing.total_rows);
      routing.rows.push_back(rows);
      routing.total_rows += (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
    }
    auto* spans = device_array<Span>(1024);
    const Grid grid{132, kGemmThreads, 2, sizeof(GemmShared<Apart>)};
    auto* kernel = grouped_gemm_kernel<Apart>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          "shared memory");
    for (const Between between : {Between::flush, Between::pause}) {
      double us[2], mhz[2];
      for (int gemm = 0; gemm < 2; ++gemm) {
        const int columns = gemm == 0 ? 2 * kIntermediate : kHidden;
        const auto plan = plan_tiles(routing, columns, kBlockRows, kTileColumns, 2);
        Work* works = upload(plan);
        GemmArgs args{};
        args.operands.a = args_.a[gemm];
        args.operands.b = gemm == 0 ? args_.w1 : args_.w2;
        args.operands.a_scales = args_.a_scales[gemm];
        args.operands.rows = kMostRows;
        args.operands.blocks_k = (gemm == 0 ? kHidden : kIntermediate) / kBlockK;
        args.operands.plan = works;
        args.operands.works = static_cast<int>(plan.size());
        args.d = tensor_map(results_, {{static_cast<uint64_t>(columns), kMostRows},
                                       {kStoreColumns, kWgmmaRows},
                                       CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                       2});
        args.b_scales = gemm == 0 ? args_.w1_scales : args_.w2_scales;
        args.columns = columns;
        args.spans = spans;
        us[gemm] = timer.time([&] { launch(kernel, grid, args); }, between).median;
        mhz[gemm] = clock_of(download(spans, grid.ctas));
        check_waits("grouped GEMM");
        check(cudaFree(works), "free");
      }
      report.line("\"probe\": \"fused\"" + field("variant", variant_.name) +
                  field("tokens", tokens) + field("between", name_of(between)) +
                  field("us", us[0] + us[1]) + field("first_us", us[0]) +
                  field("second_us", us[1]) + field("first_mhz", mhz[0]) +
                  field("second_mhz", mhz[1]));
    }
    for (void* each : {(void*)experts, (void*)weights, (void*)spans}) check(cudaFree(each), "free");
  }

  static double clock_of(const std::vector<Span>& spans) {
    double cycles = 0, ns = 0;
    for (const Span& span : spans) {
      cycles += span.cycles;
      ns += span.end_ns - span.begin_ns;
    }
    return cycles / ns * 1e3;
  }

  SpanSummary summary(int ctas) {
    const auto spans = download(args_.spans, ctas);
    const auto least = [&](uint64_t FusedSpan::* at) {
      uint64_t v = ~0ull;
      for (const FusedSpan& span : spans) v = std::min(v, span.*at);
      return v;
    };
    const auto most = [&](uint64_t FusedSpan::* at) {
      uint64_t v = 0;
      for (const FusedSpan& span : spans) v = std::max(v, span.*at);
      return v;
    };
    double cycles = 0, ns = 0;
    for (const FusedSpan& span : spans) {
      cycles += span.cycles;
      ns += span.end - span.begin;
    }
    const uint64_t begin = least(&FusedSpan::begin);
    const auto us = [&](uint64_t at) { return (at - begin) * 1e-3; };
    return {us(most(&FusedSpan::end)),
            us(most(&FusedSpan::routed)),
            us(std::max(begin, least(&FusedSpan::first_end))),
            us(most(&FusedSpan::first_end)),
            us(least(&FusedSpan::second_end)),
            us(most(&FusedSpan::second_end)),
            cycles / ns * 1e3};
  }

  // As text: a number of JSON has 53 bits.
  std::string hash_of_y(int tokens) {
    const auto y = download(args_.y, int64_t{tokens} * kHidden);
    uint64_t sum = 0;
    for (const uint16_t each : y) sum = (sum ^ each) * 0x100000001b3ull + 1;
    char text[32];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(sum));
    return text;
  }

  // Rows that are no permutation of those that the experts have.
  int wrong_rows(const TopK& top, const std::vector<int32_t>& row_of) {
    std::vector<int> first_row;
    int blocks = 0;
    for (const int rows : top.rows) {
      first_row.push_back(blocks * kBlockRows);
      blocks += (rows + kBlockRows - 1) / kBlockRows;
    }
    std::vector<char> taken(kMostRows);
    int wrong = 0;
    for (size_t i = 0; i < row_of.size(); ++i) {
      const auto e = static_cast<size_t>(top.experts[i]);
      const int nth = row_of[i] - first_row[e];
      wrong += nth < 0 || nth >= top.rows[e] || taken[row_of[i]]++;
    }
    return wrong;
  }

  std::string compare(const TopK& top, int tokens) {
    const auto row_of = download(args_.row_of, tokens * kTopK);
    const int wrong = wrong_rows(top, row_of);
    if (wrong) return field("wrong_rows", wrong);
    std::vector<int> sampled;
    const int count = std::min(tokens, 20);
    for (int i = 0; i < count; ++i)
      sampled.push_back(int64_t{i} * (tokens - 1) / std::max(count - 1, 1));
    std::vector<SampleRow> entries;
    std::vector<float> weights;
    for (const int token : sampled)
      for (int k = 0; k < kTopK; ++k) {
        entries.push_back({token, static_cast<int>(top.experts[token * kTopK + k])});
        weights.push_back(top.weights[token * kTopK + k]);
      }
    const FusedReference reference = reference_of(input_, entries, weights);
    Difference rows, activations, y;
    for (size_t i = 0; i < entries.size(); ++i) {
      const int64_t row = row_of[sampled[i / kTopK] * kTopK + i % kTopK];
      compare_bytes(rows, x_ + int64_t{entries[i].row} * kHidden, args_.rows + row * kHidden);
      compare_activations(activations, reference, i, row);
    }
    for (size_t s = 0; s < sampled.size(); ++s) {
      const auto got = download(args_.y + int64_t{sampled[s]} * kHidden, kHidden);
      for (int c = 0; c < kHidden; ++c) {
        double want = 0;
        for (int k = 0; k < kTopK; ++k) want += reference.results[(s * kTopK + k) * kHidden + c];
        y.add(want, bf16_value(got[c]));
      }
    }
    check(cudaMemset(nans_, 0, 8), "clear");
    count_nans_kernel<<<tokens, 256>>>(args_.y, kHidden, nans_);
    check(cudaDeviceSynchronize(), "unwritten elements");
    return field("wrong_rows", wrong) + field("row_difference", rows.value()) +
           field("activation_difference", activations.value()) + field("difference", y.value()) +
           field("worst", y.worst()) +
           field("unwritten", static_cast<double>(download(nans_, 1)[0]));
  }

  void compare_bytes(Difference& difference, const uint8_t* want, const uint8_t* got) {
    const auto a = download(want, kHidden);
    const auto b = download(got, kHidden);
    for (int c = 0; c < kHidden; ++c) difference.add(a[c], b[c]);
  }

  void compare_activations(Difference& difference, const FusedReference& reference, size_t sample,
                           int64_t row) {
    const auto got = download(activations_ + row * kIntermediate, kIntermediate);
    for (int block = 0; block < kIntermediate / 128; ++block) {
      const float scale = download(args_.a_scales[1] + block * int64_t{kMostRows} + row, 1)[0];
      for (int c = block * 128; c < block * 128 + 128; ++c)
        difference.add(e4m3_value_on_host(reference.activations[sample * kIntermediate + c]) *
                           double{reference.scales[sample * (kIntermediate / 128) + block]},
                       e4m3_value_on_host(got[c]) * double{scale});
    }
  }

  const Variant variant_;
  FusedArgs args_{};
  FusedInput input_{};
  uint8_t *x_, *w1_, *w2_, *activations_;
  uint16_t* results_;
  Counters* banks_[2];
  unsigned calls_ = 0;
  unsigned long long* nans_;
};

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 4) return 2;
  const Variant variant(argv[2]);
  Report report(argv[1], argc, argv);
  Timer timer;
  Bench bench(variant);
  for (int i = 3; i < argc; ++i) bench.run(report, timer, std::atoi(argv[i]));
}
