#include "cuda/gin_hosts.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"

namespace fanfold::cuda {

std::vector<std::byte> hosts_block(const GinWindow& window, uintptr_t at) {
  const size_t ranks = window.hosts.size();
  const bool is_power =
      window.slots > 0 && std::has_single_bit(static_cast<uint32_t>(window.slots));
  if (std::cmp_greater(ranks, kMostRanks) || window.words.size() != ranks ||
      window.rows.size() != ranks || std::cmp_greater_equal(window.rank, ranks) || !is_power) {
    throw BadArgument("slots and ranks",
                      std::to_string(window.slots) + " and " + std::to_string(ranks),
                      "a power of two, and as many hosts as words and rows");
  }
  constexpr int64_t kGinAt = align_up(int64_t{sizeof(LowLatencyHosts)}, kAreaAlignment);
  const auto heads = std::make_unique<LowLatencyHosts>();
  RemoteHosts& remote = heads->remote;
  const auto gin = std::make_unique<GinHosts>();
  auto* const memory = reinterpret_cast<unsigned char*>(window.memory);
  for (size_t peer = 0; peer < ranks; ++peer) {
    if (window.hosts[peer] == window.hosts[static_cast<size_t>(window.rank)]) continue;
    remote.elsewhere[peer / 32] |= 1u << (peer % 32);
    remote.sent_rows[peer] = memory + window.rows[peer];
  }
  remote.received = remote.received_rows = memory;
  remote.gin = reinterpret_cast<GinHosts*>(at + static_cast<uintptr_t>(kGinAt));
  gin->communicator = reinterpret_cast<const void*>(window.communicator);
  gin->window = reinterpret_cast<void*>(window.window);
  gin->memory = memory;
  gin->received = window.received;
  gin->sent = window.sent;
  gin->slots = window.slots;
  gin->rank = window.rank;
  std::ranges::copy(window.words, std::begin(gin->words));
  std::ranges::copy(window.rows, std::begin(gin->rows));
  std::vector<std::byte> block(static_cast<size_t>(kGinAt) + sizeof(GinHosts));
  std::memcpy(block.data(), heads.get(), sizeof *heads);
  std::memcpy(block.data() + kGinAt, gin.get(), sizeof *gin);
  return block;
}

}  // namespace fanfold::cuda
