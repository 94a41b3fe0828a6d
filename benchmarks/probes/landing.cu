// Rows have landed in the CPU's pinned memory, and a kernel waits for them. Does it read them there,
// or from the GPU's memory, where the copy engine has brought them?
//   landing RESULTS.jsonl
#include <chrono>
#include <cstring>
#include <random>

#include "device/memory.cuh"
#include "device/warp.cuh"
#include "harness.cuh"

namespace fanfold::probe {

constexpr int kThreads = 1024;
constexpr int kSamples = 31;
constexpr int kRowBytes = 14336;  // bf16 of hidden 7168
constexpr int kMostRows = 1024;
constexpr int kMostBytes = kMostRows * kRowBytes;
constexpr uint64_t kThere = 1;

using Clock = std::chrono::steady_clock;
double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// What a consumer does: one thread of each CTA waits for the word, then all load the rows.
__global__ void __launch_bounds__(kThreads, 1)
    read_when_there(const uint64_t* word, const uint4* rows, int units, uint32_t* sum,
                    uint32_t* error) {
  if (threadIdx.x == 0) {
    Deadline deadline(error);
    while (load_acquire_system(word) != kThere && !deadline.expired()) continue;
  }
  __syncthreads();
  uint32_t all = 0;
  const int stride = static_cast<int>(gridDim.x) * kThreads;
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < units;
       i += stride) {
    const uint4 v = load_relaxed_system(rows + i);
    all += v.x ^ v.y ^ v.z ^ v.w;
  }
  atomicAdd(sum, all);
}

struct Memory {
  unsigned char *pinned, *copied;  // rows
  uint64_t *pinned_word, *copied_word, *there;
  uint32_t *sum, *error;
  cudaStream_t kernels, copies;
};

Memory open() {
  Memory m{};
  check(cudaHostAlloc(reinterpret_cast<void**>(&m.pinned), kMostBytes, cudaHostAllocMapped), "pin");
  check(cudaHostAlloc(reinterpret_cast<void**>(&m.pinned_word), 256, cudaHostAllocMapped), "pin");
  m.there = m.pinned_word + 16;  // what the copy engine brings
  *m.there = kThere;
  m.copied = device_array<unsigned char>(kMostBytes);
  m.copied_word = device_array<uint64_t>(1);
  m.sum = device_array<uint32_t>(1);
  m.error = device_array<uint32_t>(1);
  check(cudaStreamCreateWithFlags(&m.kernels, cudaStreamNonBlocking), "stream");
  check(cudaStreamCreateWithFlags(&m.copies, cudaStreamNonBlocking), "stream");
  std::mt19937 random(1);
  for (int i = 0; i < kMostBytes / 4; ++i) {
    const uint32_t value = random();
    std::memcpy(m.pinned + 4 * static_cast<size_t>(i), &value, 4);
  }
  return m;
}

uint32_t sum_of(const unsigned char* bytes_of_rows, int bytes) {
  uint32_t all = 0;
  for (int i = 0; i < bytes; i += 16) {
    uint32_t v[4];
    std::memcpy(v, bytes_of_rows + i, 16);
    all += v[0] ^ v[1] ^ v[2] ^ v[3];
  }
  return all;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// So many rows for each copy, as they arrive in messages; 0: the kernel reads pinned memory.
void time_landing(Report& report, Memory& m, int ctas, int rows_there, int rows_of_copy) {
  const int bytes = rows_there * kRowBytes, piece = rows_of_copy * kRowBytes;
  const uint32_t wanted = sum_of(m.pinned, bytes);
  std::vector<double> issued, ended;
  int wrong = 0;
  for (int i = 0; i < kSamples; ++i) {
    std::memset(m.pinned_word, 0, 8);
    check(cudaMemset(m.copied_word, 0, 8), "clear");
    check(cudaMemset(m.copied, 0, kMostBytes), "clear");
    check(cudaDeviceSynchronize(), "clear");
    const auto* word = piece ? m.copied_word : m.pinned_word;
    const auto* rows = reinterpret_cast<const uint4*>(piece ? m.copied : m.pinned);
    read_when_there<<<ctas, kThreads, 0, m.kernels>>>(word, rows, bytes / 16, m.sum, m.error);
    std::this_thread::sleep_for(std::chrono::microseconds(500));  // until it waits
    const auto begin = Clock::now();
    if (piece == 0) {
      __atomic_store_n(m.pinned_word, kThere, __ATOMIC_RELEASE);
    } else {
      for (int at = 0; at < bytes; at += piece)
        check(cudaMemcpyAsync(m.copied + at, m.pinned + at, std::min(piece, bytes - at),
                              cudaMemcpyHostToDevice, m.copies),
              "copy");
      check(cudaMemcpyAsync(m.copied_word, m.there, 8, cudaMemcpyHostToDevice, m.copies), "copy");
    }
    issued.push_back(microseconds_since(begin));
    check(cudaStreamSynchronize(m.kernels), "wait");
    ended.push_back(microseconds_since(begin));
    wrong += take(m.sum) != wanted;
    if (take(m.error) != 0) check(cudaErrorLaunchTimeout, "a copy waits for the kernel");
  }
  report.line(field("probe", "landing") + ", " + field("variant", piece ? "copies" : "loads") +
              ", " + field("ctas", ctas) + ", " + field("rows", rows_there) + ", " +
              field("rows_of_copy", rows_of_copy) + ", " + field("issue_us", median(issued)) +
              ", " + field("end_us", median(ended)) + ", " + field("wrong", wrong));
}

}  // namespace fanfold::probe

int main(int argc, char** argv) {
  using namespace fanfold::probe;
  Report report(argc > 1 ? argv[1] : "/dev/stdout");
  Memory memory = open();
  for (const int ctas : {24, 132})
    // None; those of a low-latency dispatch in fp8, and in bf16; those of high throughput.
    for (const int rows : {0, 64, 128, kMostRows})
      for (const int rows_of_copy : {0, 1, 8, 64})
        time_landing(report, memory, ctas, rows, rows_of_copy);
  return 0;
}
