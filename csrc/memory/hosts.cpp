#include "memory/hosts.h"

#include <algorithm>

namespace fanfold {

Hosts::Hosts(std::vector<int32_t> host) : host_(std::move(host)) {
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    const int32_t own = host_of(rank);
    if (own < 0 || own >= ranks()) {
      throw BadArgument("host of rank " + std::to_string(rank), std::to_string(own),
                        "from 0 to " + std::to_string(ranks() - 1));
    }
    if (own >= count()) members_.resize(static_cast<size_t>(own) + 1);
    members_[static_cast<size_t>(own)].push_back(rank);
  }
  for (size_t number = 0; number < members_.size(); ++number) {
    if (!members_[number].empty()) continue;
    throw BadArgument("hosts", "without a rank on host " + std::to_string(number),
                      "numbered from 0 without gaps");
  }
  served_.resize(host_.size());
  for (int32_t source = 0; source < ranks(); ++source) {
    for (int32_t there = 0; there < count(); ++there) {
      if (there == host_of(source)) continue;
      auto& served = served_[static_cast<size_t>(gateway(source, there))];
      served.push_back(source);
      most_served_ = std::max(most_served_, static_cast<int32_t>(served.size()));
    }
  }
}

int32_t Hosts::gateway(int32_t source, int32_t host) const {
  const std::vector<int32_t>& own = members(host_of(source));
  const auto place = static_cast<size_t>(std::ranges::find(own, source) - own.begin());
  const std::vector<int32_t>& there = members(host);
  return there[place % there.size()];
}

int32_t Hosts::inbox(int32_t source, int32_t host) const {
  const std::vector<int32_t>& served = served_by(gateway(source, host));
  return static_cast<int32_t>(std::ranges::find(served, source) - served.begin());
}

}  // namespace fanfold
