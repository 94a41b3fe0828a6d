#include "cuda/driver.h"

#include <dlfcn.h>

#include "base/error.h"

namespace fanfold::cuda {
namespace {

constexpr const char* LIBRARY = "libcuda.so.1";
constexpr int OLDEST = 12000;

// The loader's message for the last failure of this thread.
std::string loader_error() {
  const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps it per thread
  return text != nullptr ? text : "no reason given";
}

template <typename Pointer>
void find(void* library, Pointer& function, const char* name) {
  function = reinterpret_cast<Pointer>(dlsym(library, name));
}

template <typename Pointer>
void require(void* library, Pointer& function, const char* name) {
  find(library, function, name);
  if (function == nullptr) {
    throw Unavailable(std::string(LIBRARY) + " has no function " + name +
                      ", so it is older than CUDA 12.0: install a newer NVIDIA driver");
  }
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Driver open() {
  // Never unloaded, because other libraries of the process use it too.
  void* library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Unavailable("there is no usable CUDA driver (" + loader_error() +
                      "): install the NVIDIA driver, or start the container with its GPUs "
                      "(--gpus all), or take the host backend (FANFOLD_BACKEND=host)");
  }
  Driver driver{};
  require(library, driver.driver_get_version, "cuDriverGetVersion");
  require(library, driver.get_error_name, "cuGetErrorName");
  require(library, driver.get_error_string, "cuGetErrorString");
  require(library, driver.device_get_attribute, "cuDeviceGetAttribute");
  require(library, driver.mem_get_handle_for_address_range, "cuMemGetHandleForAddressRange");
  require(library, driver.ctx_get_current, "cuCtxGetCurrent");
  // The symbols without the suffix are those of CUDA 3, which reference-counted contexts.
  require(library, driver.ctx_push_current, "cuCtxPushCurrent_v2");
  require(library, driver.ctx_pop_current, "cuCtxPopCurrent_v2");
  require(library, driver.module_load_data, "cuModuleLoadData");
  require(library, driver.module_unload, "cuModuleUnload");
  require(library, driver.module_get_function, "cuModuleGetFunction");
  require(library, driver.func_get_attribute, "cuFuncGetAttribute");
  require(library, driver.func_set_attribute, "cuFuncSetAttribute");
  require(library, driver.launch_kernel_ex, "cuLaunchKernelEx");
  require(library, driver.occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters");
  require(library, driver.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  find(library, driver.func_load, "cuFuncLoad");
  find(library, driver.func_get_param_info, "cuFuncGetParamInfo");
  int version = 0;
  driver.check(driver.driver_get_version(&version), "cuDriverGetVersion", "its version");
  if (version < OLDEST) {
    throw Unavailable("the NVIDIA driver serves CUDA " + version_text(version) +
                      ", but 12.0 is needed: install a newer driver, or take the host backend "
                      "(FANFOLD_BACKEND=host)");
  }
  return driver;
}

}  // namespace

void Driver::check(Result result, const char* call, const std::string& what) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  // For codes that this driver does not know, the pointers stay null.
  get_error_name(result, &name);
  get_error_string(result, &text);
  throw DriverFailure({.call = call,
                       .what = what,
                       .name = name != nullptr ? name : "CUresult " + std::to_string(result),
                       .text = text != nullptr ? text : "unknown to this driver"});
}

const Driver& driver() {
  static const Driver opened = open();
  return opened;
}

int driver_version() {
  int version = 0;
  driver().check(driver().driver_get_version(&version), "cuDriverGetVersion", "its version");
  return version;
}

}  // namespace fanfold::cuda
