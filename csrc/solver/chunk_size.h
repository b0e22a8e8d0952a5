// Tries chunk sizes from large to small and keeps the largest that balances. Knows no algorithm from inside.
#pragma once

#include "solver/dispatch.h"

namespace magi {

// One algorithm on one grid (dispatch.cpp).
DispatchOutcome solve_on_grid(const DispatchDesc& desc, const DispatchRequest& request);
bool is_balanced(const DispatchOutcome& outcome, const BalanceLimits& limits);
// By excess area, then excess tokens, then key rows.
bool is_better_outcome(const DispatchOutcome& a, const DispatchOutcome& b, const BalanceLimits& limits);

// Sizes to try, falling. At most kMaxChunksPerRank chunks per rank; multiples of 128 as soon as the tokens allow that.
std::vector<int64_t> candidate_chunk_sizes(int64_t total_tokens, int32_t cp_size, bool is_even);

}  // namespace magi
