// What the tables of NET, GIN and RMA have in common.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "nccl_plugin/abi.h"
#include "nccl_plugin/log.h"
#include "nccl_plugin/settings.h"
#include "nccl_plugin/sockets.h"

namespace fanfold::nccl_plugin::entry {

inline constexpr const char* kName = "Fanfold";

// Nothing is thrown into NCCL.
template <typename F>
abi::Result guarded(const char* what, const F& call) noexcept {
  try {
    return call();
  } catch (const std::exception& error) {
    return warn(abi::Result::kSystemError, std::string(what) + " fails: " + error.what());
  }
}

inline abi::Result init(void** instance, abi::Logger logger) {
  return guarded("init", [&] {
    set_logger(logger);
    Settings settings;
    const Problem problem = read_settings(settings);
    if (!problem.empty()) return warn(abi::Result::kInvalidArgument, problem);
    // NCCL 2.28.9 passes `connect` and `finalize` an instance of its own choice, or none. So
    // nothing is kept here.
    static char of_process = 0;
    *instance = &of_process;
    return abi::Result::kSuccess;
  });
}

inline abi::Result finalize(void* /*instance*/) { return abi::Result::kSuccess; }

inline abi::Result devices(int* count) {
  *count = 1;
  return abi::Result::kSuccess;
}

inline abi::Result check_device(int device) {
  if (device == 0) return abi::Result::kSuccess;
  return warn(abi::Result::kInvalidArgument,
              "there is no device " + std::to_string(device) + ", only device 0");
}

// What all kinds of properties have.
template <typename Properties>
void describe(Properties& properties, int receives, int memory_kinds, int device_type) {
  properties = {};
  properties.name = kName;
  properties.guid = host_identity();
  properties.memory_kinds = memory_kinds;
  properties.mbps = 10'000;
  properties.port = 1;
  properties.connections = 1 << 16;
  properties.receives = receives;
  properties.device_type = device_type;
  properties.merged.count = 1;
  properties.message_bytes = size_t{1} << 30;
  properties.collective_bytes = size_t{1} << 30;
  properties.requests_in_one = 1;
}

template <typename AListener>
abi::Result listen(void* /*instance*/, int device, void* handle, void** listener) {
  return guarded("listen", [&] {
    if (check_device(device) != abi::Result::kSuccess) return abi::Result::kInvalidArgument;
    Settings settings;
    Problem problem = read_settings(settings);
    if (!problem.empty()) return warn(abi::Result::kInvalidArgument, problem);
    auto fresh = std::make_unique<AListener>();
    problem = listen_on(settings, *fresh);
    if (!problem.empty()) return warn(abi::Result::kSystemError, problem);
    std::memset(handle, 0, abi::kHandleBytes);
    std::memcpy(handle, &fresh->address, sizeof fresh->address);
    *listener = fresh.release();
    return abi::Result::kSuccess;
  });
}

// Ends what NCCL has as a pointer.
template <typename T>
abi::Result close(void* object) {
  return guarded("close", [&] {
    const std::unique_ptr<T> end(static_cast<T*>(object));
    return abi::Result::kSuccess;
  });
}

}  // namespace fanfold::nccl_plugin::entry
