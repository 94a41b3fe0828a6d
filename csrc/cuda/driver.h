// The CUDA driver (libcuda.so.1), looked for when something first needs it and never before, so
// that the library builds and imports where no CUDA is installed.
//
// Types and numbers are the driver's binary interface, stated here because no CUDA header may be
// needed to build. Functions are its plain symbols: those without a suffix keep their meaning
// forever, and streams are passed explicitly, so that no variant for per-thread streams matters.
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

// CUlaunchAttribute
struct LaunchAttribute {
  static constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;

  int id = 0;
  std::byte reserved[4] = {};
  union {
    std::byte bytes[64] = {};
    int allowed;  // of programmatic stream serialisation
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

// The functions in use, each named as the driver names it, without its prefix `cu`.
struct Driver {
  Result (*driver_get_version)(int* version);
  Result (*get_error_name)(Result, const char** text);
  Result (*get_error_string)(Result, const char** text);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_push_current)(Context);
  Result (*ctx_pop_current)(Context*);
  Result (*module_load_data)(Module*, const void* image);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char* name);
  Result (*func_get_attribute)(int*, FunctionAttribute, Function);
  Result (*func_set_attribute)(Function, FunctionAttribute, int);
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void** parameters, void** extra);
  // Since CUDA 12.4; null in older drivers.
  Result (*func_load)(Function);
  Result (*func_get_param_info)(Function, size_t index, size_t* offset, size_t* bytes);

  // Throws DriverFailure unless `result` is success. `call` is the driver's name of the function;
  // `what` says what was asked of it, with its values.
  void check(Result result, const char* call, const std::string& what) const;
};

// Throws Unavailable where there is no driver, or it is older than CUDA 12.0. A failure is not
// remembered: the next call looks again.
const Driver& driver();

// The newest CUDA that the driver serves, as 1000 * major + 10 * minor.
int driver_version();

}  // namespace fanfold::cuda
