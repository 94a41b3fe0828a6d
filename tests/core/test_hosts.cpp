// Which rank is on which host, and who receives for whom.
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "memory/hosts.h"

using namespace fanfold;

TEST(hosts_of_one_host_have_no_gateways) {
  const Hosts hosts(3);
  CHECK_EQ(hosts.count(), 1);
  CHECK(!hosts.several());
  CHECK_EQ(hosts.members(0), (std::vector<int32_t>{0, 1, 2}));
  CHECK_EQ(hosts.most_served(), 0);
}

TEST(hosts_of_equal_size_have_gateways_at_the_same_place) {
  const Hosts hosts({0, 0, 1, 1, 2, 2});
  CHECK_EQ(hosts.gateway(1, 1), 3);
  CHECK_EQ(hosts.gateway(1, 2), 5);
  CHECK_EQ(hosts.gateway(4, 0), 0);
  CHECK_EQ(hosts.served_by(3), (std::vector<int32_t>{1, 5}));
  CHECK_EQ(hosts.inbox(1, 1), 0);
  CHECK_EQ(hosts.inbox(5, 1), 1);
  CHECK_EQ(hosts.most_served(), 2);
}

// The ranks of a host need not be neighbours, and hosts need not be equally large.
TEST(hosts_of_any_size_serve_every_source_once) {
  const Hosts hosts({0, 1, 0, 0, 1, 0});
  CHECK_EQ(hosts.members(1), (std::vector<int32_t>{1, 4}));
  for (int32_t source = 0; source < hosts.ranks(); ++source) {
    const int32_t there = 1 - hosts.host_of(source);
    int32_t served = 0;
    for (const int32_t rank : hosts.members(there)) {
      for (const int32_t other : hosts.served_by(rank)) served += other == source ? 1 : 0;
    }
    CHECK_EQ(served, 1);
  }
  // Two gateways for the four ranks of host 0.
  CHECK_EQ(hosts.served_by(1), (std::vector<int32_t>{0, 3}));
  CHECK_EQ(hosts.served_by(4), (std::vector<int32_t>{2, 5}));
}

TEST(hosts_refuse_gaps) {
  CHECK_THROWS(Hosts({0, 2}), BadArgument);
  CHECK_THROWS(Hosts({1, 1}), BadArgument);
  CHECK_THROWS(Hosts({0, -1}), BadArgument);
}
