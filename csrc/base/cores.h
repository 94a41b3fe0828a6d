// Which cores belong together.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace fanfold {

// The cores of a list as the system writes it, "0-3,8". Empty if it is malformed.
std::vector<int32_t> parse_cores(std::string_view list);

// The cores of a NUMA node; empty if nothing is known of it.
std::vector<int32_t> cores_of_node(int32_t node);

}  // namespace fanfold
