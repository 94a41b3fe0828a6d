// What NCCL's headers take from CUDA's, for the host's compiler.
#pragma once

#include <stddef.h>

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUstream_st* CUstream;
typedef int CUmemLocationType;
#define CUDA_VERSION 13000
