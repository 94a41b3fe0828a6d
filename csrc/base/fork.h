// Which process this is, in a line of forks.
#pragma once

#include <cstdint>

namespace fanfold {

// Forks between the process that first asked and this one. What belongs to one process keeps the
// number from when it was made, and compares: a load each, where getpid is a system call.
uint32_t fork_generation();

}  // namespace fanfold
