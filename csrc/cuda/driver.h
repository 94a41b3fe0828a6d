// The CUDA driver (libcuda.so.1), loaded at its first use, so that the library builds and imports
// on machines without CUDA.
//
// This header declares the types and numbers of the driver's binary interface itself, so that the
// build needs no CUDA header. The functions are the driver's plain symbols: a symbol without a
// suffix never changes its meaning. The variants for per-thread default streams are not needed,
// because callers pass streams explicitly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace fanfold::cuda {

using Result = int;  // CUresult; 0 is success
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;

// CUfunction_attribute
enum class FunctionAttribute : int {
  STATIC_SHARED_BYTES = 1,
  LOCAL_BYTES = 3,
  REGISTERS = 4,
  MAX_DYNAMIC_SHARED_BYTES = 8,
};

// CUdevice_attribute
enum class DeviceAttribute : int {
  GPU_DIRECT_RDMA_SUPPORTED = 116,
  GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
  DMABUF_SUPPORTED = 124,
};

// CUlaunchAttribute
struct LaunchAttribute {
  static constexpr int CLUSTER_DIMENSION = 4;
  static constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;

  int id = 0;
  std::byte reserved[4] = {};
  union {
    std::byte bytes[64] = {};
    unsigned cluster[3];  // CTAs of a cluster
    int allowed;          // of programmatic stream serialisation
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8);
static_assert(std::is_trivially_copyable_v<LaunchAttribute>);

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3] = {1, 1, 1};   // CTAs
  unsigned block[3] = {1, 1, 1};  // threads of a CTA
  unsigned shared_bytes = 0;
  uintptr_t stream = 0;  // CUstream
  LaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32 &&
              offsetof(LaunchConfig, attributes) == 40 &&
              offsetof(LaunchConfig, attribute_count) == 48);

// CUtensorMapDataType
enum class TensorType : int { UINT8 = 0, FLOAT32 = 7, BFLOAT16 = 9 };

// CUtensorMapSwizzle
enum class Swizzle : int { NONE = 0, BYTES_128 = 3 };

// The driver functions that the library calls, by their names without the prefix `cu`.
struct Driver {
  Result (*driver_get_version)(int* version);
  Result (*get_error_name)(Result, const char** text);
  Result (*get_error_string)(Result, const char** text);
  // Devices are numbered.
  Result (*device_get_attribute)(int*, DeviceAttribute, int device);
  Result (*mem_get_handle_for_address_range)(void* handle, uintptr_t address, size_t bytes,
                                             int type, unsigned long long flags);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*module_load_data)(Module*, const void* image);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*func_get_attribute)(int*, FunctionAttribute, Function);
  Result (*func_set_attribute)(Function, FunctionAttribute, int);
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void** parameters, void** extra);
  // Of a GPU that runs nothing else.
  Result (*occupancy_max_active_clusters)(int* clusters, Function, const LaunchConfig*);
  // `map` is 128 bytes on a boundary of 64. Sizes, boxes and steps count elements, the innermost
  // dimension first; strides count bytes, from the second dimension on.
  Result (*tensor_map_encode_tiled)(void* map, TensorType, unsigned rank, void* address,
                                    const uint64_t* sizes, const uint64_t* strides,
                                    const unsigned* box, const unsigned* steps, int interleave,
                                    Swizzle, int promotion, int out_of_bounds);
  // Since CUDA 12.4; null in older drivers.
  Result (*func_load)(Function);
  Result (*func_get_param_info)(Function, size_t index, size_t* offset, size_t* bytes);

  // Throws DriverFailure unless `result` is success. `call` is the driver's name of the function;
  // `what` describes the request, with its values.
  void check(Result result, const char* call, const std::string& what) const;
};

// Returns the driver. Throws Unavailable if there is none, or if it is older than CUDA 12.0; after
// a failure the next call tries again.
const Driver& driver();

// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor.
int driver_version();

}  // namespace fanfold::cuda
