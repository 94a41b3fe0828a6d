// Host side of the probes of the fused MoE kernel: one GPU, random data, event timing after a flush
// of the L2, JSON lines.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device/tensor_copy.cuh"

namespace fanfold::probe {

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
  T* memory = device_array<T>(std::max<size_t>(values.size(), 1));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload");
  return memory;
}

template <class T>
std::vector<T> download(const T* memory, size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return values;
}

// ---- tensor maps --------------------------------------------------------------------------------

inline PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

struct MapShape {
  std::vector<uint64_t> sizes;  // the innermost first, in elements
  std::vector<uint32_t> box;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  int element_bytes = 1;
};

// A dense tensor, swizzled by 128 bytes in shared memory.
inline TensorMap tensor_map(void* memory, const MapShape& shape) {
  TensorMap map;
  std::vector<uint64_t> strides;
  std::vector<uint32_t> steps(shape.sizes.size(), 1);
  uint64_t stride = shape.element_bytes;
  for (size_t i = 0; i + 1 < shape.sizes.size(); ++i) strides.push_back(stride *= shape.sizes[i]);
  const CUresult status =
      map_encoder()(reinterpret_cast<CUtensorMap*>(&map), shape.type, shape.sizes.size(), memory,
                    shape.sizes.data(), strides.data(), shape.box.data(), steps.data(),
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", static_cast<int>(status));
    std::exit(1);
  }
  return map;
}

// ---- launches and timing ------------------------------------------------------------------------

struct Grid {
  int ctas, threads, cluster;
  size_t shared_bytes;
};

template <class Args>
void launch(void (*kernel)(Args), const Grid& grid, const Args& args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid.ctas;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args), "launch");
}

struct Timing {
  double median, least, most;  // microseconds
};

// What lies between two timed calls.
enum class Between {
  flush,        // the L2 is overwritten: the calls are hot, and lines wait to be written back
  clean_flush,  // then read past, so that none waits
  pause,        // the first, and 10 ms without work: the power cap does not act
};

inline const char* name_of(Between between) {
  return between == Between::flush         ? "flush"
         : between == Between::clean_flush ? "clean flush"
                                           : "flush and pause";
}

static __global__ void read_kernel(const uint4* words, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    sum ^= words[i].x;
  if (sum == 12345) *sink = sum;
}

// Times calls one by one.
class Timer {
 public:
  Timer() : flush_(device_array<char>(2 * kFlushBytes)) {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }

  // `after` follows each timed call, when it has ended.
  Timing time(const std::function<void()>& call, Between between = Between::flush, int repeats = 15,
              const std::function<void()>& after = {}) {
    std::vector<float> times;
    for (int i = -3; i < repeats; ++i) {
      prepare(between, i);
      check(cudaEventRecord(begin_), "record");
      call();
      check(cudaEventRecord(end_), "record");
      check(cudaEventSynchronize(end_), "timed call");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
      if (i < 0) continue;
      times.push_back(ms * 1e3f);
      if (after) after();
    }
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times.front(), times.back()};
  }

 private:
  static constexpr size_t kFlushBytes = 256u << 20;  // several times the L2

  void prepare(Between between, int i) {
    if (between == Between::pause) {
      check(cudaDeviceSynchronize(), "pause");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    check(cudaMemsetAsync(flush_, i & 0xff, kFlushBytes), "flush");
    if (between == Between::clean_flush)
      read_kernel<<<1056, 256>>>(reinterpret_cast<const uint4*>(flush_ + kFlushBytes),
                                 kFlushBytes / 16, reinterpret_cast<uint32_t*>(flush_));
  }

  char* flush_;
  cudaEvent_t begin_, end_;
};

// ---- results ------------------------------------------------------------------------------------

class Report {
 public:
  Report(const char* path, int argc, char** argv) : file_(std::fopen(path, "a")) {
    if (!file_) {
      std::perror(path);
      std::exit(1);
    }
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "device");
    std::string command = "benchmarks/probes/fused_moe/build/";
    for (int i = 0; i < argc; ++i) {
      const std::string word = argv[i];
      command += (i ? " " : "") + (i == 1 ? "RESULTS" : word.substr(word.rfind('/') + 1));
    }
    line("\"machine\": \"" + std::string(device.name) +
         "\", \"sms\": " + std::to_string(device.multiProcessorCount) + ", \"l2_bytes\": " +
         std::to_string(device.l2CacheSize) + ", \"command\": \"" + command + "\"");
  }
  ~Report() { std::fclose(file_); }

  // `fields` is the inside of a JSON object.
  void line(const std::string& fields) {
    std::fprintf(file_, "{%s}\n", fields.c_str());
    std::fflush(file_);
    std::printf("%s\n", fields.c_str());
    std::fflush(stdout);
  }

 private:
  std::FILE* file_;
};

inline std::string field(const char* name, double value) {
  char text[96];
  std::snprintf(text, sizeof text, ", \"%s\": %.6g", name, value);
  return text;
}

inline std::string field(const char* name, const std::string& value) {
  return std::string(", \"") + name + "\": \"" + value + "\"";
}

}  // namespace fanfold::probe
