#include "base/cores.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

namespace fanfold {
namespace {

constexpr int32_t kMostCores = 1 << 16;  // more than any system has

std::optional<int32_t> core_of(std::string_view text) {
  int32_t core = -1;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [parsed, error] = std::from_chars(begin, end, core);
  const bool valid = error == std::errc() && parsed == end && core >= 0 && core < kMostCores;
  return valid ? std::optional(core) : std::nullopt;
}

}  // namespace

std::vector<int32_t> parse_cores(std::string_view list) {
  std::vector<int32_t> cores;
  while (!list.empty()) {
    const std::string_view range = list.substr(0, list.find(','));
    const size_t dash = range.find('-');
    const std::optional<int32_t> first = core_of(range.substr(0, dash));
    const auto last = dash == range.npos ? first : core_of(range.substr(dash + 1));
    if (!first || !last) return {};
    for (int32_t core = *first; core <= *last; ++core) cores.push_back(core);
    list.remove_prefix(std::min(list.size(), range.size() + 1));
  }
  return cores;
}

std::vector<int32_t> cores_of_node(int32_t node) {
  if (node < 0) return {};
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::string list;
  std::getline(file, list);
  return parse_cores(list);
}

}  // namespace fanfold
