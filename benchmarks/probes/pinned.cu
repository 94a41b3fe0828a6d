// What do loads of the CPU's pinned memory cost a kernel, and what do looks at one word of it?
//   pinned RESULTS.jsonl
#include <atomic>
#include <chrono>
#include <cstring>

#include "device/memory.cuh"
#include "device/warp.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kThreads = 1024;
constexpr int kBytes = 128 * 14336;  // rows of bf16 of 128 tokens, hidden 7168
constexpr int kSamples = 20;

using Clock = std::chrono::steady_clock;
double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

template <bool Relaxed>
__global__ void __launch_bounds__(kThreads, 1) read(const uint4* from, int units, uint32_t* sum) {
  uint32_t all = 0;
  const int stride = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < units;
       i += stride) {
    const uint4 v = Relaxed ? load_relaxed_system(from + i) : from[i];
    all += v.x ^ v.y ^ v.z ^ v.w;
  }
  atomicAdd(sum, all);
}

// One lane of each of the first `warps` warps of every CTA looks until the word is there.
template <bool Acquires>
__global__ void __launch_bounds__(kThreads, 1) look(const uint64_t* word, int warps) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread / kWarpLanes >= warps || thread % kWarpLanes != 0) return;
  while ((Acquires ? load_acquire_system(word) : load_relaxed_system(word)) == 0) continue;
}

void time_reads(Report& report, const void* memory) {
  auto* sum = device_array<uint32_t>(1);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  for (const bool relaxed : {true, false}) {
    float best = 1e9f;
    for (int i = 0; i < kSamples; ++i) {
      check(cudaEventRecord(begin), "record");
      const auto* from = static_cast<const uint4*>(memory);
      if (relaxed)
        read<true><<<kCtas, kThreads>>>(from, kBytes / 16, sum);
      else
        read<false><<<kCtas, kThreads>>>(from, kBytes / 16, sum);
      check(cudaEventRecord(end), "record");
      check(cudaDeviceSynchronize(), "read");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "time");
      best = std::min(best, ms * 1e3f);
    }
    report.line(field("probe", "pinned") + ", " +
                field("variant", relaxed ? "relaxed loads" : "plain loads") + ", " +
                field("bytes", kBytes) + ", " + field("us", best));
  }
}

// `word` is in pinned memory; `copied` bytes of it behind.
void time_looks(Report& report, char* memory) {
  auto* word = reinterpret_cast<std::atomic<uint64_t>*>(memory);
  const std::vector<char> source(kBytes, 3);
  for (const bool acquires : {true, false}) {
    for (const int warps : {0, 1, 8, 32}) {
      word->store(0);
      const auto* place = reinterpret_cast<const uint64_t*>(memory);
      if (warps != 0 && acquires) look<true><<<kCtas, kThreads>>>(place, warps);
      if (warps != 0 && !acquires) look<false><<<kCtas, kThreads>>>(place, warps);
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      auto begin = Clock::now();
      std::memcpy(memory + 4096, source.data(), kBytes);
      const double copy_us = microseconds_since(begin);
      begin = Clock::now();
      word->store(1);
      check(cudaDeviceSynchronize(), "look");
      report.line(field("probe", "pinned") + ", " +
                  field("variant", acquires ? "acquiring looks" : "relaxed looks") + ", " +
                  field("warps", warps) + ", " + field("copy_us", copy_us) + ", " +
                  field("end_us", microseconds_since(begin)));
    }
  }
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  Report report(argc > 1 ? argv[1] : "/dev/stdout");
  char* memory = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&memory), 2 * kBytes, cudaHostAllocMapped), "pin");
  std::memset(memory, 1, 2 * kBytes);
  time_reads(report, memory);
  time_looks(report, memory);
  return 0;
}
