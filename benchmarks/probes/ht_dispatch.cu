// Checks and times whole high-throughput dispatch kernels with known routing.
//   ht_dispatch RESULTS.jsonl
#include "harness.cuh"
#include "ht_dispatch.cuh"
#include "traffic.hpp"

namespace fanfold::probe::ht {

// A row of the results and what must stand there.
struct Expected {
  int32_t source, token, place;
};

// Words of an input row or of its scales, which follow it.
__host__ __device__ inline uint32_t content(int rank, int token, int word) {
  const uint32_t h = (rank * kTokens + token) * 2654435761u + word * 40503u;
  return (h ^ (h >> 13)) * 2246822519u;
}

template <class R>
__global__ void fill_kernel(uint32_t* x, uint32_t* scales, int rank) {
  for (int t = blockIdx.x; t < kTokens; t += gridDim.x)
    for (int w = threadIdx.x; w < R::kBytes / 4; w += blockDim.x) {
      uint32_t* to = w < R::kRowBytes / 4
                         ? x + size_t(t) * (R::kRowBytes / 4) + w
                         : scales + size_t(t) * (R::kScaleBytes / 4) + w - R::kRowBytes / 4;
      *to = content(rank, t, w);
    }
}

template <class R>
__global__ void compare_kernel(const uint32_t* out, const uint32_t* out_scales,
                               const Expected* expected, int count, uint32_t* mistakes) {
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const auto [source, token, place] = expected[i];
    for (int w = threadIdx.x; w < R::kBytes / 4; w += blockDim.x) {
      const uint32_t v =
          w < R::kRowBytes / 4
              ? out[size_t(place) * (R::kRowBytes / 4) + w]
              : out_scales[size_t(place) * (R::kScaleBytes / 4) + w - R::kRowBytes / 4];
      if (v != content(source, token, w)) atomicAdd(mistakes, 1u);
    }
  }
}

template <class R, bool ExpertMajor>
class DispatchStudy {
 public:
  DispatchStudy(Node& node, Report& report, const Traffic& traffic) : node_(node), report_(report) {
    node.each([&](int r) { allocate(r, traffic); });
    node.each([&](int r) { connect(r, traffic); });
    node.synchronize();
  }

  ~DispatchStudy() {
    node_.each([&](int r) {
      const DispatchArgs& a = args_[r];
      for (void* p : {(void*)a.x, (void*)a.scales, (void*)out_[r], (void*)out_scales_[r],
                      (void*)buffer_[r], (void*)signals_[r], (void*)a.progress, (void*)a.sent,
                      (void*)a.received, (void*)expected_[r], (void*)mistakes_[r]})
        check(cudaFree(p), "free");
    });
  }

  // senders: as in Roles.
  template <Method M>
  void run(const char* method, int sms, int senders) {
    using Warp = DispatchWarp<R, M, ExpertMajor>;
    constexpr size_t shared = sizeof(typename Warp::Shared) * kWarps;
    const auto kernel = dispatch_kernel<R, M, ExpertMajor>;
    reset(senders);
    node_.each([&](int) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
            "shared memory");
    });
    const auto call = [&](int r) {
      kernel<<<sms, kWarps * 32, shared, node_.gpu(r).stream>>>(args_[r]);
    };
    const uint32_t mistakes = mistakes_after(call);
    const Timing timing = time_plan(node_, {call, 1, 30, true});
    const uint32_t mistakes_later = mistakes_after(call);
    report_.timing(field("probe", "ht_dispatch") + ", " + field("method", method) + ", " +
                       field("layout", ExpertMajor ? "expert_major" : "token_major") + ", " +
                       field("row_bytes", R::kRowBytes) + ", " +
                       field("scale_bytes", R::kScaleBytes) + ", " + field("sms", sms) + ", " +
                       field("senders", senders) + ", " +
                       field("mistakes", mistakes + mistakes_later) + ", " +
                       field("timeouts", node_.take_errors()),
                   timing);
  }

 private:
  void allocate(int r, const Traffic& traffic) {
    rows_[r] = ExpertMajor ? traffic.expert_rows[r] : static_cast<int>(traffic.arrivals[r].size());
    out_[r] = device_array<uint8_t>(size_t(rows_[r]) * R::kRowBytes);
    out_scales_[r] = device_array<uint8_t>(size_t(rows_[r]) * R::kScaleBytes + 16);
    buffer_[r] = device_array<uint8_t>(size_t(kRanks) * kTokens * R::kStride);
    signals_[r] = device_array<Signals>(1);
    mistakes_[r] = device_array<uint32_t>(1);
  }

  void connect(int r, const Traffic& traffic) {
    DispatchArgs& a = args_[r];
    auto* x = device_array<uint32_t>(size_t(kTokens) * R::kRowBytes / 4);
    auto* scales = device_array<uint32_t>(size_t(kTokens) * R::kScaleBytes / 4 + 4);
    fill_kernel<R><<<132, 256, 0, node_.gpu(r).stream>>>(x, scales, r);
    a.x = reinterpret_cast<uint8_t*>(x);
    a.scales = reinterpret_cast<uint8_t*>(scales);
    for (int p = 0; p < kRanks; ++p) {
      a.out[p] = out_[p];
      a.out_scales[p] = out_scales_[p];
      a.buffer[p] = buffer_[p];
      a.signals[p] = signals_[p];
    }
    a.progress = device_array<Progress>(1);
    a.rank = r;
    a.error = node_.gpu(r).error;
    make_lists(r, traffic);
  }

  // Places of a token's row at a rank, in top-k order.
  static std::vector<int32_t> places_of(const Traffic& traffic, int source, int token, int rank) {
    const int32_t row = traffic.row_of[source][token * kRanks + rank];
    if (row < 0) return {};
    if (!ExpertMajor) return {row};
    std::vector<int32_t> places;
    const Arrival& a = traffic.arrivals[rank][row];
    for (int i = 0; i < a.count; ++i) places.push_back(traffic.places[rank][a.first + i].row);
    return places;
  }

  void make_lists(int r, const Traffic& traffic) {
    const Record nowhere = {{-1, -1, -1, -1}, {-1, -1, -1, -1, -1, -1, -1, -1}};
    std::vector<Record> sent(kTokens, nowhere), received(kTokens * kRanks, nowhere);
    std::vector<Expected> expected;
    for (int s = 0; s < kRanks; ++s)
      for (int t = 0; t < kTokens; ++t) {
        const auto places = places_of(traffic, s, t, r);
        Record& record =
            s == r ? sent[t] : received[(t / kBatch * kRanks + s) * kBatch + t % kBatch];
        std::copy(places.begin(), places.end(), record.at_home);
        for (const int32_t place : places) expected.push_back({s, t, place});
        const auto first = places_of(traffic, r, t, s);
        if (s != r && !first.empty()) sent[t].at_rank[s] = first[0];
      }
    args_[r].sent = upload(sent);
    args_[r].received = upload(received);
    expected_[r] = upload(expected);
    num_expected_[r] = static_cast<int>(expected.size());
  }

  void reset(int senders) {
    node_.each([&](int r) {
      Signals fresh{};
      for (uint32_t& call : fresh.ready) call = 1;
      check(cudaMemcpy(signals_[r], &fresh, sizeof fresh, cudaMemcpyHostToDevice), "reset");
      check(cudaMemset(args_[r].progress, 0, sizeof(Progress)), "reset");
      args_[r].roles = {senders};
    });
    node_.synchronize();
  }

  uint32_t mistakes_after(const std::function<void(int)>& call) {
    node_.each([&](int r) {
      check(cudaMemset(out_[r], 0xA5, size_t(rows_[r]) * R::kRowBytes), "poison");
      check(cudaMemset(out_scales_[r], 0xA5, size_t(rows_[r]) * R::kScaleBytes), "poison");
    });
    node_.synchronize();
    node_.each(call);
    node_.synchronize();
    uint32_t sum = 0;
    node_.each([&](int r) {
      compare_kernel<R><<<132, 256, 0, node_.gpu(r).stream>>>(
          reinterpret_cast<uint32_t*>(out_[r]), reinterpret_cast<uint32_t*>(out_scales_[r]),
          expected_[r], num_expected_[r], mistakes_[r]);
      check(cudaStreamSynchronize(node_.gpu(r).stream), "compare");
      sum += take(mistakes_[r]);
    });
    return sum;
  }

  Node& node_;
  Report& report_;
  int rows_[kRanks];
  uint8_t *out_[kRanks], *out_scales_[kRanks], *buffer_[kRanks];
  Signals* signals_[kRanks];
  Expected* expected_[kRanks];
  int num_expected_[kRanks];
  uint32_t* mistakes_[kRanks];
  DispatchArgs args_[kRanks] = {};
};

template <class R, bool ExpertMajor>
void study(Node& node, Report& report, const Traffic& traffic) {
  DispatchStudy<R, ExpertMajor> study(node, report, traffic);
  for (const int sms : {8, 10, 12, 16, 20, 24, 32}) {
    study.template run<Method::kInPlace>("in place", sms, ExpertMajor ? 0 : sms);
    study.template run<Method::kReceiveBuffer>("receive buffer", sms, 0);
    study.template run<Method::kPull>("pull", sms, 0);
    for (const int senders : {4, 8, 10, 11, 12, 13, 14, 16}) {
      if (senders >= sms) continue;
      study.template run<Method::kReceiveBuffer>("receive buffer", sms, senders);
      if (ExpertMajor) study.template run<Method::kInPlace>("in place", sms, senders);
      if (senders <= 8) study.template run<Method::kPull>("pull", sms, senders);
    }
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
  using Fp8 = ht::Rows<7168, 224, 3, 4>;
  using Bf16 = ht::Rows<14336, 0, 2, 1>;
  ht::study<Fp8, false>(node, report, traffic);
  ht::study<Fp8, true>(node, report, traffic);
  ht::study<Bf16, false>(node, report, traffic);
  ht::study<Bf16, true>(node, report, traffic);
}
