// Commands as the host makes them.
#pragma once

#include "layout/command.h"

namespace fanfold {

// The command of `fields`. Throws BadArgument with the field, its value and its bound if one of
// them does not fit.
Command make_command(const CommandFields& fields);

}  // namespace fanfold
