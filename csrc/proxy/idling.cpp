#include "proxy/idling.h"

#include <algorithm>

namespace fanfold::proxy {
namespace {

using std::chrono::nanoseconds;

// Behind so long a silence what a thread waits for may come later by a 64th of it.
constexpr nanoseconds kLongSilence = std::chrono::milliseconds(4);
constexpr int kNapsOfSilence = 64;
// Without anything to wait for, one that has slept so often sleeps longer: each time costs some
// 20 us.
constexpr int32_t kShortSleeps = 64;
constexpr int kLongSleep = 4;  // times the short one

}  // namespace

nanoseconds Idling::sleep(Time now, bool waits) {
  const nanoseconds silence = now - since_;
  if (silence < awake_ || (waits && silence < kLongSilence)) {
    sleeps_ = 0;
    return nanoseconds(0);
  }
  sleeps_ = waits ? 0 : std::min(sleeps_ + 1, kShortSleeps);
  const nanoseconds longest = idle_sleep_ * (sleeps_ < kShortSleeps ? 1 : kLongSleep);
  const bool may_come = waits || awake_.count() > 0;
  return may_come ? std::min(longest, silence / kNapsOfSilence) : longest;
}

}  // namespace fanfold::proxy
