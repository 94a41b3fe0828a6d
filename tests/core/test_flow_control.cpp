// What credits are for: many senders of one receiver whose link has a queue of bounded length.
#include <cstdint>

#include "base/error.h"
#include "check.hpp"
#include "proxy/measure_flow_control.h"

using namespace fanfold;
using namespace fanfold::proxy;

namespace {

// 50 GB/s, and a queue that holds 7 senders' credits and a packet of all.
IncastOptions incast(int64_t chunk_bytes, int64_t credit_bytes) {
  IncastOptions options;
  options.senders = 8;
  options.bytes = int64_t{2} << 20;
  options.chunk_bytes = chunk_bytes;
  options.credit.bytes = credit_bytes;
  options.link = {.bytes_per_us = 50'000, .buffer_bytes = int64_t{2} << 20};
  return options;
}

constexpr int64_t kCredit = int64_t{256} << 10;
constexpr int64_t kNoLimit = int64_t{1} << 40;

// Of the link's bandwidth, in percent.
int64_t share(const Incast& result) { return result.bytes * 1'000 / result.ns / 500; }

}  // namespace

TEST(flow_control_keeps_the_bandwidth_of_all_chunks) {
  for (const int64_t chunk :
       {int64_t{1} << 10, int64_t{16} << 10, int64_t{256} << 10, int64_t{2} << 20}) {
    const Incast result = measure_incast(incast(chunk, kCredit));
    CHECK_EQ(result.bytes, 8 * (int64_t{2} << 20));
    CHECK_EQ(result.dropped, 0);
    CHECK(result.in_flight <= kCredit);
    CHECK(share(result) >= 85);
  }
}

TEST(flow_control_without_credits_collapses) {
  const Incast small = measure_incast(incast(int64_t{1} << 10, kNoLimit));
  CHECK_EQ(small.dropped, 0);  // 128 messages of each sender fit into the queue
  const Incast large = measure_incast(incast(int64_t{64} << 10, kNoLimit));
  CHECK_EQ(large.bytes, 8 * (int64_t{2} << 20));  // late, but all of it
  CHECK(large.in_flight > kCredit);
  CHECK(large.dropped > 0);
  CHECK(share(large) < 50);
}

TEST(flow_control_depends_on_its_options_alone) {
  const Incast first = measure_incast(incast(int64_t{64} << 10, kNoLimit));
  const Incast second = measure_incast(incast(int64_t{64} << 10, kNoLimit));
  CHECK_EQ(first.ns, second.ns);
  CHECK_EQ(first.packets, second.packets);
}

TEST(flow_control_refuses_options_out_of_bounds) {
  IncastOptions options = incast(1'000, kCredit);
  CHECK_THROWS(measure_incast(options), BadArgument);  // no multiple of 16
  options = incast(1'024, 8);
  CHECK_THROWS(measure_incast(options), BadArgument);
  options = incast(1'024, kCredit);
  options.senders = 0;
  CHECK_THROWS(measure_incast(options), BadArgument);
  options = incast(1'024, kCredit);
  options.bytes = int64_t{1} << 40;
  CHECK_THROWS(measure_incast(options), BadArgument);
}
