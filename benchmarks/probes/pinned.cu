// What do loads of the CPU's pinned memory cost a kernel, what do bulk copies from and to it, and
// what do looks at one word of it?
//   pinned RESULTS.jsonl
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "device/bulk.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kThreads = 1024;
constexpr int kRowBytes = 14336;  // bf16 of hidden 7168
constexpr int kBytes = 128 * kRowBytes;
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

// One thread of each CTA copies rows through shared memory.
__global__ void __launch_bounds__(kWarpLanes, 1)
    copy_rows(const unsigned char* from, unsigned char* to, int rows) {
  __shared__ alignas(128) unsigned char row_bytes[kRowBytes];
  __shared__ ArrivalBarrier full;
  if (threadIdx.x != 0) return;
  init_barrier(&full, 1);
  fence_barrier_init();
  uint32_t parity = 0;
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    arrive_expecting(&full, kRowBytes);
    bulk_load(row_bytes, from + int64_t{row} * kRowBytes, kRowBytes, &full);
    while (!phase_is_over(&full, parity)) continue;
    parity ^= 1u;
    fence_shared_before_bulk();
    bulk_store(to + int64_t{row} * kRowBytes, row_bytes, kRowBytes);
    bulk_commit();
    bulk_await_written<0>();
  }
}

// One lane of each of the first `warps` warps of every CTA looks until the word is there.
template <bool Acquires>
__global__ void __launch_bounds__(kThreads, 1) look(const uint64_t* word, int warps) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread / kWarpLanes >= warps || thread % kWarpLanes != 0) return;
  while ((Acquires ? load_acquire_system(word) : load_relaxed_system(word)) == 0) continue;
}

// The fastest of some launches.
template <class Launch>
void time_launches(Report& report, const char* memory_kind, const char* variant,
                   const Launch& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  float best = 1e9f;
  for (int i = 0; i < kSamples; ++i) {
    check(cudaEventRecord(begin), "record");
    launch();
    check(cudaEventRecord(end), "record");
    check(cudaDeviceSynchronize(), variant);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    best = std::min(best, ms * 1e3f);
  }
  report.line(field("probe", "pinned") + ", " + field("memory", memory_kind) + ", " +
              field("variant", variant) + ", " + field("bytes", kBytes) + ", " + field("us", best));
}

void time_reads(Report& report, const char* memory_kind, const void* memory) {
  auto* sum = device_array<uint32_t>(1);
  const auto* from = static_cast<const uint4*>(memory);
  time_launches(report, memory_kind, "relaxed loads",
                [&] { read<true><<<kCtas, kThreads>>>(from, kBytes / 16, sum); });
  time_launches(report, memory_kind, "plain loads",
                [&] { read<false><<<kCtas, kThreads>>>(from, kBytes / 16, sum); });
}

// Last, as a bulk copy that fails ends all.
void time_bulk_copies(Report& report, const char* memory_kind, unsigned char* memory) {
  auto* rows = device_array<unsigned char>(kBytes);
  time_launches(report, memory_kind, "bulk stores",
                [&] { copy_rows<<<kCtas, kWarpLanes>>>(rows, memory, kBytes / kRowBytes); });
  time_launches(report, memory_kind, "bulk loads",
                [&] { copy_rows<<<kCtas, kWarpLanes>>>(memory, rows, kBytes / kRowBytes); });
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
  // As processes of one machine share it.
  void* shared = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) throw std::runtime_error("no shared memory");
  std::memset(shared, 1, kBytes);
  check(cudaHostRegister(shared, kBytes, cudaHostRegisterMapped), "pin");
  time_reads(report, "allocated", memory);
  time_reads(report, "shared", shared);
  time_looks(report, memory);
  time_bulk_copies(report, "allocated", reinterpret_cast<unsigned char*>(memory));
  time_bulk_copies(report, "shared", static_cast<unsigned char*>(shared));
  return 0;
}
