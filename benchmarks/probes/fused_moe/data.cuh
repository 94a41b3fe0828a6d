// Random operands, and a plain reference for some rows.
#pragma once

#include <cuda_fp8.h>

#include "device/numbers.cuh"
#include "harness.cuh"
#include "tiles.hpp"

namespace fanfold::probe {

__host__ __device__ inline uint64_t hash(uint64_t v) {
  v += 0x9e3779b97f4a7c15ull;
  v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
  return v ^ (v >> 31);
}

// About normal, the largest of 128 near the largest e4m3: as quantised activations are.
__global__ void fill_e4m3_kernel(uint32_t* words, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    float v[4];
    for (int j = 0; j < 4; ++j) {
      const uint64_t h = hash((i * 4 + j) ^ seed);
      int sum = 0;  // of eight bytes: mean 1020, deviation 209
      for (int b = 0; b < 8; ++b) sum += (h >> (8 * b)) & 0xff;
      v[j] = (sum - 1020) * (160.0f / 209.0f);
    }
    words[i] = pack_e4m3(v[0], v[1], v[2], v[3]);
  }
}

// Over four powers of two.
__global__ void fill_scales_kernel(float* scales, size_t count, uint64_t seed, float factor) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x)
    scales[i] = exp2f((hash(i ^ seed) & 0xffff) * (4.0f / 65536) - 2) * factor;
}

inline uint8_t* random_e4m3(size_t count, uint64_t seed) {
  auto* memory = device_array<uint8_t>(count);
  fill_e4m3_kernel<<<2048, 256>>>(reinterpret_cast<uint32_t*>(memory), count / 4, seed << 40);
  check(cudaGetLastError(), "fill");
  return memory;
}

inline float* random_scales(size_t count, uint64_t seed, float factor = 1.0f / 160) {
  auto* memory = device_array<float>(count);
  fill_scales_kernel<<<512, 256>>>(memory, count, seed << 40, factor);
  check(cudaGetLastError(), "fill");
  return memory;
}

struct SampleRow {
  int row, expert;
};

__device__ inline float e4m3_value(uint32_t word, int i) {
  __nv_fp8_e4m3 v;
  v.__x = static_cast<uint8_t>(word >> (8 * i));
  return static_cast<float>(v);
}

struct ReferenceArgs {
  int k, columns;
  int64_t row_step, block_step;  // of the scales of a
  const uint8_t *a, *b;
  const float *a_scales, *b_scales;
  const SampleRow* samples;
  double* out;  // [samples][columns]
};

// One warp per element; exact products, sums in FP64.
__global__ void reference_kernel(const __grid_constant__ ReferenceArgs args) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (column >= args.columns) return;
  const SampleRow sample = args.samples[blockIdx.y];
  const int blocks_k = args.k / 128;
  const auto* a = reinterpret_cast<const uint32_t*>(args.a + int64_t{sample.row} * args.k);
  const auto* b = reinterpret_cast<const uint32_t*>(
      args.b + (int64_t{sample.expert} * args.columns + column) * args.k);
  const float* b_scales =
      args.b_scales +
      (int64_t{sample.expert} * ((args.columns + 127) / 128) + column / 128) * blocks_k;
  double sum = 0;
  for (int block = 0; block < blocks_k; ++block) {
    double part = 0;
    for (int i = 0; i < 4; ++i)
      part += e4m3_value(a[block * 32 + lane], i) * e4m3_value(b[block * 32 + lane], i);
    const float a_scale = args.a_scales[block * args.block_step + sample.row * args.row_step];
    sum += part * a_scale * b_scales[block];
  }
  for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (lane == 0) args.out[int64_t{blockIdx.y} * args.columns + column] = sum;
}

struct Accuracy {
  double difference;  // 1 - 2 <x, y> / (<x, x> + <y, y>)
  double worst;       // the largest error over the root mean square
  int64_t unwritten;  // of all routed rows
};

__global__ void count_nans_kernel(const uint16_t* d, int columns, unsigned long long* count) {
  const uint16_t* row = d + int64_t{blockIdx.x} * columns;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    if ((row[i] & 0x7fff) > 0x7f80) atomicAdd(count, 1ull);
}

}  // namespace fanfold::probe
