// The queue in front of a link of the loopback network. LinkOptions describes the model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "transport/loopback.h"

namespace fanfold::transport::loopback {

// Counts picoseconds inside, so that the times of many packets add up without rounding.
class Link {
 public:
  explicit Link(const LinkOptions& options) : options_(options) {}

  // Bytes on the link, with headers, of packets `first` to `last` (excluded) of a write.
  static int64_t wire_bytes(const LinkOptions& options, int64_t bytes, int64_t first,
                            int64_t last) {
    const int64_t begin = std::min(first * options.packet_bytes, bytes);
    const int64_t end = std::min(last * options.packet_bytes, bytes);
    return end - begin + (last - first) * options.header_bytes;
  }
  static int64_t packets(const LinkOptions& options, int64_t bytes) {
    return std::max<int64_t>(1, (bytes + options.packet_bytes - 1) / options.packet_bytes);
  }

  // The time at which `bytes` that enter the queue now have left the link; none if they find no
  // room in the buffer.
  std::optional<int64_t> enqueue(int64_t now, int64_t bytes) {
    if (options_.buffer_bytes != 0 && queued(now) + bytes > options_.buffer_bytes) return {};
    return reserve(now, bytes);
  }
  // The same for a queue in the sender's memory, which has room for everything.
  int64_t reserve(int64_t now, int64_t bytes) {
    free_ps_ = std::max(free_ps_, now * 1000) + occupied_ps(bytes);
    return (free_ps_ + 999) / 1000;
  }
  int64_t queued(int64_t now) const {
    const int64_t waits = std::max<int64_t>(0, free_ps_ - now * 1000);
    // In two steps: the product of a long wait and the bandwidth does not fit 64 bits.
    return waits / 1'000'000 * options_.bytes_per_us +
           waits % 1'000'000 * options_.bytes_per_us / 1'000'000;
  }

  // How long, in picoseconds, `bytes` occupy the link.
  int64_t occupied_ps(int64_t bytes) const { return bytes * 1'000'000 / options_.bytes_per_us; }
  int64_t free_ps() const { return free_ps_; }

 private:
  LinkOptions options_;
  int64_t free_ps_ = 0;  // when the last packet in the queue will have left
};

}  // namespace fanfold::transport::loopback
