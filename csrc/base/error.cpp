#include "base/error.h"

#include <system_error>

namespace fanfold {

SystemFailure::SystemFailure(const std::string& what, int error_number_)
    : std::runtime_error(what + ": " + std::generic_category().message(error_number_)),
      error_number(error_number_) {}

}  // namespace fanfold
