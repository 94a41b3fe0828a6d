// The memory of all ranks for one geometry, and the comparison of what a call left there with what
// the CPU expects.
#pragma once

#include <memory>

#include "combine.cuh"
#include "dispatch.cuh"
#include "harness.cuh"
#include "reference.hpp"

namespace fanfold::probe {

template <class G>
__global__ void fill_expert_outputs(uint16_t* y, uint32_t rank) {
  const uint32_t count = G::kLocalExperts * G::kSlots * G::kHidden;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    y[i] = expert_output(rank, i);
}

constexpr int kInputs = 4;  // that a session holds at once

template <class G>
struct Input {
  uint16_t* x = device_array<uint16_t>(G::kTokens * G::kHidden);
  int64_t* topk_idx = device_array<int64_t>(G::kTokens * G::kTopK);
  float* topk_weights = device_array<float>(G::kTokens * G::kTopK);
  int num_tokens = 0;
};

template <class G>
struct RankMemory {
  Input<G> inputs[kInputs];
  int current = 0;  // input of the next call
  DispatchBuffer<G>* dispatch = device_array<DispatchBuffer<G>>(1);
  CombineBuffer<G>* combine = device_array<CombineBuffer<G>>(1);
  CtaEpochs* dispatch_epochs = device_array<CtaEpochs>(kCtas);
  CtaEpochs* combine_epochs = device_array<CtaEpochs>(kCtas);
  uint8_t* packed = device_array<uint8_t>(size_t{G::kLocalExperts} * G::kSlots * G::kHidden);
  float* packed_scales = device_array<float>(size_t{G::kLocalExperts} * G::kSlots * G::kBlocks);
  int32_t* packed_counts = device_array<int32_t>(G::kLocalExperts);
  Handle<G>* handle = device_array<Handle<G>>(1);
  uint16_t* y = device_array<uint16_t>(size_t{G::kLocalExperts} * G::kSlots * G::kHidden);
  uint16_t* out = device_array<uint16_t>(G::kTokens * G::kHidden);
  Trace* trace = device_array<Trace>(kCtas);

  const Input<G>& input() const { return inputs[current]; }

  void release() {
    for (Input<G>& input : inputs)
      for (void* p : {(void*)input.x, (void*)input.topk_idx, (void*)input.topk_weights})
        check(cudaFree(p), "free");
    for (void* p : {(void*)dispatch, (void*)combine, (void*)dispatch_epochs, (void*)combine_epochs,
                    (void*)packed, (void*)packed_scales, (void*)packed_counts, (void*)handle,
                    (void*)y, (void*)out, (void*)trace})
      check(cudaFree(p), "free");
  }
};

template <class T>
std::vector<T> download(const T* device, size_t count) {
  std::vector<T> host(count);
  check(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

template <class G>
class Session {
 public:
  explicit Session(Node& node) : node_(node) {
    node.each([&](int r) {
      memory_.push_back(std::make_unique<RankMemory<G>>());
      fill_expert_outputs<G><<<1024, 256, 0, node.gpu(r).stream>>>(memory_[r]->y, r);
    });
    node.synchronize();
  }
  ~Session() {
    node_.each([&](int r) { memory_[r]->release(); });
  }

  Node& node() { return node_; }
  RankMemory<G>& memory(int rank) { return *memory_[rank]; }

  // Fresh buffers, as at creation: rows absent, tags and epochs before the first call.
  void reset() {
    const std::vector<CtaEpochs> first(kCtas, CtaEpochs{Epoch::kFirst, Epoch::kFirst, {}});
    node_.each([&](int r) {
      RankMemory<G>& m = *memory_[r];
      check(cudaMemset(m.dispatch, 0, sizeof *m.dispatch), "reset");
      check(cudaMemset(m.combine, 0, sizeof *m.combine), "reset");
      check(cudaMemset(m.dispatch->rows, 0xFF, sizeof m.dispatch->rows), "reset");
      check(cudaMemset(m.combine->rows, 0xFF, sizeof m.combine->rows), "reset");
      const size_t bytes = sizeof(CtaEpochs) * kCtas;
      check(cudaMemcpy(m.dispatch_epochs, first.data(), bytes, cudaMemcpyHostToDevice), "reset");
      check(cudaMemcpy(m.combine_epochs, first.data(), bytes, cudaMemcpyHostToDevice), "reset");
    });
    node_.synchronize();
  }

  void upload(const Workload<G>& work, int which) {
    node_.each([&](int r) {
      Input<G>& m = memory_[r]->inputs[which];
      const auto copy = [](void* to, const auto& from) {
        check(cudaMemcpy(to, from.data(), from.size() * sizeof from[0], cudaMemcpyHostToDevice),
              "upload");
      };
      copy(m.x, work.x[r]);
      copy(m.topk_idx, work.topk_idx[r]);
      copy(m.topk_weights, work.topk_weights[r]);
      m.num_tokens = work.tokens[r];
    });
  }

  void select(int r, int which) { memory_[r]->current = which; }

  void poison_outputs() {
    node_.each([&](int r) {
      RankMemory<G>& m = *memory_[r];
      const size_t rows = size_t{G::kLocalExperts} * G::kSlots;
      check(cudaMemset(m.packed, 0xA5, rows * G::kHidden), "poison");
      check(cudaMemset(m.packed_scales, 0xA5, rows * G::kBlocks * 4), "poison");
      check(cudaMemset(m.packed_counts, 0xA5, G::kLocalExperts * 4), "poison");
      check(cudaMemset(m.out, 0xA5, G::kTokens * G::kHidden * 2), "poison");
      check(cudaMemset(m.handle, 0xA5, sizeof *m.handle), "poison");
    });
    node_.synchronize();
  }

  template <class P>
  void dispatch(int r, uint32_t phases = kWhole, bool early = false) {
    RankMemory<G>& m = *memory_[r];
    DispatchArgs<G> args{};
    args.x = reinterpret_cast<const uint4*>(m.input().x);
    args.topk_idx = m.input().topk_idx;
    args.topk_weights = m.input().topk_weights;
    args.num_tokens = m.input().num_tokens;
    args.phases = phases;
    const Route route = Route::of(r, node_.ranks());
    args.rank = route.rank;
    for (int p = 0; p < kRanks; ++p) {
      args.peers[p] = memory_[route.gpu_of[p]]->dispatch;
      args.source_at[p] = route.source_at[p];
    }
    args.epochs = m.dispatch_epochs;
    args.packed = reinterpret_cast<uint4*>(m.packed);
    args.packed_scales = m.packed_scales;
    args.packed_counts = m.packed_counts;
    args.handle = m.handle;
    args.error = node_.gpu(r).error;
    args.trace = m.trace;
    launch(dispatch_kernel<G, P>, kCtas, DispatchShape<G, P>::kThreads, 0, node_.gpu(r).stream,
           early, args);
  }

  template <class P>
  void combine(int r, uint32_t phases = kWhole, bool early = false) {
    RankMemory<G>& m = *memory_[r];
    CombineArgs<G> args{};
    args.y = reinterpret_cast<const uint4*>(m.y);
    args.out = reinterpret_cast<uint4*>(m.out);
    args.num_tokens = m.input().num_tokens;
    args.phases = phases;
    const Route route = Route::of(r, node_.ranks());
    args.rank = route.rank;
    for (int p = 0; p < kRanks; ++p) {
      args.peers[p] = memory_[route.gpu_of[p]]->combine;
      args.source_at[p] = route.source_at[p];
    }
    args.epochs = m.combine_epochs;
    args.handle = m.handle;
    args.error = node_.gpu(r).error;
    args.trace = m.trace;
    constexpr size_t shared = sizeof(typename Combine<G, P>::Shared);
    check(cudaFuncSetAttribute(combine_kernel<G, P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               shared),
          "shared memory");
    launch(combine_kernel<G, P>, kCtas, Combine<G, P>::kThreads, shared, node_.gpu(r).stream, early,
           args);
  }

  // How many rows, scales or counts of all ranks differ from what is expected.
  int dispatch_mistakes(const std::vector<Expected<G>>& expected, bool by_column) {
    int mistakes = 0;
    node_.each([&](int r) {
      const auto counts = download(memory_[r]->packed_counts, G::kLocalExperts);
      for (int e = 0; e < G::kLocalExperts; ++e) {
        const auto& rows = expected[r].packing.rows[expected[r].rank * G::kLocalExperts + e];
        mistakes += counts[e] != static_cast<int>(rows.size());
        mistakes += expert_mistakes(*memory_[r], expected[r].packing, rows, e, by_column);
      }
    });
    return mistakes;
  }

  int combine_mistakes(const std::vector<Expected<G>>& expected) {
    int mistakes = 0;
    node_.each([&](int r) {
      const auto out = download(memory_[r]->out, G::kTokens * G::kHidden);
      for (int t = 0; t < memory_[r]->input().num_tokens; ++t)
        mistakes += std::memcmp(&out[t * G::kHidden], &expected[r].combined[t * G::kHidden],
                                G::kHidden * 2) != 0;
    });
    return mistakes;
  }

 private:
  int expert_mistakes(RankMemory<G>& m, const Packing<G>& packing,
                      const std::vector<PackedRow>& rows, int e, bool by_column) {
    const auto data =
        download(m.packed + size_t(e) * G::kSlots * G::kHidden, rows.size() * G::kHidden);
    const auto scales =
        download(m.packed_scales + size_t(e) * G::kSlots * G::kBlocks, G::kSlots * G::kBlocks);
    int mistakes = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto [source, token] = rows[i];
      mistakes += std::memcmp(&data[i * G::kHidden], &packing.quantised[source][token * G::kHidden],
                              G::kHidden) != 0;
      for (int b = 0; b < G::kBlocks; ++b)
        mistakes += scales[by_column ? b * G::kSlots + i : i * G::kBlocks + b] !=
                    packing.scales[source][token * G::kBlocks + b];
    }
    return mistakes;
  }

  Node& node_;
  std::vector<std::unique_ptr<RankMemory<G>>> memory_;
};

}  // namespace fanfold::probe
