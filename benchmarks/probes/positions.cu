// What it costs every CTA to know where its rows go in the packed output.
//   scan by the receiver: all ranks' routing is here as tagged words, and a CTA counts, for each
//     (row, local expert) of its own, the earlier choices of that expert among all of them;
//   scan by the sender: a CTA counts, for each choice of its token, the earlier choices of the same
//     expert among its own rank's; receivers only add the counts of earlier sources.
//   positions RESULTS.jsonl
#include <random>

#include "harness.cuh"

namespace fanfold::probe {

enum class Scan { kNone, kReceiver, kSender };

constexpr int kScanTokens = 128;
constexpr int kScanThreads = 512;

struct ScanArgs {
  const uint32_t* words;    // [rank][token][topk], 16 bits of tag above 16 of expert
  const int64_t* topk_idx;  // of rank 0
  int32_t* places;          // [rank][token][topk]
  uint32_t tag;
};

// Of every expert the CTA asks about, a list of its questions: choices whose place it must know.
template <int TopK, int Experts>
struct ScanShared {
  static constexpr int kRows = ceil_div(kRanks * kScanTokens, kCtas);
  int first[Experts];
  int next[kRows * TopK];
  int keys[kRows * TopK];
  int places[kRows * TopK];
};

// After a barrier that follows the emptying of the lists.
template <class S>
__device__ void ask(S& shared, int question, int expert, int key) {
  shared.keys[question] = key;
  shared.places[question] = 0;
  if (expert >= 0) shared.next[question] = atomicExch(&shared.first[expert], question + 1);
}

template <class S>
__device__ void answer(S& shared, int expert, int key) {
  for (int n = shared.first[expert]; n > 0; n = shared.next[n - 1])
    if (key < shared.keys[n - 1]) atomicAdd(&shared.places[n - 1], 1);
}

template <int TopK, int Experts, class S>
__device__ void scan_as_receiver(const ScanArgs& args, S& shared) {
  constexpr int kQuads = kRanks * kScanTokens * TopK / 4;
  constexpr int kPerThread = ceil_div(kQuads, kScanThreads);
  constexpr int kQuestions = S::kRows * TopK;
  const uint4* quads = reinterpret_cast<const uint4*>(args.words);
  uint4 read[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = threadIdx.x + i * kScanThreads;
    read[i] = at < kQuads ? load_relaxed_system(quads + at) : uint4{0, 0, 0, 0};
  }
  for (int i = threadIdx.x; i < Experts; i += kScanThreads) shared.first[i] = 0;
  __syncthreads();
  if (threadIdx.x < kQuestions) {
    const int q = blockIdx.x + threadIdx.x / TopK * kCtas;
    const int key =
        ((q + threadIdx.x / TopK) % kRanks * kScanTokens + q / kRanks) * TopK + threadIdx.x % TopK;
    const int expert = q < kRanks * kScanTokens ? static_cast<int>(args.words[key] & 0xFFFF) : -1;
    ask(shared, threadIdx.x, expert < Experts / kRanks ? expert : -1, key);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t words[4] = {read[i].x, read[i].y, read[i].z, read[i].w};
    const int key = (threadIdx.x + i * kScanThreads) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (words[j] >> 16 == args.tag) answer(shared, words[j] & 0xFFFF, key + j);
  }
  __syncthreads();
  if (threadIdx.x < kQuestions) {
    const int q = blockIdx.x + threadIdx.x / TopK * kCtas;
    if (q < kRanks * kScanTokens)
      args.places[shared.keys[threadIdx.x]] = shared.places[threadIdx.x];
  }
}

template <int TopK, int Experts, class S>
__device__ void scan_as_sender(const ScanArgs& args, S& shared) {
  constexpr int kPerThread = ceil_div(kScanTokens * TopK, kScanThreads);
  const int token = blockIdx.x;
  if (token >= kScanTokens) return;
  int others[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = threadIdx.x + i * kScanThreads;
    others[i] = at < token * TopK ? static_cast<int>(args.topk_idx[at]) : -1;
  }
  for (int i = threadIdx.x; i < Experts; i += kScanThreads) shared.first[i] = 0;
  __syncthreads();
  if (threadIdx.x < TopK)
    ask(shared, threadIdx.x, static_cast<int>(args.topk_idx[token * TopK + threadIdx.x]),
        token * TopK + threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i)
    if (others[i] >= 0) answer(shared, others[i], 0);
  __syncthreads();
  if (threadIdx.x < TopK) args.places[token * TopK + threadIdx.x] = shared.places[threadIdx.x];
}

template <Scan S, int TopK, int Experts>
__global__ void __launch_bounds__(kScanThreads, 1) scan_kernel(ScanArgs args) {
  __shared__ ScanShared<TopK, Experts> shared;
  if constexpr (S == Scan::kReceiver) scan_as_receiver<TopK, Experts>(args, shared);
  if constexpr (S == Scan::kSender) scan_as_sender<TopK, Experts>(args, shared);
}

template <int TopK, int Experts>
class PositionsProbe {
 public:
  PositionsProbe(Node& node, Report& report) : node_(node), report_(report) {
    std::mt19937 random(5);
    for (auto& e : chosen_) e = static_cast<int>(random() % Experts);
    std::vector<uint32_t> words(chosen_.begin(), chosen_.end());
    for (auto& w : words) w |= 77u << 16;
    const std::vector<int64_t> own(chosen_.begin(), chosen_.begin() + kScanTokens * TopK);
    node.each([&](int r) {
      uint32_t* device_words = device_array<uint32_t>(words.size());
      int64_t* device_own = device_array<int64_t>(own.size());
      check(cudaMemcpy(device_words, words.data(), words.size() * 4, cudaMemcpyHostToDevice), "w");
      check(cudaMemcpy(device_own, own.data(), own.size() * 8, cudaMemcpyHostToDevice), "idx");
      args_[r] = {device_words, device_own, device_array<int32_t>(chosen_.size(), 0xFF), 77u};
    });
  }

  void run() {
    time<Scan::kNone>("empty kernel");
    time<Scan::kReceiver>("scan by the receiver");
    report_mistakes("scan by the receiver", kRanks * kScanTokens * TopK, Experts / kRanks);
    time<Scan::kSender>("scan by the sender");
    report_mistakes("scan by the sender", kScanTokens * TopK, Experts);
  }

 private:
  std::string fields(const std::string& variant) {
    return field("probe", "positions") + ", " + field("variant", variant) + ", " +
           field("topk", TopK) + ", " + field("experts", Experts);
  }

  template <Scan S>
  void time(const std::string& variant) {
    const auto call = [this](int r) {
      scan_kernel<S, TopK, Experts><<<kCtas, kScanThreads, 0, node_.gpu(r).stream>>>(args_[r]);
    };
    report_.timing(fields(variant) + ", " + field("mode", "chain"),
                   time_plan(node_, {call, 20, 40, false}));
    report_.timing(fields(variant) + ", " + field("mode", "cold"),
                   time_plan(node_, {call, 1, 60, true}));
  }

  // The receiver counts all earlier choices, the sender those of earlier tokens.
  void report_mistakes(const std::string& variant, int choices, int experts) {
    std::vector<int32_t> places(chosen_.size());
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaMemcpy(places.data(), args_[0].places, places.size() * 4, cudaMemcpyDeviceToHost),
          "places");
    const bool by_token = experts == Experts;
    int mistakes = 0;
    for (int i = 0; i < choices; ++i) {
      if (chosen_[i] >= experts) continue;  // another rank's
      const int end = by_token ? i / TopK * TopK : i;
      mistakes += places[i] != std::count(chosen_.begin(), chosen_.begin() + end, chosen_[i]);
    }
    report_.line(fields(variant) + ", " + field("mistakes", mistakes));
  }

  Node& node_;
  Report& report_;
  std::vector<int> chosen_ = std::vector<int>(kRanks * kScanTokens * TopK);
  ScanArgs args_[kRanks];
};

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  if (argc < 2) return std::fprintf(stderr, "usage: %s RESULTS.jsonl\n", argv[0]), 2;
  Node node;
  Report report(argv[1]);
  PositionsProbe<8, 256>(node, report).run();
  PositionsProbe<8, 512>(node, report).run();
  PositionsProbe<22, 512>(node, report).run();
}
