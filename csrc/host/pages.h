#pragma once

#include <cstdint>

namespace fanfold {

// Asks the kernel to back a large fresh result with huge pages: its page faults would cost more than
// copying the rows does. Only a wish; where it is not granted nothing changes.
void ask_for_huge_pages(void* begin, int64_t bytes);

}  // namespace fanfold
