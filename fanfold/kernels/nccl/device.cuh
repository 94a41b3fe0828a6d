// NCCL's device API, of the version that is installed, for NVRTC.
//
// Its headers are written for nvcc; fanfold/nccl/headers.py brings them. What they include beside
// each other comes from standard.h and atomic.h. What else NVRTC lacks is worked around here.
#pragma once

// NVRTC has no functions of the host, not even declared ones.
#undef __host__
#define __host__

// A proxy of the CPU and GDAKI, a NIC that the GPU drives; a context says at run time which it has.
#define NCCL_GIN_GPI_ENABLE 0
#define NCCL_GIN_EFA_GDA_ENABLE 0

// It has `typeof` of GNU's compiler, see standard.h; headers ask for the compiler's name.
#define __GNUC__ 13

#include "nccl/standard.h"

// It names arrays of no elements in branches that are not taken.
#define loadConst load_const_of_nvcc
#include <nccl_device/utility.h>
#undef loadConst

namespace nccl::utility {

template <class T>
__device__ __forceinline__ T loadConst(const T* address) {
  using fanfold::Choice;
  using Word =
      Choice<alignof(T) % 8 == 0, uint64_t, Choice<alignof(T) % 4 == 0, uint32_t, uint8_t>>;
  union {
    Word words[sizeof(T) / sizeof(Word)];
    T value;
  } loaded;
  for (unsigned i = 0; i < sizeof(T) / sizeof(Word); ++i)
    loaded.words[i] = __ldg(reinterpret_cast<const Word*>(address) + i);
  return loaded.value;
}

}  // namespace nccl::utility

#include <nccl/changed_headers.h>  // by fanfold/nccl/headers.py
#include <nccl_device/impl/comm__funcs.h>
#include <nccl_device/impl/core__funcs.h>
#include <nccl_device/impl/gin__funcs.h>
#include <nccl_device/impl/ptr__funcs.h>
