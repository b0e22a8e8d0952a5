// Tries chunk sizes from large to small and keeps the largest that balances. Knows no algorithm from inside.
#pragma once

#include "solver/dispatch.h"

namespace magi {

// One algorithm on one grid (dispatch.cpp).
DispatchOutcome solve_on_grid(const DispatchDesc& desc, const DispatchRequest& request);
bool is_balanced(const DispatchOutcome& outcome, const BalanceLimits& limits);
// By excess area, then excess tokens, then key rows.
bool is_better_outcome(const DispatchOutcome& a, const DispatchOutcome& b, const BalanceLimits& limits);
// Better balance, or the same with a good part of the key rows saved: what justifies smaller chunks.
bool is_worth_finer(const DispatchOutcome& finer, const DispatchOutcome& coarser, const BalanceLimits& limits);

// Sizes to try, falling: equal shares, then halves of them in multiples of 128 (of less when the tokens are few).
std::vector<int64_t> candidate_chunk_sizes(int64_t total_tokens, int32_t cp_size, bool is_even);

}  // namespace magi
