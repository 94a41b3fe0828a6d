// How long a thread that has found nothing to do sleeps before it looks again.
#pragma once

#include <chrono>
#include <cstdint>

#include "proxy/options.h"

namespace fanfold::proxy {

class Idling {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Idling(const ProxyOptions& options, Time now)
      : awake_(options.awake), idle_sleep_(options.idle_sleep), since_(now) {}

  // Something has been done, or there is something new to wait for.
  void restart(Time now) {
    since_ = now;
    sleeps_ = 0;
  }
  // Nothing was there to be done. `waits`: something is outstanding, or a call is in flight.
  // Returns zero while the thread shall go on polling.
  std::chrono::nanoseconds sleep(Time now, bool waits);

 private:
  std::chrono::nanoseconds awake_;
  std::chrono::nanoseconds idle_sleep_;
  Time since_;
  int32_t sleeps_ = 0;  // without a break, with nothing to wait for
};

}  // namespace fanfold::proxy
