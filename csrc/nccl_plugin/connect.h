// Opens the links between all ranks of a communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "nccl_plugin/link.h"

namespace fanfold::nccl_plugin {

// What a connecting side sends first.
struct Hello {
  uint64_t magic = Address::kMagic;
  uint64_t nonce = 0;
  int64_t rank = 0;
  int64_t pid = 0;
  int64_t rings = -1;  // the descriptor of shared memory in that process; -1: none
};

// Stores one link for each other rank. Each pair of ranks has one connection, which the lower rank
// opens. The kernel completes it before the higher rank accepts, so that ranks may come here in any
// order. Ranks of one host then exchange bytes through shared memory.
Problem connect_all(const Listener& listener, std::span<const Address> addresses, int32_t rank,
                    std::vector<std::unique_ptr<Link>>& links);

}  // namespace fanfold::nccl_plugin
