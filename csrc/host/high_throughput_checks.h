// Checks that the arrays of a high-throughput call hold all elements that it reads and writes.
#pragma once

#include "host/high_throughput.h"

namespace fanfold {

// Each function throws BadArgument for the first array that is too short.
void check_lent(const HighThroughputTokens& tokens, bool routed);
// Checks the arrays that exchange_counts writes.
void check_counts_lent(const HighThroughputPlan& plan, int32_t ranks);
// Checks the arrays that dispatch_rows writes and every later call reads.
void check_rows_lent(const HighThroughputPlan& plan, int32_t ranks);
void check_lent(const HighThroughputReceived& received, const HighThroughputTokens& tokens,
                const HighThroughputPlan& plan, int32_t ranks);
void check_lent(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                int32_t ranks);
void check_lent(const HighThroughputResult& result, const HighThroughputOutputs& outputs,
                const HighThroughputPlan& plan);

// Throws BadArgument for a number in a finished plan that points out of an array: callers hold
// plans, and may overwrite them by mistake.
void check_numbers(const HighThroughputPlan& plan, int32_t ranks);

}  // namespace fanfold
