// device/numbers.cuh on a CPU, where all but one function is what it is on a GPU.
#pragma once

#define reciprocal reciprocal_of_gpus
#include_next "device/numbers.cuh"
#undef reciprocal

namespace fanfold {

inline float reciprocal(float v) { return 1.0f / v; }

}  // namespace fanfold
