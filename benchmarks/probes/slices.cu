// While a kernel of one stream waits, does a GPU that other processes share begin what the same
// process launches on another stream? Ranks that are threads of one process rely on it.
//   slices RESULTS.jsonl
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "device/memory.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kThreads = 384;
constexpr int kSharedBytes = 200 * 1024;  // so one CTA to an SM
constexpr uint64_t kBoundNs = 4'000'000'000;
constexpr size_t kCopied = 1 << 20;

using Clock = std::chrono::steady_clock;
double milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

__global__ void __launch_bounds__(kThreads, 1) wait_for(const uint32_t* flag, uint32_t* began) {
  if (threadIdx.x == 0 && blockIdx.x == 0) store_relaxed_system(began, 1u);
  const uint64_t begin = global_nanoseconds();
  while (load_relaxed_system(flag) == 0 && global_nanoseconds() - begin < kBoundNs) continue;
}

__global__ void raise(uint32_t* flag, uint32_t* began) {
  store_relaxed_system(began, 1u);
  store_relaxed_system(flag, 1u);
}

__global__ void burn(uint64_t nanoseconds) {
  const uint64_t begin = global_nanoseconds();
  while (global_nanoseconds() - begin < nanoseconds) continue;
}

struct Case {
  int cluster, second_cluster, ctas, delay_ms;
};

// One process's streams, and words by which kernels say that they have begun.
class SlicesProbe {
 public:
  SlicesProbe() {
    check(cudaFuncSetAttribute(wait_for, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "shared memory");
    for (cudaStream_t& stream : streams_)
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    flag_ = device_array<uint32_t>(1);
    up_ = device_array<uint32_t>(1, 1);
    to_ = device_array<char>(kCopied);
    check(cudaHostAlloc(reinterpret_cast<void**>(&from_), kCopied, cudaHostAllocDefault), "pin");
    check(cudaHostAlloc(reinterpret_cast<void**>(&began_), 4096, cudaHostAllocMapped), "pin");
    for (const int cluster : {1, 2}) enqueue(Case{cluster, cluster, 64, 0});  // all is loaded
  }

  void run(Report& report, const Case& of, int others) {
    reset();
    auto begin = Clock::now();
    start(0, of.cluster, of.ctas, flag_, 0);
    const double first_ms = await(0, begin);
    std::this_thread::sleep_for(std::chrono::milliseconds(of.delay_ms));
    begin = Clock::now();
    check(cudaMemcpyAsync(to_, from_, kCopied, cudaMemcpyHostToDevice, streams_[1]), "copy");
    start(1, of.second_cluster, of.ctas, up_, 1);
    raise<<<1, 1, 0, streams_[1]>>>(flag_, began_ + 2);
    const double second_ms = await(1, begin), raised_ms = await(2, begin);
    check(cudaDeviceSynchronize(), "probe");
    report.line(field("probe", "slices") + ", " + field("other_processes", others) + ", " +
                field("cluster", of.cluster) + ", " + field("second_cluster", of.second_cluster) +
                ", " + field("ctas", of.ctas) + ", " + field("delay_ms", of.delay_ms) + ", " +
                field("first_began_ms", first_ms) + ", " + field("second_began_ms", second_ms) +
                ", " + field("flag_raised_ms", raised_ms));
  }

 private:
  void reset() {
    check(cudaMemset(flag_, 0, sizeof *flag_), "clear");
    std::memset(began_, 0, 4096);
  }
  void enqueue(const Case& of) {
    reset();
    start(1, of.second_cluster, of.ctas, up_, 1);
    raise<<<1, 1, 0, streams_[1]>>>(flag_, began_ + 2);
    start(0, of.cluster, of.ctas, flag_, 0);
    check(cudaDeviceSynchronize(), "load");
  }

  void start(int stream, int cluster, int ctas, const uint32_t* flag, int word) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = ctas;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = streams_[stream];
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, wait_for, flag, began_ + word), "launch");
  }

  // Milliseconds from `begin` until the word is there; -1 if it does not come.
  double await(int word, Clock::time_point begin) const {
    const volatile uint32_t* place = began_ + word;
    while (*place == 0)
      if (milliseconds_since(begin) > 2e-6 * kBoundNs) return -1;
    return milliseconds_since(begin);
  }

  cudaStream_t streams_[2] = {};
  uint32_t *flag_ = nullptr, *up_ = nullptr, *began_ = nullptr;
  char *to_ = nullptr, *from_ = nullptr;
};

// A process that keeps the GPU busy until it is killed, in kernels of a millisecond.
pid_t start_other() {
  const pid_t child = fork();
  if (child != 0) return child;
  while (true) {
    for (int i = 0; i < 8; ++i) burn<<<kCtas, 256>>>(1'000'000);
    check(cudaDeviceSynchronize(), "burn");
  }
}

// In a process of its own: one that has used CUDA cannot fork others that do.
void run_beside(const char* path, int others) {
  if (const pid_t child = fork(); child != 0) {
    waitpid(child, nullptr, 0);
    return;
  }
  Report report(path);
  SlicesProbe probe;
  for (const int delay_ms : {20, 1000})
    for (const auto& [first, second] : {std::pair{1, 1}, {2, 2}, {2, 1}})
      probe.run(report, Case{first, second, 64, delay_ms}, others);
  probe.run(report, Case{2, 2, 32, 1000}, others);
  std::exit(0);
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  const char* path = argc > 1 ? argv[1] : "/dev/stdout";
  std::vector<pid_t> children;
  for (const size_t others : {0, 1, 7}) {
    while (children.size() < others) children.push_back(start_other());
    sleep(others == 0 ? 0 : 3);
    run_beside(path, static_cast<int>(others));
  }
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  return 0;
}
