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

SystemFailure::SystemFailure(const std::string& what, int error_number_)
    : std::runtime_error(what + ": " + std::generic_category().message(error_number_)),
      error_number(error_number_) {}

}  // namespace fanfold
