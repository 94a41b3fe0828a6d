#include "nccl_plugin/settings.h"

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

namespace fanfold::nccl_plugin {
namespace {

constexpr const char* kVariable = "FANFOLD_NCCL_PLUGIN";
constexpr int64_t kMostTimeoutMs = 86'400'000;  // a day
constexpr int64_t kMostDelayUs = 60'000'000;    // a minute

std::string environment(const char* name) {
  // NCCL itself reads the environment from the same threads, and nothing here writes it.
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? std::string() : std::string(value);
}

Problem wrong(std::string_view key, std::string_view value, const std::string& wanted) {
  return std::string(kVariable) + ": " + std::string(key) + " is '" + std::string(value) +
         "', but must be " + wanted;
}

template <typename T>
Problem number(std::string_view key, std::string_view value, T least, T most, T& into) {
  T parsed = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (error != std::errc() || end != value.data() + value.size() || parsed < least ||
      parsed > most) {
    return wrong(key, value,
                 "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  into = parsed;
  return {};
}

Problem set(std::string_view key, std::string_view value, Settings& settings) {
  if (key == "interface") {
    settings.interface = value;
    return {};
  }
  if (key == "wire") {
    if (value != "tcp" && value != "auto") return wrong(key, value, "'auto' or 'tcp'");
    settings.tcp_only = value == "tcp";
    return {};
  }
  if (key == "timeout_ms") {
    return number<int64_t>(key, value, 1, kMostTimeoutMs, settings.timeout_ms);
  }
  if (key == "seed") return number<uint64_t>(key, value, 0, UINT64_MAX, settings.seed);
  if (key == "delay_us") return number<int64_t>(key, value, 0, kMostDelayUs, settings.delay_us);
  int32_t* rate = nullptr;
  if (key == "swap_one_in") rate = &settings.swap_one_in;
  if (key == "error_one_in") rate = &settings.error_one_in;
  if (rate != nullptr) return number<int32_t>(key, value, 0, INT32_MAX, *rate);
  return std::string(kVariable) + ": there is no key '" + std::string(key) +
         "'; the keys are interface, wire, timeout_ms, seed, delay_us, swap_one_in, error_one_in";
}

// FNV-1a: the hash must be the same on all ranks, whatever their standard library.
uint64_t hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325U;
  for (const char letter : text) {
    value = (value ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  }
  return value;
}

}  // namespace

Problem parse_settings(std::string_view text, Settings& settings) {
  Settings parsed = settings;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(item.size() == text.size() ? item.size() : item.size() + 1);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      return std::string(kVariable) + ": '" + std::string(item) + "' has no '='; write key=value";
    }
    Problem problem = set(item.substr(0, equals), item.substr(equals + 1), parsed);
    if (!problem.empty()) return problem;
  }
  settings = std::move(parsed);
  return {};
}

Problem read_settings(Settings& settings) {
  return parse_settings(environment(kVariable), settings);
}

uint64_t host_identity() {
  std::string host;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, host);
  for (const char* space : {"/proc/self/ns/ipc", "/proc/self/ns/mnt", "/proc/self/ns/pid"}) {
    std::error_code error;
    host += std::filesystem::read_symlink(space, error).string();
  }
  return hash(host + environment("NCCL_HOSTID"));
}

}  // namespace fanfold::nccl_plugin
