// The ring's algorithm in every interleaving of two producers with three pushes each and a
// consumer: no slot is overwritten before it is consumed, nothing is lost, torn, repeated or out of
// a producer's order, and from every state all commands can still be consumed.
#include <array>
#include <cstdint>
#include <initializer_list>

#include "check.hpp"
#include "ranks.hpp"
#include "ring_model.hpp"

using namespace fanfold;
using namespace fanfold::ring_model;

namespace {

constexpr std::array<std::array<Way, 2>, 3> kWays = {{{Way::kTryPush, Way::kTryPush},
                                                      {Way::kTicketFirst, Way::kTicketFirst},
                                                      {Way::kTryPush, Way::kTicketFirst}}};

// The tests' first tickets begin a lap, lie inside one, and let the counts pass 32 and 64 bits.
void expect_sound(uint64_t first, Publishes publishes) {
  for (const auto& ways : kWays) {
    if (kRoundsShare > 1 && ways[0] == ways[1]) continue;  // the mixed one has both
    const Findings found = Model({.first = first, .ways = ways, .publishes = publishes}).explore();
    CHECK_EQ(found.violation, "");
    CHECK_EQ(found.stuck, 0u);
    CHECK(found.states > 1000);  // the model has explored something
  }
}

Findings broken(Fault fault, Way way) {
  return Model({.ways = {way, way}, .publishes = Publishes::kAnyTime, .fault = fault}).explore();
}

}  // namespace

TEST(ring_model_with_a_consumer_that_publishes_at_any_time) {
  expect_sound(1, Publishes::kAnyTime);
  if (kRoundsShare == 1) expect_sound(~uint64_t{0} - 2, Publishes::kAnyTime);
}

TEST(ring_model_with_a_consumer_that_publishes_when_it_finds_none) {
  expect_sound((uint64_t{1} << 32) - 3, Publishes::kWhenEmpty);
  if (kRoundsShare == 1) expect_sound(0, Publishes::kWhenEmpty);
}

TEST(ring_model_finds_what_is_broken) {
  for (const Way way : {Way::kTryPush, Way::kTicketFirst}) {
    CHECK_EQ(broken(Fault::kOneSlotMore, way).violation,
             "a slot is overwritten before it is consumed");
    CHECK_EQ(broken(Fault::kPublishesTooEarly, way).violation,
             "a slot is overwritten before it is consumed");
    CHECK(!broken(Fault::kHalfIsEnough, way).violation.empty());
    const Findings silent = broken(Fault::kNeverPublishes, way);
    CHECK_EQ(silent.violation, "");
    CHECK_EQ(silent.stuck, silent.states);
  }
  CHECK(!broken(Fault::kRacyTicket, Way::kTryPush).violation.empty());
}
