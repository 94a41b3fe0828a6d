// bf16 rows as fp8: values, and a scale for each 128 columns. A warp takes a segment of a row, four
// blocks, at a time, and has asked for the next one before it works on it.
//
// Constants: kHidden, kPowerOfTwo, kPackScales (scales come out as UE8M0), kWarps, kCtasOfAnSm.
#include "constants.h"
#include "device/fp8.cuh"
#include "device/memory.cuh"
#include "layout/formats.h"
#include "layout/row.h"

namespace fanfold {

inline constexpr int kThreads = kWarps * kWarpLanes;
inline constexpr int kUnits = kHidden / 8;  // of 16 bytes of bf16, in a row
inline constexpr int kSegmentUnits = 2 * kWarpLanes;
inline constexpr int kSegmentBlocks = 4;
inline constexpr int kBlocks = static_cast<int>(blocks_of(kHidden));
inline constexpr int kSegments = (kBlocks + kSegmentBlocks - 1) / kSegmentBlocks;  // of a row
static_assert(kHidden % 8 == 0 && kHidden > 0);
static_assert(kPackScales == 0 || kPowerOfTwo != 0);

class Quantizer {
 public:
  __device__ explicit Quantizer(const QuantizeArgs& args) : args_(args) {}

  __device__ void run() const {
    const int first = static_cast<int>(blockIdx.x) * kWarps + warp_;
    Segment now = load({first / kSegments, first % kSegments});
    while (now.place.token < args_.tokens) {
      const Segment next = load(after(now.place));
      store(now.place, exchange(now));
      now = next;
    }
  }

 private:
  struct Place {
    int64_t token;
    int part;
  };
  // Of a lane: the units with its number in either half of the segment; then two that follow each
  // other.
  struct Segment {
    Place place;
    uint4 low, high;
  };

  __device__ Place after(Place place) const {
    const int step = static_cast<int>(gridDim.x) * kWarps;
    place.token += step / kSegments;
    place.part += step % kSegments;
    if (place.part < kSegments) return place;
    return {place.token + 1, place.part - kSegments};
  }

  __device__ static bool has_unit(int unit) { return kUnits % kSegmentUnits == 0 || unit < kUnits; }

  // Zeros where the row has no columns: they change no scale.
  __device__ Segment load(Place place) const {
    Segment segment{place, {}, {}};
    if (place.token >= args_.tokens) return segment;
    const auto* row = reinterpret_cast<const uint4*>(args_.x) + place.token * kUnits;
    const int unit = place.part * kSegmentUnits + lane_;
    if (has_unit(unit)) segment.low = load_once(row + unit);
    if (has_unit(unit + kWarpLanes)) segment.high = load_once(row + unit + kWarpLanes);
    return segment;
  }

  // An even lane gets two units of the first half, an odd one of the second: loads and stores both
  // are of 16 bytes and follow each other.
  __device__ Segment exchange(const Segment& s) const {
    const uint4 given = odd_ ? s.low : s.high;
    const uint4 got{__shfl_xor_sync(kFullWarp, given.x, 1), __shfl_xor_sync(kFullWarp, given.y, 1),
                    __shfl_xor_sync(kFullWarp, given.z, 1), __shfl_xor_sync(kFullWarp, given.w, 1)};
    return {s.place, odd_ ? got : s.low, odd_ ? s.high : got};
  }

  __device__ void store(Place place, const Segment& s) const {
    const auto [values, scale] = quantise<2, kPowerOfTwo != 0>(s.low, s.high);
    const int unit = place.part * kSegmentUnits + (odd_ ? kWarpLanes - 1 : 0) + lane_;
    store_values(args_.values + (place.token * kUnits + unit) * 8, unit, values);
    if constexpr (kPackScales != 0) {
      store_packed(place, scale);
    } else {
      store_scales(place, scale);
    }
  }

  __device__ static void store_values(unsigned char* to, int unit, uint4 v) {
    if constexpr (kUnits % 2 == 0) {
      if (has_unit(unit)) store_weak(reinterpret_cast<uint4*>(to), v);
    } else {
      auto* halves = reinterpret_cast<uint64_t*>(to);
      if (has_unit(unit)) halves[0] = (uint64_t{v.y} << 32) | v.x;
      if (has_unit(unit + 1)) halves[1] = (uint64_t{v.w} << 32) | v.z;
    }
  }

  // Even lanes hold blocks 0 and 1, odd ones 2 and 3; the upper half of the warp 1 and 3.
  __device__ void store_scales(Place place, float scale) const {
    const int holder = ((lane_ >> 1) & 1) + (lane_ & 1) * (kWarpLanes / 2);
    const float of_block = __shfl_sync(kFullWarp, scale, holder);
    const int block = place.part * kSegmentBlocks + lane_;
    if (lane_ < kSegmentBlocks && block < kBlocks)
      args_.scales[place.token * kBlocks + block] = __float_as_uint(of_block);
  }

  __device__ void store_packed(Place place, float scale) const {
    const int b = (odd_ ? 2 : 0) + lane_ / (kWarpLanes / 2);
    const bool is_there = place.part * kSegmentBlocks + b < kBlocks;
    const uint32_t exponent = is_there ? ue8m0_of(__float_as_uint(scale)) << (8 * b) : 0u;
    const uint32_t word = __reduce_or_sync(kFullWarp, exponent);
    if (lane_ == 0) args_.scales[place.token * kSegments + place.part] = word;
  }

  const QuantizeArgs& args_;
  const int warp_ = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane_ = static_cast<int>(threadIdx.x) % kWarpLanes;
  const bool odd_ = lane_ % 2 != 0;
};

}  // namespace fanfold

namespace fanfold::formats {

__global__ void __launch_bounds__(kThreads, kCtasOfAnSm)
    quantize(const __grid_constant__ QuantizeArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();  // not before, or ever more kernels would wait on SMs of their own
  Quantizer(args).run();
}

}  // namespace fanfold::formats
