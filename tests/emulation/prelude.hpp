// Precompiled, and included before a kernel's source: everything that kernels include and that their
// constants do not change.
#pragma once

#include "cuda.hpp"
// Needs cuda.hpp.
#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/memory.cuh"
#include "device/numbers.cuh"
#include "device/tensor_copy.cuh"
#include "device/warp.cuh"
#include "device/wgmma.cuh"
#include "layout/protocol.h"
