// Messages through NCCL's logger, so that they appear where NCCL_DEBUG=WARN puts NCCL's own.
#pragma once

#include <string>

#include "nccl_plugin/abi.h"

namespace fanfold::nccl_plugin {

// Why something failed, in words for a user; empty if nothing failed.
using Problem = std::string;

// The logger belongs to the process: each `init` of each table passes the same one.
void set_logger(abi::Logger logger);

void info(const std::string& message);
// Logs the message, and returns `result`.
abi::Result warn(abi::Result result, const std::string& message);

// "the call: the system's words for errno"
Problem system_problem(const std::string& call, int error_number);

}  // namespace fanfold::nccl_plugin
