// What a high-throughput call is lent: whether each array holds what the call reads and writes.
#pragma once

#include "host/high_throughput.h"

namespace fanfold {

// Each throws BadArgument for the first array that is too short.
void check_lent(const HighThroughputTokens& tokens, bool routed);
// What exchange_counts writes.
void check_counts_lent(const HighThroughputPlan& plan, int32_t ranks);
// What dispatch_rows writes and every later call reads.
void check_rows_lent(const HighThroughputPlan& plan, int32_t ranks);
void check_lent(const HighThroughputReceived& received, const HighThroughputTokens& tokens,
                const HighThroughputPlan& plan, int32_t ranks);
void check_lent(const HighThroughputOutputs& outputs, const HighThroughputPlan& plan,
                int32_t ranks);
void check_lent(const HighThroughputResult& result, const HighThroughputOutputs& outputs,
                const HighThroughputPlan& plan);

// Throws BadArgument for numbers in a finished plan that lead out of an array: callers hold plans,
// and write over them by mistake.
void check_numbers(const HighThroughputPlan& plan, int32_t ranks);

}  // namespace fanfold
