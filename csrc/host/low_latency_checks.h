// What a low-latency call is lent: whether each array holds what the call reads and writes.
#pragma once

#include "host/low_latency.h"

namespace fanfold {

// Each throws BadArgument for the first array that is too short, and for numbers in a handle that
// lead out of an array: callers hold handles, and write over them by mistake.
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyReceived& received);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs);
void check_lent(const LowLatencyGeometry& geometry, const LowLatencyResult& result);

}  // namespace fanfold
