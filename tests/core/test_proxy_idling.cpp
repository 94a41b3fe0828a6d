// When a proxy's thread polls, and when it sleeps. Of time that the test counts.
#include <chrono>

#include "check.hpp"
#include "proxy/idling.h"
#include "proxy/options.h"

using namespace fanfold;
using namespace std::chrono_literals;
using std::chrono::nanoseconds;

namespace {

// A thread for which a millisecond passes between any two things it does.
class Thread {
 public:
  explicit Thread(nanoseconds awake) {
    proxy::ProxyOptions options;
    options.awake = awake;
    idling_ = proxy::Idling(options, now_);
  }

  void restart() { idling_.restart(now_ += 1ms); }
  nanoseconds sleep(bool waits) { return idling_.sleep(now_ += 1ms, waits); }
  // Looks `times`, and returns what the last look gives.
  nanoseconds sleep(bool waits, int times) {
    for (int i = 1; i < times; ++i) static_cast<void>(sleep(waits));
    return sleep(waits);
  }

 private:
  proxy::Idling::Time now_;
  proxy::Idling idling_{{}, now_};
};

}  // namespace

TEST(proxy_sleeps_where_nothing_is_to_come) {
  Thread thread(0ns);
  CHECK(thread.sleep(false) == 1ms);
  CHECK(thread.sleep(false, 62) == 1ms);
  CHECK(thread.sleep(false) == 4ms);
  CHECK(thread.sleep(false, 100) == 4ms);
  thread.restart();
  CHECK(thread.sleep(false) == 1ms);
}

TEST(proxy_polls_for_what_it_waits_for_and_naps_behind_a_long_silence) {
  Thread thread(0ns);
  CHECK(thread.sleep(false, 100) == 4ms);
  thread.restart();
  CHECK(thread.sleep(true, 3) == 0ns);
  CHECK(thread.sleep(true) == nanoseconds(4ms) / 64);
  CHECK(thread.sleep(true, 28) == nanoseconds(32ms) / 64);
  CHECK(thread.sleep(true, 32) == 1ms);
  CHECK(thread.sleep(true, 100) == 1ms);
  thread.restart();
  CHECK(thread.sleep(true, 3) == 0ns);
  CHECK(thread.sleep(true) == nanoseconds(4ms) / 64);
  CHECK(thread.sleep(false) == 1ms);
}

TEST(proxy_polls_as_long_as_kernels_may_push) {
  Thread thread(20ms);
  CHECK(thread.sleep(false, 19) == 0ns);
  CHECK(thread.sleep(false) == nanoseconds(20ms) / 64);  // they may push still
  CHECK(thread.sleep(false, 44) == 1ms);
  CHECK(thread.sleep(false, 300) == 4ms);
  thread.restart();
  CHECK(thread.sleep(true, 19) == 0ns);
  CHECK(thread.sleep(true) == nanoseconds(20ms) / 64);
}
