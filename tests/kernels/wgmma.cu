// d = a b^T of 64 rows and kColumns columns, 128 elements of K. Ordinary stores swizzle the
// operands in shared memory, so that only the products are tried.
#include "constants.h"
#include "device/bulk.cuh"
#include "device/wgmma.cuh"

using namespace fanfold;

struct Args {
  const uint4* a;  // [64][8] of 16 e4m3
  const uint4* b;  // [kColumns][8]
  float* d;        // [64][kColumns]
};

namespace {

constexpr int kUnits = 8;  // of 16 bytes in a row
constexpr int kSums = kColumns / 2;

struct Shared {
  alignas(1024) uint4 a[kWgmmaRows][kUnits];
  alignas(1024) uint4 b[kColumns][kUnits];
};

__device__ void copy_swizzled(uint4 (*to)[kUnits], const uint4* from, int rows) {
  for (int i = threadIdx.x; i < rows * kUnits; i += kWarpgroupThreads) {
    const int row = i / kUnits;
    to[row][i % kUnits ^ row % 8] = from[i];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarpgroupThreads, 1)
    product(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  copy_swizzled(shared.a, args.a, kWgmmaRows);
  copy_swizzled(shared.b, args.b, kColumns);
  fence_shared_before_bulk();
  __syncthreads();
  float d[kSums];
  const uint64_t a = swizzled_descriptor(shared.a);
  const uint64_t b = swizzled_descriptor(shared.b);
  registers_settle(d);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    wgmma_e4m3(d, a + i * kDescriptorStep, b + i * kDescriptorStep, i > 0);
  wgmma_commit();
  wgmma_await<0>();
  registers_settle(d);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    args.d[(row + i / 2 % 2 * 8) * kColumns + column] = d[i];
  }
}
