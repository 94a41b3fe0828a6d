// Detects that the process has been forked.
#pragma once

#include <cstdint>

namespace fanfold {

// The number of forks between the process that first called this function and this process. An
// object that belongs to one process stores the number when it is made and compares it on each use.
// The comparison costs a load; getpid() would cost a system call.
uint32_t fork_generation();

}  // namespace fanfold
