// Checks that the arrays of a low-latency call hold all elements that it reads and writes.
#pragma once

#include "host/low_latency.h"

namespace fanfold {

// Each function throws BadArgument for the first array that is too short, and for a number in a
// handle that points out of an array: callers hold handles, and may overwrite them by mistake.
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyReceived& received);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyResult& result);

}  // namespace fanfold
