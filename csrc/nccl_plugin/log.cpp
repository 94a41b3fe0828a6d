#include "nccl_plugin/log.h"

#include <atomic>
#include <system_error>

namespace fanfold::nccl_plugin {
namespace {

std::atomic<abi::Logger>& logger() {
  static std::atomic<abi::Logger> of_process = nullptr;
  return of_process;
}

void log(int level, const std::string& message) {
  const abi::Logger write = logger().load();
  if (write == nullptr) return;
  write(level, abi::kLogInit | abi::kLogNet, "nccl-net-fanfold", 0, "NET/Fanfold: %s",
        message.c_str());
}

}  // namespace

void set_logger(abi::Logger logger_) {
  if (logger_ != nullptr) logger().store(logger_);
}

void info(const std::string& message) { log(abi::kLogInfo, message); }

abi::Result warn(abi::Result result, const std::string& message) {
  log(abi::kLogWarn, message);
  return result;
}

Problem system_problem(const std::string& call, int error_number) {
  return call + ": " + std::system_category().message(error_number);
}

}  // namespace fanfold::nccl_plugin
