#include "cuda/kernel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace fanfold::cuda {
namespace {

std::string shape_text(const std::string& entry, const LaunchShape& shape) {
  return "kernel " + entry + " on " + std::to_string(shape.ctas) + " CTAs of " +
         std::to_string(shape.threads) + " threads with " + std::to_string(shape.shared_bytes) +
         " bytes of dynamic shared memory" +
         (shape.cluster > 1 ? ", in clusters of " + std::to_string(shape.cluster) : "") +
         (shape.early ? ", launched early" : "");
}

constexpr unsigned MOST_ATTRIBUTES = 2;

// Refers to `attributes`.
LaunchConfig launch_config(const LaunchShape& shape,
                           LaunchAttribute (&attributes)[MOST_ATTRIBUTES]) {
  unsigned count = 0;
  if (shape.early) {
    attributes[count].id = LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count++].value.allowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = LaunchAttribute::CLUSTER_DIMENSION;
    auto& cluster = attributes[count++].value.cluster;
    cluster[0] = static_cast<unsigned>(shape.cluster);
    cluster[1] = cluster[2] = 1;
  }
  return {.grid = {static_cast<unsigned>(shape.ctas), 1, 1},
          .block = {static_cast<unsigned>(shape.threads), 1, 1},
          .shared_bytes = static_cast<unsigned>(shape.shared_bytes),
          .stream = shape.stream,
          .attributes = count > 0 ? attributes : nullptr,
          .attribute_count = count};
}

}  // namespace

PeerTable peer_table(const uintptr_t* peers, int32_t ranks, uintptr_t copy) {
  PeerTable table{};
  for (int32_t rank = 0; rank < std::min(ranks, kFewRanks); ++rank) {
    table.few[rank] = reinterpret_cast<unsigned char*>(peers[rank]);
  }
  if (ranks > kFewRanks) table.all = reinterpret_cast<unsigned char* const*>(copy);
  return table;
}

Kernel::Kernel(std::span<const std::byte> cubin, std::string entry, const std::string& symbol)
    : driver_(driver()), entry_(std::move(entry)) {
  if (cubin.empty()) throw BadArgument("image", "empty", "a CUBIN");
  driver_.check(driver_.ctx_get_current(&context_), "cuCtxGetCurrent", "kernel " + entry_);
  if (context_ == nullptr) {
    throw Misuse("no CUDA context is current, so kernel " + entry_ +
                 " cannot be loaded: call torch.cuda.set_device, and make a tensor there, first");
  }
  driver_.check(driver_.module_load_data(&module_, cubin.data()), "cuModuleLoadData",
                "kernel " + entry_ + ", " + std::to_string(cubin.size()) + " bytes");
  try {
    find_function(symbol);
    find_parameter();
  } catch (...) {
    unload();
    throw;
  }
}

Kernel::~Kernel() { unload(); }

void Kernel::find_function(const std::string& symbol) {
  driver_.check(driver_.module_get_function(&function_, module_, symbol.c_str()),
                "cuModuleGetFunction", "kernel " + entry_ + ", symbol " + symbol);
  if (driver_.func_load != nullptr) {
    driver_.check(driver_.func_load(function_), "cuFuncLoad", "kernel " + entry_);
  }
  registers_ = attribute(FunctionAttribute::REGISTERS);
  local_bytes_ = attribute(FunctionAttribute::LOCAL_BYTES);
  static_shared_bytes_ = attribute(FunctionAttribute::STATIC_SHARED_BYTES);
}

void Kernel::find_parameter() {
  if (driver_.func_get_param_info == nullptr) return;
  size_t offset = 0;
  driver_.check(driver_.func_get_param_info(function_, 0, &offset, &parameter_bytes_),
                "cuFuncGetParamInfo", "the only parameter of kernel " + entry_);
  size_t other_bytes = 0;
  if (driver_.func_get_param_info(function_, 1, &offset, &other_bytes) == 0) {
    throw BadArgument("entry", entry_ + ", which takes several parameters",
                      "a kernel that takes one struct");
  }
}

int Kernel::attribute(FunctionAttribute attribute) const {
  int value = 0;
  driver_.check(
      driver_.func_get_attribute(&value, attribute, function_), "cuFuncGetAttribute",
      "attribute " + std::to_string(static_cast<int>(attribute)) + " of kernel " + entry_);
  return value;
}

void Kernel::allow_shared_bytes(int bytes) {
  const Result result =
      driver_.func_set_attribute(function_, FunctionAttribute::MAX_DYNAMIC_SHARED_BYTES, bytes);
  if (result != 0) {
    driver_.check(result, "cuFuncSetAttribute",
                  std::to_string(bytes) + " bytes of dynamic shared memory, beside " +
                      std::to_string(static_shared_bytes_) + " static ones, for kernel " + entry_);
  }
}

int Kernel::most_clusters(const LaunchShape& shape) const {
  LaunchAttribute attributes[MOST_ATTRIBUTES];
  LaunchConfig config = launch_config(shape, attributes);
  config.grid[0] = static_cast<unsigned>(shape.cluster);
  int clusters = 0;
  const Result result = driver_.occupancy_max_active_clusters(&clusters, function_, &config);
  if (result != 0) driver_.check(result, "cuOccupancyMaxActiveClusters", shape_text(entry_, shape));
  return clusters;
}

void Kernel::launch(const void* arguments, size_t bytes, const LaunchShape& shape) const {
  if (parameter_bytes_ != 0 && bytes != parameter_bytes_) {
    throw BadArgument("the argument struct of kernel " + entry_, std::to_string(bytes) + " bytes",
                      std::to_string(parameter_bytes_) + " bytes, as the kernel declares it");
  }
  LaunchAttribute attributes[MOST_ATTRIBUTES];
  const LaunchConfig config = launch_config(shape, attributes);
  // The driver only reads the parameters, but its interface lacks the const.
  void* parameters[1] = {const_cast<void*>(arguments)};
  // The caller may have made another device current; stream 0 would be a stream of that device.
  Context current = nullptr;
  const bool other_context = driver_.ctx_get_current(&current) == 0 && current != context_ &&
                             driver_.ctx_push_current(context_) == 0;
  const Result result = driver_.launch_kernel_ex(&config, function_, parameters, nullptr);
  if (other_context) driver_.ctx_pop_current(&current);
  // Build the text only for a failure: building it costs as much as a launch.
  if (result != 0) driver_.check(result, "cuLaunchKernelEx", shape_text(entry_, shape));
}

void Kernel::unload() noexcept {
  if (module_ == nullptr) return;
  // A module must be unloaded in its own context. Ignores the results: if the context or the driver
  // has ended, the module is gone too.
  Context current = nullptr;
  if (driver_.ctx_get_current(&current) != 0) return;
  if (current == context_) {
    driver_.module_unload(module_);
  } else if (driver_.ctx_push_current(context_) == 0) {
    driver_.module_unload(module_);
    driver_.ctx_pop_current(&current);
  }
  module_ = nullptr;
}

}  // namespace fanfold::cuda
