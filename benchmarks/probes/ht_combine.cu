// Checks and times whole high-throughput combine kernels with known routing.
//   ht_combine RESULTS.jsonl
#include "harness.cuh"
#include "ht_combine_plain.cuh"
#include "reference.hpp"
#include "traffic.hpp"

namespace fanfold::probe::ht {

__global__ void fill_kernel(uint16_t* y, uint32_t rank, size_t count) {
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x)
    y[i] = expert_output(rank, static_cast<uint32_t>(i));
}

template <bool ExpertMajor>
class CombineStudy {
 public:
  CombineStudy(Node& node, Report& report, const Traffic& traffic)
      : node_(node), report_(report), traffic_(traffic) {
    node.each([&](int r) {
      buffer_[r] = device_array<uint8_t>(size_t(kRanks) * kTokens * kRowBytes);
      signals_[r] = device_array<Signals>(1);
    });
    node.each([&](int r) { connect(r); });
    node.together([&](int r) { expected_[r] = sums_of(r); });
    node.synchronize();
  }

  ~CombineStudy() {
    node_.each([&](int r) {
      const CombineArgs& a = args_[r];
      for (void* p : {(void*)a.y, (void*)a.out, (void*)buffer_[r], (void*)signals_[r],
                      (void*)a.progress, (void*)a.sent, (void*)a.folded})
        check(cudaFree(p), "free");
    });
  }

  template <class S>
  void run(int sms, int lag) {
    const std::string shape = field("method", "bulk") + ", " + field("teams", S::kTeams) + ", " +
                              field("slots", S::kSlots) + ", " + field("adders", S::kAdders) +
                              ", " + field("pieces", S::kPieces) + ", " +
                              field("without", kNames[static_cast<int>(S::kWithout)]);
    measure(combine_kernel<S, ExpertMajor>, S::kThreads, sizeof(TeamShared<S>) * S::kTeams, shape,
            sms, lag, S::kWithout == Without::kNothing);
  }

  template <class S>
  void run_plain(int sms, int lag) {
    const std::string shape = field("method", "plain") + ", " + field("warps", S::kWarps) + ", " +
                              field("pieces", S::kPieces) + ", " + field("buffers", S::kBuffers);
    measure(plain_combine_kernel<S, ExpertMajor>, S::kWarps * 32, 0, shape, sms, lag, true);
  }

  template <class S>
  void run_split(int sms, int pushing_ctas, bool folds_meanwhile) {
    if constexpr (!ExpertMajor) {
      const std::string shape = field("method", "split") + ", " + field("warps", S::kWarps) + ", " +
                                field("pieces", S::kPieces) + ", " + field("buffers", S::kBuffers) +
                                ", " + field("pushing", pushing_ctas) + ", " +
                                field("folds_meanwhile", folds_meanwhile);
      node_.each([&](int r) {
        args_[r].pushing_ctas = pushing_ctas;
        args_[r].folds_meanwhile = folds_meanwhile;
      });
      measure(split_combine_kernel<S>, S::kWarps * 32, sizeof(SplitShared), shape, sms, 0, true);
    }
  }

 private:
  static constexpr const char* kNames[] = {"", "loads", "adding", "stores", "signals"};
  static constexpr Entry kNone{-1, 0.0f, 0, 0};

  void measure(void (*kernel)(CombineArgs), int threads, size_t shared, const std::string& shape,
               int sms, int lag, bool whole) {
    reset(lag);
    node_.each([&](int) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared)),
            "shared memory");
    });
    const auto call = [&](int r) {
      kernel<<<sms, threads, shared, node_.gpu(r).stream>>>(args_[r]);
    };
    int mistakes = whole ? mistakes_after(call) : 0;
    const Timing timing = time_plan(node_, {call, 1, 30, true});
    if (whole) mistakes += mistakes_after(call);
    report_.timing(field("probe", "ht_combine") + ", " +
                       field("layout", ExpertMajor ? "expert_major" : "token_major") + ", " +
                       shape + ", " + field("lag", lag) + ", " + field("sms", sms) + ", " +
                       field("mistakes", mistakes) + ", " + field("timeouts", node_.take_errors()),
                   timing);
  }

  int rows_at(int r) const {
    return ExpertMajor ? traffic_.expert_rows[r] : static_cast<int>(traffic_.arrivals[r].size());
  }

  void connect(int r) {
    CombineArgs& a = args_[r];
    const size_t count = size_t(rows_at(r)) * kHidden;
    auto* y = device_array<uint16_t>(count);
    fill_kernel<<<1024, 256, 0, node_.gpu(r).stream>>>(y, r, count);
    a.y = reinterpret_cast<uint8_t*>(y);
    a.out = device_array<uint8_t>(size_t(kTokens) * kRowBytes);
    for (int p = 0; p < kRanks; ++p) a.buffer[p] = buffer_[p], a.signals[p] = signals_[p];
    a.progress = device_array<Progress>(1);
    a.rank = r;
    a.error = node_.gpu(r).error;
    make_lists(r);
  }

  // Rows and weights that stand for a token at a rank.
  std::vector<Place> places_of(int source, int token, int rank) const {
    const int32_t row = traffic_.row_of[source][token * kRanks + rank];
    if (row < 0) return {};
    if (!ExpertMajor) return {{row, 1.0f}};
    const Arrival& a = traffic_.arrivals[rank][row];
    const auto* first = traffic_.places[rank].data() + a.first;
    return {first, first + a.count};
  }

  void make_lists(int r) {
    std::vector<Entry> sent(size_t(kBatches) * kRanks * kSendEntries, kNone);
    std::vector<Entry> folded(size_t(kBatches) * kFoldEntries, kNone);
    for (int b = 0; b < kBatches; ++b) {
      for (int s = 0; s < kRanks; ++s) list_sends(r, s, b, &sent[(b * kRanks + s) * kSendEntries]);
      list_folds(r, b, &folded[b * kFoldEntries]);
    }
    args_[r].sent = upload(sent);
    args_[r].folded = upload(folded);
  }

  void list_sends(int r, int source, int batch, Entry* entries) const {
    int n = 0;
    for (int t = batch * kBatch; t < (batch + 1) * kBatch; ++t) {
      const auto places = places_of(source, t, r);
      for (size_t i = 0; i < places.size(); ++i)
        entries[n++] = {places[i].row, places[i].weight, t, ends(i, places.size())};
    }
    if (n > 0) entries[n - 1].flags |= Entry::kFinal;
  }

  void list_folds(int r, int batch, Entry* entries) const {
    int n = 0;
    for (int t = batch * kBatch; t < (batch + 1) * kBatch; ++t) {
      std::vector<int> ranks;
      for (int p = 0; p < kRanks; ++p)
        if (traffic_.row_of[r][t * kRanks + p] >= 0) ranks.push_back(p);
      for (size_t i = 0; i < ranks.size(); ++i) {
        const int p = ranks[i];
        const bool own = !ExpertMajor && p == r;
        const int row = own ? traffic_.row_of[r][t * kRanks + p] : p * kTokens + t;
        entries[n++] = {row, 1.0f, t, ends(i, ranks.size()) | p << Entry::kRankShift};
      }
    }
  }

  static int ends(size_t i, size_t count) {
    return (i == 0 ? Entry::kFirst : 0) | (i + 1 == count ? Entry::kLast : 0);
  }

  // What a source must end up with, on the CPU.
  std::vector<uint16_t> sums_of(int source) const {
    std::vector<uint16_t> out(size_t(kTokens) * kHidden);
    std::vector<float> part(kHidden), total(kHidden);
    for (int t = 0; t < kTokens; ++t) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto places = places_of(source, t, rank);
        std::fill(part.begin(), part.end(), 0.0f);
        for (const Place& place : places)
          for (int h = 0; h < kHidden; ++h)
            part[h] +=
                place.weight * from_bf16(expert_output(rank, uint32_t(place.row) * kHidden + h));
        for (int h = 0; h < kHidden && !places.empty(); ++h)
          total[h] += from_bf16(to_bf16(part[h]));
      }
      for (int h = 0; h < kHidden; ++h) out[size_t(t) * kHidden + h] = to_bf16(total[h]);
    }
    return out;
  }

  void reset(int lag) {
    node_.each([&](int r) {
      Signals fresh{};
      for (uint32_t& call : fresh.ready) call = 1;
      check(cudaMemcpy(signals_[r], &fresh, sizeof fresh, cudaMemcpyHostToDevice), "reset");
      check(cudaMemset(args_[r].progress, 0, sizeof(Progress)), "reset");
      args_[r].lag = lag;
    });
    node_.synchronize();
  }

  // Rows that differ from the CPU's.
  int mistakes_after(const std::function<void(int)>& call) {
    node_.each([&](int r) {
      check(cudaMemset(args_[r].out, 0xA5, size_t(kTokens) * kRowBytes), "poison");
      check(cudaMemset(buffer_[r], 0xA5, size_t(kRanks) * kTokens * kRowBytes), "poison");
    });
    node_.synchronize();
    node_.each(call);
    node_.synchronize();
    int mistakes[kRanks] = {};
    node_.together([&](int r) {
      std::vector<uint16_t> out(size_t(kTokens) * kHidden);
      check(cudaMemcpy(out.data(), args_[r].out, out.size() * 2, cudaMemcpyDeviceToHost),
            "results");
      for (int t = 0; t < kTokens; ++t)
        mistakes[r] += std::memcmp(&out[size_t(t) * kHidden], &expected_[r][size_t(t) * kHidden],
                                   kRowBytes) != 0;
    });
    return mistakes[0] + mistakes[1] + mistakes[2] + mistakes[3];
  }

  Node& node_;
  Report& report_;
  const Traffic& traffic_;
  uint8_t* buffer_[kRanks];
  Signals* signals_[kRanks];
  std::vector<uint16_t> expected_[kRanks];
  CombineArgs args_[kRanks] = {};
};

template <bool ExpertMajor>
void study(Node& node, Report& report, const Traffic& traffic) {
  CombineStudy<ExpertMajor> study(node, report, traffic);
  for (const int sms : {12, 16, 20, 24, 32}) {
    for (const int lag : {16, 32, 64}) study.template run<CombineShape<3, 5, 4, 1>>(sms, lag);
    study.template run<CombineShape<2, 7, 7, 1>>(sms, 32);
    study.template run<CombineShape<6, 10, 1, 4>>(sms, 32);
    study.template run<CombineShape<3, 5, 4, 1, Without::kLoads>>(sms, 32);
    study.template run<CombineShape<3, 5, 4, 1, Without::kAdding>>(sms, 32);
    study.template run<CombineShape<3, 5, 4, 1, Without::kStores>>(sms, 32);
    study.template run<CombineShape<3, 5, 4, 1, Without::kSignals>>(sms, 32);
    for (const int lag : {16, 32, 64}) study.template run_plain<PlainShape<12, 4, 2>>(sms, lag);
    study.template run_plain<PlainShape<16, 7, 3>>(sms, 32);
    study.template run_plain<PlainShape<16, 7, 4>>(sms, 32);
    study.template run_plain<PlainShape<24, 7, 2>>(sms, 32);
    for (const int pushing : {8, 9, 10, 11, 12, 13, 14, 16})
      for (const bool folds_meanwhile : {true, false})
        if (pushing < sms)
          study.template run_split<PlainShape<16, 7, 3>>(sms, pushing, folds_meanwhile);
  }
}

}  // namespace fanfold::probe::ht

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  if (node.ranks() != kRanks) return std::fprintf(stderr, "four GPUs are needed\n"), 1;
  Report report(argv[1]);
  const Traffic traffic(11, ht::kTokens, ht::kChoices, 256, 0.0);
  ht::study<false>(node, report, traffic);
  ht::study<true>(node, report, traffic);
}
