// A plain reference of the fused layer for some tokens: sums in FP64, quantised between the GEMMs
// as the kernel does it.
#pragma once

#include "data.cuh"
#include "route.cuh"

namespace fanfold::probe {

struct ActivateArgs {
  const double* sums;    // [samples][2 * intermediate], gate before up
  const float* weights;  // [samples]
  uint8_t* activations;  // [samples][intermediate]
  float* scales;         // [samples][intermediate / 128]
};

// A CTA of 128 threads for each sample and 128 columns.
__global__ void activate_kernel(const __grid_constant__ ActivateArgs args) {
  __shared__ float largest[128];
  const int column = blockIdx.x * 128 + threadIdx.x;
  const double* sums = args.sums + int64_t{blockIdx.y} * 2 * kIntermediate;
  const double gate = sums[column];
  const auto v = static_cast<float>(gate / (1 + exp(-gate)) * sums[kIntermediate + column] *
                                    args.weights[blockIdx.y]);
  largest[threadIdx.x] = fmaxf(fabsf(v), kSmallestActivation);
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half)
      largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);
    __syncthreads();
  }
  args.activations[int64_t{blockIdx.y} * kIntermediate + column] =
      static_cast<uint8_t>(pack_e4m3(v * (kE4m3Max / largest[0]), 0, 0, 0));
  if (threadIdx.x == 0)
    args.scales[blockIdx.y * (kIntermediate / 128) + blockIdx.x] = largest[0] / kE4m3Max;
}

// 1 - 2 <x, y> / (<x, x> + <y, y>), and the largest error over the root mean square of x.
class Difference {
 public:
  void add(double x, double y) {
    xx_ += x * x;
    yy_ += y * y;
    xy_ += x * y;
    worst_ = std::max(worst_, std::abs(x - y));
    ++count_;
    if (!(std::abs(y) < 1e30)) wild_ = true;
  }
  double value() const { return wild_ ? 1 : 1 - 2 * xy_ / (xx_ + yy_); }
  double worst() const { return worst_ / std::sqrt(xx_ / count_); }

 private:
  double xx_ = 0, yy_ = 0, xy_ = 0, worst_ = 0;
  int64_t count_ = 0;
  bool wild_ = false;
};

inline float bf16_value(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &word, 4);
  return v;
}

inline float e4m3_value_on_host(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits & 128 ? -magnitude : magnitude;
}

// What the layer has for entries of the top-k lists.
struct FusedReference {
  std::vector<uint8_t> activations;  // [samples][intermediate]
  std::vector<float> scales;         // [samples][intermediate / 128]
  std::vector<double> results;       // [samples][hidden]
};

struct FusedInput {
  const uint8_t *x, *w1, *w2;
  const float *x_scales, *w1_scales, *w2_scales;
};

// `samples` name token and expert.
inline FusedReference reference_of(const FusedInput& input, const std::vector<SampleRow>& samples,
                                   const std::vector<float>& weights) {
  const size_t count = samples.size();
  std::vector<SampleRow> by_number = samples;
  for (size_t i = 0; i < count; ++i) by_number[i].row = static_cast<int>(i);
  SampleRow* tokens = upload(samples);
  SampleRow* numbers = upload(by_number);
  float* uploaded_weights = upload(weights);
  auto* sums = device_array<double>(count * kHidden);  // of both GEMMs in turn
  auto* activations = device_array<uint8_t>(count * kIntermediate);
  auto* scales = device_array<float>(count * (kIntermediate / 128));
  const auto rows = static_cast<unsigned>(count);
  reference_kernel<<<dim3(2 * kIntermediate / 8, rows), 256>>>(
      {kHidden, 2 * kIntermediate, kHidden / 128, 1, input.x, input.w1, input.x_scales,
       input.w1_scales, tokens, sums});
  activate_kernel<<<dim3(kIntermediate / 128, rows), 128>>>(
      {sums, uploaded_weights, activations, scales});
  check(cudaDeviceSynchronize(), "reference of the first GEMM");
  reference_kernel<<<dim3(kHidden / 8, rows), 256>>>({kIntermediate, kHidden, kIntermediate / 128,
                                                      1, activations, input.w2, scales,
                                                      input.w2_scales, numbers, sums});
  check(cudaDeviceSynchronize(), "reference of the second GEMM");
  FusedReference reference{download(activations, count * kIntermediate),
                           download(scales, count * (kIntermediate / 128)),
                           download(sums, count * kHidden)};
  for (void* each : {(void*)tokens, (void*)numbers, (void*)uploaded_weights, (void*)sums,
                     (void*)activations, (void*)scales})
    check(cudaFree(each), "free");
  return reference;
}

}  // namespace fanfold::probe
