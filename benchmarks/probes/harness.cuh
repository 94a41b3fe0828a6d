// What all probes of several GPUs share: the GPUs of one host in one process, a barrier of all of
// them, bounded waits, graph timing, JSON lines.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/memory.cuh"
#include "device/warp.cuh"

namespace fanfold::probe {

constexpr int kRanks = 4;
constexpr int kCtas = 132;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* device_array(size_t count, int byte = 0) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, byte, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

template <class T>
T* upload(const std::vector<T>& values) {
  T* memory = device_array<T>(values.size());
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload");
  return memory;
}

// The value of a counter on the current device, which becomes 0.
inline uint32_t take(uint32_t* counter) {
  uint32_t value = 0;
  check(cudaMemcpy(&value, counter, 4, cudaMemcpyDeviceToHost), "read counter");
  check(cudaMemset(counter, 0, 4), "clear counter");
  return value;
}

// ---- a bounded wait -----------------------------------------------------------------------------
// A thread asks after every fruitless poll. The first deadline that expires raises the error word,
// and every other wait that sees the word ends too: one late peer costs one bound.

class Deadline {
 public:
  __device__ explicit Deadline(uint32_t* error) : error_(error) {}

  __device__ bool expired() {
    if ((++polls_ & kLookEvery) != 0) return false;
    if (polls_ > kMaxPolls) store_relaxed_system(error_, 1u);
    return load_relaxed_system(error_) != 0;
  }

 private:
  static constexpr uint32_t kLookEvery = (1u << 12) - 1;
  static constexpr uint32_t kMaxPolls = 1u << 21;
  uint32_t* error_;
  uint32_t polls_ = 0;
};

// ---- a barrier of all GPUs, as a kernel ---------------------------------------------------------

struct BarrierBoard {
  uint64_t count;
  uint64_t arrivals[kRanks];
};

struct BarrierArgs {
  BarrierBoard* boards[kRanks];
  int rank, ranks;
  uint32_t* error;
};

static __global__ void barrier_kernel(BarrierArgs args) {
  BarrierBoard* mine = args.boards[args.rank];
  const uint64_t count = mine->count + 1;
  __syncwarp();
  const int peer = threadIdx.x;
  if (peer < args.ranks) {
    store_release_system(&args.boards[peer]->arrivals[args.rank], count);
    Deadline deadline(args.error);
    while (load_acquire_system(&mine->arrivals[peer]) < count && !deadline.expired()) continue;
  }
  __syncwarp();
  if (peer == 0) mine->count = count;
}

// ---- the node -----------------------------------------------------------------------------------

constexpr size_t kFlushBytes = 256u << 20;  // several times the L2

struct Gpu {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  BarrierBoard* board;
  uint32_t* error;
  char* flush;
};

// The first four GPUs of the host, or two where there are fewer.
class Node {
 public:
  Node() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (count < 2) check(cudaErrorNoDevice, "at least two GPUs are needed");
    gpus_.resize(count >= kRanks ? kRanks : 2);
    for (int r = 0; r < ranks(); ++r) open(r);
  }

  int ranks() const { return static_cast<int>(gpus_.size()); }
  Gpu& gpu(int rank) { return gpus_[rank]; }

  // One after the other, with the rank's device current.
  void each(const std::function<void(int)>& body) {
    for (int r = 0; r < ranks(); ++r) {
      check(cudaSetDevice(r), "cudaSetDevice");
      body(r);
    }
  }

  // All at once, one thread a rank.
  void together(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r)
      threads.emplace_back([&body, r] {
        check(cudaSetDevice(r), "cudaSetDevice");
        body(r);
      });
    for (auto& t : threads) t.join();
  }

  void synchronize() {
    each([&](int) { check(cudaDeviceSynchronize(), "synchronize"); });
  }

  void enqueue_barrier(int rank) {
    BarrierArgs args{};
    for (int r = 0; r < ranks(); ++r) args.boards[r] = gpus_[r].board;
    args.rank = rank;
    args.ranks = ranks();
    args.error = gpus_[rank].error;
    barrier_kernel<<<1, 32, 0, gpus_[rank].stream>>>(args);
  }

  // True if a wait ran out since the last question.
  bool take_errors() {
    bool any = false;
    each([&](int r) { any |= take(gpus_[r].error) != 0; });
    return any;
  }

 private:
  void open(int r) {
    check(cudaSetDevice(r), "cudaSetDevice");
    for (int p = 0; p < ranks(); ++p)
      if (p != r) check(cudaDeviceEnablePeerAccess(p, 0), "cudaDeviceEnablePeerAccess");
    Gpu& gpu = gpus_[r];
    check(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "stream");
    check(cudaEventCreate(&gpu.begin), "event");
    check(cudaEventCreate(&gpu.end), "event");
    gpu.board = device_array<BarrierBoard>(1);
    gpu.error = device_array<uint32_t>(1);
    gpu.flush = device_array<char>(kFlushBytes);
  }

  std::vector<Gpu> gpus_;
};

// ---- timing -------------------------------------------------------------------------------------

struct Plan {
  std::function<void(int rank)> enqueue;  // one call, on the rank's stream
  int calls = 1;                          // between the two events
  int replays = 60;
  bool cold = false;  // L2 flushed before the first call
};

struct Timing {
  double median, tenth, ninetieth;  // microseconds per call, slowest rank of each replay
};

// A barrier and the two events are nodes of the graph, so neither the launch of the graph nor the
// skew between host threads is timed.
inline cudaGraphExec_t record(Node& node, const Plan& plan, int rank) {
  Gpu& gpu = node.gpu(rank);
  cudaGraph_t graph;
  check(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  if (plan.cold) check(cudaMemsetAsync(gpu.flush, 1, kFlushBytes, gpu.stream), "flush");
  node.enqueue_barrier(rank);
  check(cudaEventRecordWithFlags(gpu.begin, gpu.stream, cudaEventRecordExternal), "record");
  for (int i = 0; i < plan.calls; ++i) plan.enqueue(rank);
  check(cudaEventRecordWithFlags(gpu.end, gpu.stream, cudaEventRecordExternal), "record");
  check(cudaStreamEndCapture(gpu.stream, &graph), "end capture");
  cudaGraphExec_t ready;
  check(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
  check(cudaGraphUpload(ready, gpu.stream), "upload");
  check(cudaGraphDestroy(graph), "destroy graph");
  return ready;
}

inline Timing time_plan(Node& node, const Plan& plan) {
  constexpr int kWarmup = 5;
  std::vector<cudaGraphExec_t> graphs(node.ranks());
  node.each([&](int r) { graphs[r] = record(node, plan, r); });
  node.synchronize();
  std::vector<std::vector<float>> times(node.ranks(), std::vector<float>(plan.replays));
  node.together([&](int r) {
    Gpu& gpu = node.gpu(r);
    for (int i = -kWarmup; i < plan.replays; ++i) {
      check(cudaGraphLaunch(graphs[r], gpu.stream), "graph launch");
      check(cudaStreamSynchronize(gpu.stream), "replay");
      if (i >= 0) check(cudaEventElapsedTime(&times[r][i], gpu.begin, gpu.end), "elapsed");
    }
  });
  node.each([&](int r) { check(cudaGraphExecDestroy(graphs[r]), "destroy"); });
  std::vector<double> slowest(plan.replays, 0.0);
  for (int i = 0; i < plan.replays; ++i)
    for (int r = 0; r < node.ranks(); ++r)
      slowest[i] = std::max(slowest[i], 1e3 * times[r][i] / plan.calls);
  std::sort(slowest.begin(), slowest.end());
  const auto at = [&](double share) { return slowest[static_cast<size_t>(share * plan.replays)]; };
  return {at(0.5), at(0.1), at(0.9)};
}

// A kernel launch that may start its blocks before the kernel in front of it has ended; what it
// reads it reads after wait_for_previous_kernel().
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int ctas, int threads, size_t shared,
            cudaStream_t stream, bool early, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch");
}

// ---- results ------------------------------------------------------------------------------------

class Report {
 public:
  explicit Report(const char* path) : file_(std::fopen(path, "a")) {
    if (!file_) {
      std::perror(path);
      std::exit(1);
    }
  }
  ~Report() { std::fclose(file_); }

  // `fields` is the inside of a JSON object.
  void line(const std::string& fields) {
    std::fprintf(file_, "{%s}\n", fields.c_str());
    std::fflush(file_);
    std::printf("%s\n", fields.c_str());
  }

  void timing(const std::string& fields, const Timing& t) {
    char numbers[96];
    std::snprintf(numbers, sizeof numbers, ", \"us\": %.2f, \"p10\": %.2f, \"p90\": %.2f", t.median,
                  t.tenth, t.ninetieth);
    line(fields + numbers);
  }

 private:
  std::FILE* file_;
};

inline std::string field(const char* name, const std::string& value) {
  return "\"" + std::string(name) + "\": \"" + value + "\"";
}
inline std::string field(const char* name, double value) {
  char text[64];
  std::snprintf(text, sizeof text, "\"%s\": %g", name, value);
  return text;
}

}  // namespace fanfold::probe
