#include "base/error.h"

#include <system_error>

namespace fanfold {

BadArgument disagreement(const std::string& name, int64_t ours, int32_t rank, int64_t theirs,
                         int32_t peer) {
  return BadArgument(name,
                     std::to_string(ours) + " on rank " + std::to_string(rank) + " and " +
                         std::to_string(theirs) + " on rank " + std::to_string(peer),
                     "the same on all ranks");
}

BadArgument different_calls(const std::string& ours, int32_t rank, const std::string& theirs,
                            int32_t peer) {
  return BadArgument("call",
                     ours + " on rank " + std::to_string(rank) + " and " + theirs + " on rank " +
                         std::to_string(peer),
                     "the same on all ranks: they wait for each other, and neither can go on; make "
                     "the same calls in the same order on all ranks. Close this object on all of "
                     "them and make a new one");
}

RingFull::RingFull(RingFullReport report_)
    : std::runtime_error("a ring of " + std::to_string(report_.slots) +
                         " commands stayed full for " + std::to_string(report_.seconds) +
                         " s: " + std::to_string(report_.pushed) + " pushed, " +
                         std::to_string(report_.consumed) + " consumed"),
      report(report_) {}

SystemFailure::SystemFailure(const std::string& what, int error_number_)
    : std::runtime_error(what + ": " + std::generic_category().message(error_number_)),
      error_number(error_number_) {}

}  // namespace fanfold
