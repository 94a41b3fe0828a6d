// What NCCL's device headers take from the C library and from CUDA's headers, for NVRTC, which has
// neither: fanfold/nccl/headers.py gives this file to the compiler under all their names.
#pragma once

#include "layout/types.h"

using intptr_t = long;
using uintptr_t = unsigned long;

using __u8 = uint8_t;
using __u16 = uint16_t;
using __u32 = uint32_t;
using __u64 = uint64_t;
using __s8 = int8_t;
using __s16 = int16_t;
using __s32 = int32_t;
using __s64 = int64_t;
using __be16 = uint16_t;
using __be32 = uint32_t;
using __be64 = uint64_t;

#define INT_MIN (-2147483647 - 1)
#define INT_MAX 2147483647
#define EIO 5
#define EBUSY 16
#define EINVAL 22

// Of CUDA's headers: only declarations that no kernel of ours uses name these.
using CUstream = struct CUstream_st*;
using cudaStream_t = CUstream;
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_HOST_NUMA = 3 };
#if !defined(CUDA_VERSION)
#define CUDA_VERSION (__CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10)
#endif

// GNU's, which NVRTC lacks.
namespace fanfold {
template <class T>
struct BareType {
  using type = T;
};
template <class T>
struct BareType<T&> {
  using type = T;
};
template <class T>
using Bare = typename BareType<T>::type;

template <bool First, class A, class B>
struct ChoiceOf {
  using type = A;
};
template <class A, class B>
struct ChoiceOf<false, A, B> {
  using type = B;
};
template <bool First, class A, class B>
using Choice = typename ChoiceOf<First, A, B>::type;
}  // namespace fanfold
#define typeof(expression) fanfold::Bare<decltype(expression)>
#define __typeof__(expression) fanfold::Bare<decltype(expression)>
