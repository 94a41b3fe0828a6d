// device/numbers.cuh on a CPU, where all but two functions are what they are on a GPU.
#pragma once

#define reciprocal reciprocal_of_gpus
#define exp2_approximately exp2_of_gpus
#include_next "device/numbers.cuh"
#undef exp2_approximately
#undef reciprocal

namespace fanfold {

inline float reciprocal(float v) { return 1.0f / v; }
inline float exp2_approximately(float v) { return exp2f(v); }

}  // namespace fanfold
