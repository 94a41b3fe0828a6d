// Which rank is on which host, and who receives for whom.
//
// What a source sends once to a whole host goes to the source's *gateway* there: the rank with the
// same place among the ranks of its host, so that the ranks of a host share the work.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace fanfold {

class Hosts {
 public:
  // All ranks on one host.
  explicit Hosts(int32_t ranks) : Hosts(std::vector<int32_t>(static_cast<size_t>(ranks), 0)) {}
  // `host[r]` is the host of rank r; hosts are numbered from 0 without gaps. Throws BadArgument.
  explicit Hosts(std::vector<int32_t> host);

  int32_t ranks() const { return static_cast<int32_t>(host_.size()); }
  int32_t count() const { return static_cast<int32_t>(members_.size()); }
  bool several() const { return count() > 1; }
  int32_t host_of(int32_t rank) const { return host_[static_cast<size_t>(rank)]; }
  bool together(int32_t rank, int32_t other) const { return host_of(rank) == host_of(other); }
  // The ranks of a host, ascending.
  const std::vector<int32_t>& members(int32_t host) const {
    return members_[static_cast<size_t>(host)];
  }

  // The rank on `host` that receives for its host what `source`, on another one, sends to it.
  int32_t gateway(int32_t source, int32_t host) const;
  // The sources that `rank` is the gateway of, ascending.
  const std::vector<int32_t>& served_by(int32_t rank) const {
    return served_[static_cast<size_t>(rank)];
  }
  // The place of `source` among the sources of its gateway on `host`.
  int32_t inbox(int32_t source, int32_t host) const;
  // The most sources that any rank is the gateway of.
  int32_t most_served() const { return most_served_; }

 private:
  std::vector<int32_t> host_;
  std::vector<std::vector<int32_t>> members_;
  std::vector<std::vector<int32_t>> served_;
  int32_t most_served_ = 0;
};

}  // namespace fanfold
